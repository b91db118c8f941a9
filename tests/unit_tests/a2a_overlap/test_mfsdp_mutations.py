"""Faults put back on purpose: each must change a result or raise, or the tests beside this file would prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from sharding_testing import PlainReference, adamw, batches, build, differing, drive, loss_of, parallel, sgd, shard

from combined_1f1b.fsdp_adapter import mfsdp_v2
from combined_1f1b.fsdp_adapter.data_parallel import prepare_optimizer


class JoinedStreams:
    """A capture's rule for streams: work on a stream that no wait has joined to the captured one is refused."""

    def __init__(self, captured: object) -> None:
        self.joined = {captured}

    def wait(self, waiting: object, waited_for: object) -> None:
        if waited_for in self.joined:
            self.joined.add(waiting)
        elif waiting in self.joined:
            raise RuntimeError("cudaErrorStreamCaptureIsolation: a captured stream waits for one outside the capture")

    def enter(self, stream: object) -> None:
        if stream not in self.joined:
            raise RuntimeError("cudaErrorStreamCaptureIsolation: work on a stream outside the capture")


@contextmanager
def capture_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[JoinedStreams]:
    """Apply the rule to the streams of torch.cuda for a block."""
    current = torch.cuda.current_stream()
    rules = JoinedStreams(current)
    kind = type(current)
    wait_stream, stream_context = kind.wait_stream, torch.cuda.stream

    def checked_wait(self: object, other: object) -> None:
        rules.wait(self, other)
        wait_stream(self, other)

    @contextmanager
    def checked_context(stream: object) -> Iterator[None]:
        rules.enter(stream)
        with stream_context(stream):
            yield

    with monkeypatch.context() as patch:
        patch.setattr(kind, "wait_stream", checked_wait)
        patch.setattr(torch.cuda, "stream", checked_context)
        yield rules


@pytest.mark.world_size(1, 2)
def test_an_iteration_obeys_the_rules_of_a_capture_and_joins_every_stream(device, monkeypatch):
    with parallel():
        wrapped = shard(build())
        with capture_rules(monkeypatch) as rules:
            drive(wrapped, batches(2))
        assert {wrapped.context.allgather_stream, wrapped.context.reduce_scatter_stream} <= rules.joined


@pytest.mark.world_size(1, 2)
def test_without_the_fork_at_backward_start_a_capture_fails(device, monkeypatch):
    with parallel():
        wrapped = shard(build())
        monkeypatch.setattr(mfsdp_v2.ScheduledContext, "pre_backward", lambda self: None)
        with capture_rules(monkeypatch), pytest.raises(RuntimeError, match="cudaErrorStreamCaptureIsolation"):
            drive(wrapped, batches(2))


@pytest.mark.world_size(1)
def test_begin_backward_looks_the_fork_up_at_each_call_and_makes_it_once(device, monkeypatch):
    with parallel():
        wrapped = shard(build())
        calls = []
        monkeypatch.setattr(wrapped.context, "pre_backward", lambda: calls.append("fork"), raising=False)
        drive(wrapped, batches(3))
        assert calls == ["fork"] * 3


@pytest.mark.world_size(2, 4)
def test_without_the_expert_factor_expert_gradients_are_too_large(device, monkeypatch):
    ranks = torch.distributed.get_world_size()
    with parallel(expert_model_parallel_size=ranks):
        data = batches(1)
        right = shard(build())
        drive(right, data)
        monkeypatch.setattr(mfsdp_v2, "gradient_factor", lambda **sizes: 1.0)
        wrong = shard(build())
        drive(wrong, data)
        expected, found = right.full_gradients(), wrong.full_gradients()
        changed = differing(found, expected)
        assert changed
        assert all(".experts." in name for name in changed)
        for name in changed:
            assert torch.equal(found[name], expected[name] * ranks)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("lost", ["REDUCE", "GATHER"])
def test_a_lost_reduction_or_gather_is_noticed(device, lost):
    with parallel():
        wrapped = shard(build())
        driver = wrapped.sharding_driver()
        optimizer = prepare_optimizer(sgd(wrapped.parameters()), wrapped)
        driver.begin_iteration()
        if lost == "GATHER":
            units = [unit for unit in driver.units if unit != "L1"]
            # The module still holds its sharded parameters, which no computation accepts.
            with driver.gathered(*units), driver.recording(), pytest.raises(RuntimeError, match="DTensor"):
                loss_of(wrapped, batches(1)[0])
            driver.abort()
            return
        with driver.gathered(), driver.recording():
            loss = loss_of(wrapped, batches(1)[0])
            driver.begin_backward()
            loss.backward()
            for unit in driver.trainable_units:
                if unit != "L1":
                    driver.reduce(unit, is_last=True)
        driver.finish_iteration()
        with pytest.raises(ValueError, match=r"decoder\.layers\.1\..* has no gradient"):
            optimizer.step()


@pytest.mark.world_size(2)
def test_a_reduction_lost_for_one_micro_batch_changes_the_gradients(device):
    with parallel():
        wrapped, plain = shard(build()), PlainReference(build(), sgd)
        driver = wrapped.sharding_driver()
        reduce, calls = driver.reduce, []

        def lose_first(unit: str, *, is_last: bool) -> None:
            calls.append(unit)
            if unit == "L1" and calls.count("L1") == 1:
                for group in driver._units["L1"].groups:
                    mfsdp_v2.drop_gradients(group)
                return
            reduce(unit, is_last=is_last)

        driver.reduce = lose_first
        data = batches(2)
        drive(wrapped, data)
        plain.iterate(data)
        changed = differing(wrapped.full_gradients(), plain.gradients())
        assert changed == {name for name in plain.main if name.startswith("decoder.layers.1.")}


@pytest.mark.world_size(1)
def test_a_driver_asked_out_of_order_raises(device):
    with parallel():
        driver = shard(build()).sharding_driver()
        with pytest.raises(AssertionError, match=r"FREE\.L1: not gathered"):
            driver.free("L1")
        driver.gather("L1")
        with pytest.raises(AssertionError, match=r"GATHER\.L1: already gathered"):
            driver.gather("L1")
        with pytest.raises(AssertionError, match="L1"):
            driver.finish_iteration()
        with pytest.raises(AssertionError, match="L1"):
            driver.begin_iteration()


@pytest.mark.world_size(1, 2)
def test_no_bytes_of_full_parameters_are_held_at_rest_and_the_closed_form_when_gathered(device):
    with parallel(expert_model_parallel_size=torch.distributed.get_world_size()):
        wrapped = shard(build(dtype="bf16"))
        driver = wrapped.sharding_driver()
        assert driver.unsharded_bytes == 0
        for unit in driver.units:
            with driver.gathered(unit):
                expected = sum(group.main_weight.layout.size for group in driver._units[unit].groups) * 2
                assert driver.unsharded_bytes == expected
            assert driver.unsharded_bytes == 0
        drive(wrapped, batches(2))
        assert driver.unsharded_bytes == 0


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("moment", ["forward", "backward", "reduce"])
def test_a_failed_iteration_can_be_run_again(device, moment):
    with parallel():
        wrapped, plain = shard(build()), PlainReference(build(), adamw)
        optimizer = prepare_optimizer(adamw(wrapped.parameters()), wrapped)
        driver, data = wrapped.sharding_driver(), batches(2)
        with pytest.raises(RuntimeError, match="as asked"):
            fail_at(moment, driver, wrapped, data)
        driver.abort()
        assert driver.gathered_units == ()
        assert driver.unsharded_bytes == 0
        for step in range(2):
            again = batches(2, offset=step)
            assert torch.equal(torch.stack(drive(wrapped, again)), torch.stack(plain.iterate(again)))
            assert differing(wrapped.full_gradients(), plain.gradients()) == set()
            optimizer.step(), plain.step()
            optimizer.zero_grad()


def fail_at(moment: str, driver: object, wrapped: Callable[..., torch.Tensor], data: list) -> None:
    """One and a half micro-batches by hand, with a failure in the second."""
    driver.begin_iteration()
    for number, batch in enumerate(data):
        for unit in driver.units:
            driver.gather(unit)
        with driver.recording():
            loss = loss_of(wrapped, batch)
        if number == 1 and moment == "forward":
            raise RuntimeError("as asked")
        driver.begin_backward()
        loss.backward()
        if number == 1 and moment == "backward":
            raise RuntimeError("as asked")
        for unit in driver.trainable_units:
            driver.reduce(unit, is_last=number == 1)
            if number == 1 and moment == "reduce":
                raise RuntimeError("as asked")
        for unit in driver.units:
            driver.free(unit)


@pytest.mark.world_size(1)
def test_abort_hides_no_failure_behind_its_own(device, monkeypatch, caplog):
    with parallel():
        driver = shard(build()).sharding_driver()
        monkeypatch.setattr(mfsdp_v2, "free_group", lambda group: 1 / 0)
        driver.abort()
        assert "could not be freed" in caplog.text


@pytest.mark.world_size(1, 2)
def test_a_parameter_that_nothing_uses_gets_zeros(device):
    with parallel():
        model = build()
        model.decoder.layers[1].unused = torch.nn.Parameter(torch.ones(3, 2))
        wrapped = shard(model)
        drive(wrapped, batches(2))
        assert torch.equal(wrapped.full_gradients()["decoder.layers.1.unused"], torch.zeros(3, 2))
