"""Megatron-Core on the host device: its default and its built-in combined schedule run, and give the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_models import build, differing, iteration, parallel, take_gradients
from megatron.core import parallel_state

FP16 = {"bf16": False, "fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}
FP32 = {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}
CASES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "drop and pad": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "drop": {"moe_expert_capacity_factor": 0.5},
    "shared experts": {"moe_shared_expert_intermediate_size": 16},
    "auxiliary losses": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_z_loss_coeff": 0.001,
    },
    "fp16": FP16,
    "fp32": FP32,
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "router jitter": {"moe_input_jitter_eps": 0.1},
    "learned absolute embeddings": {"position_embedding_type": "learned_absolute"},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "recompute with dropout": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
        "attention_dropout": 0.1,
    },
    "full recompute with dropout": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "hidden_dropout": 0.1,
    },
    "layer norm and biases": {"normalization": "LayerNorm", "add_bias_linear": True},
    "swiglu": {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
    "fused operators": {
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "native",
    },
    "dense first layer": {"moe_layer_freq": [0, 1]},
    "router in fp32": {"moe_router_dtype": "fp32"},
}
# The built-in adds the two contributions to a weight that is used at both ends of the model in another order.
USED_TWICE = {"0.module.embedding.word_embeddings.weight"}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", CASES)
def test_default_and_builtin_combined_schedule_agree(device, name):
    with parallel(expert_model_parallel_size=2):
        model = build(**CASES[name])
        losses, gradients = iteration(model, combined=False), take_gradients(model)
        combined_losses, combined_gradients = iteration(model, combined=True), take_gradients(model)
        assert len(losses) == 3
        assert torch.equal(torch.stack(losses), torch.stack(combined_losses))
        assert differing(gradients, combined_gradients) == set()


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "changes",
    [{"mtp_num_layers": 1}, {"share_embeddings_and_output_weights": True}],
    ids=["multi-token prediction", "tied embeddings"],
)
def test_weights_used_twice_are_all_that_the_builtin_changes(device, changes):
    with parallel(expert_model_parallel_size=2):
        model = build(**changes)
        losses, gradients = iteration(model, combined=False), take_gradients(model)
        combined_losses, combined_gradients = iteration(model, combined=True), take_gradients(model)
        assert torch.equal(torch.stack(losses), torch.stack(combined_losses))
        assert differing(gradients, combined_gradients) <= USED_TWICE


@pytest.mark.world_size(2)
def test_repeated_iterations_give_the_same_bits(device):
    with parallel(expert_model_parallel_size=2):
        model = build(hidden_dropout=0.1, attention_dropout=0.1)
        runs = [(iteration(model, combined=False), take_gradients(model)) for _ in range(2)]
        assert torch.equal(torch.stack(runs[0][0]), torch.stack(runs[1][0]))
        assert differing(runs[0][1], runs[1][1]) == set()


@pytest.mark.world_size(2)
def test_graph_safe_random_states_draw_what_plain_ones_draw(device):
    changes = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    results = []
    for graphable in (False, True):
        with parallel(expert_model_parallel_size=2, graphable_random_state=graphable):
            model = build(**changes)
            results.append((iteration(model, combined=False, graphable=graphable), take_gradients(model)))
    assert torch.equal(torch.stack(results[0][0]), torch.stack(results[1][0]))
    assert differing(results[0][1], results[1][1]) == set()


@pytest.mark.world_size(2)
def test_autocast_for_cuda_casts_on_the_host(device):
    # Without Transformer Engine, Megatron's router mixes types in its backward under autocast unless it runs in fp64.
    autocast = {"enable_autocast": True, "autocast_dtype": torch.bfloat16, "moe_router_dtype": "fp64"}
    with parallel(expert_model_parallel_size=2):
        model = build(**FP32, **autocast)
        seen = []
        model.decoder.layers[0].mlp.experts.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
        iteration(model, combined=False)
        take_gradients(model)
        assert {output.dtype for output in seen} == {torch.bfloat16}


@pytest.mark.world_size(2, 4)
def test_tensor_parallel(device):
    # Dense: Megatron trains MoE under tensor parallelism with sequence parallelism only, which torch's norms refuse.
    with parallel(tensor_model_parallel_size=2):
        dense = {"num_moe_experts": None, "moe_ffn_hidden_size": None, "expert_model_parallel_size": 1}
        model = build(tensor_model_parallel_size=2, **dense)
        losses = iteration(model, combined=False)
        assert all(loss.isfinite() for loss in losses)
        take_gradients(model)


@pytest.mark.world_size(4)
def test_interleaved_pipeline(device):
    with parallel(expert_model_parallel_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2):
        first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
        model = [
            build(
                num_layers=4,
                pipeline_model_parallel_size=2,
                # Two stages are neighbours on both sides: batched sends and receives would match each other wrongly.
                overlap_p2p_comm=True,
                batch_p2p_comm=False,
                virtual_pipeline_model_parallel_size=2,
                vp_stage=stage,
                pre_process=first(ignore_virtual=False, vp_stage=stage),
                post_process=last(ignore_virtual=False, vp_stage=stage),
            )
            for stage in range(2)
        ]
        losses, gradients = iteration(model, combined=False, num_microbatches=4), take_gradients(model)
        combined_losses, combined_gradients = iteration(model, combined=True, num_microbatches=4), take_gradients(model)
        assert len(losses) == (4 if last() else 0)
        assert all(torch.equal(one, two) for one, two in zip(losses, combined_losses, strict=True))
        assert differing(gradients, combined_gradients) == set()


@pytest.mark.world_size(4)
def test_pipeline_without_virtual_stages(device):
    with parallel(expert_model_parallel_size=2, pipeline_model_parallel_size=2):
        last = parallel_state.is_pipeline_last_stage()
        model = build(
            pipeline_model_parallel_size=2, pre_process=parallel_state.is_pipeline_first_stage(), post_process=last
        )
        losses = iteration(model, combined=False, num_microbatches=4)
        assert len(losses) == (4 if last else 0)
        take_gradients(model)
