"""A whole iteration under MFSDP v2 in one CUDA graph: warm-up, capture, replays, against the run without a graph.

On the host device with one and two ranks, and on GPUs with one NCCL rank each.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from host_models import BATCH, SEQUENCE, batches, build, config_of, parallel, seed
from megatron.core.pipeline_parallel import get_forward_backward_func
from parity_testing import EXPERT_SIZE, forward_step

import combined_1f1b
from combined_1f1b.schedule.cuda_graph import FullIterationGraph

STATIC = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
WARMUP = 2
SHORT, LONG = WARMUP + 3, WARMUP + 21  # 2 and 20 iterations that only replay


@pytest.fixture(autouse=True)
def installed(device):
    if torch.distributed.get_backend() == "gloo" and device.type == "cuda":
        pytest.skip("gloo copies through the host, which no CUDA graph captures: run one rank per GPU")
    with combined_1f1b.install(), parallel(expert_model_parallel_size=EXPERT_SIZE, graphable_random_state=True):
        yield


def train(
    *, combined: bool, captured: bool, steps: int, sequence: int = SEQUENCE, **changes: Any
) -> list[dict[str, torch.Tensor]]:
    """AdamW steps on a model sharded for one of the modes, each iteration eager or through a FullIterationGraph.

    Returns:
        Losses, and the parameters after the step, of each iteration.
    """
    model = build(expert_model_parallel_size=EXPERT_SIZE, sequence=sequence, **STATIC, **changes)
    config = config_of(model)
    config.overlap_moe_expert_parallel_comm = combined
    wrapped = combined_1f1b.shard_model(model, config)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    combined_1f1b.prepare_optimizer(optimizer, wrapped)
    function = get_forward_backward_func()
    step = FullIterationGraph(function, warmup_iterations=WARMUP) if captured else function
    seed(3, graphable=True)
    history = []
    for number in range(steps):
        reports = step(
            forward_step_func=forward_step,
            data_iterator=batches(2, sequence=sequence),
            model=[wrapped],
            num_microbatches=2,
            seq_length=sequence,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        losses = torch.stack([report["loss"] for report in reports])
        assert all(parameter.grad is not None for parameter in wrapped.parameters())
        before = [parameter.to_local().clone() for parameter in wrapped.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if captured and number > WARMUP:  # replay only
            after = [parameter.to_local() for parameter in wrapped.parameters()]
            assert any(a.numel() and not torch.equal(a, b) for a, b in zip(after, before, strict=True))
        history.append({"losses": losses, **wrapped.full_parameters()})
    assert not captured or step.is_captured
    if combined:
        assert combined_1f1b.last_step().forward_backward_pairs == 1
    return history


@cache
def reference(has_dropout: bool = False) -> list[dict[str, torch.Tensor]]:
    """Megatron's default schedule, eager; a shorter run is the beginning of a longer one."""
    return train(
        combined=False, captured=False, steps=SHORT if has_dropout else LONG, **(DROPOUT if has_dropout else {})
    )


def assert_same_bits(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    for mine, theirs in zip(found, expected[: len(found)], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize("steps", [SHORT, LONG])
@pytest.mark.parametrize("combined", [True, False])
def test_ep_overlap_full_iteration_cuda_graph_matches_default_schedule(combined, steps):
    assert_same_bits(train(combined=combined, captured=True, steps=steps), reference())


@pytest.mark.world_size(2, on_gpu=1)
def test_dropout_draws_what_eager_iterations_draw():
    found = train(combined=True, captured=True, steps=SHORT, **DROPOUT)
    assert_same_bits(found, reference(has_dropout=True))
    assert not torch.equal(found[-1]["losses"], reference()[SHORT - 1]["losses"])


@pytest.mark.world_size(2, on_gpu=1)
def test_pre_backward_is_what_makes_the_capture_legal(monkeypatch):
    """Mutation: when it does nothing, the first reduction runs on a stream outside the capture."""
    from combined_1f1b.fsdp_adapter.mfsdp_v2 import ScheduledContext

    with monkeypatch.context() as patch:
        patch.setattr(ScheduledContext, "pre_backward", lambda self: None)
        with pytest.raises(RuntimeError, match=r"(?i)captur") as caught:
            train(combined=True, captured=True, steps=WARMUP + 1)
    assert "REDUCE." in "\n".join(caught.value.__notes__)
    assert_same_bits(train(combined=True, captured=True, steps=WARMUP + 2), reference())  # nothing is left broken
