"""What the schedule asks of MFSDP v2 over all chunks of a pipeline rank: the plan's ops, once each, on one context."""

from __future__ import annotations

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_models import BATCH, SEQUENCE, batches, config_of, differing, parallel, seed
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import combined_1f1b as built_in
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from mfsdp_pipeline_testing import NUM_MICROBATCHES, build_chunks, named, optimizer_of, run, shard, two_stages
from parity_testing import forward_step

import combined_1f1b
from combined_1f1b import entry_points
from combined_1f1b.fsdp_adapter.protocol import driver_of
from combined_1f1b.fsdp_adapter.schedule_driver import ScheduleDriver
from combined_1f1b.fsdp_adapter.several_chunks import joined
from combined_1f1b.schedule.cuda_graph import FullIterationGraph
from combined_1f1b.schedule.ops import Kind

TIED = {"share_embeddings_and_output_weights": True}
VIRTUAL = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
STATIC = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


@pytest.fixture(autouse=True)
def installed(device):
    with combined_1f1b.install():
        yield


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("vpp", [2, 1])
def test_each_op_of_the_plan_runs_once_in_its_order_on_the_one_context(vpp, monkeypatch):
    calls: list[tuple[Any, ...]] = []
    for method in ("gather", "free", "reduce"):
        original = getattr(ScheduleDriver, method)

        def record(self: Any, unit: str, *, call: Any = original, kind: str = method.upper(), **is_last: bool) -> None:
            calls.append((Kind(kind), unit, *is_last.values()))
            call(self, unit, **is_last)

        monkeypatch.setattr(ScheduleDriver, method, record)
    with two_stages(vpp=vpp, ep=torch.distributed.get_world_size() // 2):
        wrapped = shard(build_chunks(vpp=vpp, **TIED), combined=True)
        contexts = {id(one.context) for one in wrapped} | {
            id(unit.module.context) for one in wrapped for unit in one.sharding_driver()._units.values()
        }
        assert len(contexts) == 1
        context, forks = wrapped[0].context, []
        fork = context.pre_backward
        monkeypatch.setattr(context, "pre_backward", lambda: (forks.append(len(calls)), fork()), raising=False)
        run(wrapped)
    plan = combined_1f1b.last_step().plan
    sharding = (Kind.GATHER, Kind.FREE, Kind.REDUCE)
    assert [call[:2] for call in calls] == [(op.kind, op.unit) for op in plan.ops if op.kind in sharding]
    assert len(forks) == NUM_MICROBATCHES * vpp
    units = [unit for one in wrapped for unit in one.sharding_driver().trainable_units]
    reductions = [call for call in calls if call[0] is Kind.REDUCE]
    assert Counter(unit for _, unit, _ in reductions) == dict.fromkeys(units, NUM_MICROBATCHES)
    last = {unit: index for index, (_, unit, _) in enumerate(reductions)}
    assert {unit: index for index, (_, unit, is_last) in enumerate(reductions) if is_last} == last
    assert sum(is_last for *_, is_last in reductions) == len(units)
    assert all(one.sharding_driver().unsharded_bytes == 0 for one in wrapped)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("vpp", [2, 1])
def test_after_a_failure_on_every_rank_the_iteration_can_be_run_again(vpp, monkeypatch):
    """The first stage fails in the iteration's last reduction; the last one, done by then, as it finalises."""
    with two_stages(vpp=vpp):
        wrapped = shard(build_chunks(vpp=vpp), combined=True)
        optimizer = optimizer_of(wrapped)
        losses, gradients = run(wrapped), named(wrapped, "full_gradients")
        reduce = ScheduleDriver.reduce

        def fail_at_the_end(self: Any, unit: str, *, is_last: bool) -> None:
            if is_last and unit == "embedding":
                raise OSError("out of luck")
            reduce(self, unit, is_last=is_last)

        def fail(*_: Any, **__: Any) -> None:
            raise OSError("out of luck")

        with monkeypatch.context() as patch:
            patch.setattr(ScheduleDriver, "reduce", fail_at_the_end)
            for one in wrapped:
                patch.setattr(config_of(one), "finalize_model_grads_func", fail)
                one.zero_grad_buffer()
            with pytest.raises(OSError, match="out of luck"):
                run(wrapped)
        if parallel_state.is_pipeline_first_stage(ignore_virtual=True):
            assert all(parameter.grad is None for one in wrapped for parameter in one.parameters())
        assert all(one.sharding_driver().unsharded_bytes == 0 for one in wrapped)
        for one in wrapped:
            one.zero_grad_buffer()
        assert run(wrapped) == losses
        assert differing(gradients, named(wrapped, "full_gradients")) == set()
        optimizer.step()


@pytest.mark.world_size(2)
def test_what_a_failure_has_left_on_its_way_between_stages_does_not_reach_the_retry():
    """Both stages fail in the middle. In groups of their own: what is on its way there is never received."""
    with parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=1, context_parallel_size=1):
        wrapped = shard(build_chunks(vpp=1), combined=True)
        losses, gradients = run(wrapped), named(wrapped, "full_gradients")
        fails_at = 3 if parallel_state.is_pipeline_first_stage(ignore_virtual=True) else 2
        calls: list[Any] = []

        def fail(data: Any, model: Any) -> Any:
            calls.append(model)
            if len(calls) == fails_at:
                raise OSError("out of luck")
            return forward_step(data, model)

        for one in wrapped:
            one.zero_grad_buffer()
        with pytest.raises(OSError, match="out of luck"):
            run(wrapped, step=fail)
        assert all(one.sharding_driver().unsharded_bytes == 0 for one in wrapped)
        for one in wrapped:
            one.zero_grad_buffer()
        assert run(wrapped) == losses
        assert differing(gradients, named(wrapped, "full_gradients")) == set()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("finalises", [True, False])
def test_a_pipeline_with_a_tied_embedding_replays(finalises, device):
    """The exchange of the embedding's gradients is inside the graph, or left to finish_grad_sync after each replay."""
    if device.type == "cuda" and torch.distributed.get_backend() == "gloo":
        pytest.skip("gloo copies through the host, which no CUDA graph captures: run one rank per GPU")
    with parallel(**VIRTUAL, expert_model_parallel_size=1, graphable_random_state=True):
        captured, eager = (train_in_a_graph(captured=captured, finalises=finalises) for captured in (True, False))
        torch.testing.assert_close(captured, eager, rtol=0, atol=0)


def train_in_a_graph(*, captured: bool, finalises: bool) -> list[Any]:
    """Losses, gradients and final parameters of steps through a FullIterationGraph, or of the same without one."""
    wrapped = shard(build_chunks(vpp=2, **TIED, **STATIC, deallocate_pipeline_outputs=True), combined=True)
    for one in wrapped:
        config_of(one).finalize_model_grads_func = finalize_model_grads if finalises else None
    optimizer = optimizer_of(wrapped)
    function = get_forward_backward_func()
    call = FullIterationGraph(function, warmup_iterations=1) if captured else function
    seed(3, graphable=True)
    history: list[Any] = []
    for _ in range(4):
        reports = call(
            forward_step_func=forward_step,
            data_iterator=[batches(2) for _ in wrapped],
            model=wrapped,
            num_microbatches=2,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        for one in wrapped:
            one.finish_grad_sync()
        history += [[report["loss"].clone() for report in reports], named(wrapped, "full_gradients")]
        optimizer.step()
        optimizer.zero_grad()
    return [*history, named(wrapped, "full_parameters")]


@pytest.mark.world_size(2)
def test_chunks_that_one_schedule_cannot_drive_together_are_refused():
    with two_stages(vpp=2):
        first, second = build_chunks(vpp=2)
        (first,) = shard([first], combined=True)
        with pytest.raises(ValueError, match=r"chunks \[1\] are not sharded.*list of all chunks"):
            joined([driver_of(first), driver_of(second)])
        (second,) = shard([second], combined=True)
        with pytest.raises(ValueError, match=r"do not share one context.*list of all chunks"):
            joined([driver_of(first), driver_of(second)])


@pytest.fixture
def finds_mfsdp_v1(monkeypatch):
    """Megatron's search for an MFSDP v1 wrapper finds one in any model: the wrapper itself needs a GPU."""
    for where in (entry_points, built_in):
        monkeypatch.setattr(where, "find_megatron_fsdp", lambda model: model)


@pytest.mark.world_size(1, 2)
def test_with_virtual_stages_mfsdp_v1_keeps_the_built_in_which_refuses_it(finds_mfsdp_v1, caplog):
    config = SimpleNamespace(high_priority_a2a_comm_stream=False)
    with caplog.at_level(logging.INFO, logger="combined_1f1b"):
        for _ in range(2):
            with pytest.raises(AssertionError, match="with FSDP is not supported for interleaved"):
                schedules.combined_1f1b_schedule_for_interleaved_pipelining(
                    config, None, None, [SimpleNamespace()], *[None] * 11
                )
    (message,) = [record.getMessage() for record in caplog.records]
    assert "MFSDP v1: Megatron's own combined schedule" in message


@pytest.mark.world_size(2)
def test_without_virtual_stages_mfsdp_v1_is_refused(finds_mfsdp_v1):
    with two_stages(vpp=1):
        chunks = build_chunks(vpp=1)
        config_of(chunks).overlap_moe_expert_parallel_comm = True
        with pytest.raises(ValueError, match=r"overlap_moe_expert_parallel_comm=True.*MFSDP v1.*shard_model"):
            run(chunks)
