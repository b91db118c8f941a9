"""Median, range and the confidence interval of the median of a few samples. Plain Python."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a table shows of samples, in their unit.

    Attributes:
        low, high: interval that covers the median of the distribution with at least `confidence`; the whole range, with
            a smaller `confidence`, where the samples are too few for 95%.
    """

    count: int
    median: float
    minimum: float
    maximum: float
    low: float
    high: float
    confidence: float


def summarize(samples: Sequence[float], *, confidence: float = 0.95) -> Summary:
    """Summarise samples without assuming a distribution.

    The interval runs from the k-th smallest to the k-th largest sample. It misses the median when fewer than k samples
    fall on one side of it, and how many do is binomial with probability 1/2:
    coverage(k) = 1 - 2 * P(Binomial(n, 1/2) < k). The largest k with enough coverage is taken.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("no samples to summarise")
    ordered = sorted(samples)
    count = len(ordered)
    place = 1
    while place < (count + 1) // 2 and _coverage(count, place + 1) >= confidence:
        place += 1
    return Summary(
        count=count,
        median=statistics.median(ordered),
        minimum=ordered[0],
        maximum=ordered[-1],
        low=ordered[place - 1],
        high=ordered[-place],
        confidence=_coverage(count, place),
    )


def _coverage(count: int, place: int) -> float:
    below: float = sum(math.comb(count, successes) for successes in range(place)) / 2**count
    return max(0.0, 1.0 - 2.0 * below)
