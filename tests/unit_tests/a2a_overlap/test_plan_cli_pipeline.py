"""The commands `plan` and `simulate` for pipelines, and how a run's configuration splits its layers."""

from __future__ import annotations

import pytest
from cli_testing import TINY, fails, write_config

from combined_1f1b.cli import main
from combined_1f1b.errors import ConfigError
from combined_1f1b.schedule import Plan, validate_ranks
from combined_1f1b.training.plans import layer_counts_of

pytestmark = pytest.mark.world_size(1)

WORDS = ("--layers", "4", "--microbatches", "4", "--pp", "2", "--vpp", "2")


def test_plan_prints_every_rank(capsys):
    assert main(["plan", *WORDS]) == 0
    plans = [Plan.parse(text) for text in capsys.readouterr().out.split("\n\n")]
    assert [plan.shape.rank for plan in plans] == [0, 1]
    validate_ranks(plans)
    assert "SEND_F0.c0" in [op.name for op in plans[0].ops]


def test_plan_prints_one_rank(capsys):
    assert main(["plan", *WORDS, "--rank", "1", "--layer-counts", "0,2,2,0", "--microbatch-group-size", "4"]) == 0
    shape = Plan.parse(capsys.readouterr().out).shape
    assert (shape.rank, shape.layer_counts, shape.microbatch_group_size_per_vp_stage) == (1, (0, 2, 2, 0), 4)


def test_plan_draws_and_tabulates_all_ranks(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws the picture and is not installed")
    path = tmp_path / "pipeline.svg"
    assert main(["plan", *WORDS, "--table", "--draw", str(path)]) == 0
    assert capsys.readouterr().out.count("previous") == 2
    assert "1 previous" in path.read_text()


def test_simulate_shows_every_rank(capsys):
    assert main(["simulate", "--layers", "8", "--microbatches", "16", "--pp", "4"]) == 0
    text = capsys.readouterr().out
    assert "rank 3" in text
    assert [int(word) for word in text.split("micro-batches alive")[1].split()[:4]] == [8, 6, 4, 2]
    assert "rank 0 holds up to 7 whole micro-batches" in text
    assert main(["simulate", *WORDS]) == 0
    assert "once for every chunk" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["plan", "--layers", "3", "--pp", "2"], ["pp=2", "layer_counts"]),
        (["plan", "--layers", "2", "--pp", "2", "--vpp", "2"], ["vpp=2"]),
        (["simulate", *WORDS, "--microbatches", "5"], ["num_microbatches=5", "use 4 or 6"]),
        (["plan", *WORDS, "--rank", "2"], ["--rank=2", "use 0 to 1"]),
        (["plan", *WORDS, "--pair-head-and-tail"], ["pair_head_and_tail=True", "vpp"]),
    ],
)
def test_a_mistake_is_one_line(capsys, words, parts):
    error = fails(capsys, *words)
    for part in parts:
        assert part in error


def test_plan_takes_the_pipeline_from_a_configuration(capsys, tmp_path):
    model = "num_layers: 6\n  pipeline_model_parallel_size: 2\n  virtual_pipeline_model_parallel_size: 2"
    text = TINY.replace("num_layers: 2", f"{model}\n  account_for_embedding_in_pipeline_split: true")
    text = text.replace("num_microbatches: 3", "num_microbatches: 4")
    path = write_config(tmp_path, text + "overlap:\n  pair_head_and_tail: true\n")
    assert "cannot be split" in fails(capsys, "plan", "--config", path)
    path = write_config(tmp_path, text.replace("num_layers: 6", "num_layers: 7"))
    assert main(["plan", "--config", path, "--rank", "0"]) == 0
    assert Plan.parse(capsys.readouterr().out).shape.layer_counts == (1, 2, 2, 2)


@pytest.mark.parametrize(
    ("model", "counts"),
    [
        ({}, None),
        ({"num_layers_in_first_pipeline_stage": 2}, (2, 3, 3)),
        ({"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 0}, (2, 6, 0)),
        ({"account_for_loss_in_pipeline_split": True}, (3, 3, 2)),
        ({"pipeline_model_parallel_layout": "Ett|t*4|ttL"}, (2, 4, 2)),
        ({"pipeline_model_parallel_layout": [["embedding"], ["decoder"] * 8, ["loss"]]}, (0, 8, 0)),
    ],
)
def test_uneven_splits_are_read_as_megatron_reads_them(model, counts):
    assert layer_counts_of({"num_layers": 8, "pipeline_model_parallel_size": 3} | model) == counts


def test_splits_that_do_not_add_up():
    with pytest.raises(ConfigError, match="num_layers=8"):
        layer_counts_of({"num_layers": 8, "pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 3})
