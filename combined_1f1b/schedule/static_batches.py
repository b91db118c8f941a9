"""Device buffers with fixed addresses for the batches of a captured iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from combined_1f1b.errors import ConfigError

_FIX = "call reset() first"


class StaticBatches:
    """Copies every micro-batch's batch into buffers of its own, which keep their addresses.

    A batch may be any nesting of mappings, tuples, named tuples, lists and dataclasses; its tensors (on the CPU or the
    device) get device buffers, every other value (None, numbers, strings) has to stay the same, since a replay does not
    see it again. What `load` hands out are new containers around the buffers: a forward_step may take them apart.
    Pinned tensors are copied without waiting, as `.cuda(non_blocking=True)` would: the loader must not refill them.
    """

    def __init__(self) -> None:
        self._buffers: list[Any] | None = None
        self._has_data = False

    def load(self, data_iterator: Iterator[Any] | None, count: int) -> Iterator[Any] | None:
        """Read `count` batches, copy them on the current stream, and return an iterator over the buffers.

        Raises:
            ConfigError: a batch has another structure, shape, dtype or value than the one before it in its place, or
                there is an iterator where there was none.
            StopIteration: the iterator ended early; a note says at which micro-batch.
        """
        if self._buffers is None:
            self._buffers, self._has_data = [], data_iterator is not None
        if self._has_data != (data_iterator is not None):
            raise ConfigError.of("data_iterator", data_iterator, "the graph was built with the opposite of None", _FIX)
        if data_iterator is None:
            return None
        batches = []
        for index in range(count):
            try:
                batch = next(data_iterator)
            except StopIteration as error:
                error.add_note(f"the data iterator ended at micro-batch {index} of {count}")
                raise
            if index == len(self._buffers):
                self._buffers.append(_rebuilt(batch, _allocate))
            batches.append(_copy(batch, self._buffers[index], f"micro-batch {index}"))
        return iter(batches)


def _allocate(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device=torch.cuda.current_device(), requires_grad=False)
    if hasattr(value, "__array__"):
        raise ConfigError.of("batch", type(value).__name__, "a graph has fixed tensors as inputs", "make it a tensor")
    return value


def _children(value: Any) -> dict[Any, Any] | None:
    """The items of a container by key, index or field; None for a leaf."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return None


def _rebuilt(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same nesting with every leaf replaced."""
    children = _children(value)
    return (
        leaf(value) if children is None else _with_children(value, {k: _rebuilt(v, leaf) for k, v in children.items()})
    )


def _with_children(value: Any, children: dict[Any, Any]) -> Any:
    if isinstance(value, Mapping):
        return children
    if isinstance(value, tuple | list):
        items = children.values()
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return dataclasses.replace(value, **children)


def _copy(value: Any, buffer: Any, place: str) -> Any:
    """Copy the tensors of a batch into its buffers; returns the batch's nesting around them."""
    if isinstance(value, torch.Tensor):
        is_known = isinstance(buffer, torch.Tensor)
        if not is_known or value.shape != buffer.shape or value.dtype != buffer.dtype:
            raise _changed(place, _described(value), buffer)
        with torch.no_grad():
            return buffer.copy_(value, non_blocking=True)
    children, known = _children(value), _children(buffer)
    if children is not None:
        is_same_kind = isinstance(buffer, dict) if isinstance(value, Mapping) else type(value) is type(buffer)
        if known is None or not is_same_kind or children.keys() != known.keys():
            raise _changed(place, _described(value), buffer)
        return _with_children(value, {k: _copy(item, known[k], f"{place}, {k!r}") for k, item in children.items()})
    if known is not None or isinstance(buffer, torch.Tensor) or type(value) is not type(buffer) or value != buffer:
        raise _changed(place, value, buffer)
    return value


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    children = _children(value)
    return value if children is None else f"{type(value).__name__} of {', '.join(map(str, children))}"


def _changed(place: str, value: Any, before: Any) -> ConfigError:
    return ConfigError.of(
        f"batch ({place})", value, f"a captured iteration has fixed inputs, and this was {_described(before)}", _FIX
    )
