"""Megatron-Core on the host device: default and built-in combined schedule give the same bits in many configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

SEQUENCE = 8
VOCABULARY = 32
BASE = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_attention_heads": 2,
    "num_moe_experts": 4,
    "expert_model_parallel_size": 2,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_ffn_hidden_size": 32,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
    "normalization": "RMSNorm",
    "gradient_accumulation_fusion": False,
}


@contextmanager
def parallel(**sizes: int) -> Iterator[None]:
    parallel_state.initialize_model_parallel(**sizes)
    try:
        model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()


def build(*, position_embedding_type: str = "rope", config_class: type = TransformerConfig, **changes: Any) -> GPTModel:
    """A small model: hidden 16, 4 experts, 2 layers, vocabulary 32."""
    config = config_class(**{**BASE, **changes})
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    torch.manual_seed(11)
    model_parallel_cuda_manual_seed(11, force_reset_rng=True)
    return GPTModel(
        config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type=position_embedding_type,
        mtp_block_spec=mtp,
    ).cuda()


def batches(count: int) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator)
        yield {
            "tokens": tokens,
            "labels": tokens.roll(-1, dims=1),
            "position_ids": torch.arange(SEQUENCE).expand(2, SEQUENCE),
            "mask": torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1),
        }


def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any, return_schedule_plan: bool = False) -> Any:
    batch = next(data)
    arguments = (batch["tokens"].cuda(), batch["position_ids"].cuda(), batch["mask"].cuda())
    call = model.build_schedule_plan if return_schedule_plan else model
    return call(*arguments, labels=batch["labels"].cuda()), partial(loss_of)


def train_step(model: GPTModel, *, combined: bool, num_microbatches: int = 3) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Losses and gradients of one iteration from random state 3, with the gradients taken off the model."""
    config = model.config
    config.overlap_moe_expert_parallel_comm = combined
    model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches(num_microbatches),
        model=[model],
        num_microbatches=num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=2,
        forward_only=False,
    )
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
        parameter.grad = None
    return [result["loss"] for result in results], gradients


def assert_same_bits(one: Any, other: Any) -> None:
    losses, gradients = one
    other_losses, other_gradients = other
    assert len(losses) > 0
    for loss, other_loss in zip(losses, other_losses, strict=True):
        assert torch.equal(loss, other_loss)
    assert gradients.keys() == other_gradients.keys()
    different = [name for name in gradients if not torch.equal(gradients[name], other_gradients[name])]
    assert different == []


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drop-and-pad": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "drop": {"moe_expert_capacity_factor": 0.5},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "shared-experts": {"moe_shared_expert_intermediate_size": 16},
    "aux-loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001},
    "fp16": {"bf16": False, "fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16},
    "fp32": {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "learned-absolute": {"position_embedding_type": "learned_absolute"},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "moe_act"]},
    "mtp": {"mtp_num_layers": 1},
    "mla": {"config_class": MLATransformerConfig, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8, "multi_latent_attention": True},
    "layer-norm-bias": {"normalization": "LayerNorm", "add_bias_linear": True},
    "router-jitter": {"moe_input_jitter_eps": 0.1},
    "autocast": {"enable_autocast": True, "autocast_dtype": torch.bfloat16, "bf16": False, "params_dtype": torch.float32},
    "mixed-layers": {"moe_layer_freq": [0, 1], },
    "graphable-rng": {},
    "swiglu": {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", CASES)
def test_default_and_builtin_combined_schedule_agree(device, name):
    with parallel(expert_model_parallel_size=2):
        model = build(**CASES[name])
        assert_same_bits(train_step(model, combined=False), train_step(model, combined=True))
