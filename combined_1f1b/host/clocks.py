"""Vector clocks of streams, events and the host: what is known to be done once a stream's next operation starts."""

from __future__ import annotations

import weakref
from typing import Any

from combined_1f1b.host.accesses import Access, Stream
from combined_1f1b.host.steps import Step, StreamStep

Clock = dict[Stream, int]
"""For each stream, the number of its last operation that is known to be done."""


class Clocks:
    """The clocks of one run. An event that nobody was seen to record is behind nothing."""

    def __init__(self) -> None:
        self._streams: dict[Stream, Clock] = {}
        self._events: weakref.WeakKeyDictionary[Any, Clock] = weakref.WeakKeyDictionary()
        self._host: Clock = {}

    def of(self, stream: Stream) -> Clock:
        """The live clock of a stream; a new one starts after what the host has waited for."""
        clock = self._streams.get(stream)
        if clock is None:
            clock = self._streams[stream] = {**self._host, stream: 0}
        return clock

    def next(self, stream: Stream) -> int:
        """Number the stream's next operation."""
        clock = self.of(stream)
        clock[stream] += 1
        return clock[stream]

    def covers(self, stream: Stream, access: Access) -> bool:
        """Whether an access is done before the stream's next operation starts."""
        return access.stream is stream or self.of(stream).get(access.stream, 0) >= access.number

    def wait(self, stream: Stream, other: Clock) -> None:
        """Let the stream's next operation start after everything in another clock."""
        _advance(self.of(stream), other)

    def synchronise_host(self, *clocks: Clock) -> None:
        """The host has waited: what it issues from now on starts after everything in these clocks."""
        for clock in clocks:
            _advance(self._host, clock)
        for clock in self._streams.values():
            _advance(clock, self._host)

    def observe(self, step: StreamStep) -> None:
        """Hear of a stream or an event."""
        match step.step:
            case Step.EVENT_RECORDED:
                self._events[step.event] = dict(self.of(step.stream))
            case Step.EVENT_AWAITED:
                self.wait(step.stream, self._events.get(step.event, {}))
            case Step.EVENT_SYNCHRONIZED:
                self.synchronise_host(self._events.get(step.event, {}))
            case Step.STREAM_SYNCHRONIZED:
                self.synchronise_host(self.of(step.stream))
            case Step.DEVICE_SYNCHRONIZED:
                self.synchronise_host(*self._streams.values())


def _advance(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number
