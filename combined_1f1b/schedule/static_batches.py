"""Device buffers with fixed addresses for the batches of a captured iteration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from combined_1f1b.errors import ConfigError


class StaticBatches:
    """Copies every micro-batch's batch into buffers that keep their addresses.

    A batch may be any nesting of mappings, tuples and lists; its tensors (on the CPU or the device) get device buffers,
    every other value (None, numbers, strings) has to stay the same, since a replay does not see it again.
    """

    def __init__(self) -> None:
        self._batches: list[Any] = []

    def load(self, data_iterator: Iterator[Any] | None, count: int) -> Iterator[Any] | None:
        """Read `count` batches, copy them, and return an iterator over the buffers.

        Raises:
            ConfigError: a batch has another structure, shape, dtype or value than the one before it in its place.
        """
        if data_iterator is None:
            return None
        for index in range(count):
            batch = next(data_iterator)
            if index == len(self._batches):
                self._batches.append(_allocate(batch))
            self._batches[index] = _copy(batch, self._batches[index], f"micro-batch {index}")
        return iter(self._batches[:count])


def _allocate(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device=torch.cuda.current_device())
    if isinstance(value, Mapping):
        return {key: _allocate(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_allocate(item) for item in value)
    return value


def _copy(value: Any, buffer: Any, place: str) -> Any:
    if isinstance(value, torch.Tensor):
        known = isinstance(buffer, torch.Tensor)
        if not known or value.shape != buffer.shape or value.dtype != buffer.dtype:
            was = f"{tuple(buffer.shape)} {buffer.dtype}" if known else type(buffer).__name__
            raise _changed(place, f"{tuple(value.shape)} {value.dtype}", was)
        return buffer.copy_(value, non_blocking=True)
    if isinstance(value, Mapping):
        if not isinstance(buffer, dict) or value.keys() != buffer.keys():
            raise _changed(
                place, sorted(map(str, value)), sorted(map(str, buffer)) if isinstance(buffer, dict) else buffer
            )
        return {key: _copy(item, buffer[key], f"{place}, {key!r}") for key, item in value.items()}
    if isinstance(value, tuple | list):
        if type(value) is not type(buffer) or len(value) != len(buffer):
            raise _changed(place, f"{type(value).__name__} of {len(value)}", type(buffer).__name__)
        items = zip(value, buffer, strict=True)
        return type(value)(_copy(item, known, f"{place}, item {i}") for i, (item, known) in enumerate(items))
    if isinstance(buffer, torch.Tensor) or value != buffer:
        raise _changed(place, value, "a tensor" if isinstance(buffer, torch.Tensor) else buffer)
    return value


def _changed(place: str, value: Any, before: Any) -> ConfigError:
    return ConfigError.of(
        f"batch ({place})",
        value,
        f"a captured iteration has fixed buffers, and this was {before}",
        "call reset() first",
    )
