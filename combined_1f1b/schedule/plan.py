"""The plan: what is done in which order, on which lane, after what. Everything else reads it and obeys.

    shape --base_order--> ops --add_sharding--> ops --add_waits--> Plan
                                                                    | executor, validator, simulator, drawings

One iteration is one plan. Ops are issued from first to last by one thread; each runs on its lane's stream after the
lane's ops before it and after its waits. Before the first op the comm and gather lanes are forked from the compute
lane, after the last op everything is joined to it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from combined_1f1b.errors import PlanError
from combined_1f1b.schedule.dependencies import ISSUE_LANES, LANE_NUMBER, lane_count
from combined_1f1b.schedule.excerpt import bad_op, excerpt
from combined_1f1b.schedule.ops import FLOW_KINDS, NODE_KINDS, Kind, Lane, Op
from combined_1f1b.schedule.order import base_order
from combined_1f1b.schedule.passes import apply_passes
from combined_1f1b.schedule.pipeline_order import Call, slots
from combined_1f1b.schedule.shape import PlanShape

__all__ = ["Fragment", "Pairs", "Plan", "PlanShape", "build_plan"]


@dataclass(frozen=True)
class Pairs:
    """How many pairs of flows run together."""

    forward_backward_pairs: int
    head_pairs: int
    tail_pairs: int


@dataclass(frozen=True)
class Plan:
    """The ops of one iteration, in the order in which they are issued, and the shape that they were built for.

    `str(plan)` is one line for the shape and one line an op; `Plan.parse` reads it back to an equal plan.
    """

    shape: PlanShape
    ops: tuple[Op, ...]

    def __hash__(self) -> int:
        # A plan is a key of caches that are asked once an iteration, so its hash may not go through all ops.
        return hash((self.shape, len(self.ops)))

    def __str__(self) -> str:
        return "\n".join([str(self.shape), *(op.line for op in self.ops)])

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read a plan from what `str` prints; empty lines are skipped.

        Raises:
            PlanError: a line cannot be read.
        """
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise PlanError("cannot read a plan from an empty text")
        return cls(PlanShape.parse(lines[0]), tuple(Op.parse(line) for line in lines[1:]))

    def validate(self) -> None:
        """Check the plan.

        Raises:
            PlanError: the plan breaks a rule; the message names the first bad op and shows the plan around it.
        """
        from combined_1f1b.schedule.validate import validate

        validate(self)

    def excerpt(self, index: int, radius: int = 5) -> str:
        """Return the plan's lines around op `index`, with an arrow at it."""
        return excerpt(self.ops, index, radius)

    @cached_property
    def wait_indices(self) -> tuple[tuple[int, ...], ...]:
        """For every op, the indices of the ops that its waits name.

        Raises:
            PlanError: a wait names no earlier op.
        """
        latest: dict[str, int] = {}
        result: list[tuple[int, ...]] = []
        for index, op in enumerate(self.ops):
            waits = op.waits
            if not waits:
                result.append(())
            else:
                try:
                    result.append(tuple([latest[name] for name in waits]))
                except KeyError as error:
                    raise bad_op(self.ops, index, f"waits for {error.args[0]}, which no earlier op is") from None
            latest[op.name] = index
        return tuple(result)

    @cached_property
    def signals(self) -> frozenset[int]:
        """Indices of the ops that another lane waits for: an event is recorded after these and no others."""
        return frozenset(other for waits in self.wait_indices for other in waits)

    @cached_property
    def clocks(self) -> tuple[tuple[int, ...], ...]:
        """For every op, the latest op of each issue lane that is done once this op starts (on its own lane: its index).

        Lanes are in the order of ISSUE_LANES, as many as the plan uses; -1 means none.
        """
        lanes = [LANE_NUMBER[op.issue_lane] for op in self.ops]
        count = lane_count(self.shape)
        current = [[-1] * count for _ in range(count)]
        result: list[tuple[int, ...]] = []
        for index, waits in enumerate(self.wait_indices):
            clock = current[lanes[index]]
            for other in waits:
                clock[:] = map(max, clock, result[other])
            clock[lanes[index]] = index
            result.append(tuple(clock))
        return tuple(result)

    @cached_property
    def _seen_on(self) -> dict[Lane, tuple[list[int], tuple[tuple[int, ...], ...]]]:
        """Per issue lane: its ops, and for each other lane what they have seen of it (never decreasing)."""
        found: dict[Lane, list[int]] = {lane: [] for lane in ISSUE_LANES[: lane_count(self.shape)]}
        for index, op in enumerate(self.ops):
            found[op.issue_lane].append(index)
        clocks = self.clocks
        return {lane: (own, tuple(zip(*[clocks[index] for index in own], strict=True))) for lane, own in found.items()}

    def release_after(self, consumer: int, producer_lane: Lane) -> int:
        """Return the index of the first op issued on `producer_lane` that starts only once op `consumer` is done.

        Memory that the producer's lane allocated and `consumer` reads on another lane may be given back once the waits
        of that op are issued. `len(ops)` means: after the joins at the end. A consumer on the producer's own lane needs
        no wait, and its own index is returned.
        """
        lane = self.ops[consumer].issue_lane
        if lane is producer_lane:
            return consumer
        indices, seen = self._seen_on[producer_lane]
        place = bisect_left(seen[LANE_NUMBER[lane]], consumer) if indices else 0
        return indices[place] if place < len(indices) else len(self.ops)

    @cached_property
    def last_reductions(self) -> frozenset[int]:
        """Indices of each unit's last REDUCE."""
        return frozenset({op.name: index for index, op in enumerate(self.ops) if op.kind is Kind.REDUCE}.values())

    @cached_property
    def held_gradients(self) -> dict[int, tuple[str, ...]]:
        """Op index -> units to which the op gives gradients while those of the micro-batch before are not reduced yet.

        Only two interleaved backwards have such ops, for the units in `shape.held_units`. The executor keeps these
        gradients apart and adds them after the unit's next REDUCE.
        """
        held = self.shape.held_units
        if not held:
            return {}
        reductions = dict.fromkeys(held, 0)
        found: dict[int, tuple[str, ...]] = {}
        for index, op in enumerate(self.ops):
            if op.kind is Kind.REDUCE and op.unit in reductions:
                reductions[op.unit] += 1
            elif op.kind in (Kind.BACKWARD, Kind.WEIGHT):
                assert op.microbatch is not None
                used = self.shape.node_units[op.stage, op.part]
                early = tuple(unit for unit in held if unit in used and reductions[unit] < op.microbatch)
                if early:
                    found[index] = early
        return found

    @cached_property
    def pairs(self) -> Pairs:
        """Pairs of flows whose ops interleave, counted in the ops themselves."""
        return _count_pairs(self)

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """The plan cut at the starts of its slots (`pipeline_order.py`); together they are the whole plan.

        Megatron's interleaved driver asks for one after the other. What belongs to no flow, such as a GATHER for the
        next slot, is in the fragment of the op before it.
        """
        row = slots(self.shape)
        number_of: dict[tuple[bool, int | None, int], int] = {}
        for number, slot in enumerate(row):
            for forward, flows in ((True, slot.forwards), (False, slot.backwards)):
                for call in flows:
                    number_of[forward, call.microbatch, call.chunk] = number
        chunk_of = self.shape.chunk_of
        starts: dict[int, int] = {0: 0}
        for index, op in enumerate(self.ops):
            if op.kind in FLOW_KINDS:
                flow = (op.kind in _FORWARD_KINDS, op.microbatch, chunk_of[op.stage])
                starts.setdefault(number_of[flow], index)
        bounds = [*(starts[number] for number in range(len(row))), len(self.ops)]
        return tuple(Fragment(*slot, *place) for slot, place in zip(row, pairwise(bounds), strict=True))


_FORWARD_KINDS = (Kind.FORWARD, Kind.SEND_FORWARD)


class Fragment(NamedTuple):
    """One slot of a plan: the forwards and backwards that it runs, and its ops, `plan.ops[start:end]`."""

    forwards: tuple[Call, ...]
    backwards: tuple[Call, ...]
    start: int
    end: int


def _count_pairs(plan: Plan) -> Pairs:
    spans: dict[tuple[bool, int | None, int], list[int]] = {}
    chunk_of = plan.shape.chunk_of
    for index, op in enumerate(plan.ops):
        if op.kind in NODE_KINDS:
            flow = (op.kind is Kind.FORWARD, op.microbatch, chunk_of[op.stage])
            spans.setdefault(flow, [index, index])[1] = index
    counts = {(True, False): 0, (True, True): 0, (False, False): 0}
    running: list[tuple[bool, int]] = []
    for (forward, *_), (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        running = [flow for flow in running if flow[1] > start]
        for other, _ in running:
            counts[(other or forward, other and forward)] += 1
        running.append((forward, end))
    return Pairs(counts[True, False], counts[True, True], counts[False, False])


def build_plan(
    *,
    num_layers: int,
    num_microbatches: int,
    moe_layers: Sequence[int] | None = None,
    sharded: bool = False,
    pair_head_and_tail: bool = False,
    pp: int = 1,
    vpp: int = 1,
    rank: int = 0,
    num_mtp_layers: int = 0,
    tied_embeddings: bool = False,
    units: Sequence[str] | None = None,
    trainable_units: Sequence[str] | None = None,
    delay_wgrad: bool = False,
    early_attention_release: bool = False,
    combine_parameters: bool = False,
    has_final_norm: bool = True,
    interleave_head: bool = True,
    microbatch_group_size_per_vp_stage: int | None = None,
    layer_counts: Sequence[int] | None = None,
) -> Plan:
    """Build the plan of one iteration, with pp > 1 that of one pipeline rank. The arguments are `PlanShape`'s fields.

    Args:
        moe_layers: indices of the mixture-of-experts layers, in any order; None means all layers.
        microbatch_group_size_per_vp_stage: None means pp, as in Megatron.

    Raises:
        ConfigError: a value cannot work; the message names the argument, its value and the fix.
    """
    shape = PlanShape(
        num_layers=num_layers,
        num_microbatches=num_microbatches,
        moe_layers=tuple(range(num_layers)) if moe_layers is None else tuple(sorted(moe_layers)),
        num_mtp_layers=num_mtp_layers,
        tied_embeddings=tied_embeddings,
        sharded=sharded,
        units=None if units is None else tuple(units),
        trainable_units=None if trainable_units is None else tuple(trainable_units),
        pair_head_and_tail=pair_head_and_tail,
        interleave_head=interleave_head,
        delay_wgrad=delay_wgrad,
        early_attention_release=early_attention_release,
        combine_parameters=combine_parameters,
        has_final_norm=has_final_norm,
        pp=pp,
        vpp=vpp,
        rank=rank,
        microbatch_group_size_per_vp_stage=_group_size(microbatch_group_size_per_vp_stage, pp, vpp),
        layer_counts=None if layer_counts is None else tuple(layer_counts),
    )
    return Plan(shape, apply_passes(shape, base_order(shape)))


def _group_size(given: int | None, pp: int, vpp: int) -> int:
    if vpp == 1:
        return 0
    return pp if given is None else given
