"""prepare_optimizer: hooks once, and a step that would leave something behind is refused with its name."""

from __future__ import annotations

import pytest
import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from sharding_testing import adamw, batches, build, differing, drive, freeze, parallel, sgd, shard

from combined_1f1b.errors import ConfigError
from combined_1f1b.fsdp_adapter import mfsdp_v2
from combined_1f1b.fsdp_adapter.data_parallel import prepare_optimizer


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_compute_weights_follow_the_step(device, make_optimizer):
    with parallel():
        wrapped = shard(build(dtype="bf16"))
        optimizer = prepare_optimizer(make_optimizer(wrapped.parameters()), wrapped)
        drive(wrapped, batches(1))
        optimizer.step()
        full = wrapped.full_parameters()
        driver = wrapped.sharding_driver()
        with driver.gathered():
            for prefix, group in wrapped.named_groups:
                for name, parameter in zip(group.parameter_names, group.unsharded_parameters, strict=True):
                    assert parameter.dtype == torch.bfloat16
                    assert torch.equal(parameter, full[prefix + name].bfloat16()), name


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_one_optimizer_steps_dense_and_expert_meshes_together(device, implementation):
    with parallel(expert_model_parallel_size=torch.distributed.get_world_size()):
        results = []
        for arguments in ({"foreach": False}, {implementation: True}):
            wrapped = shard(build())
            optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.02, **arguments)
            prepare_optimizer(optimizer, wrapped)
            for step in range(2):
                optimizer.zero_grad()
                drive(wrapped, batches(1, offset=step))
                optimizer.step()
            results.append(wrapped.full_parameters())
        # The fused kernel rounds in other places than the plain operators; weights here are around one.
        tolerance = 1.0e-5 if implementation == "fused" else 0.0
        for name, parameter in results[0].items():
            torch.testing.assert_close(results[1][name], parameter, rtol=0.0, atol=tolerance, msg=name)


@pytest.mark.world_size(2, on_gpu=1)
def test_gradients_of_another_type_are_cast_for_the_step_and_put_back(device):
    with parallel():
        policy = mfsdp_v2.MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.bfloat16)
        wrapped = shard(build(dtype="bf16"), mixed_precision=policy)
        optimizer = prepare_optimizer(sgd(wrapped.parameters()), wrapped)
        drive(wrapped, batches(2))
        before, gradients = wrapped.full_parameters(), wrapped.full_gradients()
        optimizer.step()
        assert {gradient.dtype for gradient in gradients.values()} == {torch.bfloat16}
        assert differing(wrapped.full_gradients(), gradients) == set()
        expected = {name: before[name] - 0.5 * gradient.float() for name, gradient in gradients.items()}
        assert differing(wrapped.full_parameters(), expected) == set()


@pytest.mark.world_size(1)
def test_a_step_without_gradients_is_refused_with_the_parameter_s_name(device):
    with parallel():
        wrapped = shard(build())
        optimizer = prepare_optimizer(sgd(wrapped.parameters()), wrapped)
        with pytest.raises(ConfigError, match=r"step.*embedding\.word_embeddings\.weight has no gradient"):
            optimizer.step()
        drive(wrapped, batches(1))
        dict(wrapped.named_sharded_parameters())["output_layer.weight"].grad = None
        before = wrapped.full_parameters()
        with pytest.raises(ConfigError, match=r"output_layer\.weight"):
            optimizer.step()
        assert differing(wrapped.full_parameters(), before) == set()


@pytest.mark.world_size(1)
def test_a_step_with_a_gathered_unit_is_refused(device):
    with parallel():
        wrapped = shard(build())
        optimizer = prepare_optimizer(sgd(wrapped.parameters()), wrapped)
        drive(wrapped, batches(1))
        with wrapped.sharding_driver().gathered("L1"), pytest.raises(ConfigError, match="L1"):
            optimizer.step()
        optimizer.step()


@pytest.mark.world_size(2, on_gpu=1)
def test_frozen_parameters_need_no_gradient_and_keep_their_values(device):
    with parallel():
        wrapped = shard(freeze(build(), "decoder.layers.0."))
        assert "L0" not in wrapped.sharding_driver().trainable_units
        assert "L0" in wrapped.sharding_driver().units
        optimizer = prepare_optimizer(adamw(wrapped.parameters()), wrapped)
        before = wrapped.full_parameters()
        drive(wrapped, batches(1))
        optimizer.step()
        changed = differing(wrapped.full_parameters(), before)
        assert changed == {name for name in before if not name.startswith("decoder.layers.0.")}


@pytest.mark.world_size(1)
def test_what_is_no_torch_optimizer_over_sharded_parameters_is_refused(device):
    with parallel():
        model = build()
        early = sgd(model.parameters())
        wrapped = shard(model)
        with pytest.raises(ConfigError, match="before the model was sharded"):
            prepare_optimizer(early, wrapped)
        with pytest.raises(ConfigError, match=r"ChainedOptimizer.*Megatron-DDP"):
            prepare_optimizer(ChainedOptimizer([]), wrapped)
        with pytest.raises(ConfigError, match="not a torch"):
            prepare_optimizer(object(), wrapped)
        with pytest.raises(ConfigError, match="not a sharded model"):
            prepare_optimizer(sgd(wrapped.parameters()), model)
        unrelated = sgd([torch.nn.Parameter(torch.ones(1))])
        with pytest.raises(ConfigError, match="holds none of the"):
            prepare_optimizer(unrelated, wrapped)
        assert not unrelated._optimizer_step_pre_hooks


@pytest.mark.world_size(1)
def test_an_optimizer_must_hold_parameters_of_every_wrapper_that_has_any_to_train(device):
    with parallel():
        frozen = shard(freeze(build(), ""))
        first, second = shard(build()), shard(build())
        optimizer = sgd(first.parameters())
        with pytest.raises(ConfigError, match="holds none of the"):
            prepare_optimizer(optimizer, [first, second])
        prepare_optimizer(optimizer, [first, frozen])
