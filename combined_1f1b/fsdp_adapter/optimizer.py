"""Hooks that make a torch optimizer safe and right on a sharded model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from combined_1f1b.errors import ConfigError
from combined_1f1b.fsdp_adapter import mfsdp_v2
from combined_1f1b.fsdp_adapter.wrapper import ShardedDataParallel

_PREPARED = "_combined_1f1b_wrappers"


def prepare_optimizer(
    optimizer: torch.optim.Optimizer, wrapped: ShardedDataParallel | Sequence[ShardedDataParallel]
) -> torch.optim.Optimizer:
    """Hook an optimizer built from sharded parameters: gradients are cast, and compute weights follow each step.

    Before each step it is checked that no unit is gathered (its full weights would go stale) and that every
    trainable parameter has a gradient (else the step would silently skip it).

    Args:
        optimizer: a torch optimizer over ``wrapped.parameters()``, or over the parameters of all wrappers.
        wrapped: a wrapper or all wrappers. May be called once per wrapper: the hooks are registered once.

    Returns:
        The same optimizer.

    Raises:
        ConfigError: an optimizer of Megatron's, not a torch optimizer, one built from unsharded parameters, or one that
            holds none of a wrapper's trainable parameters.
    """
    wrappers = list(wrapped) if isinstance(wrapped, Sequence) else [wrapped]
    _check_optimizer(optimizer)
    for wrapper in wrappers:
        _check_parameters(optimizer, wrapper)
    prepared: list[ShardedDataParallel] | None = getattr(optimizer, _PREPARED, None)
    if prepared is None:
        prepared = []
        setattr(optimizer, _PREPARED, prepared)
        known = prepared

        def check_before_step(hooked: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            del args, kwargs
            for wrapper in known:
                _check_step(hooked, wrapper)

        optimizer.register_step_pre_hook(check_before_step)
        mfsdp_v2.fully_shard_optimizer(optimizer)
    prepared.extend(wrapper for wrapper in wrappers if not any(wrapper is other for other in prepared))
    return optimizer


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_optimizer(optimizer: Any) -> None:
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    if isinstance(optimizer, MegatronOptimizer):
        raise ConfigError.of(
            "optimizer",
            type(optimizer).__name__,
            "Megatron's optimizers keep main weights and gradients in the buffers of Megatron-DDP, and a sharded "
            "model has none",
            "build a torch.optim optimizer from wrapped.parameters()",
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError.of(
            "optimizer", type(optimizer).__name__, "not a torch.optim.Optimizer", "pass a torch optimizer"
        )


def _check_parameters(optimizer: torch.optim.Optimizer, wrapper: Any) -> None:
    if not isinstance(wrapper, ShardedDataParallel):
        raise ConfigError.of("wrapped", type(wrapper).__name__, "not a sharded model", "pass what shard_model returned")
    optimized = {id(parameter) for parameter in _parameters_of(optimizer)}
    for group in wrapper.groups:
        for name, parameter in zip(group.parameter_names, group.unsharded_parameters, strict=True):
            if id(parameter) in optimized:
                raise ConfigError.of(
                    "optimizer",
                    name,
                    "it holds parameters from before the model was sharded, which no step may update",
                    "build the optimizer from wrapped.parameters(), after shard_model",
                )
    trainable = [parameter for _, parameter in wrapper.named_sharded_parameters() if parameter.requires_grad]
    if trainable and not any(id(parameter) in optimized for parameter in trainable):
        raise ConfigError.of(
            "optimizer",
            type(optimizer).__name__,
            f"it holds none of the {len(trainable)} trainable parameters of a wrapper, so no step would update them",
            "build it from the parameters() of every wrapper it is prepared for",
        )


def _check_step(optimizer: torch.optim.Optimizer, wrapper: ShardedDataParallel) -> None:
    gathered = wrapper.gathered_units()
    if gathered:
        raise ConfigError(
            f"optimizer.step(): units {', '.join(gathered)} are gathered, and their full weights would go stale; "
            "step only after the forward-backward function has returned"
        )
    if wrapper.shared_embedding is not None and wrapper.shared_embedding.is_pending:
        raise ConfigError(
            f"optimizer.step(): the gradient of {wrapper.shared_embedding.name} lacks what the other pipeline stages "
            "with a copy of it contribute; set config.finalize_model_grads_func, or call finish_grad_sync() on every "
            "wrapper after the forward-backward function"
        )
    optimized = {id(parameter) for parameter in _parameters_of(optimizer)}
    for name, parameter in wrapper.named_sharded_parameters():
        if id(parameter) in optimized and parameter.requires_grad and parameter.grad is None:
            raise ConfigError(
                f"optimizer.step(): parameter {name} has no gradient, so the step would silently skip it; "
                "run the forward-backward function after zero_grad and before each step, and freeze with "
                "requires_grad_(False) what is not trained"
            )
