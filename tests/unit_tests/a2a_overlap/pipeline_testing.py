"""Models split over pipeline stages, and training runs on them, for the tests of pipelines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from host_models import BATCH, SEQUENCE, batches, build, config_of, seed
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from parity_testing import forward_step

P2P = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
"""Megatron's interleaved driver with its own default, batched transfers, gives wrong gradients over gloo."""


@dataclass
class Stages:
    """How a model is split.

    Attributes:
        pp, vpp: pipeline-parallel size, chunks per rank.
        changes: fields of TransformerConfig, and arguments of `build`.
    """

    pp: int = 2
    vpp: int = 1
    changes: dict[str, Any] = field(default_factory=dict)

    def build(self) -> list[torch.nn.Module]:
        """This rank's chunks."""
        rank = parallel_state.get_pipeline_model_parallel_rank()
        changes = {
            "num_layers": self.pp * self.vpp,
            "pipeline_model_parallel_size": self.pp,
            **({"virtual_pipeline_model_parallel_size": self.vpp, **P2P} if self.vpp > 1 else {}),
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            **self.changes,
        }
        last = self.pp * self.vpp - 1
        stages = [chunk * self.pp + rank for chunk in range(self.vpp)]
        return [
            build(
                pre_process=stage == 0,
                post_process=stage == last,
                vp_stage=number if self.vpp > 1 else None,
                **changes,
            )
            for number, stage in enumerate(stages)
        ]


def run_pipeline(
    chunks: list[Any], *, num_microbatches: int, step: Callable[..., Any] = forward_step, **options: Any
) -> Any:
    """One call of Megatron's forward-backward function on this rank's chunks."""
    data = [batches(num_microbatches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
        **options,
    )


def set_flags(chunks: list[Any], value: bool) -> None:
    for chunk in chunks:
        config_of(chunk).overlap_moe_expert_parallel_comm = value


@dataclass
class Run:
    """What a run leaves behind on this rank."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def train(
    stages: Stages,
    *,
    combined: bool,
    steps: int = 2,
    num_microbatches: int = 4,
    step: Callable[..., Any] = forward_step,
    prepare: Callable[[list[Any]], Any] = lambda chunks: chunks,
) -> Run:
    """A few SGD steps on fresh, unsharded chunks."""
    chunks = prepare(stages.build())
    set_flags(chunks, combined)
    named = {
        f"{number}.{name}": parameter
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    trained = [parameter for parameter in named.values() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5, momentum=0.9) if trained else None
    result = Run()
    for number in range(steps):
        seed(3 + number)
        result.losses += [
            report["loss"] for report in run_pipeline(chunks, num_microbatches=num_microbatches, step=step)
        ]
        result.gradients.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    result.parameters = {name: parameter.detach().clone() for name, parameter in named.items()}
    return result


def assert_same_run(reference: Run, ours: Run) -> None:
    """Every bit of both runs is the same on this rank, and the last stage has losses to compare."""
    assert bool(reference.losses) == parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    assert len(reference.losses) == len(ours.losses)
    assert all(torch.equal(a, b) for a, b in zip(reference.losses, ours.losses, strict=True))
    for step, our_step in zip(reference.gradients, ours.gradients, strict=True):
        assert step.keys() == our_step.keys()
        assert {name for name in step if not torch.equal(step[name], our_step[name])} == set()
    assert {n for n, p in reference.parameters.items() if not torch.equal(p, ours.parameters[n])} == set()
