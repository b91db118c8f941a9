"""The sharding driver of a chunk whose units MFSDP v2 shards and a plan drives.

Which stream runs what (a unit's storage is allocated and released on one stream only, so nothing needs
``record_stream``)::

    gather stream     all-gathers and releases of full parameters, memory of the full parameters
    reduction stream  reduce-scatters, memory of the packed gradients
    current stream    packing: the lane that produced the gradients
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from combined_1f1b.fsdp_adapter import mfsdp_v2
from combined_1f1b.fsdp_adapter.units import ROOT

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Unit:
    """One sharded unit and whether its full parameters exist now.

    Attributes:
        name: the name that ops carry.
        module: the module, an instance of ``mfsdp_v2.ScheduledModule``.
        factor: what multiplies its gradients before the average over its mesh.
        is_gathered: true from GATHER to FREE.
    """

    name: str
    module: Any
    factor: float
    is_gathered: bool = False

    @property
    def groups(self) -> tuple[Any, ...]:
        """MFSDP's parameter groups of the unit: one per dtype and trainability."""
        groups: tuple[Any, ...] = self.module.parameter_groups
        return groups

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter of the unit is trained."""
        return any(group.requires_grad for group in self.groups)


class ScheduleDriver:
    """Executes GATHER, FREE, REDUCE and BEGIN_BACKWARD on one chunk's units (see ``protocol.ShardingDriver``)."""

    def __init__(
        self,
        units: tuple[Unit, ...],
        context: mfsdp_v2.ScheduledContext,
        *,
        used_outside: tuple[str, ...] = (),
        unread: tuple[str, ...] = (),
    ) -> None:
        """Drive the units that own parameters.

        Args:
            units: the units, a layer's experts before the layer, otherwise in forward order.
            context: the context that all of them share.
            used_outside: units whose parameters are read while their module is not running.
            unread: units whose parameters nothing reads: no plan names them, and their gradients are zero.
        """
        self.context = context
        self._units = {unit.name: unit for unit in units if unit.groups and unit.name not in unread}
        self._unread_groups = tuple(group for unit in units if unit.name in unread for group in unit.groups)
        self._used_outside = tuple(name for name in used_outside if name in self._units)
        self._is_recording = False
        self._overwrites = False  # whether gradients are all of an iteration that is under way
        self._is_aborting = False

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units that own parameters, in forward order."""
        return tuple(self._units)

    @property
    def trainable_units(self) -> tuple[str, ...]:
        """Names of the units that have gradients to reduce."""
        return tuple(name for name, unit in self._units.items() if unit.is_trainable)

    @property
    def gather_stream(self) -> torch.cuda.Stream:
        """The stream that owns the memory of full parameters."""
        return self.context.allgather_stream

    @property
    def reduce_stream(self) -> torch.cuda.Stream:
        """The stream that owns the memory of packed gradients."""
        return self.context.reduce_scatter_stream

    @property
    def groups(self) -> tuple[Any, ...]:
        """Every parameter group of the chunk."""
        return tuple(group for unit in self._units.values() for group in unit.groups)

    @property
    def gathered_units(self) -> tuple[str, ...]:
        """The units whose full parameters exist now."""
        return tuple(name for name, unit in self._units.items() if unit.is_gathered)

    @property
    def is_recording(self) -> bool:
        """Whether the schedule is recording the user's forward step."""
        return self._is_recording

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of full-parameter storage held now: zero when every unit is free."""
        return mfsdp_v2.unsharded_bytes(self.groups)

    def begin_iteration(self) -> None:
        """Fork the gather stream from the current stream, so that gathers see the optimizer's last weights."""
        self._finish_abort()
        assert not self.gathered_units, f"units {self.gathered_units} are still gathered from earlier work"
        self._overwrites = not any(mfsdp_v2.has_gradients(group) for group in self.groups)
        if not self._overwrites:
            for group in self.groups:
                mfsdp_v2.adopt_gradients(group)
        self.gather_stream.wait_stream(self.context.current_stream())

    def gather(self, unit: str) -> None:
        """Materialise a unit's full parameters on the current stream and install them on its modules."""
        target = self._units[unit]
        assert not target.is_gathered, f"GATHER.{unit}: already gathered"
        target.is_gathered = True
        for group in target.groups:
            mfsdp_v2.gather_group(group)

    def free(self, unit: str) -> None:
        """Install a unit's sharded parameters and release the full storage on the current stream."""
        target = self._units[unit]
        assert target.is_gathered, f"FREE.{unit}: not gathered"
        for group in target.groups:
            mfsdp_v2.free_group(group)
        target.is_gathered = False

    def reduce(self, unit: str, *, is_last: bool) -> None:
        """Reduce a micro-batch's gradients of a unit: packed on the current stream, reduced on the reduction stream."""
        target = self._units[unit]
        mfsdp_v2.reduce_gradients(target.module, factor=target.factor, is_last=is_last)

    def swap_gradients(self, unit: str, gradients: Sequence[torch.Tensor | None] | None) -> list[torch.Tensor | None]:
        """Exchange the unreduced gradients of a unit's full parameters; None puts none in their place."""
        parameters = [
            parameter
            for group in self._units[unit].groups
            if group.requires_grad
            for parameter in group.unsharded_parameters
        ]
        before = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients or [None] * len(parameters), strict=True):
            parameter.grad = gradient
        return before

    def begin_backward(self) -> None:
        """Fork the reduction stream from the current stream, through the context."""
        self.context.pre_backward()

    def finish_iteration(self) -> None:
        """Join the gather and the reduction stream; every unit must be free."""
        self._join()
        assert not self.gathered_units, f"the plan left units {self.gathered_units} gathered"
        for group in self._unread_groups:
            mfsdp_v2.fill_missing_reduced_gradients(group)
        self._overwrites = False

    def abort(self) -> None:
        """Bring a failed iteration's units back to rest: joined, free, without unreduced gradients.

        If there were no gradients when the iteration began, what it has reduced is dropped too, so that it can be
        run again. Gradients added to earlier ones cannot be taken out again: clear them before a retry.

        It must not hide the failure that it cleans up after: what goes wrong here is logged, and tried again before the
        units are used next. In a capture that the failure has invalidated, every wait raises until the capture ends.
        """
        self._is_aborting = True
        try:
            self._join()
            self.gather_stream.wait_stream(self.context.current_stream())
            with torch.cuda.stream(self.gather_stream):
                for unit in self._units.values():
                    for group in unit.groups:
                        mfsdp_v2.free_group(group)
                        mfsdp_v2.drop_gradients(group)
                        if self._overwrites:
                            mfsdp_v2.clear_gradients(group)
                    unit.is_gathered = False
            self._join()
            self._is_aborting = self._overwrites = False
        except Exception:
            _logger.exception(
                "the units could not be freed after a failed iteration; it is tried again at the next use"
            )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While open, calling the wrapper only calls the module."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    @contextmanager
    def gathered(self, *units: str) -> Iterator[None]:
        """Gather units (default: all) for code outside any plan, and free them again.

        The current stream waits for the gathers, and the releases wait for what the current stream did meanwhile.
        """
        self._finish_abort()
        names = units or self.units
        self._on_gather_stream(self.gather, names)
        try:
            yield
        finally:
            self._on_gather_stream(self.free, [name for name in names if self._units[name].is_gathered])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Gather each unit while its module runs a forward, for calls outside any plan.

        Units whose parameters are read elsewhere too, and the root, are gathered throughout.
        """
        self._finish_abort()
        throughout = {*self._used_outside, ROOT} & set(self._units)
        handles: list[Any] = []
        for name, unit in self._units.items():
            if name not in throughout:
                handles.append(unit.module.register_forward_pre_hook(self._hook(self.gather, name)))
                handles.append(unit.module.register_forward_hook(self._hook(self.free, name), always_call=True))
        try:
            with self.gathered(*throughout) if throughout else nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _finish_abort(self) -> None:
        if self._is_aborting:
            self.abort()

    def _hook(self, action: Callable[[str], None], name: str) -> Callable[..., None]:
        return lambda *_: self._on_gather_stream(action, [name])

    def _on_gather_stream(self, action: Callable[[str], None], names: Iterable[str]) -> None:
        current = self.context.current_stream()
        self.gather_stream.wait_stream(current)
        with torch.cuda.stream(self.gather_stream):
            for name in names:
                action(name)
        current.wait_stream(self.gather_stream)

    def _join(self) -> None:
        current = self.context.current_stream()
        current.wait_stream(self.gather_stream)
        current.wait_stream(self.reduce_stream)
