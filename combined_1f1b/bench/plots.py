"""Pictures of a report: step times of every group with the line of no traffic, and the traffic that is hidden."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from combined_1f1b.bench.options import DEFAULT
from combined_1f1b.bench.report import Row, tables_of

_COLORS = {"default": "#9aa0a6", "built-in": "#e8a33d", "ours": "#4c78a8", "ours-paired": "#1f4e79"}


def draw_plots(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw `step_times.svg` and `hidden.svg`.

    Bars are medians, whiskers their confidence intervals, the dashed line Megatron's default schedule without traffic.

    Returns:
        the files; no picture of hidden traffic when no group knows it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    tables = {group.name: rows for group, rows in tables_of(report)}
    written = []
    for name, title, draw, keep in (
        ("step_times.svg", "step time (ms)", _draw_times, lambda row: row.seconds is not None and row.variant.traffic),
        ("hidden.svg", "traffic hidden (%)", _draw_hidden, lambda row: row.hidden is not None),
    ):
        shown = {group: kept for group, rows in tables.items() if (kept := [row for row in rows if keep(row)])}
        if not shown:
            continue
        figure, axes = pyplot.subplots(
            len(shown),
            1,
            squeeze=False,
            layout="constrained",
            figsize=(9, sum(1.2 + 0.35 * len(r) for r in shown.values())),
        )
        for (group, rows), axis in zip(shown.items(), axes[:, 0], strict=True):
            draw(axis, rows, tables[group])
            axis.set_title(group, loc="left", fontsize=10)
            axis.set_xlabel(title)
            axis.invert_yaxis()
        figure.suptitle(f"{report['link']['description']}; {report['machine']['device']}", fontsize=9)
        figure.savefig(folder / name, metadata={"Date": None})
        pyplot.close(figure)
        written.append(folder / name)
    return written


def _draw_times(axis: Any, rows: list[Row], table: list[Row]) -> None:
    summaries = [row.seconds for row in rows if row.seconds is not None]
    medians = [1e3 * summary.median for summary in summaries]
    below = [1e3 * (summary.median - summary.low) for summary in summaries]
    above = [1e3 * (summary.high - summary.median) for summary in summaries]
    bars = axis.barh([row.name for row in rows], medians, xerr=[below, above], color=_colors(rows))
    axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axis.margins(x=0.12)
    for row in table:
        if row.variant.schedule == DEFAULT and not row.variant.traffic and row.seconds is not None:
            axis.axvline(1e3 * row.seconds.median, linestyle="--", color="black", linewidth=1)
            break


def _draw_hidden(axis: Any, rows: list[Row], _table: list[Row]) -> None:
    bars = axis.barh([row.name for row in rows], [100 * (row.hidden or 0.0) for row in rows], color=_colors(rows))
    axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axis.axvline(100, linestyle="--", color="black", linewidth=1)
    axis.margins(x=0.12)


def _colors(rows: list[Row]) -> list[str]:
    return [_COLORS[row.variant.schedule] for row in rows]
