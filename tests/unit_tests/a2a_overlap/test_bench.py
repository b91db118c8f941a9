"""The bench command on the host device: every kind of variant runs, losses are equal, and the report holds it all."""

from __future__ import annotations

import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from cli_testing import ending_process_groups, fails, shared_folder
from megatron.core.pipeline_parallel import schedules

import combined_1f1b
from combined_1f1b import host
from combined_1f1b.bench import measure, workload
from combined_1f1b.bench.link import Link
from combined_1f1b.bench.options import DEFAULT, OURS, PAIRED, BenchOptions, Group, Variant, sized
from combined_1f1b.bench.options import PRESETS as SIZES
from combined_1f1b.cli import main

SMALL = ("--preset", "tiny", "--samples", "2", "--warmup", "1", "num_layers=1", "num_microbatches=2")


@pytest.fixture(autouse=True)
def groups_end_with_the_test(device):
    with ending_process_groups():
        yield


def run(capsys, folder, *words):
    """Run the command; the report, what was printed and the exit code."""
    capsys.readouterr()
    code = main(["bench", *SMALL, "--json", str(folder / "report.json"), *words])
    text = capsys.readouterr().out
    torch.distributed.barrier()
    return json.loads((folder / "report.json").read_text()), text, code


def fail(_found):
    raise KeyError("mine")


def variants_of(report):
    return {
        (group["mode"], group["data_parallel"], entry["schedule"], entry["wrapper"], entry["delay_wgrad"]): entry
        for group in report["groups"]
        for entry in group["variants"]
        if entry["traffic"]
    }


@pytest.mark.world_size(1)
def test_all_schedules_eager_and_in_a_graph(capsys, tmp_path, monkeypatch):
    words = ["--data-parallel", "none", "--no-traffic", "none"]
    words += ["--markdown", str(tmp_path / "bench.md"), "--plots", str(tmp_path / "plots")]
    monkeypatch.setattr(
        sys, "argv", ["combined_1f1b", "bench", *SMALL, *words, "--json", "report.json", "--plots=here"]
    )
    report, text, code = run(capsys, tmp_path, *words)
    assert code == 0
    assert report["format"] == 1
    assert report["machine"]["ranks"] == 1
    assert report["versions"]["torch"] == torch.__version__
    assert report["options"]["size"]["num_layers"] == 1
    command = " ".join(["python -m combined_1f1b bench", *SMALL, "--data-parallel none --no-traffic none"])
    assert report["command"] == command, "with what was measured, without where the results went"
    assert [group["mode"] for group in report["groups"]] == ["eager", "graph"]
    for group in report["groups"]:
        assert [entry["schedule"] for entry in group["variants"]] == ["default", "built-in", "ours", "ours-paired"]
        for entry in group["variants"]:
            assert not entry["refused"], entry["refused"]
            assert len(entry["seconds"]) == len(entry["host_seconds"]) == 2
            assert all(
                0 < host <= seconds for host, seconds in zip(entry["host_seconds"], entry["seconds"], strict=True)
            )
            assert len(entry["losses"]) == 2
        answers = [entry["losses_compared"] for entry in group["variants"]]
        assert answers == ["reference"] + ["equal"] * 3
        assert [entry["gradients_compared"] for entry in group["variants"]] == answers
    losses = {tuple(entry["losses"]) for group in report["groups"] for entry in group["variants"]}
    assert len(losses) == 1
    assert "combined_1f1b, head and tail paired" in text
    assert "bitwise equal" in text
    assert "Link: none" in text
    assert "### local layers, graph" in (tmp_path / "bench.md").read_text()
    assert (tmp_path / "plots" / "step_times.svg").read_text().lstrip().startswith("<?xml")
    assert not (tmp_path / "plots" / "hidden.svg").exists(), "no traffic, nothing to hide"


@pytest.mark.world_size(2)
def test_a_real_all_to_all_with_sharding_and_delayed_weights(capsys, tmp_path):
    words = (
        "--schedules",
        "default,ours",
        "--no-traffic",
        "none",
        "--delay-wgrad",
        "--data-parallel",
        "mfsdp",
        "--samples",
        "1",
    )
    report, text, code = run(capsys, shared_folder(tmp_path), *words)
    assert code == 0
    assert report["link"] == {"kind": "real", "description": "all-to-all over gloo", "early_frees": True}
    found = variants_of(report)
    assert len(found) == 2 * 4
    for mode in ("eager", "graph"):
        for key in (
            (DEFAULT, "ddp", False),
            (DEFAULT, "mfsdp-hooks", False),
            ("ours", "mfsdp", False),
            ("ours", "mfsdp", True),
        ):
            entry = found[(mode, "mfsdp", *key)]
            assert not entry["refused"], entry["refused"]
            assert entry["losses_compared"] == ("reference" if key[1] == "ddp" else "equal")
            assert entry["gradients_compared"] == ("reference" if key[0] == DEFAULT else "equal")
    assert (text == "") == (torch.distributed.get_rank() != 0)


@pytest.mark.world_size(2)
def test_a_slowed_link_is_the_real_one_after_copies(capsys, tmp_path, monkeypatch):
    carried = []
    copy = Link._copy
    monkeypatch.setattr(Link, "_copy", lambda link, tensor, size: (carried.append(size), copy(link, tensor, size))[1])
    words = ("--link", "slowed", "--modes", "eager", "--schedules", "default,ours", "--data-parallel", "none")
    report, _, code = run(capsys, shared_folder(tmp_path), *words, "--no-traffic", "ours", "--samples", "1")
    assert code == 0
    assert report["link"]["early_frees"]
    assert "all-to-all over gloo, after copies to pinned host memory" in report["link"]["description"]
    assert variants_of(report)["eager", "none", OURS, "none", False]["gradients_compared"] == "equal"
    assert carried, "nothing was slowed"


@pytest.mark.world_size(2)
def test_what_goes_wrong_on_one_rank_counts_on_all(capsys, tmp_path, monkeypatch):
    """Where one rank alone refused a variant, the others would measure it and wait in its collectives for ever."""
    failing = {
        "_build": Variant(schedule=OURS),
        "_warm_up": Variant(schedule=PAIRED),
        "_compare_gradients": Variant(schedule=OURS, delay_wgrad=True),
    }
    losing = Variant(schedule=PAIRED, delay_wgrad=True)

    def mutated(part, original):
        def mutation(self, run):
            original(self, run)
            if torch.distributed.get_rank() == 1 and run.variant == failing[part]:
                raise torch.OutOfMemoryError(f"too large to {part}")
            if torch.distributed.get_rank() == 1 and run.variant == losing:
                next(run.workload.model.parameters()).grad = None

        return mutation

    for part in failing:
        monkeypatch.setattr(measure.GroupMeasurement, part, mutated(part, getattr(measure.GroupMeasurement, part)))
    words = ("--schedules", "default,ours,ours-paired", "--no-traffic", "none", "--delay-wgrad", "--samples", "1")
    report, _, code = run(capsys, shared_folder(tmp_path), *words, "--data-parallel", "none", "--modes", "eager")
    assert code == (1 if torch.distributed.get_rank() == 0 else 0), "other gradients, which rank 0 has the report of"
    found = {key[2:]: entry for key, entry in variants_of(report).items()}
    refused = {
        (variant.schedule, "none", variant.delay_wgrad): f"OutOfMemoryError: too large to {part}"
        for part, variant in failing.items()
    }
    assert {key: entry["refused"] for key, entry in found.items() if entry["refused"]} == refused
    answers = [(found[key]["losses_compared"], found[key]["gradients_compared"]) for key in found.keys() - refused]
    assert sorted(answers) == [("equal", "different"), ("reference", "reference")]


@pytest.mark.world_size(2)
def test_without_traffic_tokens_stay_at_home_and_losses_are_not_compared(capsys, tmp_path):
    words = ("--schedules", "default,built-in", "--data-parallel", "none", "--modes", "eager", "--samples", "1")
    report, _, code = run(capsys, shared_folder(tmp_path), *words)
    assert code == 0
    (group,) = report["groups"]
    answers = [(entry["schedule"], entry["traffic"], entry["losses_compared"]) for entry in group["variants"]]
    assert answers == [
        ("default", True, "reference"),
        ("default", False, ""),
        ("built-in", True, "equal"),
        ("built-in", False, ""),
    ]


@pytest.mark.world_size(1)
def test_other_losses_are_found_and_end_with_1(capsys, tmp_path, monkeypatch):
    """Mutation: this package's schedule sees other losses."""
    original = workload.forward_step

    def another_step(data, model, return_schedule_plan=False):
        output, loss_func = original(data, model, return_schedule_plan)
        if model.config.overlap_moe_expert_parallel_comm:
            return output, lambda value: (value.float().mean() * 2, {"loss": value.detach().float().mean() * 2})
        return output, loss_func

    monkeypatch.setattr(workload, "forward_step", another_step)
    words = ("--schedules", "default,ours", "--no-traffic", "none", "--data-parallel", "none", "--modes", "eager")
    report, text, code = run(capsys, tmp_path, *words)
    assert code == 1
    assert [entry["losses_compared"] for entry in report["groups"][0]["variants"]] == ["reference", "different"]
    assert "DIFFERENT" in text


@pytest.mark.world_size(1)
def test_what_megatrons_own_schedule_cannot_do_is_a_row_and_not_an_end(capsys, tmp_path, monkeypatch):
    def cannot(*_arguments, **_options):
        raise AssertionError("the built-in cannot do this")

    monkeypatch.setattr(schedules, "combined_1f1b_schedule_for_no_pipelining", cannot)
    words = ("--schedules", "default,built-in", "--no-traffic", "none", "--data-parallel", "none", "--modes", "eager")
    report, text, code = run(capsys, tmp_path, *words)
    assert code == 0
    assert report["groups"][0]["variants"][1]["refused"] == "AssertionError: the built-in cannot do this"
    assert "does not run" in text


@pytest.mark.world_size(1)
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--preset", "huge"], ["--preset='huge'", "large,small,tiny"]),
        (["--modes", "eager,warp"], ["--modes='warp'", "eager,graph"]),
        (["--modes", ","], ["--modes=','", "nothing is chosen"]),
        (["--schedules", "ours"], ["--schedules='ours'", "add default"]),
        (["--no-traffic", "all"], ["--no-traffic='all'", "default,built-in"]),
        (["--samples", "0"], ["--samples=0", "at least 1"]),
        (["--warmup", "0"], ["--warmup=0", "at least 1"]),
        (["--bandwidth", "0"], ["--bandwidth=0", "positive"]),
        (["hiden_size=8"], ["hiden_size", "hidden_size"]),
        (["hidden_size=wide"], ["hidden_size='wide'", "whole number"]),
        (["moe_expert_capacity_factor=none"], ["moe_expert_capacity_factor='none'", "not a number"]),
        (["num_layers=0"], ["num_layers=0", "positive"]),
        (["num_layers"], ["key=value"]),
        (["--from", "nowhere.json"], ["--from='nowhere.json'", "cannot be read"]),
        (["--host-cost", "--processes", "0"], ["--processes=0", "at least 1"]),
    ],
)
def test_a_mistake_is_one_line(capsys, words, parts):
    error = fails(capsys, "bench", *words)
    for part in parts:
        assert part in error


@pytest.mark.world_size(1)
def test_help_explains_the_command(capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for word in ("torchrun", "--host-cost", "--no-traffic", "--markdown", "key=value"):
        assert word in text


@pytest.mark.world_size(1)
def test_the_host_device_has_no_link_to_model(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a link to model")
    assert "--link='spin'" in fails(capsys, "bench", "--link", "spin")
    assert "--keep-traces='here'" in fails(capsys, "bench", "--keep-traces", "here")


@pytest.mark.world_size(2)
def test_ranks_with_traffic_of_their_own_take_no_model(capsys):
    assert "--link='none'" in fails(capsys, "bench", "--link", "none")


@pytest.mark.world_size(1)
def test_variants_of_a_group():
    options = BenchOptions(preset="tiny", size=sized(SIZES["tiny"], []), layers=("local", "te"), delay_wgrad=True)
    assert len(options.groups()) == 8
    rows = options.variants(Group(mode="eager", layers="te", data_parallel="none"))
    assert rows[0] == Variant(schedule="default")
    assert [row.schedule for row in rows if row.delay_wgrad and row.traffic] == ["built-in", "ours", "ours-paired"]
    assert len(rows) == 2 * 7
    few = dataclasses.replace(options, no_traffic=(DEFAULT,)).variants(
        Group(mode="eager", layers="te", data_parallel="none")
    )
    assert [row for row in few if not row.traffic] == [Variant(schedule=DEFAULT, traffic=False)]
    local = options.variants(Group(mode="eager", layers="local", data_parallel="none"))
    assert [row.schedule for row in local if row.delay_wgrad and row.traffic] == ["ours", "ours-paired"]
    sharded = options.variants(Group(mode="eager", layers="local", data_parallel="mfsdp"))
    assert {row.wrapper for row in sharded} == {"ddp", "mfsdp-hooks", "mfsdp"}
    assert all(row.schedule != "built-in" for row in sharded)


@pytest.mark.world_size(1)
def test_names_of_megatron_are_put_back(capsys, tmp_path):
    from megatron.core.models.common import utils
    from megatron.core.transformer.moe import token_dispatcher

    def names():
        return SimpleNamespace(
            driver=schedules.combined_1f1b_schedule_for_no_pipelining,
            all_to_all=token_dispatcher.all_to_all,
            free=utils.should_free_input,
        )

    before = names()
    run(
        capsys,
        tmp_path,
        "--schedules",
        "default,ours",
        "--modes",
        "eager",
        "--data-parallel",
        "none",
        "--no-traffic",
        "none",
    )
    assert names() == before


@pytest.mark.world_size(1)
def test_megatrons_own_names_stand_for_the_built_in_and_ours_come_back_after_an_error():
    def names():
        return {name: value for name, value in vars(schedules).items() if "1f1b" in name or "forward_backward" in name}

    own = names()
    with combined_1f1b.install() as installation:
        ours = names()
        assert ours != own
        with pytest.raises(KeyError, match="mine"), installation.set_aside():
            fail(found := names())
        assert found == own
        assert names() == ours
    assert names() == own


@pytest.mark.world_size(1)
def test_a_step_that_fails_is_waited_for_too():
    """Otherwise what the caller does next overlaps with what the step had issued."""
    if not host.is_active():
        pytest.skip("needs the host device, which reports waits")
    waits = []

    def observe(step):
        if step.step is host.Step.EVENT_AWAITED:
            waits.append((step.stream, step.event.stream))

    with host.observing(observe), pytest.raises(KeyError), measure.on_capture_stream():
        fail(stream := torch.cuda.current_stream())
    caller = torch.cuda.current_stream()
    assert waits == [(stream, caller), (caller, stream)]


@pytest.mark.gpu
@pytest.mark.world_size(1)
def test_a_spinning_link_takes_the_time_of_its_bytes():
    link = Link(kind="spin", bandwidth=10.0)
    tensor = torch.ones(50_000_000, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        assert link.carry(tensor) is tensor
        end.record()
        end.synchronize()
        seconds.append(1e-3 * start.elapsed_time(end))
    # 50 MB at 10 GB/s. The clock that `_sleep` counts may change between calibration and use: 20%.
    assert sorted(seconds)[2] == pytest.approx(5e-3, rel=0.2)


@pytest.mark.gpu
@pytest.mark.world_size(1)
def test_a_copying_link_gives_back_the_same_bytes_in_other_memory():
    link = Link(kind="copy", bandwidth=1.0)
    tensor = torch.randn(3, 5, dtype=torch.bfloat16, device="cuda").t()
    arrived = link.carry(tensor)
    assert torch.equal(arrived, tensor)
    assert arrived.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    link.traffic = False
    assert link.carry(tensor) is tensor


@pytest.mark.gpu
@pytest.mark.world_size(1)
@pytest.mark.parametrize("link", ["spin", "copy"])
def test_modelled_traffic_is_seen_in_traces_and_times(capsys, tmp_path, link):
    words = ("--link", link, "--bandwidth", "0.01", "--data-parallel", "none", "--plots", str(tmp_path))
    words += ("--keep-traces", str(tmp_path / "traces"))
    report, _, code = run(capsys, tmp_path, *words)
    assert code == 0
    for group in report["groups"]:
        for entry in group["variants"]:
            assert not entry["refused"], entry["refused"]
            assert entry["peak_allocated"] > 0
            assert (entry["traffic_shares"] is None) == (not entry["traffic"])
            if entry["traffic"]:
                shares = entry["traffic_shares"]
                assert 0 < shares["communication"] <= shares["span"]
                assert shares["blocking"] <= shares["exposed"] <= shares["communication"]
    assert (tmp_path / "hidden.svg").exists() or link == "copy"
    traces = {path.name for path in (tmp_path / "traces").iterdir()}
    assert "local-layers-graph-combined-1f1b-head-and-tail-paired-rank-0.json.gz" in traces
    assert len(traces) == sum(entry["traffic"] for group in report["groups"] for entry in group["variants"])
