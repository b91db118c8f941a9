"""What the executor may ask of a sharded model, and the answer of a model that is not sharded.

Contract of one iteration, seen from the executor (lane in brackets)::

    begin_iteration()           [compute]   the gather lane is forked from the compute lane
    gather(unit)                [gather]    full parameters exist and sit on the modules
    begin_backward()            [compute]   once per micro-batch: the reduction stream is forked from the compute lane
    reduce(unit, is_last=...)   [compute]   pack here, reduce on the reduction stream
    free(unit)                  [gather]    sharded parameters sit on the modules, full storage is released
    finish_iteration()          [compute]   both side streams are joined; every unit is free

Waits between lanes are the plan's: ``gather`` and ``free`` wait for nothing themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@runtime_checkable
class RankDriver(Protocol):
    """Executes the ops of a plan that concern all of a rank's model chunks: one's driver, or several joined."""

    @property
    def units(self) -> tuple[str, ...]:
        """Names of all units that own parameters: a layer's experts before the layer, otherwise in forward order."""
        ...

    @property
    def trainable_units(self) -> tuple[str, ...]:
        """The units that own at least one trainable parameter: only these are reduced."""
        ...

    @property
    def gather_stream(self) -> torch.cuda.Stream | None:
        """The stream that the executor makes current for ``gather`` and ``free``."""
        ...

    def begin_iteration(self) -> None:
        """Called once on the compute stream before any op: forks the gather stream from it."""
        ...

    def gather(self, unit: str) -> None:
        """Materialise the full parameters of a free unit on the current stream and install them."""
        ...

    def free(self, unit: str) -> None:
        """Install the sharded parameters of a gathered unit and release the full storage, on the current stream."""
        ...

    def begin_backward(self) -> None:
        """Called on the compute stream once per micro-batch backward, before its first reduction."""
        ...

    def finish_iteration(self) -> None:
        """Make the current stream wait for all sharding work, and assert that every unit is free."""
        ...

    def abort(self) -> None:
        """After a failure: free every unit, drop unreduced gradients, join the streams. Never raises."""
        ...


@runtime_checkable
class ShardingDriver(RankDriver, Protocol):
    """Executes the sharding ops of a plan on one model chunk."""

    @property
    def reduce_stream(self) -> torch.cuda.Stream | None:
        """The stream that reductions run on."""
        ...

    def reduce(self, unit: str, *, is_last: bool) -> None:
        """Reduce one micro-batch's gradients of a unit into its sharded gradients.

        Args:
            unit: a trainable, gathered unit.
            is_last: whether this is the iteration's last micro-batch.
        """
        ...

    def swap_gradients(self, unit: str, gradients: Sequence[torch.Tensor | None] | None) -> list[torch.Tensor | None]:
        """Exchange the unreduced gradients of a unit's full parameters.

        Two interleaved backwards may reach a unit before the first one's reduction: the second one's gradients are kept
        apart until then.

        Args:
            unit: a trainable unit.
            gradients: what this method returned before, or None for no gradients.

        Returns:
            The gradients that were there, one for each trainable parameter.
        """
        ...

    def recording(self) -> AbstractContextManager[None]:
        """While open, the wrapper's forward only calls the module: the schedule is recording the arguments."""
        ...


class NullSharding:
    """The driver of a model that is not sharded: it has no units, so its plan has no sharding op but the forks."""

    units: tuple[str, ...] = ()
    trainable_units: tuple[str, ...] = ()
    gather_stream: torch.cuda.Stream | None = None
    reduce_stream: torch.cuda.Stream | None = None

    def begin_iteration(self) -> None:
        """Nothing to fork."""

    def gather(self, unit: str) -> None:
        """Refuse: a plan for an unsharded model gathers nothing."""
        raise AssertionError(f"GATHER.{unit}: the model is not sharded")

    def free(self, unit: str) -> None:
        """Refuse: a plan for an unsharded model frees nothing."""
        raise AssertionError(f"FREE.{unit}: the model is not sharded")

    def reduce(self, unit: str, *, is_last: bool) -> None:
        """Refuse: a plan for an unsharded model reduces nothing."""
        raise AssertionError(f"REDUCE.{unit} (is_last={is_last}): the model is not sharded")

    def swap_gradients(self, unit: str, gradients: Sequence[torch.Tensor | None] | None) -> list[torch.Tensor | None]:
        """Refuse: nothing is reduced, so nothing is kept apart."""
        raise AssertionError(f"{unit}: the model is not sharded, so {gradients} belong to no unit")

    def begin_backward(self) -> None:
        """Nothing to fork."""

    def finish_iteration(self) -> None:
        """Nothing to join."""

    def abort(self) -> None:
        """Nothing to free."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Nothing to suspend."""
        yield


def driver_of(model: Any) -> ShardingDriver:
    """Find the sharding driver of a model chunk.

    Args:
        model: a module, or a list of one. The wrapper that ``shard_model`` returns may itself be wrapped.

    Returns:
        The driver of the first wrapper found going inwards along ``.module``, else a new ``NullSharding``.

    Raises:
        ConfigError: the wrapper found was built with ``register_hooks=True``, so no schedule can drive it.
    """
    if isinstance(model, Sequence):
        if len(model) != 1:
            raise ValueError(f"expected one model chunk, got {len(model)}: ask for the driver of each chunk")
        model = model[0]
    while model is not None:
        find_driver = getattr(type(model), "sharding_driver", None)
        if find_driver is not None:
            driver: ShardingDriver = model.sharding_driver()
            return driver
        model = getattr(model, "module", None)
    return NullSharding()
