"""A whole iteration under MFSDP v2 in one CUDA graph: warm-up, capture, replays, against the run without a graph."""

from __future__ import annotations

import pytest
import torch
from host_models import BATCH, SEQUENCE, batches, build, config_of, parallel, seed
from megatron.core.pipeline_parallel import get_forward_backward_func
from parity_testing import EXPERT_SIZE, forward_step

import combined_1f1b
from combined_1f1b.errors import ConfigError
from combined_1f1b.schedule.cuda_graph import FullIterationGraph

STATIC = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
WARMUP = 2


@pytest.fixture(autouse=True)
def installed(device):
    with combined_1f1b.install(), parallel(expert_model_parallel_size=EXPERT_SIZE, graphable_random_state=True):
        yield


def train_graphed(*, combined: bool, captured: bool, steps: int, num_microbatches: int = 3, **changes):
    """AdamW steps on a model sharded for one of the modes, each iteration eager or through a FullIterationGraph."""
    model = build(expert_model_parallel_size=EXPERT_SIZE, **STATIC, **changes)
    config = config_of(model)
    config.overlap_moe_expert_parallel_comm = combined
    wrapped = combined_1f1b.shard_model(model, config)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    combined_1f1b.prepare_optimizer(optimizer, wrapped)
    function = get_forward_backward_func()
    step = FullIterationGraph(function, warmup_iterations=WARMUP) if captured else function
    seed(3, graphable=True)
    losses, moved = [], 0
    for number in range(steps):
        data = batches(num_microbatches)
        reports = step(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[wrapped],
            num_microbatches=num_microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        losses += [report["loss"].clone() for report in reports]
        assert all(parameter.grad is not None for parameter in wrapped.parameters())
        before = [parameter.to_local().clone() for parameter in wrapped.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number > WARMUP:  # replay only
            after = [parameter.to_local() for parameter in wrapped.parameters()]
            moved += any(a.numel() and not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    if captured:
        assert step.is_captured
        assert moved == steps - WARMUP - 1
    return losses, wrapped.full_parameters()


def assert_same_bits(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("steps", [WARMUP + 3, WARMUP + 21])
@pytest.mark.parametrize("combined", [True, False])
def test_ep_overlap_full_iteration_cuda_graph_matches_default_schedule(combined, steps):
    reference = train_graphed(combined=False, captured=False, steps=steps)
    assert_same_bits(train_graphed(combined=combined, captured=True, steps=steps), reference)


@pytest.mark.world_size(1, 2)
def test_dropout_draws_what_eager_iterations_draw():
    changes = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    reference = train_graphed(combined=False, captured=False, steps=6, **changes)
    assert_same_bits(train_graphed(combined=True, captured=True, steps=6, **changes), reference)


@pytest.mark.world_size(1, 2)
def test_pre_backward_is_what_makes_the_capture_legal(monkeypatch):
    """Mutation: when it does nothing, the first reduction runs on a stream outside the capture."""
    from combined_1f1b.fsdp_adapter.mfsdp_v2 import ScheduledContext

    original = ScheduledContext.pre_backward
    reference = train_graphed(combined=True, captured=True, steps=WARMUP + 2)
    monkeypatch.setattr(ScheduledContext, "pre_backward", lambda self: None)
    with pytest.raises(RuntimeError, match=r"(?i)captur") as caught:
        train_graphed(combined=True, captured=True, steps=WARMUP + 1)
    notes = "\n".join(caught.value.__notes__)
    assert "REDUCE." in notes, notes
    monkeypatch.setattr(ScheduledContext, "pre_backward", original)
    assert_same_bits(train_graphed(combined=True, captured=True, steps=WARMUP + 2), reference)  # nothing is left broken


@pytest.mark.world_size(1)
@pytest.mark.parametrize("name", ["warm-up", "dropless", "timers"])
def test_what_cannot_be_captured_is_refused_before_any_work(name):
    if name == "warm-up":
        with pytest.raises(ConfigError, match="warmup_iterations=0"):
            FullIterationGraph(get_forward_backward_func(), warmup_iterations=0)
        return
    model = build(expert_model_parallel_size=EXPERT_SIZE, **({} if name == "dropless" else STATIC))
    config_of(model).timers = object() if name == "timers" else None
    called = []
    graph = FullIterationGraph(lambda **arguments: called.append(arguments))
    with pytest.raises(ConfigError):
        graph(model=[model], data_iterator=batches(1), num_microbatches=1)
    assert not called
