"""Random state of the host device: its "CUDA" generator is the CPU generator, with CUDA's graph-safe states on top.

Random operators on CPU tensors draw from `torch.default_generator`, so that generator is what torch.cuda's functions
read, seed and set here. A graph-safe state is a generator object that can be made the current one: on CUDA that swaps a
reference; here the outgoing state is copied into its object and the incoming one out of its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

from combined_1f1b.host.streams import active_state

# Loggers that watch whether "CPU" draws happen inside a "CUDA" random context. Both are one generator here, so they
# would warn at every dropout.
_WATCHING_LOGGERS = (
    "megatron.core.tensor_parallel.random",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.utils",
)
_WATCHING_MESSAGE = "CPU RNG state changed within GPU RNG context"


def _assert_not_capturing(call: str) -> None:
    """As in CUDA, a capture may swap graph-safe states but neither read nor set their values."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"Cannot call CUDAGeneratorImpl::{call} during CUDA graph capture.")


class HostGeneratorState(torch.Generator):
    """A graph-safe state: keeps its own values while it is not current; while it is, its values are the live ones."""

    _default: HostDefaultGenerator

    @classmethod
    def _of(cls, default: HostDefaultGenerator) -> HostGeneratorState:
        """A new state with the values that are live now."""
        state = cls()
        state._default = default
        state._store(torch.default_generator.get_state())
        return state

    def _store(self, values: torch.Tensor) -> None:
        super().set_state(values)

    def _load(self) -> torch.Tensor:
        return super().get_state()

    @property
    def _is_live(self) -> bool:
        return self._default.live is self

    @property
    def device(self) -> torch.device:
        return self._default.device

    def get_state(self) -> torch.Tensor:
        _assert_not_capturing("current_seed")
        return torch.default_generator.get_state() if self._is_live else super().get_state()

    def set_state(self, new_state: torch.Tensor) -> HostGeneratorState:
        _assert_not_capturing("set_current_seed")
        if self._is_live:
            torch.default_generator.set_state(new_state)
        else:
            super().set_state(new_state)
        return self

    def manual_seed(self, seed: int) -> HostGeneratorState:
        _assert_not_capturing("set_current_seed")
        if self._is_live:
            torch.default_generator.manual_seed(seed)
        else:
            super().manual_seed(seed)
        return self

    def seed(self) -> int:
        _assert_not_capturing("set_current_seed")
        return torch.default_generator.seed() if self._is_live else super().seed()

    def initial_seed(self) -> int:
        _assert_not_capturing("current_seed")
        return torch.default_generator.initial_seed() if self._is_live else super().initial_seed()

    def clone_state(self) -> HostGeneratorState:
        state = HostGeneratorState._of(self._default)
        state._store(self.get_state())
        return state

    def graphsafe_get_state(self) -> HostGeneratorState:
        return self


class HostDefaultGenerator(torch.Generator):
    """Stands in `torch.cuda.default_generators`; its values are those of `torch.default_generator`.

    Attributes:
        live: the graph-safe state that is current, or None until one is asked for.
    """

    def __init__(self, *args: object) -> None:
        self.live: HostGeneratorState | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def get_state(self) -> torch.Tensor:
        _assert_not_capturing("current_seed")
        return torch.default_generator.get_state()

    def set_state(self, new_state: torch.Tensor) -> HostDefaultGenerator:
        _assert_not_capturing("set_current_seed")
        torch.default_generator.set_state(new_state)
        return self

    def manual_seed(self, seed: int) -> HostDefaultGenerator:
        _assert_not_capturing("set_current_seed")
        torch.default_generator.manual_seed(seed)
        return self

    def seed(self) -> int:
        _assert_not_capturing("set_current_seed")
        return torch.default_generator.seed()

    def initial_seed(self) -> int:
        _assert_not_capturing("current_seed")
        return torch.default_generator.initial_seed()

    def clone_state(self) -> HostGeneratorState:
        return HostGeneratorState._of(self)

    def graphsafe_get_state(self) -> HostGeneratorState:
        if self.live is None:
            self.live = HostGeneratorState._of(self)
        return self.live

    def graphsafe_set_state(self, state: HostGeneratorState) -> HostDefaultGenerator:
        host = active_state()
        if host is not None and host.recording is not None:
            host.recording.swap(state)
        outgoing = self.graphsafe_get_state()
        if outgoing is not state:
            outgoing._store(torch.default_generator.get_state())
            torch.default_generator.set_state(state._load())
            self.live = state
        return self


def drawing_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """The generator that an operator has to draw from when it is given this one: the live values are the CPU's."""
    if isinstance(generator, HostDefaultGenerator) or (
        isinstance(generator, HostGeneratorState) and generator._is_live
    ):
        return torch.default_generator
    return generator


@contextlib.contextmanager
def quiet_generator_watchers() -> Iterator[None]:
    """Drop Megatron's warning that a CPU draw happened in a CUDA random context, while the block lasts."""

    def keep(record: logging.LogRecord) -> bool:
        return record.getMessage() != _WATCHING_MESSAGE

    loggers = [logging.getLogger(name) for name in _WATCHING_LOGGERS]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)
