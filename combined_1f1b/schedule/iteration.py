"""One iteration of this rank's model chunks: its plan, its lanes and its steps, whoever asks for the ops.

open ─ run(start, end) ─ run(...) ─ ... ─ finish       the whole plan at once, or slot by slot
         └ abort, after any failure: joined, freed, put back; the model can be used for a retry
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from combined_1f1b.config import OverlapOptions, draws_random_numbers
from combined_1f1b.errors import ConfigError
from combined_1f1b.fsdp_adapter.protocol import RankDriver, driver_of
from combined_1f1b.fsdp_adapter.several_chunks import joined
from combined_1f1b.schedule.executor import Carried, Handler, execute
from combined_1f1b.schedule.layer_plan import ModelChunk
from combined_1f1b.schedule.ops import TRANSFER_KINDS, Kind
from combined_1f1b.schedule.plan import Plan, build_plan
from combined_1f1b.schedule.step import Step, StepInputs, handlers_of, with_ranges
from combined_1f1b.schedule.streams import Lanes


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What the last iteration ran.

    Attributes:
        schedule: "combined_1f1b".
        num_microbatches: micro-batches of the iteration.
        forward_backward_pairs: pairs of a forward and a backward that ran interleaved.
        head_pairs, tail_pairs: interleaved pairs of two forwards, of two backwards.
        sharded: whether the plan drove MFSDP.
        plan: the plan that was executed, with pipelines this rank's.
    """

    schedule: str
    num_microbatches: int
    forward_backward_pairs: int
    head_pairs: int
    tail_pairs: int
    sharded: bool
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Where this rank stands.

    Attributes:
        size, rank: pipeline-parallel size and rank.
        group: `microbatch_group_size_per_vp_stage`; None without virtual stages.
        layer_counts: decoder layers of each pipeline stage; None splits them evenly.
    """

    size: int = 1
    rank: int = 0
    group: int | None = None
    layer_counts: tuple[int, ...] | None = None


@lru_cache(maxsize=64)
def _checked_plan(**shape: Any) -> Plan:
    plan = build_plan(**shape)
    plan.validate()
    return plan


def plan_for(
    *,
    chunks: Sequence[ModelChunk],
    driver: RankDriver,
    num_microbatches: int,
    options: OverlapOptions,
    pipeline: Pipeline,
) -> Plan:
    """The plan of one iteration of these chunks. Built and validated once for each number of micro-batches."""
    config = chunks[0].config
    single = pipeline.size == 1
    return _checked_plan(
        num_layers=len(chunks[0].layers) if single else config.num_layers,
        num_microbatches=num_microbatches,
        moe_layers=tuple(layer for chunk in chunks for layer in chunk.moe_layers),
        num_mtp_layers=len(chunks[0].mtp_layers) if single else config.mtp_num_layers or 0,
        tied_embeddings=chunks[0].tied_embeddings,
        # Only the chunk that ends with the norm says whether there is one: others have none in any case.
        has_final_norm=any(chunk.has_final_norm for chunk in chunks)
        or not any(chunk.model.post_process for chunk in chunks),
        sharded=bool(driver.units),
        units=driver.units or None,
        trainable_units=driver.trainable_units if driver.units else None,
        delay_wgrad=config.delay_wgrad_compute,
        early_attention_release=config.ep_overlap_early_attn_memory_release,
        combine_parameters=bool(config.moe_latent_size),
        pair_head_and_tail=options.pair_head_and_tail,
        interleave_head=not (options.pair_head_and_tail and draws_random_numbers(config)),
        pp=pipeline.size,
        vpp=len(chunks),
        rank=pipeline.rank,
        microbatch_group_size_per_vp_stage=pipeline.group,
        layer_counts=pipeline.layer_counts,
    )


def pipeline_of(config: Any, *, size: int, rank: int, chunks: int) -> Pipeline:
    """Where a rank stands, and how Megatron splits the layers over the pipeline stages."""
    stages = [None] if chunks == 1 else list(range(chunks))
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        layers_of = partial(get_num_layers_to_build, config)
    else:  # of which Megatron's function would give every stage this rank's numbers
        layers_of = layout.get_num_layers_to_build
    counts = tuple(layers_of(vp_stage=stage, pp_rank=peer) for stage in stages for peer in range(size))
    group = config.microbatch_group_size_per_vp_stage if chunks > 1 else None
    return Pipeline(size=size, rank=rank, group=group, layer_counts=counts)


def check_plan(
    models: Sequence[torch.nn.Module],
    *,
    num_microbatches: int,
    chunks: Sequence[ModelChunk],
    options: OverlapOptions,
    pipeline: Pipeline,
) -> None:
    """Build the plan that an iteration of these models will find ready.

    Raises:
        ConfigError: a setting cannot work.
    """
    driver = joined([driver_of(model) for model in models])
    plan_for(chunks=chunks, driver=driver, num_microbatches=num_microbatches, options=options, pipeline=pipeline)


class Iteration:
    """One iteration.

    Args:
        inputs: what Megatron's driver hands over, one for each chunk.
        chunks: the rank's model chunks, cut into nodes.
        options: what Megatron's config has no field for.
        pipeline: where this rank stands.
        transfers: from the other handlers, those of SEND and RECV and of where tensors enter; without it the plan's
            transfers are Megatron's to make.
        links: streams of the lanes of those transfers.

    Attributes:
        plan: the rank's plan.
        steps: the chunks' steps.
        lanes: the streams.
        is_aborted: whether it failed.

    Raises:
        ConfigError: the number of micro-batches cannot work.
    """

    def __init__(
        self,
        inputs: Sequence[StepInputs],
        *,
        chunks: Sequence[ModelChunk],
        options: OverlapOptions,
        pipeline: Pipeline,
        transfers: Callable[[Iteration, Mapping[Kind, Handler]], Mapping[Kind, Handler]] | None = None,
        links: tuple[Any, Any] | None = None,
    ) -> None:
        count = inputs[0].num_microbatches
        if count < 1:
            raise ConfigError.of("num_microbatches", count, "there is nothing to run", "use at least 1")
        config = inputs[0].config
        drivers = [driver_of(one.model) for one in inputs]
        self._driver = joined(drivers)
        self.plan = plan_for(
            chunks=chunks, driver=self._driver, num_microbatches=count, options=options, pipeline=pipeline
        )
        self.lanes = Lanes(
            gather=self._driver.gather_stream, high_priority=config.high_priority_a2a_comm_stream, links=links
        )
        self.steps = [
            Step(
                inputs=one,
                chunk=chunk,
                driver=driver,
                held_gradients=self.plan.held_gradients,
                interleaved=_interleaved_forwards(self.plan),
            )
            for one, chunk, driver in zip(inputs, chunks, drivers, strict=True)
        ]
        self._num_microbatches = count
        self._timers = config.timers
        self.is_aborted = False
        self._carried = Carried({}, {})
        # With multi-token prediction the last chunk has two units that are no stage of it, "root" and "embedding".
        chunk_of = {unit: number for number, driver in enumerate(drivers) for unit in driver.units}
        chunk_of |= self.plan.shape.chunk_of
        step_of = {name: self.steps[number] for name, number in chunk_of.items()}
        own = handlers_of(step_of, self._driver)
        around = _LEFT_TO_MEGATRON if transfers is None else transfers(self, own)
        self._handlers = with_ranges({**own, **around})

    def open(self) -> None:
        """Before the first op."""
        with self.aborting():
            for step in self.steps:
                step.open()
            self._driver.begin_iteration()

    def run(self, start: int = 0, end: int | None = None) -> None:
        """Issue ops, all of them by default."""
        with self.aborting():
            execute(
                self.plan,
                lanes=self.lanes,
                handlers=self._handlers,
                start=start,
                end=end,
                carried=self._carried,
            )

    def finish(self) -> StepReport:
        """After the last op."""
        with self.aborting():
            self._driver.finish_iteration()
        self._close()
        pairs = self.plan.pairs
        return StepReport(
            schedule="combined_1f1b",
            num_microbatches=self._num_microbatches,
            forward_backward_pairs=pairs.forward_backward_pairs,
            head_pairs=pairs.head_pairs,
            tail_pairs=pairs.tail_pairs,
            sharded=bool(self._driver.units),
            plan=self.plan,
        )

    def abort(self, error: BaseException) -> None:
        """Bring everything back to rest after a failure, which gets notes. Another call does nothing."""
        if self.is_aborted:
            return
        self.is_aborted = True
        error.add_note(f"in an iteration of num_microbatches={self._num_microbatches} on this rank")
        try:
            self.lanes.join()
        except RuntimeError as joining:  # an invalidated capture refuses every wait: the failure itself must get out
            error.add_note(f"the lanes could not be joined: {joining}")
        if self._timers is not None:
            for name, level in _TIMERS.items():
                self._timers(name, log_level=level).reset()  # started, they would refuse a retry
        try:
            self._driver.abort()
        finally:
            self._close()

    def _close(self) -> None:
        with ExitStack() as closing:
            for step in self.steps:
                closing.callback(step.close)

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Around what belongs to the iteration: a failure aborts it."""
        try:
            yield
        except BaseException as error:
            self.abort(error)
            raise

    @property
    def num_tokens(self) -> list[torch.Tensor]:
        """What the loss functions counted."""
        return [tokens for step in self.steps for tokens in step.num_tokens]


_TIMERS = {"forward-backward": 1, "forward-compute": 2, "backward-compute": 2}
"""Megatron's timers that may be running when an iteration fails, with their levels."""


def _interleaved_forwards(plan: Plan) -> frozenset[int]:
    """Micro-batches whose forward runs interleaved with another's."""
    if not plan.pairs.head_pairs:
        return frozenset()
    return frozenset(call.microbatch for part in plan.fragments if len(part.forwards) > 1 for call in part.forwards)


_LEFT_TO_MEGATRON: Mapping[Kind, Handler] = MappingProxyType({kind: lambda _issue: None for kind in TRANSFER_KINDS})
