"""The gradient norm and clipping against the same numbers computed from full tensors gathered on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from sharding_testing import PlainReference, batches, build, drive, hooked, loss_of, parallel, sgd, shard

from combined_1f1b.errors import ConfigError
from combined_1f1b.fsdp_adapter.grad_norm import clip_grad_norm_, grad_norm
from combined_1f1b.fsdp_adapter.units import innermost


def full_norm(gradients: dict[str, torch.Tensor], is_expert: dict[str, bool]) -> torch.Tensor:
    """The norm from full tensors: dense ones once, each expert-parallel rank's experts once, in double precision."""
    total = sum(gradient.double().square().sum() for name, gradient in gradients.items() if not is_expert[name])
    experts = sum(gradient.double().square().sum() for name, gradient in gradients.items() if is_expert[name])
    experts = torch.as_tensor(experts, dtype=torch.float64)
    dist.all_reduce(experts, group=parallel_state.get_expert_model_parallel_group())
    return (total + experts).sqrt().float()


def expert_names(model: torch.nn.Module) -> dict[str, bool]:
    named = innermost(model).named_parameters()
    return {name: not getattr(parameter, "allreduce", True) for name, parameter in named}


def expert_layouts() -> list[int]:
    return [size for size in (1, 2, 4) if size <= dist.get_world_size()]


@pytest.mark.world_size(1, 2, 4)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sharded_and_plain_models_have_the_norm_of_the_full_tensors(device, dtype):
    for expert_ranks in expert_layouts():
        with parallel(expert_model_parallel_size=expert_ranks):
            model = build(dtype=dtype)
            is_expert = expert_names(model)
            assert any(is_expert.values()) == (expert_ranks > 1)
            wrapped, config = shard(model), innermost(model).config
            plain = PlainReference(build(dtype=dtype), sgd, like=wrapped)
            data = batches(2)
            drive(wrapped, data)
            plain.iterate(data)
            expected = full_norm(wrapped.full_gradients(), is_expert)
            for name, main in plain.main.items():
                main.allreduce = not is_expert[name]
            assert torch.equal(grad_norm(wrapped, config), expected)
            assert torch.equal(grad_norm([wrapped], config), expected)
            assert torch.equal(grad_norm(wrapped.parameters(), config), expected)
            assert torch.equal(grad_norm(plain.main.values(), config), expected)


@pytest.mark.world_size(1, 2)
def test_both_partitions_clip_to_the_same_bits(device):
    with parallel(expert_model_parallel_size=dist.get_world_size()):
        driven, by_hooks = shard(build()), shard(build(), register_hooks=True)
        config = innermost(driven).config
        data = batches(2)
        drive(driven, data)
        hooked(by_hooks, data)
        before = driven.full_gradients()
        norms = [clip_grad_norm_(wrapped, 0.01, config) for wrapped in (driven, by_hooks)]
        assert torch.equal(norms[0], norms[1])
        assert norms[0] > 0.01
        clipped = [wrapped.full_gradients() for wrapped in (driven, by_hooks)]
        coefficient = 0.01 / (norms[0] + 1.0e-6)
        for name, gradient in before.items():
            assert torch.equal(clipped[0][name], gradient * coefficient)
            assert torch.equal(clipped[1][name], gradient * coefficient)


@pytest.mark.world_size(1, 2)
def test_small_gradients_keep_their_bits(device):
    with parallel():
        wrapped = shard(build())
        drive(wrapped, batches(1))
        before = wrapped.full_gradients()
        clip_grad_norm_(wrapped, float("inf"), innermost(wrapped).config)
        assert all(torch.equal(before[name], gradient) for name, gradient in wrapped.full_gradients().items())


@pytest.mark.world_size(2)
def test_parameters_replicated_over_tensor_parallel_ranks_count_once(device):
    with parallel(tensor_model_parallel_size=2):
        model = build(vocabulary=38, moe_layer_freq=[0, 0, 0])
        loss_of(model, batches(1, offset=9)[0]).backward()
        norm = grad_norm(model, model.config)
        halves, whole = [], []
        for parameter in model.parameters():
            (halves if getattr(parameter, "tensor_model_parallel", False) else whole).append(
                parameter.grad.double().square().sum()
            )
        assert halves
        assert whole
        total = sum(halves)
        dist.all_reduce(total)
        assert torch.equal(norm, (total + sum(whole)).sqrt().float())


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("is_distributed", [False, True])
def test_a_model_with_shards_of_reduced_gradients_is_refused(device, is_distributed):
    """Otherwise every rank would count its unreduced gradients of the other ranks' shards."""
    with parallel():
        settings = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed)
        plain, model = build(), build()
        ddp = DistributedDataParallel(model.config, settings, model)
        for batch in batches(1):
            loss_of(ddp, batch).backward()
            loss_of(plain, batch).backward()
        ddp.finish_grad_sync()
        if is_distributed:
            for call in (lambda: grad_norm(ddp, model.config), lambda: clip_grad_norm_([ddp], 1.0, model.config)):
                with pytest.raises(ConfigError, match=r"use_distributed_optimizer=True.*own shard"):
                    call()
        else:
            for parameter in plain.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            assert torch.equal(grad_norm(ddp, model.config), grad_norm(plain, model.config))


@pytest.mark.world_size(1)
@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_norm_that_is_not_positive_is_refused(device, max_norm):
    with parallel():
        model = build()
        with pytest.raises(ConfigError, match="max_norm"):
            clip_grad_norm_(model, max_norm, model.config)
