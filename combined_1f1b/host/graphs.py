"""Stand-ins for torch.cuda.CUDAGraph and what belongs to it, and the patches that a recording needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from combined_1f1b.host.capture import Capture
from combined_1f1b.host.patch import Patch
from combined_1f1b.host.random import HostDefaultGenerator, HostGeneratorState
from combined_1f1b.host.recording import Recording
from combined_1f1b.host.streams import HostStream, StreamState, require_active_state
from combined_1f1b.host.tape import Tape


class HostGraph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._state = require_active_state()
        self._registered: list[HostGeneratorState] = []
        self._tape: Tape | None = None
        self._pool: Any = None

    def register_generator_state(self, state: HostDefaultGenerator | HostGeneratorState) -> None:
        """Let operators draw from a generator inside the capture. The current one needs no registration."""
        self._registered.append(state.graphsafe_get_state())

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        state = self._state
        if self._tape is not None:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph. Create a new instance.")
        origin = state.current_stream()
        if origin.is_default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if state.recording is not None:
            raise RuntimeError("only one CUDA graph can be captured at a time in a process")
        capture = Capture(origin, error_mode=capture_error_mode)
        recording = Recording(
            capture,
            generator=torch.cuda.default_generators[state.current_device()],
            registered=self._registered,
            current_stream=state.current_stream,
        )
        self._pool = graph_pool_handle(state) if pool is None else pool
        recording.__enter__()
        state.recording = recording
        state.observers.append(capture.observe)

    def capture_end(self) -> None:
        """End the capture, whatever happened in it: afterwards the streams work eagerly again.

        Raises:
            RuntimeError: no capture is under way in the current stream.
            torch.AcceleratorError: the capture broke a rule, now or before.
        """
        state, recording = self._state, self._state.recording
        if recording is None or state.current_stream() != recording.capture.origin:
            raise RuntimeError("Capture must end on the same stream it began on.")
        state.recording = None
        state.observers.remove(recording.capture.observe)
        recording.__exit__(None, None, None)
        tape = recording.finish()
        recording.capture.end()
        self._tape = tape

    def instantiate(self) -> None:
        self._require_captured("instantiate")

    def replay(self) -> None:
        self._require_captured("replay").replay()

    def reset(self) -> None:
        self._tape = None

    def pool(self) -> Any:
        self._require_captured("pool")
        return self._pool

    def enable_debug_mode(self) -> None:
        """Nothing to enable: there is no CUDA graph to print."""

    def debug_dump(self, debug_path: str) -> None:
        """Write the recorded steps, one a line."""
        with open(debug_path, "w") as file:
            file.writelines(f"{step}\n" for step in self._require_captured("debug_dump").steps)

    def _require_captured(self, call: str) -> Tape:
        if self._tape is None:
            raise RuntimeError(f"Called CUDAGraph::{call} without a preceding successful capture.")
        return self._tape


class HostGraphContext:
    """Stands for torch.cuda.graph(...): captures its block."""

    def __init__(
        self,
        cuda_graph: HostGraph,
        pool: Any = None,
        stream: HostStream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self.cuda_graph = cuda_graph
        self.capture_stream = torch.cuda.Stream() if stream is None else stream
        self.stream_ctx = torch.cuda.stream(self.capture_stream)
        self._options = {"pool": pool, "capture_error_mode": capture_error_mode}

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        self.stream_ctx.__enter__()
        self.cuda_graph.capture_begin(**self._options)

    def __exit__(self, *exception: object) -> None:
        try:
            self.cuda_graph.capture_end()
        finally:
            self.stream_ctx.__exit__(*exception)


def graph_pool_handle(state: StreamState) -> tuple[int, int]:
    """A new token for a graph's memory pool; here it only has an identity."""
    return (0, next(state.pool_ids))


def _reading(state: StreamState, original: Callable[..., Any], call: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if state.recording is None:
            return original(self, *args, **kwargs)
        state.recording.read_on_host(self, call)
        return state.recording.mark_host(original(self, *args, **kwargs))

    return read


def _resizing(state: StreamState, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if state.recording is not None:
            state.recording.resize(self, size)
        return original(self, size)

    return resize_


def _waiting(state: StreamState, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if state.recording is None:
            return original(self, *args, **kwargs)
        state.recording.wait(self)
        with state.recording.suspended():
            return original(self, *args, **kwargs)

    return wait


def _host_result(state: StreamState, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return result if state.recording is None else state.recording.mark_host(result)

    return call


def graph_patches(state: StreamState) -> tuple[Patch, ...]:
    """The patches of torch.cuda's graphs, and of what a dispatch mode does not see."""
    return (
        *(
            Patch(owner=owner, name=name, value=value, reason="graphs")
            for owner in (torch.cuda, torch.cuda.graphs)
            for name, value in (
                ("CUDAGraph", HostGraph),
                ("graph", HostGraphContext),
                ("graph_pool_handle", functools.partial(graph_pool_handle, state)),
                ("is_current_stream_capturing", state.is_current_stream_capturing),
            )
        ),
        *(
            Patch(
                owner=torch.Tensor,
                name=name,
                value=_reading(state, getattr(torch.Tensor, name), f"Tensor.{name}"),
                reason="reads a tensor's values, which synchronises, without an operator",
            )
            for name in ("cpu", "tolist", "numpy")
        ),
        Patch(
            owner=torch.UntypedStorage,
            name="resize_",
            value=_resizing(state, torch.UntypedStorage.resize_),
            reason="MFSDP v2 frees and materialises weights so, which is no operator",
        ),
        Patch(
            owner=torch.distributed.distributed_c10d.Work,
            name="wait",
            value=_waiting(state, torch.distributed.distributed_c10d.Work.wait),
            reason="gloo unpacks results inside the wait, from buffers that a replay does not have",
        ),
        Patch(
            owner=torch,
            name="get_rng_state",
            value=_host_result(state, torch.get_rng_state),
            reason="returns a CPU tensor, whose values may be read inside a capture",
        ),
    )
