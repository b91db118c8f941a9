"""A pipeline rank's links to its neighbours: tensors travel beside the computation, in buffers that stay.

    send     the lane that made the tensor copies it into a buffer; the link's stream sends that
    receive  the link's stream receives into a buffer; who needs the tensor waits for it then

A link is a stream and a neighbour. Both ends issue a link's transfers in the order of their plans, which is the same
(`transfers.py`), so a transfer can only wait for its own other end. Buffers are never freed, since several streams use
them: the next user of one waits for the one before.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch

from combined_1f1b.schedule.ops import Lane

_SEND_BUFFERS = 2
"""A third send waits until the first has left: its peer is that far behind."""


class _Received(NamedTuple):
    work: Any
    buffer: torch.Tensor


class _Free(NamedTuple):
    """A receive buffer and the event after its last reader; None when an iteration's start has ordered that."""

    buffer: torch.Tensor
    last_read: Any


class _Link:
    """One neighbour."""

    def __init__(self, peer: int, group: Any, iteration: int = 0) -> None:
        self.stream = torch.cuda.Stream()
        # The tag of its transfers, where the backend has tags: what a failed iteration has left on its way matches none
        # of a retry's.
        self.iteration = iteration
        self._peer = peer
        self._group = group
        self.sending: deque[tuple[Any, torch.Tensor]] = deque()
        self._free: deque[_Free] = deque()

    def peer_name(self, lane: Lane) -> str:
        """For messages."""
        return f"rank {self._peer}, the {lane.value} pipeline stage"

    def begin(self) -> None:
        """An iteration starts: everything of the one before is done, and its events may not enter a capture."""
        self.iteration += 1
        self._free = deque(_Free(free.buffer, None) for free in self._free)

    def send(self, tensor: torch.Tensor, producer: Any) -> None:
        """Send a tensor that the stream `producer` has made; the link's stream is current."""
        buffer = None
        if len(self.sending) == _SEND_BUFFERS:
            work, buffer = self.sending.popleft()
            work.wait()
            producer.wait_stream(self.stream)
        with torch.cuda.stream(producer):
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            buffer.copy_(tensor)
        self.stream.wait_stream(producer)
        work = torch.distributed.isend(buffer, self._peer, group=self._group, tag=self.iteration)
        self.sending.append((work, buffer))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Received:
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
        work = torch.distributed.irecv(buffer, self._peer, group=self._group, tag=self.iteration)
        return _Received(work, buffer)

    def release(self, buffer: torch.Tensor) -> None:
        """The current stream has issued the buffer's last reader."""
        self._free.append(_Free(buffer, torch.cuda.current_stream().record_event()))

    def finish(self) -> None:
        """Wait until everything has been sent; the link's stream is current."""
        while self.sending:
            self.sending.popleft()[0].wait()


class PipelineLinks:
    """The links of one rank to the previous and the next pipeline stage.

    Args:
        communicator: Megatron's P2PCommunicator, for the group and the neighbours' ranks.
    """

    def __init__(self, communicator: Any) -> None:
        group = communicator.pp_group
        self._links = {
            Lane.PREVIOUS: _Link(communicator.prev_rank, group),
            Lane.NEXT: _Link(communicator.next_rank, group),
        }
        self._arriving: dict[tuple[Lane, int], _Received] = {}
        self._in_use: dict[tuple[Lane, int], torch.Tensor] = {}
        self._abandoned: list[Any] = []

    @property
    def streams(self) -> tuple[Any, Any]:
        """The streams of the lanes PREVIOUS and NEXT."""
        return self._links[Lane.PREVIOUS].stream, self._links[Lane.NEXT].stream

    def begin(self) -> None:
        """Before an iteration's first transfer."""
        for link in self._links.values():
            link.begin()

    def send(self, lane: Lane, tensor: torch.Tensor, *, producer: Any) -> None:
        """Send a tensor that the stream `producer` has made. Issued on the lane."""
        self._links[lane].send(tensor, producer)

    def receive(self, lane: Lane, microbatch: int, *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Start to receive a micro-batch's tensor. Issued on the lane."""
        self._arriving[lane, microbatch] = self._links[lane].receive(shape, dtype)

    def take(self, lane: Lane, microbatch: int) -> torch.Tensor:
        """Let the current stream wait for a micro-batch's tensor and return it; `release` ends its use."""
        work, buffer = self._arriving.pop((lane, microbatch))
        try:
            work.wait()
        except RuntimeError as error:
            error.add_note(f"receiving the tensor of micro-batch {microbatch} from {self._links[lane].peer_name(lane)}")
            raise
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

        It is held for good: gloo stops reading from a peer whose message finds that its buffer has gone.
        """
        self._abandoned += self._arriving.values()
        self._arriving.clear()
        self._in_use.clear()
        for lane, link in list(self._links.items()):
            self._abandoned += link.sending
            self._links[lane] = _Link(link._peer, link._group, link.iteration)
