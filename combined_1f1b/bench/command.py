"""Run the `bench` command: options, measurement, report."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from combined_1f1b.bench import options as known
from combined_1f1b.bench.options import BenchOptions, choices, sized
from combined_1f1b.bench.plots import draw_plots
from combined_1f1b.bench.report import FORMAT, Report, print_report, read_report, variant_of, write, write_markdown
from combined_1f1b.errors import ConfigError
from combined_1f1b.training.distributed import is_first_rank, world_size


def bench(arguments: argparse.Namespace) -> int:
    """Measure, or read, then print and write what was asked for.

    Returns:
        0, or 1 when losses or gradients were not the bits of Megatron's default schedule, but for what is known of its
        own schedules (`Variant.loses_gradients`).
    Raises:
        ConfigError: an option that cannot work, before any work.
    """
    if arguments.reports:
        reports = [read_report(Path(path)) for path in arguments.reports]
    elif arguments.host_cost:
        reports = [_host_cost(arguments)]
    else:
        reports = [measure(options_of(arguments), json_path=arguments.json)]
    if not is_first_rank():
        return 0
    for report in reports:
        print_report(report)
    if arguments.markdown:
        write_markdown(Path(arguments.markdown), reports)
    if arguments.plots:
        for number, report in enumerate(reports):
            if "groups" not in report:
                continue
            folder = (
                Path(arguments.plots)
                if len(reports) == 1
                else Path(arguments.plots) / Path(arguments.reports[number]).stem
            )
            for path in draw_plots(report, folder):
                print(f"picture: {path}")
    return 1 if any(_has_wrong_bits(report) for report in reports) else 0


def _host_cost(arguments: argparse.Namespace) -> dict[str, Any]:
    for flag in ("samples", "processes"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise ConfigError.of(f"--{flag}", value, "nothing would be measured", "use at least 1")
    from combined_1f1b.bench.host_cost import measure_host_cost

    result = measure_host_cost(samples=arguments.samples or 30, processes=arguments.processes)
    report = _heading(ranks=1) | result
    if arguments.json:
        write(Path(arguments.json), json.dumps(report, indent=1))
    return report


def options_of(arguments: argparse.Namespace) -> BenchOptions:
    """The options that the words ask for, checked against this machine.

    Raises:
        ConfigError: naming the flag, its value and the fix.
    """
    import torch

    has_cuda, ranks = torch.cuda.is_available(), world_size()
    preset = arguments.preset or ("large" if has_cuda else "tiny")
    (preset,) = choices("--preset", preset, tuple(known.PRESETS))
    link = arguments.link or ("real" if ranks > 1 else "spin" if has_cuda else "none")
    (link,) = choices("--link", link, known.LINKS)
    result = BenchOptions(
        preset=preset,
        size=sized(known.PRESETS[preset], arguments.overrides),
        modes=choices("--modes", arguments.modes, known.MODES),
        layers=choices("--layers", arguments.layers, known.LAYERS),
        data_parallel=choices("--data-parallel", arguments.data_parallel, known.DATA_PARALLEL),
        schedules=choices("--schedules", arguments.schedules, known.SCHEDULES),
        delay_wgrad=arguments.delay_wgrad,
        no_traffic=()
        if arguments.no_traffic == "none"
        else choices("--no-traffic", arguments.no_traffic, known.SCHEDULES),
        link=link,
        bandwidth=arguments.bandwidth,
        samples=10 if arguments.samples is None else arguments.samples,
        warmup=arguments.warmup,
        traces=arguments.traces,
        trace_folder=arguments.trace_folder,
    )
    known.check(result, has_cuda=has_cuda, ranks=ranks)
    return result


def measure(options: BenchOptions, *, json_path: str | None = None) -> dict[str, Any]:
    """Measure all groups.

    Args:
        json_path: where rank 0 writes the report after every group, so that a run that is cut short leaves something.

    Returns:
        the report.
    """
    import torch

    import combined_1f1b
    from combined_1f1b.bench.link import Link
    from combined_1f1b.bench.measure import GroupMeasurement
    from combined_1f1b.bench.workload import run_config
    from combined_1f1b.training.distributed import distributed
    from combined_1f1b.training.progress import say

    ranks = world_size()
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        say("CUDA_DEVICE_MAX_CONNECTIONS=1: one hardware queue holds all streams, nothing will overlap")
    config = run_config(options, layers=options.layers[0], wrapper="none", delay_wgrad=False, ranks=ranks)
    with distributed(config) as device, combined_1f1b.install() as installation:
        link = Link(kind=options.link, bandwidth=options.bandwidth)
        report: dict[str, Any] = _heading(ranks=ranks) | {
            "options": dataclasses.asdict(options),
            "link": {
                "kind": link.kind,
                "description": link.description,
                "early_frees": link.has_early_frees,
            },
            "groups": [],
        }
        with link.in_place():
            for group in options.groups():
                say(group.name)
                measurement = GroupMeasurement(group, options, link=link, installation=installation, device=device)
                report["groups"].append(measurement.measure())
                del measurement  # with its models and graphs: the next group needs the memory
                gc.collect()
                torch.cuda.empty_cache()
                if json_path and is_first_rank():
                    write(Path(json_path), json.dumps(report, indent=1))
    return report


def _heading(*, ranks: int) -> dict[str, Any]:
    """What a reader needs to judge the numbers: when, where, with what."""
    import platform

    import torch

    from combined_1f1b.training.doctor import version_of

    has_cuda = torch.cuda.is_available()
    start = f"torchrun --nproc-per-node {ranks} -m" if ranks > 1 else "python -m"
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join([start, "combined_1f1b", *_without_results(sys.argv[1:])]),
        "machine": {
            "device": torch.cuda.get_device_name() if has_cuda else f"host device (CPU, {platform.machine()})",
            "ranks": ranks,
            "cpu_cores": os.cpu_count(),
            "cuda_device_max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda if has_cuda else None,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,
            **{name: version_of(name) for name in ("megatron-core", "transformer-engine", "combined_1f1b")},
        },
    }


def _without_results(words: list[str]) -> list[str]:
    """The words of the command line without where the results go: they change nothing that is measured."""
    kept, skip = [], False
    for word in words:
        flag = word.split("=")[0]
        if flag in ("--json", "--markdown", "--plots"):
            skip = "=" not in word
        elif skip:
            skip = False
        elif word != "--debug":
            kept.append(word)
    return kept


def _has_wrong_bits(report: Report) -> bool:
    return any(
        entry["losses_compared"] == "different"
        or (entry["gradients_compared"] == "different" and not variant_of(entry).loses_gradients)
        for group in report.get("groups", ())
        for entry in group["variants"]
    )
