"""Every collective and transfer of a block, recorded on each rank, and compared between the ranks of each group."""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from combined_1f1b.host.accesses import place_of_call, tensors_in

TRANSFERS = ("send", "recv_")
IN_PARTS = ("alltoall_base_",)


class Record(NamedTuple):
    """One collective, as one rank issued it.

    Attributes:
        kind: the operator's name.
        group: the group's name, the same on all its ranks.
        members: its ranks.
        sizes: bytes of each tensor. Of an all-to-all what each rank gives to this one, then what it gets from it.
        peer: rank on the other side of a transfer, else None.
        op: the plan's op that issued it, or "".
    """

    kind: str
    group: str
    members: tuple[int, ...]
    sizes: tuple[int, ...]
    peer: int | None
    op: str

    def __str__(self) -> str:
        return f"{self.kind} of {list(self.sizes)} bytes{f' in {self.op}' if self.op else ''}"


class Recorder(TorchDispatchMode):
    """Notes every operator of torch.distributed, in the order of issue.

    Attributes:
        records: one for each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Record] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a DTensor unwraps itself and comes back
        assert "_c10d_functional" not in str(func), f"{func} is not recorded"
        if func.namespace == "c10d":
            self.records.append(_record(func._schema.name.partition("::")[2], args))
        return func(*args, **(kwargs or {}))


def _record(kind: str, args: tuple[Any, ...]) -> Record:
    group = next(ProcessGroup.unbox(value) for value in args if isinstance(value, torch.ScriptObject))
    members = tuple(torch.distributed.get_process_group_ranks(group))
    sizes = tuple(tensor.nbytes for value in args for tensor in tensors_in(value))
    if kind in IN_PARTS:
        output, given, _, from_each, to_each = args[:5]
        count = len(members)
        sizes = (*_bytes_of_parts(output, from_each, count), *_bytes_of_parts(given, to_each, count))
    peer = members[args[2]] if kind in TRANSFERS else None
    return Record(kind, group.group_name, members, sizes, peer, place_of_call()[1])


def _bytes_of_parts(tensor: torch.Tensor, splits: list[int], count: int) -> list[int]:
    if not splits:
        return [tensor.nbytes // count] * count
    row = tensor.nbytes // max(tensor.shape[0], 1)
    return [rows * row for rows in splits]


def gathered(recorder: Recorder) -> list[list[Record]]:
    """Every rank's records, on every rank."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, recorder.records)
    return everyone


def differences(records: list[list[Record]], *, links: bool) -> list[str]:
    """What ranks issue differently, one line for the first difference of a group and of a pair of ranks.

    Args:
        records: of each rank.
        links: compare both directions of a pair together, as transfers on one stream need it; else each for itself.
    """
    found: list[str] = []
    groups: defaultdict[tuple[str, tuple[int, ...]], dict[int, list[Record]]] = defaultdict(dict)
    pairs: defaultdict[tuple[int, int], dict[int, list[Record]]] = defaultdict(dict)
    for rank, own in enumerate(records):
        for record in own:
            if record.peer is None:
                groups[record.group, record.members].setdefault(rank, []).append(record)
            else:
                ends = (min(rank, record.peer), max(rank, record.peer))
                pairs[ends].setdefault(rank, []).append(record)
    for (name, members), by_rank in groups.items():
        first = by_rank.get(members[0], [])
        for rank in members[1:]:
            pairs_of = zip_longest(first, by_rank.get(rank, []))
            bad = [pair for pair in pairs_of if not _is_same(*pair, members.index(rank))]
            found += [f"group {name}, ranks {members[0]} and {rank}: {one}, {two}" for one, two in bad[:1]]
    for (low, high), by_rank in pairs.items():
        ends = by_rank.get(low, []), by_rank.get(high, [])
        for kinds in [TRANSFERS, TRANSFERS[::-1]]:
            rows = (
                ends if links else [[r for r in end if r.kind == kind] for end, kind in zip(ends, kinds, strict=True)]
            )
            bad = [pair for pair in zip_longest(*rows) if not _is_one_transfer(*pair)]
            found += [f"ranks {low} and {high}: {one}, {two}" for one, two in bad[:1]]
            if links:
                break
    return found


def _is_same(one: Record | None, two: Record | None, place: int) -> bool:
    if one is None or two is None:
        return False
    same = (one.kind, one.op) == (two.kind, two.op)
    if one.kind not in IN_PARTS:
        return same and one.sizes == two.sizes
    count = len(one.members)
    given, got = one.sizes[count:], one.sizes[:count]
    return same and given[place] == two.sizes[0] and got[place] == two.sizes[count]


def _is_one_transfer(one: Record | None, two: Record | None) -> bool:
    """Ends of one transfer. The op's text differs in its first word: SEND_F3 on one side, RECV_F3 on the other."""
    if one is None or two is None:
        return False
    is_same_flow = one.op.partition("_")[2] == two.op.partition("_")[2]
    return {one.kind, two.kind} == set(TRANSFERS) and one.sizes == two.sizes and is_same_flow
