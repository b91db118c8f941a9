"""Links between stages: nobody waits for ever, nothing stays behind, and a failed iteration's transfers stay apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_models import differing, parallel, seed
from parity_testing import forward_step
from pipeline_testing import Stages, run_pipeline, set_flags

import combined_1f1b
from combined_1f1b.errors import OverlapError
from combined_1f1b.schedule import iteration as schedule_iteration
from combined_1f1b.schedule.executor import Handler, Issue
from combined_1f1b.schedule.ops import Kind


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


@pytest.mark.world_size(2)
def test_without_tags_a_retry_is_refused(monkeypatch):
    with prepared() as chunks:
        with failing_after(FAILURES["a gradient sent and not received"][torch.distributed.get_rank()], monkeypatch):
            monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: "nccl")
            with pytest.raises(OSError, match="luck"):
                bits(chunks, num_microbatches=4)
        with pytest.raises(OverlapError, match="NCCL has no tags; start the processes again"):
            bits(chunks, num_microbatches=4)
