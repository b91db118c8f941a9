"""Model chunks of pipeline stages sharded with MFSDP v2, and training runs on them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from host_models import BATCH, SEQUENCE, batches, config_of, parallel, seed
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from parity_testing import forward_step
from pipeline_testing import Stages

import combined_1f1b

NUM_MICROBATCHES = 4


def two_stages(*, vpp: int, ep: int = 1) -> AbstractContextManager[None]:
    """Groups for two pipeline stages; the other ranks are data-parallel."""
    virtual = {"virtual_pipeline_model_parallel_size": vpp} if vpp > 1 else {}
    return parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=ep, **virtual)


def build_chunks(*, vpp: int, frozen: str | None = None, **changes: Any) -> list[Any]:
    """This rank's unsharded chunks of a model of four layers, finalised as Megatron's training loop does."""
    chunks = Stages(pp=2, vpp=vpp, changes={"num_layers": 4, **changes}).build()
    for chunk in chunks:
        config_of(chunk).finalize_model_grads_func = finalize_model_grads
        for name, parameter in chunk.named_parameters():
            if frozen is not None and frozen in name:
                parameter.requires_grad_(False)
    return chunks


def shard(chunks: list[Any], *, combined: bool, no_sync: bool = False, **arguments: Any) -> list[Any]:
    """Wrappers of all chunks, for the schedule or for MFSDP's hooks."""
    for chunk in chunks:
        config_of(chunk).overlap_moe_expert_parallel_comm = combined
    wrapped = combined_1f1b.shard_model(chunks, config_of(chunks), **arguments)
    if no_sync:
        functions = [one.no_sync for one in wrapped]
        for chunk in chunks:
            config_of(chunk).no_sync_func = functions if len(functions) > 1 else functions[0]
    return wrapped


def run(
    chunks: list[Any],
    *,
    num_microbatches: int = NUM_MICROBATCHES,
    forward_only: bool = False,
    step: Callable[..., Any] = forward_step,
) -> list[Any]:
    """One call of Megatron's forward-backward function; the losses, on the last stage only."""
    data = [batches(num_microbatches) for _ in chunks]
    seed(3)
    reports = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )
    return [report["loss"] for report in reports]


def named(wrapped: list[Any], method: str) -> dict[str, torch.Tensor]:
    """What a method of each wrapper returns by name, under the names of all chunks."""
    return {f"{number}.{name}": t for number, one in enumerate(wrapped) for name, t in getattr(one, method)().items()}


def optimizer_of(wrapped: list[Any], *, per_chunk: bool = False) -> torch.optim.Optimizer:
    trained = [parameter for one in wrapped for parameter in one.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for one in wrapped if per_chunk else [wrapped]:
        combined_1f1b.prepare_optimizer(optimizer, one)
    return optimizer


class Run(NamedTuple):
    """Losses per micro-batch, full gradients per step and full parameters at the end, of this rank's stages."""

    losses: list[torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]


def train(wrapped: list[Any], *, steps: int = 2, evaluates: bool = False, per_chunk: bool = False) -> Run:
    """A few AdamW steps, with an evaluation before each one or without."""
    optimizer = optimizer_of(wrapped, per_chunk=per_chunk)
    losses, gradients = [], []
    for _ in range(steps):
        if evaluates:
            losses += evaluate(wrapped)
        losses += run(wrapped)
        gradients.append(named(wrapped, "full_gradients"))
        assert not any(one.gathered_units() for one in wrapped)
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, gradients, named(wrapped, "full_parameters"))


def evaluate(wrapped: list[Any]) -> list[torch.Tensor]:
    """The losses of a forward-only call."""
    for one in wrapped:
        one.eval()
    with torch.no_grad():
        losses = run(wrapped, forward_only=True)
    for one in wrapped:
        one.train()
    return losses
