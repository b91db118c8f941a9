"""Ops as text: what they print, what they parse, and on which lanes they run."""

from __future__ import annotations

import dataclasses

import pytest

from combined_1f1b.errors import PlanError
from combined_1f1b.schedule import Op
from combined_1f1b.schedule.ops import Kind, Lane

pytestmark = pytest.mark.world_size(1)

NAMES = {
    "F1.L0.dispatch": (Kind.FORWARD, 1, "L0", "dispatch", Lane.COMM, Lane.COMM),
    "B0.L3.experts": (Kind.BACKWARD, 0, "L3", "experts", Lane.COMPUTE, Lane.COMPUTE),
    "B12.L3.combine": (Kind.BACKWARD, 12, "L3", "combine", Lane.COMM, Lane.COMM),
    "W0.L3.experts": (Kind.WEIGHT, 0, "L3", "experts", Lane.COMPUTE, Lane.COMPUTE),
    "F0.embedding": (Kind.FORWARD, 0, "embedding", "", Lane.COMPUTE, Lane.COMPUTE),
    "B1.output_layer": (Kind.BACKWARD, 1, "output_layer", "", Lane.COMPUTE, Lane.COMPUTE),
    "GATHER.L1.experts": (Kind.GATHER, None, "L1", "experts", Lane.GATHER, Lane.GATHER),
    "FREE.L3": (Kind.FREE, None, "L3", "", Lane.GATHER, Lane.GATHER),
    "REDUCE.embedding": (Kind.REDUCE, None, "embedding", "", Lane.REDUCE, Lane.COMPUTE),
    "BEGIN_BACKWARD.0": (Kind.BEGIN_BACKWARD, 0, "", "", Lane.COMPUTE, Lane.COMPUTE),
    "BEGIN_BACKWARD.0.c1": (Kind.BEGIN_BACKWARD, 0, "c1", "", Lane.COMPUTE, Lane.COMPUTE),
    "RECV_F3": (Kind.RECEIVE_FORWARD, 3, "", "", Lane.PREVIOUS, Lane.PREVIOUS),
    "SEND_F13.c1": (Kind.SEND_FORWARD, 13, "c1", "", Lane.NEXT, Lane.NEXT),
    "RECV_B3.c0": (Kind.RECEIVE_BACKWARD, 3, "c0", "", Lane.NEXT, Lane.NEXT),
    "SEND_B0": (Kind.SEND_BACKWARD, 0, "", "", Lane.PREVIOUS, Lane.PREVIOUS),
}


@pytest.mark.parametrize("name", NAMES)
def test_name_round_trip(name):
    op = Op.parse(name)
    assert str(op) == op.name == name
    assert (op.kind, op.microbatch, op.stage, op.part, op.lane, op.issue_lane) == NAMES[name]
    assert op.waits == ()


@pytest.mark.parametrize("name", NAMES)
def test_line_round_trip(name):
    op = Op.parse(name).with_waits(("F0.L0.attention", "GATHER.L1.experts"))
    assert op.line.split() == [name, op.lane.value, "after", "F0.L0.attention,", "GATHER.L1.experts"]
    assert Op.parse(op.line) == op
    assert Op.parse(op.line).with_waits(()) == Op.parse(name)


@pytest.mark.parametrize("unit", ["L1.experts", "embedding", "root"])
def test_unit_of_an_op_on_a_unit(unit):
    op = Op.on_unit(Kind.FREE, unit)
    assert op.unit == unit
    assert op == Op.parse(f"FREE.{unit}")


@pytest.mark.parametrize(
    "text",
    ["", "F.L0", "X0.L0.mlp", "F0", "F0.L0.mlp.more", "GATHER", "BEGIN_BACKWARD", "B-1.loss", "F0.L0 mlp x", "W0."],
)
def test_unreadable_text_is_refused(text):
    with pytest.raises(PlanError, match="cannot read an op from"):
        Op.parse(text)


def test_wrong_lane_is_refused():
    with pytest.raises(PlanError, match=r"F1\.L0\.dispatch runs on lane comm, not on 'compute'"):
        Op.parse("F1.L0.dispatch compute")


def test_ops_are_frozen_values():
    op = Op.parse("F1.L0.dispatch")
    with pytest.raises(dataclasses.FrozenInstanceError):
        op.stage = "L1"
    assert hash(op) == hash(Op(Kind.FORWARD, 1, "L0", "dispatch"))
