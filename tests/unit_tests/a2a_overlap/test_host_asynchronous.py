"""Asynchronous collectives and transfers run on streams of their groups': captures and race checks miss a wait.

NCCL runs them so, and `Work.wait` joins that stream to the one that is current. gloo does not, so that a missing wait
does no harm here and only these checks can see it.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import combined_1f1b.host as host


@pytest.fixture(autouse=True)
def on_host(device):
    if not host.is_active():
        pytest.skip("the host device stands in for CUDA, which is there")


class Transport:
    """Asynchronous operations that every rank takes part in; what nobody has waited for is waited for at the end."""

    def __init__(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self._peer = (rank + 1) % size
        self.summed, self.sent, self.received = (torch.full((3,), float(rank), device="cuda") for _ in range(3))
        self._works = []

    def reduce(self):
        return self._keep(dist.all_reduce(self.summed, async_op=True))

    def exchange(self):
        return self._keep(dist.isend(self.sent, self._peer)), self._keep(dist.irecv(self.received, self._peer))

    def finish(self):
        for work in list(self._works):
            self.wait(work)

    def wait(self, work):
        self._works.remove(work)  # gloo waits for ever where a transfer is waited for twice
        work.wait()

    def _keep(self, work):
        self._works.append(work)
        return work


@pytest.fixture
def transport():
    made = Transport()
    yield made
    made.finish()


@contextmanager
def capture_that(error=None, match=""):
    """A capture that ends well, or whose end (or block) raises the error."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            yield
        except BaseException:
            with pytest.raises(torch.AcceleratorError, match="Invalidated"):
                graph.capture_end()
            raise
        if error is None:
            graph.capture_end()
        else:
            with pytest.raises(torch.AcceleratorError, match=f"(?s){error}.*{match}"):
                graph.capture_end()


UNJOINED = "cudaErrorStreamCaptureUnjoined"
ALL_REDUCE = r"c10d\.allreduce_ on the collectives' stream of group \S+: no Work\.wait"
SEND = r"c10d\.send on the stream of group \S+ for transfers with its rank \d: no Work\.wait"


@pytest.mark.world_size(1, 2)
class TestCaptures:
    def test_a_collective_that_nobody_waits_for(self, transport):
        with capture_that(UNJOINED, ALL_REDUCE):
            transport.reduce()

    def test_a_collective_that_is_waited_for(self, transport):
        with capture_that():
            transport.wait(transport.reduce())

    def test_a_synchronous_one_needs_no_wait(self, transport):
        with capture_that():
            dist.all_reduce(transport.summed)

    @pytest.mark.parametrize("is_joined", [True, False])
    def test_a_wait_on_another_stream_counts_if_that_is_joined(self, transport, is_joined):
        side = torch.cuda.Stream()
        with capture_that() if is_joined else capture_that(UNJOINED, ALL_REDUCE):
            work, origin = transport.reduce(), torch.cuda.current_stream()
            with torch.cuda.stream(side):
                transport.wait(work)  # which lets the side stream join the capture
                assert torch.cuda.is_current_stream_capturing()
            if is_joined:
                origin.wait_stream(side)

    def test_a_stream_that_was_joined_before_the_wait(self, transport):
        side = torch.cuda.Stream()
        with capture_that(UNJOINED, ALL_REDUCE):
            work, origin = transport.reduce(), torch.cuda.current_stream()
            side.wait_stream(origin)
            origin.wait_stream(side)
            with torch.cuda.stream(side):
                transport.wait(work)

    def test_the_next_collective_of_the_group_comes_after_it(self, transport):
        with capture_that():
            transport.reduce()
            transport.wait(transport.reduce())

    def test_a_collective_that_began_before_the_capture(self, transport):
        work = transport.reduce()
        with pytest.raises(torch.AcceleratorError, match="cudaErrorStreamCaptureIsolation"), capture_that():
            transport.wait(work)

    def test_the_legacy_stream_cannot_wait(self, transport):
        default = torch.cuda.stream(torch.cuda.default_stream())
        with pytest.raises(torch.AcceleratorError, match="cudaErrorStreamCaptureImplicit"), capture_that():
            self.wait_in(default, transport, transport.reduce())

    def wait_in(self, context, transport, work):
        with context:
            transport.wait(work)

    def test_memory_of_the_host_is_no_work_of_the_graph(self, transport):
        with capture_that():
            transport.summed = torch.ones(3)
            transport.wait(transport.reduce())
            transport.reduce()

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("waits", [True, False])
    def test_transfers(self, transport, waits):
        with capture_that() if waits else capture_that(UNJOINED, SEND + r".*c10d\.recv_"):
            for work in transport.exchange():
                if waits:
                    transport.wait(work)

    @pytest.mark.world_size(2)
    def test_a_collective_says_nothing_of_transfers(self, transport):
        with capture_that(UNJOINED, SEND):
            transport.exchange()
            transport.wait(transport.reduce())


@contextmanager
def race_if(expected, match):
    if expected:
        with pytest.raises(host.RaceError, match=match):
            yield
    else:
        yield


@pytest.mark.world_size(2)
@pytest.mark.parametrize("waits", ["here", "elsewhere", "for something else", "not at all"])
class TestRaces:
    def wait(self, waits, transport, work):
        if waits == "here":
            transport.wait(work)
        elif waits == "elsewhere":
            with torch.cuda.stream(torch.cuda.Stream()):
                transport.wait(work)
        elif waits == "for something else":
            transport.wait(transport.reduce())

    def test_what_is_sent_may_not_be_written(self, waits, transport):
        with host.checking_races():
            send, _ = transport.exchange()
            self.wait(waits, transport, send)
            with race_if(
                waits != "here", r"written by aten.zero_ .*read by c10d.send on the stream of group .* rank \d"
            ):
                transport.sent.zero_()

    def test_what_is_received_may_not_be_read(self, waits, transport):
        with host.checking_races():
            _, receive = transport.exchange()
            self.wait(waits, transport, receive)
            with race_if(
                waits != "here", r"read by aten.sum .*written by c10d.recv_ on the stream of group .* rank \d"
            ):
                transport.received.sum()
