"""Faults put back on purpose: each must change a result or raise, or the tests beside this file would prove nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from host_models import seed
from sharding_testing import PlainReference, adamw, batches, build, differing, drive, loss_of, parallel, sgd, shard

from combined_1f1b.fsdp_adapter import mfsdp_v2
from combined_1f1b.fsdp_adapter.data_parallel import prepare_optimizer
from combined_1f1b.fsdp_adapter.schedule_driver import ScheduleDriver


def capture_iteration() -> None:
    """Drive one iteration by hand inside a capture: the rules for its streams are CUDA's, or the host device's."""
    if torch.cuda.is_available() and torch.distributed.get_backend() == "gloo":
        pytest.skip("gloo copies through the host, which no CUDA graph captures: run one rank per GPU")
    with parallel(graphable_random_state=True):
        wrapped = shard(build(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True))
        seed(3, graphable=True)
        data = batches(2)
        drive(wrapped, data)
        wrapped.zero_grad_buffer()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            drive(wrapped, data)


@pytest.mark.world_size(1, 2)
def test_an_iteration_obeys_the_rules_of_a_capture_and_joins_every_stream(device):
    capture_iteration()


def first_error(error: BaseException) -> str:
    """What went wrong before everything that failed while cleaning up."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error)


@pytest.mark.world_size(1, 2)
def test_without_the_fork_at_backward_start_a_capture_fails(device, monkeypatch):
    monkeypatch.setattr(mfsdp_v2.ScheduledContext, "pre_backward", lambda self: None)
    with pytest.raises(RuntimeError, match=r"(?i)captur") as caught:
        capture_iteration()
    if device.type == "cpu":  # CUDA itself does not say which stream
        assert "which is outside the capture" in first_error(caught.value)


@pytest.mark.world_size(1, 2)
def test_without_a_join_with_the_reductions_a_capture_fails(device, monkeypatch):
    def join_the_gathers_only(driver: ScheduleDriver) -> None:
        driver.context.current_stream().wait_stream(driver.gather_stream)

    monkeypatch.setattr(ScheduleDriver, "_join", join_the_gathers_only)
    with pytest.raises(RuntimeError) as caught:
        capture_iteration()
    assert "unjoined work" in first_error(caught.value)


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


@pytest.mark.world_size(1)
@pytest.mark.parametrize("use", ["iteration", "gathered", "evaluation"])
def test_an_abort_that_failed_is_repeated_before_the_units_are_used_again(use, device, monkeypatch):
    with parallel():
        wrapped = shard(build())
        driver = wrapped.sharding_driver()
        driver.begin_iteration()
        driver.gather("L1")
        with monkeypatch.context() as patch:
            patch.setattr(mfsdp_v2, "free_group", lambda group: 1 / 0)
            driver.abort()
        assert driver.gathered_units == ("L1",)
        if use == "iteration":
            drive(wrapped, batches(1))
        elif use == "gathered":
            with driver.gathered():
                pass
        else:
            with driver.evaluating():
                pass
        assert driver.gathered_units == ()
        assert driver.unsharded_bytes == 0


@pytest.mark.world_size(1, 2)
def test_a_parameter_that_nothing_uses_gets_zeros(device):
    with parallel():
        model = build()
        model.decoder.layers[1].unused = torch.nn.Parameter(torch.ones(3, 2))
        wrapped = shard(model)
        drive(wrapped, batches(2))
        assert torch.equal(wrapped.full_gradients()["decoder.layers.1.unused"], torch.zeros(3, 2))
