"""Drawings of a plan: a text table, a picture, a trace for Perfetto. All show the ops that the executor runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil
from os import PathLike
from typing import TYPE_CHECKING, Any

from combined_1f1b.schedule.ops import Kind, Lane, Op
from combined_1f1b.schedule.plan import Plan
from combined_1f1b.schedule.simulate import CostModel, Simulation, Span, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    Kind.FORWARD: ("#7db8ec", "#a9d2f5"),
    Kind.BACKWARD: ("#f5b265", "#f9d09f"),
    Kind.WEIGHT: ("#84cc98", "#aee0bb"),
    Kind.GATHER: ("#c3b5e8", "#c3b5e8"),
    Kind.REDUCE: ("#eba3b5", "#eba3b5"),
}
_MEANINGS = (
    (Kind.FORWARD, "forward"),
    (Kind.BACKWARD, "backward"),
    (Kind.WEIGHT, "weight gradients"),
    (Kind.GATHER, "gather parameters"),
    (Kind.REDUCE, "reduce gradients"),
)
_EDGE, _WAITING = "#4a4a4a", "#d62728"
_INCHES_PER_UNIT = 0.75
_ROW_INCHES = 0.62
_TEXT_INCHES = 0.054
"""Width of one character of a label."""


def to_text(plan: Plan, first: int = 0, last: int | None = None) -> str:
    """Return a table with one column a lane, in issue order from top to bottom.

    Ops stand in one row when the plan lets them run at the same time: each stands in the first row that is below its
    lane's op before it and below the ops it waits for.

    Args:
        first, last: range of ops to show; `last` is exclusive and None means the end.
    """
    ops = plan.ops[first:last]
    row_of: list[int] = []
    next_row = dict.fromkeys(Lane, 0)
    cells: dict[tuple[int, Lane], str] = {}
    for offset, op in enumerate(ops):
        row = max(next_row[op.lane], next_row[op.issue_lane])
        for other in plan.wait_indices[first + offset]:
            if other >= first:
                row = max(row, row_of[other - first] + 1)
        row_of.append(row)
        next_row[op.lane] = row + 1
        cells[row, op.lane] = op.name
    lanes = [lane for lane in Lane if any(at == lane for _, at in cells)]
    widths = [max(len(lane.value), *(len(text) for (_, at), text in cells.items() if at == lane)) for lane in lanes]
    rows = [[lane.value for lane in lanes], ["-" * width for width in widths]]
    rows += [[cells.get((row, lane), "") for lane in lanes] for row in range(max(row_of, default=-1) + 1)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def to_perfetto(plan: Plan, cost: CostModel | None = None) -> dict[str, Any]:
    """Return a trace in Chrome's JSON format, which ui.perfetto.dev opens: one thread a lane, one slice an op.

    Times are those of `simulate`, with one unit of cost shown as a millisecond. Arrows show the waits.
    """
    threads = {lane: number for number, lane in enumerate(Lane)}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "combined_1f1b"}}]
    for lane, number in threads.items():
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane.value}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": number, "args": {"sort_index": number}})
    simulation = simulate(plan, cost)
    issued: dict[int, Span] = {}
    for span in simulation.spans:
        op = plan.ops[span.op_index]
        issued.setdefault(span.op_index, span)
        events.append(
            {
                "ph": "X",
                "name": op.name if span.lane is op.lane else f"{op.name} (pack)",
                "cat": op.kind.value,
                "pid": 0,
                "tid": threads[span.lane],
                "ts": span.start * 1000,
                "dur": (span.end - span.start) * 1000,
                "args": {"index": span.op_index, "waits": list(op.waits)},
            }
        )
    arrow = 0
    for index, waits in enumerate(plan.wait_indices):
        for other in waits:
            source, target = issued[other], issued[index]
            common = {"name": "wait", "cat": "wait", "pid": 0, "id": arrow}
            events.append({**common, "ph": "s", "tid": threads[source.lane], "ts": source.end * 1000})
            events.append({**common, "ph": "f", "bp": "e", "tid": threads[target.lane], "ts": target.start * 1000})
            arrow += 1
    return {"displayTimeUnit": "ms", "traceEvents": events}


def to_svg(
    plan: Plan,
    path: str | PathLike[str],
    *,
    cost: CostModel | None = None,
    width: float = 20.0,
    title: str | None = None,
) -> None:
    """Draw a plan: lanes from top to bottom, simulated time from left to right, wrapped into bands like lines of text.

    Hatched stretches of the compute lane are traffic that nothing hides.

    Args:
        path: file to write; the suffix chooses the format (".svg", or any other that matplotlib knows).
        width: most time of one band, in units of an attention forward; the bands share the time evenly.
        title: heading; None makes one from the plan.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    simulation = simulate(plan, cost)
    lanes = [lane for lane in Lane if any(span.lane is lane for span in simulation.spans)]
    bands = max(1, ceil(simulation.makespan / width))
    width = simulation.makespan / bands
    band_inches = len(lanes) * _ROW_INCHES + 0.45
    figure = Figure(figsize=(width * _INCHES_PER_UNIT + 1.3, bands * band_inches + 1.1), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(bands, 1, squeeze=False)
    for band in range(bands):
        axes = grid[band, 0]
        _draw_axes(axes, lanes, band * width, width)
        for span in simulation.spans:
            _draw_span(axes, plan.ops[span.op_index], span, lanes.index(span.lane), band * width, width)
        for start, end in _exposed(simulation):
            axes.broken_barh(
                [(start, end - start)], (0.06, 0.88), facecolor="none", edgecolor=_WAITING, hatch="////", linewidth=0
            )
    _draw_legend(figure, plan, title or _title(plan, simulation))
    # The same plan gives the same bytes, so that a picture under version control changes with the plan only.
    is_svg = str(path).endswith(".svg")
    with matplotlib.rc_context({"svg.hashsalt": "combined_1f1b"}):
        figure.savefig(path, metadata={"Date": None} if is_svg else None)


def _title(plan: Plan, simulation: Simulation) -> str:
    shape, pairs = plan.shape, plan.pairs
    counts = (
        (shape.num_layers + shape.num_mtp_layers, "layer"),
        (shape.num_microbatches, "micro-batch"),
        (pairs.forward_backward_pairs, "forward/backward pair"),
        (pairs.head_pairs, "forward/forward pair"),
        (pairs.tail_pairs, "backward/backward pair"),
    )
    plurals = {"micro-batch": "micro-batches"}
    words = [f"{n} {word if n == 1 else plurals.get(word, word + 's')}" for n, word in counts if n]
    return f"{', '.join(words)}: {simulation.hidden_fraction:.0%} of the all-to-all time runs under compute"


def _draw_axes(axes: Axes, lanes: Sequence[Lane], start: float, width: float) -> None:
    axes.set_xlim(start, start + width)
    axes.set_ylim(len(lanes), 0)
    axes.set_yticks([row + 0.5 for row in range(len(lanes))], [lane.value for lane in lanes], fontsize=10)
    axes.tick_params(length=0, labelbottom=False)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    for row in range(len(lanes)):
        axes.axhspan(row + 0.03, row + 0.97, color="#f4f4f4", zorder=0)


def _draw_span(axes: Axes, op: Op, span: Span, row: int, start: float, width: float) -> None:
    if span.end <= start or span.start >= start + width or op.kind not in _COLOURS:
        return
    packing = op.kind is Kind.REDUCE and span.lane is Lane.COMPUTE
    colour = _COLOURS[op.kind][(op.microbatch or 0) % 2]
    length = span.end - span.start
    axes.broken_barh(
        [(span.start, length)], (row + 0.06, 0.88), facecolor=colour, edgecolor=_EDGE, linewidth=0.0 if packing else 0.6
    )
    left, right = max(span.start, start), min(span.end, start + width)
    inches = (right - left) * _INCHES_PER_UNIT
    if packing or inches < 0.07:
        return
    flow = f"{op.kind.value}{op.microbatch}" if op.microbatch is not None else ""
    words = [word for word in (flow, op.stage.replace("_", "\n"), op.part) if word]
    middle = (left + right) / 2
    longest = max(len(word) for text in words for word in text.split("\n"))
    if longest * _TEXT_INCHES <= inches:
        axes.text(middle, row + 0.5, "\n".join(words), ha="center", va="center", fontsize=7, linespacing=1.1)
    else:
        text = " ".join(words).replace("\n", " ")
        size = min(6.5, inches * 72 * 0.95, _ROW_INCHES * 0.88 * 72 / (0.56 * len(text)))
        axes.text(middle, row + 0.5, text, ha="center", va="center", fontsize=size, rotation=90)


def _exposed(simulation: Simulation) -> Iterator[tuple[float, float]]:
    """Stretches during which the comm lane has work and the compute lane has none."""
    busy = [(span.start, span.end) for span in simulation.spans if span.lane is Lane.COMPUTE and span.end > span.start]
    idle = [(end, start) for (_, end), (start, _) in pairwise(busy) if start - end > 1e-9]
    for span in simulation.spans:
        if span.lane is Lane.COMM:
            for start, end in idle:
                if start < span.end and end > span.start:
                    yield max(start, span.start), min(end, span.end)


def _draw_legend(figure: Any, plan: Plan, title: str) -> None:
    from matplotlib.patches import Patch

    kinds = {op.kind for op in plan.ops}
    handles = [
        Patch(facecolor=_COLOURS[kind][0], edgecolor=_EDGE, linewidth=0.6, label=meaning)
        for kind, meaning in _MEANINGS
        if kind in kinds
    ]
    handles.append(Patch(facecolor="none", edgecolor=_WAITING, hatch="////", linewidth=0, label="traffic not hidden"))
    figure.suptitle(title, fontsize=12)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
