"""A pipeline rank's links to its neighbours: tensors travel beside the computation, in buffers that stay.

    send     the lane that made the tensor copies it into a buffer; the link's stream sends that
    receive  the link's stream receives into a buffer; who needs the tensor waits for it then

A link is a stream and a neighbour. Both ends issue a link's transfers in the order of their plans, which is the same
(`ranks.py` proves it), so a transfer can only wait for its own other end. Several streams use a buffer: the next user
waits for the one before, and what has been sent goes when the iteration's lanes have met.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from combined_1f1b.errors import OverlapError
from combined_1f1b.schedule.ops import Lane, Op

_SEND_BUFFERS = 2
"""A third send waits until the first has left: its peer is that far behind."""


_abandoned: list[_Transfer] = []
"""What failed iterations had on its way, in this process."""


class _Transfer(NamedTuple):
    """A transfer on its way: the name of its op, what to wait for, the buffer."""

    name: str
    work: Any
    buffer: torch.Tensor


class _Free(NamedTuple):
    """A receive buffer and the event after its last reader; None when an iteration's start has ordered that."""

    buffer: torch.Tensor
    last_read: Any


class _Link:
    """One neighbour."""

    def __init__(self, peer: int, group: Any, tag: int) -> None:
        self.stream = torch.cuda.Stream()
        self.tag = tag
        self._peer = peer
        self._group = group
        self.sending: deque[_Transfer] = deque()
        self._free: deque[_Free] = deque()

    def begin(self) -> None:
        """An iteration starts: everything of the one before is done, and its events may not enter a capture.

        A capture makes its buffers anew, in the memory of its graph: what others own may go while the graph lives.
        """
        self.tag += 1
        is_captured = torch.cuda.is_current_stream_capturing()
        self._free = deque(() if is_captured else [_Free(free.buffer, None) for free in self._free])

    def send(self, name: str, tensor: torch.Tensor, producer: Any) -> None:
        """Send a tensor that the stream `producer` has made; the link's stream is current."""
        buffer = None
        if len(self.sending) == _SEND_BUFFERS:
            buffer = self.wait(self.sending.popleft())
            producer.wait_stream(self.stream)
        with torch.cuda.stream(producer):
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            buffer.copy_(tensor)
        self.stream.wait_stream(producer)
        with self._naming_peer(name):
            work = torch.distributed.isend(buffer, self._peer, group=self._group, tag=self.tag)
        self.sending.append(_Transfer(name, work, buffer))

    def receive(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> _Transfer:
        """Start to receive; the link's stream is current."""
        buffer = None
        for _ in range(len(self._free)):
            free = self._free.popleft()
            if free.buffer.shape == shape and free.buffer.dtype == dtype:
                buffer = free.buffer
                if free.last_read is not None:
                    self.stream.wait_event(free.last_read)
                break
            self._free.append(free)
        if buffer is None:
            buffer = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
        with self._naming_peer(name):
            work = torch.distributed.irecv(buffer, self._peer, group=self._group, tag=self.tag)
        return _Transfer(name, work, buffer)

    def wait(self, transfer: _Transfer) -> torch.Tensor:
        """Let the current stream wait for the end of a transfer; returns its buffer."""
        with self._naming_peer(transfer.name):
            transfer.work.wait()
        return transfer.buffer

    def release(self, buffer: torch.Tensor) -> None:
        """The current stream has issued the buffer's last reader."""
        self._free.append(_Free(buffer, torch.cuda.current_stream().record_event()))

    def finish(self) -> None:
        """Wait until everything has been sent; the link's stream is current."""
        while self.sending:
            self.wait(self.sending.popleft())

    @contextmanager
    def _naming_peer(self, name: str) -> Iterator[None]:
        """Around what fails where the peer has gone, or does not come to the transfer in time."""
        try:
            yield
        except RuntimeError as error:
            stage = torch.distributed.get_group_rank(self._group, self._peer)
            error.add_note(f"in {name}, a transfer with rank {self._peer}, pipeline stage {stage}")
            raise


class PipelineLinks:
    """The links of one rank to the previous and the next pipeline stage.

    Args:
        communicator: Megatron's P2PCommunicator, for the group and the neighbours' ranks.
    """

    def __init__(self, communicator: Any) -> None:
        self._group = group = communicator.pp_group
        tag = _random_tag(group)
        self._links = {
            Lane.PREVIOUS: _Link(communicator.prev_rank, group, tag),
            Lane.NEXT: _Link(communicator.next_rank, group, tag),
        }
        self._arriving: dict[tuple[Lane, int], _Transfer] = {}
        self._in_use: dict[tuple[Lane, int], torch.Tensor] = {}
        self._is_broken = False

    @property
    def streams(self) -> tuple[Any, Any]:
        """The streams of the lanes PREVIOUS and NEXT."""
        return self._links[Lane.PREVIOUS].stream, self._links[Lane.NEXT].stream

    def begin(self) -> None:
        """Before an iteration's first transfer.

        Raises:
            OverlapError: what an earlier iteration has left on its way would be taken for this one's.
        """
        if self._is_broken:
            raise OverlapError(
                "an iteration failed, and what it had on its way between pipeline stages would be taken for this "
                "iteration's, since only gloo tells transfers apart; start the processes again"
            )
        for link in self._links.values():
            link.begin()

    def send(self, op: Op, tensor: torch.Tensor, *, producer: Any) -> None:
        """Send a tensor that the stream `producer` has made. Issued on the op's lane."""
        self._links[op.lane].send(op.name, tensor, producer)

    def receive(self, op: Op, *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Start to receive a micro-batch's tensor. Issued on the op's lane."""
        assert op.microbatch is not None
        self._arriving[op.lane, op.microbatch] = self._links[op.lane].receive(op.name, shape, dtype)

    def take(self, lane: Lane, microbatch: int) -> torch.Tensor:
        """Let the current stream wait for a micro-batch's tensor and return it; `release` ends its use."""
        buffer = self._links[lane].wait(self._arriving.pop((lane, microbatch)))
        self._in_use[lane, microbatch] = buffer
        return buffer.detach()

    def release(self, microbatch: int) -> None:
        """The current stream has issued the last reader of what was received for a micro-batch."""
        for lane, link in self._links.items():
            buffer = self._in_use.pop((lane, microbatch), None)
            if buffer is not None:
                link.release(buffer)

    def finish(self) -> None:
        """After an iteration's last transfer: everything has been sent, and nothing is on its way."""
        assert not self._arriving, f"received and never used: {sorted(self._arriving)}"
        assert not self._in_use, f"in use to the end: {sorted(self._in_use)}"
        for link in self._links.values():
            with torch.cuda.stream(link.stream):
                link.finish()

    def abort(self) -> None:
        """After a failure: no later iteration sees what is on its way.

        It is held for good, whatever is uninstalled: gloo stops reading from a peer whose message finds that its buffer
        has gone.
        """
        self._is_broken = torch.distributed.get_backend(self._group) != "gloo"
        _abandoned.extend(self._arriving.values())
        self._arriving.clear()
        self._in_use.clear()
        for lane, link in list(self._links.items()):
            _abandoned.extend(link.sending)
            self._links[lane] = _Link(link._peer, link._group, link.tag)


def _random_tag(group: Any) -> int:
    """The same on all ranks of the group, and most likely never used there before.

    Each iteration has a tag of its own, so that what a failed one has left on its way matches no transfer of a retry,
    also where the package has been installed anew in between.
    """
    tag = torch.tensor([secrets.randbits(30)], device=torch.cuda.current_device())
    torch.distributed.broadcast(tag, group=group, group_src=0)
    return int(tag)
