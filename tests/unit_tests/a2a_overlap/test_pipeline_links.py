"""Links between stages: nobody waits for ever, nothing stays behind, and a failed iteration's transfers stay apart."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_models import differing, loss_of, parallel, seed
from parity_testing import forward_step
from pipeline_testing import Stages, run_pipeline, set_flags
from torch.multiprocessing.reductions import StorageWeakRef

import combined_1f1b
from combined_1f1b.errors import OverlapError
from combined_1f1b.schedule import iteration as schedule_iteration
from combined_1f1b.schedule.executor import Handler, Issue
from combined_1f1b.schedule.node import Node
from combined_1f1b.schedule.ops import Kind, Lane
from combined_1f1b.schedule.pipeline_order import warmup_forwards
from combined_1f1b.schedule.shape import PlanShape


@pytest.fixture(autouse=True)
def on_device(device):
    return device


@contextmanager
def prepared(*, pp: int = 2, vpp: int = 1, pair: bool = False, **changes: Any) -> Iterator[list[Any]]:
    virtual = {"virtual_pipeline_model_parallel_size": vpp} if vpp > 1 else {}
    options = combined_1f1b.OverlapOptions(pair_head_and_tail=pair)
    with combined_1f1b.install(options), parallel(pipeline_model_parallel_size=pp, **virtual):
        chunks: list[Any] = Stages(pp=pp, vpp=vpp, changes=changes).build()
        set_flags(chunks, True)
        yield chunks


DELAYED = {"delay_wgrad_compute": True, "overlap_moe_expert_parallel_comm": True}


def bits(chunks: list[Any], *, num_microbatches: int, step: Callable[..., Any] = forward_step) -> dict[str, Any]:
    """Losses and gradients of one iteration, taken off the model."""
    seed(3)
    reports = run_pipeline(chunks, num_microbatches=num_microbatches, step=step)
    found = {f"loss {index}": report["loss"] for index, report in enumerate(reports)}
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            found[f"{number}.{name}"], parameter.grad = parameter.grad, None
    return found


@pytest.mark.world_size(4)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 7, 9])
def test_it_ends_with_the_same_bits_where_each_transfer_waits_for_its_other_end(num_microbatches, pair, monkeypatch):
    """As with large tensors under NCCL: neither a send nor a receive returns before the peer has come to it."""
    with prepared(pp=4, pair=pair) as chunks:
        reference = bits(chunks, num_microbatches=num_microbatches)
        started: list[str] = []
        for name in ("isend", "irecv"):
            start = getattr(torch.distributed, name)

            def blocking(*words: Any, name: str = name, start: Any = start, **options: Any) -> Any:
                started.append(name)
                start(*words, **options).wait()
                return SimpleNamespace(wait=lambda: None)  # gloo would wait for another transfer

            monkeypatch.setattr(torch.distributed, name, blocking)
        assert differing(reference, bits(chunks, num_microbatches=num_microbatches)) == set()
        shape = combined_1f1b.last_step().plan.shape
        assert len(started) == num_microbatches * (4 if 0 < shape.rank < 3 else 2)


@contextmanager
def failing_after(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The op of this name raises when it has been issued."""
    original = schedule_iteration.with_ranges

    def wrap(handler: Handler) -> Handler:
        def call(issue: Issue) -> Any:
            held = handler(issue)
            if issue.op.name == name:
                raise OSError("out of luck")
            return held

        return call

    def failing(handlers: Mapping[Kind, Handler]) -> Mapping[Kind, Handler]:
        return {kind: wrap(handler) for kind, handler in original(handlers).items()}

    with monkeypatch.context() as patch:
        patch.setattr(schedule_iteration, "with_ranges", failing)
        yield


def other_data(data: Any, model: Any) -> Any:
    """Like forward_step, for other tokens."""
    return forward_step(data, model, change_batch=lambda batch: {**batch, "input_ids": batch["input_ids"].roll(1, 1)})


FAILURES: dict[str, tuple[str, str]] = {
    "activations sent and not received": ("SEND_F2", "F0.L1.attention"),
    "an activation received and not sent": ("F1.L0.experts", "RECV_F1"),
    "a gradient sent and not received": ("SEND_F2", "SEND_B0"),
    "a gradient received and not sent": ("BEGIN_BACKWARD.0", "RECV_F2"),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("names", FAILURES.values(), ids=FAILURES)
def test_a_retry_sees_nothing_of_what_a_failed_iteration_had_on_its_way(names, monkeypatch):
    with prepared() as chunks:
        reference = bits(chunks, num_microbatches=4)
        for _ in range(2):
            with failing_after(names[torch.distributed.get_rank()], monkeypatch), pytest.raises(OSError, match="luck"):
                bits(chunks, num_microbatches=4, step=other_data)
            for chunk in chunks:
                chunk.zero_grad()
        assert differing(reference, bits(chunks, num_microbatches=4)) == set()
        with failing_after(names[torch.distributed.get_rank()], monkeypatch), pytest.raises(OSError, match="luck"):
            bits(chunks, num_microbatches=4, step=other_data)
    with prepared() as chunks:  # what was on its way is still held: without that, the next collective would time out
        assert differing(reference, bits(chunks, num_microbatches=4)) == set()


@pytest.mark.world_size(2)
def test_without_tags_a_retry_is_refused(monkeypatch):
    with prepared() as chunks:
        with failing_after(FAILURES["a gradient sent and not received"][torch.distributed.get_rank()], monkeypatch):
            monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: "nccl")
            with pytest.raises(OSError, match="luck"):
                bits(chunks, num_microbatches=4)
        with pytest.raises(OverlapError, match="NCCL has no tags; start the processes again"):
            bits(chunks, num_microbatches=4)


class Seen:
    """Storages of what an iteration makes and receives: batches, losses, and all that enters or leaves a node."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._found: list[StorageWeakRef] = []
        forward = Node.forward

        def remembering(node: Node, inputs: Any) -> Any:
            outputs = forward(node, inputs)
            self.add(*inputs, *outputs)
            return outputs

        patch.setattr(Node, "forward", remembering)

    def add(self, *tensors: Any) -> None:
        self._found += [StorageWeakRef(t.untyped_storage()) for t in tensors if isinstance(t, torch.Tensor)]

    def step(self, data: Any, model: Any) -> Any:
        """A forward step, seen."""

        def loss(output: torch.Tensor) -> Any:
            result = loss_of(output)
            self.add(output, result[0])
            return result

        def batch(arguments: dict[str, Any]) -> dict[str, Any]:
            self.add(*arguments.values())
            return arguments

        return forward_step(data, model, loss=loss, change_batch=batch)

    def alive(self) -> int:
        """How many live; those of earlier iterations are looked at no more."""
        gc.collect()
        alive = {reference.cdata for reference in self._found if not reference.expired()}
        self._found.clear()
        return len(alive)


def receive_buffers(shape: PlanShape) -> dict[Lane, int]:
    """Buffers of each link.

    During a pair its forward, its backward's micro-batch, those in between, and the next forward's are there: that is
    the warm-up and two more. Of gradients one is there; two where the next one comes before the last reader of the one
    before has been issued, which delayed weight gradients of a first layer and two backwards of a pair are.
    """
    (chunk,) = shape.chunks
    count = shape.num_microbatches
    gradients = 2 if shape.pair_head_and_tail or (shape.delay_wgrad and chunk.receives) else 1
    return {
        Lane.PREVIOUS: min(count, warmup_forwards(shape) + 2) if chunk.receives else 0,
        Lane.NEXT: min(count, gradients) if chunk.sends else 0,
    }


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("num_microbatches", [1, 3, 9])
@pytest.mark.parametrize("case", [{}, {"pair": True}, DELAYED], ids=["plain", "paired", "delayed weight gradients"])
def test_nothing_of_an_iteration_outlives_it_but_the_buffers_of_the_links(case, num_microbatches, monkeypatch):
    seen = Seen(monkeypatch)
    with prepared(pp=torch.distributed.get_world_size(), **case) as chunks:
        for _ in range(2):
            run_pipeline(chunks, num_microbatches=num_microbatches, step=seen.step)
            buffers = receive_buffers(combined_1f1b.last_step().plan.shape)
            assert seen.alive() == buffers[Lane.PREVIOUS], "gradients enter no node's forward"
            (links,) = combined_1f1b.registration._current()._links.values()
            assert {lane: len(link._free) for lane, link in links._links.items()} == buffers


@pytest.mark.world_size(2)
def test_with_chunks_nothing_of_an_iteration_outlives_it_but_each_chunks_last_input(monkeypatch):
    """That one is what Megatron's model keeps as its `input_tensor`."""
    seen = Seen(monkeypatch)
    with prepared(vpp=2) as chunks:
        for _ in range(2):
            run_pipeline(chunks, num_microbatches=4, step=seen.step)
            assert seen.alive() == sum(chunk.receives for chunk in combined_1f1b.last_step().plan.shape.chunks)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("names", FAILURES.values(), ids=FAILURES)
def test_nothing_outlives_a_failure_but_the_models_last_input(names, monkeypatch):
    """What is on its way is held, but has entered no node."""
    seen = Seen(monkeypatch)
    rank = torch.distributed.get_rank()
    with prepared() as chunks:
        for _ in range(2):
            with failing_after(names[rank], monkeypatch), pytest.raises(OSError, match="luck"):
                run_pipeline(chunks, num_microbatches=4, step=seen.step)
            assert seen.alive() == (rank > 0)
