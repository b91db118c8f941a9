"""One driver for the model chunks of a pipeline rank: each unit is its own chunk's, the streams are shared.

Reductions are no part of it: a chunk's step makes them by the chunk's own driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from combined_1f1b.errors import ConfigError
from combined_1f1b.fsdp_adapter.protocol import NullSharding, RankDriver, ShardingDriver

if TYPE_CHECKING:
    import torch


def joined(drivers: Sequence[ShardingDriver]) -> RankDriver:
    """One driver for all chunks of a rank.

    Raises:
        ConfigError: some chunks are sharded and others are not, or they were sharded one by one.
    """
    if len(drivers) == 1:
        return drivers[0]
    if all(isinstance(driver, NullSharding) for driver in drivers):
        return drivers[0]
    unsharded = [number for number, driver in enumerate(drivers) if isinstance(driver, NullSharding)]
    if unsharded:
        raise ConfigError.of(
            "model",
            f"{len(drivers)} chunks",
            f"chunks {unsharded} are not sharded and the others are",
            "pass the list of all chunks to one call of shard_model",
        )
    streams = {(driver.gather_stream, driver.reduce_stream) for driver in drivers}
    if len(streams) > 1:
        raise ConfigError.of(
            "model",
            f"{len(drivers)} chunks",
            "their units do not share one context",
            "pass the list of all chunks to one call of shard_model",
        )
    return SeveralChunks(drivers)


class SeveralChunks:
    """The drivers of several chunks that share a context (see ``protocol.RankDriver``)."""

    def __init__(self, drivers: Sequence[ShardingDriver]) -> None:
        self._drivers = tuple(drivers)
        self._driver_of = {unit: driver for driver in drivers for unit in driver.units}
        assert len(self._driver_of) == sum(len(driver.units) for driver in drivers), "two chunks have the same unit"

    @property
    def units(self) -> tuple[str, ...]:
        """The units of all chunks."""
        return tuple(self._driver_of)

    @property
    def trainable_units(self) -> tuple[str, ...]:
        """The units of all chunks that have gradients to reduce."""
        return tuple(unit for driver in self._drivers for unit in driver.trainable_units)

    @property
    def gather_stream(self) -> torch.cuda.Stream | None:
        """The shared context's."""
        return self._drivers[0].gather_stream

    def begin_iteration(self) -> None:
        """Of every chunk: each looks after its own gradients; the stream is forked as often, which changes nothing."""
        for driver in self._drivers:
            driver.begin_iteration()

    def gather(self, unit: str) -> None:
        """Of the unit's chunk."""
        self._driver_of[unit].gather(unit)

    def free(self, unit: str) -> None:
        """Of the unit's chunk."""
        self._driver_of[unit].free(unit)

    def begin_backward(self) -> None:
        """Once: the reduction stream is shared."""
        self._drivers[0].begin_backward()

    def finish_iteration(self) -> None:
        """Of every chunk."""
        for driver in self._drivers:
            driver.finish_iteration()

    def abort(self) -> None:
        """Of every chunk."""
        for driver in self._drivers:
            driver.abort()
