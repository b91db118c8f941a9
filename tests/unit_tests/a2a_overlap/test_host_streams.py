"""Streams, events and devices of the host device behave as CUDA's do, apart from running everything at once."""

from __future__ import annotations

import threading

import pytest
import torch

from combined_1f1b import host
from combined_1f1b.host import Step
from combined_1f1b.host.streams import StreamState, active_state

pytestmark = [
    pytest.mark.world_size(1),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the host device is for machines without a GPU"),
]


@pytest.fixture(autouse=True)
def active():
    with host.activate():
        yield


@pytest.fixture
def two_devices(monkeypatch):
    monkeypatch.setattr(active_state(), "_device_count", 2)


def test_the_default_stream_is_current_at_first():
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.current_stream() is torch.cuda.current_stream()
    assert torch.cuda.default_stream().cuda_stream == 0


def test_streams_are_distinct_and_hashable():
    one, two = torch.cuda.Stream(), torch.cuda.Stream(device="cuda", priority=-1)
    assert one == one
    assert len({one, two, torch.cuda.default_stream(), one}) == 3
    assert one != "stream"
    assert isinstance(one, torch.cuda.Stream)
    assert one.device == torch.device("cuda", 0)


@pytest.mark.parametrize(("asked", "got"), [(0, 0), (-1, -1), (-5, -5), (-9, -5), (3, 0)])
def test_priorities_are_clamped_to_the_range(asked, got):
    assert torch.cuda.Stream.priority_range() == (0, -5)
    assert torch.cuda.Stream(priority=asked).priority == got


def test_an_external_stream_is_known_by_its_handle():
    one, two = torch.cuda.ExternalStream(4096), torch.cuda.ExternalStream(4096, device=0)
    assert one == two
    assert one.cuda_stream == 4096


def test_stream_blocks_nest_and_restore():
    outer, inner = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(outer):
        assert torch.cuda.current_stream() is outer
        with torch.cuda.stream(inner):
            assert torch.cuda.current_stream() is inner
        with pytest.raises(KeyError), torch.cuda.stream(inner):
            raise KeyError
        assert torch.cuda.current_stream() is outer
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() is outer
        with inner, inner:
            assert torch.cuda.current_stream() is inner
        assert torch.cuda.current_stream() is outer
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_set_stream_lasts():
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    try:
        assert torch.cuda.current_stream() is stream
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())


def test_threads_have_current_streams_of_their_own():
    seen = []
    with torch.cuda.stream(torch.cuda.Stream()):
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.cuda.default_stream()]


@pytest.mark.usefixtures("two_devices")
def test_devices_switch_and_restore():
    assert torch.cuda.device_count() == 2
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        assert torch.cuda.Stream().device == torch.device("cuda", 1)
        with torch.cuda.device(torch.device("cpu")):
            assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0
    other = torch.cuda.Stream(device=1)
    with torch.cuda.stream(other):
        assert torch.cuda.current_device() == 1
        assert torch.cuda.current_stream() is other
        assert torch.cuda.current_stream(0) == torch.cuda.default_stream(0)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream("cuda:1") == torch.cuda.default_stream(1)
    assert torch.cuda.default_stream(0) != torch.cuda.default_stream(1)


def test_a_device_that_does_not_exist_is_refused():
    with pytest.raises(RuntimeError, match="invalid device ordinal 5"):
        torch.cuda.set_device(5)


def test_device_facts():
    assert torch.cuda.get_device_name() == torch.cuda.get_device_properties(0).name
    assert torch.cuda.get_device_capability() == (0, 0)
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.is_current_stream_capturing() is False
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved() == 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()


def test_markers_and_profiler_control():
    torch.cuda.nvtx.range_push("forward")
    torch.cuda.nvtx.range_pop()
    torch.cuda.nvtx.mark("here")
    with torch.cuda.nvtx.range("block"):
        pass
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()
    assert torch.cuda.cudart().cudaProfilerStart() == 0


class TestEvents:
    def test_times_are_milliseconds_between_records(self):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda.current_stream().record_event(end)
        assert 0.0 <= start.elapsed_time(end) < 60_000.0
        assert end.query()
        end.synchronize()

    def test_timing_needs_both_switched_on_and_recorded(self):
        timed, untimed = torch.cuda.Event(enable_timing=True), torch.cuda.Event()
        with pytest.raises(ValueError, match="enable_timing"):
            timed.elapsed_time(untimed)
        with pytest.raises(ValueError, match="recorded"):
            timed.elapsed_time(torch.cuda.Event(enable_timing=True))

    def test_an_event_keeps_its_last_stream(self):
        event, stream = torch.cuda.Event(), torch.cuda.Stream()
        assert event.stream is None
        assert event.query()
        event.record(stream)
        assert event.stream is stream
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            event.record()
            assert event.stream == torch.cuda.current_stream()


class TestObserver:
    def test_every_step_is_reported_in_order(self):
        steps = []
        tensor = torch.ones(1)
        with host.observing(steps.append):
            producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
            with torch.cuda.stream(producer):
                event = torch.cuda.current_stream().record_event()
            consumer.wait_event(event)
            consumer.wait_stream(producer)
            tensor.record_stream(consumer)
            event.synchronize()
            producer.synchronize()
            torch.cuda.synchronize()
        assert [(step.step, step.stream) for step in steps] == [
            (Step.STREAM_CREATED, producer),
            (Step.STREAM_CREATED, consumer),
            (Step.STREAM_SWITCHED, producer),
            (Step.EVENT_RECORDED, producer),
            (Step.STREAM_SWITCHED, torch.cuda.default_stream()),
            (Step.EVENT_AWAITED, consumer),
            (Step.EVENT_RECORDED, producer),
            (Step.EVENT_AWAITED, consumer),
            (Step.TENSOR_RECORDED, consumer),
            (Step.EVENT_SYNCHRONIZED, producer),
            (Step.STREAM_SYNCHRONIZED, producer),
            (Step.DEVICE_SYNCHRONIZED, torch.cuda.default_stream()),
        ]
        assert steps[3].event is steps[5].event is event
        assert steps[8].tensor is tensor

    def test_several_observers_hear_every_step(self):
        outer, inner = [], []
        with host.observing(outer.append):
            with host.observing(inner.append):
                torch.cuda.synchronize()
            torch.cuda.synchronize()
        torch.cuda.synchronize()
        assert (len(outer), len(inner)) == (2, 1)

    def test_backward_runs_on_the_stream_that_is_current(self):
        # The CPU engine does not return to the forward's stream as CUDA's would; the host device must not pretend.
        seen = []
        leaf = torch.ones(1, requires_grad=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            result = leaf * 2
        result.register_hook(lambda gradient: seen.append(torch.cuda.current_stream()))
        result.sum().backward()
        assert seen == [torch.cuda.default_stream()]


def test_a_state_counts_from_one():
    state = StreamState()
    assert [state.next_stream_id(), state.next_stream_id()] == [1, 2]
    assert state.next_event_id() == 1
