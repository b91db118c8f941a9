"""The `compare` command: Megatron's default schedule, its built-in combined one, and this package's, side by side.

All three start from the same weights, see the same batches and take the same optimizer steps in one process, one step
of each in turn. After every step losses, gradients and parameters are compared bit for bit with the default's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from combined_1f1b.errors import ConfigError
from combined_1f1b.training.config import RunConfig
from combined_1f1b.training.data import Batch
from combined_1f1b.training.distributed import distributed, is_first_rank, parallel_sizes, world_size
from combined_1f1b.training.loop import Trainer, forward_step, masked_loss, mean_loss
from combined_1f1b.training.megatron_config import build_transformer_config
from combined_1f1b.training.plans import draw_plan, plan_arguments
from combined_1f1b.training.progress import say
from combined_1f1b.training.snapshot import (
    Difference,
    Snapshot,
    Traffic,
    counting_all_to_all,
    first_difference,
    summing_in_rank_order,
    take_gradients,
    take_losses,
    take_parameters,
)
from combined_1f1b.training.train import check_before_start, selected_schedule

if TYPE_CHECKING:
    import torch

    from combined_1f1b.schedule import Plan

KINDS = ("losses", "gradients", "parameters")
_FLAG = "overlap_moe_expert_parallel_comm"
# Megatron's config accepts these only together with the flag.
_NEED_FLAG = ("delay_wgrad_compute", "ep_overlap_early_attn_memory_release")


@dataclass(kw_only=True)
class Variant:
    """One schedule under comparison.

    Attributes:
        name: for the table.
        config: the run as this schedule takes it.
        step_function: the forward step; Megatron's built-in needs a form of its own.
        uses_package: whether this package's schedule is installed while it is built and stepped.
        refused: why it cannot run this configuration, "" when it can.
        trainer: what is stepped; None when it was refused.
        losses, seconds: of every step. traffic: of the last step.
        plan: what was executed in the last step; None when no plan was.
        differences: by kind, the iteration and place of the first difference from the reference.
    """

    name: str
    config: RunConfig
    step_function: Callable[..., Any] = forward_step
    uses_package: bool = False
    refused: str = ""
    trainer: Trainer | None = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    plan: Plan | None = None
    differences: dict[str, tuple[int, Difference]] = field(default_factory=dict)

    @property
    def data_parallel(self) -> str:
        return self.config.distributed.data_parallel

    def schedule(self) -> contextlib.AbstractContextManager[None]:
        """The schedule that this variant runs under, for the length of a block."""
        return selected_schedule(self.config) if self.uses_package else contextlib.nullcontext()


def plan_returning_step(
    data_iterator: Iterator[Batch], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """The forward step in the form that Megatron's built-in combined schedule asks for."""
    batch = next(data_iterator)
    call = model.build_schedule_plan if return_schedule_plan else model
    output = call(batch.tokens, batch.position_ids, None, labels=batch.labels)
    return output, functools.partial(masked_loss, model.config, batch.loss_mask)


def variants_of(config: RunConfig) -> tuple[Variant, ...]:
    """Default, built-in and ours, each with its own form of the configuration."""
    on = {**config.model, _FLAG: True}
    off = {name: value for name, value in config.model.items() if name not in _NEED_FLAG} | {_FLAG: False}
    # The built-in cannot drive Megatron-FSDP v2 at all: it runs over DistributedDataParallel then, for its times.
    plain = dataclasses.replace(config.distributed, data_parallel="ddp")
    return (
        Variant(name="Megatron default", config=dataclasses.replace(config, model=off)),
        Variant(
            name="Megatron combined",
            config=dataclasses.replace(config, model=on, distributed=plain),
            step_function=plan_returning_step,
        ),
        Variant(name="combined_1f1b", config=dataclasses.replace(config, model=on), uses_package=True),
    )


def _build(variant: Variant, device: torch.device) -> None:
    try:
        with variant.schedule():
            transformer_config = build_transformer_config(variant.config.model)
            variant.trainer = Trainer(variant.config, transformer_config, device, step_function=variant.step_function)
    except ConfigError as error:
        if variant.uses_package or variant.step_function is forward_step:
            raise
        variant.refused = str(error)


def _step(variant: Variant, iteration: int) -> Snapshot:
    """One iteration of a variant: timed, and its results copied outside the time."""
    import torch

    trainer = variant.trainer
    assert trainer is not None
    torch.distributed.barrier()
    torch.cuda.synchronize()
    with variant.schedule(), _reductions(variant), counting_all_to_all() as traffic:
        start = time.perf_counter()
        trainer.optimizer.zero_grad()
        reports = trainer.forward_backward(iteration)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        gradients = take_gradients(trainer.chunks)
        start = time.perf_counter()
        trainer.optimizer.step(iteration)
        torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        if variant.uses_package:
            variant.plan = _executed_plan()
    variant.traffic = traffic
    variant.seconds.append(seconds)
    variant.losses.append(mean_loss(reports, trainer.device))
    return Snapshot({"losses": take_losses(reports), "gradients": gradients, "parameters": take_parameters(trainer)})


def _partitions_differ(config: RunConfig) -> bool:
    """Whether two right partitions of Megatron-FSDP v2 can differ in the last bits; with two ranks they cannot."""
    return config.distributed.data_parallel == "mfsdp_v2" and parallel_sizes(config, world_size()).data > 2


def _reductions(variant: Variant) -> contextlib.AbstractContextManager[None]:
    return summing_in_rank_order() if _partitions_differ(variant.config) else contextlib.nullcontext()


def _executed_plan() -> Plan:
    """The plan of the step that just ended, from the schedule's own report."""
    import combined_1f1b

    report = combined_1f1b.last_step()
    assert report is not None, "the flag is set and the package installed, yet its schedule did not run"
    return report.plan


def _run_rounds(variants: list[Variant], rounds: int) -> None:
    """Step every variant in turn, each round starting with another one, and compare with the first after each round."""
    reference = variants[0]
    for iteration in range(rounds):
        turn = iteration % len(variants)
        snapshots = {variant.name: _step(variant, iteration) for variant in variants[turn:] + variants[:turn]}
        for variant in variants[1:]:
            if variant.data_parallel != reference.data_parallel:
                continue
            for kind in KINDS:
                difference = first_difference(
                    snapshots[variant.name].tensors[kind], snapshots[reference.name].tensors[kind]
                )
                if difference is not None:
                    variant.differences.setdefault(kind, (iteration, difference))


def _median_ms(variant: Variant) -> float:
    """Median of the steps after the first, which warms up, in milliseconds."""
    return 1e3 * statistics.median(variant.seconds[1:] or variant.seconds)


def _cells(variant: Variant, reference: Variant, plan: Plan) -> list[str]:
    """One column of the table. plan: what was executed, or for Megatron's built-in the plan of the same order."""
    from combined_1f1b.schedule import simulate

    def equal(kind: str) -> str:
        if variant is reference:
            return "(reference)"
        if variant.data_parallel != reference.data_parallel:
            return "not compared"
        return "DIFFERENT" if kind in variant.differences else "bitwise equal"

    simulation = simulate(plan)
    pairs, under = plan.pairs.forward_backward_pairs, simulation.comm_ops_under_partner
    if variant is reference:
        pairs, under = 0, 0
    return [
        variant.data_parallel,
        f"{variant.losses[0]:.4f}",
        f"{variant.losses[-1]:.4f}",
        *(equal(kind) for kind in KINDS),
        f"{_median_ms(variant):.0f} ms",
        f"{_median_ms(variant) / _median_ms(reference):.2f}",
        f"{pairs}",
        f"{variant.traffic.calls}",
        f"{variant.traffic.sent_bytes / 2**20:.2f} MiB",
        f"{under} of {simulation.comm_ops}",
    ]


_ROWS = (
    "data parallel",
    "first loss",
    "last loss",
    *KINDS,
    "step time (median)",
    "step time / default",
    "forward-backward pairs",
    "all-to-all calls a step",
    "all-to-all bytes a step",
    "all-to-alls under a partner",
)


def _print_table(columns: dict[str, list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=True)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for row, cells in zip(_ROWS, zip(*columns.values(), strict=True), strict=True):
        table.add_row(row, *cells)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=110)
    console.print(table)


def compare(config: RunConfig) -> int:
    """Compare the schedules on the run that a configuration describes.

    Returns:
        0 when this package's losses, gradients and parameters are bitwise those of Megatron's default schedule, else 1.
    Raises:
        ConfigError: a setting that cannot work, before any work.
    """
    from combined_1f1b.schedule import build_plan

    check_before_start(config)
    with distributed(config) as device:
        variants = variants_of(config)
        for variant in variants:
            _build(variant, device)
        running = [variant for variant in variants if variant.trainer is not None]
        reference, ours = running[0], running[-1]
        assert reference.trainer is not None
        say(f"data: {reference.trainer.sampler.sequences.description}")
        say(f"{config.compare.rounds} optimizer steps of each schedule, the same weights and batches, one step in turn")
        if _partitions_differ(config):
            say("gradients are added in the order of the ranks, to compare partitions; step times include that")
        _run_rounds(running, config.compare.rounds)

        assert ours.plan is not None
        if is_first_rank():
            plain_plan = build_plan(**plan_arguments(config) | {"pair_head_and_tail": False, "sharded": False})
            _print_table({item.name: _cells(item, reference, item.plan or plain_plan) for item in running})
            for line in _remarks(variants):
                say(line)
            say(f"picture of the plan: {draw_plan(ours.plan, Path(config.output) / 'plan.svg')}")
        if ours.differences:
            say("PARITY FAILED: combined_1f1b does not give the bits of Megatron's default schedule")
            return 1
        say("parity holds: losses, gradients and parameters are bitwise those of Megatron's default schedule")
        return 0


def _remarks(variants: tuple[Variant, ...]) -> Iterator[str]:
    """What the table has no room for: refusals, wrappers that differ, where a difference begins."""
    for variant in variants:
        if variant.refused:
            yield f"{variant.name} cannot run this: {variant.refused}"
        elif variant.data_parallel != variants[0].data_parallel:
            wanted = variants[0].data_parallel
            yield f"{variant.name} cannot drive {wanted}: it ran over {variant.data_parallel}, for its times"
        for kind, (iteration, difference) in variant.differences.items():
            yield (
                f"{variant.name}: {kind} first differ in iteration {iteration + 1}, rank {difference.rank}, "
                f"{difference.name} (largest difference {difference.largest:.3g})"
            )
