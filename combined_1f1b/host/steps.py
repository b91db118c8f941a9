"""What an observer of the host device hears: one report for everything that happens to a stream or an event."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from combined_1f1b.host.streams import HostEvent, HostStream


class Step(enum.StrEnum):
    """What happened to a stream or an event."""

    STREAM_CREATED = "stream created"
    STREAM_SWITCHED = "stream switched"
    STREAM_SYNCHRONIZED = "stream synchronized"
    STREAM_QUERIED = "stream queried"
    EVENT_RECORDED = "event recorded"
    EVENT_AWAITED = "event awaited"
    EVENT_SYNCHRONIZED = "event synchronized"
    EVENT_QUERIED = "event queried"
    DEVICE_SYNCHRONIZED = "device synchronized"
    TENSOR_RECORDED = "tensor recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStep:
    """One report to the observer; what a step does not have is None.

    Attributes:
        step: what happened.
        stream: the stream that it happened on; for STREAM_SWITCHED the one that is current from now on.
        event: the event that was recorded, awaited, synchronized or queried.
        tensor: the tensor of a `record_stream`.
    """

    step: Step
    stream: HostStream | None = None
    event: HostEvent | None = None
    tensor: torch.Tensor | None = None


type Observer = Callable[[StreamStep], None]
