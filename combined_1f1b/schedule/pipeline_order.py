"""Pipelines: which micro-batch each rank runs when, and what it sends and receives in between.

A rank's iteration is a row of slots. A slot runs a forward, a backward, or a pair of them; each is one micro-batch
through one model chunk:

    warm-up  F F ... F     steady state  (F,B) (F,B) ... (F,B)     cool-down  B B ... B

pp > 1, vpp = 1. The forward and the backward of a pair finish together, so a pair's backward can start only one pair
after the next rank's. With 2 * (pp - 1 - rank) + 1 forwards in the warm-up (`warmup_forwards`) every rank has its next
pair ready when it finishes one. Megatron's pp - 1 - rank, plus the one that makes the pair independent, would let
neighbours wait for each other: 1.6 to 1.9 times slower. The price is live micro-batches: rank 0 holds 2 * pp - 1 whole
ones instead of pp. By Little's law there is no way around it while every flow takes a whole pair for each stage: a
micro-batch is under way for 2 * (pp - rank) pairs, and one starts with every pair.

vpp > 1 is Megatron's interleaved order, with the one more warm-up forward that it runs for combined steps. A chunk runs
`group` micro-batches in a row, then the next chunk the same ones.

Transfers. After a forward its output is sent and the next forward's input received; after a backward its input
gradient is sent and the next backward's output gradient received:

    RECV_F0   F0 SEND_F0 RECV_F1   F1 SEND_F1 RECV_F2 RECV_B0   (F2,B0) SEND_F2 RECV_F3 .. SEND_B0 RECV_B1   ...

Why a pipeline without chunks cannot deadlock, even if each transfer waits until its peer has come to it too: on the
link between two ranks both go through the same transfers in the same order (F_i before B_k if and only if i is less
than the first one's warm-up plus k). Follow the transfers that ranks wait for from rank 0, which can only point to the
right, to the last rank, which can only point to the left: somewhere two neighbours point at each other, and that is one
and the same transfer. With chunks the ranks form a ring, and transfers that stand together must be issued as a group,
as Megatron does.

Head and tail. With `pair_head_and_tail` every rank runs the first two forwards together and the last two backwards, and
one more warm-up forward. The first forward's way through all stages and the last backward's way back decide the length
of an iteration, and a pair takes longer than one flow alone: for a forward of compute f and traffic c, 2 max(f, c)
against f + c. So, for c up to f and a backward of compute b, it pays where c is longer than

    (pp - 1) / (2 pp) * (f + b)

With b = 2 f that is always so with pp = 1, from c = 3/4 f with pp = 2, and never with more ranks. No other pairs
outside the steady state do better while c is shorter than f: the other forwards and backwards there have time to spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from combined_1f1b.errors import ConfigError

if TYPE_CHECKING:
    from combined_1f1b.schedule.shape import PlanShape


class Call(NamedTuple):
    """A forward or a backward of one micro-batch through one chunk.

    `turn` counts the rank's forwards, or its backwards: what Megatron calls the virtual micro-batch id.
    """

    turn: int
    microbatch: int
    chunk: int


class Slot(NamedTuple):
    """What runs together: one call, a forward and a backward, or with head and tail paired two of a kind."""

    forwards: tuple[Call, ...]
    backwards: tuple[Call, ...]


def warmup_forwards(shape: PlanShape) -> int:
    """Return how many forwards a rank runs before its first pair of a forward and a backward."""
    behind = shape.pp - 1 - shape.rank
    wanted = 2 * behind + (shape.vpp - 1) * shape.microbatch_group_size_per_vp_stage + 1
    return min(wanted + shape.pair_head_and_tail, shape.num_microbatches * shape.vpp)


def peak_live_forwards(shape: PlanShape) -> int:
    """Return the most (micro-batch, chunk) whose activations a rank holds at one time, whole or in part.

    min(n * vpp, 2 * (pp - 1 - rank) + (vpp - 1) * group + 2) for n micro-batches, with both schedules: those of the
    warm-up, and during a pair its forward. Head and tail pairing holds one more.
    """
    return min(warmup_forwards(shape) + 1, shape.num_microbatches * shape.vpp)


def calls(shape: PlanShape) -> tuple[list[Call], list[Call]]:
    """Return the rank's forwards and its backwards, each in order."""
    count, vpp = shape.num_microbatches, shape.vpp
    group = shape.microbatch_group_size_per_vp_stage if vpp > 1 else count
    table = [
        (microbatch, chunk)
        for first in range(0, count, group)
        for chunk in range(vpp)
        for microbatch in range(first, min(first + group, count))
    ]
    forwards = [Call(turn, microbatch, chunk) for turn, (microbatch, chunk) in enumerate(table)]
    backwards = [Call(turn, microbatch, vpp - 1 - chunk) for turn, (microbatch, chunk) in enumerate(table)]
    return forwards, backwards


def slots(shape: PlanShape) -> list[Slot]:
    """Return the rank's slots in order."""
    row = pair_up(*calls(shape), warmup_forwards(shape))
    if shape.pair_head_and_tail and shape.num_microbatches > 1:
        row[-2:] = [Slot((), row[-2].backwards + row[-1].backwards)]
        if shape.interleave_head:
            row[:2] = [Slot(row[0].forwards + row[1].forwards, ())]
    return row


def pair_up(forwards: Sequence[Call], backwards: Sequence[Call], warmup: int) -> list[Slot]:
    """Return `warmup` forwards, then pairs, then the backwards that are left."""
    steady = len(forwards) - warmup
    return [
        *(Slot((call,), ()) for call in forwards[:warmup]),
        *(
            Slot((forward,), (backward,))
            for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True)
        ),
        *(Slot((), (call,)) for call in backwards[steady:]),
    ]


def arrivals(shape: PlanShape, row: Sequence[Slot]) -> list[Slot]:
    """Return what a rank receives: first what before its first slot, then what after each slot.

    That is what the next slot takes. Only the two ends of a ring of chunks, rank 0 for forwards and the last rank for
    backwards, take over what their neighbour, pp - 1 calls behind, has just sent, and keep it until they need it.
    """
    behind = shape.pp - 1
    forwards, backwards = calls(shape)

    def from_ring(order: Sequence[Call], slot: tuple[Call, ...], step: int) -> tuple[Call, ...]:
        sent = [order[call.turn - behind] for call in slot if call.turn >= behind]
        arriving = [call._replace(chunk=call.chunk + step) for call in sent]
        return tuple(call for call in arriving if 0 <= call.chunk < shape.vpp)

    none = Slot((), ())
    return [
        Slot(
            following.forwards if shape.rank > 0 else from_ring(forwards, slot.forwards, 1),
            following.backwards if shape.rank < behind else from_ring(backwards, slot.backwards, -1),
        )
        for slot, following in pairwise([none, *row, none])
    ]


def check_pipeline(shape: PlanShape) -> None:
    """Check the fields of a shape that concern pipelines.

    Raises:
        ConfigError: a value cannot work.
    """
    pp, vpp, count = shape.pp, shape.vpp, shape.num_microbatches
    for flag in ("pp", "vpp"):
        if getattr(shape, flag) < 1:
            raise ConfigError.of(flag, getattr(shape, flag), "too small", "use at least 1")
    if not 0 <= shape.rank < pp:
        raise ConfigError.of("rank", shape.rank, f"there are {pp} pipeline ranks", f"use 0 to {pp - 1}")
    if vpp > 1 and pp == 1:
        raise ConfigError.of("vpp", vpp, "one rank needs no chunks", "use pp of at least 2, or use vpp=1")
    if vpp > 1 and shape.pair_head_and_tail:
        reason = "Megatron's interleaved driver asks for one forward or backward after the other"
        raise ConfigError.of("pair_head_and_tail", True, reason, "use pair_head_and_tail=False with vpp > 1")
    _check_layers(shape)
    if vpp > 1:
        _check_groups(pp, count, shape.microbatch_group_size_per_vp_stage)


def _check_layers(shape: PlanShape) -> None:
    layers, stages, counts = shape.num_layers, shape.pp * shape.vpp, shape.layer_counts
    if counts is None:
        for flag, parts in (("pp", shape.pp), ("vpp", stages)):
            if layers % parts:
                reason = f"{layers} layers cannot be split evenly into {parts} pipeline stages"
                raise ConfigError.of(flag, getattr(shape, flag), reason, "use a divisor, or give layer_counts")
    elif len(counts) != stages or sum(counts) != layers or min(counts) < 0:
        reason = f"not {stages} counts, pp * vpp, that add up to {layers} layers"
        raise ConfigError.of("layer_counts", counts, reason, "use one count for each pipeline stage")


def _check_groups(pp: int, count: int, group: int) -> None:
    """What Megatron's interleaving refuses."""
    flag = "microbatch_group_size_per_vp_stage"
    if count < pp:
        raise ConfigError.of("num_microbatches", count, f"fewer than pp={pp}", f"use at least {pp} with vpp > 1")
    if not pp <= group <= count:
        reason = "a chunk runs at least pp micro-batches in a row, and at most all"
        raise ConfigError.of(flag, group, reason, f"use {pp} to {count}")
    rest = count % group
    if 0 < rest < pp:
        reason = f"the last group of {flag}={group} would have {rest} micro-batches, fewer than pp={pp}"
        raise ConfigError.of("num_microbatches", count, reason, f"use {count - rest} or {count - rest + pp}")
