"""The data-parallel wrapper: what Megatron and a training loop may do with a sharded model besides training it."""

from __future__ import annotations

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from sharding_testing import batches, build, differing, drive, hooked, loss_of, parallel, seed, sgd, shard
from torch.distributed.tensor import DTensor

from combined_1f1b.errors import ConfigError
from combined_1f1b.fsdp_adapter import mfsdp_v2
from combined_1f1b.fsdp_adapter.data_parallel import prepare_optimizer, shard_model
from combined_1f1b.fsdp_adapter.units import innermost

MODELS = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "tied embeddings": {"tied": True},
    "multi-token prediction": {"mtp_num_layers": 1, "moe_layer_freq": [1, 1, 1]},
}


def names_of(model: torch.nn.Module) -> set[str]:
    return {name for name, _ in innermost(model).named_parameters()}


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("register_hooks", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_gives_the_plain_model_s_loss_and_leaves_every_unit_free(device, name, register_hooks):
    with parallel(expert_model_parallel_size=torch.distributed.get_world_size()):
        plain, wrapped = build(**MODELS[name]).eval(), shard(build(**MODELS[name]), register_hooks=register_hooks)
        wrapped.eval()
        data = batches(2)
        for batch in data:
            with torch.no_grad():
                assert torch.equal(loss_of(wrapped, batch), loss_of(plain, batch))
            assert wrapped.gathered_units() == ()
            assert mfsdp_v2.unsharded_bytes(wrapped.groups) == 0
        wrapped.train()
        (hooked if register_hooks else drive)(wrapped, data)


@pytest.mark.world_size(1, 2)
def test_evaluation_holds_one_layer_at_a_time(device):
    with parallel():
        wrapped = shard(build(num_layers=4, moe_layer_freq=[0, 0, 0, 0])).eval()
        driver = wrapped.sharding_driver()
        seen = []
        for layer in innermost(wrapped).decoder.layers:
            layer.mlp.register_forward_hook(lambda *unused: seen.append(driver.gathered_units))
        with torch.no_grad():
            loss_of(wrapped, batches(1)[0])
        assert seen == [("L0",), ("L1",), ("L2",), ("L3",)]


@pytest.mark.world_size(1)
def test_evaluation_outside_no_grad_builds_no_graph(device):
    with parallel():
        wrapped = shard(build()).eval()
        assert not loss_of(wrapped, batches(1)[0]).requires_grad


@pytest.mark.world_size(1, 2)
def test_a_failing_evaluation_leaves_every_unit_free(device):
    with parallel():
        wrapped = shard(build()).eval()

        def fail(*unused: object) -> None:
            raise RuntimeError("as asked")

        handle = innermost(wrapped).decoder.layers[1].mlp.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="as asked"), torch.no_grad():
            loss_of(wrapped, batches(1)[0])
        handle.remove()
        assert wrapped.gathered_units() == ()
        drive(wrapped.train(), batches(1))


@pytest.mark.world_size(1)
@pytest.mark.parametrize(("register_hooks", "flag"), [(False, False), (False, True), (True, True)])
def test_training_in_the_other_mode_is_refused(device, register_hooks, flag):
    with parallel():
        wrapped = shard(build(), register_hooks=register_hooks)
        wrapped.config.overlap_moe_expert_parallel_comm = flag
        with pytest.raises(ConfigError, match=f"overlap_moe_expert_parallel_comm={flag}"):
            loss_of(wrapped, batches(1)[0])


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("register_hooks", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_state_dicts_hold_full_tensors_and_load_back(device, name, register_hooks):
    with parallel(expert_model_parallel_size=torch.distributed.get_world_size()):
        plain = build(**MODELS[name])
        wrapped = shard(build(**MODELS[name]), register_hooks=register_hooks)
        optimizer = prepare_optimizer(sgd(wrapped.parameters()), wrapped)
        run = hooked if register_hooks else drive
        run(wrapped, batches(1))
        optimizer.step()
        state = wrapped.state_dict()
        assert state.keys() == plain.state_dict().keys()
        assert not any(isinstance(value, DTensor) for value in state.values())
        assert differing({key: state[key] for key in names_of(plain)}, wrapped.full_parameters()) == set()

        other = shard(build(**MODELS[name]), register_hooks=register_hooks)
        other.load_state_dict(state)
        assert differing(other.full_parameters(), wrapped.full_parameters()) == set()
        plain.load_state_dict(state)
        data = batches(1, offset=1)
        wrapped.eval(), other.eval(), plain.eval()
        with torch.no_grad():
            losses = [loss_of(model, data[0]) for model in (wrapped, other, plain)]
        assert torch.equal(losses[0], losses[1])
        assert torch.equal(losses[0], losses[2])


@pytest.mark.world_size(1, 2)
def test_loading_checks_keys_and_shapes_first(device):
    with parallel():
        wrapped = shard(build())
        before = wrapped.full_parameters()
        state = wrapped.state_dict()
        missing = {name: value for name, value in state.items() if name != "output_layer.weight"}
        with pytest.raises(RuntimeError, match=r"Missing key.*output_layer\.weight"):
            wrapped.load_state_dict(missing)
        with pytest.raises(ConfigError, match=r"output_layer\.weight.*shape"):
            wrapped.load_state_dict({**state, "output_layer.weight": torch.zeros(3, 12)})
        assert differing(wrapped.full_parameters(), before) == set()
        wrapped.load_state_dict({**missing, "decoder.final_layernorm.weight": torch.full((12,), 2.0)}, strict=False)
        changed = differing(wrapped.full_parameters(), before)
        assert changed == {"decoder.final_layernorm.weight"}


@pytest.mark.world_size(1, 2)
def test_finalisation_scales_per_token_gradients_and_changes_nothing_else(device):
    with parallel():
        wrapped = shard(build(calculate_per_token_loss=True))
        drive(wrapped, batches(2))
        before = wrapped.full_gradients()
        finalize_model_grads([wrapped], None)
        assert differing(wrapped.full_gradients(), before) == set()
        tokens = torch.tensor(3.0)
        finalize_model_grads([wrapped], tokens)
        total = torch.tensor(3.0 * torch.distributed.get_world_size())
        expected = {name: gradient * (1.0 / total) for name, gradient in before.items()}
        assert differing(wrapped.full_gradients(), expected) == set()


@pytest.mark.world_size(1, 2)
def test_gradients_add_up_until_cleared_and_can_be_bound_again(device):
    with parallel():
        wrapped, data = shard(build()), batches(2)
        drive(wrapped, data[:1])
        first = wrapped.full_gradients()
        drive(wrapped, data[1:])
        both = wrapped.full_gradients()
        wrapped.zero_grad_buffer()
        assert wrapped.full_gradients() == {}
        drive(wrapped, data[1:])
        second = wrapped.full_gradients()
        assert differing(both, {name: gradient + second[name] for name, gradient in first.items()}) == set()
        wrapped.zero_grad()
        wrapped.rebind_gradients()
        assert differing(wrapped.full_gradients(), second) == set()


@pytest.mark.world_size(1, 2)
def test_gradients_that_the_user_replaced_or_cleared_one_by_one_are_added_to(device):
    with parallel():
        wrapped, data = shard(build()), batches(1)
        drive(wrapped, data)
        first = wrapped.full_gradients()
        parameters = dict(wrapped.named_sharded_parameters())
        parameters["decoder.layers.1.mlp.linear_fc1.weight"].grad = None
        bound = parameters["decoder.layers.0.self_attention.linear_qkv.weight"]
        bound.grad = torch.zeros_like(bound)
        drive(wrapped, data)
        for name, gradient in wrapped.full_gradients().items():
            is_fresh = parameters[name] is bound or name == "decoder.layers.1.mlp.linear_fc1.weight"
            assert torch.equal(gradient, first[name] if is_fresh else first[name] + first[name]), name


@pytest.mark.world_size(1, 2)
def test_megatron_s_attributes_are_on_the_sharded_parameters(device):
    with parallel(expert_model_parallel_size=torch.distributed.get_world_size()):
        plain = build()
        marked = build()
        marked.decoder.layers[1].mlp.linear_fc1.weight.sequence_parallel = True
        marked.decoder.layers[1].mlp.linear_fc1.weight.shared = True
        wrapped = shard(marked)
        sharded = dict(wrapped.named_sharded_parameters())
        assert sharded.keys() == names_of(plain)
        for name, parameter in plain.named_parameters():
            assert isinstance(sharded[name], DTensor)
            for attribute, value in vars(parameter).items():
                assert getattr(sharded[name], attribute) == value, (name, attribute)
        assert sharded["output_layer.weight"].is_embedding_or_output_parameter
        assert sharded["embedding.word_embeddings.weight"].is_embedding_or_output_parameter
        assert sharded["decoder.layers.1.mlp.linear_fc1.weight"].sequence_parallel
        assert sharded["decoder.layers.1.mlp.linear_fc1.weight"].shared
        experts = [parameter for name, parameter in sharded.items() if ".experts." in name]
        if torch.distributed.get_world_size() > 1:
            assert experts
            assert not any(parameter.allreduce for parameter in experts)


@pytest.mark.world_size(1, 2)
def test_broadcasting_weights_is_refused_where_replicas_may_have_differed(device):
    with parallel():
        wrapped = shard(build())
        if torch.distributed.get_world_size() == 1:
            wrapped.broadcast_params()
            return
        with pytest.raises(ConfigError, match="broadcast_params"):
            wrapped.broadcast_params()


@pytest.mark.world_size(1)
def test_distributed_checkpoints_are_refused(device):
    with parallel(), pytest.raises(ConfigError, match="sharded_state_dict"):
        shard(build()).sharded_state_dict()


@pytest.mark.world_size(1, 2)
def test_megatron_s_sync_functions_change_nothing(device):
    with parallel():
        wrapped = shard(build())
        drive(wrapped, batches(1))
        before, weights = wrapped.full_gradients(), wrapped.full_parameters()
        wrapped.start_grad_sync()
        wrapped.finish_grad_sync(force_all_reduce=True)
        wrapped.start_param_sync()
        wrapped.start_param_sync(force_sync=True)
        with wrapped.no_sync():
            pass
        assert differing(wrapped.full_gradients(), before) == set()
        assert differing(wrapped.full_parameters(), weights) == set()


@pytest.mark.world_size(1, 2)
def test_chunks_of_a_list_share_one_context_and_an_optimizer(device):
    with parallel():
        chunks = [build(), build()]
        chunks[0].config.overlap_moe_expert_parallel_comm = True
        wrapped = shard_model(chunks, chunks[0].config)
        assert isinstance(wrapped, list)
        assert wrapped[0].context is wrapped[1].context
        driven = [
            module for chunk in chunks for module in chunk.modules() if isinstance(module, mfsdp_v2.ScheduledModule)
        ]
        assert list(wrapped[0].context.forward_order) == driven
        optimizer = sgd([parameter for chunk in wrapped for parameter in chunk.parameters()])
        prepare_optimizer(optimizer, wrapped[0])
        prepare_optimizer(optimizer, wrapped[1])
        prepare_optimizer(optimizer, wrapped)
        assert len(optimizer._optimizer_step_pre_hooks) == 2
        assert len(optimizer._optimizer_step_post_hooks) == 1
        seed(3)
        for chunk in wrapped:
            drive(chunk, batches(1))
        before = [chunk.full_parameters() for chunk in wrapped]
        optimizer.step()
        for chunk, old in zip(wrapped, before, strict=True):
            assert differing(chunk.full_parameters(), old)
        assert differing(wrapped[0].full_parameters(), wrapped[1].full_parameters()) == set()
