"""A whole iteration of a pipeline in one CUDA graph, transfers between stages included, ours and Megatron's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from host_models import BATCH, SEQUENCE, batches, build, forward_step, parallel, seed
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

import combined_1f1b
from combined_1f1b.schedule.cuda_graph import FullIterationGraph
from combined_1f1b.schedule.streams import Lanes


def sizes(vpp: int | None) -> dict[str, Any]:
    virtual = {} if vpp is None else {"virtual_pipeline_model_parallel_size": vpp}
    return {"pipeline_model_parallel_size": 2, **virtual}


def build_stage(stage: int | None, vpp: int | None) -> torch.nn.Module:
    # Two stages are neighbours on both sides: batched sends and receives would match each other wrongly.
    transfers = {} if vpp is None else {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return build(
        **sizes(vpp),
        **transfers,
        num_layers=4,
        expert_model_parallel_size=1,
        vp_stage=stage,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        moe_expert_capacity_factor=1.0,
        moe_pad_expert_input_to_capacity=True,
    )


def _nothing_to_do(_parameters: Any) -> None:
    """Stands for what a data-parallel wrapper would start."""


def train(*, captured: bool, combined: bool, vpp: int | None, steps: int = 4) -> tuple[Any, ...]:
    """SGD steps; losses (on the last stage) and parameters."""
    chunks = [build_stage(stage, vpp) for stage in ([None] if vpp is None else range(vpp))]
    config = chunks[0].config
    config.overlap_moe_expert_parallel_comm = combined
    config.deallocate_pipeline_outputs = True  # outputs are replaced behind the graph's back
    if vpp is not None:
        config.grad_sync_func = _nothing_to_do  # of which Megatron's interleaved driver makes a list
    for module in (module for chunk in chunks for module in chunk.modules() if hasattr(module, "config")):
        module.config = config  # chunks share one in Megatron's loop
    optimizer = torch.optim.SGD([parameter for chunk in chunks for parameter in chunk.parameters()], lr=0.5)
    function = get_forward_backward_func()
    call = FullIterationGraph(function, warmup_iterations=1) if captured else function
    seed(3, graphable=True)
    losses = []
    for _ in range(steps):
        reports = call(
            forward_step_func=forward_step,
            data_iterator=[batches(4) for _ in chunks] if vpp else batches(4),
            model=chunks,
            num_microbatches=4,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        losses.append([report["loss"].clone() for report in reports])
        optimizer.step()
        optimizer.zero_grad()
    assert not captured or call.is_captured
    return losses, [dict(chunk.named_parameters()) for chunk in chunks]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("combined", "vpp"), [(False, 2), (True, 2), (True, None)])
def test_a_pipeline_replays(device, combined, vpp):
    if torch.distributed.get_backend() == "gloo" and device.type == "cuda":
        pytest.skip("gloo copies through the host, which no CUDA graph captures: run one rank per GPU")
    with (
        combined_1f1b.install(),
        parallel(**sizes(vpp), expert_model_parallel_size=1, graphable_random_state=True),
    ):
        reference = train(captured=False, combined=False, vpp=vpp)
        torch.testing.assert_close(train(captured=True, combined=combined, vpp=vpp), reference, rtol=0, atol=0)


@pytest.mark.world_size(2)
def test_without_a_join_after_the_last_sends_a_capture_fails(device, monkeypatch):
    """Eagerly, what follows would reuse the memory that is still being sent."""
    if torch.distributed.get_backend() == "gloo" and device.type == "cuda":
        pytest.skip("gloo copies through the host, which no CUDA graph captures: run one rank per GPU")
    join, calls = Lanes.join, [0]

    def join_after_the_ops_only(lanes: Lanes) -> None:
        calls[0] += 1
        if calls[0] % 2:
            join(lanes)

    monkeypatch.setattr(Lanes, "join", join_after_the_ops_only)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda _: None)  # the other stage does not come to it
    with combined_1f1b.install(), parallel(**sizes(None), expert_model_parallel_size=1, graphable_random_state=True):
        # The first stage ends with a receive, which came after its last send on the stream of their peer.
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        with pytest.raises(RuntimeError, match=r"Unjoined.*send") if is_last else nullcontext():
            train(captured=True, combined=True, vpp=None, steps=2)
