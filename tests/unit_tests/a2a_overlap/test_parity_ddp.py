"""Parity under Megatron's DistributedDataParallel, which counts on one gradient per parameter and micro-batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from host_models import build, config_of, differing, parallel, seed
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from parity_testing import EXPERT_SIZE, Training, assert_same, run, set_flag

import combined_1f1b

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped reduction": {"overlap_grad_reduce": True},
    "fp32 gradients": {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True},
    "distributed optimizer": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "overlapped gather": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied, multi-token prediction": {"share_embeddings_and_output_weights": True, "mtp_num_layers": 1},
}


@pytest.fixture(autouse=True)
def installed(device):
    if torch.distributed.get_backend() == "gloo" and device.type == "cuda":
        pytest.skip("gloo has no coalesced all-reduce for CUDA tensors, which the wrapper needs: run one rank per GPU")
    with combined_1f1b.install(), parallel(expert_model_parallel_size=EXPERT_SIZE):
        yield


def train_ddp(
    *, flags: tuple[bool, ...], settings: dict[str, Any], force_all_reduce: bool = False, **changes: Any
) -> Training:
    """Steps of Megatron's own Adam on a model in DistributedDataParallel; `flags` is the overlap flag of each step."""
    module = build(expert_model_parallel_size=EXPERT_SIZE, **changes)
    config = config_of(module)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(bucket_size=400, **settings), module)
    config.no_sync_func = model.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    if settings.get("overlap_param_gather"):
        config.param_sync_func = model.start_param_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=bool(settings.get("use_distributed_optimizer")),
            overlap_param_gather=bool(settings.get("overlap_param_gather")),
        ),
        [model],
    )
    result = Training()
    for number, combined in enumerate(flags):
        set_flag(model, combined)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        seed(3 + number)
        reports = run(model, force_all_reduce=force_all_reduce)
        result.losses += [report["loss"] for report in reports]
        result.gradients.append({name: p.main_grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    if settings.get("overlap_param_gather"):
        model.disable_forward_pre_hook()  # gathers what the last step left to the next forward
    result.parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return result


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_parameters(name, model):
    train_case = partial(train_ddp, settings=CASES[name], **MODELS[model])
    assert_same(train_case(flags=(False, False)), train_case(flags=(True, True)))
    assert combined_1f1b.last_step().forward_backward_pairs == 2


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", ["overlapped reduction", "distributed optimizer"])
def test_two_expert_groups(name):
    train_case = partial(train_ddp, settings=CASES[name], **MODELS["tied, multi-token prediction"])
    assert_same(train_case(flags=(False, False)), train_case(flags=(True, True)))


@pytest.mark.world_size(2)
def test_switching_schedules_between_steps_still_reduces():
    settings = CASES["overlapped reduction"]
    tied = MODELS["tied, multi-token prediction"]
    reference = train_ddp(flags=(False, False, False), settings=settings, **tied)
    assert_same(reference, train_ddp(flags=(True, False, True), settings=settings, **tied))
    assert_same(reference, train_ddp(flags=(False, True, False), settings=settings, **tied))


@pytest.mark.world_size(2)
def test_forced_all_reduce_gives_every_rank_the_whole_gradient():
    settings = {"use_distributed_optimizer": True, "overlap_grad_reduce": False}
    train_case = partial(train_ddp, settings=settings, force_all_reduce=True)
    reference, ours = train_case(flags=(False,)), train_case(flags=(True,))
    assert_same(reference, ours)
    dense = ours.gradients[0]["module.module.output_layer.weight"]
    others = [torch.empty_like(dense) for _ in range(2)]
    torch.distributed.all_gather(others, dense)
    assert torch.equal(*others)


@pytest.mark.world_size(2)
def test_a_second_firing_of_the_hooks_would_be_seen(monkeypatch):
    """Mutation: without holding the tied weight's contributions together, its hook fires several times."""
    monkeypatch.setattr("combined_1f1b.schedule.step.Step._needs_shared_weights", lambda self: False)
    settings = CASES["overlapped reduction"]
    tied = MODELS["tied, multi-token prediction"]
    reference = train_ddp(flags=(False,), settings=settings, **tied)
    try:
        ours = train_ddp(flags=(True,), settings=settings, **tied)
    except (AssertionError, KeyError, RuntimeError):
        return  # the wrapper itself noticed
    weight = "module.module.embedding.word_embeddings.weight"
    assert weight in differing(reference.gradients[0], ours.gradients[0])
