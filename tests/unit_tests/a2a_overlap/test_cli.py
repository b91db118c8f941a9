"""The command line without ranks: help, plan, simulate, and how mistakes are answered."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cli_testing import TINY, fails, write_config

from combined_1f1b.cli import main
from combined_1f1b.schedule import Plan

pytestmark = pytest.mark.world_size(1)


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["compare", "--help"], ["plan", "--help"], ["bench", "--help"]]
)
def test_help_explains_the_command(capsys, words):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "usage: combined_1f1b" in text
    if words == ["--help"]:
        for command in ("train", "compare", "plan", "simulate", "bench", "doctor", "torchrun"):
            assert command in text


def test_plan_prints_what_parses_back(capsys):
    assert main(["plan", "--layers", "3", "--microbatches", "2", "--sharded", "--dense-layers", "1"]) == 0
    plan = Plan.parse(capsys.readouterr().out)
    assert plan.shape.moe_layers == (0, 2)
    assert plan.shape.sharded
    assert plan.pairs.forward_backward_pairs == 1
    plan.validate()


def test_plan_takes_its_shape_from_a_configuration(capsys, tmp_path):
    text = TINY.replace("num_layers: 2", "num_layers: 3\n  moe_layer_freq: [1, 0, 1]")
    assert main(["plan", "--config", write_config(tmp_path, text)]) == 0
    shape = Plan.parse(capsys.readouterr().out).shape
    assert (shape.num_layers, shape.num_microbatches, shape.moe_layers) == (3, 3, (0, 2))
    assert not shape.sharded


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_settings_on_top_of_the_file_change_the_shape(capsys, tmp_path, command):
    words = ["--config", write_config(tmp_path), "data.num_microbatches=2", "model.delay_wgrad_compute=true"]
    assert main([command, *words, "--layers", "1"]) == 0
    text = capsys.readouterr().out
    if command == "plan":
        shape = Plan.parse(text).shape
        assert (shape.num_layers, shape.num_microbatches, shape.delay_wgrad) == (1, 2, True)


def test_flags_win_over_the_configuration(capsys, tmp_path):
    assert main(["plan", "--config", write_config(tmp_path), "--microbatches", "5", "--tied", "--sharded"]) == 0
    shape = Plan.parse(capsys.readouterr().out).shape
    assert (shape.num_microbatches, shape.tied_embeddings, shape.sharded) == (5, True, True)


def test_plan_draws_a_picture(capsys, tmp_path):
    path = tmp_path / "pictures" / "plan.svg"
    assert main(["plan", "--layers", "2", "--draw", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    assert path.read_text().lstrip().startswith("<?xml")
    assert "<svg" in path.read_text()


def test_plan_prints_lanes_side_by_side(capsys):
    assert main(["plan", "--layers", "1", "--microbatches", "2", "--table"]) == 0
    text = capsys.readouterr().out
    assert "F1.L0.dispatch" in text
    assert "B0.L0.experts" in text


def test_simulate_shows_both_ways_of_pairing(capsys):
    assert main(["simulate", "--layers", "2", "--microbatches", "4"]) == 0
    text = capsys.readouterr().out
    assert "head and tail paired" in text
    # 2 layers x 4 all-to-alls x 4 micro-batches, of which the first forward and the last backward have no partner
    assert "24 of 32" in text


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["plan", "--layers", "0"], ["--layers=0", "at least 1"]),
        (["simulate", "--microbatches", "0"], ["--microbatches=0", "at least 1"]),
        (["plan", "--layers", "2", "--dense-layers", "2"], ["--dense-layers=2", "0 to 1"]),
        (["plan", "--draw", "plan.png"], ["--draw='plan.png'", ".svg"]),
        (["plan", "--config", "nowhere.yaml"], ["--config='nowhere.yaml'", "no such file"]),
        (["plan", "model.num_layers=2"], ["--config=None", "model.num_layers=2", "--help"]),
        (["train", "--config", "nowhere.yaml"], ["--config='nowhere.yaml'", "no such file"]),
        (["compare", "--config", "nowhere.yaml"], ["--config='nowhere.yaml'", "no such file"]),
    ],
)
def test_a_mistake_is_one_line(capsys, words, parts):
    error = fails(capsys, *words)
    for part in parts:
        assert part in error


def test_a_picture_that_cannot_be_written_is_one_line(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in fails(capsys, "plan", "--layers", "1", "--draw", str(tmp_path / "file" / "plan.svg"))


def test_debug_shows_the_traceback(capsys):
    assert main(["plan", "--layers", "0", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["nothing"], ["plan", "--dense-layers", "a"], ["train"]])
def test_wrong_grammar_ends_with_usage(capsys, words):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (["plan", "--layers", "2"], ("torch", "megatron", "omegaconf", "matplotlib", "rich")),
        (["simulate", "--layers", "2"], ("torch", "megatron", "omegaconf", "matplotlib")),
        (["--help"], ("torch", "megatron", "omegaconf", "matplotlib", "rich")),
    ],
)
def test_commands_import_no_more_than_they_need(words, unwanted):
    program = (
        "import sys; from combined_1f1b.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {unwanted!r} if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_a_closed_pipe_is_no_error():
    program = f"{sys.executable} -m combined_1f1b plan --layers 64 --microbatches 8 | head -1"
    command = ["bash", "-o", "pipefail", "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0
    assert run.stdout.startswith("plan ")
    assert run.stderr == ""


def test_ranks_other_than_the_first_hold_back(capsys, monkeypatch):
    waited = []
    monkeypatch.setattr("combined_1f1b.cli.time.sleep", waited.append)
    monkeypatch.setitem(os.environ, "RANK", "1")
    assert "rank 1: error" in fails(capsys, "plan", "--layers", "0")
    assert len(waited) == 1
