"""The host cost of a layer pair: exact counts of what the schedules ask for, and a measurement that runs."""

from __future__ import annotations

import json

import pytest
import torch

from combined_1f1b.bench import host_cost
from combined_1f1b.bench.host_cost import BUILT_IN, OURS, SCHEDULES, count_calls
from combined_1f1b.cli import main

pytestmark = pytest.mark.world_size(1)


@pytest.fixture(scope="module")
def counts():
    return count_calls()


def test_the_built_in_makes_the_calls_that_its_nodes_make(counts):
    """Four nodes forward and four backward: each waits, switches to its stream and back, and records; each backward
    calls the engine once. The forwards free the inputs of the dispatch (two), the experts and the combine."""
    expected = {"waits": 8, "stream switches": 16, "events recorded": 8, "engine calls": 4, "storage resizes": 4}
    assert {kind: counts[BUILT_IN][kind] for kind in expected} == expected


def test_ours_asks_for_no_more_than_its_plan_says(counts):
    """In a pair every node but the dispatches follows one on the other lane, forward and backward: see the plan."""
    ours = counts[OURS]
    assert ours["engine calls"] == 4
    assert (
        ours["stream switches"] <= 8
    )  # to the communication lane and back: dispatch and combine, forward and backward
    assert ours["waits"] == ours["events recorded"] == 8
    assert ours.get("record_stream calls", 0) == ours.get("storage resizes", 0) == 0


def test_everything_is_put_back():
    names = ("Event", "Stream", "stream", "set_stream", "current_stream")
    before = {name: getattr(torch.cuda, name) for name in names}
    count_calls()
    # Compared by value: what stands there is a bound method while the host device is active.
    assert {name: getattr(torch.cuda, name) for name in names} == before
    assert type(torch.autograd.variable.Variable._execution_engine).__module__ == "torch._C"
    assert torch.Tensor.detach.__qualname__.endswith("TensorBase.detach")


def test_the_command_measures_in_this_process(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(host_cost, "MANY_LAYERS", 3)
    monkeypatch.setattr(host_cost, "FEW_LAYERS", 1)
    path = tmp_path / "cost.json"
    assert main(["bench", "--host-cost", "--samples", "1", "--processes", "1", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    result = json.loads(path.read_text())
    assert set(result["seconds_per_pair"]) == set(SCHEDULES)
    assert all(len(values) == 1 for sizes in result["samples"].values() for values in sizes.values())
    assert result["ratio"] > 0
    assert "engine calls" in text
    assert "Aim: at most 0.5" in text
    assert main(["bench", "--from", str(path), "--markdown", str(tmp_path / "cost.md"), "--plots", str(tmp_path)]) == 0
    assert capsys.readouterr().out == text
    assert (
        f"| engine calls | {result['calls_per_pair'][OURS]['engine calls']} | 4 | 4 |"
        in (tmp_path / "cost.md").read_text()
    )
