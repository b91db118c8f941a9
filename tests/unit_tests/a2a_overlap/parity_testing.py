"""Training runs that two schedules must agree on to the last bit, shared by the parity tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from host_models import BATCH, SEQUENCE, batches, build, config_of, differing, loss_of, seed
from megatron.core.pipeline_parallel import get_forward_backward_func

import combined_1f1b

EXPERT_SIZE = min(2, int(os.environ.get("WORLD_SIZE", "1")))
"""Expert-parallel size of the parity tests: 2 (four ranks make two expert groups), or 1 where there is one rank."""

FP16 = {"bf16": False, "fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}
FP32 = {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}


@dataclass
class Training:
    """What a run leaves behind: losses per micro-batch, gradients per step, parameters at the end."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def forward_step(
    data: Iterator[dict[str, torch.Tensor]],
    model: Any,
    *,
    loss: Callable[..., Any] = loss_of,
    change_batch: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Any:
    """A user's forward step: nothing in it knows of the schedule."""
    batch = next(data)
    arguments = {
        "input_ids": batch["tokens"].cuda(),
        "position_ids": batch["position_ids"].cuda(),
        "attention_mask": batch["mask"].cuda(),
        "labels": batch["labels"].cuda(),
    }
    if change_batch is not None:
        arguments = change_batch(arguments)
    return model(**arguments), partial(loss)


def run(
    model: Any,
    *,
    data: Iterator[Any] | None = None,
    num_microbatches: int = 3,
    forward_only: bool = False,
    step: Callable[..., Any] = forward_step,
    **options: Any,
) -> list[Any]:
    """One call of Megatron's forward-backward function, as its training loop makes it."""
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=batches(num_microbatches) if data is None else data,
        model=[model],
        num_microbatches=num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
        **options,
    )


def set_flag(model: Any, value: bool) -> None:
    config_of(model).overlap_moe_expert_parallel_comm = value


def train(
    *,
    combined: bool,
    steps: int = 2,
    prepare: Callable[[torch.nn.Module], Any] = lambda model: model,
    step: Callable[..., Any] = forward_step,
    num_microbatches: int = 3,
    **changes: Any,
) -> Training:
    """A few SGD steps on a fresh, unsharded model.

    Args:
        combined: whether the flag is set.
        prepare: changes the model before the first step; returns the module to train.
        changes: fields of TransformerConfig, and arguments of `build`.
    """
    model = prepare(build(expert_model_parallel_size=EXPERT_SIZE, **changes))
    set_flag(model, combined)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5, momentum=0.9)
    result = Training()
    for number in range(steps):
        seed(3 + number)
        result.losses += [report["loss"] for report in run(model, step=step, num_microbatches=num_microbatches)]
        result.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    result.parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return result


def assert_same(reference: Training, ours: Training) -> None:
    """Every bit of both runs is the same, and there is something to compare."""
    assert reference.losses
    assert all(torch.equal(a, b) for a, b in zip(reference.losses, ours.losses, strict=True))
    for step, our_step in zip(reference.gradients, ours.gradients, strict=True):
        assert differing(step, our_step) == set()
    assert differing(reference.parameters, ours.parameters) == set()


def assert_parity(*, num_microbatches: int = 3, **arguments: Any) -> Training:
    """Train under Megatron's default schedule and under ours: the same bits, and pairs really ran."""
    reference = train(combined=False, num_microbatches=num_microbatches, **arguments)
    ours = train(combined=True, num_microbatches=num_microbatches, **arguments)
    assert_same(reference, ours)
    assert combined_1f1b.last_step().forward_backward_pairs == num_microbatches - 1
    return ours
