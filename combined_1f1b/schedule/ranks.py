"""Checks of the plans of all pipeline ranks together. Pure: nothing runs.

    rank 0    F0 SEND_F0 ---.   F1 SEND_F1 ---.
    rank 1                  '--> RECV_F0 F0   '--> RECV_F1 ...

Each SEND has one RECV on the neighbour, both in the same order; every rank can come to its end; a rank holds as many
micro-batches as the formula says; ranks that share a group issue its collectives in one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from combined_1f1b.errors import PlanError
from combined_1f1b.schedule.excerpt import bad_op
from combined_1f1b.schedule.ops import NODE_KINDS, TRANSFER_KINDS, UNIT_KINDS, Kind, Lane
from combined_1f1b.schedule.pipeline_order import peak_live_forwards
from combined_1f1b.schedule.plan import Plan
from combined_1f1b.schedule.simulate import peak_microbatches
from combined_1f1b.schedule.transfers import SEND_KINDS, Transfer, transfer_of


def validate_ranks(plans: Sequence[Plan]) -> None:
    """Check the plans of a pipeline's ranks together, and each by itself.

    The most (micro-batch, chunk) that a rank holds at one time, whole or in part, is at most

        min(n * vpp, 2 * (pp - 1 - rank) + (vpp - 1) * group + 2)

    for n micro-batches, and group = microbatch_group_size_per_vp_stage with vpp > 1. `build_plan` makes plans that hold
    exactly that many, fewer only where a chunk has nothing to hold.

    Args:
        plans: at least one for each pipeline rank, in any order. Several of one rank are those of its data-parallel and
            expert-parallel peers.

    Raises:
        PlanError: a plan is bad, ranks are missing or of different shapes, transfers do not match, ranks would wait for
            each other for ever, a rank holds more than the formula, or peers issue collectives in different orders.
    """
    by_rank = _one_for_each_rank(plans)
    for plan in by_rank:
        plan.validate()
        held, formula = peak_microbatches(plan), peak_live_forwards(plan.shape)
        if held > formula:
            raise PlanError(f"rank {plan.shape.rank} holds {held} micro-batches at one time, more than {formula}")
    for plan in plans:
        _check_collectives(by_rank[plan.shape.rank], plan)
    _check_order(by_rank)
    for buffered in (True, False):
        check_deadlock(by_rank, buffered=buffered)


def _one_for_each_rank(plans: Sequence[Plan]) -> list[Plan]:
    found: dict[int, Plan] = {}
    for plan in plans:
        found.setdefault(plan.shape.rank, plan)
    pp = plans[0].shape.pp if plans else 0
    if not plans or sorted(found) != list(range(pp)):
        raise PlanError(f"plans of ranks {sorted(found)} instead of one for each of pp={pp} ranks")
    for field in ("pp", "vpp", "num_layers", "num_microbatches", "stage_layers", "microbatch_group_size_per_vp_stage"):
        values = {getattr(plan.shape, field) for plan in plans}
        if len(values) > 1:
            raise PlanError(f"the ranks' plans differ in {field}: {sorted(values)}")
    return [found[rank] for rank in range(pp)]


def _check_collectives(first: Plan, second: Plan) -> None:
    """Expert-parallel peers share all-to-alls, data-parallel ones gathers and reductions.

    Peers are on the same pipeline rank: across those nothing is shared but what comes after the last op.
    """
    if first is second:
        return
    for one, two in zip_longest(_collectives(first), _collectives(second)):
        names = [plan.ops[at].name if at is not None else "nothing" for plan, at in ((first, one), (second, two))]
        if names[0] != names[1]:
            where = f"{names[0]} on one, {names[1]} on the other"
            reason = f"peers issue collectives in different orders: {where}"
            raise _bad_rank(first, len(first.ops) if one is None else one, reason)


def _collectives(plan: Plan) -> Iterator[int]:
    for index, op in enumerate(plan.ops):
        if op.lane is Lane.COMM or (op.kind in UNIT_KINDS and op.kind is not Kind.FREE):
            yield index


def _check_order(plans: Sequence[Plan]) -> None:
    """On every link, tensors of one direction are received in the order in which they are sent."""
    links: dict[tuple[bool, int], tuple[list[_End], list[_End]]] = {}
    for plan in plans:
        for index, op in enumerate(plan.ops):
            if op.kind in TRANSFER_KINDS:
                transfer = transfer_of(plan.shape, op)
                ends = links.setdefault((transfer.forward, transfer.boundary % len(plans)), ([], []))
                ends[op.kind not in SEND_KINDS].append(_End(transfer, plan, index))
    for sent, received in links.values():
        for send, receive in zip_longest(sent, received):
            if send is None:
                raise _bad_rank(receive.plan, receive.place, "nothing is sent to it")
            if receive is None or send.transfer != receive.transfer:
                what = receive.plan.ops[receive.place].name if receive else "nothing more"
                raise _bad_rank(send.plan, send.place, f"its neighbour receives {what} at this point")


class _End(NamedTuple):
    transfer: Transfer
    plan: Plan
    place: int


def _bad_rank(plan: Plan, index: int, reason: str) -> PlanError:
    return PlanError(f"rank {plan.shape.rank}: {bad_op(plan.ops, index, reason)}")


def check_deadlock(plans: Sequence[Plan], *, buffered: bool, grouped: bool | None = None) -> None:
    """Let every rank go through its ops one by one, and check that all come to their end.

    Args:
        plans: one for each pipeline rank, in order.
        buffered: a SEND is done at once; otherwise it waits until its RECV is issued, as large messages of NCCL do.
        grouped: transfers between which a rank has no node of the model are issued as one group, and wait together;
            otherwise each one waits before the next is issued. None means: where chunks make a ring of the ranks.

    Raises:
        PlanError: ranks wait for each other; the message says for what each of them waits.
    """
    together = plans[0].shape.vpp > 1 if grouped is None else grouped
    rows = [list(_groups(plan, together)) for plan in plans]
    issued: dict[Transfer, int] = {}
    reached = [-1] * len(plans)
    missing: list[set[Transfer]] = [set() for _ in plans]
    ready = deque(range(len(plans)))
    while ready:
        rank = ready.popleft()
        while not missing[rank] and reached[rank] + 1 < len(rows[rank]):
            reached[rank] += 1
            for index, transfer in rows[rank][reached[rank]]:
                peer = issued.setdefault(transfer, rank)
                if peer == rank:  # the first end
                    if not (buffered and plans[rank].ops[index].kind in SEND_KINDS):
                        missing[rank].add(transfer)
                elif transfer in missing[peer]:
                    missing[peer].remove(transfer)
                    if not missing[peer]:
                        ready.append(peer)
    stuck = [rank for rank in range(len(plans)) if missing[rank]]
    if stuck:
        raise PlanError("the ranks wait for each other\n" + "\n".join(_waiting(plans, rows, reached, missing, stuck)))


def _groups(plan: Plan, together: bool) -> Iterator[list[tuple[int, Transfer]]]:
    group: list[tuple[int, Transfer]] = []
    for index, op in enumerate(plan.ops):
        is_transfer = op.kind in TRANSFER_KINDS
        if group and (op.kind in NODE_KINDS or (is_transfer and not together)):
            yield group
            group = []
        if is_transfer:
            group.append((index, transfer_of(plan.shape, op)))
    if group:
        yield group


def _waiting(
    plans: Sequence[Plan],
    rows: Sequence[list[list[tuple[int, Transfer]]]],
    reached: Sequence[int],
    missing: Sequence[set[Transfer]],
    stuck: Sequence[int],
) -> Iterator[str]:
    for rank in stuck:
        for index, transfer in rows[rank][reached[rank]]:
            if transfer in missing[rank]:
                op = plans[rank].ops[index]
                peer = (rank + (1 if op.lane is Lane.NEXT else -1)) % len(plans)
                yield f"rank {rank} waits for rank {peer} at op {index}, {op.name}"
