"""Megatron's data-parallel wrapper and optimizers on the host device: both schedules train to the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_models import build, config_of, differing, iteration, parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

DDP_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped reduction": {"overlap_grad_reduce": True},
    "distributed optimizer": {"use_distributed_optimizer": True},
    "distributed optimizer, overlapped both ways": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "fp32 gradients": {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True},
}


def train(*, combined: bool, steps: int = 2, optimizer: str = "adam", ddp: dict[str, Any], **changes: Any) -> Any:
    """Losses [step, micro-batch] and parameters after some optimizer steps of a freshly built model."""
    model = build(**changes)
    config = config_of(model)
    ddp_config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": False, **ddp})
    wrapped = DistributedDataParallel(config=config, ddp_config=ddp_config, module=model)
    stepper = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=optimizer,
            lr=1e-2,
            bf16=config.bf16,
            fp16=config.fp16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=ddp_config.use_distributed_optimizer,
            overlap_param_gather=ddp_config.overlap_param_gather,
            clip_grad=1.0,
            initial_loss_scale=2.0**10,
        ),
        [wrapped],
    )
    config.grad_scale_func = stepper.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = wrapped.no_sync
    losses = []
    for _ in range(steps):
        wrapped.zero_grad_buffer()
        stepper.zero_grad()
        losses.append(torch.stack(iteration(wrapped, combined=combined)))
        succeeded, norm, _ = stepper.step()
        assert succeeded
        assert norm > 0
    if ddp_config.overlap_param_gather:
        wrapped.start_param_sync(force_sync=True)
    return torch.stack(losses), {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", DDP_CASES)
def test_both_schedules_train_to_the_same_parameters(device, case):
    with parallel(expert_model_parallel_size=2):
        losses, parameters = train(combined=False, ddp=DDP_CASES[case])
        assert losses[1].mean() < losses[0].mean()
        combined_losses, combined_parameters = train(combined=True, ddp=DDP_CASES[case])
        assert torch.equal(losses, combined_losses)
        assert differing(parameters, combined_parameters) == set()


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "precision",
    [
        {"bf16": False, "fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16},
        {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32},
    ],
    ids=["fp16", "fp32"],
)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_other_precisions_and_optimizers(device, precision, optimizer):
    with parallel(expert_model_parallel_size=2):
        losses, _ = train(combined=False, ddp={}, optimizer=optimizer, **precision)
        assert losses.isfinite().all()
        assert losses[1].mean() < losses[0].mean()


@pytest.mark.world_size(4)
def test_experts_replicated_over_data_parallel_ranks(device):
    ddp = DDP_CASES["distributed optimizer, overlapped both ways"]
    with parallel(expert_model_parallel_size=2):
        losses, parameters = train(combined=False, ddp=ddp)
        combined_losses, combined_parameters = train(combined=True, ddp=ddp)
        assert torch.equal(losses, combined_losses)
        assert differing(parameters, combined_parameters) == set()
