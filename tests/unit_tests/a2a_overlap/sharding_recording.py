"""A sharding driver that writes down what it is asked, for tests of executors and schedules."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from combined_1f1b.fsdp_adapter.protocol import NullSharding, ShardingDriver


class RecordingSharding:
    """Records every call as the text of its op, then forwards it to another driver.

    Attributes:
        calls: the calls so far, such as ``GATHER.L1``, ``REDUCE.L1.experts last``, ``BEGIN_BACKWARD``.
    """

    def __init__(self, driver: ShardingDriver | None = None, *, units: tuple[str, ...] = ()) -> None:
        """Record in front of a driver.

        Args:
            driver: the driver that does the work. None: nothing does.
            units: the unit names to claim when there is no driver.
        """
        self._driver: Any = driver
        self._units = units
        self.calls: list[str] = []

    @property
    def units(self) -> tuple[str, ...]:
        """The units of the driver behind, or the claimed ones."""
        return self._units if self._driver is None else tuple(self._driver.units)

    @property
    def trainable_units(self) -> tuple[str, ...]:
        """The trainable units of the driver behind, or the claimed ones."""
        return self._units if self._driver is None else tuple(self._driver.trainable_units)

    @property
    def gather_stream(self) -> Any:
        """The gather stream of the driver behind, if any."""
        return getattr(self._driver, "gather_stream", None)

    @property
    def reduce_stream(self) -> Any:
        """The reduction stream of the driver behind, if any."""
        return getattr(self._driver, "reduce_stream", None)

    def begin_iteration(self) -> None:
        """Record BEGIN_ITERATION."""
        self._record("BEGIN_ITERATION")
        if self._driver is not None:
            self._driver.begin_iteration()

    def gather(self, unit: str) -> None:
        """Record GATHER.unit."""
        self._record(f"GATHER.{unit}")
        if self._driver is not None:
            self._driver.gather(unit)

    def free(self, unit: str) -> None:
        """Record FREE.unit."""
        self._record(f"FREE.{unit}")
        if self._driver is not None:
            self._driver.free(unit)

    def reduce(self, unit: str, *, is_last: bool) -> None:
        """Record REDUCE.unit, marked when it is the iteration's last micro-batch."""
        self._record(f"REDUCE.{unit} last" if is_last else f"REDUCE.{unit}")
        if self._driver is not None:
            self._driver.reduce(unit, is_last=is_last)

    def swap_gradients(self, unit: str, gradients: Any) -> list[Any]:
        """Record SWAP.unit."""
        self._record(f"SWAP.{unit}")
        return [] if self._driver is None else self._driver.swap_gradients(unit, gradients)

    def begin_backward(self) -> None:
        """Record BEGIN_BACKWARD."""
        self._record("BEGIN_BACKWARD")
        if self._driver is not None:
            self._driver.begin_backward()

    def finish_iteration(self) -> None:
        """Record FINISH_ITERATION."""
        self._record("FINISH_ITERATION")
        if self._driver is not None:
            self._driver.finish_iteration()

    def abort(self) -> None:
        """Record ABORT."""
        self._record("ABORT")
        if self._driver is not None:
            self._driver.abort()

    def recording(self) -> AbstractContextManager[None]:
        """Record RECORDING."""
        self._record("RECORDING")
        return (self._driver or NullSharding()).recording()

    def _record(self, call: str) -> None:
        self.calls.append(call)
