"""Pipelines without virtual stages: bitwise parity with Megatron's 1F1B, on 2 and 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_models import parallel
from pipeline_testing import Stages, assert_same_run, train

import combined_1f1b

RANKS = torch.distributed.get_world_size if torch.distributed.is_initialized() else None
CASES: dict[str, dict[str, Any]] = {
    "two layers each": {"num_layers": 4},
    "one layer each": {},
    "dense last": {"num_layers": 4, "moe_layer_freq": [1, 1, 1, 0]},
    "tied": {"share_embeddings_and_output_weights": True},
    "multi-token prediction, tied": {"mtp_num_layers": 1, "share_embeddings_and_output_weights": True},
    "shared experts": {"moe_shared_expert_intermediate_size": 16},
    "auxiliary loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
    "delayed weight gradients": {"delay_wgrad_compute": True, "overlap_moe_expert_parallel_comm": True},
    "dropout": {"hidden_dropout": 0.1},
}


@pytest.fixture(autouse=True)
def installed(device):
    with combined_1f1b.install():
        yield


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_two_stages(changes):
    with parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=torch.distributed.get_world_size() // 2):
        stages = Stages(pp=2, changes=changes)
        reference = train(stages, combined=False)
        assert_same_run(reference, train(stages, combined=True))
        assert combined_1f1b.last_step().forward_backward_pairs > 0


@pytest.mark.world_size(4)
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 9])
def test_four_stages(num_microbatches):
    with parallel(pipeline_model_parallel_size=4):
        stages = Stages(pp=4)
        reference = train(stages, combined=False, num_microbatches=num_microbatches)
        assert_same_run(reference, train(stages, combined=True, num_microbatches=num_microbatches))
