"""Pairing of the first two forwards and of the last two backwards: the same bits, and the pairs really ran."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from host_models import parallel
from parity_testing import EXPERT_SIZE, assert_same, train
from test_parity_ddp import train_ddp
from test_parity_mfsdp import assert_same_sharded, train_sharded

import combined_1f1b

CASES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "drop and pad": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "odd, dense last": {"num_layers": 3, "moe_layer_freq": [1, 1, 0]},
    "dense first": {"num_layers": 3, "moe_layer_freq": [0, 1, 1]},
    "one layer": {"num_layers": 1},
    "tied": {"share_embeddings_and_output_weights": True},
    "multi-token prediction, tied": {"mtp_num_layers": 1, "share_embeddings_and_output_weights": True},
    "multi-token prediction": {"mtp_num_layers": 1},
    "shared experts": {"moe_shared_expert_intermediate_size": 16},
    "auxiliary loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
}


@pytest.fixture(autouse=True)
def installed(device):
    options = combined_1f1b.OverlapOptions(pair_head_and_tail=True)
    with combined_1f1b.install(options), parallel(expert_model_parallel_size=EXPERT_SIZE):
        yield


def assert_pairs(num_microbatches: int, *, head: bool = True) -> None:
    report = combined_1f1b.last_step()
    paired = int(num_microbatches >= 2)
    assert (report.forward_backward_pairs, report.head_pairs, report.tail_pairs) == (
        max(0, num_microbatches - 2),
        paired * head,
        paired,
    )


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", CASES)
def test_unsharded(name):
    assert_same(
        train(combined=False, num_microbatches=4, **CASES[name]),
        train(combined=True, num_microbatches=4, **CASES[name]),
    )
    assert_pairs(4)


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_numbers_of_microbatches(count):
    assert_same(train(combined=False, num_microbatches=count), train(combined=True, num_microbatches=count))
    assert_pairs(count)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_dropout": 0.1},
        {"attention_dropout": 0.1},
        {"moe_input_jitter_eps": 0.1},
        {"moe_router_force_biased": 0.5},
    ],
)
def test_forwards_that_draw_random_numbers_are_not_interleaved(changes):
    assert_same(
        train(combined=False, num_microbatches=4, **changes), train(combined=True, num_microbatches=4, **changes)
    )
    assert combined_1f1b.last_step().head_pairs == 0
    assert combined_1f1b.last_step().tail_pairs == 1


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "settings", [{}, {"overlap_grad_reduce": True}, {"use_distributed_optimizer": True, "overlap_grad_reduce": True}]
)
@pytest.mark.parametrize("name", ["dropless", "multi-token prediction, tied"])
def test_data_parallel_wrapper(device, name, settings):
    if torch.distributed.get_backend() == "gloo" and device.type == "cuda":
        pytest.skip("gloo has no coalesced all-reduce for CUDA tensors, which the wrapper needs: run one rank per GPU")
    runs = [train_ddp(flags=flags, settings=settings, **CASES[name]) for flags in ((False, False), (True, True))]
    assert_same(*runs)
    assert_pairs(3)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", CASES)
def test_sharded(name):
    assert_same_sharded(*(train_sharded(combined=combined, **CASES[name]) for combined in (False, True)))
    assert_pairs(4)


@pytest.mark.world_size(2)
def test_early_gradients_of_a_tied_weight_are_held(monkeypatch):
    """Mutation: without keeping them apart, the last backward's early gradients join the reduction before."""
    monkeypatch.setattr("combined_1f1b.schedule.step.Step._gradients_kept_apart", lambda self, index: nullcontext())
    with pytest.raises(AssertionError):
        assert_same_sharded(*(train_sharded(combined=combined, **CASES["tied"]) for combined in (False, True)))


@pytest.mark.world_size(2)
def test_module_state_is_swapped_between_the_two_forwards(monkeypatch):
    """Mutation: with one set of dispatcher state for both, the interleaved forwards go wrong."""
    from combined_1f1b.schedule.module_state import LayerModuleState

    monkeypatch.setattr(LayerModuleState, "activate", lambda self, microbatch: None)
    reference = train(combined=False, num_microbatches=2)
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):
        assert_same(reference, train(combined=True, num_microbatches=2))
