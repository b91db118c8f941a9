"""The `doctor` command: what is installed on this machine, and what each finding means for training."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

OLDEST_PYTHON = (3, 12)
TESTED_TORCH = "2.11.0"
TESTED_MEGATRON = "0.19.2"


class Grade(Enum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    name: what. value: what was found. grade: whether it stops anything. meaning: what follows for the user.
    """

    name: str
    value: str
    grade: Grade
    meaning: str


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None when there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python() -> Finding:
    version = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        return Finding("Python", version, Grade.PROBLEM, "megatron-core 0.19 needs 3.12 or newer: install one")
    return Finding("Python", version, Grade.OK, "new enough for megatron-core 0.19")


def check_torch() -> Finding:
    from packaging.version import Version

    version = version_of("torch")
    if version is None:
        return Finding("torch", "not installed", Grade.PROBLEM, "only plan and simulate work: pip install torch")
    if Version(version) < Version("2.11"):
        return Finding("torch", version, Grade.PROBLEM, f"2.11 or newer is needed; {TESTED_TORCH} is tested")
    if Version(version).base_version != TESTED_TORCH:
        meaning = f"not the tested version ({TESTED_TORCH}): run `compare` on your configuration before a long run"
        return Finding("torch", version, Grade.NOTE, meaning)
    return Finding("torch", version, Grade.OK, "the tested version")


def check_megatron() -> Finding:
    from packaging.version import Version

    version = version_of("megatron-core")
    if version is None:
        meaning = f"only plan and simulate work: pip install megatron-core=={TESTED_MEGATRON}"
        return Finding("megatron-core", "not installed", Grade.PROBLEM, meaning)
    if not Version("0.19.2") <= Version(version) < Version("0.20"):
        meaning = f"this package is written for 0.19.2 up to 0.20: pip install megatron-core=={TESTED_MEGATRON}"
        return Finding("megatron-core", version, Grade.PROBLEM, meaning)
    if version != TESTED_MEGATRON:
        meaning = f"not the tested version ({TESTED_MEGATRON}): run `compare` before a long run"
        return Finding("megatron-core", version, Grade.NOTE, meaning)
    return Finding("megatron-core", version, Grade.OK, "the tested version")


def check_cuda() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("CUDA", "unknown", Grade.NOTE, "torch is needed to look")
    if not torch.cuda.is_available():
        build = f"torch built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch built without CUDA"
        meaning = "everything runs on the CPU host device with gloo: right results, no meaning in the step times"
        return Finding("CUDA", f"no device ({build})", Grade.NOTE, meaning)
    count = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
    return Finding("CUDA", f"{torch.version.cuda}, {count} x {names}", Grade.OK, f"up to {count} ranks on this machine")


def check_nccl() -> Finding:
    try:
        import torch

        if torch.cuda.is_available() and torch.distributed.is_nccl_available():
            version = ".".join(str(part) for part in torch.cuda.nccl.version())
            return Finding("NCCL", version, Grade.OK, "collectives between GPUs go through it")
    except ImportError:
        return Finding("NCCL", "unknown", Grade.NOTE, "torch is needed to look")
    return Finding("NCCL", "not in use", Grade.NOTE, "without a GPU the collectives go through gloo")


def check_transformer_engine() -> Finding:
    version = version_of("transformer-engine")
    if version is None:
        meaning = (
            "model.transformer_impl=local works; transformer_engine, FP8, grouped GEMM and context parallelism do not: "
            "pip install combined_1f1b[te] on a CUDA machine"
        )
        return Finding("Transformer Engine", "not installed", Grade.NOTE, meaning)
    return Finding("Transformer Engine", version, Grade.OK, "model.transformer_impl=transformer_engine works")


def check_apex() -> Finding:
    """NVIDIA Apex has a multi_tensor_apply package; what the plain name installs from the public index has not."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        meaning = (
            "nothing needs it: torch's own optimizers and norms are used. It is built from NVIDIA's source only; "
            "the package of that name on the public index is an unrelated web toolkit, do not install it"
        )
        return Finding("NVIDIA Apex", "not installed", Grade.NOTE, meaning)
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if not any((place / "multi_tensor_apply").is_dir() for place in places):
        meaning = "an unrelated web toolkit of the same name, which breaks Megatron's imports: pip uninstall apex"
        return Finding("NVIDIA Apex", "another package named apex", Grade.PROBLEM, meaning)
    if importlib.util.find_spec("amp_C") is None:
        meaning = "installed without its CUDA extensions, so Megatron falls back to torch: build it with them"
        return Finding("NVIDIA Apex", "Python part only", Grade.NOTE, meaning)
    return Finding("NVIDIA Apex", "with CUDA extensions", Grade.OK, "Megatron uses its fused optimizers and norms")


def check_mfsdp() -> Finding:
    from combined_1f1b.errors import SurfaceError

    try:
        importlib.import_module("combined_1f1b.fsdp_adapter.mfsdp_v2")
    except SurfaceError as error:
        meaning = "shard_model cannot work with this megatron-core; training without sharding does"
        return Finding("MFSDP v2 surface", str(error), Grade.PROBLEM, meaning)
    except ImportError as error:
        return Finding("MFSDP v2 surface", f"not importable ({error})", Grade.PROBLEM, "shard_model cannot work")
    return Finding("MFSDP v2 surface", "complete", Grade.OK, "shard_model and the sharded schedule work")


def check_connections() -> Finding:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = os.environ.get(name)
    if value == "1":
        meaning = "all streams share one hardware queue, so nothing overlaps: unset it, or set it to 8 or more"
        return Finding(name, "1", Grade.PROBLEM, meaning)
    if value is None:
        meaning = "CUDA's default of 8 queues is right; Megatron scripts often set 1, which would stop all overlap"
        return Finding(name, "not set", Grade.OK, meaning)
    return Finding(name, value, Grade.OK, "streams have queues of their own, so traffic can run under compute")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_torch,
    check_cuda,
    check_nccl,
    check_megatron,
    check_transformer_engine,
    check_apex,
    check_mfsdp,
    check_connections,
)


def findings() -> Iterator[Finding]:
    """Every check's finding, in order."""
    for check in CHECKS:
        yield check()


def report() -> int:
    """Print every finding with its meaning.

    Returns:
        0, or 1 when something stops training on this machine.
    """
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table: Any = Table("", "found", "", "what it means", box=box.SIMPLE, show_lines=True)
    table.columns[1].max_width = 32
    colours = {Grade.OK: "green", Grade.NOTE: "yellow", Grade.PROBLEM: "red"}
    results = list(findings())
    for finding in results:
        grade = f"[{colours[finding.grade]}]{finding.grade.value}[/]"
        table.add_row(finding.name, escape(finding.value), grade, escape(finding.meaning))
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=110)
    console.print(table)
    problems = [finding.name for finding in results if finding.grade is Grade.PROBLEM]
    console.print(f"problems: {', '.join(problems)}" if problems else "no problems: training works on this machine")
    return 1 if problems else 0
