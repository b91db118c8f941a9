"""What a Kineto trace of one step says about its traffic, in unions of intervals, never in sums of kernel times.

    exposed    traffic while no other device work runs: an upper bound, some of it delays nothing
    blocking   traffic in a gap of the computation that ends when the traffic does: the computation waited for it

A step bound by launching leaves gaps that end for another reason; traffic in those is exposed and not blocking.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from combined_1f1b.bench.intervals import Interval, difference, intersection, length, union

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# What carries the traffic, by the kind of link; parts of a row's name.
_COPIES = ("-> Pinned", "Pinned ->")
_TRAFFIC = {"spin": ("spin_kernel",), "copy": _COPIES, "real": ("SendRecv",), "slowed": ("SendRecv", *_COPIES)}
_OTHER_COMMUNICATION = "nccl"
LAUNCH_MICROSECONDS = 10.0
"""A kernel that waited for an event starts this soon after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficShares:
    """Seconds of one step.

    span: from its first to its last device work. communication: the all-to-alls. compute: what is no communication.
    """

    span: float
    communication: float
    compute: float
    exposed: float
    blocking: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def read_shares(path: Path, *, link: str) -> TrafficShares | None:
    """Read an exported trace.

    Args:
        path: what `torch.profiler.profile.export_chrome_trace` wrote.
        link: the kind of link, which says what counts as traffic.

    Returns:
        None when the trace holds no device work, or the link leaves no rows on the device.
    """
    return shares_of(json.loads(path.read_text())["traceEvents"], link=link)


def shares_of(events: Iterable[Mapping[str, Any]], *, link: str) -> TrafficShares | None:
    """The same of the trace's events; their times are in microseconds."""
    traffic: list[Interval] = []
    collectives: list[Interval] = []
    computation: list[Interval] = []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_WORK:
            name = event["name"]
            is_traffic = any(part in name for part in _TRAFFIC.get(link, ()))
            kind = traffic if is_traffic else collectives if _OTHER_COMMUNICATION in name else computation
            start = float(event["ts"])
            kind.append((start, start + float(event["dur"])))
    if not traffic or not computation:
        return None
    communication, compute = union(traffic), union(computation)
    others = union([*compute, *collectives])
    everything = union([*communication, *others])
    return TrafficShares(
        span=1e-6 * (everything[-1][1] - everything[0][0]),
        communication=1e-6 * length(communication),
        compute=1e-6 * length(compute),
        exposed=1e-6 * length(difference(communication, others)),
        blocking=1e-6 * length(_blocking(communication, compute)),
    )


def _blocking(communication: list[Interval], compute: list[Interval]) -> list[Interval]:
    """Traffic in those gaps of the computation whose end it causes."""
    found: list[Interval] = []
    for before, after in itertools.pairwise(compute):
        inside = intersection(communication, [(before[1], after[0])])
        if inside and after[0] - inside[-1][1] <= LAUNCH_MICROSECONDS:
            found += inside
    return found
