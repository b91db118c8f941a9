"""What a model, and one call of it, must look like for the schedule to cut it into nodes."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from combined_1f1b.errors import ConfigError, UnsupportedModelError

_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_PRE_HOOKS = ("_forward_pre_hooks",)


def innermost_model(model: Any) -> GPTModel:
    """Unwrap `.module` until the GPTModel.

    Raises:
        UnsupportedModelError: there is none, or it cannot be cut into nodes.
    """
    inner = model
    while not isinstance(inner, GPTModel) and hasattr(inner, "module"):
        if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
            raise _unsupported(inner, "synchronises by its own forward, which the schedule does not run")
        inner = inner.module
    if not isinstance(inner, GPTModel):
        raise UnsupportedModelError.of(
            "model",
            type(inner).__name__,
            "only GPTModel can be cut into nodes",
            "set overlap_moe_expert_parallel_comm=False",
        )
    return inner


def check_model(model: GPTModel, *, is_whole: bool = True) -> None:
    """Check a model once, before its first step.

    Args:
        is_whole: False for a stage of a pipeline, which may have no mixture-of-experts layer, or none at all.

    Raises:
        UnsupportedModelError: a class or a hook that the schedule would pass by.
    """
    if type(model).forward is not GPTModel.forward and not hasattr(type(model), "parameter_groups"):
        raise _unsupported(model, "overrides GPTModel.forward, which the schedule replaces")
    predictors = [layer.mtp_model_layer for layer in model.mtp.layers] if getattr(model, "mtp_process", False) else []
    layers = [*model.decoder.layers, *predictors]
    for layer in layers:
        if not isinstance(layer, TransformerLayer):
            raise _unsupported(layer, "is not a TransformerLayer")
        for name in ("forward", "_forward_mlp"):
            if getattr(type(layer), name) is not getattr(TransformerLayer, name):
                raise _unsupported(layer, f"overrides TransformerLayer.{name}, which the schedule replaces")
    if not all(isinstance(layer.mlp, MoELayer) for layer in predictors):
        raise UnsupportedModelError.of(
            "mtp_num_layers", model.config.mtp_num_layers,
            "Megatron's layer callables take a multi-token prediction layer with experts only, and it is built as "
            "the last decoder layer is", "make the last layer a mixture of experts, or set mtp_num_layers=None",
        )  # fmt: skip
    if len({id(layer.mlp) for layer in layers}) < len(layers):
        raise _unsupported(model, "has layers that share one mlp, whose gradients would accumulate in another order")
    if is_whole and not any(isinstance(layer.mlp, MoELayer) for layer in layers):
        raise UnsupportedModelError.of(
            "model",
            type(model).__name__,
            "has no mixture-of-experts layer, so there is no traffic to hide",
            "set overlap_moe_expert_parallel_comm=False",
        )


def check_hooks(model: Any, inner: GPTModel) -> None:
    """Check, before every iteration, for hooks that the schedule would pass by: it runs the parts inside.

    Args:
        model: the model as the user wrapped it.
        inner: the GPTModel inside.

    Raises:
        UnsupportedModelError: a hook on a module whose own forward or backward does not run.
        ConfigError: the data-parallel wrapper would reduce weight gradients before they exist.
    """
    wrapper, gathers = model, False
    while wrapper is not inner:
        gathers = gathers or bool(getattr(wrapper, "remove_forward_pre_hook_handles", None))
        _check_hooks(wrapper, _HOOKS)
        _check_fused_accumulation(wrapper, inner.config)
        wrapper = wrapper.module
    # Megatron's overlapped parameter gather hooks every module; where it matters, on modules that do run.
    names = _HOOKS if gathers else _HOOKS + _PRE_HOOKS
    _check_hooks(inner, _HOOKS)
    layers, around = [*inner.decoder.layers], [inner.decoder]
    if getattr(inner, "mtp_process", False):
        layers += [layer.mtp_model_layer for layer in inner.mtp.layers]
        around += [inner.mtp, *inner.mtp.layers]
    for module in (*around, *layers, *(layer.mlp for layer in layers if isinstance(layer.mlp, MoELayer))):
        _check_hooks(module, names)


def check_arguments(config: Any, arguments: dict[str, Any]) -> None:
    """Check what forward_step passed to the model.

    Raises:
        ConfigError: an argument that the nodes would drop.
    """
    for name in ("inference_context", "inference_params", "extra_block_kwargs"):
        if arguments.get(name):
            raise ConfigError.of(
                name, type(arguments[name]).__name__, "the schedule's nodes do not take it", f"pass {name}=None"
            )
    packed = arguments.get("packed_seq_params")
    if packed is None:
        return
    if config.mtp_num_layers:
        raise ConfigError.of(
            "packed_seq_params",
            "set",
            "multi-token prediction's nodes do not take packed sequences",
            "set mtp_num_layers=None",
        )
    if getattr(packed, "tokens_per_sample", None) is not None:
        raise ConfigError.of(
            "packed_seq_params.tokens_per_sample",
            packed.tokens_per_sample,
            "the nodes route flattened samples as one",
            "use one sample per micro-batch and leave it None",
        )


def _check_hooks(module: torch.nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(module, name):
            kind = name.strip("_").replace("_", " ")
            raise _unsupported(module, f"has {kind}, which the schedule would not call: it runs the parts inside")


def _check_fused_accumulation(wrapper: Any, config: Any) -> None:
    ddp_config = getattr(wrapper, "ddp_config", None)
    fused = config.delay_wgrad_compute and config.gradient_accumulation_fusion
    if fused and not getattr(ddp_config, "delay_wgrad_compute", True):
        raise ConfigError.of(
            "ddp_config.delay_wgrad_compute",
            False,
            "fused weight gradients that are delayed fire no hook of their own",
            "use DistributedDataParallelConfig(delay_wgrad_compute=True)",
        )


def _unsupported(module: torch.nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError.of(
        "model", type(module).__name__, reason, "remove it, or set overlap_moe_expert_parallel_comm=False"
    )
