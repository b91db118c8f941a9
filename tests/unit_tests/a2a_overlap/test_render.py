"""Drawings show the plan's own ops, each once."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from plan_cases import plans, ranks

from combined_1f1b.schedule import build_plan, simulate
from combined_1f1b.schedule.ops import Kind, Lane
from combined_1f1b.schedule.render import to_perfetto, to_svg, to_text

pytestmark = pytest.mark.world_size(1)


def test_text_puts_what_may_run_together_in_one_row():
    plan = build_plan(num_layers=1, num_microbatches=2)
    names = [op.name for op in plan.ops]
    text = to_text(plan, names.index("B0.L0.combine"), names.index("F1.final_norm") + 1)
    assert text.splitlines() == [
        "compute          comm",
        "---------------  --------------",
        "F1.L0.attention  B0.L0.combine",
        "B0.L0.experts    F1.L0.dispatch",
        "F1.L0.experts    B0.L0.dispatch",
        "B0.L0.attention  F1.L0.combine",
        "F1.final_norm",
    ]


@settings(max_examples=60, deadline=None)
@given(plans())
def test_text_shows_every_op_once_in_its_lane_and_below_what_it_waits_for(plan):
    header, _, *rows = to_text(plan).splitlines()
    columns = [(match.group(), match.start()) for match in re.finditer(r"\S+", header)]
    placed: dict[int, int] = {}
    by_cell: dict[tuple[int, str], str] = {}
    for row, line in enumerate(rows):
        for match in re.finditer(r"\S+", line):
            lane = next(lane for lane, start in reversed(columns) if start <= match.start())
            by_cell[row, lane] = match.group()
    assert sorted(by_cell.values()) == sorted(op.name for op in plan.ops)
    for lane in Lane:
        in_lane = [(index, op.name) for index, op in enumerate(plan.ops) if op.lane is lane]
        cells = sorted((row, name) for (row, column), name in by_cell.items() if column == lane.value)
        assert [name for _, name in cells] == [name for _, name in in_lane]
        placed.update({index: row for (index, _), (row, _) in zip(in_lane, cells, strict=True)})
    for index, waits in enumerate(plan.wait_indices):
        assert all(placed[other] < placed[index] for other in waits)


def test_text_of_no_ops():
    plan = build_plan(num_layers=1, num_microbatches=1)
    assert to_text(plan, 3, 3) == "\n"


def test_perfetto_trace():
    plan = build_plan(num_layers=2, num_microbatches=3, sharded=True)
    trace = json.loads(json.dumps(to_perfetto(plan)))
    events = trace["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(threads.values()) == ["comm", "compute", "gather", "reduce"]
    slices = [event for event in events if event["ph"] == "X"]
    spans = simulate(plan).spans
    assert len(slices) == len(spans)
    for event, span in zip(slices, spans, strict=True):
        op = plan.ops[span.op_index]
        assert threads[event["tid"]] == span.lane.value
        assert event["name"] == (op.name if span.lane is op.lane else f"{op.name} (pack)")
        assert event["dur"] >= 0
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(len(op.waits) for op in plan.ops)
    assert all(starts[arrow] <= ends[arrow] for arrow in starts)


def test_svg(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws the picture and is not installed")
    plan = build_plan(num_layers=2, num_microbatches=2, sharded=True, delay_wgrad=True)
    path = tmp_path / "plan.svg"
    to_svg(plan, path)
    root = ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg")
    comments = re.findall(r"<!-- (.*?) -->", path.read_text())
    # matplotlib writes each label as a comment beside its glyphs.
    for name in ("forward", "backward", "weight gradients", "gather parameters", "reduce gradients"):
        assert name in comments
    for lane in ("compute", "comm", "gather", "reduce"):
        assert lane in comments
    assert any(comment.startswith("2 layers, 2 micro-batches, 1 forward/backward pair: ") for comment in comments)
    again = tmp_path / "again.svg"
    to_svg(plan, again)
    assert again.read_bytes() == path.read_bytes()


def test_picture_of_a_dense_plan_in_another_format(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws the picture and is not installed")
    path = tmp_path / "plan.png"
    plan = build_plan(num_layers=1, num_microbatches=1, moe_layers=())
    assert all(op.kind is not Kind.GATHER for op in plan.ops)
    to_svg(plan, path, title="dense")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_pictures_and_traces_of_all_ranks(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws the picture and is not installed")
    plans = ranks(num_layers=4, num_microbatches=2, pp=2, vpp=2)
    path = tmp_path / "pipeline.svg"
    to_svg(plans, path)
    comments = re.findall(r"<!-- (.*?) -->", path.read_text())
    for label in ("0 compute", "0 next", "1 previous", "1 comm", "send and receive"):
        assert label in comments
    assert any(comment.startswith("4 layers, 2 pipeline ranks, 2 chunks, 2 micro-batches: ") for comment in comments)
    events = to_perfetto(plans)["traceEvents"]
    for plan in plans:
        names = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == plan.shape.rank]
        assert sorted(names) == sorted(op.name for op in plan.ops)
    starts = [event["id"] for event in events if event["ph"] == "s"]
    assert len(starts) == len(set(starts))


def test_text_shows_a_receive_no_earlier_than_what_is_issued_before_it():
    text = to_text(ranks(num_layers=2, num_microbatches=1, moe_layers=(), pp=2)[0])
    assert text.splitlines() == [
        "compute           next",
        "----------------  -------",
        "F0.embedding",
        "F0.L0.attention",
        "F0.L0.mlp",
        "BEGIN_BACKWARD.0  SEND_F0",
        "                  RECV_B0",
        "B0.L0.mlp",
        "B0.L0.attention",
        "B0.embedding",
    ]
