"""Bitwise parity of this package's schedule with Megatron's default schedule: losses, gradients, parameters after SGD.

The reference is Megatron's own default schedule on a model of its own, trained side by side for a few steps.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_models import batches, build, differing, parallel, take_gradients
from parity_testing import EXPERT_SIZE, FP16, FP32, assert_parity, forward_step, run, set_flag

import combined_1f1b

ROUTER = {"moe_router_load_balancing_type": "none"}
CASES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "drop and pad": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "drop": {"moe_expert_capacity_factor": 0.5},
    "drop by position": {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
    "one layer": {"num_layers": 1},
    "dense first, odd count": {"num_layers": 3, "moe_layer_freq": [0, 1, 1]},
    "dense last, odd count": {"num_layers": 3, "moe_layer_freq": [1, 1, 0]},
    "dense in the middle": {"num_layers": 3, "moe_layer_freq": [1, 0, 1]},
    "tied": {"share_embeddings_and_output_weights": True},
    "multi-token prediction": {"mtp_num_layers": 1},
    "multi-token prediction, tied": {"mtp_num_layers": 1, "share_embeddings_and_output_weights": True},
    "multi-token prediction, learned positions": {"mtp_num_layers": 1, "position_embedding_type": "learned_absolute"},
    "multi-token prediction, detached heads": {"mtp_num_layers": 1, "mtp_detach_heads": True},
    "shared experts": {"moe_shared_expert_intermediate_size": 16},
    "shared experts with a gate": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    "fp16": FP16,
    "fp32": FP32,
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "LayerNorm and biases": {"normalization": "LayerNorm", "add_bias_linear": True},
    "gated units": {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
    "learned positions": {"position_embedding_type": "learned_absolute"},
    "early attention release": {"ep_overlap_early_attn_memory_release": True, "overlap_moe_expert_parallel_comm": True},
    "fp32 residual": {**FP32, "fp32_residual_connection": True},
    "one expert each": {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True},
}
ROUTERS: dict[str, dict[str, Any]] = {
    "auxiliary loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
    "auxiliary loss per sequence": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01},
    "auxiliary loss over ranks": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.01},
    "two auxiliary losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.01, 0.02],
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    "z loss": {**ROUTER, "moe_z_loss_coeff": 0.001},
    "jitter": {**ROUTER, "moe_input_jitter_eps": 0.1},
    "sigmoid with expert bias": {
        **ROUTER,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "groups": {**ROUTER, "moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "softmax first": {**ROUTER, "moe_router_pre_softmax": True},
    "scaled": {**ROUTER, "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "fp32": {**ROUTER, "moe_router_dtype": "fp32"},
    "fp64": {**ROUTER, "moe_router_dtype": "fp64"},
    "forced balance": {**ROUTER, "moe_router_force_load_balancing": True},
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "core_attn": {"attention_dropout": 0.1},
    "layernorm": {},
    "shared_experts": {"moe_shared_expert_intermediate_size": 16},
    "mlp": {"num_layers": 2, "moe_layer_freq": [0, 1]},
}


@pytest.fixture(autouse=True)
def installed(device):
    with combined_1f1b.install(), parallel(expert_model_parallel_size=EXPERT_SIZE):
        yield


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", CASES)
def test_models(name):
    assert_parity(**CASES[name])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name):
    assert_parity(**ROUTERS[name])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("module", RECOMPUTE)
def test_selective_recompute(module, monkeypatch):
    # Megatron's recomputation of norms calls into Transformer Engine for fp8, also where there is none.
    for name, stand_in in {
        "FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False),
        "activation_recompute_forward": lambda **_: nullcontext(),
        "fp8_autocast": lambda **_: nullcontext(),
    }.items():
        monkeypatch.setattr(f"megatron.core.tensor_parallel.random.{name}", stand_in, raising=False)
    assert_parity(recompute_granularity="selective", recompute_modules=[module], **RECOMPUTE[module])


@pytest.mark.world_size(1, 4)
@pytest.mark.parametrize("name", ["dropless", "drop and pad", "multi-token prediction, tied", "dense last, odd count"])
def test_models_on_one_rank_without_expert_parallelism_and_on_four_with_two_experts_groups(name):
    assert_parity(**CASES[name])


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_numbers_of_microbatches(count):
    assert_parity(num_microbatches=count)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "frozen",
    [
        "embedding",
        "decoder.layers.0",
        "decoder.layers.1.mlp.experts",
        "decoder.final_layernorm",
        "output_layer",
        "router",
    ],
)
def test_frozen_parameters(frozen):
    def freeze(model):
        chosen = [parameter for name, parameter in model.named_parameters() if frozen in name]
        assert chosen
        for parameter in chosen:
            parameter.requires_grad_(False)
        return model

    ours = assert_parity(prepare=freeze)
    assert ours.gradients[0].keys() < ours.parameters.keys()


@pytest.mark.world_size(2)
def test_only_one_parameter_is_trained():
    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1.mlp.router" in name)
        return model

    assert len(assert_parity(prepare=freeze).gradients[0]) == 1


@pytest.mark.world_size(2)
def test_sequence_lengths_that_differ_between_microbatches():
    lengths = iter([8, 4, 6] * 4)

    def shorten(arguments):
        length = next(lengths)
        shorter = {name: tensor[:, :length] for name, tensor in arguments.items() if name != "attention_mask"}
        return {**shorter, "attention_mask": arguments["attention_mask"][..., :length, :length]}

    assert_parity(step=lambda data, model: forward_step(data, model, change_batch=shorten))


@pytest.mark.world_size(2)
def test_padding_mask_reaches_the_router():
    def pad(arguments):
        mask = torch.zeros_like(arguments["input_ids"], dtype=torch.bool)
        mask[:, -3:] = True
        return {**arguments, "padding_mask": mask}

    router = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    padded = assert_parity(step=lambda data, model: forward_step(data, model, change_batch=pad), **router)
    whole = assert_parity(**router)
    assert differing(padded.gradients[0], whole.gradients[0]), "the mask changes nothing, so this test shows nothing"


def three_values(output):
    return output.float().sum(), torch.tensor(output.numel(), dtype=torch.int), {"loss": output.detach().float().mean()}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
def test_loss_functions_with_three_values(per_token):
    seen = []

    def finalize(model, num_tokens, **_):
        seen.append(None if num_tokens is None else int(num_tokens))

    assert_parity(
        step=lambda data, model: forward_step(data, model, loss=three_values),
        calculate_per_token_loss=per_token,
        finalize_model_grads_func=finalize,
    )
    assert seen == [48 if per_token else None] * 4


@pytest.mark.world_size(2)
def test_grad_scale_func_and_its_scale_of_the_auxiliary_loss():
    router = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    scaled = assert_parity(grad_scale_func=lambda loss: loss * 64.0, **router)
    plain = assert_parity(**router)
    for name, gradient in scaled.gradients[0].items():
        assert torch.equal(gradient, plain.gradients[0][name] * 64.0), name


@pytest.mark.world_size(2)
def test_autocast():
    # Megatron's local router mixes types in its backward under autocast unless it runs in fp64.
    autocast = {**FP32, "enable_autocast": True, "autocast_dtype": torch.bfloat16, "moe_router_dtype": "fp64"}
    cast = assert_parity(**autocast)
    assert differing(cast.gradients[0], assert_parity(**FP32, moe_router_dtype="fp64").gradients[0])


@pytest.mark.world_size(2)
def test_a_given_decoder_input_with_tied_weights():
    def embed(arguments):
        generator = torch.Generator().manual_seed(5)
        given = torch.randn(8, 2, 16, generator=generator).bfloat16().cuda()
        return {**arguments, "decoder_input": given}

    assert_parity(
        step=lambda data, model: forward_step(data, model, change_batch=embed), share_embeddings_and_output_weights=True
    )


@pytest.mark.world_size(2)
def test_switching_the_flag_between_steps_and_evaluating_in_between():
    model = build(expert_model_parallel_size=EXPERT_SIZE)
    set_flag(model, False)
    losses, gradients = run(model), take_gradients(model)
    for combined in (True, False, True):
        set_flag(model, combined)
        assert str(run(model)) == str(losses)
        assert differing(gradients, take_gradients(model)) == set()
        with torch.no_grad():
            evaluated = run(model, forward_only=True)
        assert str(evaluated) == str(losses)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.world_size(2)
def test_collect_non_loss_data_in_a_forward_only_call():
    model = build(expert_model_parallel_size=EXPERT_SIZE)

    def collect(output, non_loss_data=False):
        assert non_loss_data
        return output.detach().clone()

    results = []
    for combined in (False, True):
        set_flag(model, combined)
        results.append(
            run(
                model,
                forward_only=True,
                collect_non_loss_data=True,
                step=lambda data, model: forward_step(data, model, loss=collect),
            )
        )
    assert torch.equal(torch.stack(results[0]), torch.stack(results[1]))


@pytest.mark.world_size(2)
def test_accumulating_over_several_calls():
    model = build(expert_model_parallel_size=EXPERT_SIZE)
    totals = []
    for combined in (False, True):
        set_flag(model, combined)
        for _ in range(2):
            run(model, data=batches(3))
        totals.append(take_gradients(model))
    assert differing(*totals) == set()


@pytest.mark.world_size(1)
def test_what_megatron_is_told_of_the_microbatch(monkeypatch):
    """Megatron sets these at every forward; Transformer Engine and graphs of single layers read them."""
    model = build(expert_model_parallel_size=EXPERT_SIZE)
    model.set_is_first_microbatch = lambda: told.append("first")
    told = []

    def tell(data, model):
        told.append(model.module.decoder.layers[0].current_microbatch)
        return forward_step(data, model)

    for combined in (False, True):
        set_flag(model, combined)
        run(model, step=tell)
    assert told == ["first", 0, 1, 2] * 2


@pytest.mark.world_size(1)
@pytest.mark.parametrize("name", ["loss_mask", "output_processor", "no labels"])
def test_arguments_of_the_output_layer(name):
    def processor(*, hidden_states, output_layer, output_weight, labels, context, **_):
        logits, _ = output_layer(hidden_states, weight=output_weight)
        return logits.float().logsumexp(-1).transpose(0, 1) * context

    changes = {
        "loss_mask": lambda arguments: {**arguments, "loss_mask": (arguments["labels"] % 3 > 0).float()},
        "output_processor": lambda arguments: {
            **arguments, "output_processor": processor, "output_processor_context": 2.0
        },
        "no labels": lambda arguments: {**arguments, "labels": None},
    }  # fmt: skip
    assert_parity(
        step=lambda data, model: forward_step(data, model, change_batch=changes[name]),
        mtp_num_layers=1 if name == "loss_mask" else None,
    )
