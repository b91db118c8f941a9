"""Forward steps, data and nodes that go wrong: a clear error, nothing half-done, and the model usable for a retry."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from host_models import BATCH, SEQUENCE, batches, build, config_of, differing, parallel, seed, take_gradients
from parity_testing import EXPERT_SIZE, forward_step, run, set_flag

import combined_1f1b
from combined_1f1b.errors import ConfigError, UnsupportedModelError


@pytest.fixture(autouse=True)
def installed(device):
    with combined_1f1b.install(), parallel(expert_model_parallel_size=EXPERT_SIZE):
        yield


@pytest.fixture
def model():
    model = build(expert_model_parallel_size=EXPERT_SIZE, share_embeddings_and_output_weights=True)
    set_flag(model, True)
    return model


def shadows(model):
    return {name for name in ("forward", "build_schedule_plan") if name in vars(model.module)}


def assert_usable(model):
    """A retry after the failure gives what a fresh call gives under the default schedule."""
    for parameter in model.parameters():
        parameter.grad = None
    assert shadows(model) == set()
    seed(3)
    losses, gradients = run(model), take_gradients(model)
    set_flag(model, False)
    seed(3)
    reference, reference_gradients = run(model), take_gradients(model)
    assert str(losses) == str(reference)
    assert differing(gradients, reference_gradients) == set()


@pytest.mark.world_size(1, 2)
def test_a_forward_step_that_never_calls_the_model(model):
    with pytest.raises(ConfigError, match="never calls the model"):
        run(model, step=lambda data, model: (torch.zeros(1), None))
    assert_usable(model)


@pytest.mark.world_size(1)
def test_a_forward_step_that_calls_the_model_twice(model):
    def twice(data, model):
        forward_step(iter(list(batches(1))), model)
        return forward_step(data, model)

    with pytest.raises(ConfigError, match="calls the model 2 times"):
        run(model, step=twice)
    assert_usable(model)


@pytest.mark.world_size(1)
@pytest.mark.parametrize(
    "change", [lambda output: output * 2, lambda output: output.mean(), torch.sum, lambda output: output + 0]
)
def test_a_forward_step_that_changes_the_output(model, change):
    def changing(data, model):
        output, loss = forward_step(data, model)
        return change(output), loss

    with pytest.raises(ConfigError, match="move what follows into loss_func"):
        run(model, step=changing)
    assert_usable(model)


@pytest.mark.world_size(1)
def test_a_forward_step_that_returns_something_else(model):
    def other(data, model):
        return torch.zeros(1), forward_step(data, model)[1]

    with pytest.raises(ConfigError, match="instead of the model's output"):
        run(model, step=other)
    assert_usable(model)


@pytest.mark.world_size(1)
@pytest.mark.parametrize(
    "mode", [torch.no_grad, lambda: torch.autocast("cuda", dtype=torch.bfloat16)], ids=["no_grad", "autocast"]
)
def test_a_context_around_the_model_call_that_the_nodes_would_lose(model, mode):
    def inside(data, model):
        with mode():
            return forward_step(data, model)

    with pytest.raises(ConfigError, match="grad mode or autocast"):
        run(model, step=inside)
    assert_usable(model)


@pytest.mark.world_size(1, 2)
def test_a_data_iterator_that_ends_early(model):
    with pytest.raises(StopIteration) as caught:
        run(model, data=batches(2), num_microbatches=4)
    assert "the data iterator ended at micro-batch 2 of 4" in caught.value.__notes__
    assert_usable(model)


class OwnError(Exception):
    """An error of the user's code."""


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("place", ["expert", "embedding", "loss", "backward"])
def test_an_exception_inside_a_node_arrives_unchanged_with_the_plan_as_a_note(model, place):
    module = {
        "expert": model.module.decoder.layers[1].mlp.experts.local_experts[0].linear_fc1,
        "embedding": model.module.embedding.word_embeddings,
        "backward": model.module.decoder.layers[0].self_attention.linear_proj,
    }.get(place)
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 2:
            raise OwnError("my message")

    hook = None
    if place == "backward":
        hook = module.register_full_backward_hook(fail)
    elif module is not None:
        hook = module.register_forward_pre_hook(fail)

    def failing_loss(output):
        fail()
        return output.mean(), {"loss": output.mean().detach()}

    step = (lambda data, model: forward_step(data, model, loss=failing_loss)) if place == "loss" else forward_step
    with pytest.raises(OwnError) as caught:
        run(model, step=step)
    assert str(caught.value) == "my message"
    assert any("-->" in note and "of the plan" in note for note in caught.value.__notes__)
    if hook is not None:
        hook.remove()
    assert_usable(model)


@pytest.mark.world_size(1)
@pytest.mark.parametrize(
    ("name", "value"),
    [("extra_block_kwargs", {"a": 1}), ("inference_context", object()), ("inference_params", object())],
)
def test_arguments_that_the_nodes_do_not_take(model, name, value):
    with pytest.raises(ConfigError, match=name):
        run(model, step=lambda data, model: forward_step(data, model, change_batch=lambda a: {**a, name: value}))
    assert_usable(model)


@pytest.mark.world_size(1)
def test_packed_samples_that_the_router_would_take_as_one(model):
    from megatron.core.packed_seq_params import PackedSeqParams

    packed = PackedSeqParams(tokens_per_sample=4)
    with pytest.raises(ConfigError, match="tokens_per_sample"):
        run(
            model,
            step=lambda data, model: forward_step(
                data, model, change_batch=lambda a: {**a, "packed_seq_params": packed}
            ),
        )


@pytest.mark.world_size(1)
def test_no_microbatch_is_refused(model):
    with pytest.raises(ConfigError, match="num_microbatches=0"):
        run(model, num_microbatches=0)


@pytest.mark.world_size(2, 4)
def test_ranks_that_disagree_on_the_number_of_microbatches_all_say_so(model):
    mine = 2 + torch.distributed.get_rank()
    with pytest.raises(ConfigError, match=f"num_microbatches={mine}: ranks disagree"):
        run(model, num_microbatches=mine)
    assert_usable(model)


@pytest.mark.world_size(1)
def test_a_failure_says_how_many_microbatches_this_rank_runs(model):
    def fail(output):
        raise OwnError

    with pytest.raises(OwnError) as caught:
        run(model, num_microbatches=3, step=lambda data, model: forward_step(data, model, loss=fail))
    assert any("num_microbatches=3 on this rank" in note for note in caught.value.__notes__)


@pytest.mark.world_size(1)
def test_a_shadowed_method_of_the_users_own_is_put_back(model):
    own = model.module.forward
    vars(model.module)["forward"] = own
    run(model)
    assert vars(model.module)["forward"] is own
    assert "build_schedule_plan" not in vars(model.module)


@pytest.mark.world_size(1)
def test_a_route_of_the_users_own_runs_and_is_put_back(model):
    """The schedule puts another in its place for the padding mask."""
    mlp, masks = model.module.decoder.layers[0].mlp, []

    def own(hidden_states, padding_mask=None):
        masks.append(padding_mask)
        return type(mlp).route(mlp, hidden_states, padding_mask)

    vars(mlp)["route"] = own
    padding = torch.zeros(BATCH, SEQUENCE, dtype=torch.bool, device="cuda")
    change = {"padding_mask": padding}
    run(model, step=lambda data, model: forward_step(data, model, change_batch=lambda given: {**given, **change}))
    assert vars(mlp)["route"] is own
    assert [tuple(mask.shape) for mask in masks] == [(SEQUENCE, BATCH)] * 3


@pytest.mark.world_size(1)
def test_a_hook_on_multi_token_prediction_that_would_not_fire_is_refused():
    model = build(expert_model_parallel_size=1, num_layers=1, mtp_num_layers=1)
    set_flag(model, True)
    block = model.module.mtp
    layer = block.layers[0]
    asked = []
    for module in (block, layer, layer.mtp_model_layer, layer.mtp_model_layer.mlp):
        for register in (module.register_forward_hook, module.register_forward_pre_hook):
            hook = register(lambda *_: None)
            with pytest.raises(UnsupportedModelError, match=rf"{type(module).__name__}.*hooks"):
                run(model, step=lambda data, model: asked.append(1))
            hook.remove()
    assert not asked
    fired = []
    layer.eh_proj.register_forward_hook(lambda *_: fired.append(1))  # this one runs
    run(model, num_microbatches=1)
    assert fired == [1]


@pytest.mark.world_size(1)
def test_a_dense_multi_token_prediction_layer_is_refused():
    model = build(expert_model_parallel_size=1, moe_layer_freq=[1, 0], mtp_num_layers=1)
    set_flag(model, True)
    with pytest.raises(UnsupportedModelError, match=r"mtp_num_layers=1.*last layer"):
        run(model)


@pytest.mark.world_size(1)
def test_nothing_of_an_iteration_outlives_it(model):
    kept = []

    def keep(data, model):
        output, loss = forward_step(data, model, change_batch=remember)
        return output, loss

    def remember(arguments):
        kept.extend(weakref.ref(tensor) for tensor in arguments.values())
        return arguments

    losses = []

    def loss_of(output):
        losses.append(weakref.ref(output))
        return output.mean(), {"loss": output.detach().mean()}

    run(model, step=lambda data, model: forward_step(data, model, loss=loss_of, change_batch=remember))
    gc.collect()
    assert len(losses) == 3
    assert not [reference for reference in (*kept, *losses) if reference() is not None]


@pytest.mark.world_size(1)
def test_an_activation_lives_as_long_as_something_saved_it_and_no_longer(model):
    """At one expert's input: the tokens that entered the dispatch are gone once the experts run (EP=1 aliases them)."""
    config_of(model).moe_permute_fusion = False
    dispatcher = model.module.decoder.layers[0].mlp.token_dispatcher
    seen = []
    original = type(dispatcher).combine_preprocess

    def combine_preprocess(hidden):
        seen.append(weakref.ref(hidden.untyped_storage()))
        return original(dispatcher, hidden)

    dispatcher.combine_preprocess = combine_preprocess
    run(model)
    assert seen
    assert not [storage for storage in seen if storage() is not None]
