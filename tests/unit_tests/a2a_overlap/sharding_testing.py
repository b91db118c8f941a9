"""Small models, hand-driven iterations and plain references shared by the tests of the sharding adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from host_models import parallel as parallel  # for the tests that use this file
from host_models import seed
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from combined_1f1b.fsdp_adapter import mfsdp_v2
from combined_1f1b.fsdp_adapter.data_parallel import ShardedDataParallel, shard_model
from combined_1f1b.fsdp_adapter.units import innermost

SEQUENCE, BATCH, VOCABULARY = 8, 2, 37  # an odd vocabulary: no shard of the embedding is even

TYPES = {
    "fp32": {"bf16": False, "fp16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32},
    "bf16": {"bf16": True, "fp16": False, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16},
    "fp16": {"bf16": False, "fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16},
}


def build(
    *,
    dtype: str = "fp32",
    tied: bool = False,
    vocabulary: int = VOCABULARY,
    pre: bool = True,
    post: bool = True,
    **changes: Any,
) -> torch.nn.Module:
    """A GPTModel of hidden 12, 4 experts, 3 layers (the middle one dense), in a Float16Module when half precision."""
    settings = {
        "num_layers": 3,
        "hidden_size": 12,
        "ffn_hidden_size": 20,
        "num_attention_heads": 2,
        "num_moe_experts": 4,
        "moe_layer_freq": [1, 0, 1],
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_ffn_hidden_size": 20,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gradient_accumulation_fusion": False,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        **TYPES[dtype],
    }
    config = TransformerConfig(**{**settings, **changes})
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    seed(11)
    model = GPTModel(
        config,
        transformer_layer_spec=spec,
        vocab_size=vocabulary,
        max_sequence_length=SEQUENCE,
        pre_process=pre,
        post_process=post,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
        share_embeddings_and_output_weights=tied,
    ).cuda(torch.cuda.current_device())
    return model if dtype == "fp32" else Float16Module(config, model)


def shard(model: torch.nn.Module, *, register_hooks: bool = False, **arguments: Any) -> ShardedDataParallel:
    """Shard a model for one of the modes, with the flag set as that mode needs it."""
    config = innermost(model).config
    config.overlap_moe_expert_parallel_comm = not register_hooks
    return shard_model(model, config, register_hooks=register_hooks, **arguments)


def batches(count: int, *, offset: int = 0) -> list[dict[str, torch.Tensor]]:
    """Batches of tokens [BATCH, SEQUENCE], different on every data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * offset + parallel_state.get_data_parallel_rank())
    made = []
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        made.append({"tokens": tokens.cuda(), "labels": tokens.roll(-1, dims=1).cuda()})
    return made


def loss_of(model: Callable[..., torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output_of(model, batch).float().mean()


def output_of(model: Callable[..., torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    positions = torch.arange(SEQUENCE, device="cuda").expand(BATCH, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda").triu(1)
    return model(batch["tokens"], positions, mask, labels=batch["labels"])


def drive(wrapped: ShardedDataParallel, data: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """One iteration by hand: gather all, forward, backward, reduce all, free all, per micro-batch; the losses."""
    driver = wrapped.sharding_driver()
    losses = []
    driver.begin_iteration()
    for number, batch in enumerate(data):
        with driver.gathered(), driver.recording():
            loss = loss_of(wrapped, batch)
            driver.begin_backward()
            loss.backward()
            for unit in driver.trainable_units:
                driver.reduce(unit, is_last=number == len(data) - 1)
        losses.append(loss.detach())
    driver.finish_iteration()
    return losses


def hooked(wrapped: ShardedDataParallel, data: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """One iteration as Megatron's default schedule runs it on a hook-driven wrapper; the losses."""
    losses = []
    for number, batch in enumerate(data):
        with wrapped.no_sync() if number < len(data) - 1 else contextlib.nullcontext():
            loss = loss_of(wrapped, batch)
            loss.backward()
        losses.append(loss.detach())
    wrapped.finish_grad_sync()
    return losses


class PlainReference:
    """The same training without sharding: full fp32 main weights, gradients averaged per micro-batch.

    With `like` the averages run over the packed buffers of that wrapper's groups: from three ranks on, the order of a
    sum depends on where an element sits in the buffer. Without it every gradient is all-reduced by itself.
    """

    def __init__(self, model: torch.nn.Module, make_optimizer: Any, *, like: ShardedDataParallel | None = None) -> None:
        self.model = model
        self.names = dict(innermost(model).named_parameters())
        self.main = {name: parameter.detach().float().clone() for name, parameter in self.names.items()}
        for name, parameter in self.names.items():
            self.main[name].requires_grad_(parameter.requires_grad)
        self.optimizer = make_optimizer([main for main in self.main.values() if main.requires_grad])
        self.like = like

    def iterate(self, data: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        losses = []
        for main in self.main.values():
            main.grad = None
        for batch in data:
            loss = loss_of(self.model, batch)
            loss.backward()
            for name, gradient in self._reduced().items():
                main = self.main[name]
                main.grad = gradient if main.grad is None else main.grad.add_(gradient)
            losses.append(loss.detach())
        return losses

    def step(self) -> None:
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.names.items():
                parameter.copy_(self.main[name])

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: main.grad for name, main in self.main.items() if main.requires_grad}

    def _reduced(self) -> dict[str, torch.Tensor]:
        local = {}
        for name, parameter in self.names.items():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                local[name], parameter.grad = gradient * self._factor(parameter), None
        return self._packed(local) if self.like is not None else self._separate(local)

    def _factor(self, parameter: torch.nn.Parameter) -> float:
        dense = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        expert = parallel_state.get_expert_data_parallel_world_size()
        is_expert = not getattr(parameter, "allreduce", True)
        if innermost(self.model).config.calculate_per_token_loss:
            return expert if is_expert else dense
        return expert / dense if is_expert else 1.0

    def _separate(self, local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        reduced = {}
        for name, gradient in local.items():
            if getattr(self.names[name], "allreduce", True):
                group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            else:
                group = parallel_state.get_expert_data_parallel_group()
            dist.all_reduce(gradient, group=group)
            reduced[name] = (gradient / group.size()).float()
        return reduced

    def _packed(self, local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        reduced = {}
        for prefix, group in self.like.named_groups:
            names = [prefix + name for name in group.parameter_names]
            if not group.requires_grad:
                continue
            buffer = mfsdp_v2.DBuffer(
                mesh=group.mesh,
                placements=[mfsdp_v2.Partial(dist.ReduceOp.AVG)],
                tensor_shapes=[local[name].shape for name in names],
                dtype=local[names[0]].dtype,
                device=local[names[0]].device,
            )
            for index, name in enumerate(names):
                buffer.get_local_tensor(index).copy_(local[name])
            full = buffer.redistribute(group.main_weight.placements).redistribute([mfsdp_v2.Replicate()])
            for index, name in enumerate(names):
                reduced[name] = full.get_local_tensor(index).float()
        return reduced


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def differing(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> set[str]:
    """The names under which the two hold different bits."""
    assert tensors.keys() == others.keys(), tensors.keys() ^ others.keys()
    assert tensors
    return {name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])}


def freeze(model: torch.nn.Module, prefix: str) -> torch.nn.Module:
    """The model with every parameter frozen whose name in the innermost model starts with the prefix."""
    frozen = [parameter for name, parameter in innermost(model).named_parameters() if name.startswith(prefix)]
    assert frozen, prefix
    for parameter in frozen:
        parameter.requires_grad_(False)
    return model
