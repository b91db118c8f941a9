"""The order in which nodes are issued, before anything is known of FSDP or of waits between lanes.

Combined 1F1B with n micro-batches, and the same with head and tail paired (| separates what runs together):

    F0   F1|B0   F2|B1   ...   F{n-1}|B{n-2}   B{n-1}
    F0|F1   F2|B0   F3|B1   ...   F{n-1}|B{n-3}   B{n-2}|B{n-1}

With several pipeline ranks, the order of flows and transfers is that of `pipeline_order.py`.

Two flows that run together meet layer by layer. How the parts of two layers interleave is a table below, one row an
op: traffic of one flow is issued where the other flow has compute to cover it. Host synchronisation in a dispatch
blocks the issuing thread, so each dispatch of a forward comes after compute that the device can run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

from combined_1f1b.schedule.chunks import Stage
from combined_1f1b.schedule.ops import Kind, Op
from combined_1f1b.schedule.pipeline_order import Call, arrivals, slots
from combined_1f1b.schedule.shape import WEIGHT_PARTS, PlanShape

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT


class Row(NamedTuple):
    """One op of a table: which flow, what kind, and which part of the layer (a dense layer's mlp counts as experts)."""

    flow: int
    kind: Kind
    part: str


FORWARD_ALONE = tuple(Row(0, F, part) for part in ("attention", "dispatch", "experts", "combine", "postprocess"))

BACKWARD_ALONE = (
    Row(0, B, "postprocess"),
    Row(0, B, "combine"),
    Row(0, B, "experts"),
    Row(0, B, "dispatch"),
    Row(0, W, "experts"),
    Row(0, B, "attention"),
    Row(0, W, "attention"),
)

# Flow 0 is the forward, flow 1 the backward.
#   comm  1.combine   | 0.dispatch  1.dispatch          | 0.combine
#   comp  0.attention | 1.experts  1.W experts  0.experts | 1.attention  1.W attention
FORWARD_WITH_BACKWARD = (
    Row(1, B, "postprocess"),
    Row(1, B, "combine"),
    Row(0, F, "attention"),
    Row(1, B, "experts"),
    Row(0, F, "dispatch"),
    Row(1, W, "experts"),
    Row(1, B, "dispatch"),
    Row(0, F, "experts"),
    Row(0, F, "combine"),
    Row(1, B, "attention"),
    Row(1, W, "attention"),
    Row(0, F, "postprocess"),
)

# The attention's backward frees its activations before the other flow's experts allocate theirs.
FORWARD_WITH_EARLY_BACKWARD = (
    *FORWARD_WITH_BACKWARD[:7],
    Row(1, B, "attention"),
    *(row for row in FORWARD_WITH_BACKWARD[7:] if row != Row(1, B, "attention")),
)

# Half a layer of lag: compute runs 0.attention 1.attention 0.experts 1.experts, and each all-to-all has the other
# flow's compute beside it.
FORWARD_WITH_FORWARD = (
    Row(0, F, "attention"),
    Row(1, F, "attention"),
    Row(0, F, "dispatch"),
    Row(0, F, "experts"),
    Row(1, F, "dispatch"),
    Row(0, F, "combine"),
    Row(1, F, "experts"),
    Row(1, F, "combine"),
    Row(0, F, "postprocess"),
    Row(1, F, "postprocess"),
)

# Flow 0 is ahead. Flow 1 is the second backward at the layer before (counted as the backward goes), flow 2 the second
# backward at its next layer, of which only the combine is issued. A layer's gradients of flow 0 are thus complete and
# reduced before flow 1 adds its own.
#   comm  0.combine | 1.dispatch | 0.dispatch  | 2.combine
#   comp  1.experts | 0.experts  | 1.attention | 0.attention
BACKWARD_WITH_BACKWARD = (
    Row(0, B, "postprocess"),
    Row(0, B, "combine"),
    Row(1, B, "experts"),
    Row(1, B, "dispatch"),
    Row(1, W, "experts"),
    Row(0, B, "experts"),
    Row(0, B, "dispatch"),
    Row(0, W, "experts"),
    Row(1, B, "attention"),
    Row(1, W, "attention"),
    Row(2, B, "postprocess"),
    Row(2, B, "combine"),
    Row(0, B, "attention"),
    Row(0, W, "attention"),
)
# What has no layer joins where traffic would otherwise be alone: the second backward's loss and output layer after the
# first two rows, the first backward's embedding after eight, the second's final norm after ten.
SECOND_HEAD, FIRST_EMBEDDING, SECOND_NORM = 2, 8, 10


def base_order(shape: PlanShape) -> tuple[Op, ...]:
    """Return every node once, BEGIN_BACKWARD of every backward and every transfer, in the order of issue."""
    order = _Order(shape)
    last = shape.num_microbatches - 1
    if shape.pair_head_and_tail and last >= 1:
        if shape.interleave_head:
            order.two_forwards(0, 1)
        else:
            order.forward(Call(0, 0, 0))
            order.forward(Call(1, 1, 0))
        for index in range(last - 1):
            order.forward_and_backward(Call(index + 2, index + 2, 0), Call(index, index, 0))
        order.two_backwards(last - 1, last)
    else:
        order.pipeline()
    return tuple(order.ops)


class _Order:
    """Appends ops to a list; one method for each way in which flows run alone or together."""

    def __init__(self, shape: PlanShape) -> None:
        self.ops: list[Op] = []
        self._shape = shape
        self._chunks = shape.chunks
        self._layers = shape.layer_stages
        self._last_decoder = f"L{shape.num_layers - 1}"
        self._pair_table = FORWARD_WITH_EARLY_BACKWARD if shape.early_attention_release else FORWARD_WITH_BACKWARD

    def pipeline(self) -> None:
        """Run the rank's slots, and after each what it sends and receives."""
        row = slots(self._shape)
        entering = arrivals(self._shape)
        self.ops += self._transfer(Kind.RECEIVE_FORWARD, entering.forwards[0])
        for number, (forward, backward) in enumerate(row):
            start = len(self.ops)
            if forward and backward:
                self.forward_and_backward(forward, backward)
            elif forward:
                self.forward(forward)
            elif backward:
                self.backward(backward)
            send_f, receive_f, send_b, receive_b = [], [], [], []
            if forward:
                send_f = self._transfer(Kind.SEND_FORWARD, forward)
                receive_f = self._transfer(Kind.RECEIVE_FORWARD, entering.forwards[forward.turn + 1])
                if row[number + 1].backward and not backward:
                    receive_b = self._transfer(Kind.RECEIVE_BACKWARD, entering.backwards[0])
            if backward:
                send_b = self._transfer(Kind.SEND_BACKWARD, backward)
                receive_b = self._transfer(Kind.RECEIVE_BACKWARD, entering.backwards[backward.turn + 1])
            # Each SEND stands behind its flow's last node, and whichever flow ends first, each neighbour meets its two
            # transfers in the same order: forward before backward. The later place is filled first.
            after_forward = self._end(start, (F,))
            after_backward = self._end(start, (B, Kind.BEGIN_BACKWARD)) if backward else after_forward
            if after_forward <= after_backward:
                self.ops[after_backward:after_backward] = send_b + receive_b
                self.ops[after_forward:after_forward] = send_f + receive_f
            elif self._shape.vpp == 1:
                self.ops[after_forward:after_forward] = send_f + receive_b
                self.ops[after_backward:after_backward] = receive_f + send_b
            else:
                self.ops[after_forward:after_forward] = send_f + receive_f + send_b + receive_b

    def _transfer(self, kind: Kind, call: Call | None) -> list[Op]:
        if call is None:
            return []
        chunk = self._chunks[call.chunk]
        exists = chunk.receives if kind in (Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD) else chunk.sends
        return [Op(kind, call.microbatch, chunk.name)] if exists else []

    def _end(self, start: int, kinds: tuple[Kind, ...]) -> int:
        """The place behind the last op of these kinds since `start`."""
        place = len(self.ops)
        while place > start and self.ops[place - 1].kind not in kinds:
            place -= 1
        return place

    def forward(self, call: Call) -> None:
        chunk, microbatch = self._chunks[call.chunk], call.microbatch
        self._nodes(F, microbatch, *chunk.lead)
        for layer, after in zip(chunk.layers, chunk.after, strict=True):
            self._block(FORWARD_ALONE, (microbatch, layer))
            self._nodes(F, microbatch, *after)

    def backward(self, call: Call) -> None:
        chunk, microbatch = self._chunks[call.chunk], call.microbatch
        self.ops.append(Op(Kind.BEGIN_BACKWARD, microbatch, chunk.name))
        for layer, after in zip(reversed(chunk.layers), reversed(chunk.after), strict=True):
            self._nodes(B, microbatch, *reversed(after))
            self._block(BACKWARD_ALONE, (microbatch, layer))
        self._nodes(B, microbatch, *reversed(chunk.lead))

    def forward_and_backward(self, forward: Call, backward: Call) -> None:
        ahead, back = self._chunks[forward.chunk], self._chunks[backward.chunk]
        self._nodes(F, forward.microbatch, *ahead.lead)
        self.ops.append(Op(Kind.BEGIN_BACKWARD, backward.microbatch, back.name))
        for i, (front, rear) in enumerate(zip_longest(ahead.layers, reversed(back.layers))):
            if rear is not None:
                self._nodes(B, backward.microbatch, *reversed(back.after[-1 - i]))
            self._block(self._pair_table, (forward.microbatch, front), (backward.microbatch, rear))
            if front is not None:
                self._nodes(F, forward.microbatch, *ahead.after[i])
        self._nodes(B, backward.microbatch, *reversed(back.lead))

    def two_forwards(self, first: int, second: int) -> None:
        for microbatch in (first, second):
            self._nodes(F, microbatch, "embedding")
        for layer in self._layers:
            self._block(FORWARD_WITH_FORWARD, (first, layer), (second, layer))
            for microbatch in (first, second):
                self._norm_after(layer, microbatch)
                if layer is self._layers[-1]:
                    self._nodes(F, microbatch, "output_layer", "loss")

    def two_backwards(self, first: int, second: int) -> None:
        # Half a layer of lag, plus whole layers where the first backward's gradients of a unit are complete only later:
        # every multi-token-prediction layer adds to the unit "root", and a combine with parameters to its layer's unit.
        lag = max(self._shape.num_mtp_layers, int(self._shape.combine_parameters))
        layers = tuple(reversed(self._layers))
        ahead = (*layers, *[None] * (lag + 1))
        following = (*[None] * lag, *layers, None)
        behind = (None, *following[:-1])
        table = BACKWARD_WITH_BACKWARD
        self._begin_backward(first)
        for step, stages in enumerate(zip(ahead, behind, following, strict=True)):
            flows = tuple(zip((first, second, second), stages, strict=True))
            self._norm_before(stages[0], first)
            self._block(table[:SECOND_HEAD], *flows)
            if step == lag:
                self._begin_backward(second)
            self._block(table[SECOND_HEAD:FIRST_EMBEDDING], *flows)
            if step == len(layers):
                self._nodes(B, first, "embedding")
            self._block(table[FIRST_EMBEDDING:SECOND_NORM], *flows)
            self._norm_before(stages[2], second)
            self._block(table[SECOND_NORM:], *flows)
        self._nodes(B, second, "embedding")

    def _begin_backward(self, microbatch: int) -> None:
        self.ops.append(Op(Kind.BEGIN_BACKWARD, microbatch, ""))
        self._nodes(B, microbatch, "loss", "output_layer")

    def _norm_after(self, layer: Stage, microbatch: int) -> None:
        if self._shape.has_final_norm and layer.name == self._last_decoder:
            self._nodes(F, microbatch, "final_norm")

    def _norm_before(self, layer: Stage | None, microbatch: int) -> None:
        if self._shape.has_final_norm and layer is not None and layer.name == self._last_decoder:
            self._nodes(B, microbatch, "final_norm")

    def _nodes(self, kind: Kind, microbatch: int, *stages: str) -> None:
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
