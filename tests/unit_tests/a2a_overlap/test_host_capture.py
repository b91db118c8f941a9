"""The host device refuses in a capture what CUDA refuses, under the same error names, and works eagerly afterwards."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from combined_1f1b import host

pytestmark = [
    pytest.mark.world_size(1),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the host device is for machines without a GPU"),
]

SYNCHRONISING = {
    "device": lambda tensor: torch.cuda.synchronize(),
    "stream": lambda tensor: torch.cuda.current_stream().synchronize(),
    "stream query": lambda tensor: torch.cuda.current_stream().query(),
    "stream outside": lambda tensor: torch.cuda.Stream().synchronize(),
    "item": lambda tensor: tensor.sum().item(),
    "bool": lambda tensor: bool(tensor.sum() > 0),
    "tolist": lambda tensor: tensor.tolist(),
    "cpu": lambda tensor: tensor.cpu(),
    "to": lambda tensor: tensor.to("cpu"),
    "numpy": lambda tensor: tensor.numpy(),
    "nonzero": lambda tensor: tensor.nonzero(),
    "mask": lambda tensor: tensor[tensor > 0],
    "unique": lambda tensor: tensor.unique(),
    "repeats": lambda tensor: tensor.repeat_interleave(tensor.long()),
    "constant": lambda tensor: torch.tensor([1.0], device="cuda"),
    "upload": lambda tensor: torch.ones(2).cuda(),
}


@pytest.fixture(autouse=True)
def active():
    with host.activate():
        yield


def work(size=2):
    return torch.ones(size, device="cuda") + 1


@contextmanager
def capturing(stream=None, error_mode="thread_local"):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream or torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode=error_mode)
        try:
            yield graph
        except BaseException as error:
            with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureInvalidated"):
                graph.capture_end()
            error.add_note("ended")
            raise
        graph.capture_end()


@contextmanager
def refused(name, error_mode="thread_local"):
    """A capture in which the block breaks a rule. Eager work goes on afterwards, and so does the next capture."""
    with pytest.raises(torch.AcceleratorError, match=name) as caught, capturing(error_mode=error_mode):
        yield
    assert caught.value.__notes__[-1] == "ended"
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    with capturing() as graph:
        out = work()
    graph.replay()
    assert out.tolist() == [2.0, 2.0]


class TestStreams:
    def test_a_stream_joins_by_waiting_and_is_joined_back(self):
        side = torch.cuda.Stream()
        with capturing() as graph:
            origin = torch.cuda.current_stream()
            assert torch.cuda.is_current_stream_capturing()
            side.wait_stream(origin)
            with torch.cuda.stream(side):
                assert torch.cuda.is_current_stream_capturing()
                out = work()
            origin.wait_stream(side)
            result = out * 2
        graph.replay()
        assert result.tolist() == [4.0, 4.0]

    def test_a_stream_joins_through_another(self):
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with capturing():
            origin = torch.cuda.current_stream()
            first.wait_stream(origin)
            second.wait_stream(first)
            with torch.cuda.stream(second):
                work()
            first.wait_stream(second)  # the origin sees the second's work through the first
            origin.wait_stream(first)

    def test_waiting_for_an_event_from_outside(self):
        event = torch.cuda.Stream().record_event()
        with refused("cudaErrorStreamCaptureIsolation"):
            torch.cuda.current_stream().wait_event(event)

    def test_waiting_for_a_stream_outside(self):
        side = torch.cuda.Stream()
        with refused("cudaErrorStreamCaptureIsolation"):
            torch.cuda.current_stream().wait_stream(side)

    def test_waiting_for_an_event_of_an_earlier_capture(self):
        with capturing():
            event = torch.cuda.current_stream().record_event()
        with refused("cudaErrorStreamCaptureIsolation"):
            torch.cuda.current_stream().wait_event(event)

    def test_an_event_that_was_never_recorded_is_no_dependency(self):
        with capturing():
            torch.cuda.current_stream().wait_event(torch.cuda.Event())

    def test_an_event_recorded_again_outside_has_left(self):
        event = torch.cuda.Event()
        with refused("cudaErrorStreamCaptureIsolation"):
            event.record()
            event.record(torch.cuda.Stream())
            torch.cuda.current_stream().wait_event(event)

    def test_the_legacy_stream_cannot_join(self):
        with refused("cudaErrorStreamCaptureImplicit"):
            torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())

    def test_streams_outside_may_wait_for_each_other(self):
        with capturing():
            torch.cuda.default_stream().wait_stream(torch.cuda.Stream())

    def test_work_that_is_left_unjoined(self):
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                work()
            with pytest.raises(torch.AcceleratorError, match="cudaErrorStreamCaptureUnjoined"):
                graph.capture_end()
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            graph.replay()

    def test_a_join_before_the_last_work_does_not_count(self):
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            side.wait_stream(torch.cuda.current_stream())
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.stream(side):
                work()
            with pytest.raises(torch.AcceleratorError, match="cudaErrorStreamCaptureUnjoined"):
                graph.capture_end()


class TestSynchronisation:
    @pytest.mark.parametrize("call", SYNCHRONISING)
    def test_the_host_may_not_wait_for_the_device(self, call):
        tensor = torch.ones(2, device="cuda")
        with refused("cudaErrorStreamCaptureUnsupported"):
            SYNCHRONISING[call](tensor)

    @pytest.mark.parametrize("call", ["synchronize", "query"])
    def test_nor_for_an_event_of_the_capture(self, call):
        with refused("cudaErrorCapturedEvent"):
            getattr(torch.cuda.current_stream().record_event(), call)()

    @pytest.mark.parametrize("call", ["synchronize", "query"])
    def test_nor_for_one_outside_unless_relaxed(self, call):
        event = torch.cuda.current_stream().record_event()
        with refused("cudaErrorStreamCaptureUnsupported"):
            getattr(event, call)()
        with capturing(error_mode="relaxed"):
            getattr(event, call)()

    @pytest.mark.parametrize(("error_mode", "is_refused"), [("global", True), ("thread_local", False)])
    def test_other_threads_may_unless_the_capture_is_global(self, error_mode, is_refused):
        event, errors = torch.cuda.current_stream().record_event(), []

        def elsewhere():
            try:
                event.synchronize()
            except torch.AcceleratorError as error:
                errors.append(error)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode=error_mode)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            if is_refused:
                with pytest.raises(torch.AcceleratorError, match="Invalidated"):
                    graph.capture_end()
            else:
                graph.capture_end()
        assert bool(errors) is is_refused

    def test_tensors_of_the_host_may_be_read(self):
        with capturing():
            assert torch.tensor([3, 4]).sum().item() == 7
            assert torch.zeros(1, device="cpu").tolist() == [0.0]
            assert torch.all(torch.get_rng_state() == torch.get_rng_state()).item()

    def test_one_value_through_a_mask_is_no_synchronisation(self):
        tensor = torch.arange(3.0, device="cuda")
        with capturing() as graph:
            tensor[tensor > 1] = 0.0
        graph.replay()
        assert tensor.tolist() == [0.0, 1.0, 0.0]


class TestOutside:
    def test_an_allocation_on_a_stream_outside(self):
        with refused("cudaErrorStreamCaptureUnsupported"), torch.cuda.stream(torch.cuda.Stream()):
            torch.empty(1, device="cuda")

    def test_an_allocation_outside_is_allowed_when_relaxed(self):
        with capturing(error_mode="relaxed"), torch.cuda.stream(torch.cuda.Stream()):
            torch.empty(1, device="cuda")

    def test_work_outside_runs_at_once_and_never_again(self):
        tensor = torch.zeros(1, device="cuda")
        with capturing() as graph, torch.cuda.stream(torch.cuda.Stream()):
            tensor.add_(1)
        assert tensor.item() == 1
        graph.replay()
        assert tensor.item() == 1


def test_after_a_failure_everything_in_the_capture_fails():
    tensor, side = torch.ones(1, device="cuda"), torch.cuda.Stream()
    with refused("cudaErrorStreamCaptureIsolation"):
        current = torch.cuda.current_stream()
        try:
            current.wait_stream(side)
        finally:
            for call in (lambda: tensor + 1, current.record_event, lambda: current.wait_event(torch.cuda.Event())):
                with pytest.raises(torch.AcceleratorError, match="cudaErrorStreamCaptureInvalidated"):
                    call()


class TestRandomState:
    @pytest.mark.parametrize("call", ["get_state", "seed", "initial_seed"])
    def test_values_are_out_of_reach(self, call):
        generator = torch.cuda.default_generators[0]
        with pytest.raises(RuntimeError, match="during CUDA graph capture"), ended():
            getattr(generator, call)()

    def test_a_state_that_is_not_registered_is_refused(self):
        default = torch.cuda.default_generators[0]
        other = default.clone_state()
        before = default.graphsafe_get_state()
        with ended():
            default.graphsafe_set_state(other)
            with pytest.raises(RuntimeError, match="not in capture mode"):
                torch.rand(1, device="cuda")
        assert default.graphsafe_get_state() is before


@contextmanager
def ended():
    """A capture that is ended, successfully, after an error that is no CUDA error."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


class TestGraphObjects:
    def test_the_legacy_stream_cannot_capture(self):
        with pytest.raises(RuntimeError, match="non-default stream"):
            torch.cuda.CUDAGraph().capture_begin()

    def test_a_capture_ends_where_it_began(self):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="same stream it began on"):
                graph.capture_end()
            graph.capture_end()

    def test_one_capture_at_a_time_and_one_per_object(self):
        with capturing() as graph, pytest.raises(RuntimeError, match="one CUDA graph can be captured at a time"):
            torch.cuda.CUDAGraph().capture_begin()
        with (
            torch.cuda.stream(torch.cuda.Stream()),
            pytest.raises(RuntimeError, match="already owns a captured graph"),
        ):
            graph.capture_begin()

    @pytest.mark.parametrize("call", ["replay", "pool", "instantiate"])
    def test_nothing_before_a_capture_or_after_a_reset(self, call):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match=f"{call} without a preceding"):
            getattr(graph, call)()
        with torch.cuda.graph(graph):
            work()
        getattr(graph, call)()
        graph.reset()
        with pytest.raises(RuntimeError, match=f"{call} without a preceding"):
            getattr(graph, call)()

    def test_pools_have_identities(self, tmp_path):
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        handle = torch.cuda.graph_pool_handle()
        assert handle != torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        with torch.cuda.graph(first, pool=handle, stream=stream):
            assert torch.cuda.current_stream() is stream
            work()
        assert first.pool() == handle
        with torch.cuda.graph(second):
            work()
        assert second.pool() != handle
        second.enable_debug_mode()
        second.debug_dump(str(tmp_path / "graph"))
        assert "aten.add" in (tmp_path / "graph").read_text()
