"""Streams and events of the host device: plain objects with ids, and one place where a checker can watch them.

Nothing here runs anything. Work on CPU tensors happens at once, in the order in which it is issued, whatever stream is
current; so a missing wait does no harm here. What the objects keep is identity (which stream, which event, recorded
where), and every step is reported to the observers of `StreamState`, from which rules about captures and races are
checked without touching this file.

The CPU autograd engine runs a node's backward on whatever stream is current at that moment, where CUDA would switch to
the stream of the node's forward. Nothing here models that switch, so a fault that depends on it is not visible.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import torch

from combined_1f1b.host.contexts import StreamContext
from combined_1f1b.host.steps import Observer, Step, StreamStep

if TYPE_CHECKING:
    from combined_1f1b.host.capture import Capture, Clock
    from combined_1f1b.host.recording import Recording

# CUDA's range on current hardware: (least, greatest) priority, a smaller number being more urgent.
PRIORITY_RANGE = (0, -5)
DEFAULT_STREAM_ID = 0


class _CurrentStreams(threading.local):
    """What CUDA keeps per thread: the current device and each device's current stream."""

    def __init__(self) -> None:
        self.device_index = 0
        self.streams: dict[int, HostStream] = {}


class StreamState:
    """The streams of one activation: who is current, what ids come next, and who watches.

    Its bound methods stand in torch.cuda while the host device is active, so `torch.cuda.current_stream.__self__` is
    the one reference to the active state and no module global is needed.

    Attributes:
        device_count: how many devices torch.cuda reports (only their numbers exist).
        recording: the recording of the graph that is being captured, or None.
        observers: called with every `StreamStep`, in this order; having none costs nothing.
    """

    def __init__(self, *, device_count: int = 1) -> None:
        assert device_count >= 1
        self._device_count = device_count
        self.observers: list[Observer] = []
        self.recording: Recording | None = None
        self.pool_ids = itertools.count(1)
        self._stream_ids = itertools.count(DEFAULT_STREAM_ID + 1)
        self._event_ids = itertools.count(1)
        self._default: dict[int, HostStream] = {}
        self._current = _CurrentStreams()

    def next_stream_id(self) -> int:
        return next(self._stream_ids)

    def next_event_id(self) -> int:
        return next(self._event_ids)

    def report(
        self,
        step: Step,
        *,
        stream: HostStream | None = None,
        event: HostEvent | None = None,
        tensor: torch.Tensor | None = None,
    ) -> None:
        if self.observers:
            reported = StreamStep(step=step, stream=stream, event=event, tensor=tensor)
            for observer in tuple(self.observers):
                observer(reported)

    def index_of(self, device: Any = None) -> int:
        """The device index that a `device` argument of torch.cuda means; None, -1 and CPU mean the current one."""
        if device is None:
            return self._current.device_index
        if isinstance(device, int):
            return device if device >= 0 else self._current.device_index
        index = torch.device(device).index
        return self._current.device_index if index is None else index

    # torch.cuda names

    def device_count(self) -> int:
        return self._device_count

    def current_device(self) -> int:
        return self._current.device_index

    def set_device(self, device: Any) -> None:
        index = self.index_of(device)
        if not 0 <= index < self._device_count:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}: the host device has {self._device_count}")
        self._current.device_index = index

    def default_stream(self, device: Any = None) -> HostStream:
        index = self.index_of(device)
        if index not in self._default:
            self._default[index] = HostStream._of(self, stream_id=DEFAULT_STREAM_ID, device_index=index, priority=0)
        return self._default[index]

    def current_stream(self, device: Any = None) -> HostStream:
        index = self.index_of(device)
        return self._current.streams.get(index) or self.default_stream(index)

    def set_stream(self, stream: HostStream | None) -> None:
        if stream is None:
            return
        self._current.device_index = stream.device_index
        self._current.streams[stream.device_index] = stream
        self.report(Step.STREAM_SWITCHED, stream=stream)

    def synchronize(self, device: Any = None) -> None:
        self.report(Step.DEVICE_SYNCHRONIZED, stream=self.current_stream(device))

    def is_current_stream_capturing(self) -> bool:
        return self.recording is not None and self.current_stream() in self.recording.capture

    def record_tensor(self, tensor: torch.Tensor, stream: HostStream) -> None:
        """Stands for Tensor.record_stream: CPU memory is never reused by another stream, so nothing has to be kept."""
        self.report(Step.TENSOR_RECORDED, stream=stream, tensor=tensor)


def active_state() -> StreamState | None:
    """The state whose methods stand in torch.cuda now, or None when the host device is not active."""
    state = getattr(torch.cuda.current_stream, "__self__", None)
    return state if isinstance(state, StreamState) else None


def _report(
    step: Step,
    *,
    stream: HostStream | None = None,
    event: HostEvent | None = None,
) -> None:
    """Tell the active state, not the one that a stream was made in: libraries keep streams in globals."""
    state = active_state()
    if state is not None:
        state.report(step, stream=stream, event=event)


def require_active_state() -> StreamState:
    state = active_state()
    if state is None:
        raise RuntimeError("the host device is not active: use `with combined_1f1b.host.activate():`")
    return state


class HostStream:
    """Stands for torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        state = require_active_state()
        least, greatest = PRIORITY_RANGE
        self._bind(
            state,
            stream_id=kwargs["stream_id"] if "stream_id" in kwargs else state.next_stream_id(),
            device_index=kwargs["device_index"] if "device_index" in kwargs else state.index_of(device),
            priority=max(min(priority, least), greatest),
        )
        _report(Step.STREAM_CREATED, stream=self)

    @classmethod
    def _of(cls, state: StreamState, *, stream_id: int, device_index: int, priority: int) -> HostStream:
        stream = cls.__new__(cls)
        stream._bind(state, stream_id=stream_id, device_index=device_index, priority=priority)
        return stream

    def _bind(self, state: StreamState, *, stream_id: int, device_index: int, priority: int) -> None:
        self._made_in = state
        self._outer: list[StreamContext] = []
        self.stream_id = stream_id
        self.device_index = device_index
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return PRIORITY_RANGE

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @property
    def cuda_stream(self) -> int:
        """The handle; as with CUDA, the default stream's is 0."""
        return self.stream_id

    def wait_event(self, event: HostEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: HostStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        if event is None:
            event = HostEvent()
        event.record(self)
        return event

    @property
    def is_default(self) -> bool:
        """Whether it is CUDA's legacy stream, which can neither capture nor join a capture."""
        return self.stream_id == DEFAULT_STREAM_ID

    def query(self) -> bool:
        _report(Step.STREAM_QUERIED, stream=self)
        return True

    def synchronize(self) -> None:
        _report(Step.STREAM_SYNCHRONIZED, stream=self)

    def __enter__(self) -> Self:
        context = StreamContext(self)
        context.__enter__()
        self._outer.append(context)
        return self

    def __exit__(self, *exception: object) -> None:
        self._outer.pop().__exit__(*exception)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostStream):
            return False
        same_numbers = (self.device_index, self.stream_id) == (other.device_index, other.stream_id)
        # Ids start again with each activation, and libraries keep streams in globals: only default streams may match.
        return same_numbers and (self._made_in is other._made_in or self.stream_id == DEFAULT_STREAM_ID)

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))

    def __repr__(self) -> str:
        return f"<host stream {self.stream_id} device={self.device} priority={self.priority}>"


class HostExternalStream(HostStream):
    """Stands for torch.cuda.ExternalStream: a stream known by its handle."""

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any) -> None:
        state = require_active_state()
        super().__init__(stream_id=stream_ptr, device_index=state.index_of(device), **kwargs)


class HostEvent:
    """Stands for torch.cuda.Event. An event that was never recorded counts as complete, as in CUDA.

    Attributes:
        event_id: number within the activation.
        stream: where it was last recorded, or None.
        captured: the capture in which it was last recorded with the work that it stands for, or None.
    """

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self.event_id = require_active_state().next_event_id()
        self.enable_timing = enable_timing
        self.blocking = blocking
        self.interprocess = interprocess
        self.external = external
        self.stream: HostStream | None = None
        self.captured: tuple[Capture, Clock] | None = None
        self._seconds = 0.0

    @property
    def device(self) -> torch.device | None:
        return None if self.stream is None else self.stream.device

    @property
    def cuda_event(self) -> int:
        return self.event_id

    def record(self, stream: HostStream | None = None) -> None:
        self.stream = torch.cuda.current_stream() if stream is None else stream
        self._seconds = time.perf_counter()
        _report(Step.EVENT_RECORDED, stream=self.stream, event=self)

    def wait(self, stream: HostStream | None = None) -> None:
        waiting = torch.cuda.current_stream() if stream is None else stream
        _report(Step.EVENT_AWAITED, stream=waiting, event=self)

    def query(self) -> bool:
        _report(Step.EVENT_QUERIED, stream=self.stream, event=self)
        return True

    def synchronize(self) -> None:
        _report(Step.EVENT_SYNCHRONIZED, stream=self.stream, event=self)

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds of host time between the two records.

        Raises:
            ValueError: an event was made without `enable_timing` or never recorded, as in CUDA.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.stream is None or end_event.stream is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._seconds - self._seconds) * 1000.0

    def __repr__(self) -> str:
        return f"<host event {self.event_id} {'unrecorded' if self.stream is None else f'on {self.stream!r}'}>"
