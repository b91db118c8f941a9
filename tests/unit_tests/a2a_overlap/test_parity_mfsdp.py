"""The schedule driving MFSDP v2, against hook-driven MFSDP under Megatron's default schedule: losses, gradients, parameters."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from host_models import build, config_of, differing, iteration, parallel

import combined_1f1b

STEPS = 3
EXPERT_SIZE = min(2, int(os.environ.get("WORLD_SIZE", "1")))
CASES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "tied": {"share_embeddings_and_output_weights": True},
    "mtp": {"mtp_num_layers": 1},
    "mtp tied": {"mtp_num_layers": 1, "share_embeddings_and_output_weights": True},
    "dense last, odd": {"num_layers": 3, "moe_layer_freq": [1, 1, 0]},
    "drop and pad": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "per-token loss": {"calculate_per_token_loss": True},
}


@pytest.fixture(autouse=True)
def installed(device):
    with combined_1f1b.install():
        yield


def train(
    *, combined: bool, **changes: Any
) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]], dict[str, Any]]:
    """A few AdamW steps on a fresh model sharded for one of the modes; losses, gradients per step, final parameters."""
    model = build(expert_model_parallel_size=EXPERT_SIZE, **changes)
    config = config_of(model)
    config.overlap_moe_expert_parallel_comm = combined
    wrapped = combined_1f1b.shard_model(model, config)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    combined_1f1b.prepare_optimizer(optimizer, wrapped)
    losses, gradients = [], []
    for _ in range(STEPS):
        losses += iteration(wrapped, combined=combined, num_microbatches=4)
        wrapped.finish_grad_sync()
        gradients.append(wrapped.full_gradients())
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, wrapped.full_parameters()


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_parameters_are_those_of_hook_driven_mfsdp(name):
    with parallel(expert_model_parallel_size=EXPERT_SIZE):
        losses, gradients, parameters = train(combined=False, **CASES[name])
        ours, our_gradients, our_parameters = train(combined=True, **CASES[name])
        assert torch.equal(torch.stack(losses), torch.stack(ours))
        for step, our_step in zip(gradients, our_gradients, strict=True):
            assert differing(step, our_step) == set()
        assert differing(parameters, our_parameters) == set()
        report = combined_1f1b.last_step()
        assert report.sharded
        assert report.forward_backward_pairs == 3
