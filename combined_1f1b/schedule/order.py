"""The order in which nodes are issued, before anything is known of FSDP or of waits between lanes.

Combined 1F1B with n micro-batches, and the same with head and tail paired (| separates what runs together):

    F0   F1|B0   F2|B1   ...   F{n-1}|B{n-2}   B{n-1}
    F0|F1   F2|B0   F3|B1   ...   F{n-1}|B{n-3}   B{n-2}|B{n-1}

Pipelines have longer warm-ups: which flows run in which slot, and what is sent and received in between, is in
`pipeline_order.py`. Flows that run together meet layer by layer, as the tables in `tables.py` say.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from combined_1f1b.schedule.chunks import Stage
from combined_1f1b.schedule.ops import Kind, Op
from combined_1f1b.schedule.pipeline_order import Call, Slot, arrivals, slots
from combined_1f1b.schedule.shape import WEIGHT_PARTS, PlanShape
from combined_1f1b.schedule.tables import (
    BACKWARD_ALONE,
    BACKWARD_WITH_BACKWARD,
    FIRST_EMBEDDING,
    FORWARD_ALONE,
    FORWARD_WITH_BACKWARD,
    FORWARD_WITH_EARLY_BACKWARD,
    FORWARD_WITH_FORWARD,
    SECOND_HEAD,
    SECOND_NORM,
    Row,
)

F, B, W, BEGIN = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT, Kind.BEGIN_BACKWARD


def base_order(shape: PlanShape) -> tuple[Op, ...]:
    """Return every node once, BEGIN_BACKWARD of every backward and every transfer, in the order of issue."""
    order = _Order(shape)
    row = slots(shape)
    if shape.pp == 1:
        for slot in row:
            order.slot(slot)
    else:
        before, *after = arrivals(shape, row)
        order.receive(before)
        for slot, arriving in zip(row, after, strict=True):
            start = len(order.ops)
            order.slot(slot)
            order.transfers(start, slot, arriving)
    return tuple(order.ops)


class _Order:
    """Appends ops to a list; one method for each way in which flows run alone or together."""

    def __init__(self, shape: PlanShape) -> None:
        self.ops: list[Op] = []
        self._shape = shape
        self._chunks = shape.chunks
        self._pair_table = FORWARD_WITH_EARLY_BACKWARD if shape.early_attention_release else FORWARD_WITH_BACKWARD

    def slot(self, slot: Slot) -> None:
        match slot:
            case (forward,), (backward,):
                self.forward_and_backward(forward, backward)
            case (forward,), ():
                self.forward(forward)
            case (), (backward,):
                self.backward(backward)
            case (first, second), ():
                self.two_forwards(first, second)
            case (), (first, second):
                self.two_backwards(first, second)

    def receive(self, arriving: Slot) -> None:
        self.ops += self._transfers(Kind.RECEIVE_FORWARD, arriving.forwards)

    def transfers(self, start: int, slot: Slot, arriving: Slot) -> None:
        """Add what a slot, whose ops begin at `start`, sends, and what is received for the next one.

        Each SEND stands behind its flow's last node, and whichever flow of a pair ends first, each neighbour meets its
        two transfers in the same order: the forward's before the backward's.
        """
        receive_f = self._transfers(Kind.RECEIVE_FORWARD, arriving.forwards)
        receive_b = self._transfers(Kind.RECEIVE_BACKWARD, arriving.backwards)
        ends = [
            (self._end(start, call, kinds), self._transfers(send, [call]))
            for calls, kinds, send in (
                (slot.forwards, (F,), Kind.SEND_FORWARD),
                (slot.backwards, (B, BEGIN), Kind.SEND_BACKWARD),
            )
            for call in calls
        ]
        (first_end, first), (last_end, last) = ends[0], ends[-1]
        if len(ends) == 1:
            inserts = [(last_end, last + receive_f + receive_b)]
        elif not (slot.forwards and slot.backwards):
            inserts = [(last_end, last + receive_f + receive_b), (first_end, first)]
        elif first_end <= last_end:
            inserts = [(last_end, last + receive_b), (first_end, first + receive_f)]
        elif self._shape.vpp == 1:
            inserts = [(first_end, first + receive_b), (last_end, receive_f + last)]
        else:
            inserts = [(first_end, first + receive_f + last + receive_b)]
        for place, ops in inserts:  # the later place first: inserting there moves nothing before it
            self.ops[place:place] = ops

    def _transfers(self, kind: Kind, calls: Iterable[Call]) -> list[Op]:
        to_previous = kind in (Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD)
        chunks = [(call, self._chunks[call.chunk]) for call in calls]
        return [
            Op(kind, call.microbatch, chunk.name)
            for call, chunk in chunks
            if (chunk.receives if to_previous else chunk.sends)
        ]

    def _end(self, start: int, call: Call, kinds: tuple[Kind, ...]) -> int:
        """The place behind the flow's last op; `start` for a flow without ops."""
        for place in range(len(self.ops), start, -1):
            op = self.ops[place - 1]
            if op.kind in kinds and op.microbatch == call.microbatch:
                return place
        return start

    def forward(self, call: Call) -> None:
        chunk, microbatch = self._chunks[call.chunk], call.microbatch
        self._nodes(F, microbatch, chunk.lead)
        for layer, after in zip(chunk.layers, chunk.after, strict=True):
            self._block(FORWARD_ALONE, (microbatch, layer))
            self._nodes(F, microbatch, after)

    def backward(self, call: Call) -> None:
        chunk, microbatch = self._chunks[call.chunk], call.microbatch
        self.ops.append(Op(BEGIN, microbatch, chunk.name))
        for layer, after in zip(reversed(chunk.layers), reversed(chunk.after), strict=True):
            self._nodes(B, microbatch, reversed(after))
            self._block(BACKWARD_ALONE, (microbatch, layer))
        self._nodes(B, microbatch, reversed(chunk.lead))

    def forward_and_backward(self, forward: Call, backward: Call) -> None:
        ahead, back = self._chunks[forward.chunk], self._chunks[backward.chunk]
        self._nodes(F, forward.microbatch, ahead.lead)
        self.ops.append(Op(BEGIN, backward.microbatch, back.name))
        for i, (front, rear) in enumerate(zip_longest(ahead.layers, reversed(back.layers))):
            if rear is not None:
                self._nodes(B, backward.microbatch, reversed(back.after[-1 - i]))
            self._block(self._pair_table, (forward.microbatch, front), (backward.microbatch, rear))
            if front is not None:
                self._nodes(F, forward.microbatch, ahead.after[i])
        self._nodes(B, backward.microbatch, reversed(back.lead))

    def two_forwards(self, first: Call, second: Call) -> None:
        chunk, both = self._chunks[0], (first.microbatch, second.microbatch)
        for microbatch in both:
            self._nodes(F, microbatch, chunk.lead)
        for layer, after in zip(chunk.layers, chunk.after, strict=True):
            self._block(FORWARD_WITH_FORWARD, *((microbatch, layer) for microbatch in both))
            for microbatch in both:
                self._nodes(F, microbatch, after)

    def two_backwards(self, first_call: Call, second_call: Call) -> None:
        chunk, first, second = self._chunks[0], first_call.microbatch, second_call.microbatch
        # Half a layer of lag, plus whole layers where the first backward's gradients of a unit are complete only later:
        # every multi-token-prediction layer adds to the unit "root", and a combine with parameters to its layer's unit.
        predictors = sum(layer.name.startswith("M") for layer in chunk.layers)
        lag = max(predictors, int(self._shape.combine_parameters))
        layers = tuple(reversed(chunk.layers))
        between: dict[Stage | None, tuple[str, ...]] = dict(
            zip(layers, (after[::-1] for after in reversed(chunk.after)), strict=True)
        )
        ahead = (*layers, *[None] * (lag + 1))
        following = (*[None] * lag, *layers, None)
        behind = (None, *following[:-1])
        table = BACKWARD_WITH_BACKWARD
        self.ops.append(Op(BEGIN, first, chunk.name))
        for step, stages in enumerate(zip(ahead, behind, following, strict=True)):
            flows = tuple(zip((first, second, second), stages, strict=True))
            entering = between.get(stages[2], ())
            self._nodes(B, first, between.get(stages[0], ()))
            self._block(table[:SECOND_HEAD], *flows)
            if step == lag:
                self.ops.append(Op(BEGIN, second, chunk.name))
            self._nodes(B, second, (name for name in entering if name != "final_norm"))
            self._block(table[SECOND_HEAD:FIRST_EMBEDDING], *flows)
            if step == len(layers):
                self._nodes(B, first, reversed(chunk.lead))
            self._block(table[FIRST_EMBEDDING:SECOND_NORM], *flows)
            self._nodes(B, second, (name for name in entering if name == "final_norm"))
            self._block(table[SECOND_NORM:], *flows)
        self._nodes(B, second, reversed(chunk.lead))

    def _nodes(self, kind: Kind, microbatch: int, stages: Iterable[str]) -> None:
        self.ops.extend(Op(kind, microbatch, stage) for stage in stages)

    def _block(self, table: Iterable[Row], *flows: tuple[int, Stage | None]) -> None:
        """Issue the rows of a table for one layer of each flow, leaving out parts and layers that do not exist."""
        for flow, kind, slot in table:
            microbatch, layer = flows[flow]
            if layer is None:
                continue
            part = "mlp" if slot == "experts" and "mlp" in layer.parts else slot
            if part not in layer.parts or (kind is W and not (self._shape.delay_wgrad and part in WEIGHT_PARTS)):
                continue
            self.ops.append(Op(kind, microbatch, layer.name, part))
