"""What a captured graph replays: operations on fixed tensors, storage sizes and generator swaps, in the order of issue.

Every tensor on a tape is an alias of its own, made when the operation was recorded: what Python does to the original
afterwards (`.data =`, `resize_`) must not reach the replay. Tensors that the capture brought into being stay alive with
the tape, as a graph's private memory pool keeps its addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from combined_1f1b.host.random import HostDefaultGenerator, HostGeneratorState


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operator call.

    Attributes:
        function: the operator, as the dispatcher knows it.
        arguments, keywords: what it was called with, tensors as aliases.
        targets: for each leaf of the result, the tensor that a replay writes it to; None for what is no tensor, or
            shares the memory of an argument.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    targets: tuple[torch.Tensor | None, ...]

    def run(self) -> None:
        leaves = pytree.tree_leaves(self.function(*self.arguments, **self.keywords))
        for leaf, target in zip(leaves, self.targets, strict=True):
            if target is not None:
                target.copy_(leaf)


@dataclass(slots=True, kw_only=True)
class Collective:
    """One call of a collective or of a transfer between ranks, which write into their arguments.

    Attributes:
        function, arguments, keywords: as of an `Operation`.
        works: what its latest run returned to wait for.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    works: list[Any] = field(default_factory=list)

    def run(self) -> None:
        self.works = works_of(self.function(*self.arguments, **self.keywords))

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a collective where Python waited: two ranks that send to each other both have to receive first."""

    collective: Collective

    def run(self) -> None:
        self.collective.wait()


@dataclass(frozen=True, slots=True)
class StorageSize:
    """Give a storage the size it had at this point; its content then is undefined, as fresh memory's is."""

    storage: torch.UntypedStorage
    size: int

    def run(self) -> None:
        if self.storage.nbytes() != self.size:
            self.storage.resize_(self.size)


@dataclass(frozen=True, slots=True)
class GeneratorSwap:
    """Make another graph-safe state the one that operators draw from."""

    generator: HostDefaultGenerator
    state: HostGeneratorState

    def run(self) -> None:
        self.generator.graphsafe_set_state(self.state)


class Tape:
    """The steps of one graph.

    Args:
        generator: the default generator.
        state: the graph-safe state that was current when the capture began.
    """

    def __init__(self, generator: HostDefaultGenerator, state: HostGeneratorState) -> None:
        self.steps: list[Operation | Collective | Wait | StorageSize | GeneratorSwap] = []
        self._generator = generator
        self._state = state

    def replay(self) -> None:
        """Run every step. Random operators draw from the states that they drew from when captured, as those are now."""
        outside = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(self._state)
        try:
            # The operators were recorded beneath autograd and autocast.
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                for step in self.steps:
                    step.run()
                for step in self.steps:
                    if isinstance(step, Collective):
                        step.wait()
        finally:
            self._generator.graphsafe_set_state(outside)


def works_of(result: Any) -> list[Any]:
    """What a collective returned to wait for."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.ScriptObject)]


def alias(value: Any) -> Any:
    """The same arguments or results with every tensor replaced by an alias of it."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors that share memory have in common, while one of them lives."""
    return tensor.untyped_storage()._cdata


def tensors_of(value: Any) -> Sequence[torch.Tensor]:
    """Every tensor in a nesting of arguments or results."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
