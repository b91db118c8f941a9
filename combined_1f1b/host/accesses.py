"""What operators do with memory: which tensors they read and write, and who has accessed which bytes of a storage."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

Stream = Any
"""A HostStream or a GroupStream."""

_METADATA_ONLY = re.compile("new_.*|.*_like|set_|is_pinned|_unsafe_view")
_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_EXECUTOR = ("combined_1f1b.schedule.executor", "execute", "issue")  # module, function, and its variable of an Issue
_SYNCHRONISING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MASKS = (torch.bool, torch.uint8)


class GroupStream(NamedTuple):
    """A stream of a process group's own, on which its asynchronous operations run, as NCCL's do.

    Collectives share one; transfers to and from a peer have another, so that no wait for the one covers the other.

    Attributes:
        group: name of the process group.
        peer: rank in the group with which transfers are exchanged; None for the collectives' stream.
    """

    group: str
    peer: int | None

    def __str__(self) -> str:
        if self.peer is None:
            return f"the collectives' stream of group {self.group}"
        return f"the stream of group {self.group} for transfers with its rank {self.peer}"


class Access(NamedTuple):
    """One operation on one stream.

    Attributes:
        number: how many operations the stream has had, with this one.
        line: file and line that called it.
        plan_op: the plan's op that the executor was issuing, or "".
    """

    stream: Stream
    number: int
    operation: str
    line: tuple[str, int]
    plan_op: str

    def __str__(self) -> str:
        inside = f" in {self.plan_op}" if self.plan_op else ""
        return f"{self.operation} on {stream_name(self.stream)}{inside} ({self.line[0]}:{self.line[1]})"


def place_of_call() -> tuple[tuple[str, int], str]:
    """Where outside of torch and the host device the code is now, and the plan's op that the executor is issuing.

    The executor is known by its frame: that costs a check a few microseconds, and the executor nothing.
    """
    module, function, variable = _EXECUTOR
    line = ("", 0)
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not line[0] and not code.co_filename.startswith(_FOREIGN):
            line = (code.co_filename, frame.f_lineno)
        if code.co_name == function and frame.f_globals["__name__"] == module:
            return line, str(frame.f_locals[variable].op)
        frame = frame.f_back
    return line, ""


def stream_name(stream: Stream) -> str:
    """A stream as reports call it."""
    return str(stream) if isinstance(stream, GroupStream) else repr(stream)


class Signature:
    """What one operator does with its tensors.

    Attributes:
        operation: the operator's name with its namespace.
        is_collective: whether it is one of torch.distributed.
    """

    def __init__(self, operator: Any) -> None:
        schema = operator._schema
        namespace, _, name = schema.name.partition("::")
        names = [argument.name for argument in schema.arguments]
        self.operation = f"{namespace}.{name}"
        self.is_collective = namespace == "c10d"
        self._indexes = name == "index"
        self._synchronises = name == "barrier" or not _SYNCHRONISING.isdisjoint(operator.tags)
        self._async_position = names.index("async_op") if "async_op" in names else len(names)
        self._peer_position = next((names.index(peer) for peer in ("dst", "src") if peer in names), None)
        if namespace == "prim" or _METADATA_ONLY.fullmatch(name):
            kinds: list[bool | None] = [None] * len(names)
        elif self.is_collective:
            # The schema does not say what changes. Where there is an output, the rest is read.
            in_place = not any(name.startswith("output") for name in names) and name not in ("send", "barrier")
            kinds = [in_place or name.startswith("output") for name in names]
        else:
            aliases = [argument.alias_info for argument in schema.arguments]
            kinds = [False if alias is None else alias.is_write or None for alias in aliases]
        self._kinds = dict(zip(names, kinds, strict=True))

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, bool | None]]:
        """Every tensor that was given, and whether it is written; None means neither read nor written."""
        found = []
        for kind, value in zip(self._kinds.values(), args, strict=False):
            if isinstance(value, torch.Tensor):
                found.append((value, kind))
            elif isinstance(value, list | tuple):
                found += [(tensor, kind) for tensor in tensors_in(value)]
        for name, value in kwargs.items():
            found += [(tensor, self._kinds[name]) for tensor in tensors_in(value)]
        return found

    def synchronises(self, args: tuple[Any, ...]) -> bool:
        """Whether the host waits for its result, to return a value or to know the shape of a tensor."""
        if self._indexes:
            return any(tensor.dtype in _MASKS for tensor in tensors_in(args[1]))
        return self._synchronises

    def is_asynchronous(self, args: tuple[Any, ...]) -> bool:
        """Whether a collective only begins here. Sending and receiving always do."""
        return self.is_collective and (len(args) <= self._async_position or bool(args[self._async_position]))

    def group_stream(self, args: tuple[Any, ...]) -> GroupStream:
        """Where an asynchronous collective or transfer runs."""
        group = next(value for value in args if isinstance(value, torch.ScriptObject))
        peer = None if self._peer_position is None else int(args[self._peer_position])
        return GroupStream(ProcessGroup.unbox(group).group_name, peer)


class Memory:
    """The life of one storage's memory.

    Attributes:
        allocated_on: the stream that the memory goes back to, or None if it is not known.
        is_host: whether it stands for memory of the host: accesses to it are the host's, in its own order.
        recorded: streams named by `record_stream`.
        last: shape and type of the tensor that was accessed last, or None if nothing was.
    """

    __slots__ = ("_accesses", "allocated_on", "is_host", "last", "recorded")

    def __init__(self, allocated_on: Stream | None = None, *, is_host: bool = False) -> None:
        self.allocated_on = allocated_on
        self.is_host = is_host
        self.recorded: set[Stream] = set()
        self.last: tuple[torch.Size, torch.dtype] | None = None
        # byte range -> the last write of exactly that range, and each stream's last read since
        self._accesses: dict[tuple[int, int], tuple[Access | None, dict[Stream, Access]]] = {}

    def __str__(self) -> str:
        return "a storage" if self.last is None else f"a tensor of shape {list(self.last[0])} and {self.last[1]}"

    def earlier(self, extent: tuple[int, int] | None, *, reads: bool) -> Iterator[tuple[str, Access]]:
        """The accesses to these bytes (None: all) so far: the writes, and on request the reads."""
        for (start, end), (write, others) in self._accesses.items():
            if extent is None or (start < extent[1] and extent[0] < end):
                if write is not None:
                    yield "written", write
                if reads:
                    yield from (("read", read) for read in others.values())

    def add(self, extent: tuple[int, int], access: Access, *, is_write: bool) -> None:
        """Remember an access that comes after all earlier ones it had to come after."""
        if not is_write:
            self._accesses.setdefault(extent, (None, {}))[1][access.stream] = access
            return
        for covered in [key for key in self._accesses if extent[0] <= key[0] and key[1] <= extent[1]]:
            del self._accesses[covered]
        self._accesses[extent] = (access, {})


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in an operator's argument or result: itself, or those in its lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for element in value for tensor in tensors_in(element)]
    return []


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of its storage that a tensor uses, and the one behind the last; both 0 if it is empty."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.itemsize
    start = tensor.storage_offset() * size if count else 0
    return start, start + count * size
