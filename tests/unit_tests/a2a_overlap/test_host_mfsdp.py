"""MFSDP v2 with its own hooks on the host device gives the bits of a replicated model with averaged gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from host_models import batches, build, forward_step, loss_of, parallel, seed
from megatron.core import parallel_state
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import (
    Flat,
    Placements,
    fully_shard,
    fully_shard_optimizer,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed import DeviceMesh

from combined_1f1b import host
from combined_1f1b.host import Step

FP32 = {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}


def shard(model: torch.nn.Module, device: torch.device) -> None:
    """Experts on the mesh of their replicas, then every layer, then what is left, as MFSDP's own partition does."""
    dense = DeviceMesh.from_group(parallel_state.get_data_parallel_group(), device.type)
    experts = DeviceMesh.from_group(parallel_state.get_expert_data_parallel_group(), device.type)
    placements = Placements(dp_axes=[0], parameter=[Flat()], gradient=[Flat()], optimizer=[Flat()])
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    for layer in layers:
        fully_shard(layer.mlp.experts, experts, placements)
    for layer in layers:
        fully_shard(layer, dense, placements)
    fully_shard(model, dense, placements)


def average_over_replicas(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        dense = getattr(parameter, "allreduce", True)
        group = parallel_state.get_data_parallel_group() if dense else parallel_state.get_expert_data_parallel_group()
        torch.distributed.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()


def losses(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, after_backward: Callable[[], None]
) -> torch.Tensor:
    """Losses [step] of the same micro-batch at every step."""
    seed(3)
    results = []
    for _ in range(3):
        output, _ = forward_step(batches(1), model)
        loss, _ = loss_of(output)
        loss.backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    return torch.stack(results)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_sharded_steps_equal_replicated_steps(device, expert_parallel):
    with parallel(expert_model_parallel_size=expert_parallel):
        plain = build(expert_model_parallel_size=expert_parallel, **FP32)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        expected = losses(plain, optimizer, lambda: average_over_replicas(plain))

        sharded = build(expert_model_parallel_size=expert_parallel, **FP32)
        shard(sharded, device)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        fully_shard_optimizer(optimizer)
        found = losses(sharded, optimizer, lambda: None)

        assert expected[-1] < expected[0]
        assert torch.equal(expected, found)


@pytest.mark.world_size(2)
def test_bf16_steps_run(device):
    with parallel(expert_model_parallel_size=2):
        model = build()
        shard(model.module, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        fully_shard_optimizer(optimizer)
        found = losses(model, optimizer, lambda: None)
        assert found[-1] < found[0]


@pytest.mark.world_size(2)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the observer belongs to the host device, this machine has a GPU")
def test_gathers_and_reductions_use_streams_of_their_own(device):
    with parallel(expert_model_parallel_size=2):
        model = build(**FP32)
        shard(model, device)
        steps = []
        with host.observing(steps.append):
            output, _ = forward_step(batches(1), model)
            loss_of(output)[0].backward()
        used = {step.stream for step in steps if step.step is Step.STREAM_SWITCHED}
        assert {model.context.allgather_stream, model.context.reduce_scatter_stream} < used
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
