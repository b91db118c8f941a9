"""Passes over a plan's ops. Each is a pure function of the shape and the ops, and none changes its argument."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from combined_1f1b.schedule.dependencies import LANE_NUMBER, dependencies, lane_count
from combined_1f1b.schedule.ops import NODE_KINDS, Kind, Lane, Op
from combined_1f1b.schedule.shape import LOOKED_UP, PlanShape


def add_sharding(shape: PlanShape, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Insert GATHER, FREE and REDUCE.

    A unit is gathered one layer ahead: when its flow enters the last layer before the stage that uses it, or, for a
    flow that has entered no layer yet, when any flow enters one. So a model chunk's first units are gathered during
    whatever the plan runs before it. A unit is freed after the last use in that stage. Where no layer computes between
    the FREE and the next GATHER, the unit stays gathered instead; so it does while another flow still uses it. REDUCE
    comes after the last gradient of a micro-batch and before the FREE, except for weights that are only looked up.
    """
    if not shape.gathered_units:
        return ops
    before: defaultdict[int, list[Op]] = defaultdict(list)
    after: defaultdict[int, list[Op]] = defaultdict(list)
    gather, free, reduce = (
        {unit: Op.on_unit(kind, unit) for unit in shape.gathered_units}
        for kind in (Kind.GATHER, Kind.FREE, Kind.REDUCE)
    )
    reductions = _reductions(shape, ops)
    for index, units in reductions.items():
        after[index] += [reduce[unit] for unit in units]
    for unit, start, end in _stretches(shape, ops, reductions):
        before[start].append(gather[unit])
        after[end].append(free[unit])
    result: list[Op] = []
    for index, op in enumerate(ops):
        result += before.get(index, ())
        result.append(op)
        result += after.get(index, ())
    return tuple(result)


def _reductions(shape: PlanShape, ops: Sequence[Op]) -> dict[int, list[str]]:
    """Index of an op -> units that are reduced after it.

    A reduction makes the compute lane wait for the one before. So units that one op completes are reduced smallest
    first, and the final norm, which follows a large unit at once, only after the next compute node of the flow.
    """
    trained = set(shape.reduced_units)
    gives = {node: [unit for unit in reversed(units) if unit in trained] for node, units in shape.node_units.items()}
    last: dict[tuple[int | None, str], int] = {}
    norm_pending: set[int | None] = set()
    norm_chunk = shape.chunk_of.get("final_norm")
    for index, op in enumerate(ops):
        if op.kind is not Kind.BACKWARD and op.kind is not Kind.WEIGHT:
            continue
        pending = op.microbatch in norm_pending and op.lane is Lane.COMPUTE
        if pending and shape.chunk_of[op.stage] == norm_chunk:
            norm_pending.remove(op.microbatch)
            last[op.microbatch, "final_norm"] = index
        for unit in gives[op.stage, op.part]:
            last.pop((op.microbatch, unit), None)
            last[op.microbatch, unit] = index
            if unit == "final_norm":
                norm_pending.add(op.microbatch)
    reductions: dict[int, list[str]] = {}
    for (_, unit), index in last.items():
        reductions.setdefault(index, []).append(unit)
    return reductions


def _stretches(
    shape: PlanShape, ops: Sequence[Op], reductions: Mapping[int, Sequence[str]]
) -> list[tuple[str, int, int]]:
    """Stretches of ops during which a unit is gathered: (unit, first, last), in the order of the unit's first use."""
    layers = {stage.name for stage in shape.layer_stages}
    found: list[_Stretch] = []
    latest: dict[str, _Stretch] = {}
    flows: dict[tuple[bool, int | None, int], _Flow] = {}
    chunk_of = shape.chunk_of
    # The op at which any flow entered a layer last, and such an op before which layers have computed since.
    entered = entered_before = 0
    computed = [0] * (len(ops) + 1)  # how many compute nodes of layers come before an op
    for index, op in enumerate(ops):
        computed[index + 1] = computed[index] + (op.part != "" and op.lane is Lane.COMPUTE)
        if op.kind not in NODE_KINDS:
            continue
        key = (op.kind is Kind.FORWARD, op.microbatch, chunk_of[op.stage])
        flow = flows.get(key)
        if flow is None:
            # A flow that starts with a layer enters it together with its partner, which may have come first.
            together = op.stage in layers and computed[index] == computed[entered]
            flow = flows[key] = _Flow(entered_before if together else entered)
        if op.stage != flow.stage:
            flow.enter(op.stage, index, op.stage in layers)
            if op.stage in layers:
                entered_before = entered if computed[index] > computed[entered] else entered_before
                entered = index
        uses = shape.node_units if op.kind is Kind.FORWARD else shape.backward_units
        for unit in uses[op.stage, op.part]:
            stretch = latest.get(unit)
            if stretch is None or computed[flow.ahead] > computed[stretch.last + 1]:
                stretch = latest[unit] = _Stretch(unit, flow.ahead)
                found.append(stretch)
            stretch.last = index
        for unit in reductions.get(index, ()):
            if unit != LOOKED_UP:
                latest[unit].last = index
    return [(stretch.unit, stretch.first, stretch.last) for stretch in found]


class _Stretch:
    """One stretch, while it is being found."""

    __slots__ = ("first", "last", "unit")

    def __init__(self, unit: str, first: int) -> None:
        self.unit, self.first, self.last = unit, first, first


class _Flow:
    """A flow's stage, where it entered its latest layer, and where the gathers for its stage belong."""

    __slots__ = ("ahead", "entered", "stage")

    def __init__(self, entered: int) -> None:
        self.stage, self.entered, self.ahead = "", entered, entered

    def enter(self, stage: str, index: int, is_layer: bool) -> None:
        self.stage, self.ahead = stage, self.entered
        if is_layer:
            self.entered = index


def add_waits(shape: PlanShape, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Give every op the fewest waits that its dependencies on other lanes need.

    A lane's clock says up to which op it has seen each other lane. What the clock already covers needs no wait. Later
    ops are looked at first: an earlier one cannot stand for them.
    """
    lanes = [LANE_NUMBER[op.issue_lane] for op in ops]
    count = lane_count(shape)
    clocks = [[-1] * count for _ in range(count)]
    seen_by: list[tuple[int, ...]] = []
    result: list[Op] = []
    for index, needed in enumerate(dependencies(shape, ops)):
        lane = lanes[index]
        clock = clocks[lane]
        waits: list[int] = []
        unseen = [other for other in needed if lanes[other] != lane and clock[lanes[other]] < other]
        for other in sorted(unseen, reverse=True):
            if clock[lanes[other]] < other:
                waits.append(other)
                clock[:] = map(max, clock, seen_by[other])
        clock[lane] = index
        seen_by.append(tuple(clock))
        op = ops[index]
        names = tuple(ops[other].name for other in reversed(waits))
        result.append(op if names == op.waits else op.with_waits(names))
    return tuple(result)


PASSES = (add_sharding, add_waits)
"""All passes, in order."""


def apply_passes(shape: PlanShape, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Run every pass."""
    for add in PASSES:
        ops = add(shape, ops)
    return ops
