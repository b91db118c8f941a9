"""Sets of time as sorted, disjoint intervals [start, end). Plain Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time covered by any of the intervals; empty ones cover nothing."""
    result: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The time covered by both; each argument sorted and disjoint."""
    result = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            result.append((start, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return result


def difference(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The time covered by the first and not by the second; each argument sorted and disjoint."""
    result = []
    j = 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        at, k = start, j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > at:
                result.append((at, second[k][0]))
            at = max(at, second[k][1])
            k += 1
        if at < end:
            result.append((at, end))
    return result


def length(intervals: Sequence[Interval]) -> float:
    """How much time disjoint intervals cover."""
    return sum(end - start for start, end in intervals)
