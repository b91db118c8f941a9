"""Our options, and every check on Megatron's configuration: each refusal names the flag, its value and the fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from combined_1f1b.errors import ConfigError

FLAG = "overlap_moe_expert_parallel_comm"


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """What Megatron's config has no field for.

    Attributes:
        pair_head_and_tail: interleave the first two forwards with each other and the last two backwards too, so that
            only two of an iteration's all-to-alls have no partner. Costs one more micro-batch of activations;
            `simulate` shows both. Forwards that draw random numbers run one after the other; the tail is interleaved
            anyway. The second forward_step runs before the first one's loss: it must not reuse the first one's tensors.
    """

    pair_head_and_tail: bool = False


def draws_random_numbers(config: Any) -> bool:
    """Whether a forward of the model draws random numbers, so that two forwards must not interleave their draws."""
    return bool(
        config.hidden_dropout
        or config.attention_dropout
        or config.moe_input_jitter_eps
        or config.moe_router_force_load_balancing
        or config.moe_router_force_biased is not None
    )


class _Refusal(NamedTuple):
    flag: str
    is_bad: Callable[[Any], bool]
    reason: str
    fix: str


def _refuse_set(flag: str, reason: str, fix: str) -> _Refusal:
    return _Refusal(flag, lambda config: bool(getattr(config, flag, None)), reason, fix)


def _recomputes_without_transformer_engine(config: Any) -> bool:
    modules = {"layernorm", "moe_act", "mla_up_proj", "gdn_norm_out"} & set(config.recompute_modules or ())
    if config.recompute_granularity != "selective" or not modules:
        return False
    from megatron.core.tensor_parallel import random

    # Megatron asks this name for fp8, whatever the config says, and imports it only together with Transformer Engine.
    return not hasattr(random, "FP8GlobalStateManager")


_REFUSALS = (
    _Refusal(
        "num_moe_experts",
        lambda config: not config.num_moe_experts,
        "a model without experts has no expert-parallel traffic",
        f"set num_moe_experts, or {FLAG}=False",
    ),
    _Refusal(
        "moe_layer_freq",
        lambda config: isinstance(config.moe_layer_freq, list) and not any(config.moe_layer_freq),
        "a model without a mixture-of-experts layer has no expert-parallel traffic",
        f"mark at least one layer with 1, or set {FLAG}=False",
    ),
    _Refusal(
        "moe_token_dispatcher_type",
        lambda config: config.moe_token_dispatcher_type not in ("alltoall", "flex"),
        "only an all-to-all can be issued apart from the experts",
        "use moe_token_dispatcher_type='alltoall' (or 'flex')",
    ),
    _Refusal(
        "variable_seq_lengths",
        lambda config: (
            config.pipeline_model_parallel_size > 1
            and config.virtual_pipeline_model_parallel_size is None
            and config.variable_seq_lengths
        ),
        "a stage starts to receive before the sender could tell the shape",
        "pad to one length, or set virtual_pipeline_model_parallel_size",
    ),
    _Refusal(
        "num_microbatches_with_partial_activation_checkpoints",
        lambda config: config.num_microbatches_with_partial_activation_checkpoints is not None,
        "it checkpoints whole layers",
        "use None",
    ),
    _Refusal(
        "recompute_granularity",
        lambda config: config.recompute_granularity == "full",
        "a whole layer that is recomputed cannot be cut into nodes",
        "use recompute_granularity='selective' with recompute_modules",
    ),
    _refuse_set("recompute_method", "it belongs to full recomputation", "use recompute_method=None"),
    _refuse_set("recompute_num_layers", "it belongs to full recomputation", "use recompute_num_layers=None"),
    _Refusal(
        "recompute_modules",
        lambda config: config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ()),
        "recomputing the whole MoE layer would repeat its all-to-alls inside one node",
        "leave 'moe' out; 'moe_act', 'layernorm' and 'shared_experts' work",
    ),
    _Refusal(
        "recompute_modules",
        _recomputes_without_transformer_engine,
        "Megatron recomputes 'layernorm', 'moe_act', 'mla_up_proj' and 'gdn_norm_out' by calls into Transformer "
        "Engine, which is not installed",
        "install Transformer Engine, or leave them out",
    ),
    _refuse_set(
        "moe_shared_expert_overlap",
        "it moves the shared experts onto a stream of its own",
        "use moe_shared_expert_overlap=False: the schedule runs them beside the traffic already",
    ),
    _Refusal(
        "mtp_num_layers",
        lambda config: (config.mtp_num_layers or 0) > 1,
        "Megatron's layer callables take one multi-token prediction layer",
        "use mtp_num_layers=1 or None",
    ),
    _refuse_set("fp8", "the nodes do not enter the quantisation contexts yet", "use bf16 or fp16"),
    _refuse_set("fp4", "the nodes do not enter the quantisation contexts yet", "use bf16 or fp16"),
    _Refusal(
        "use_transformer_engine_op_fuser",
        lambda config: config.delay_wgrad_compute and getattr(config, "use_transformer_engine_op_fuser", False),
        "its fused operators keep weight gradients where the nodes cannot see them (delay_wgrad_compute=True)",
        "use use_transformer_engine_op_fuser=False, or delay_wgrad_compute=False",
    ),
    _refuse_set(
        "overlap_dispatch_backward_with_experts_wgrad",
        "it overlaps the same traffic in another way",
        "use overlap_dispatch_backward_with_experts_wgrad=False",
    ),
    _Refusal(
        "cuda_graph_impl",
        lambda config: config.cuda_graph_impl not in ("none", "full_iteration"),
        "graphs of single modules are not scheduled yet",
        "use cuda_graph_impl='none' or 'full_iteration'",
    ),
    _refuse_set("cpu_offloading", "it hooks into whole layers", "use cpu_offloading=False"),
    _refuse_set(
        "fine_grained_activation_offloading",
        "its groups assume the order of the plain schedule",
        "use fine_grained_activation_offloading=False",
    ),
    _refuse_set("moe_paged_stash", "it assumes the order of the plain schedule", "use moe_paged_stash=False"),
    _refuse_set("hybrid_context_parallel", "it has a schedule of its own", "use hybrid_context_parallel=False"),
    _Refusal(
        "mlp_chunks_for_training",
        lambda config: getattr(config, "mlp_chunks_for_training", 1) > 1,
        "a chunked MoE layer does one all-to-all per chunk",
        "use mlp_chunks_for_training=1",
    ),
    _Refusal(
        "transformer_impl",
        lambda config: config.transformer_impl == "inference_optimized",
        "inference layers are not trained",
        "use transformer_impl='local' or 'transformer_engine'",
    ),
)

REFUSED_FLAGS = tuple(refusal.flag for refusal in _REFUSALS)


def check_config(config: Any) -> None:
    """Check a TransformerConfig that asks for the overlap.

    Args:
        config: a TransformerConfig, finished or in its `__post_init__`.

    Raises:
        ConfigError: the first setting that cannot work with this package's schedule.
    """
    for refusal in _REFUSALS:
        if refusal.is_bad(config):
            raise ConfigError.of(
                refusal.flag, getattr(config, refusal.flag), f"{refusal.reason} ({FLAG}=True)", refusal.fix
            )


def check_disabled(config: Any) -> None:
    """Check a TransformerConfig that does not ask for the overlap, for settings that need it.

    Raises:
        ConfigError: a setting that only the overlap gives a meaning.
    """
    for flag in ("delay_wgrad_compute", "ep_overlap_early_attn_memory_release"):
        if getattr(config, flag, False):
            raise ConfigError.of(flag, True, f"it has no meaning with {FLAG}=False", f"set {FLAG}=True or {flag}=False")
