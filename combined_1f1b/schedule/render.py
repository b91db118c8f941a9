"""Drawings of a plan: a text table, a picture, a trace for Perfetto. All show the ops that the executor runs.

Pictures and traces take the plans of several pipeline ranks too, and show them one below the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from combined_1f1b.schedule.ops import TRANSFER_KINDS, Kind, Lane, Op
from combined_1f1b.schedule.plan import Plan
from combined_1f1b.schedule.simulate import CostModel, Simulation, Span, simulate_ranks
from combined_1f1b.schedule.transfers import RECEIVE_KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    Kind.FORWARD: ("#7db8ec", "#a9d2f5"),
    Kind.BACKWARD: ("#f5b265", "#f9d09f"),
    Kind.WEIGHT: ("#84cc98", "#aee0bb"),
    Kind.GATHER: ("#c3b5e8", "#c3b5e8"),
    Kind.REDUCE: ("#eba3b5", "#eba3b5"),
    **dict.fromkeys(TRANSFER_KINDS, ("#8ccfcb", "#b4e0dd")),
}
_MEANINGS = (
    (Kind.FORWARD, "forward"),
    (Kind.BACKWARD, "backward"),
    (Kind.WEIGHT, "weight gradients"),
    (Kind.GATHER, "gather parameters"),
    (Kind.REDUCE, "reduce gradients"),
    (Kind.SEND_FORWARD, "send and receive"),
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
        if op.kind in RECEIVE_KINDS and row_of:
            row = max(row, row_of[-1])  # it waits for nothing here, but its neighbour is no earlier
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


def to_perfetto(plans: Plan | Sequence[Plan], cost: CostModel | None = None) -> dict[str, Any]:
    """Return a trace in Chrome's JSON format, which ui.perfetto.dev opens: one thread a lane, one slice an op.

    Several plans are those of all pipeline ranks, each of them a process. Times are those of the simulation, with one
    unit of cost shown as a millisecond. Arrows show the waits.
    """
    ranks = _as_sequence(plans)
    events: list[dict[str, Any]] = []
    for plan, simulation in zip(ranks, simulate_ranks(ranks, cost), strict=True):
        events += _events(plan, simulation, first_arrow=len(events))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _as_sequence(plans: Plan | Sequence[Plan]) -> Sequence[Plan]:
    return [plans] if isinstance(plans, Plan) else plans


def _lanes(simulation: Simulation) -> list[Lane]:
    used = {span.lane for span in simulation.spans}
    return [lane for lane in Lane if lane in used]


def _events(plan: Plan, simulation: Simulation, first_arrow: int) -> Iterator[dict[str, Any]]:
    rank = plan.shape.rank
    threads = {lane: number for number, lane in enumerate(_lanes(simulation))}
    process = "combined_1f1b" if plan.shape.pp == 1 else f"pipeline rank {rank}"
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": process}}
    for lane, number in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane.value}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}}
    issued: dict[int, Span] = {}
    for span in simulation.spans:
        op = plan.ops[span.op_index]
        issued.setdefault(span.op_index, span)
        yield {
            "ph": "X",
            "name": op.name if span.lane is op.lane else f"{op.name} (pack)",
            "cat": op.kind.value,
            "pid": rank,
            "tid": threads[span.lane],
            "ts": span.start * 1000,
            "dur": (span.end - span.start) * 1000,
            "args": {"index": span.op_index, "waits": list(op.waits)},
        }
    arrow = first_arrow
    for index, waits in enumerate(plan.wait_indices):
        for other in waits:
            source, target = issued[other], issued[index]
            common = {"name": "wait", "cat": "wait", "pid": rank, "id": arrow}
            yield {**common, "ph": "s", "tid": threads[source.lane], "ts": source.end * 1000}
            yield {**common, "ph": "f", "bp": "e", "tid": threads[target.lane], "ts": target.start * 1000}
            arrow += 1


class _Row(NamedTuple):
    """One lane of one rank in a picture."""

    label: str
    lane: Lane
    plan: Plan
    simulation: Simulation


def to_svg(
    plans: Plan | Sequence[Plan],
    path: str | PathLike[str],
    *,
    cost: CostModel | None = None,
    width: float = 20.0,
    title: str | None = None,
) -> None:
    """Draw a plan: lanes from top to bottom, simulated time from left to right, wrapped into bands like lines of text.

    Hatched stretches of the compute lane are traffic that nothing hides.

    Args:
        plans: a plan, or those of all pipeline ranks.
        path: file to write; the suffix chooses the format (".svg", or any other that matplotlib knows).
        width: most time of one band, in units of an attention forward; the bands share the time evenly.
        title: heading; None makes one from the plan.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = _as_sequence(plans)
    simulations = simulate_ranks(ranks, cost)
    rows = [
        _Row(lane.value if len(ranks) == 1 else f"{plan.shape.rank} {lane.value}", lane, plan, simulation)
        for plan, simulation in zip(ranks, simulations, strict=True)
        for lane in _lanes(simulation)
    ]
    makespan = max(simulation.makespan for simulation in simulations)
    bands = max(1, ceil(makespan / width))
    width = makespan / bands
    band_inches = len(rows) * _ROW_INCHES + 0.45
    figure = Figure(figsize=(width * _INCHES_PER_UNIT + 1.3, bands * band_inches + 1.1), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(bands, 1, squeeze=False)
    for band in range(bands):
        _draw_band(grid[band, 0], rows, band * width, width)
    _draw_legend(figure, ranks, title or _title(ranks, simulations))
    # The same plan gives the same bytes, so that a picture under version control changes with the plan only.
    is_svg = str(path).endswith(".svg")
    with matplotlib.rc_context({"svg.hashsalt": "combined_1f1b"}):
        figure.savefig(path, metadata={"Date": None} if is_svg else None)


def _draw_band(axes: Axes, rows: Sequence[_Row], start: float, width: float) -> None:
    _draw_axes(axes, [row.label for row in rows], start, width)
    for number, row in enumerate(rows):
        for span in row.simulation.spans:
            if span.lane is row.lane:
                _draw_span(axes, row.plan.ops[span.op_index], span, number, start, width)
        if row.lane is Lane.COMPUTE:
            for begin, end in _exposed(row.simulation):
                axes.broken_barh(
                    [(begin, end - begin)],
                    (number + 0.06, 0.88),
                    facecolor="none",
                    edgecolor=_WAITING,
                    hatch="////",
                    linewidth=0,
                )


def _title(plans: Sequence[Plan], simulations: Sequence[Simulation]) -> str:
    shape, pairs = plans[0].shape, plans[0].pairs
    counts = (
        (shape.num_layers + shape.num_mtp_layers, "layer"),
        (shape.pp if shape.pp > 1 else 0, "pipeline rank"),
        (shape.vpp if shape.vpp > 1 else 0, "chunk"),
        (shape.num_microbatches, "micro-batch"),
        (pairs.forward_backward_pairs if len(plans) == 1 else 0, "forward/backward pair"),
        (pairs.head_pairs, "forward/forward pair"),
        (pairs.tail_pairs, "backward/backward pair"),
    )
    plurals = {"micro-batch": "micro-batches"}
    words = [f"{n} {word if n == 1 else plurals.get(word, word + 's')}" for n, word in counts if n]
    if shape.pp > 1 and len(plans) == 1:
        words.insert(0, f"rank {shape.rank}")
    busy = sum(simulation.comm_busy for simulation in simulations)
    hidden = 1 - sum(simulation.exposed_comm for simulation in simulations) / busy if busy else 1.0
    return f"{', '.join(words)}: {hidden:.0%} of the all-to-all time runs under compute"


def _draw_axes(axes: Axes, labels: Sequence[str], start: float, width: float) -> None:
    axes.set_xlim(start, start + width)
    axes.set_ylim(len(labels), 0)
    axes.set_yticks([row + 0.5 for row in range(len(labels))], labels, fontsize=10)
    axes.tick_params(length=0, labelbottom=False)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    for row in range(len(labels)):
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


def _draw_legend(figure: Any, plans: Sequence[Plan], title: str) -> None:
    from matplotlib.patches import Patch

    kinds = {op.kind for plan in plans for op in plan.ops}
    if kinds & set(TRANSFER_KINDS):
        kinds.add(Kind.SEND_FORWARD)
    handles = [
        Patch(facecolor=_COLOURS[kind][0], edgecolor=_EDGE, linewidth=0.6, label=meaning)
        for kind, meaning in _MEANINGS
        if kind in kinds
    ]
    handles.append(Patch(facecolor="none", edgecolor=_WAITING, hatch="////", linewidth=0, label="traffic not hidden"))
    figure.suptitle(title, fontsize=12)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
