"""The MFSDP v2 driver, driven by hand: bitwise against plain training without sharding, and its resting state."""

from __future__ import annotations

import pytest
import torch
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


@pytest.mark.world_size(1, 2, 4)
@pytest.mark.parametrize("expert_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_training_equals_plain_training_bitwise(device, name, expert_ranks):
    ranks = torch.distributed.get_world_size()
    if expert_ranks > ranks:
        pytest.skip(f"{expert_ranks} expert-parallel ranks need as many ranks, this run has {ranks}")
    make_optimizer = adamw if "fp" in name else sgd
    with parallel(expert_model_parallel_size=expert_ranks):
        plain_model, model = build(**CASES[name]), build(**CASES[name])
        wrapped = shard(model)
        optimizer = prepare_optimizer(make_optimizer(wrapped.parameters()), wrapped)
        plain = PlainReference(plain_model, make_optimizer, like=wrapped if ranks > 2 else None)
        assert differing(wrapped.full_parameters(), {n: t.detach() for n, t in plain.main.items()}) == set()
        for step in range(3):
            optimizer.zero_grad()
            data = batches(2, offset=step)
            losses, plain_losses = drive(wrapped, data), plain.iterate(data)
            assert torch.equal(torch.stack(losses), torch.stack(plain_losses))
            assert differing(wrapped.full_gradients(), plain.gradients()) == set()
            optimizer.step()
            plain.step()
            assert differing(wrapped.full_parameters(), {n: t.detach() for n, t in plain.main.items()}) == set()
