"""Weight gradients that a backward leaves for later, so that the plan can put them beside an all-to-all.

    B{m}.L{i}.experts   input gradients only; each linear leaves (input, output gradient, weight) behind
    W{m}.L{i}.experts   the products, then autograd's own accumulation: in `.grad`, with every hook on the weight

Transformer Engine's modules keep such a queue of their own. Emptying it assigns `.grad`, which loses what was there and
fires no hook: what they assign is taken off and accumulated in the same way. Their backward still returns something
for the weights, from the grouped linear a buffer that is not filled yet, which must reach neither `.grad` nor a hook:
autograd sees aliases of the weights. Megatron's local linears have no queue, and torch's split of a backward
(`torch.distributed.pipelining`) cannot take their autograd Function apart, so they run one of ours while a node with
delayed weight gradients runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from combined_1f1b.errors import ConfigError
from combined_1f1b.schedule.shadowing import shadowed

_custom_forward = partial(torch.amp.custom_fwd, device_type="cuda")
_custom_backward = partial(torch.amp.custom_bwd, device_type="cuda")


class _Pending(NamedTuple):
    """One linear's weight gradient that is still to be computed."""

    entered: torch.Tensor
    output_gradient: torch.Tensor
    weight: torch.nn.Parameter


Pending = list[_Pending]
"""What one node of one micro-batch has left for its W op, in the order of its backward."""


class _SplitLinear(torch.autograd.Function):
    """entered @ weight.t() + bias, in the operators of Megatron's local linear, without the weight's gradient.

    entered: [..., input size]; weight: [output size, input size]; bias: [output size] or None. The weight is no input
    of the graph: an undefined gradient would still fire the hooks on it. The anchor requires a gradient when nothing
    else does, so that the backward runs.
    """

    @staticmethod
    @_custom_forward
    def forward(
        ctx: Any,
        entered: torch.Tensor,
        bias: torch.Tensor | None,
        _anchor: torch.Tensor | None,
        held: tuple[Pending, torch.nn.Parameter],
    ) -> torch.Tensor:
        ctx.pending, ctx.weight = held
        weight = ctx.weight.detach()
        ctx.save_for_backward(entered, weight)
        ctx.has_bias = bias is not None
        output = torch.matmul(entered, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @_custom_backward
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        entered, weight = ctx.saved_tensors
        entered_gradient = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        flat_gradient, flat_entered = prepare_input_tensors_for_wgrad_compute(gradient, entered)
        ctx.pending.append(_Pending(flat_entered, flat_gradient, ctx.weight))
        return entered_gradient, flat_gradient.sum(dim=0) if ctx.has_bias else None, None, None


class _Aliases(torch.autograd.Function):
    """Aliases of weights that require a gradient and drop it."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(weight.detach() for weight in weights)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        return None, *[None] * len(gradients)


class _Ready:
    """Gradients on their way to their weights, accumulated as a backward does.

    One engine call takes as many as stay in the device's cache, where the accumulation finds them: a call for each
    costs small models more, one call for all costs large models another trip to memory.
    """

    _BYTES = 16 * 2**20

    def __init__(self) -> None:
        self._weights: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._bytes = 0

    def add(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        self._weights.append(weight)
        self._gradients.append(gradient)
        self._bytes += gradient.nbytes
        if self._bytes >= self._BYTES:
            self.accumulate()

    def accumulate(self) -> None:
        if self._weights:
            torch.autograd.backward(self._weights, self._gradients)
        self._weights, self._gradients, self._bytes = [], [], 0


class DelayedWeights:
    """The delayed weight gradients of one part of a layer, for all micro-batches.

    Args:
        modules: the part's modules.

    Attributes:
        pending: the list of the node that runs now, or None outside of such nodes: linears then run as they are.

    Raises:
        ConfigError: a local linear whose weight gradient cannot be taken apart.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.pending: Pending | None = None
        self._queued: list[Any] = []
        self._shadows = ExitStack()
        self._shadowed: list[tuple[torch.nn.Module, str, Callable[..., Any]]] = []
        for module in modules:
            if _has_queue(module):
                self._queued.append(module)
                if not module.fuse_wgrad_accumulation:  # which returns nothing for the weights
                    self._shadowed.append((module, "forward", partial(self._on_aliases, module)))
            elif isinstance(module, ColumnParallelLinear | RowParallelLinear):
                _check_local(module)
                self._shadowed.append((module, "_forward_impl", self._splitting))

    def begin(self) -> None:
        """Replace the linears' forwards, until `reset`."""
        self._shadows.close()
        for module, name, replacement in self._shadowed:
            self._shadows.enter_context(shadowed(module, **{name: replacement(getattr(module, name))}))

    def reset(self) -> None:
        """Give the linears the forwards back that they had, and empty what a failure has left in their own queues."""
        self.pending = None
        self._shadows.close()
        for module in self._queued:
            while not module.wgrad_store.context.empty():
                module.wgrad_store.context.get()

    def accumulate(self, pending: Pending) -> list[Any]:
        """Compute what a node has left and accumulate it as a backward does.

        Returns:
            What was read, for the caller to hold until the lane that allocated it has caught up.
        """
        held: list[Any] = [*pending]
        ready = _Ready()
        for left in pending:
            ready.add(left.weight, left.output_gradient.t().matmul(left.entered))
        pending.clear()
        for module in self._queued:
            if module.wgrad_store.context.empty():  # frozen, or no token came this way
                continue
            held.append(module.wgrad_store.context.queue[0])
            parameters = list(_delayed_parameters(module).values())
            before = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            module.backward_dw()
            gradients = [parameter.grad for parameter in parameters]
            for parameter, gradient, earlier in zip(parameters, gradients, before, strict=True):
                parameter.grad = earlier
                # Megatron's DDP may have taken it already, in a hook of the module's.
                if gradient is not None:
                    ready.add(parameter, gradient)
        ready.accumulate()
        return held

    def _on_aliases(self, module: torch.nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: Any, **options: Any) -> Any:
            weights = _delayed_parameters(module)
            if self.pending is None or not weights:
                return plain(*arguments, **options)
            anchor = torch.empty(0, device="cpu", requires_grad=True)
            aliases = _Aliases.apply(anchor, *[weight.detach() for weight in weights.values()])
            module._parameters.update(zip(weights, aliases, strict=True))
            try:
                return plain(*arguments, **options)
            finally:
                module._parameters.update(weights)

        return forward

    def _splitting(self, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def linear(
            input: torch.Tensor,  # noqa: A002  Megatron passes it by this name
            weight: torch.nn.Parameter,
            bias: torch.Tensor | None,
            **options: Any,
        ) -> torch.Tensor:
            pending = self.pending
            if pending is None or not weight.requires_grad:
                return plain(input=input, weight=weight, bias=bias, **options)
            anchor = None if input.requires_grad else torch.empty(0, device="cpu", requires_grad=True)
            return _SplitLinear.apply(input, bias, anchor, (pending, weight))

        return linear


def _has_queue(module: torch.nn.Module) -> bool:
    store = getattr(module, "wgrad_store", None)
    return store is not None and store.delay_wgrad_compute()


def _delayed_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters whose gradients Transformer Engine's queue brings: it marks them for Megatron's DDP."""
    return {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad and getattr(parameter, "skip_backward_post_hook", False)
    }


def _check_local(module: Any) -> None:
    if module.gradient_accumulation_fusion:
        raise ConfigError.of(
            "gradient_accumulation_fusion", True, "a local layer's fused weight gradient cannot be delayed",
            "use gradient_accumulation_fusion=False, delay_wgrad_compute=False, or Transformer Engine's layers",
        )  # fmt: skip
    if module.tp_group is not None and module.tp_group.size() > 1:
        raise ConfigError.of(
            "tensor_model_parallel_size", module.tp_group.size(),
            "a local layer's weight gradient cannot be delayed past its collectives",
            "use tensor_model_parallel_size=1, delay_wgrad_compute=False, or Transformer Engine's layers",
        )  # fmt: skip
