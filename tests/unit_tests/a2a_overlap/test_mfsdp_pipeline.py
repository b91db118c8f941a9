"""The schedule driving MFSDP v2 over pipeline stages gives the bits of hook-driven MFSDP under Megatron's schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_models import config_of, differing, parallel, seed
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from pipeline_testing import Stages, run_pipeline

import combined_1f1b

LAYOUTS = {"virtual stages": 2, "one chunk a rank": 1}
CASES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "dense last": {"moe_layer_freq": [1, 1, 1, 0]},
    "tied": {"share_embeddings_and_output_weights": True},
    "multi-token prediction": {"mtp_num_layers": 1},
    "multi-token prediction, tied": {"mtp_num_layers": 1, "share_embeddings_and_output_weights": True},
    "shared experts, per-token loss": {"moe_shared_expert_intermediate_size": 16, "calculate_per_token_loss": True},
}
STEPS = 2


@pytest.fixture(autouse=True)
def installed(device):
    with combined_1f1b.install():
        yield


def experts() -> int:
    return torch.distributed.get_world_size() // 2


def two_stages(vpp: int) -> Any:
    """Groups of two pipeline stages, with as many expert ranks as there are data-parallel ranks."""
    virtual = {"virtual_pipeline_model_parallel_size": vpp} if vpp > 1 else {}
    return parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=experts(), **virtual)


def shard(chunks: list[Any], *, combined: bool, **arguments: Any) -> list[Any]:
    config = config_of(chunks)
    for chunk in chunks:
        config_of(chunk).overlap_moe_expert_parallel_comm = combined
        config_of(chunk).finalize_model_grads_func = finalize_model_grads
    return combined_1f1b.shard_model(chunks, config, **arguments)


def named(wrapped: list[Any], method: str) -> dict[str, torch.Tensor]:
    return {f"{number}.{name}": t for number, one in enumerate(wrapped) for name, t in getattr(one, method)().items()}


def train(
    vpp: int, *, combined: bool, per_chunk: bool = False, **changes: Any
) -> tuple[list[Any], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """AdamW steps on fresh chunks; losses, full gradients per step and full parameters of this rank's stages."""
    wrapped = shard(Stages(pp=2, vpp=vpp, changes={"num_layers": 4, **changes}).build(), combined=combined)
    optimizer = torch.optim.AdamW([p for one in wrapped for p in one.parameters()], lr=1e-2)
    for one in wrapped if per_chunk else [wrapped]:
        combined_1f1b.prepare_optimizer(optimizer, one)
    losses, gradients = [], []
    for number in range(STEPS):
        seed(3 + number)
        losses += [report["loss"] for report in run_pipeline(wrapped, num_microbatches=4)]
        gradients.append(named(wrapped, "full_gradients"))
        assert not any(one.gathered_units() for one in wrapped)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, named(wrapped, "full_parameters")


def assert_parity(vpp: int, **case: Any) -> None:
    (losses, gradients, parameters), ours = (train(vpp, combined=combined, **case) for combined in (False, True))
    assert len(losses) == 4 * STEPS * parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    assert losses == ours[0]
    for step, our_step in zip(gradients, ours[1], strict=True):
        assert differing(step, our_step) == set()
    assert differing(parameters, ours[2]) == set()
    report = combined_1f1b.last_step()
    assert report.sharded
    assert report.forward_backward_pairs > 0


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("vpp", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_losses_gradients_and_parameters_are_those_of_hook_driven_mfsdp(vpp, changes):
    with two_stages(vpp):
        assert_parity(vpp, per_chunk=bool(changes), **changes)
