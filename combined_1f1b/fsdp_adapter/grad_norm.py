"""The gradient norm over all ranks, and clipping by it, for sharded and unsharded models alike.

Every distinct gradient element counts once, wherever it lives::

    parameter             held by                                         counted
    sharded, dense        one dense data-parallel rank per element        everywhere
    sharded, expert       one expert-data-parallel rank per element       everywhere
    unsharded, dense      all dense data-parallel ranks                   1 / their number on each
    unsharded, expert     all expert-data-parallel ranks                  1 / their number on each
    replicated over TP    all tensor-parallel ranks                       on the first only
    shared over stages    first and last pipeline stage                   on the first only

so that one sum over the world is the square of the norm. With Megatron's distributed optimizer a rank has reduced its
own shard of a buffer only, which the parameters do not show: such a model is refused. The norm is taken in double
precision: its single-precision value then does not depend on how the gradients are sharded, and two partitions clip to
the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import nn
from torch.distributed.tensor import DTensor

from combined_1f1b.errors import ConfigError
from combined_1f1b.fsdp_adapter.units import wrappers_of

_EPSILON = 1.0e-6  # Megatron's, so that the coefficient is Megatron's


def clip_grad_norm_(parameters: Any, max_norm: float, config: Any) -> torch.Tensor:
    """Scale all gradients in place so that their norm over all ranks is at most ``max_norm``.

    Every rank must call it. Nothing is synchronised with the host.

    Args:
        parameters: a wrapper or model, a list of them, or an iterable of parameters with their gradients, reduced, in
            ``main_grad`` (Megatron-DDP) or ``grad``.
        max_norm: the largest norm allowed; must be positive, may be infinite.
        config: the model's TransformerConfig.

    Returns:
        The norm before clipping, a float32 tensor without dimensions on the gradients' device.

    Raises:
        ConfigError: ``max_norm`` is not positive, or a model was wrapped for Megatron's distributed optimizer.
    """
    if not max_norm > 0.0:
        raise ConfigError.of("max_norm", max_norm, "it must be positive", "pass a positive number, or do not clip")
    listed = _parameters_of(parameters)
    with torch.no_grad():
        norm = _grad_norm(listed, config)
        coefficient = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
        gradients = [gradient for parameter in listed if (gradient := _local_gradient(parameter)) is not None]
        if gradients:
            torch._foreach_mul_(gradients, coefficient)
    return norm


def grad_norm(parameters: Any, config: Any) -> torch.Tensor:
    """The norm of all gradients over all ranks, each element counted once.

    Every rank must call it.

    Args:
        parameters: as for ``clip_grad_norm_``.
        config: the model's TransformerConfig.

    Returns:
        A float32 tensor without dimensions on the gradients' device.

    Raises:
        ConfigError: a model was wrapped for Megatron's distributed optimizer.
    """
    with torch.no_grad():
        return _grad_norm(_parameters_of(parameters), config)


def _grad_norm(parameters: list[nn.Parameter], config: Any) -> torch.Tensor:
    device = parameters[0].device if parameters else torch.device("cuda", torch.cuda.current_device())
    by_copies: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = _local_gradient(parameter)
        if gradient is not None and gradient.numel() and _counts_here(parameter, config):
            by_copies.setdefault(_copies(parameter), []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, gradients in by_copies.items():
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64))
        total += norms.square().sum() / copies
    dist.all_reduce(total)
    return total.sqrt().float()


def _parameters_of(parameters: Any) -> list[nn.Parameter]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    listed: list[nn.Parameter] = []
    for item in [parameters] if isinstance(parameters, nn.Module) else parameters:
        if isinstance(item, nn.Module):
            _check_complete(item)
        listed.extend(item.parameters() if isinstance(item, nn.Module) else [item])
    return listed


def _check_complete(model: nn.Module) -> None:
    for wrapper in wrappers_of(model):
        if isinstance(wrapper, DistributedDataParallel) and wrapper.ddp_config.use_distributed_optimizer:
            raise ConfigError.of(
                "use_distributed_optimizer", True, "each rank has the reduced gradients of its own shard only",
                "clip with Megatron's distributed optimizer, or use use_distributed_optimizer=False",
            )  # fmt: skip


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """What this rank holds of a parameter's gradient."""
    gradient = getattr(parameter, "main_grad", None)
    if gradient is None:
        gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _counts_here(parameter: nn.Parameter, config: Any) -> bool:
    if not param_is_not_shared(parameter):
        return False
    if config.tensor_model_parallel_size == 1 and (config.expert_tensor_parallel_size or 1) == 1:
        return True
    is_counted: bool = param_is_not_tensor_parallel_duplicate(
        parameter,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        expert_tp_group=parallel_state.get_expert_tensor_parallel_group(),
    )
    return is_counted


def _copies(parameter: nn.Parameter) -> int:
    """How many ranks hold the same elements of the parameter's gradient, tensor parallelism aside."""
    if isinstance(parameter, DTensor):
        return 1
    size: int
    if getattr(parameter, "allreduce", True):
        size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    else:
        size = parallel_state.get_expert_data_parallel_world_size()
    return size
