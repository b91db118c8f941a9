"""The order in which nodes are issued, before anything is known of FSDP or of waits between lanes.

Combined 1F1B with n micro-batches, and the same with head and tail paired (| separates what runs together):

    F0   F1|B0   F2|B1   ...   F{n-1}|B{n-2}   B{n-1}
    F0|F1   F2|B0   F3|B1   ...   F{n-1}|B{n-3}   B{n-2}|B{n-1}

Two flows that run together meet layer by layer. How the parts of two layers interleave is a table below, one row an
op: traffic of one flow is issued where the other flow has compute to cover it. Host synchronisation in a dispatch
blocks the issuing thread, so each dispatch of a forward comes after compute that the device can run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from combined_1f1b.schedule.ops import Kind, Op
from combined_1f1b.schedule.shape import WEIGHT_PARTS, PlanShape, Stage

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
    """Return every node once, and BEGIN_BACKWARD of every micro-batch, in the order in which they are issued."""
    order = _Order(shape)
    last = shape.num_microbatches - 1
    if shape.pair_head_and_tail and last >= 1:
        if shape.interleave_head:
            order.two_forwards(0, 1)
        else:
            order.forward(0)
            order.forward(1)
        for microbatch in range(last - 1):
            order.forward_and_backward(microbatch + 2, microbatch)
        order.two_backwards(last - 1, last)
    else:
        order.forward(0)
        for microbatch in range(last):
            order.forward_and_backward(microbatch + 1, microbatch)
        order.backward(last)
    return tuple(order.ops)


class _Order:
    """Appends ops to a list; one method for each way in which flows run alone or together."""

    def __init__(self, shape: PlanShape) -> None:
        self.ops: list[Op] = []
        self._shape = shape
        self._layers = shape.layer_stages
        self._last_decoder = f"L{shape.num_layers - 1}"
        self._pair_table = FORWARD_WITH_EARLY_BACKWARD if shape.early_attention_release else FORWARD_WITH_BACKWARD

    def forward(self, microbatch: int) -> None:
        self._nodes(F, microbatch, "embedding")
        for layer in self._layers:
            self._block(FORWARD_ALONE, (microbatch, layer))
            self._norm_after(layer, microbatch)
        self._nodes(F, microbatch, "output_layer", "loss")

    def backward(self, microbatch: int) -> None:
        self._begin_backward(microbatch)
        for layer in reversed(self._layers):
            self._norm_before(layer, microbatch)
            self._block(BACKWARD_ALONE, (microbatch, layer))
        self._nodes(B, microbatch, "embedding")

    def forward_and_backward(self, forward: int, backward: int) -> None:
        self._nodes(F, forward, "embedding")
        self._begin_backward(backward)
        for front, back in zip(self._layers, reversed(self._layers), strict=True):
            self._norm_before(back, backward)
            self._block(self._pair_table, (forward, front), (backward, back))
            self._norm_after(front, forward)
        self._nodes(F, forward, "output_layer", "loss")
        self._nodes(B, backward, "embedding")

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
