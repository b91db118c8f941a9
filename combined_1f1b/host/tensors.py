"""Patches that make a CUDA device argument mean the CPU: factories, conversions and type names of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device

from combined_1f1b.host.patch import Patch
from combined_1f1b.host.random import drawing_generator
from combined_1f1b.host.recording import Placement
from combined_1f1b.host.streams import StreamState

CPU = torch.device("cpu")

# Functions besides torch's own list of device constructors that take `device`.
_LIKE_FACTORIES = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_METHOD_FACTORIES = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def redirected(device: Any) -> Any:
    """The device to use instead: CPU for any spelling of a CUDA device (a bare int is a CUDA index), else unchanged."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device == "cuda" or device.startswith("cuda:") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


def _placement(device: Any) -> Placement:
    """What a device argument means on a GPU machine. A torch.device of the CPU is a "CUDA" tensor's `device`, here."""
    return Placement.HOST if isinstance(device, str) and redirected(device) is device else Placement.DEVICE


def _factory(
    state: StreamState, original: Callable[..., Any], *, default: Placement = Placement.UNNAMED
) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        placement = default
        if kwargs.get("device") is not None:
            placement = _placement(kwargs["device"])
            kwargs["device"] = redirected(kwargs["device"])
        # Page-locked memory needs a CUDA driver; pageable memory holds the same values.
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if "generator" in kwargs:
            kwargs["generator"] = drawing_generator(kwargs["generator"])
        if state.recording is None or placement is Placement.UNNAMED:
            return original(*args, **kwargs)
        with state.recording.placing(placement):
            return original(*args, **kwargs)

    return factory


def _conversion(state: StreamState, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if state.recording is not None:
            device = args[0] if args else kwargs.get("device")
            placement = _placement(device) if isinstance(device, torch.device | str | int) else Placement.UNNAMED
            if placement is Placement.DEVICE:
                state.recording.copy_from_host(self, f"Tensor.to({device!r})")
            elif placement is Placement.HOST and not kwargs.get("non_blocking"):
                state.recording.read_on_host(self, f"Tensor.to({device!r})")
        if args:
            args = (redirected(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = redirected(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _cuda(state: StreamState) -> Callable[..., torch.Tensor]:
    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        """Stands for Tensor.cuda: the tensor is where it belongs already, as a CUDA tensor would be."""
        if state.recording is not None:
            state.recording.copy_from_host(self, "Tensor.cuda")
        return self

    return cuda


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    return self


def _type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            wanted = args[0] if args else kwargs.pop("dtype")
            if isinstance(wanted, type) and wanted.__module__ == "torch.cuda":
                wanted = f"torch.{wanted.__name__}"
            elif isinstance(wanted, str):
                wanted = wanted.replace("torch.cuda.", "torch.", 1)
            return original(self, wanted, *args[1:], **kwargs)
        name = original(self)
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    return type_name


def _device_context_function(state: StreamState, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __torch_function__(  # noqa: N807 - the protocol's name
        self: Any, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.device.type == "cuda":
            if state.recording is None or func not in _device._device_constructors():
                return func(*args, **(kwargs or {}))
            with state.recording.placing(Placement.DEVICE):
                return func(*args, **(kwargs or {}))
        return original(self, func, types, args, kwargs)

    return __torch_function__


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(f, redirected(map_location), *args, **kwargs)

    return load


def _generator_class(stock: type[torch.Generator]) -> type[torch.Generator]:
    """A class that makes stock generators, on the CPU where CUDA is asked for, and that they are instances of."""

    class OfCpu(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not Generator:
                return super().__call__(*args, **kwargs)
            return stock(redirected(args[0] if args else kwargs.get("device", CPU)))

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, stock) if cls is Generator else super().__instancecheck__(instance)

    class Generator(stock, metaclass=OfCpu):  # type: ignore[misc, valid-type]
        pass

    return Generator


def tensor_patches(state: StreamState) -> tuple[Patch, ...]:
    """The patches of `torch` and `torch.Tensor`.

    `torch.utils._device._device_constructors()` is asked first of all: it caches the functions it finds at its first
    call, and must never see ours, or `with torch.device(...)` would stay broken after the end of the activation.
    """
    constructors = sorted(
        {
            function.__name__
            for function in _device._device_constructors()
            if getattr(torch, function.__name__, None) is function
        }
    )
    factories = [
        Patch(
            owner=torch,
            name=name,
            value=_factory(state, getattr(torch, name), default=default),
            reason="factory with an explicit device",
        )
        for names, default in ((constructors, Placement.DEFAULT), (_LIKE_FACTORIES, Placement.UNNAMED))
        for name in names
    ]
    methods = [
        Patch(
            owner=torch.Tensor,
            name=name,
            value=_factory(state, getattr(torch.Tensor, name)),
            reason="factory method with an explicit device",
        )
        for name in _METHOD_FACTORIES
    ]
    return (
        *factories,
        *methods,
        Patch(
            owner=_device.DeviceContext,
            name="__torch_function__",
            value=_device_context_function(state, _device.DeviceContext.__torch_function__),
            reason="`with torch.device('cuda')` and torch.set_default_device hand their device to the stock factories",
        ),
        Patch(owner=torch, name="load", value=_load(torch.load), reason="map_location may name a CUDA device"),
        Patch(
            owner=torch,
            name="Generator",
            value=_generator_class(torch.Generator),
            reason="generators made for an explicit device",
        ),
        Patch(
            owner=torch.Tensor,
            name="to",
            value=_conversion(state, torch.Tensor.to),
            reason="conversion to a CUDA device",
        ),
        Patch(owner=torch.Tensor, name="cuda", value=_cuda(state), reason="conversion to a CUDA device"),
        Patch(owner=torch.Tensor, name="pin_memory", value=_pin_memory, reason="page-locking needs a CUDA driver"),
        Patch(
            owner=torch.Tensor,
            name="type",
            value=_type_name(torch.Tensor.type),
            reason="Megatron's optimizers sort parameters by names such as torch.cuda.BFloat16Tensor",
        ),
        Patch(
            owner=torch.Tensor,
            name="record_stream",
            value=lambda tensor, stream: state.record_tensor(tensor, stream),
            reason="exists for CUDA tensors only",
        ),
    )
