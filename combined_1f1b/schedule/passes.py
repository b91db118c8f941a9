"""Passes over a plan's ops. Each is a pure function of the shape and the ops, and none changes its argument."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from combined_1f1b.schedule.dependencies import LANE_NUMBER, dependencies
from combined_1f1b.schedule.ops import NODE_KINDS, Kind, Op
from combined_1f1b.schedule.shape import PlanShape


def add_sharding(shape: PlanShape, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Insert GATHER, FREE and REDUCE.

    A unit is gathered when its flow starts the stage before the one that uses it, and freed after the last use in that
    stage. Where the next use begins no later than the op after the last one, the unit stays gathered instead; so it does
    while another flow still uses it. REDUCE comes right after the last gradient of a micro-batch, before the FREE.
    """
    if not shape.gathered_units:
        return ops
    before: defaultdict[int, list[Op]] = defaultdict(list)
    after: defaultdict[int, list[Op]] = defaultdict(list)
    for unit, indices in _last_gradients(shape, ops).items():
        for index in indices:
            after[index].append(Op.on_unit(Kind.REDUCE, unit))
    for unit, intervals in _intervals(shape, ops).items():
        gather, free = Op.on_unit(Kind.GATHER, unit), Op.on_unit(Kind.FREE, unit)
        for start, end in intervals:
            before[start].append(gather)
            after[end].append(free)
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


def _intervals(shape: PlanShape, ops: Sequence[Op]) -> dict[str, list[tuple[int, int]]]:
    """unit -> stretches of ops (first, last) during which it is gathered."""
    uses = shape.node_units
    spans: dict[str, list[list[int]]] = {unit: [] for unit in shape.gathered_units}
    # Per flow: its stage, where the stage began and where the stage before began, and the spans opened in this stage.
    flows: dict[tuple[bool, int | None], tuple[str, int, int, dict[str, list[int]]]] = {}
    for index, op in enumerate(ops):
        if op.kind not in NODE_KINDS:
            continue
        key = (op.kind is Kind.FORWARD, op.microbatch)
        stage, began, began_before, opened = flows.get(key, ("", index, index, {}))
        if stage != op.stage:
            began, began_before, opened = index, began, {}
            flows[key] = (op.stage, began, began_before, opened)
        for unit in uses[op.stage, op.part]:
            if unit in opened:
                opened[unit][1] = index
            else:
                span = opened[unit] = [began_before, index]
                spans[unit].append(span)
    return {unit: _merged(found) for unit, found in spans.items()}


def _merged(spans: list[list[int]]) -> list[tuple[int, int]]:
    """Join spans that overlap or touch: gathering again at once would be wasted traffic."""
    merged: list[list[int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def add_waits(shape: PlanShape, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Give every op the fewest waits that its dependencies on other lanes need.

    A lane's clock says up to which op it has seen each other lane. What the clock already covers needs no wait. Later ops
    are looked at first, because what a later op has seen an earlier one cannot add to.
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
