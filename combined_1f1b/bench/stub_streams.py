"""Streams that do nothing, in the place of torch.cuda, and a count of what a schedule asks of them and of autograd.

They are leaner than the host device, which keeps track of what runs where: what is left is the schedule's own work. A
real stream costs more per call, so a schedule that makes fewer calls gains more on a GPU than these numbers say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import utils as pipeline_utils
from torch.autograd.variable import Variable

from combined_1f1b.host.patch import AppliedPatches, Patch


class StubEvent:
    """An event that is always complete."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing to record."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""


class StubStream:
    """A stream on which nothing runs."""

    def __init__(self) -> None:
        self._event = StubEvent()

    def record_event(self, _event: Any = None) -> StubEvent:
        """Nothing to record."""
        return self._event

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""


class StubStreamContext:
    """`torch.cuda.stream`: entering switches nothing."""

    def __init__(self, _stream: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_exception: Any) -> None:
        pass


class _CountingEngine:
    """Autograd's engine, with a count of its calls."""

    def __init__(self, engine: Any, counts: Counter[str]) -> None:
        self._engine = engine
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *arguments: Any, **options: Any) -> Any:
        """One call of the engine."""
        self._counts["engine calls"] += 1
        return self._engine.run_backward(*arguments, **options)


def _nothing(*_arguments: Any) -> None:
    return None


_REASON = "measures the schedule's own host cost, without a device"


def _patch(owner: Any, name: str, value: Any) -> Patch:
    return Patch(owner=owner, name=name, value=value, reason=_REASON)


@contextmanager
def stub_streams() -> Iterator[tuple[StubStream, StubStream]]:
    """Put the stubs in the place of torch.cuda's streams for a block; CPU tensors then run any schedule.

    Yields:
        the compute and the communication stream.
    """
    compute, communication = StubStream(), StubStream()
    applied = AppliedPatches(
        (
            _patch(torch.cuda, "Event", StubEvent),
            _patch(torch.cuda, "stream", StubStreamContext),
            _patch(torch.cuda, "set_stream", _nothing),
            _patch(torch.cuda, "current_stream", lambda _device=None: compute),
            _patch(torch.cuda, "is_current_stream_capturing", lambda: False),
            _patch(torch.Tensor, "record_stream", _nothing),
            _patch(pipeline_utils, "_COMM_STREAM", communication),
        )
    )
    try:
        yield compute, communication
    finally:
        applied.restore()


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count calls inside `stub_streams`, by kind."""
    counts: Counter[str] = Counter()

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[kind] += 1
            return function(*arguments, **options)

        return call

    counted_names = (
        ("events recorded", StubEvent, "record"),
        ("events recorded", StubStream, "record_event"),
        ("waits", StubEvent, "wait"),
        ("waits", StubStream, "wait_event"),
        ("waits", StubStream, "wait_stream"),
        ("stream switches", StubStreamContext, "__enter__"),
        ("stream switches", StubStreamContext, "__exit__"),  # back to the stream before
        ("stream switches", torch.cuda, "set_stream"),
        ("detaches", torch.Tensor, "detach"),
        ("record_stream calls", torch.Tensor, "record_stream"),
        ("storage resizes", torch.UntypedStorage, "resize_"),
    )
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    applied = AppliedPatches(
        (
            *(_patch(owner, name, counted(kind, getattr(owner, name))) for kind, owner, name in counted_names),
            _patch(torch.autograd.Function, "apply", classmethod(counted("autograd Functions", apply))),
            _patch(Variable, "_execution_engine", _CountingEngine(Variable._execution_engine, counts)),
        )
    )
    try:
        yield counts
    finally:
        applied.restore()
