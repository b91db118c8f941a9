"""Builds the model of a run: Megatron's GPTModel from a configuration, in chunks where a pipeline asks for them."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from combined_1f1b.errors import ConfigError
from combined_1f1b.training.config import RunConfig
from combined_1f1b.training.megatron_config import megatron_refusals

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig


def check_implementation(config: RunConfig) -> bool:
    """Whether the layers are Transformer Engine's.

    Raises:
        ConfigError: Transformer Engine was asked for and is not installed.
    """
    implementation = config.model.get("transformer_impl", "local")
    if implementation == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        fix = "install the extra (pip install combined_1f1b[te]) or set it to local"
        raise ConfigError.of("model.transformer_impl", implementation, "Transformer Engine is not installed", fix)
    return implementation == "transformer_engine"


@contextmanager
def _quiet_notices() -> Iterator[None]:
    """Hold back the notice that each GPTModel prints about its own future; the training loop builds several."""
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def build_chunks(config: RunConfig, transformer_config: TransformerConfig, device: torch.device) -> list[GPTModel]:
    """Build this rank's model chunks with the run's seed: one, or one per virtual pipeline stage.

    The seed is set here, so that building twice gives the same weights.

    Args:
        config: the whole run.
        transformer_config: Megatron's config built from it.
        device: where the parameters go.
    Raises:
        ConfigError: Megatron cannot build this model.
    """
    from megatron.core import tensor_parallel

    seed_everything(config.training.seed, tensor_parallel)
    stages = transformer_config.virtual_pipeline_model_parallel_size
    # Norms are built in fp32 whatever params_dtype says; Megatron's Float16Module casts the whole model, and so do we.
    dtype = transformer_config.params_dtype
    with _quiet_notices(), megatron_refusals():
        return [
            _build_chunk(config, transformer_config, stage).to(device=device, dtype=dtype)
            for stage in ([None] if stages is None else range(stages))
        ]


def seed_everything(seed: int, tensor_parallel: Any) -> None:
    """Seed torch and Megatron's random number tracker, which gives tensor and expert ranks their own streams."""
    import torch

    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _build_chunk(config: RunConfig, transformer_config: TransformerConfig, stage: int | None) -> GPTModel:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    uses_te = check_implementation(config)
    spec = get_gpt_decoder_block_spec(
        transformer_config,
        use_transformer_engine=uses_te,
        normalization=transformer_config.normalization,
        vp_stage=stage,
    )
    mtp_spec = None
    if transformer_config.mtp_num_layers:
        mtp_spec = get_gpt_mtp_block_spec(transformer_config, spec, use_transformer_engine=uses_te, vp_stage=stage)
    place = {"ignore_virtual": False, "vp_stage": stage}
    return GPTModel(
        config=transformer_config,
        transformer_layer_spec=spec,
        vocab_size=config.gpt.vocab_size,
        max_sequence_length=config.gpt.max_sequence_length or config.data.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        share_embeddings_and_output_weights=config.gpt.share_embeddings_and_output_weights,
        position_embedding_type=config.gpt.position_embedding_type,
        mtp_block_spec=mtp_spec,
        vp_stage=stage,
    )
