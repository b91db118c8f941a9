"""The schedules over pipeline stages have no race between streams, and would have one without a link's waits."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from host_models import parallel
from pipeline_testing import Stages, run_pipeline, set_flags

import combined_1f1b
import combined_1f1b.host as host
from combined_1f1b.schedule import executor
from combined_1f1b.schedule.executor import Issue
from combined_1f1b.schedule.links import PipelineLinks
from combined_1f1b.schedule.plan import Plan
from combined_1f1b.schedule.streams import Lanes
from combined_1f1b.schedule.transfers import SEND_KINDS

# Dropless dispatch synchronises the host in every forward, which orders more than the plan does.
NO_HOST_SYNC = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
CASES: dict[str, dict[str, Any]] = {
    "pipelining": {},
    "pipelining, dropless": {"moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False},
    "pipelining, dense last": {"num_layers": 4, "moe_layer_freq": [1, 1, 1, 0]},
    "pipelining, paired": {"pair": True},
    "pipelining, delayed weight gradients": {"delay_wgrad_compute": True, "overlap_moe_expert_parallel_comm": True},
    "interleaved": {"vpp": 2},
    "interleaved, delayed weight gradients": {
        "vpp": 2, "delay_wgrad_compute": True, "overlap_moe_expert_parallel_comm": True,
    },
}  # fmt: skip
STEPS = 2
"""Iterations under the checker: the second one reuses the first one's buffers."""


@pytest.fixture(autouse=True)
def on_host(device):
    if not host.is_active():
        pytest.skip("the host device stands in for CUDA, which is there")


@contextmanager
def prepared(*, vpp: int = 1, pair: bool = False, **changes: Any) -> Iterator[Callable[[], None]]:
    """Two stages of a small model: yields a function that runs training steps."""
    virtual = {"virtual_pipeline_model_parallel_size": vpp} if vpp > 1 else {}
    options = combined_1f1b.OverlapOptions(pair_head_and_tail=pair)
    with combined_1f1b.install(options), parallel(pipeline_model_parallel_size=2, **virtual):
        chunks = Stages(pp=2, vpp=vpp, changes={**NO_HOST_SYNC, **changes}).build()
        set_flags(chunks, True)
        optimizer = torch.optim.SGD([parameter for chunk in chunks for parameter in chunk.parameters()], lr=0.1)

        def steps() -> None:
            for _ in range(STEPS):
                run_pipeline(chunks, num_microbatches=4)
                optimizer.step()
                optimizer.zero_grad()

        yield steps


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_models(case):
    with prepared(**case) as steps, host.checking_races() as checker:
        steps()
    assert len(checker.streams) >= 3, checker.streams


class Quiet:
    """A transfer whose end the checker does not hear of."""

    def __init__(self, work: torch.distributed.Work, wait: Callable[[torch.distributed.Work], Any]) -> None:
        self._work = work
        self._wait = wait

    def wait(self) -> None:
        self._wait(self._work)


def without_wait(name: str, *, function: str, link_waits: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """Leave out a `wait_stream` or `wait_event` of one of a link's functions: that of its own stream, or another's."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = getattr(host.HostStream, name)

        def wait(stream: host.HostStream, other: Any) -> None:
            frame = sys._getframe(1)
            is_link = frame.f_globals["__name__"] == PipelineLinks.__module__ and frame.f_code.co_name == function
            if not is_link or (frame.f_locals["self"].stream is stream) != link_waits:
                original(stream, other)

        patch.setattr(host.HostStream, name, wait)

    return mutate


def with_quiet(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Nobody waits on the device for what `isend` or `irecv` has started; the host does, so that all ends well."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        start, wait = getattr(torch.distributed, name), torch.distributed.Work.wait
        patch.setattr(torch.distributed, name, lambda *words, **options: Quiet(start(*words, **options), wait))

    return mutate


def released_at_once(patch: pytest.MonkeyPatch) -> None:
    """A receive buffer is free for the next tensor as soon as its tensor has been handed out."""
    take, release = PipelineLinks.take, PipelineLinks.release

    def take_and_release(links: PipelineLinks, lane: Any, microbatch: int) -> torch.Tensor:
        tensor = take(links, lane, microbatch)
        release(links, microbatch)
        return tensor

    patch.setattr(PipelineLinks, "take", take_and_release)


def not_joined(patch: pytest.MonkeyPatch) -> None:
    """The caller's stream, on which Megatron sends, neither waits in the plan's SEND nor for all lanes at the end."""
    compiled = executor.compile_plan

    def without_waits(plan: Plan) -> tuple[Issue, ...]:
        return tuple(issue._replace(waits=()) if issue.op.kind in SEND_KINDS else issue for issue in compiled(plan))

    patch.setattr(executor, "compile_plan", without_waits)
    patch.setattr(Lanes, "join", lambda lanes: None)


READ = r"read by .* in [FB]\d.*written by c10d.recv_ "
SENT = r"written by aten.copy_ .*in SEND_.*read by c10d.send"
RECEIVED = r"written by c10d.recv_ .*in RECV_.*read by .* in [FBW]\d"
MUTATIONS: dict[str, tuple[int, Callable[[pytest.MonkeyPatch], None], str]] = {
    "the link waits for the copy": (
        1, without_wait("wait_stream", function="send", link_waits=True),
        r"read by c10d.send .* in SEND_.*written by aten.copy_ .* in SEND_",
    ),
    "a copy waits until its buffer has been sent": (
        1, without_wait("wait_stream", function="send", link_waits=False), SENT,
    ),
    "the link waits until the buffer has been sent": (1, with_quiet("isend"), SENT),
    "what reads a tensor waits for it": (1, with_quiet("irecv"), READ),
    "a transfer waits for its buffer's last reader": (
        1, without_wait("wait_event", function="receive", link_waits=True), RECEIVED,
    ),
    "a buffer is free only after its last reader": (1, released_at_once, RECEIVED),
    "with chunks, what reads a tensor waits for it": (2, with_quiet("irecv"), READ),
    "with chunks, Megatron sends what the lanes have made": (
        2, not_joined, r"read by c10d.send .*written by .* in [FB]\d",
    ),
}  # fmt: skip


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("vpp", "mutate", "pattern"), MUTATIONS.values(), ids=MUTATIONS)
def test_every_wait_is_needed(vpp, mutate, pattern, monkeypatch):
    """A rank that ended with a report would leave the other one waiting: reports are kept, and both ranks go on."""
    reports: list[str] = []

    def keep(checker: host.RaceChecker, message: str) -> None:
        checker._has_reported = True
        reports.append(message)

    monkeypatch.setattr(host.RaceChecker, "_report", keep)
    mutate(monkeypatch)
    with prepared(vpp=vpp) as steps, host.checking_races():
        steps()
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, reports)
    found = [report for own in everyone for report in own]
    assert found
    assert all(re.search(pattern, report) for report in found), found
