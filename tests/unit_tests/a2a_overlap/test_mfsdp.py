"""The MFSDP v2 driver, driven by hand: bitwise against plain training without sharding, and its resting state."""

from __future__ import annotations

import os

import pytest
import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.layout import GlobalLayout
from sharding_testing import PlainReference, adamw, batches, build, differing, drive, parallel, sgd, shard

from combined_1f1b.fsdp_adapter.data_parallel import prepare_optimizer

CASES = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "tied embeddings": {"tied": True},
    "multi-token prediction": {"mtp_num_layers": 1, "moe_layer_freq": [1, 1, 1]},
    "per-token loss": {"calculate_per_token_loss": True},
    "shared experts": {"moe_shared_expert_intermediate_size": 20},
    "all dense but one": {"moe_layer_freq": [0, 0, 1]},
}


# With four ranks a case takes ten times as long as with one on a small machine: the cases that differ most are enough.
AT_FOUR = [("bf16", 2), ("multi-token prediction", 4), ("per-token loss", 2), ("tied embeddings", 4)]
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
LAYOUTS = [(name, size) for name in CASES for size in (1, 2) if size <= RANKS] if RANKS < 4 else AT_FOUR


@pytest.mark.world_size(1, 2, 4)
@pytest.mark.parametrize(("name", "expert_ranks"), LAYOUTS)
def test_training_equals_plain_training_bitwise(device, name, expert_ranks):
    make_optimizer = adamw if "fp" in name else sgd
    with parallel(expert_model_parallel_size=expert_ranks):
        plain_model, model = build(**CASES[name]), build(**CASES[name])
        wrapped = shard(model)
        optimizer = prepare_optimizer(make_optimizer(wrapped.parameters()), wrapped)
        plain = PlainReference(plain_model, make_optimizer, like=wrapped if RANKS > 2 else None)
        assert differing(wrapped.full_parameters(), {n: t.detach() for n, t in plain.main.items()}) == set()
        for step in range(2):
            optimizer.zero_grad()
            data = batches(2, offset=step)
            losses, plain_losses = drive(wrapped, data), plain.iterate(data)
            assert torch.equal(torch.stack(losses), torch.stack(plain_losses))
            assert differing(wrapped.full_gradients(), plain.gradients()) == set()
            optimizer.step()
            plain.step()
            assert differing(wrapped.full_parameters(), {n: t.detach() for n, t in plain.main.items()}) == set()


@pytest.mark.world_size(2)
def test_an_iteration_computes_no_layout_of_a_buffer(device, monkeypatch):
    """MFSDP does for every reduction, which costs the host more than the ops of a layer."""
    with parallel(expert_model_parallel_size=2):
        wrapped = shard(build())
        with monkeypatch.context() as patch:
            patch.setattr(GlobalLayout, "build", None)
            drive(wrapped, batches(2))
        assert all(gradient.isfinite().all() for gradient in wrapped.full_gradients().values())
