"""Passes over a plan's ops. Each is a pure function of the shape and the ops, and none changes its argument."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from combined_1f1b.schedule.dependencies import LANE_NUMBER, dependencies
from combined_1f1b.schedule.ops import NODE_KINDS, Kind, Op
from combined_1f1b.schedule.shape import PlanShape


def add_sharding(shape: PlanShape, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Insert GATHER, FREE and REDUCE.

    A unit is gathered one layer ahead: when its flow enters the last layer before the stage that uses it, or, for a flow
    that has entered no layer yet, when any flow enters one. It is freed after the last use in that stage. Where the next
    stretch begins no later than the op after the last use, the unit stays gathered instead; so it does while another
    flow still uses it. REDUCE comes right after the last gradient of a micro-batch, before the FREE.
    """
    if not shape.gathered_units:
        return ops
    before: defaultdict[int, list[Op]] = defaultdict(list)
    after: defaultdict[int, list[Op]] = defaultdict(list)
    for unit, indices in _last_gradients(shape, ops).items():
        for index in indices:
            after[index].append(Op.on_unit(Kind.REDUCE, unit))
    for unit, start, end in _stretches(shape, ops):
        before[start].append(Op.on_unit(Kind.GATHER, unit))
        after[end].append(Op.on_unit(Kind.FREE, unit))
    result: list[Op] = []
    for index, op in enumerate(ops):
        result += before.get(index, ())
        result.append(op)
        result += after.get(index, ())
    return tuple(result)


def _last_gradients(shape: PlanShape, ops: Sequence[Op]) -> dict[str, list[int]]:
    """unit -> index of the op that gives its last gradient, for each micro-batch."""
    trained = set(shape.reduced_units)
    gives = {node: [unit for unit in units if unit in trained] for node, units in shape.node_units.items()}
    last: dict[str, dict[int | None, int]] = {unit: {} for unit in shape.reduced_units}
    for index, op in enumerate(ops):
        if op.kind is Kind.BACKWARD or op.kind is Kind.WEIGHT:
            for unit in gives[op.stage, op.part]:
                last[unit][op.microbatch] = index
    return {unit: list(indices.values()) for unit, indices in last.items()}


def _stretches(shape: PlanShape, ops: Sequence[Op]) -> list[tuple[str, int, int]]:
    """Stretches of ops during which a unit is gathered: (unit, first, last), in the order of the unit's first use."""
    uses = shape.node_units
    layers = {stage.name for stage in shape.layer_stages}
    found: list[_Stretch] = []
    latest: dict[str, _Stretch] = {}
    flows: dict[tuple[bool, int | None], _Flow] = {}
    entered = 0  # the op at which any flow entered a layer last
    for index, op in enumerate(ops):
        if op.kind not in NODE_KINDS:
            continue
        key = (op.kind is Kind.FORWARD, op.microbatch)
        flow = flows.get(key)
        if flow is None:
            flow = flows[key] = _Flow(entered)
        if op.stage != flow.stage:
            flow.enter(op.stage, index, op.stage in layers)
            if op.stage in layers:
                entered = index
        for unit in uses[op.stage, op.part]:
            stretch = latest.get(unit)
            # Gathering again at once after the FREE would be wasted traffic.
            if stretch is None or flow.ahead > stretch.last + 1:
                stretch = latest[unit] = _Stretch(unit, flow.ahead)
                found.append(stretch)
            stretch.last = index
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
    clocks = [[-1] * len(LANE_NUMBER) for _ in LANE_NUMBER]
    seen_by: list[tuple[int, ...]] = []
    result: list[Op] = []
    for index, needed in enumerate(dependencies(shape, ops)):
        lane = lanes[index]
        clock = clocks[lane]
        waits: list[int] = []
        for other in sorted(needed, reverse=True):
            if clock[lanes[other]] < other and lanes[other] != lane:
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
