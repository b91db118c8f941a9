"""How the parts of two layers interleave: tables, one row an op.

Traffic of one flow is issued where the other flow has compute to cover it. Host synchronisation in a dispatch blocks
the issuing thread, so each dispatch of a forward comes after compute that the device can run meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

from combined_1f1b.schedule.ops import Kind

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
