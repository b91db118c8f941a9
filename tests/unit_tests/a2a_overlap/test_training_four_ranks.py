"""train and compare on four ranks: expert replicas, pipelines, and what local layers cannot do."""

from __future__ import annotations

import re

import pytest
import torch
from cli_testing import ending_process_groups, fails, shared_folder, write_config

from combined_1f1b.cli import main

pytestmark = pytest.mark.world_size(4)

FLAG_OFF = "model.overlap_moe_expert_parallel_comm=false"


@pytest.fixture(autouse=True)
def groups_end_with_the_test(device):
    with ending_process_groups():
        yield


@pytest.mark.parametrize("wrapper", ["ddp", "mfsdp_v2"])
def test_compare_with_two_replicas_of_every_expert(capsys, tmp_path, wrapper):
    words = [f"output={shared_folder(tmp_path)}", "compare.rounds=2", f"distributed.data_parallel={wrapper}"]
    assert main(["compare", "--config", write_config(tmp_path), *words]) == 0
    if torch.distributed.get_rank() == 0:
        text = capsys.readouterr().out
        assert ("added in the order of the ranks" in text) == (wrapper == "mfsdp_v2")
        assert "parity holds" in text


@pytest.mark.parametrize(
    "words",
    [
        ["model.pipeline_model_parallel_size=2", FLAG_OFF],
        [
            "model.pipeline_model_parallel_size=2",
            "model.virtual_pipeline_model_parallel_size=2",
            "model.num_layers=4",
            "data.num_microbatches=4",
            FLAG_OFF,
        ],
    ],
    ids=["pipeline", "virtual pipeline"],
)
def test_training_under_other_divisions_of_the_ranks(capsys, tmp_path, words):
    assert main(["train", "--config", write_config(tmp_path), f"output={shared_folder(tmp_path)}", *words]) == 0
    if torch.distributed.get_rank() == 0:
        losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)  ", capsys.readouterr().out)]
        assert losses[-1] < losses[0]


def test_what_local_layers_cannot_do_is_said(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("combined_1f1b.cli.time.sleep", lambda seconds: None)
    words = ["model.tensor_model_parallel_size=2", "model.expert_tensor_parallel_size=1"]
    words.append("model.sequence_parallel=true")
    error = fails(capsys, "train", "--config", write_config(tmp_path), f"output={shared_folder(tmp_path)}", *words)
    assert "Megatron refuses this combination: sequence parallel not supported by torch LayerNorm" in error
