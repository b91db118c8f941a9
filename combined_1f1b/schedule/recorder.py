"""Record how the user's forward_step calls the model, without running the model.

For the length of the call `forward` and `build_schedule_plan` of the innermost model instance are shadowed. The user's
function keeps working on the real, wrapped model: isinstance checks, unwrap_model and Float16Module's input conversion
see what they always see. What comes back from the model is a placeholder that has to reach us unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from combined_1f1b.errors import ConfigError
from combined_1f1b.schedule.shadowing import shadowed

_READ_ONLY = {
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
}


class _Placeholder(torch.Tensor):
    """Stands for the model's output, which does not exist yet. Only Float16Module's `.float()` may touch it."""

    to_float32: bool = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            args[0].to_float32 = True
            return args[0]
        raise ConfigError(
            f"forward_step changes the model's output ({getattr(func, '__name__', func)}): the schedule runs the model "
            "after forward_step has returned; return the output as it is and move what follows into loss_func"
        )


@dataclass
class RecordedCall:
    """What one forward_step asked for.

    Attributes:
        arguments: the model's forward arguments by name, defaults filled in.
        loss_func: what forward_step returned beside the output.
        input_tensor: copy of `decoder.input_tensor` at recording time, which the next set_input_tensor overwrites.
        output_to_float32: a Float16Module around the model converts the output.
    """

    arguments: dict[str, Any]
    loss_func: Callable[..., Any] | None
    input_tensor: torch.Tensor | None
    output_to_float32: bool


@dataclass
class _Calls:
    placeholder: _Placeholder
    arguments: list[dict[str, Any]] = field(default_factory=list)


def record_forward_step(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: torch.nn.Module,
    innermost: torch.nn.Module,
) -> RecordedCall:
    """Call the user's function once and return what it wants the model to do.

    Args:
        forward_step_func: `forward_step_func(data_iterator, model) -> (output, loss_func)`.
        model: the model as the user wrapped it.
        innermost: the GPTModel inside.

    Raises:
        ConfigError: the function never calls the model, calls it twice, or changes its output.
    """
    with _recording(innermost) as calls:
        output, loss_func = forward_step_func(data_iterator, model)
    if len(calls.arguments) != 1:
        times = "never calls the model" if not calls.arguments else f"calls the model {len(calls.arguments)} times"
        raise ConfigError(
            f"forward_step {times}: the schedule runs one forward of the model per micro-batch; call it once"
        )
    if output is not calls.placeholder:
        raise ConfigError(
            f"forward_step returns {type(output).__name__} instead of the model's output: return the output as it is "
            "and move what follows into loss_func"
        )
    return RecordedCall(
        arguments=calls.arguments[0],
        loss_func=loss_func,
        input_tensor=innermost.decoder.input_tensor,
        output_to_float32=calls.placeholder.to_float32,
    )


def _modes() -> tuple[Any, ...]:
    devices = ("cuda", "cpu")
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast)


@contextmanager
def _recording(innermost: torch.nn.Module) -> Iterator[_Calls]:
    config = innermost.config  # its dtype decides whether Float16Module converts the output
    dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32
    empty = torch.empty(0, dtype=dtype, device=next(innermost.parameters()).device)
    calls = _Calls(torch.Tensor._make_subclass(_Placeholder, empty))  # type: ignore[arg-type]
    signature = inspect.signature(type(innermost).forward)
    modes = _modes()

    def record(*args: Any, **kwargs: Any) -> _Placeholder:
        if _modes() != modes:
            raise ConfigError(
                "forward_step calls the model under another grad mode or autocast than its own: the schedule runs the "
                "model after forward_step has returned, outside of it; use config.enable_autocast or forward_only"
            )
        bound = signature.bind(innermost, *args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        del arguments["self"]
        calls.arguments.append(arguments)
        return calls.placeholder

    with shadowed(innermost, forward=record, build_schedule_plan=record):
        yield calls
