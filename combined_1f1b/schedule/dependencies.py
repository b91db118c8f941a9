"""Which op needs which: the one place where this is written. The waits are derived from it and the validator asks it.

    forward or backward node    the node before it in the same flow
    first backward node         the last forward node, and BEGIN_BACKWARD, of the flow
    first node of a flow        the transfer that brings what enters it, if one does
    SEND                        the flow's last node
    weight gradients            their backward node
    node that reads a unit      the unit's latest GATHER
    node that gives gradients   the unit's latest REDUCE (the gradients of the micro-batch before have left)
    GATHER                      the unit's latest FREE
    FREE                        every op since the GATHER that read the unit, and its REDUCE
    REDUCE number k of a unit   every op of micro-batch k that gives the unit gradients, and BEGIN_BACKWARD.k

A flow is the forward, or the backward, of one micro-batch through one model chunk. What a flow receives and sends count
as its first and its last step, so a chunk without layers has flows too.

Nodes give gradients in the order of the micro-batches: losses and parameters then equal those of Megatron's own
schedule bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from combined_1f1b.schedule.chunks import Chunk
from combined_1f1b.schedule.excerpt import bad_op
from combined_1f1b.schedule.ops import NODE_KINDS, Kind, Lane, Op
from combined_1f1b.schedule.shape import LOOKED_UP, WEIGHT_PARTS, PlanShape

ISSUE_LANES = (Lane.COMPUTE, Lane.COMM, Lane.GATHER, Lane.PREVIOUS, Lane.NEXT)
"""Lanes whose streams issue ops and wait. The reduction stream is the sharding driver's."""

LANE_NUMBER = {lane: number for number, lane in enumerate(ISSUE_LANES)}


def lane_count(shape: PlanShape) -> int:
    """Return how many of the issue lanes a plan uses: the last two only between pipeline ranks."""
    return len(ISSUE_LANES) if shape.pp > 1 else 3


class _Unit:
    """What happened to one FSDP unit so far. Indices of ops; -1 means never."""

    __slots__ = ("begun", "free", "gather", "gathered", "held", "name", "reduce", "reductions", "users", "writers")

    def __init__(self, name: str, held: bool, begun: dict[int, int]) -> None:
        self.name = name
        self.begun = begun  # of the chunk that has the unit
        self.held = held
        self.gather = self.free = self.reduce = -1
        self.gathered = False
        self.users: dict[Lane, int] = {}  # latest user since the GATHER, by lane: a lane's order covers the others
        self.writers: dict[int, list[int]] = {}  # micro-batch -> ops that gave gradients which are not reduced yet
        self.reductions = 0  # of micro-batches 0 .. reductions-1


class _Flows:
    """The flows of one chunk, as far as they have come: indices of ops, by micro-batch."""

    def __init__(self, chunk: Chunk, count: int) -> None:
        self.chunk = chunk
        name = chunk.name
        enter, leave = ((Kind.RECEIVE_FORWARD, name, ""),), ((Kind.SEND_FORWARD, name, ""),)
        nodes = [(Kind.FORWARD, *node) for node in chunk.nodes]
        self.forward_steps = [*enter * chunk.receives, *nodes, *leave * chunk.sends]
        enter, leave = ((Kind.RECEIVE_BACKWARD, name, ""),), ((Kind.SEND_BACKWARD, name, ""),)
        nodes = [(Kind.BACKWARD, *node) for node in reversed(chunk.nodes)]
        self.backward_steps = [*enter * chunk.sends, *nodes, *leave * chunk.receives]
        self.forwards: list[list[int]] = [[] for _ in range(count)]
        self.backwards: list[list[int]] = [[] for _ in range(count)]
        self.weights: list[dict[int, int]] = [{} for _ in range(count)]
        self.begun: dict[int, int] = {}
        self.delayed = sum(part in WEIGHT_PARTS for _, part in chunk.nodes)


class _Walk:
    """Goes through a plan op by op: says what each op depends on, or raises at the first one that lacks something."""

    def __init__(self, shape: PlanShape, ops: Sequence[Op]) -> None:
        self.shape = shape
        self.ops = ops
        self.flows = [_Flows(chunk, shape.num_microbatches) for chunk in shape.chunks]
        self.place = {
            step: (flow, position)
            for flow in self.flows
            for steps in (flow.forward_steps, flow.backward_steps)
            for position, step in enumerate(steps)
        }
        chunk_of = shape.chunk_of
        nodes = shape.node_units
        chunk_of_unit = {name: chunk_of[stage] for (stage, _), names in nodes.items() for name in names}
        self.units = {
            name: _Unit(name, name in shape.held_units, self.flows[chunk_of_unit[name]].begun)
            for name in shape.gathered_units
        }
        self.forward_uses = {node: tuple(self.units[name] for name in names) for node, names in nodes.items()}
        self.backward_uses = {
            node: tuple(self.units[name] for name in names) for node, names in shape.backward_units.items()
        }
        reduced = set(shape.reduced_units)
        self.gives = {
            node: tuple(unit for unit in units if unit.name in reduced) for node, units in self.forward_uses.items()
        }
        # How many ops of one micro-batch give a unit gradients.
        self.givers = dict.fromkeys(reduced, 0)
        for node, units in self.gives.items():
            for unit in units:
                self.givers[unit.name] += 2 if shape.delay_wgrad and node[1] in WEIGHT_PARTS else 1
        self.handlers = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.WEIGHT: self.weight,
            Kind.GATHER: self.gather,
            Kind.FREE: self.free,
            Kind.REDUCE: self.reduce,
            Kind.BEGIN_BACKWARD: self.begin_backward,
            Kind.RECEIVE_FORWARD: self.forward,
            Kind.SEND_FORWARD: self.forward,
            Kind.RECEIVE_BACKWARD: self.backward,
            Kind.SEND_BACKWARD: self.backward,
        }

    def find(self, index: int, op: Op, kind: Kind) -> tuple[_Flows, int, int]:
        """The op's flows, its place among the steps of a flow of this kind, and its micro-batch."""
        found = self.place.get((kind, op.stage, op.part))
        if found is None:
            what = "node" if op.kind in NODE_KINDS else "transfer"
            raise bad_op(self.ops, index, f"the model has no such {what}")
        return *found, self.check_microbatch(index, op)

    def check_microbatch(self, index: int, op: Op) -> int:
        assert op.microbatch is not None
        if op.microbatch >= self.shape.num_microbatches:
            raise bad_op(self.ops, index, f"the plan has {self.shape.num_microbatches} micro-batches")
        return op.microbatch

    def check_turn(self, index: int, op: Op, position: int, done: int, steps: Sequence[tuple[Kind, str, str]]) -> None:
        """A flow's steps come one by one: the next one is number `done`."""
        if position < done:
            raise bad_op(self.ops, index, "issued a second time")
        if position > done:
            raise bad_op(self.ops, index, f"needs {_step_name(steps[done], op.microbatch)} first")

    def use_units(self, index: int, op: Op, deps: list[int]) -> None:
        uses = self.forward_uses if op.kind is Kind.FORWARD else self.backward_uses
        for unit in uses[op.stage, op.part]:
            if not unit.gathered:
                when = f"was freed at op {unit.free}" if unit.free >= 0 else "was never gathered"
                raise bad_op(self.ops, index, f"uses {unit.name}, which {when}")
            deps.append(unit.gather)
            unit.users[op.issue_lane] = index

    def give_gradients(self, index: int, op: Op, microbatch: int, deps: list[int]) -> None:
        for unit in self.gives[op.stage, op.part]:
            if unit.reductions > microbatch:
                raise bad_op(self.ops, index, f"gives gradients to {unit.name} after REDUCE at op {unit.reduce}")
            # A held unit's early gradients are kept apart by the executor; those of its own stage are not.
            if unit.reductions < microbatch and not (unit.held and op.stage != unit.name):
                raise bad_op(
                    self.ops,
                    index,
                    f"gives gradients to {unit.name} before REDUCE.{unit.name} of micro-batch {microbatch - 1}",
                )
            if unit.reduce >= 0:
                deps.append(unit.reduce)
            unit.writers.setdefault(microbatch, []).append(index)

    def forward(self, index: int, op: Op) -> list[int]:
        flows, position, microbatch = self.find(index, op, op.kind)
        flow = flows.forwards[microbatch]
        if position != len(flow):
            self.check_turn(index, op, position, len(flow), flows.forward_steps)
        deps = [flow[-1]] if flow else []
        flow.append(index)
        if op.kind is Kind.FORWARD:
            self.use_units(index, op, deps)
        return deps

    def backward(self, index: int, op: Op) -> list[int]:
        flows, position, microbatch = self.find(index, op, op.kind)
        flow = flows.backwards[microbatch]
        if position != len(flow):
            self.check_turn(index, op, position, len(flow), flows.backward_steps)
        deps = [flow[-1]] if flow else self.whole_forward(index, flows, microbatch)
        if position == flows.chunk.sends and op.kind is Kind.BACKWARD:
            if microbatch not in flows.begun:
                begin = _step_name((Kind.BEGIN_BACKWARD, flows.chunk.name, ""), microbatch)
                raise bad_op(self.ops, index, f"needs {begin} first")
            deps += [flows.forwards[microbatch][-1], flows.begun[microbatch]]
        if microbatch and len(flows.backwards[microbatch - 1]) <= position:
            raise bad_op(
                self.ops, index, f"needs the same node of micro-batch {microbatch - 1} first, to add gradients in order"
            )
        flow.append(index)
        if op.kind is Kind.BACKWARD:
            self.use_units(index, op, deps)
            self.give_gradients(index, op, microbatch, deps)
        return deps

    def whole_forward(self, index: int, flows: _Flows, microbatch: int) -> list[int]:
        forward = flows.forwards[microbatch]
        if len(forward) < len(flows.forward_steps):
            raise bad_op(self.ops, index, f"needs the whole forward of micro-batch {microbatch} first")
        return forward[-1:]

    def weight(self, index: int, op: Op) -> list[int]:
        flows, turn, microbatch = self.find(index, op, Kind.BACKWARD)
        if not self.shape.delay_wgrad or op.part not in WEIGHT_PARTS:
            raise bad_op(self.ops, index, "this node's weight gradients are not delayed")
        if turn in flows.weights[microbatch]:
            raise bad_op(self.ops, index, "issued a second time")
        if len(flows.backwards[microbatch]) <= turn:
            raise bad_op(self.ops, index, f"needs B{op.name[1:]} first")
        if microbatch and turn not in flows.weights[microbatch - 1]:
            raise bad_op(
                self.ops, index, f"needs the same node of micro-batch {microbatch - 1} first, to add gradients in order"
            )
        deps = [flows.backwards[microbatch][turn]]
        flows.weights[microbatch][turn] = index
        self.use_units(index, op, deps)
        self.give_gradients(index, op, microbatch, deps)
        return deps

    def unit(self, index: int, op: Op) -> _Unit:
        unit = self.units.get(op.unit)
        if unit is None:
            raise bad_op(self.ops, index, "the plan's shape has no such unit")
        return unit

    def gather(self, index: int, op: Op) -> list[int]:
        unit = self.unit(index, op)
        if unit.gathered:
            raise bad_op(self.ops, index, f"already gathered at op {unit.gather}")
        unit.gathered, unit.gather, unit.users = True, index, {}
        return [unit.free] if unit.free >= 0 else []

    def free(self, index: int, op: Op) -> list[int]:
        unit = self.unit(index, op)
        if not unit.gathered:
            raise bad_op(self.ops, index, "not gathered")
        if any(len(indices) == self.givers[unit.name] for indices in unit.writers.values()):
            raise bad_op(self.ops, index, f"comes before REDUCE.{unit.name}")
        unit.gathered, unit.free = False, index
        return list(unit.users.values())

    def reduce(self, index: int, op: Op) -> list[int]:
        unit = self.unit(index, op)
        if unit.name not in self.givers:
            raise bad_op(self.ops, index, "the unit is not trained")
        microbatch = unit.reductions
        writers = unit.writers.pop(microbatch, [])
        if len(writers) < self.givers[unit.name]:
            given = f"{len(writers)} of {self.givers[unit.name]}"
            raise bad_op(self.ops, index, f"micro-batch {microbatch} has given {given} of its gradients")
        if not unit.gathered and unit.name != LOOKED_UP:
            raise bad_op(self.ops, index, f"comes after FREE.{unit.name} at op {unit.free}")
        unit.reductions += 1
        unit.reduce = index
        unit.users[op.issue_lane] = index
        return [*writers, unit.begun[microbatch]]

    def begin_backward(self, index: int, op: Op) -> list[int]:
        microbatch = self.check_microbatch(index, op)
        number = self.shape.chunk_of.get(op.stage)
        if number is None:
            raise bad_op(self.ops, index, "the rank has no such chunk")
        begun = self.flows[number].begun
        if microbatch in begun:
            raise bad_op(self.ops, index, f"issued a second time, first at op {begun[microbatch]}")
        begun[microbatch] = index
        return []

    def check_end(self) -> None:
        """At the end every flow is complete, every gradient is reduced and every unit is free."""
        end = len(self.ops)
        for flows in self.flows:
            delayed = flows.delayed if self.shape.delay_wgrad else 0
            for microbatch in range(self.shape.num_microbatches):
                for done, steps in ((flows.forwards, flows.forward_steps), (flows.backwards, flows.backward_steps)):
                    if len(done[microbatch]) < len(steps):
                        missing = _step_name(steps[len(done[microbatch])], microbatch)
                        raise bad_op(self.ops, end, f"{missing} is missing")
                if microbatch not in flows.begun:
                    raise bad_op(self.ops, end, f"a BEGIN_BACKWARD of micro-batch {microbatch} is missing")
                if len(flows.weights[microbatch]) < delayed:
                    raise bad_op(self.ops, end, f"weight gradients of micro-batch {microbatch} are missing")
        for unit in self.units.values():
            if unit.name in self.givers and unit.reductions < self.shape.num_microbatches:
                raise bad_op(self.ops, end, f"REDUCE.{unit.name} of micro-batch {unit.reductions} is missing")
            if unit.gathered:
                raise bad_op(self.ops, unit.gather, "left gathered at the end of the plan")


def _step_name(step: tuple[Kind, str, str], microbatch: int | None) -> str:
    kind, stage, part = step
    return Op(kind, microbatch, stage, part).name


def dependencies(shape: PlanShape, ops: Sequence[Op]) -> list[list[int]]:
    """Return for every op the indices of the earlier ops that it needs, or that stand for them.

    Ops of one lane run in order, so of several ops on one lane the latest stands for all.

    Raises:
        PlanError: an op lacks something that it needs; the message names the first such op with the plan around it.
    """
    walk = _Walk(shape, ops)
    handlers = walk.handlers
    result = [handlers[op.kind](index, op) for index, op in enumerate(ops)]
    walk.check_end()
    return result
