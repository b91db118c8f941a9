"""Tensors on their way between pipeline stages: which SEND of one rank's plan belongs to which RECV of another's."""

from __future__ import annotations

from typing import NamedTuple

from combined_1f1b.schedule.ops import TRANSFER_KINDS, Kind, Op
from combined_1f1b.schedule.shape import PlanShape

SEND_KINDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
RECEIVE_KINDS = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)

_FORWARD = (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
_WITH_NEXT = (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD)


class Transfer(NamedTuple):
    """One tensor between two neighbouring pipeline stages; a SEND and a RECV are the two ends of the same transfer.

    Attributes:
        forward: an activation on its way to the next stage, or a gradient on its way back.
        microbatch: whose it is.
        boundary: the earlier one of the two pipeline stages.
    """

    forward: bool
    microbatch: int
    boundary: int


def transfer_of(shape: PlanShape, op: Op) -> Transfer:
    """Return the transfer that a SEND or RECV is one end of."""
    assert op.kind in TRANSFER_KINDS, f"{op.name} is no transfer"
    assert op.microbatch is not None
    stage = shape.chunks[shape.chunk_of[op.stage]].pipeline_stage
    return Transfer(op.kind in _FORWARD, op.microbatch, stage if op.kind in _WITH_NEXT else stage - 1)
