"""The blocks of torch.cuda that change what is current and change it back: `stream(...)` and `device(...)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from combined_1f1b.host.streams import HostStream


class StreamContext:
    """Stands for torch.cuda.stream(...): makes a stream current and puts the previous stream and device back."""

    def __init__(self, stream: HostStream | None) -> None:
        self.stream = stream
        self._previous: tuple[int, HostStream, HostStream] | None = None

    def __enter__(self) -> None:
        if self.stream is None:
            return
        on_device = torch.cuda.current_stream(self.stream.device_index)
        self._previous = (torch.cuda.current_device(), torch.cuda.current_stream(), on_device)
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *exception: object) -> None:
        if self._previous is None:
            return
        device_index, stream, on_device = self._previous
        self._previous = None
        if on_device.device_index != stream.device_index:
            torch.cuda.set_stream(on_device)
        torch.cuda.set_stream(stream)
        torch.cuda.set_device(device_index)


class DeviceContext:
    """Stands for torch.cuda.device(...): makes a device current for a block; a CPU device changes nothing."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._previous = 0

    def __enter__(self) -> None:
        self._previous = torch.cuda.current_device()
        torch.cuda.set_device(self._device)

    def __exit__(self, *exception: object) -> None:
        torch.cuda.set_device(self._previous)
