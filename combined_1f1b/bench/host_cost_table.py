"""The table of a layer pair's host cost. Plain Python; `host_cost.py` measures it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OURS, BUILT_IN, BUILT_IN_REUSED = "combined_1f1b", "Megatron combined", "its callables reused"
SCHEDULES = (OURS, BUILT_IN, BUILT_IN_REUSED)
HEADINGS = ("per layer pair", *SCHEDULES, "ratio")
BAR = 0.5
"""Ours may cost at most this share of the built-in's (the project's own aim)."""


def host_cost_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Rows of the table: what, each schedule's figure, and ours divided by the built-in's."""
    rows = []
    for key, text in (("best", "host time, best (us)"), ("median", "host time, median (us)")):
        times = [result["seconds_per_pair"][name][key] for name in SCHEDULES]
        rows.append((text, *(f"{1e6 * seconds:.0f}" for seconds in times), f"{times[0] / times[1]:.2f}"))
    calls = result["calls_per_pair"]
    for kind in sorted({kind for name in SCHEDULES for kind in calls[name]}):
        numbers = [calls[name].get(kind, 0) for name in SCHEDULES]
        ratio = f"{numbers[0] / numbers[1]:.2f}" if numbers[1] else "-"
        rows.append((kind, *map(str, numbers), ratio))
    return rows


def verdict(result: Mapping[str, Any]) -> str:
    """Whether the aim is reached."""
    reached = "reached" if result["ratio"] <= BAR else "not reached"
    return f"Aim: at most {BAR} x the built-in's (best to best): {reached}."


def print_host_cost(result: Mapping[str, Any]) -> None:
    """Print the table."""
    print("host cost of one forward/backward layer pair, identity callables, stub streams")
    for row in (HEADINGS, *host_cost_rows(result)):
        print(f"{row[0]:24}" + "".join(f"{cell:>22}" for cell in row[1:-1]) + f"{row[-1]:>8}")
    print(verdict(result))
