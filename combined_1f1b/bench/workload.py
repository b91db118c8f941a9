"""The models that are measured and one step of them, under any of the schedules.

All models of a measurement are built from one seed, and no optimizer moves them: every variant sees the same weights
and batches, so losses and gradients can be compared bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from combined_1f1b.bench.link import Link
from combined_1f1b.bench.options import BUILT_IN, DEFAULT, PAIRED, BenchOptions, ModelSize, Variant
from combined_1f1b.config import FLAG, OverlapOptions
from combined_1f1b.registration import Installation
from combined_1f1b.schedule.cuda_graph import on_capture_stream
from combined_1f1b.training.config import DataConfig, DistributedConfig, GPTSettings, RunConfig
from combined_1f1b.training.megatron_config import build_transformer_config
from combined_1f1b.training.model import build_chunks
from combined_1f1b.training.parallel import wrap_chunks


def run_config(options: BenchOptions, *, layers: str, wrapper: str, delay_wgrad: bool, ranks: int) -> RunConfig:
    """The configuration that builds a model of this kind, experts spread over all ranks."""
    size = options.size
    own = ("sequence_length", "num_microbatches", "micro_batch_size", "vocab_size")
    model = {name: value for name, value in dataclasses.asdict(size).items() if name not in own} | {
        "ffn_hidden_size": size.moe_ffn_hidden_size,
        "moe_token_dispatcher_type": "alltoall",
        "moe_pad_expert_input_to_capacity": True,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": layers == "te",
        "transformer_impl": "transformer_engine" if layers == "te" else "local",
        "expert_model_parallel_size": ranks,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        # Transformer Engine's modules learn when they are built whether they delay.
        FLAG: delay_wgrad or wrapper == "mfsdp",
        "delay_wgrad_compute": delay_wgrad,
    }
    return RunConfig(
        model=model,
        gpt=GPTSettings(vocab_size=size.vocab_size),
        data=DataConfig(sequence_length=size.sequence_length, micro_batch_size=size.micro_batch_size),
        distributed=DistributedConfig(data_parallel="mfsdp_v2" if wrapper.startswith("mfsdp") else "ddp"),
    )


class Workload:
    """One model with its batches.

    Attributes:
        model: wrapped as the variants that share it ask for.
        model_bytes: device memory that it took.
    """

    def __init__(self, config: RunConfig, size: ModelSize, *, wrapper: str, device: torch.device) -> None:
        before = torch.cuda.memory_allocated()
        self.wrapper = wrapper
        self.size = size
        self.transformer_config = build_transformer_config(config.model)
        # AccumulateGrad nodes remember the stream on which they were made: captures need them on this one.
        with on_capture_stream():
            chunks = build_chunks(config, self.transformer_config, device)
            if wrapper != "none":
                chunks = wrap_chunks(chunks, self.transformer_config, config.distributed)
        # A capture registers the random generators, though no forward here draws from them.
        model_parallel_cuda_manual_seed(config.training.seed, use_cudagraphable_rng=True, force_reset_rng=True)
        self.model: Any = chunks[0]
        self.model_bytes = torch.cuda.memory_allocated() - before
        self._batches = _batches(size, device)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of one call of the forward-backward function."""
        return {
            "forward_step_func": forward_step,
            "data_iterator": iter(self._batches),
            "model": [self.model],
            "num_microbatches": self.size.num_microbatches,
            "seq_length": self.size.sequence_length,
            "micro_batch_size": self.size.micro_batch_size,
            "forward_only": False,
        }

    def clear_gradients(self) -> None:
        """As before a first step."""
        if self.wrapper == "none":
            self.model.zero_grad(set_to_none=True)
        else:
            self.model.zero_grad_buffer()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients by name, full ones; every rank must call it. A parameter without one is left out."""
        if self.wrapper.startswith("mfsdp"):
            gradients: dict[str, torch.Tensor] = self.model.full_gradients()
            return gradients
        if self.wrapper == "ddp":
            return {name: parameter.main_grad for name, parameter in self.model.module.named_parameters()}
        named = self.model.named_parameters()
        return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


@contextmanager
def selected(variant: Variant, workload: Workload, link: Link, installation: Installation) -> Iterator[None]:
    """Run what is issued in the block under the variant's schedule and link."""
    options = installation.options
    config = workload.transformer_config
    flags = {FLAG: variant.schedule != DEFAULT, "delay_wgrad_compute": variant.delay_wgrad}
    before = {name: getattr(config, name) for name in flags}
    installation.options = OverlapOptions(pair_head_and_tail=variant.schedule == PAIRED)
    link.traffic = variant.traffic
    try:
        for name, value in flags.items():
            setattr(config, name, value)  # by assignment: TransformerConfig itself refuses the flag at EP=1
        with installation.set_aside() if variant.schedule == BUILT_IN else nullcontext():
            yield
    finally:
        installation.options = options
        link.traffic = True
        for name, value in before.items():
            setattr(config, name, value)


def forward_backward() -> Callable[..., Any]:
    """Megatron's function for one pipeline stage; the schedule behind it is looked up at each call."""
    function: Callable[..., Any] = get_forward_backward_func()
    return function


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any, return_schedule_plan: bool = False) -> Any:
    """One micro-batch. Megatron's built-in schedule asks for a plan, the others for the output."""
    batch = next(data)
    call = model.build_schedule_plan if return_schedule_plan else model
    return call(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), _mean_loss


def _mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def _batches(size: ModelSize, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Random tokens [micro-batch, sequence], different on every rank."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    shape = (size.micro_batch_size, size.sequence_length)
    batches = []
    for _ in range(size.num_microbatches):
        tokens = torch.randint(size.vocab_size, shape, generator=generator)
        batch = {
            "tokens": tokens,
            "labels": tokens.roll(-1, dims=1),
            "position_ids": torch.arange(size.sequence_length).expand(shape).contiguous(),
        }
        batches.append({name: tensor.to(device) for name, tensor in batch.items()})
    return batches
