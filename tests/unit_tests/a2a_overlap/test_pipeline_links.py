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
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from parity_testing import forward_step
from pipeline_testing import Stages, run_pipeline, set_flags
from torch.multiprocessing.reductions import StorageWeakRef

import combined_1f1b
from combined_1f1b.errors import ConfigError, OverlapError
from combined_1f1b.schedule import iteration as schedule_iteration
from combined_1f1b.schedule.executor import Handler, Issue
from combined_1f1b.schedule.iteration import Iteration
from combined_1f1b.schedule.links import PipelineLinks
from combined_1f1b.schedule.node import Node
from combined_1f1b.schedule.ops import Kind, Lane
from combined_1f1b.schedule.pipeline_order import warmup_forwards
from combined_1f1b.schedule.shape import PlanShape


@pytest.fixture(autouse=True)
def on_device(device):
    return device


@contextmanager
def prepared(
    *, pp: int = 2, vpp: int = 1, pair: bool = False, sizes: Mapping[str, int] | None = None, **changes: Any
) -> Iterator[list[Any]]:
    all_sizes = {"pipeline_model_parallel_size": pp, **(sizes or {})}
    if vpp > 1:
        all_sizes["virtual_pipeline_model_parallel_size"] = vpp
    options = combined_1f1b.OverlapOptions(pair_head_and_tail=pair)
    with combined_1f1b.install(options), parallel(**all_sizes):
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
        with pytest.raises(OverlapError, match="only gloo tells transfers apart; start the processes again"):
            bits(chunks, num_microbatches=4)


@pytest.mark.world_size(2)
def test_with_chunks_a_retry_is_refused_since_the_transfers_are_megatrons(monkeypatch):
    """A failure between two slots ends our iteration all the same. In groups of their own: what is on its way stays."""
    with prepared(vpp=2, sizes={"context_parallel_size": 1}) as chunks:
        aborted: list[Iteration] = []
        abort = Iteration.abort
        monkeypatch.setattr(Iteration, "abort", lambda own, error: (aborted.append(own), abort(own, error)))
        with monkeypatch.context() as patch:
            is_first = torch.distributed.get_rank() == 0  # and waits for no transfer of the other stage's here
            send = P2PCommunicator.send_forward_recv_forward if is_first else nothing
            patch.setattr(P2PCommunicator, "send_forward_recv_forward", lambda *a, **o: raising(send(*a, **o)))
            with pytest.raises(OSError, match="luck") as caught:
                bits(chunks, num_microbatches=4)
        assert any("in Megatron's transfers after" in note for note in caught.value.__notes__)
        assert aborted[0].is_aborted
        with pytest.raises(OverlapError, match="what Megatron had on its way"):
            bits(chunks, num_microbatches=4)


def nothing(*_arguments: Any, **_options: Any) -> None:
    pass


def raising(*_arguments: Any, **_options: Any) -> None:
    raise OSError("out of luck")


@pytest.mark.world_size(2)
def test_a_failure_of_the_last_transfers_ends_the_iteration_too(monkeypatch):
    with prepared() as chunks:
        reference = bits(chunks, num_microbatches=4)
        with monkeypatch.context() as patch:
            patch.setattr(PipelineLinks, "finish", raising)
            with pytest.raises(OSError, match="luck") as caught:
                bits(chunks, num_microbatches=4)
        assert any("num_microbatches=4" in note for note in caught.value.__notes__), "the iteration was not aborted"
        for chunk in chunks:
            chunk.zero_grad()
        assert differing(reference, bits(chunks, num_microbatches=4)) == set()


@pytest.mark.world_size(2)
def test_ranks_count_iterations_alike_when_one_fails_before_its_first_op(monkeypatch):
    """If not, transfers of a retry would have different tags, and wait for each other."""
    with prepared() as chunks:
        reference = bits(chunks, num_microbatches=4)
        if torch.distributed.get_rank() == 0:
            hook = chunks[0].module.decoder.layers[0].register_forward_hook(lambda *_: None)
            with pytest.raises(ConfigError, match="hook"):
                bits(chunks, num_microbatches=4)
            hook.remove()
        else:
            with failing_after("RECV_F0", monkeypatch), pytest.raises(OSError, match="luck"):
                bits(chunks, num_microbatches=4)
        for chunk in chunks:
            chunk.zero_grad()
        assert differing(reference, bits(chunks, num_microbatches=4)) == set()


@pytest.mark.world_size(2)
def test_what_the_next_stage_does_not_expect_is_not_sent(monkeypatch):
    def shorter(data: Any, model: Any) -> Any:
        def cut(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: value[..., :4, :4] if value.dim() > 2 else value[:, :4] for name, value in batch.items()}

        return forward_step(data, model, change_batch=cut)

    with prepared() as chunks:
        if torch.distributed.get_rank() == 0:
            with pytest.raises(ConfigError, match=r"seq_length.*micro-batch 0 is \(4, 2, 16"):
                bits(chunks, num_microbatches=4, step=shorter)
        else:
            with failing_after("RECV_F0", monkeypatch), pytest.raises(OSError, match="luck"):
                bits(chunks, num_microbatches=4)


@pytest.mark.world_size(2)
def test_a_capture_receives_into_memory_of_its_own(monkeypatch):
    """The graph would write into memory that a failed iteration has given back."""
    with prepared() as chunks:
        bits(chunks, num_microbatches=4)
        (links,) = combined_1f1b.registration._current()._links.values()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert sum(len(link._free) for link in links._links.values()) > 0
        links.begin()
        assert sum(len(link._free) for link in links._links.values()) == 0


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
