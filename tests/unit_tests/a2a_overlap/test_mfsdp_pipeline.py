"""The schedule driving MFSDP v2 over pipeline stages gives the bits of hook-driven MFSDP under Megatron's schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_models import differing
from megatron.core import parallel_state
from mfsdp_pipeline_testing import build_chunks, evaluate, named, optimizer_of, run, shard, train, two_stages
from parity_testing import FP32

import combined_1f1b

TIED = {"share_embeddings_and_output_weights": True}
CASES: dict[str, dict[str, Any]] = {
    "vpp, tied": {"vpp": 2, "ep": 2, **TIED},
    "vpp, multi-token prediction, tied": {"vpp": 2, "ep": 2, "mtp_num_layers": 1, **TIED},
    "vpp, dense last, no expert parallelism": {"vpp": 2, "ep": 1, "moe_layer_freq": [1, 1, 1, 0]},
    "tied, loss per token, no expert parallelism": {"vpp": 1, "ep": 1, "calculate_per_token_loss": True, **TIED},
    "multi-token prediction": {"vpp": 1, "ep": 2, "mtp_num_layers": 1},
    "dense first, shared experts": {
        "vpp": 1, "ep": 2, "moe_layer_freq": [0, 1, 1, 1], "moe_shared_expert_intermediate_size": 16,
    },
}  # fmt: skip
CASES_OF_ONE_DATA_PARALLEL_RANK: dict[str, dict[str, Any]] = {
    "vpp, frozen tied embedding": {"vpp": 2, "frozen": "word_embeddings.weight", "mtp_num_layers": 1},
    "vpp, delayed weight gradients": {"vpp": 2, "delayed": True},
    "delayed weight gradients, tied": {"vpp": 1, "delayed": True, **TIED},
}


@pytest.fixture(autouse=True)
def installed(device):
    with combined_1f1b.install():
        yield


def assert_parity(*, vpp: int, ep: int = 1, delayed: bool = False, **case: Any) -> None:
    """Train both ways, ours with evaluations, one call of prepare_optimizer per chunk and Megatron's no_sync."""
    delay = {"delay_wgrad_compute": True, "overlap_moe_expert_parallel_comm": True} if delayed else {}
    with two_stages(vpp=vpp, ep=ep):
        reference = train(shard(build_chunks(vpp=vpp, **case), combined=False))
        wrapped = shard(build_chunks(vpp=vpp, **case, **delay), combined=True, no_sync=True)
        ours = train(wrapped, per_chunk=True)
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        assert len(reference.losses) == 8 * is_last
    assert reference.losses == ours.losses
    for step, our_step in zip(reference.gradients, ours.gradients, strict=True):
        assert differing(step, our_step) == set()
    assert differing(reference.parameters, ours.parameters) == set()
    report = combined_1f1b.last_step()
    assert report.sharded
    assert report.forward_backward_pairs > 0


@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_gradients_and_parameters_are_those_of_hook_driven_mfsdp(case):
    assert_parity(**case)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", CASES_OF_ONE_DATA_PARALLEL_RANK.values(), ids=CASES_OF_ONE_DATA_PARALLEL_RANK)
def test_where_each_stage_is_one_rank_too(case):
    assert_parity(**case)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("vpp", [2, 1])
def test_evaluation_between_steps_changes_nothing_and_gives_the_same_losses(vpp):
    with two_stages(vpp=vpp, ep=2):
        wrapped = shard(build_chunks(vpp=vpp, **TIED), combined=True)
        optimizer = optimizer_of(wrapped)
        for _ in range(2):
            before = named(wrapped, "full_parameters")
            evaluated = evaluate(wrapped)
            assert not any(one.gathered_units() for one in wrapped)
            assert differing(before, named(wrapped, "full_parameters")) == set()
            assert evaluated == run(wrapped)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.world_size(2)
def test_states_of_all_chunks_are_those_of_the_unsharded_model_and_load_again():
    with two_stages(vpp=2):
        plain = [chunk.state_dict() for chunk in build_chunks(vpp=2, **FP32, **TIED)]
        wrapped = shard(build_chunks(vpp=2, **FP32, **TIED), combined=True)
        states = [one.state_dict() for one in wrapped]
        for state, expected in zip(states, plain, strict=True):
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[k], v) for k, v in expected.items() if isinstance(v, torch.Tensor))
        optimizer = optimizer_of(wrapped)
        losses = run(wrapped)
        optimizer.step()
        for one, state in zip(wrapped, states, strict=True):
            one.zero_grad_buffer()
            one.load_state_dict(state)
        assert run(wrapped) == losses
