"""The rules of CUDA's stream capture, checked while a graph is captured on the host device.

    origin    the stream that was current at capture_begin; it is in the capture until capture_end
    joining   another stream enters the capture when it waits for an event that was recorded in it
    leaving   all work in a stream that joined has to be waited for by the origin before capture_end

An asynchronous collective or transfer runs on a stream of its group's, as NCCL's do: that stream joins where it starts,
and `Work.wait` lets the stream that is current then wait for it.

A rule that is broken raises what CUDA raises, and invalidates the capture: every later operation in it and capture_end
fail too, and eager work goes on as before. Which streams have seen each other's work is kept as vector clocks: for each
stream of the capture, how many operations of every stream come before its next one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from combined_1f1b.host.accesses import GroupStream
from combined_1f1b.host.capture_errors import CaptureFault
from combined_1f1b.host.steps import Step, StreamStep

if TYPE_CHECKING:
    import torch

    from combined_1f1b.host.streams import HostEvent, HostStream

type Clock = dict[HostStream | GroupStream, int]

ERROR_MODES = ("global", "thread_local", "relaxed")


class Started(NamedTuple):
    """An asynchronous operation in a capture: its name, the group's stream that it runs on, and that stream's clock."""

    operation: str
    own: GroupStream
    clock: Clock


class Capture:
    """One capture under way.

    Args:
        origin: the stream that captures.
        error_mode: CUDA's cudaStreamCaptureMode: whose synchronisation of streams outside the capture is refused
            ("global": every thread's, "thread_local": this thread's, "relaxed": nobody's).

    Attributes:
        is_invalidated: a rule was broken.
    """

    def __init__(self, origin: HostStream, *, error_mode: str) -> None:
        assert error_mode in ERROR_MODES, error_mode
        self.origin = origin
        self.is_invalidated = False
        self._error_mode = error_mode
        self._thread = threading.get_ident()
        self._clocks: dict[HostStream | GroupStream, Clock] = {origin: {}}
        self._started: list[Started] = []

    def __contains__(self, stream: HostStream | None) -> bool:
        return stream in self._clocks

    @property
    def refuses_unsafe_calls(self) -> bool:
        """Whether this thread may not synchronise, or ask the driver for memory, outside the capture either."""
        if self._error_mode == "thread_local":
            return threading.get_ident() == self._thread
        return self._error_mode == "global"

    def fail(self, fault: CaptureFault, detail: str) -> torch.AcceleratorError:
        """Invalidate the capture and return the error to raise."""
        self.is_invalidated = True
        return fault.error(detail)

    def require_valid(self, stream: HostStream) -> None:
        """Raise for an operation in a capture in which a rule was broken before."""
        if self.is_invalidated:
            raise CaptureFault.INVALIDATED.error(f"{stream!r} belongs to a capture that has failed")

    def work(self, stream: HostStream) -> None:
        """An operation was issued to a stream of the capture."""
        clock = self._clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1

    def start(self, operation: str, own: GroupStream, stream: HostStream) -> Started:
        """An asynchronous operation of a process group was issued to a stream of the capture."""
        clock = self._clocks.setdefault(own, {})
        _advance(clock, self._clocks[stream])
        clock[own] = clock.get(own, 0) + 1
        self._started.append(Started(operation, own, dict(clock)))
        return self._started[-1]

    def join(self, stream: HostStream, started: Started | None) -> None:
        """`Work.wait` on this stream, for an operation of the capture or, None, for one that started outside."""
        self._order(stream, None if started is None else started.clock, "an asynchronous collective or transfer")

    def observe(self, reported: StreamStep) -> None:
        """Apply the rule for what happened to a stream or an event; see `host.observing`."""
        step, stream, event = reported.step, reported.stream, reported.event
        if step is Step.EVENT_RECORDED:
            assert stream is not None
            assert event is not None
            self._record(stream, event)
        elif step is Step.EVENT_AWAITED:
            assert stream is not None
            assert event is not None
            self._wait(stream, event)
        elif step is Step.DEVICE_SYNCHRONIZED:
            raise self.fail(CaptureFault.UNSUPPORTED, "the device was synchronized")
        elif step in (Step.STREAM_SYNCHRONIZED, Step.STREAM_QUERIED):
            if stream in self or self.refuses_unsafe_calls:
                raise self.fail(CaptureFault.UNSUPPORTED, f"{step}: {stream!r}")
        elif step in (Step.EVENT_SYNCHRONIZED, Step.EVENT_QUERIED):
            assert event is not None
            if event.stream is None:
                return
            if self._clock_of(event) is not None:
                raise self.fail(CaptureFault.CAPTURED_EVENT, f"{step}: {event!r}")
            if self.refuses_unsafe_calls:
                raise self.fail(CaptureFault.UNSUPPORTED, f"{step}: {event!r}")

    def end(self) -> None:
        """Check that the capture may end.

        Raises:
            torch.AcceleratorError: it was invalidated, or a stream has work that the origin has not waited for.
        """
        self.require_valid(self.origin)
        seen = self._clocks[self.origin]
        left = [
            repr(stream)
            for stream, clock in self._clocks.items()
            if not isinstance(stream, GroupStream)
            and stream != self.origin
            and clock.get(stream, 0) > seen.get(stream, 0)
        ]
        left += [
            f"{started.operation} on {started.own}: no Work.wait joins it"
            for started in self._started
            if started.clock[started.own] > seen.get(started.own, 0)
        ]
        if left:
            raise self.fail(CaptureFault.UNJOINED, f"{self.origin!r} has not waited for {'; '.join(left)}")

    def _clock_of(self, event: HostEvent) -> Clock | None:
        captured = event.captured
        return captured[1] if captured is not None and captured[0] is self else None

    def _record(self, stream: HostStream, event: HostEvent) -> None:
        event.captured = None
        if stream in self:
            self.require_valid(stream)
            event.captured = (self, dict(self._clocks[stream]))

    def _wait(self, stream: HostStream, event: HostEvent) -> None:
        if event.stream is not None:
            self._order(stream, self._clock_of(event), repr(event))
        elif stream in self:
            self.require_valid(stream)

    def _order(self, stream: HostStream, theirs: Clock | None, awaited: str) -> None:
        """Let the stream's next operation come after what the other clock has; None: that of work outside."""
        if stream in self:
            self.require_valid(stream)
            if theirs is None:
                raise self.fail(
                    CaptureFault.ISOLATION, f"{stream!r} is captured and waits for {awaited}, recorded outside"
                )
        elif theirs is None:
            return
        elif stream.is_default:
            raise self.fail(CaptureFault.IMPLICIT, f"{stream!r} waits for {awaited}, recorded in the capture")
        _advance(self._clocks.setdefault(stream, {}), theirs)


def _advance(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
