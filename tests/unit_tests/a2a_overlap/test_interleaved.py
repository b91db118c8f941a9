"""Pipelines with virtual stages: bitwise parity with Megatron's interleaved schedules, on 2 and 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_models import parallel
from pipeline_testing import Stages, assert_same_run, train

import combined_1f1b

CASES: dict[str, dict[str, Any]] = {
    "one layer each": {},
    "two layers each": {"num_layers": 8},
    "dense last": {"moe_layer_freq": [1, 1, 1, 0]},
    "tied": {"share_embeddings_and_output_weights": True},
    "delayed weight gradients": {"delay_wgrad_compute": True, "overlap_moe_expert_parallel_comm": True},
}


@pytest.fixture(autouse=True)
def installed(device):
    with combined_1f1b.install():
        yield


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_two_ranks_of_two_chunks(changes):
    experts = torch.distributed.get_world_size() // 2
    with parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, expert_model_parallel_size=experts
    ):
        stages = Stages(pp=2, vpp=2, changes=changes)
        reference = train(stages, combined=False)
        assert_same_run(reference, train(stages, combined=True))
        assert combined_1f1b.last_step().forward_backward_pairs > 0
