"""How long a plan takes on idealised lanes, and how much of its traffic runs under compute.

Every op starts when its lane is free and its waits are done; issuing costs nothing. A REDUCE packs on the compute lane
once the reduction stream is free, and reduces there. A SEND takes its lane for the time of a transfer, and a RECV ends
with it. Times are relative: a layer's attention forward is 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from combined_1f1b.schedule.dependencies import LANE_NUMBER
from combined_1f1b.schedule.ops import COMM_PARTS, FLOW_KINDS, TRANSFER_KINDS, Kind, Lane
from combined_1f1b.schedule.plan import Plan
from combined_1f1b.schedule.shape import WEIGHT_PARTS
from combined_1f1b.schedule.transfers import SEND_KINDS, Transfer, transfer_of


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Time of each kind of op, in units of one attention forward or in seconds; all of one plan in the same unit.

    Attributes:
        embedding .. loss: forward time of a part or stage. `dispatch` and `combine` take as long in the backward.
        backward: a compute node's backward time as a multiple of its forward, weight gradients included.
        weight: the part of `backward` that is weight gradients, which W takes over when they are delayed.
        gather, reduce: time of a unit's all-gather and reduction.
        pack: time of the copy on the compute lane before the reduction.
        transfer: time of a tensor's way from one pipeline stage to the next.
        unit_scale: unit name -> multiple of `gather`, `reduce` and `pack` for units that are larger or smaller.
    """

    embedding: float = 0.1
    attention: float = 1.0
    dispatch: float = 0.6
    experts: float = 1.0
    mlp: float = 1.0
    combine: float = 0.6
    postprocess: float = 0.1
    final_norm: float = 0.05
    output_layer: float = 0.8
    loss: float = 0.05
    backward: float = 2.0
    weight: float = 1.0
    gather: float = 0.4
    reduce: float = 0.4
    pack: float = 0.05
    transfer: float = 0.2
    unit_scale: Mapping[str, float] = field(default_factory=lambda: {"final_norm": 0.02, "root": 0.1})

    def node(self, kind: Kind, name: str, delay_wgrad: bool) -> float:
        """Return the time of a node's op; `name` is its part, or its stage when it has no part."""
        forward: float = getattr(self, name)
        if kind is Kind.FORWARD or name in COMM_PARTS:
            return forward
        if kind is Kind.WEIGHT:
            return forward * self.weight
        split = delay_wgrad and name in WEIGHT_PARTS
        return forward * (self.backward - self.weight if split else self.backward)


class Span(NamedTuple):
    """When an op ran on a lane. A REDUCE has two: packing on the compute lane, then the reduction."""

    op_index: int
    lane: Lane
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a simulated iteration took.

    Attributes:
        makespan: time from the first op to the end of the last one.
        compute_busy, comm_busy: time during which the lane had work.
        exposed_comm: time during which the comm lane had work and the compute lane had none.
        hidden_fraction: part of `comm_busy` that is not exposed; 1 without traffic.
        peak_microbatches: most micro-batches between their first forward op and their last backward op at one time;
            with several model chunks, each micro-batch counts once for every chunk that holds it.
        comm_ops: dispatch and combine ops, forward and backward.
        comm_ops_under_partner: those beside which another flow may run a layer's compute node or its output layer, by
            the plan's waits alone.
        spans: when each op ran, in the order of the plan.
    """

    makespan: float
    compute_busy: float
    comm_busy: float
    exposed_comm: float
    hidden_fraction: float
    peak_microbatches: int
    comm_ops: int
    comm_ops_under_partner: int
    spans: tuple[Span, ...] = field(repr=False)


def simulate(plan: Plan, cost: CostModel | None = None) -> Simulation:
    """Simulate a plan. What a pipeline rank receives comes as soon as its lane is free: see `simulate_ranks`.

    Args:
        plan: a valid plan.
        cost: times of the ops; relative defaults when None.
    """
    (simulation,) = _simulate([plan], cost or CostModel())
    return simulation


def simulate_ranks(plans: Sequence[Plan], cost: CostModel | None = None) -> tuple[Simulation, ...]:
    """Simulate the plans of all ranks of a pipeline, each waiting for what the others send.

    Args:
        plans: valid plans, one for each pipeline rank.
        cost: times of the ops; relative defaults when None.

    Returns:
        One simulation for each plan. All start at time 0, and the iteration takes the largest makespan.
    """
    return tuple(_simulate(plans, cost or CostModel()))


def _simulate(plans: Sequence[Plan], cost: CostModel) -> Iterator[Simulation]:
    arrived: dict[Transfer, float] | None = {} if len(plans) > 1 else None
    spans: list[list[Span]] = [[] for _ in plans]
    running = deque(_issue(plan, cost, rank_spans, arrived) for plan, rank_spans in zip(plans, spans, strict=True))
    while running:
        rank = running.popleft()
        for _ in rank:  # it waits for another rank: go on with that
            running.append(rank)
            break
    for plan, rank_spans in zip(plans, spans, strict=True):
        yield _summary(plan, rank_spans)


def _summary(plan: Plan, spans: Sequence[Span]) -> Simulation:
    compute = [(span.start, span.end) for span in spans if span.lane is Lane.COMPUTE]
    comm = [(span.start, span.end) for span in spans if span.lane is Lane.COMM]
    comm_busy = _total(comm)
    hidden = _overlap(compute, comm)
    return Simulation(
        makespan=max((span.end for span in spans), default=0.0),
        compute_busy=_total(compute),
        comm_busy=comm_busy,
        exposed_comm=comm_busy - hidden,
        hidden_fraction=hidden / comm_busy if comm_busy else 1.0,
        peak_microbatches=peak_microbatches(plan),
        comm_ops=sum(op.lane is Lane.COMM for op in plan.ops),
        comm_ops_under_partner=comm_ops_under_partner(plan),
        spans=tuple(spans),
    )


def _issue(
    plan: Plan, cost: CostModel, spans: list[Span], arrived: dict[Transfer, float] | None
) -> Generator[None, None, None]:
    """Append the spans of a plan's ops, and pause at a RECV until its tensor is in `arrived`."""
    node_cost: dict[tuple[Kind, str], float] = {}
    lane_free = dict.fromkeys(Lane, 0.0)
    end_of: list[float] = []
    for index, (op, waits) in enumerate(zip(plan.ops, plan.wait_indices, strict=True)):
        kind, lane = op.kind, op.issue_lane
        start = lane_free[lane]
        for other in waits:
            start = max(start, end_of[other])
        if kind is Kind.FREE or kind is Kind.BEGIN_BACKWARD:
            if kind is Kind.BEGIN_BACKWARD:
                lane_free[Lane.REDUCE] = max(lane_free[Lane.REDUCE], start)
            end = start
        elif kind is Kind.GATHER:
            end = start + cost.gather * cost.unit_scale.get(op.unit, 1.0)
        elif kind is Kind.REDUCE:
            scale = cost.unit_scale.get(op.unit, 1.0)
            start = max(start, lane_free[Lane.REDUCE])
            end = start + cost.pack * scale
            lane_free[Lane.REDUCE] = end + cost.reduce * scale
        elif kind in TRANSFER_KINDS:
            end = start + cost.transfer
            if arrived is not None:
                transfer = transfer_of(plan.shape, op)
                if kind in SEND_KINDS:
                    arrived[transfer] = end
                else:
                    while transfer not in arrived:
                        yield
                    end = max(start, arrived[transfer])
                    start = max(start, end - cost.transfer)
        else:
            key = (kind, op.part or op.stage)
            if key not in node_cost:
                node_cost[key] = cost.node(kind, key[1], plan.shape.delay_wgrad)
            end = start + node_cost[key]
        lane_free[lane] = end
        end_of.append(end)
        spans.append(Span(index, lane, start, end))
        if kind is Kind.REDUCE:
            spans.append(Span(index, Lane.REDUCE, end, lane_free[Lane.REDUCE]))


def _total(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _overlap(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Time that two lanes are busy at once; each lane's intervals are in order and do not overlap."""
    total, place = 0.0, 0
    for start, end in second:
        while place < len(first) and first[place][1] <= start:
            place += 1
        at = place
        while at < len(first) and first[at][0] < end:
            total += min(end, first[at][1]) - max(start, first[at][0])
            at += 1
    return total


def peak_microbatches(plan: Plan) -> int:
    """Return the most (micro-batch, chunk) whose activations are alive at one time, whole or in part."""
    chunk_of = plan.shape.chunk_of
    flows = [(op.microbatch, chunk_of[op.stage]) if op.kind in FLOW_KINDS else None for op in plan.ops]
    last = {flow: index for index, (op, flow) in enumerate(zip(plan.ops, flows, strict=True)) if flow is not None}
    alive: set[tuple[int | None, int]] = set()
    peak = 0
    for index, flow in enumerate(flows):
        if flow is None:
            continue
        alive.add(flow)
        peak = max(peak, len(alive))
        if last[flow] == index:
            alive.discard(flow)
    return peak


def comm_ops_under_partner(plan: Plan) -> int:
    """Count the dispatch and combine ops beside which another flow may run a layer's compute node or its output layer.

    A compute op may run beside a comm op when neither waits for the other, directly or through other ops. Embeddings,
    norms and losses are too short to count as partners.
    """
    ops = plan.ops
    number = LANE_NUMBER[Lane.COMPUTE]
    nodes = [
        index
        for index, op in enumerate(ops)
        if op.lane is Lane.COMPUTE and (op.part != "" or op.stage == "output_layer")
    ]
    count = place = 0
    for index, op in enumerate(ops):
        if op.lane is not Lane.COMM:
            continue
        before, after = plan.clocks[index][number], plan.release_after(index, Lane.COMPUTE)
        while place < len(nodes) and nodes[place] <= before:
            place += 1
        at = place
        while at < len(nodes) and nodes[at] < after:
            partner = ops[nodes[at]]
            if partner.microbatch != op.microbatch or (partner.kind is Kind.FORWARD) != (op.kind is Kind.FORWARD):
                count += 1
                break
            at += 1
    return count
