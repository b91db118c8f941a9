"""The expert-parallel link: the real all-to-all, or a model of one for machines where one rank has nobody to talk to.

    spin   a kernel that spins on the current stream for bytes / bandwidth (`torch.cuda._sleep`, calibrated with events)
    copy   the bytes go to pinned host memory and back, through the copy engines as a network card's would
    none   nothing takes time; a single rank of the host device
    real   Megatron's all-to-all
    slowed the same, and each rank's bytes take the way of `copy` first

A modelled link gives every rank back its own tokens. `traffic` is read when an all-to-all is issued: without it the
link takes no time, in a graph for as long as the graph lives. Numbers of a modelled link must say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.common import utils as common_utils
from megatron.core.transformer.moe import token_dispatcher

from combined_1f1b.bench.options import REAL_LINKS
from combined_1f1b.host.patch import AppliedPatches, Patch

_CALIBRATION_CYCLES = 20_000_000


class Link:
    """One link. Attributes: kind; traffic: whether what is issued now takes time.

    Args:
        kind: one of `options.LINKS`.
        bandwidth: GB/s of the spinning link.
    """

    def __init__(self, *, kind: str, bandwidth: float) -> None:
        self.kind = kind
        self.traffic = True
        self._pinned: dict[int, torch.Tensor] = {}
        self._cycles_per_byte = _cycles_per_second() / (bandwidth * 1e9) if kind == "spin" else 0.0
        self.description = {
            "spin": f"modelled: a spinning kernel, {bandwidth:g} GB/s",
            "copy": "modelled: copies to pinned host memory and back",
            "none": "none: all-to-alls take no time",
            "real": f"all-to-all over {torch.distributed.get_backend()}",
            "slowed": f"all-to-all over {torch.distributed.get_backend()}, after copies to pinned host memory and back",
        }[kind]

    def carry(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the time of the tensor's bytes on the current stream; returns the tensor, or what the copies made."""
        if not self.traffic:
            return tensor
        size = tensor.numel() * tensor.element_size()
        if self.kind == "spin" and size:
            torch.cuda._sleep(max(1, round(size * self._cycles_per_byte)))
        elif self.kind in ("copy", "slowed") and size:
            return self._copy(tensor.contiguous(), size)
        return tensor

    def _copy(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        # All of a step's copies run on one stream, one after the other: they can share the buffer.
        pinned = self._pinned.get(size)
        if pinned is None:
            pinned = self._pinned[size] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        arrived = torch.empty_like(tensor)
        pinned.copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
        arrived.view(-1).view(torch.uint8).copy_(pinned, non_blocking=True)
        return arrived

    @property
    def has_early_frees(self) -> bool:
        """Whether the built-in schedule may free the inputs of all-to-alls and experts."""
        return self.kind in REAL_LINKS and torch.distributed.get_world_size() > 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the link in the place of the dispatcher's all-to-all for a block.

        With one rank an output may alias its input (the dispatcher's own reordering too), and Megatron's built-in
        schedule must not free the input: its early frees are off.
        """
        original = token_dispatcher.all_to_all
        should_free_input = common_utils.should_free_input

        def all_to_all(group: Any, tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if self.kind != "real" or not self.traffic:
                tensor = _Carried.apply(tensor, self)
            if self._is_real():
                tensor = original(group, tensor, *arguments, **options)
            return tensor

        def frees_input(*arguments: Any) -> bool:
            return self._is_real() and self.has_early_frees and should_free_input(*arguments)

        reason = "the link that is measured"
        applied = AppliedPatches(
            (
                Patch(owner=token_dispatcher, name="all_to_all", value=all_to_all, reason=reason),
                Patch(owner=common_utils, name="should_free_input", value=frees_input, reason=reason),
            )
        )
        try:
            yield
        finally:
            applied.restore()

    def _is_real(self) -> bool:
        return self.kind in REAL_LINKS and self.traffic


class _Carried(torch.autograd.Function):
    """Tokens go over the link, and their gradients come back over it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, link: Link) -> torch.Tensor:
        ctx.link = link
        arrived = link.carry(tensor)
        return arrived.view_as(arrived) if arrived is tensor else arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.link.carry(gradient), None


def _cycles_per_second() -> float:
    """How fast `torch.cuda._sleep` counts: the median of five timings after one that warms up."""
    rates = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(_CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
        rates.append(_CALIBRATION_CYCLES / (1e-3 * start.elapsed_time(end)))
    return sorted(rates[1:])[2]
