"""The executor obeys the plan: what it calls, in which order, with which waits, alike on every rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from host_models import build, config_of, differing, iteration, parallel, take_gradients
from megatron.core import utils as megatron_utils
from parity_testing import EXPERT_SIZE, run, set_flag
from sharding_recording import RecordingSharding

import combined_1f1b
import combined_1f1b.errors
import combined_1f1b.host as host
from combined_1f1b.fsdp_adapter.protocol import driver_of
from combined_1f1b.schedule import iteration as schedule_iteration
from combined_1f1b.schedule.layer_plan import ModelChunk, stage_name
from combined_1f1b.schedule.module_state import LayerModuleState
from combined_1f1b.schedule.ops import Kind, Lane
from combined_1f1b.schedule.plan import Plan


@pytest.fixture(autouse=True)
def installed(device):
    with combined_1f1b.install(), parallel(expert_model_parallel_size=EXPERT_SIZE):
        yield


def sharded_model(**changes):
    model = build(expert_model_parallel_size=EXPERT_SIZE, **changes)
    set_flag(model, True)
    return combined_1f1b.shard_model(model, config_of(model))


@pytest.mark.world_size(1, 2)
def test_the_driver_is_called_as_the_plan_says(monkeypatch):
    model = sharded_model(mtp_num_layers=1, share_embeddings_and_output_weights=True)
    recording = RecordingSharding(driver_of(model))
    monkeypatch.setattr(schedule_iteration, "driver_of", lambda _: recording)
    run(model)
    plan = combined_1f1b.last_step().plan
    expected = []
    for index, op in enumerate(plan.ops):
        if op.kind in (Kind.GATHER, Kind.FREE):
            expected.append(op.name)
        elif op.kind is Kind.REDUCE:
            expected.append(op.name + (" last" if index in plan.last_reductions else ""))
        elif op.kind is Kind.BEGIN_BACKWARD:
            expected.append("BEGIN_BACKWARD")
    calls = [call for call in recording.calls if call.split(".")[0] in {"GATHER", "FREE", "REDUCE", "BEGIN_BACKWARD"}]
    assert calls == expected
    assert calls.count("BEGIN_BACKWARD") == 3, "exactly once per micro-batch backward"
    assert recording.calls.count("BEGIN_ITERATION") == recording.calls.count("FINISH_ITERATION") == 1


@pytest.mark.world_size(1)
def test_pre_backward_is_looked_up_and_called_once_per_backward(monkeypatch):
    model = sharded_model()
    calls = []
    original = model.context.pre_backward
    monkeypatch.setattr(model.context, "pre_backward", lambda: (calls.append(1), original()))
    run(model, num_microbatches=4)
    assert len(calls) == 4


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("sharded", [False, True])
def test_every_wait_of_the_plan_is_issued_on_its_lane_and_no_other(sharded):
    if torch.cuda.is_available():
        pytest.skip("the host device shows the waits; on CUDA they are not observable")
    static = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}  # no copies to the CPU
    model = sharded_model(**static) if sharded else build(expert_model_parallel_size=EXPERT_SIZE, **static)
    set_flag(model, True)
    run(model)  # whatever is made once is made
    steps = []
    with host.observing(steps.append):
        run(model)
    plan = combined_1f1b.last_step().plan
    awaited = Counter(step.step.name for step in steps)
    side_lanes = 2 if sharded else 1
    # wait_stream is an event of its own: one for each fork and join, and MFSDP's three around each reduction group.
    reductions = sum(op.kind is Kind.REDUCE for op in plan.ops)
    planned = sum(len(waits) for waits in plan.wait_indices)
    around = side_lanes * 2 if not sharded else awaited["EVENT_AWAITED"] - planned
    assert awaited["EVENT_AWAITED"] == planned + around
    assert not sharded or around >= 2 * reductions
    assert awaited["EVENT_RECORDED"] >= len(plan.signals)


@pytest.mark.world_size(1)
def test_a_model_is_cut_into_the_nodes_of_its_plan():
    model = build(expert_model_parallel_size=EXPERT_SIZE, moe_layer_freq=[0, 1], mtp_num_layers=1)
    set_flag(model, True)
    run(model, num_microbatches=1)
    (chunk,) = combined_1f1b.last_step().plan.shape.chunks
    cut = ModelChunk(model.module)
    assert [*chunk.nodes][-1] == ("loss", "")
    assert set(cut.templates) | {("loss", "")} == set(chunk.nodes)
    assert set(cut.templates) >= {(stage_name(layer), "attention") for layer in model.module.decoder.layers}
    assert cut.first_user_of_shared_weights in cut.templates


@pytest.mark.world_size(1)
def test_a_plan_without_a_wait_is_refused_before_it_runs(monkeypatch):
    """Mutation: drop each wait of the plan in turn."""
    model = build(expert_model_parallel_size=1)
    set_flag(model, True)
    run(model)
    plan = combined_1f1b.last_step().plan
    with_waits = [index for index, op in enumerate(plan.ops) if op.waits]
    assert with_waits
    for index in with_waits:
        ops = list(plan.ops)
        ops[index] = ops[index].with_waits(ops[index].waits[1:])
        with pytest.raises(combined_1f1b.errors.PlanError, match=plan.ops[index].name.replace(".", r"\.")):
            replace(plan, ops=tuple(ops)).validate()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", [Kind.REDUCE, Kind.GATHER])
def test_a_dropped_sharding_op_is_noticed(monkeypatch, kind):
    """Mutation: the executor skips one REDUCE (gradients differ) or one GATHER (the driver refuses)."""
    model = sharded_model()
    reference = (iteration(model, combined=True), model.full_gradients())[1]
    model.zero_grad_buffer()
    original = Plan.validate
    monkeypatch.setattr(Plan, "validate", lambda self: None)

    def without_one(**shape):
        plan = schedule_iteration.build_plan(**shape)
        original(plan)
        drop = next(index for index, op in enumerate(plan.ops) if op.kind is kind and op.unit == "L1.experts")
        ops = [op for index, op in enumerate(plan.ops) if index != drop]
        waits = {plan.ops[drop].name} if kind is Kind.GATHER else set()
        ops = [op.with_waits(tuple(w for w in op.waits if w not in waits)) for op in ops]
        return replace(plan, ops=tuple(ops))

    monkeypatch.setattr(schedule_iteration, "_checked_plan", without_one)
    if kind is Kind.GATHER:
        with pytest.raises((AssertionError, RuntimeError)):
            iteration(model, combined=True)
        return
    iteration(model, combined=True)
    changed = differing(reference, model.full_gradients())
    assert changed
    assert all("layers.1.mlp.experts" in name for name in changed)


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_issue_the_collectives_of_a_group_in_the_same_order(monkeypatch, sharded):
    model = sharded_model() if sharded else build(expert_model_parallel_size=EXPERT_SIZE)
    set_flag(model, True)
    issued = []
    for name in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        original = getattr(torch.distributed, name)

        def recorded(*args, _name=name, _original=original, **kwargs):
            group = kwargs.get("group") or next(
                (a for a in args if isinstance(a, torch.distributed.ProcessGroup)), torch.distributed.group.WORLD
            )
            issued.append((tuple(torch.distributed.get_process_group_ranks(group)), _name))
            return _original(*args, **kwargs)

        monkeypatch.setattr(torch.distributed, name, recorded)
    run(model, num_microbatches=4)
    mine = list(issued)
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    all_to_alls = sum(name == "all_to_all_single" for _, name in mine)
    # tokens and probabilities out, tokens back, in both directions, for 2 layers and 4 micro-batches
    assert all_to_alls == 2 * 4 * 6
    for other in everyone:
        for group in {ranks for ranks, _ in mine} & {ranks for ranks, _ in other}:
            assert [name for ranks, name in mine if ranks == group] == [name for ranks, name in other if ranks == group]


@pytest.mark.world_size(1, 2)
def test_forwards_of_one_layer_in_flight_together_keep_their_own_module_state(monkeypatch):
    """The dispatcher's state is swapped per micro-batch; every attribute that a forward changes is on the list."""
    model = build(expert_model_parallel_size=EXPERT_SIZE, moe_expert_capacity_factor=1.0, num_layers=1)
    layer = model.module.decoder.layers[0]
    dispatcher = layer.mlp.token_dispatcher
    state = LayerModuleState(layer)
    before = {**vars(dispatcher)}
    state.activate(0)
    iteration(model, combined=False)
    changed = {name for name, value in vars(dispatcher).items() if value is not before.get(name)}
    first = dispatcher.hidden_shape
    state.activate(1)
    assert {name for name, value in vars(dispatcher).items() if value is not before.get(name)} == set()
    dispatcher.hidden_shape = (1,)
    state.activate(0)
    assert dispatcher.hidden_shape == first
    assert {name for name, value in vars(dispatcher).items() if value is not before.get(name)} == changed
    state.activate(1)
    assert dispatcher.hidden_shape == (1,)
    state.reset()
    assert {name for name, value in vars(dispatcher).items() if value is not before.get(name)} == set()
    take_gradients(model)


@pytest.mark.world_size(1)
def test_lanes_are_forked_from_and_joined_to_the_callers_stream():
    model = build(expert_model_parallel_size=1)
    set_flag(model, True)
    own = torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        losses = run(model)
        assert torch.cuda.current_stream() == own
    torch.cuda.current_stream().wait_stream(own)
    assert len(losses) == 3
    assert Lane.COMPUTE.value == "compute"


@pytest.fixture
def ranges(monkeypatch):
    """Megatron's NVTX profiling is on; yields the names of the ranges that were opened."""
    names: list[str] = []
    megatron_utils.configure_nvtx_profiling(True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", names.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    yield names
    megatron_utils.configure_nvtx_profiling(False)


@pytest.mark.world_size(1)
def test_every_op_is_a_range_for_the_profiler(ranges):
    run(sharded_model())
    names = [op.name for op in combined_1f1b.last_step().plan.ops]
    opened = [name for name in ranges if name in set(names)]
    assert opened == names


@pytest.mark.world_size(1)
def test_a_failure_inside_a_range_of_megatrons_own_keeps_its_exception(ranges, monkeypatch):
    model = build(expert_model_parallel_size=EXPERT_SIZE)
    set_flag(model, True)
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda *_a, **_k: (_ for _ in ()).throw(RuntimeError("as asked")))
    layer = model.module.decoder.layers[0].mlp.experts.local_experts[0]
    monkeypatch.setattr(layer, "activation_func", torch.nn.functional.gelu)
    with pytest.raises(RuntimeError, match="as asked"):
        run(model)
    assert megatron_utils._nvtx_range_messages == []
