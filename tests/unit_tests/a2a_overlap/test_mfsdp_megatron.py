"""Sharded models against Megatron's own data parallelism: its scaling, its finalisation and its default schedule."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from sharding_testing import BATCH, SEQUENCE, batches, build, differing, drive, loss_of, parallel, shard

TENSOR_PARALLEL = {"vocabulary": 38, "sequence_parallel": True, "expert_tensor_parallel_size": 1, "qk_layernorm": True}


def sequence_parallel_norm(
    kind: type, config: object, hidden_size: int, eps: float = 1.0e-5, **unused: object
) -> object:
    """What Transformer Engine's norm is to Megatron under sequence parallelism: its weight is marked."""
    norm = torch.nn.RMSNorm(hidden_size, eps)
    norm.weight.sequence_parallel = config.sequence_parallel
    return norm


def ddp_gradients(model: torch.nn.Module, data: list) -> dict[str, torch.Tensor]:
    """The gradients that Megatron-DDP gives for the same batches, one micro-batch."""
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    ddp.zero_grad_buffer()
    (batch,) = data
    loss_of(ddp, batch).backward()
    finalize_model_grads([ddp], None)
    return {name: parameter.main_grad for name, parameter in model.named_parameters()}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("per_token", [False, True])
def test_one_micro_batch_has_the_gradients_of_megatron_ddp_bitwise(device, per_token):
    with parallel(expert_model_parallel_size=2):
        data = batches(1)
        wrapped = shard(build(calculate_per_token_loss=per_token))
        drive(wrapped, data)
        finalize_model_grads([wrapped], None)
        expected = ddp_gradients(build(calculate_per_token_loss=per_token), data)
        assert differing(wrapped.full_gradients(), expected) == set()


@pytest.mark.world_size(4)
@pytest.mark.parametrize("per_token", [False, True])
def test_with_tensor_and_sequence_parallelism_too(device, monkeypatch, per_token):
    # Torch's norm refuses sequence parallelism only because nobody marks its weight.
    monkeypatch.setattr(WrappedTorchNorm, "__new__", sequence_parallel_norm)
    changes = {**TENSOR_PARALLEL, "calculate_per_token_loss": per_token}
    with parallel(tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1):
        assert parallel_state.get_expert_data_parallel_world_size() == 2
        data = batches(1)
        wrapped = shard(build(**changes))
        drive(wrapped, data)
        before = wrapped.full_gradients()
        finalize_model_grads([wrapped], None)
        gradients = wrapped.full_gradients()
        finalised = differing(gradients, before)
        assert finalised
        assert all("norm" in name or "router" in name for name in finalised)
        assert differing(gradients, ddp_gradients(build(**changes), data)) == set()


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("register_hooks", [False, True])
def test_megatron_s_default_schedule_trains_hooks_and_evaluates_both(device, register_hooks):
    def forward_step(iterator, model):
        return loss_of(model, next(iterator)), partial(lambda loss: (loss, {"loss": loss.detach()}))

    def run(model, *, forward_only):
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches(2)),
            model=[model],
            num_microbatches=2,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )
        return [result["loss"] for result in results]

    with parallel(expert_model_parallel_size=torch.distributed.get_world_size()):
        plain, wrapped = build(), shard(build(), register_hooks=register_hooks)
        for model in (plain, wrapped):
            model.config.finalize_model_grads_func = None if model is plain else finalize_model_grads
            model.eval()
        wrapped.config.no_sync_func = wrapped.no_sync
        with torch.no_grad():
            losses = run(plain, forward_only=True)
            assert torch.equal(torch.stack(run(wrapped, forward_only=True)), torch.stack(losses))
        if register_hooks:
            wrapped.train()
            assert torch.equal(torch.stack(run(wrapped, forward_only=False)), torch.stack(losses))
            by_hand = shard(build())
            # Megatron divides each loss by the number of micro-batches, here a power of two.
            drive(by_hand, batches(2))
            halves = {name: gradient / 2 for name, gradient in by_hand.full_gradients().items()}
            assert differing(wrapped.full_gradients(), halves) == set()
            assert wrapped.gathered_units() == ()


@pytest.mark.world_size(2)
def test_hooks_run_under_a_pipeline_that_releases_its_outputs(device):
    def forward_step(iterator, model):
        batch = next(iterator)
        positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        output = model(batch["tokens"], positions, mask, labels=batch["labels"])
        return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    with parallel(pipeline_model_parallel_size=2):
        ends = {"pre": parallel_state.is_pipeline_first_stage(), "post": parallel_state.is_pipeline_last_stage()}
        stage = partial(build, num_layers=4, moe_layer_freq=[1, 0, 1, 0], pipeline_model_parallel_size=2, **ends)
        plain = stage(deallocate_pipeline_outputs=True)
        wrapped = shard(stage(deallocate_pipeline_outputs=True), register_hooks=True)
        losses = []
        for model in (plain, wrapped):
            results = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches(4)),
                model=[model],
                num_microbatches=4,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
                forward_only=False,
            )
            losses.append([result["loss"] for result in results])
        assert losses[0] == losses[1]
        assert len(losses[0]) == 4 * ends["post"]
        gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
        assert differing(wrapped.full_gradients(), gradients) == set()
