"""train and compare on real ranks: both wrappers and schedules, resume, pictures, and what ranks do wrong together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cli_testing import ending_process_groups, fails, shared_folder, write_config
from torch.distributed import checkpoint

from combined_1f1b.cli import main
from combined_1f1b.training import compare as compare_module
from combined_1f1b.training import snapshot
from combined_1f1b.training.config import load_config
from combined_1f1b.training.loop import Trainer

pytestmark = pytest.mark.world_size(2)

FLAG_OFF = "model.overlap_moe_expert_parallel_comm=false"
SHARDED = "distributed.data_parallel=mfsdp_v2"


@pytest.fixture(autouse=True)
def groups_end_with_the_test(device):
    with ending_process_groups():
        yield


@pytest.fixture
def shared(tmp_path) -> Path:
    return shared_folder(tmp_path)


@pytest.fixture
def config_file(tmp_path) -> str:
    return write_config(tmp_path)


def losses_of(text: str) -> list[str]:
    return re.findall(r"loss (\d+\.\d+) ", text)


def is_first() -> bool:
    return torch.distributed.get_rank() == 0


@pytest.mark.parametrize("sharding", [[], [SHARDED]], ids=["ddp", "mfsdp_v2"])
def test_both_schedules_lower_the_loss_alike(capsys, config_file, shared, sharding):
    """What is printed is rounded, and the same text under both schedules; compare looks at every bit."""
    printed = {}
    for schedule in ("true", "false"):
        words = ["training.train_iters=8", f"output={shared}", *sharding]
        words.append(f"model.overlap_moe_expert_parallel_comm={schedule}")
        assert main(["train", "--config", config_file, *words]) == 0
        printed[schedule] = capsys.readouterr().out
    if not is_first():
        assert printed == {"true": "", "false": ""}
        return
    losses = losses_of(printed["true"])
    assert losses == losses_of(printed["false"])
    assert len(losses) == 9  # eight lines and the summary
    assert float(losses[-2]) < float(losses[0]) - 0.1
    assert "grad norm" in printed["true"]
    assert "tokens/s" in printed["true"]
    assert "2 forward-backward pairs" in printed["true"]
    assert "pairs" not in printed["false"]


@pytest.mark.parametrize(
    "changes",
    [["optimizer.optimizer=adamw", SHARDED], ["optimizer.optimizer=adamw"], ["optimizer.optimizer=sgd"]],
    ids=["adamw, mfsdp_v2", "adamw", "sgd"],
)
def test_a_resumed_run_goes_on_bit_for_bit(config_file, shared, monkeypatch, changes):
    finals = {}
    original = Trainer.step

    def step(trainer, iteration):
        report = original(trainer, iteration)
        finals[iteration] = (report.loss, snapshot.take_parameters(trainer))
        return report

    monkeypatch.setattr(Trainer, "step", step)
    words = ["model.attention_dropout=0.1", "training.save_interval=2", *changes]
    assert main(["train", "--config", config_file, f"output={shared}/whole", *words]) == 0
    whole = dict(finals)
    finals.clear()
    words.append(f"output={shared}/parts")
    assert main(["train", "--config", config_file, "training.train_iters=2", *words]) == 0
    assert main(["train", "--config", config_file, "training.resume=true", *words]) == 0
    assert finals.keys() == whole.keys()
    for iteration, (loss, parameters) in whole.items():
        assert finals[iteration][0] == loss
        assert parameters.keys() == finals[iteration][1].keys()
        for name, tensor in parameters.items():
            assert torch.equal(finals[iteration][1][name], tensor), (iteration, name)


def test_a_failed_save_leaves_nothing_that_looks_whole(capsys, config_file, shared, monkeypatch):
    words = [f"output={shared}", "training.train_iters=1", "training.save_interval=1"]

    def broken(*arguments, **options):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save", broken)
    with pytest.raises(OSError, match="no space left"):
        main(["train", "--config", config_file, *words])
    monkeypatch.undo()
    assert "no checkpoint in" in fails_quickly(capsys, monkeypatch, config_file, *words, "training.resume=true")
    # The next run in the same process is not disturbed by what was left.
    assert main(["train", "--config", config_file, *words]) == 0
    torch.distributed.barrier()
    assert [path.name for path in (shared / "checkpoints").iterdir()] == ["iteration_00000001"]


def fails_quickly(capsys, monkeypatch, config_file: str, *words: str, command: str = "train") -> str:
    """`fails`, without the moment for which ranks other than the first hold back."""
    monkeypatch.setattr("combined_1f1b.cli.time.sleep", lambda seconds: None)
    return fails(capsys, command, "--config", config_file, *words)


def test_a_checkpoint_of_another_model_is_refused(capsys, config_file, shared, monkeypatch):
    words = [f"output={shared}", "training.train_iters=1", "training.save_interval=1"]
    assert main(["train", "--config", config_file, *words]) == 0
    error = fails_quickly(capsys, monkeypatch, config_file, *words, "training.resume=true", "model.ffn_hidden_size=64")
    assert "model.ffn_hidden_size='64'" in error
    assert "was saved with 32" in error


def test_a_run_may_go_on_under_another_schedule(capsys, config_file, shared):
    words = [f"output={shared}", "training.save_interval=1"]
    assert main(["train", "--config", config_file, "training.train_iters=1", *words]) == 0
    capsys.readouterr()
    assert main(["train", "--config", config_file, "training.resume=true", FLAG_OFF, *words]) == 0
    if is_first():
        assert "at iteration 1" in capsys.readouterr().out


def test_scalars_are_written_for_tensorboard(config_file, shared):
    words = [f"output={shared}", "training.tensorboard=true", "training.train_iters=2"]
    assert main(["train", "--config", config_file, *words]) == 0
    if is_first():
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(shared / "tensorboard"))
        events.Reload()
        names = {"loss", "learning rate", "tokens per second", "step seconds", "grad norm"}
        assert names == set(events.Tags()["scalars"])
        assert len(events.Scalars("loss")) == 2


def test_a_terminal_gets_a_progress_bar(capsys, config_file, shared, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["train", "--config", config_file, f"output={shared}"]) == 0
    text = capsys.readouterr().out
    if is_first():
        assert "4/4" in text
        assert "iteration 1/4" not in text


@pytest.mark.parametrize("name", ["tiny_moe", "fsdp_moe"])
def test_the_examples_train_as_they_are(capsys, shared, name):
    path = Path(__file__).resolve().parents[3] / "examples" / f"{name}.yaml"
    assert main(["train", "--config", str(path), "training.train_iters=1", f"output={shared}"]) == 0
    if is_first():
        assert "3 forward-backward pairs" in capsys.readouterr().out


def test_per_token_loss_trains(capsys, config_file, shared):
    assert main(["train", "--config", config_file, f"output={shared}", "model.calculate_per_token_loss=true"]) == 0


def test_a_loss_that_is_no_number_ends_the_run(capsys, config_file, shared, monkeypatch):
    error = fails_quickly(
        capsys, monkeypatch, config_file, f"output={shared}", "optimizer.lr=1e30", "optimizer.clip_grad=0"
    )
    assert "the loss is" in error
    assert "lower optimizer.lr" in error


@pytest.mark.parametrize("sharding", [[], [SHARDED]], ids=["ddp", "mfsdp_v2"])
def test_compare_finds_the_same_bits_and_draws(capsys, config_file, shared, sharding):
    assert main(["compare", "--config", config_file, f"output={shared}", "compare.rounds=2", *sharding]) == 0
    text = capsys.readouterr().out
    if not is_first():
        assert text == ""
        return
    assert text.count("bitwise equal") == (3 if sharding else 6)
    assert "parity holds" in text
    assert "16 of 24" in text.replace("│", " ")  # 2 layers x 4 all-to-alls x 3 micro-batches; 2 pairs of 8
    assert "<svg" in (shared / "plan.svg").read_text()


def test_compare_says_where_results_differ_and_fails(capsys, config_file, shared, monkeypatch):
    original = compare_module.take_gradients

    def wrong(chunks):
        gradients = original(chunks)
        if chunks[0].config.overlap_moe_expert_parallel_comm and not is_first():
            gradients["0.decoder.final_layernorm.weight"][0] += 1.0
        return gradients

    monkeypatch.setattr(compare_module, "take_gradients", wrong)
    assert main(["compare", "--config", config_file, f"output={shared}", "compare.rounds=1"]) == 1
    if is_first():
        text = capsys.readouterr().out
        assert "PARITY FAILED" in text
        assert "gradients first differ in iteration 1, rank 1, 0.decoder.final_layernorm.weight" in text
        assert "largest difference 1)" in text


def test_compare_goes_on_without_a_schedule_that_cannot_run(capsys, config_file, shared):
    words = [f"output={shared}", "compare.rounds=1", "model.bf16=false"]
    assert main(["compare", "--config", config_file, *words]) == 0
    if is_first():
        text = capsys.readouterr().out
        assert "Megatron combined cannot run this: model: Megatron refuses this combination" in text
        assert text.count("bitwise equal") == 3


@pytest.mark.parametrize("command", ["train", "compare"])
def test_ranks_that_disagree_are_told(capsys, config_file, shared, monkeypatch, command):
    rank = torch.distributed.get_rank()
    words = [f"output={shared}", f"data.num_microbatches={3 + rank}"]
    error = fails_quickly(capsys, monkeypatch, config_file, *words, command=command)
    assert f"data.num_microbatches='{3 + rank}': ranks disagree: rank 0 has 3, rank 1 has 4" in error


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["model.num_moe_experts=3"], "does not divide model.num_moe_experts=3"),
        (["model.expert_model_parallel_size=4"], "does not divide the 2 ranks"),
        (["data.text=nowhere"], "no such file or folder"),
        (["data.sequence_length=200000"], "the data holds only 100000 tokens"),
        (["model.fp16=true", "model.bf16=false"], "no loss scaler"),
        (["model.transformer_impl=transformer_engine"], "Transformer Engine is not installed"),
        (["model.recompute_granularity=full", "model.recompute_method=uniform"], "recompute_granularity"),
        (["training.resume=true"], "no checkpoint in"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(capsys, config_file, shared, monkeypatch, words, part):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert part in fails_quickly(capsys, monkeypatch, config_file, f"output={shared}/new", *words)
    assert not (shared / "new").exists()
    assert load_config(config_file).output == "runs/config"
