"""The bench command's arithmetic against closed forms: medians and their intervals, unions of time, traces, tables."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from combined_1f1b.bench.intervals import difference, intersection, length, union
from combined_1f1b.bench.report import HEADINGS, cells, read_report, tables_of, to_markdown, write_markdown
from combined_1f1b.bench.summary import summarize
from combined_1f1b.bench.trace import LAUNCH_MICROSECONDS, read_shares
from combined_1f1b.cli import main
from combined_1f1b.errors import ConfigError

pytestmark = pytest.mark.world_size(1)

points = st.integers(min_value=0, max_value=30)
intervals = st.lists(st.tuples(points, points), max_size=8)


def cells_of(some):
    """The unit cells that intervals with whole ends cover: an independent picture of the same sets."""
    return {cell for start, end in some for cell in range(start, end)}


@given(intervals, intervals)
def test_unions_intersections_and_differences_cover_the_right_time(first, second):
    one, two = union(first), union(second)
    assert cells_of(one) == cells_of(first)
    assert cells_of(intersection(one, two)) == cells_of(first) & cells_of(second)
    assert cells_of(difference(one, two)) == cells_of(first) - cells_of(second)
    assert length(one) == len(cells_of(first))
    for result in (one, intersection(one, two), difference(one, two)):
        assert all(start < end for start, end in result)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(result))


def test_the_interval_of_the_median_is_the_binomial_one():
    """For 10 samples the 2nd and the 9th: P(at most 1 of 10 below) is 11/1024 on each side."""
    summary = summarize([float(value) for value in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1)])
    assert (summary.count, summary.median, summary.minimum, summary.maximum) == (10, 5.5, 1, 10)
    assert (summary.low, summary.high) == (2, 9)
    assert math.isclose(summary.confidence, 1 - 2 * 11 / 1024)


def test_few_samples_admit_a_lower_confidence():
    summary = summarize([3.0, 1.0, 2.0])
    assert (summary.low, summary.high, summary.confidence) == (1, 3, 0.75)
    assert summarize([4.0]).confidence == 0.0
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


@given(st.lists(st.floats(min_value=0, max_value=1e3), min_size=6, max_size=40))
def test_the_interval_holds_the_median_with_95_percent(samples):
    summary = summarize(samples)
    assert summary.minimum <= summary.low <= summary.median <= summary.high <= summary.maximum
    assert summary.confidence >= 0.95


def trace_of(*rows):
    """A Kineto trace: rows of (name, category, start, end) in microseconds, and what else such a file holds."""
    events = [
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 999},
    ]
    return {
        "traceEvents": [
            *events,
            *({"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start} for name, cat, start, end in rows),
        ]
    }


SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
ROWS = (
    ("gemm", "kernel", 0, 100),
    (SPIN, "kernel", 50, 150),  # half hidden; the gemm at 150 waited for the rest
    ("gemm", "kernel", 150, 250),
    (SPIN, "kernel", 160, 200),  # hidden
    (SPIN, "kernel", 180, 240),  # hidden, and overlapping the other: a union, not a sum
    ("Memset", "gpu_memset", 300, 400),
    (SPIN, "kernel", 410, 430),  # in a gap that ends long after it: exposed, nobody waited
    ("gemm", "kernel", 500, 600),
    (SPIN, "kernel", 600, 640),  # after the last computation: exposed, in no gap
)


def shares_of(folder, *rows, link="spin"):
    path = folder / "trace.json"
    path.write_text(json.dumps(trace_of(*rows)))
    return read_shares(path, link=link)


def test_a_trace_is_read_in_unions(tmp_path):
    shares = shares_of(tmp_path, *ROWS)
    microseconds = {name: round(1e6 * value, 6) for name, value in shares.as_dict().items()}
    assert microseconds == {
        "span": 640,
        "communication": 100 + 80 + 20 + 40,
        "compute": 100 + 100 + 100 + 100,
        "exposed": 50 + 20 + 40,
        "blocking": 50,
    }


def test_a_kernel_that_starts_soon_after_the_traffic_waited_for_it(tmp_path):
    for gap, blocking in ((LAUNCH_MICROSECONDS, 50), (LAUNCH_MICROSECONDS + 1, 0)):
        rows = (("gemm", "kernel", 0, 100), (SPIN, "kernel", 100, 150), ("gemm", "kernel", 150 + gap, 200))
        assert round(1e6 * shares_of(tmp_path, *rows).blocking, 6) == blocking


def test_other_collectives_are_neither_traffic_nor_computation(tmp_path):
    rows = (
        ("gemm", "kernel", 0, 100),
        ("ncclDevKernel_SendRecv", "kernel", 100, 150),
        ("ncclDevKernel_AllGather_RING_LL", "kernel", 100, 120),
        ("gemm", "kernel", 150, 200),
    )
    shares = shares_of(tmp_path, *rows, link="real")
    assert round(1e6 * shares.exposed, 6) == 30
    assert round(1e6 * shares.blocking, 6) == 50
    assert round(1e6 * shares.compute, 6) == 150


@pytest.mark.parametrize(
    ("entry_of_report", "code"),
    [
        ({"schedule": "ours"}, 0),
        ({"schedule": "ours", "gradients_compared": "different"}, 1),
        ({"schedule": "ours", "gradients_compared": "different", "delay_wgrad": True}, 1),
        ({"schedule": "ours-paired", "losses": "different", "gradients_compared": "equal"}, 1),
        ({"schedule": "default", "gradients_compared": "different", "wrapper": "mfsdp-hooks"}, 1),
        ({"schedule": "built-in", "gradients_compared": "different"}, 1),
        ({"schedule": "built-in", "gradients_compared": "different", "delay_wgrad": True}, 0),
        ({"schedule": "built-in", "losses": "different", "gradients_compared": "", "delay_wgrad": True}, 1),
    ],
)
def test_other_bits_end_with_1_but_for_the_known_fault_of_the_builtin(tmp_path, entry_of_report, code):
    path = tmp_path / "report.json"
    path.write_text(
        json.dumps(report_of(entry("default", 0.6, losses="reference"), entry(seconds=0.5, **entry_of_report)))
    )
    assert main(["bench", "--from", str(path)]) == code


@pytest.mark.parametrize("link", ["copy", "none"])
def test_a_trace_without_traffic_says_nothing(tmp_path, link):
    assert shares_of(tmp_path, *ROWS, link=link) is None


def entry(schedule, seconds, *, traffic=True, refused="", losses="equal", **more):
    return {
        "schedule": schedule,
        "wrapper": "none",
        "delay_wgrad": False,
        "traffic": traffic,
        "refused": refused,
        "seconds": [] if refused else [seconds] * 10,
        "host_seconds": [] if refused else [seconds / 2] * 10,
        "losses": [1.0],
        "losses_compared": losses,
        "gradients_compared": losses,
        "peak_allocated": 2**31,
        "peak_reserved": 3 * 2**30,
        "traffic_shares": None,
        **more,
    }


def report_of(*entries, link="spin"):
    return {
        "format": 1,
        "date": "2026-01-02 03:04 UTC",
        "command": "python -m combined_1f1b bench",
        "machine": {"device": "a GPU", "ranks": 1, "cpu_cores": 2},
        "versions": {"python": "3.12", "nccl": None},
        "options": {"preset": "small", "size": {"num_layers": 4}},
        "link": {"kind": link, "description": "modelled: a spinning kernel, 80 GB/s", "early_frees": False},
        "groups": [{"mode": "graph", "layers": "local", "data_parallel": "none", "variants": list(entries)}],
    }


ENTRIES = (
    entry("default", 0.600, losses="reference"),
    entry("default", 0.500, traffic=False),
    entry("built-in", 0.550, losses="different"),
    entry("ours", 0.510, traffic_shares={"exposed": 0.02, "blocking": 0.01}),
    entry("ours-paired", 0.0, refused="OutOfMemoryError: too large"),
)


def test_the_table_follows_from_the_samples():
    ((group, rows),) = tables_of(report_of(*ENTRIES))
    assert group.name == "local layers, graph"
    table = {(row.variant.schedule, row.variant.traffic): dict(zip(HEADINGS, cells(row), strict=True)) for row in rows}
    ours = table["ours", True]
    assert (ours["step ms"], ours["host ms"], ours["median lies in"]) == ("510.0", "255.0", "510.0 to 510.0")
    assert (ours["/ default"], ours["/ built-in"]) == ("0.850", "0.927")
    assert ours["hidden"] == "90.0%"  # 1 - (510 - 500) / (600 - 500)
    assert (ours["exposed ms"], ours["blocking ms"]) == ("20.0", "10.0")
    assert (ours["allocated GiB"], ours["reserved GiB"]) == ("2.00", "3.00")
    assert ours["losses"] == "bitwise equal"
    assert table["built-in", True]["losses"] == "DIFFERENT"
    assert table["built-in", True]["hidden"] == "50.0%"
    assert table["default", True]["hidden"] == "0.0%"
    assert table["default", False]["hidden"] == ""
    assert table["ours-paired", True]["step ms"] == "does not run"


def test_delayed_weight_gradients_are_compared_like_for_like():
    more = (entry("built-in", 0.520, delay_wgrad=True), entry("ours", 0.505, delay_wgrad=True))
    for entries, ratio in (((*ENTRIES, *more), 0.505 / 0.520), ((*ENTRIES, more[1]), 0.505 / 0.550)):
        ((_, rows),) = tables_of(report_of(*entries))
        assert rows[-1].variant.delay_wgrad
        assert math.isclose(rows[-1].to_built_in, ratio)
        assert math.isclose(rows[-1].to_default, 0.505 / 0.600)


def test_nothing_is_hidden_where_the_link_takes_no_time():
    ((_, rows),) = tables_of(report_of(*ENTRIES, link="none"))
    assert all(row.hidden is None for row in rows)


def test_markdown_stands_between_its_markers(tmp_path):
    path = tmp_path / "benchmarks.md"
    report = report_of(*ENTRIES)
    write_markdown(path, [report])
    path.write_text(path.read_text().replace("# Benchmarks", "# Ours, by hand") + "\nby hand too\n")
    write_markdown(path, [report, report])
    text = path.read_text()
    assert text.startswith("# Ours, by hand\n")
    assert text.endswith("by hand too\n")
    assert text.count("### local layers, graph") == 2
    assert "80 GB/s" in text
    assert "early frees" in text
    assert "head and tail paired does not run: OutOfMemoryError: too large" in text
    assert "at least 98%" in text  # ten samples: 1 - 22/1024
    assert to_markdown([report]) in text


def test_what_is_no_report_is_refused(tmp_path):
    for text in ("{", "[]", '{"format": 0}'):
        path = tmp_path / "report.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match="--from="):
            read_report(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_report(tmp_path / "nowhere.json")
