"""One operation of a plan: what is done, for which micro-batch, where in the model, on which lane, and after which ops.

An op prints and parses as short text. The log line, the test fixture, the error message and the trace label are this:

    F1.L0.dispatch          forward of micro-batch 1, layer 0, its dispatch
    B0.L3.experts           backward (input gradients, and weight gradients unless they are delayed)
    W0.L3.experts           delayed weight gradients
    GATHER.L1.experts       all-gather of the parameters of an FSDP unit
    FREE.L3                 release of a unit's gathered parameters
    REDUCE.embedding        reduction of a unit's gradients of one micro-batch
    BEGIN_BACKWARD.0        start of a backward: forks the reduction stream from the compute lane
    RECV_F3                 micro-batch 3's activation enters from the previous pipeline stage
    SEND_F3                 its activation leaves to the next pipeline stage
    RECV_B3                 the gradient of what was sent enters from the next pipeline stage
    SEND_B3                 the gradient of what was received leaves to the previous pipeline stage

Where a rank has several model chunks, the last five name theirs: RECV_F3.c1, BEGIN_BACKWARD.0.c1. Layers are numbered
through the whole model, so a node's op needs no chunk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from combined_1f1b.errors import PlanError


class Lane(StrEnum):
    """A stream of the device: ops of one lane run in the order in which they are issued."""

    COMPUTE = "compute"
    COMM = "comm"
    GATHER = "gather"
    REDUCE = "reduce"
    PREVIOUS = "previous"
    NEXT = "next"


class Kind(StrEnum):
    """What an op does. The value is how the op's text starts."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    GATHER = "GATHER"
    FREE = "FREE"
    REDUCE = "REDUCE"
    BEGIN_BACKWARD = "BEGIN_BACKWARD"
    RECEIVE_FORWARD = "RECV_F"
    SEND_FORWARD = "SEND_F"
    RECEIVE_BACKWARD = "RECV_B"
    SEND_BACKWARD = "SEND_B"


NODE_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
"""Kinds that run a node of the model; they carry a micro-batch."""

UNIT_KINDS = (Kind.GATHER, Kind.FREE, Kind.REDUCE)
"""Kinds that act on an FSDP unit; they carry the unit's name and no micro-batch."""

TRANSFER_KINDS = (Kind.RECEIVE_FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD, Kind.SEND_BACKWARD)
"""Kinds that exchange a tensor with a neighbouring pipeline stage; they carry a micro-batch and a chunk."""

FLOW_KINDS = (*NODE_KINDS, Kind.BEGIN_BACKWARD, Kind.SEND_FORWARD)
"""Kinds that say where a micro-batch's pass through a chunk has come to. Its input may be received long before."""

COMM_PARTS = ("dispatch", "combine")
"""Parts of a layer whose main work is the expert-parallel all-to-all."""

_LANES = {
    Kind.GATHER: Lane.GATHER,
    Kind.FREE: Lane.GATHER,
    Kind.REDUCE: Lane.REDUCE,
    Kind.BEGIN_BACKWARD: Lane.COMPUTE,
    Kind.RECEIVE_FORWARD: Lane.PREVIOUS,
    Kind.SEND_FORWARD: Lane.NEXT,
    Kind.RECEIVE_BACKWARD: Lane.NEXT,
    Kind.SEND_BACKWARD: Lane.PREVIOUS,
}

_COPIED = ("kind", "microbatch", "stage", "part", "name", "lane", "issue_lane")

_NODE_TEXT = re.compile(r"([FBW])(\d+)\.([A-Za-z_]\w*)(?:\.([a-z_]+))?")
_UNIT_TEXT = re.compile(r"(GATHER|FREE|REDUCE)\.([A-Za-z_]\w*)(?:\.([a-z_]+))?")
_BEGIN_TEXT = re.compile(r"BEGIN_BACKWARD\.(\d+)(?:\.(c\d+))?")
_TRANSFER_TEXT = re.compile(r"((?:RECV|SEND)_[FB])(\d+)(?:\.(c\d+))?")


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a plan.

    Attributes:
        kind: what is done.
        microbatch: index of the micro-batch, or None for ops on units.
        stage: "embedding", "L3", "final_norm", "M0", "output_layer", "loss", or a unit's first word. For
            BEGIN_BACKWARD and transfers the chunk: "c1", or "" where a rank has only one.
        part: part of a layer ("attention", "dispatch", ...) or a unit's second word ("experts"); "" without one.
        waits: names of ops issued earlier on another issue lane that have to finish before this op starts. A name that
            occurs several times means its latest occurrence before this op.
        name: the op's text without lane and waits.
        lane: the lane of the op's main work, where drawings show it.
        issue_lane: the lane whose stream is current while the op is issued and that performs the op's waits. It differs
            from `lane` for REDUCE only, which packs gradients on the compute lane before the reduction stream goes on.
    """

    kind: Kind
    microbatch: int | None
    stage: str
    part: str = ""
    waits: tuple[str, ...] = ()
    name: str = field(init=False, repr=False, compare=False)
    lane: Lane = field(init=False, repr=False, compare=False)
    issue_lane: Lane = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kind = self.kind
        place = f"{self.stage}.{self.part}" if self.part else self.stage
        if kind in NODE_KINDS:
            name = f"{kind.value}{self.microbatch}.{place}"
            lane = issue_lane = Lane.COMM if self.part in COMM_PARTS and kind is not Kind.WEIGHT else Lane.COMPUTE
        else:
            lane = issue_lane = _LANES[kind]
            if kind is Kind.REDUCE:
                issue_lane = Lane.COMPUTE
            if kind in UNIT_KINDS:
                name = f"{kind.value}.{place}"
            else:
                dot = "." if kind is Kind.BEGIN_BACKWARD else ""
                name = f"{kind.value}{dot}{self.microbatch}{'.' if place else ''}{place}"
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "lane", lane)
        object.__setattr__(self, "issue_lane", issue_lane)

    def __str__(self) -> str:
        return self.name

    @property
    def unit(self) -> str:
        """Name of the FSDP unit that a GATHER, FREE or REDUCE acts on, such as "L1.experts"."""
        assert self.kind in UNIT_KINDS, f"{self.name} acts on no unit"
        return f"{self.stage}.{self.part}" if self.part else self.stage

    @property
    def line(self) -> str:
        """The op as a plan prints it: name, lane, waits."""
        line = f"{self.name:<24} {self.lane.value:<8}"
        return f"{line} after {', '.join(self.waits)}" if self.waits else line.rstrip()

    def with_waits(self, waits: tuple[str, ...]) -> Op:
        """Return the same op with other waits."""
        # Copied field by field: name and lanes need no second derivation, and a plan has many ops.
        op = object.__new__(Op)
        for slot in _COPIED:
            object.__setattr__(op, slot, getattr(self, slot))
        object.__setattr__(op, "waits", waits)
        return op

    @classmethod
    def on_unit(cls, kind: Kind, unit: str) -> Op:
        """Build a GATHER, FREE or REDUCE of the unit with this name."""
        stage, _, part = unit.partition(".")
        return cls(kind, None, stage, part)

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read an op from its name, or from the line that a plan prints ("NAME lane after NAME, NAME").

        Raises:
            PlanError: the text is not an op, or names a lane that the op does not run on.
        """
        head, after, tail = text.strip().partition(" after ")
        words = head.split()
        if not words or len(words) > 2:
            raise PlanError(f"cannot read an op from {text!r}: write NAME, or NAME lane [after NAME, NAME]")
        waits = tuple(word.strip() for word in tail.split(",")) if after else ()
        op = cls._parse_name(words[0], waits)
        if len(words) == 2 and words[1] != op.lane.value:
            raise PlanError(f"{op.name} runs on lane {op.lane.value}, not on {words[1]!r}")
        return op

    @classmethod
    def _parse_name(cls, name: str, waits: tuple[str, ...]) -> Op:
        if match := _NODE_TEXT.fullmatch(name):
            return cls(Kind(match[1]), int(match[2]), match[3], match[4] or "", waits)
        if match := _UNIT_TEXT.fullmatch(name):
            return cls(Kind(match[1]), None, match[2], match[3] or "", waits)
        if match := _BEGIN_TEXT.fullmatch(name):
            return cls(Kind.BEGIN_BACKWARD, int(match[1]), match[2] or "", "", waits)
        if match := _TRANSFER_TEXT.fullmatch(name):
            return cls(Kind(match[1]), int(match[2]), match[3] or "", "", waits)
        raise PlanError(
            f"cannot read an op from {name!r}: write e.g. F1.L0.dispatch, GATHER.L1.experts or BEGIN_BACKWARD.0"
        )
