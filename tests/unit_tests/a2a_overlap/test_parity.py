"""Bitwise parity of this package's schedule with Megatron's default schedule: losses and every gradient."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from host_models import build, differing, iteration, parallel, take_gradients

import combined_1f1b

FP16 = {"bf16": False, "fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}
FP32 = {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}
EXPERT_SIZE = min(2, int(os.environ.get("WORLD_SIZE", "1")))
CASES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "tied": {"share_embeddings_and_output_weights": True},
    "mtp": {"mtp_num_layers": 1},
    "mtp tied": {"mtp_num_layers": 1, "share_embeddings_and_output_weights": True},
    "dense last": {"num_layers": 3, "moe_layer_freq": [1, 1, 0]},
}


@pytest.fixture(autouse=True)
def installed(device):
    with combined_1f1b.install():
        yield


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_default_schedule(name):
    with parallel(expert_model_parallel_size=EXPERT_SIZE):
        model = build(expert_model_parallel_size=EXPERT_SIZE, **CASES[name])
        losses, gradients = iteration(model, combined=False), take_gradients(model)
        ours, our_gradients = iteration(model, combined=True), take_gradients(model)
        assert torch.equal(torch.stack(losses), torch.stack(ours))
        assert differing(gradients, our_gradients) == set()
        assert combined_1f1b.last_step().forward_backward_pairs == 2
