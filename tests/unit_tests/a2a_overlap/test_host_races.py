"""Race checking on the host device: what is reported, what is not, and what a report says."""

from __future__ import annotations

import gc
import re
import time

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import combined_1f1b.host as host

pytestmark = pytest.mark.world_size(1)


@pytest.fixture(autouse=True)
def on_host(device):
    if not host.is_active():
        pytest.skip("the host device stands in for CUDA, which is there")


class Streams:
    """The current stream and a side stream, with a tensor that the current stream has written."""

    def __init__(self) -> None:
        self.current, self.side = torch.cuda.current_stream(), torch.cuda.Stream()
        self.tensor = torch.zeros(4, 3, device="cuda")

    def on_side(self):
        return torch.cuda.stream(self.side)


def test_a_read_that_no_event_orders_after_the_write_is_reported():
    with host.checking_races():
        streams = Streams()
        streams.tensor.add_(1)
        with streams.on_side(), pytest.raises(host.RaceError) as report:
            streams.tensor.mul(2)
    here = rf"\({re.escape(__file__)}:\d+\)"
    assert re.fullmatch(
        rf"a tensor of shape \[4, 3\] and torch.float32 is read by aten.mul on {re.escape(repr(streams.side))} {here}, "
        rf"and was written by aten.add_ on {re.escape(repr(streams.current))} {here}: "
        "no event orders the second after the first",
        str(report.value),
    )


def access(streams: Streams, kinds: str) -> None:
    """One access on the current stream, then one on the side stream: r(ead) or w(rite)."""
    for kind, stream in zip(kinds, (streams.current, streams.side), strict=True):
        with torch.cuda.stream(stream):
            streams.tensor.sum() if kind == "r" else streams.tensor.zero_()


@pytest.mark.parametrize("kinds", ["rw", "wr", "ww"])
def test_kinds_of_accesses(kinds):
    with host.checking_races():
        streams = Streams()
        streams.side.wait_stream(streams.current)
        with pytest.raises(host.RaceError):
            access(streams, kinds)


def test_two_reads_are_no_race():
    with host.checking_races() as checker:
        streams = Streams()
        streams.side.wait_stream(streams.current)
        access(streams, "rr")
    assert checker.operations == 3
    assert checker.streams == {streams.current, streams.side}


WAITS = {
    "stream": lambda streams: streams.side.wait_stream(streams.current),
    "event": lambda streams: streams.current.record_event().wait(streams.side),
    "through a third stream": lambda streams: third_stream(streams),
    "stream synchronised": lambda streams: streams.current.synchronize(),
    "event synchronised": lambda streams: streams.current.record_event().synchronize(),
    "device synchronised": lambda streams: torch.cuda.synchronize(),
    "value read": lambda streams: streams.tensor.sum().item(),
    "values read": lambda streams: streams.tensor.tolist(),
    "shape read": lambda streams: streams.tensor.nonzero(),
}


def third_stream(streams: Streams) -> None:
    third = torch.cuda.Stream()
    third.wait_stream(streams.current)
    streams.side.wait_stream(third)


@pytest.mark.parametrize("name", WAITS)
def test_waits(name):
    with host.checking_races():
        streams = Streams()
        streams.tensor.add_(1)
        WAITS[name](streams)
        with streams.on_side():
            streams.tensor.add_(1)


NO_WAITS = {
    "the other direction": lambda streams: streams.current.wait_stream(streams.side),
    "an event that was recorded before": lambda streams: streams.side.wait_event(streams.before),
    "a value of the host": lambda streams: torch.ones(2).sum().item(),
}


@pytest.mark.parametrize("name", NO_WAITS)
def test_what_is_no_wait(name):
    with host.checking_races():
        streams = Streams()
        streams.before = streams.current.record_event()
        streams.tensor.add_(1)
        NO_WAITS[name](streams)
        with streams.on_side(), pytest.raises(host.RaceError):
            streams.tensor.add_(1)


def test_views_share_memory_and_other_bytes_do_not():
    with host.checking_races():
        streams = Streams()
        streams.side.wait_stream(streams.current)
        streams.tensor[:2].add_(1)
        with streams.on_side():
            streams.tensor[2:].add_(1)
            streams.tensor.view(12)[6:].sum()
            with pytest.raises(host.RaceError, match=r"shape \[7\]"):
                streams.tensor.view(12)[5:].sum()


def test_what_a_dead_tensors_memory_may_be_given_to():
    with host.checking_races():
        streams = Streams()
        streams.side.wait_stream(streams.current)
        with streams.on_side():
            total = streams.tensor.sum()
        del streams.tensor
        with streams.on_side():
            total + 1  # another stream's allocations do not get it
        with pytest.raises(host.RaceError, match=r"memory of a tensor of shape \[4, 3\].*aten.empty.*read by aten.sum"):
            torch.empty(5, device="cuda")


KEEPING = {
    "waited": lambda streams: streams.current.wait_stream(streams.side),
    "recorded": lambda streams: streams.tensor.record_stream(streams.side),
    "held": lambda streams: vars(streams).update(held=streams.tensor.view(12)),
}


@pytest.mark.parametrize("name", KEEPING)
def test_what_keeps_memory_from_being_reused_too_early(name):
    with host.checking_races():
        streams = Streams()
        streams.side.wait_stream(streams.current)
        with streams.on_side():
            streams.tensor.sum()
        KEEPING[name](streams)
        del streams.tensor
        torch.empty(5, device="cuda")


def test_memory_belongs_to_the_stream_that_allocated_it():
    """A buffer that another stream fills has to wait for the allocating stream, whose memory it was."""
    with host.checking_races():
        streams = Streams()
        with streams.on_side():
            buffer = torch.empty(3, device="cuda")
        with pytest.raises(host.RaceError, match=r"written by aten.copy_.*was written by aten.empty"):
            buffer.copy_(streams.tensor[0])


def test_a_resized_storage_frees_and_allocates():
    weights = torch.zeros(6, device="cuda")
    with host.checking_races():
        streams = Streams()
        with streams.on_side():
            weights.untyped_storage().resize_(0)
            weights.untyped_storage().resize_(24)
            weights.zero_()
        streams.current.wait_stream(streams.side)
        weights.sum()
        with streams.on_side():
            weights.untyped_storage().resize_(0)
            with pytest.raises(host.RaceError, match=r"\[6\].*dead.*resize_.*read by aten.sum"):
                weights.untyped_storage().resize_(24)


def test_tensors_of_the_host_are_in_no_race_until_they_are_moved():
    with host.checking_races():
        streams = Streams()
        on_host = torch.ones(3)
        with streams.on_side():
            on_host.add_(1)
        moved = on_host.cuda()
        with streams.on_side(), pytest.raises(host.RaceError, match=r"read by aten.mul.*written by Tensor.cuda"):
            moved * 2


@pytest.mark.world_size(1, 2)
def test_collectives():
    for asynchronous, waiting in ((False, False), (True, True)):
        with host.checking_races():
            tensor = torch.ones(3, device="cuda")
            work = torch.distributed.all_reduce(tensor, async_op=asynchronous)
            if waiting:
                work.wait()
            tensor.add_(1)
    with host.checking_races():
        tensor = torch.ones(3, device="cuda")
        work = torch.distributed.all_reduce(tensor, async_op=True)
        with pytest.raises(host.RaceError, match=r"aten.add_.*written by c10d.allreduce_ on the collectives' stream"):
            tensor.add_(1)
        work.wait()


@pytest.mark.world_size(1, 2)
def test_an_unfinished_collective_keeps_its_tensors():
    size = torch.distributed.get_world_size()
    with host.checking_races():
        gathered = torch.empty(3 * size, device="cuda")
        work = torch.distributed.all_gather_into_tensor(gathered, torch.ones(3, device="cuda"), async_op=True)
        torch.empty(5, device="cuda")
        work.wait()
        torch.empty(5, device="cuda")


@pytest.mark.world_size(1, 2)
def test_a_collective_that_is_waited_for_on_another_stream_only():
    size = torch.distributed.get_world_size()
    with host.checking_races():
        gathered = torch.empty(3 * size, device="cuda")
        side = torch.cuda.Stream()
        gather_from = torch.ones(3, device="cuda")
        work = torch.distributed.all_gather_into_tensor(gathered, gather_from, async_op=True)
        with torch.cuda.stream(side):
            work.wait()
            gathered.sum()
        storage = StorageWeakRef(gather_from.untyped_storage())
        del work, gather_from
        while not storage.expired():  # gloo's threads let go of it a little later
            time.sleep(0.001)
        with pytest.raises(host.RaceError, match=r"memory of a tensor of shape \[3\].*read by c10d._allgather_base_"):
            torch.empty(5, device="cuda")


def test_the_backward_of_a_function_is_seen():
    with host.checking_races():
        streams = Streams()
        weight = streams.tensor.requires_grad_()
        streams.side.wait_stream(streams.current)
        loss = weight.exp().sum()  # its backward reads the exponentials
        with streams.on_side(), pytest.raises(host.RaceError, match=r"read by aten.mul .*written by aten.exp "):
            loss.backward()


def test_after_a_report_nothing_is_checked_and_everything_is_restored():
    before = {name: vars(torch.Tensor).get(name) for name in ("tolist", "to", "cuda")}
    with host.checking_races():
        streams = Streams()
        with streams.on_side():
            with pytest.raises(host.RaceError):
                streams.tensor.add_(1)
            streams.tensor.add_(1)
    assert before == {name: vars(torch.Tensor).get(name) for name in before}
    with streams.on_side():
        streams.tensor.add_(1)


def test_the_checker_leaves_no_reference_behind():
    with host.checking_races():
        storages = [torch.zeros(3, device="cuda").untyped_storage()._weak_ref() for _ in range(2)]
        gc.collect()
        assert all(torch.UntypedStorage._new_with_weak_ptr(reference) is None for reference in storages)


def test_it_needs_the_host_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    with pytest.raises(RuntimeError, match="the host device is not active"), host.checking_races():
        pass
