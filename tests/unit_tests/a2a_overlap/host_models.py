"""Small Megatron models, batches and iterations for the tests of the host device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

SEQUENCE = 8
BATCH = 2
VOCABULARY = 32
BASE = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_attention_heads": 2,
    "num_moe_experts": 4,
    "expert_model_parallel_size": 2,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_ffn_hidden_size": 32,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
    "normalization": "RMSNorm",
    "gradient_accumulation_fusion": False,
}


@cache
def parallel_groups(sizes: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    """What Megatron's parallel_state holds with these sizes. Made once: each group keeps threads of gloo's for good."""
    parallel_state.initialize_model_parallel(**dict(sizes))
    return parallel_state_now()


def parallel_state_now() -> dict[str, Any]:
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


@contextmanager
def parallel(*, graphable_random_state: bool = False, **sizes: int) -> Iterator[None]:
    """Megatron's parallel groups and random state tracker for a block."""
    outside = parallel_state_now()
    try:
        vars(parallel_state).update(parallel_groups(tuple(sorted(sizes.items()))))
        destroy_moe_metrics_tracker()  # it is as long as the first model that recorded a loss had layers
        seed(7, graphable=graphable_random_state)
        yield
    finally:
        vars(parallel_state).update(outside)


def seed(value: int, *, graphable: bool = False) -> None:
    torch.manual_seed(value)
    model_parallel_cuda_manual_seed(value, use_cudagraphable_rng=graphable, force_reset_rng=True)


def build(
    *,
    position_embedding_type: str = "rope",
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    share_embeddings_and_output_weights: bool = False,
    use_transformer_engine: bool = False,
    sequence: int = SEQUENCE,
    **changes: Any,
) -> torch.nn.Module:
    """A GPTModel of hidden 16, 4 experts, 2 layers and vocabulary 32; in 16 bits it comes in a Float16Module."""
    kind = MLATransformerConfig if changes.get("multi_latent_attention") else TransformerConfig
    config = kind(**{**BASE, **changes})
    engine = {"use_transformer_engine": use_transformer_engine}
    spec = get_gpt_decoder_block_spec(config, vp_stage=vp_stage, **engine)
    mtp = get_gpt_mtp_block_spec(config, spec, vp_stage=vp_stage, **engine) if config.mtp_num_layers else None
    seed(11)
    model = GPTModel(
        config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=sequence,
        position_embedding_type=position_embedding_type,
        mtp_block_spec=mtp,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        share_embeddings_and_output_weights=share_embeddings_and_output_weights,
    ).cuda(torch.cuda.current_device())
    return Float16Module(config, model) if config.bf16 or config.fp16 else model


def batches(count: int, *, sequence: int = SEQUENCE) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of tokens [BATCH, sequence] on the CPU, different on every data-parallel rank."""
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (BATCH, sequence), generator=generator)
        yield {
            "tokens": tokens,
            "labels": tokens.roll(-1, dims=1),
            "position_ids": torch.arange(sequence).expand(BATCH, sequence),
            "mask": torch.ones(1, 1, sequence, sequence, dtype=torch.bool).triu(1),
        }


def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any, return_schedule_plan: bool = False) -> Any:
    batch = next(data)
    arguments = (batch["tokens"].cuda(), batch["position_ids"].cuda(), batch["mask"].cuda())
    call = model.build_schedule_plan if return_schedule_plan else model
    return call(*arguments, labels=batch["labels"].cuda()), partial(loss_of)


def config_of(model: Any) -> TransformerConfig:
    chunk = model[0] if isinstance(model, list) else model
    while not hasattr(chunk, "config"):
        chunk = chunk.module
    return chunk.config


def iteration(model: Any, *, combined: bool, num_microbatches: int = 3, graphable: bool = False) -> list[torch.Tensor]:
    """One forward and backward of every micro-batch from random state 3; the losses, on the last stage only."""
    chunks = model if isinstance(model, list) else [model]
    for chunk in chunks:
        config_of(chunk).overlap_moe_expert_parallel_comm = combined
    seed(3, graphable=graphable)
    data = [batches(num_microbatches) for _ in chunks]
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return [result["loss"] for result in results]


def take_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter's gradient, taken off the model; a parameter without one fails."""
    gradients = {}
    for index, chunk in enumerate(model if isinstance(model, list) else [model]):
        for name, parameter in chunk.named_parameters():
            assert parameter.grad is not None, name
            gradients[f"{index}.{name}"], parameter.grad = parameter.grad, None
    return gradients


def differing(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> set[str]:
    """The names under which the two hold different bits."""
    assert tensors.keys() == others.keys()
    assert tensors
    return {name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])}
