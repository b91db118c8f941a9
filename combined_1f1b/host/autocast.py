"""Patches that make autocast for CUDA mean autocast for the CPU, which is where the tensors are.

The two lists of operators that autocast casts differ in places, so a model under autocast gives other bits here than on
a GPU; two schedules on the host device still see the same list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import autocast_mode

from combined_1f1b.host.patch import Patch


def _cpu_if_cuda(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type


def _redirect(original: Callable[..., Any]) -> Callable[..., Any]:
    """Redirect the leading device type; without one, torch means CUDA."""

    @functools.wraps(original)
    def redirect(*args: Any) -> Any:
        if args and isinstance(args[0], str):
            return original(_cpu_if_cuda(args[0]), *args[1:])
        return original("cpu", *args)

    return redirect


def autocast_patches() -> tuple[Patch, ...]:
    """The patches of `torch.autocast` and of the functions that ask for or set its state."""
    stock = autocast_mode.autocast

    class autocast(stock):  # type: ignore[misc, valid-type]  # noqa: N801 - the name that stands in torch
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(_cpu_if_cuda(device_type), *args, **kwargs)

    owners = (torch, torch.amp, autocast_mode)
    states = ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype")
    return (
        *(
            Patch(owner=owner, name="autocast", value=autocast, reason="autocast for CUDA needs a GPU")
            for owner in owners
        ),
        *(
            Patch(owner=torch, name=name, value=_redirect(getattr(torch, name)), reason="asked by torch.amp.custom_fwd")
            for name in states
        ),
        Patch(
            owner=torch,
            name="get_autocast_gpu_dtype",
            value=functools.partial(torch.get_autocast_dtype, "cpu"),
            reason="older spelling of get_autocast_dtype('cuda')",
        ),
    )
