"""Hook-driven MFSDP, the reference: equal to plain training, to the driven mode, and at rest after every backward."""

from __future__ import annotations

import pytest
import torch
from sharding_testing import (
    PlainReference,
    adamw,
    batches,
    build,
    differing,
    drive,
    freeze,
    hooked,
    loss_of,
    parallel,
    sgd,
    shard,
)

from combined_1f1b.fsdp_adapter import mfsdp_v2
from combined_1f1b.fsdp_adapter.data_parallel import prepare_optimizer

CASES = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "tied embeddings": {"tied": True},
    "multi-token prediction": {"mtp_num_layers": 1, "moe_layer_freq": [1, 1, 1]},
    "per-token loss": {"calculate_per_token_loss": True},
}


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize("name", CASES)
def test_both_modes_train_to_the_same_bits(device, name):
    ranks = torch.distributed.get_world_size()
    with parallel(expert_model_parallel_size=ranks):
        driven, by_hooks = shard(build(**CASES[name])), shard(build(**CASES[name]), register_hooks=True)
        plain = PlainReference(build(**CASES[name]), adamw)
        optimizers = [prepare_optimizer(adamw(wrapped.parameters()), wrapped) for wrapped in (driven, by_hooks)]
        for step in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            data = batches(2, offset=step)
            losses = [drive(driven, data), hooked(by_hooks, data), plain.iterate(data)]
            assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
            assert torch.equal(torch.stack(losses[0]), torch.stack(losses[2]))
            assert differing(driven.full_gradients(), by_hooks.full_gradients()) == set()
            assert differing(plain.gradients(), by_hooks.full_gradients()) == set()
            for optimizer in (*optimizers, plain):
                optimizer.step()
            assert differing(driven.full_parameters(), by_hooks.full_parameters()) == set()


@pytest.mark.world_size(2, on_gpu=1)
def test_a_parameter_that_no_backward_uses_gets_zeros_and_its_module_comes_to_rest(device):
    with parallel():
        model = build()
        model.decoder.layers[1].unused = torch.nn.Parameter(torch.ones(3, 2))
        wrapped = shard(model, register_hooks=True)
        hooked(wrapped, batches(2))
        assert torch.equal(wrapped.full_gradients()["decoder.layers.1.unused"], torch.zeros(3, 2))
        assert wrapped.gathered_units() == ()
        assert mfsdp_v2.unsharded_bytes(wrapped.groups) == 0


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize(
    "frozen", ["decoder.layers.1.", "decoder.layers.0.", "embedding.", "decoder.layers.2.mlp.experts."]
)
def test_frozen_modules_are_whole_in_their_own_backward_and_free_after_it(device, frozen):
    with parallel(expert_model_parallel_size=torch.distributed.get_world_size()):
        wrapped = shard(freeze(build(), frozen), register_hooks=True)
        plain = PlainReference(freeze(build(), frozen), sgd)
        data = batches(2)
        losses, plain_losses = hooked(wrapped, data), plain.iterate(data)
        assert torch.equal(torch.stack(losses), torch.stack(plain_losses))
        assert differing(wrapped.full_gradients(), plain.gradients()) == set()
        assert wrapped.gathered_units() == ()


@pytest.mark.world_size(2, on_gpu=1)
def test_the_reduction_stream_is_forked_once_per_backward(device, monkeypatch):
    with parallel():
        wrapped = shard(build(), register_hooks=True)
        reduction = wrapped.context.reduce_scatter_stream
        waits = []
        wait_stream = type(reduction).wait_stream
        monkeypatch.setattr(
            type(reduction),
            "wait_stream",
            lambda self, other: (waits.append((self, other)), wait_stream(self, other))[1],
        )
        loss = loss_of(wrapped, batches(1)[0])
        assert not [wait for wait in waits if wait[0] is reduction]
        loss.backward()
        reductions = sum(module._num_trainable_parameters > 0 for module in wrapped.context.forward_order)
        assert len([wait for wait in waits if wait[0] is reduction]) == 1 + reductions
        # Each reduction makes the packing stream wait once, and the end of the backward joins once.
        assert len([wait for wait in waits if wait[1] is reduction]) == 1 + reductions


@pytest.mark.world_size(4)
def test_hooks_equal_plain_training_over_their_own_buffers_with_two_expert_replicas(device):
    with parallel(expert_model_parallel_size=2):
        wrapped = shard(build(dtype="bf16"), register_hooks=True)
        plain = PlainReference(build(dtype="bf16"), adamw, like=wrapped)
        data = batches(2)
        assert torch.equal(torch.stack(hooked(wrapped, data)), torch.stack(plain.iterate(data)))
        assert differing(wrapped.full_gradients(), plain.gradients()) == set()


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_a_failed_iteration_can_be_run_again(device, moment):
    with parallel():
        wrapped, plain, data = shard(build(), register_hooks=True), PlainReference(build(), sgd), batches(2)

        def fail(*unused: object) -> None:
            raise RuntimeError("as asked")

        layer = wrapped.module.decoder.layers[1].mlp
        handle = layer.register_forward_hook(fail) if moment == "forward" else layer.register_full_backward_hook(fail)
        with pytest.raises(RuntimeError, match="as asked"):
            hooked(wrapped, data)
        handle.remove()
        wrapped.zero_grad_buffer()
        assert torch.equal(torch.stack(hooked(wrapped, data)), torch.stack(plain.iterate(data)))
        assert differing(wrapped.full_gradients(), plain.gradients()) == set()
        assert wrapped.gathered_units() == ()
