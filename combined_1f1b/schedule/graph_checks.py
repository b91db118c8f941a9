"""What a graph of a whole iteration cannot hold: settings refused before any work, and changes that a replay misses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, is_graph_safe_cuda_rng_tracker
from megatron.core.utils import get_model_config

from combined_1f1b.config import FLAG, draws_random_numbers
from combined_1f1b.errors import ConfigError

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def trainable_parameters(models: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """The parameters that an optimizer would step, of all chunks."""
    for model in models:
        yield from (parameter for parameter in model.parameters() if parameter.requires_grad)


def check_capturable(model: torch.nn.Module, *, is_training: bool) -> None:
    """Refuse what cannot be captured.

    Args:
        is_training: False for an evaluation, which Megatron's own driver runs whatever the flag says.

    Raises:
        ConfigError: the setting, why it cannot be captured, and what to set instead.
    """
    config = get_model_config(model)
    if torch.cuda.is_available() and _cuda_backend() == "gloo":
        raise ConfigError.of("backend", "gloo", "it copies through the host, which no graph captures", "use nccl")
    if config.num_moe_experts and not config.moe_pad_expert_input_to_capacity:
        raise ConfigError.of(
            "moe_pad_expert_input_to_capacity", False, "dropless routing copies token counts to the CPU in every layer",
            "set it, with moe_expert_capacity_factor",
        )  # fmt: skip
    if config.timers is not None:
        raise ConfigError.of("timers", "set", "Megatron's timers synchronise inside the iteration", "use timers=None")
    if config.cuda_graph_impl not in ("none", "full_iteration"):
        raise ConfigError.of(
            "cuda_graph_impl", config.cuda_graph_impl, "a graph cannot capture other graphs' captures", "use 'none'"
        )
    if config.variable_seq_lengths and config.pipeline_model_parallel_size > 1:
        raise ConfigError.of(
            "variable_seq_lengths", True, "pipeline stages read each other's shapes on the CPU", "use fixed lengths"
        )
    own_transfers = is_training and getattr(config, FLAG) and config.virtual_pipeline_model_parallel_size is None
    stages = config.pipeline_model_parallel_size > 1 and not own_transfers
    if stages and config.batch_p2p_comm and config.batch_p2p_sync:
        raise ConfigError.of(
            "batch_p2p_sync", True, "pipeline stages synchronise the device after each transfer",
            "use batch_p2p_sync=False, or batch_p2p_comm=False with overlap_p2p_comm",
        )  # fmt: skip
    _check_data_parallel(model)
    _check_random_state(config)
    owner = getattr(config.grad_scale_func, "__self__", None)
    for optimizer in (owner, *getattr(owner, "chained_optimizers", ())):
        if isinstance(getattr(optimizer, "grad_scaler", None), DynamicGradScaler):
            raise ConfigError.of(
                "grad_scale_func", "a dynamic loss scale",
                "the scale is another tensor after each change, and a replay keeps the old one",
                "set a constant loss_scale, or train in bf16",
            )  # fmt: skip


def _cuda_backend() -> str | None:
    """The backend for CUDA tensors, of which `get_backend` says nothing where it was not named, or one per device."""
    backends = (each.split(":") for each in torch.distributed.get_backend_config().split(","))
    return dict(backends).get("cuda")


def _check_data_parallel(model: torch.nn.Module) -> None:
    ddp_config = getattr(model, "ddp_config", None)
    for name in ("check_for_nan_in_grad", "check_for_large_grads"):
        if getattr(ddp_config, name, False):
            raise ConfigError.of(name, True, "the check synchronises inside the iteration", f"use {name}=False")
    if getattr(ddp_config, "overlap_param_gather", False):
        raise ConfigError.of(
            "overlap_param_gather", True, "the optimizer step starts the gathers, outside the graph",
            "use overlap_param_gather=False",
        )  # fmt: skip


def _check_random_state(config: Any) -> None:
    if not is_graph_safe_cuda_rng_tracker(get_cuda_rng_tracker()):
        raise ConfigError.of(
            "use_cudagraphable_rng", False, "a capture can neither read nor set the values of a random state",
            "call model_parallel_cuda_manual_seed(seed, use_cudagraphable_rng=True)",
        )  # fmt: skip
    if config.recompute_granularity is not None and draws_random_numbers(config):
        raise ConfigError.of(
            "recompute_granularity", config.recompute_granularity,
            "recomputation cannot go back to the random numbers of the forward with graph-safe random states",
            "use recompute_granularity=None, or no dropout and no router jitter",
        )  # fmt: skip


def captured_settings(models: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """What Python decides by in an iteration and a replay does not look at again, by a name for the user."""
    settings: dict[str, Any] = {}
    for index, model in enumerate(models):
        config = get_model_config(model)
        place = "" if config is get_model_config(models[0]) else f"model[{index}].config."
        settings |= {
            f"{place}{name}": _as_compared(value) for name, value in vars(config).items() if _is_setting(value)
        }
        settings[f"model[{index}].training"] = model.training
        for name, parameter in model.named_parameters():
            is_plain = type(parameter.data) is torch.Tensor
            settings[f"model[{index}].{name}.requires_grad"] = parameter.requires_grad
            settings[f"the memory of model[{index}].{name}"] = (id(parameter), is_plain and parameter.data_ptr())
        owner = getattr(config.grad_scale_func, "__self__", None)
        if hasattr(owner, "get_loss_scale"):
            settings["the tensor behind grad_scale_func"] = id(owner.get_loss_scale())
    return settings


def _is_setting(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_setting, value))
    return isinstance(value, _PLAIN) or callable(value)


def _as_compared(value: Any) -> Any:
    """A value that keeps what it is now, and is alike for what means the same.

    Megatron's interleaved driver makes a list of one function for all chunks (`grad_sync_func`, `param_sync_func`).
    """
    if not isinstance(value, list):
        return value
    is_one_function = value and callable(value[0]) and all(each == value[0] for each in value)
    return value[0] if is_one_function else tuple(map(_as_compared, value))


def check_unchanged(now: dict[str, Any], then: dict[str, Any]) -> None:
    """Refuse a change that a replay would silently ignore.

    Raises:
        ConfigError: the first name that has another value than when the graph was begun.
    """
    if now == then:
        return
    for name in sorted(now.keys() | then.keys()):
        before, after = then.get(name, "not there"), now.get(name, "not there")
        if before is not after and before != after:
            raise ConfigError.of(name, after, f"the graph was built with {before!r}", "call reset() first")
