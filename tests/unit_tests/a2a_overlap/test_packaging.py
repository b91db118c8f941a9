"""The package as a newcomer meets it: metadata, make targets, the search for a Python, the test runner, a script."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import stat
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import combined_1f1b

pytestmark = pytest.mark.world_size(1)

ROOT = Path(__file__).resolve().parents[3]


def run(*command: str, environment: dict[str, str] | None = None, timeout: float = 100, cwd: Path = ROOT):
    """Run a program without this run's own rank variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "PYTEST"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK_REPORT"):
        inherited.pop(name, None)
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env=inherited | (environment or {}),
        check=False,
    )


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", requirement)[0].lower() for requirement in requirements}


def test_nothing_depends_on_the_unrelated_apex(project):
    every = list(project["project"]["dependencies"])
    for extra in project["project"]["optional-dependencies"].values():
        every += extra
    assert "apex" not in names_of(every)
    assert "apex" not in names_of((ROOT / "constraints.txt").read_text().splitlines())


def test_the_tested_pair_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.11.0" in lines
    assert "megatron-core==0.19.2" in lines


def test_constraints_pin_every_dependency(project):
    pinned = names_of((ROOT / "constraints.txt").read_text().splitlines())
    wanted = names_of(project["project"]["dependencies"] + project["project"]["optional-dependencies"]["test"])
    assert wanted <= pinned


def test_the_installed_package_is_this_one(project):
    assert metadata.version("combined_1f1b") == project["project"]["version"]
    assert Path(combined_1f1b.__file__).parent == ROOT / "combined_1f1b"
    assert (ROOT / "combined_1f1b" / "py.typed").exists()
    (script,) = metadata.entry_points(group="console_scripts", name="combined-1f1b")
    assert script.load().__module__ == "combined_1f1b.cli"


def test_public_names_are_sorted_and_lazy():
    assert combined_1f1b.__all__ == sorted(combined_1f1b.__all__)
    program = "import sys, combined_1f1b; print('torch' in sys.modules, dir(combined_1f1b) == combined_1f1b.__all__)"
    assert run(sys.executable, "-c", program).stdout.split() == ["False", "True"]


def test_every_ignore_has_a_reason():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if line.strip().startswith('"ignore:'):
            assert before.strip().startswith(("#", '"ignore:')), line
        if re.match(r'\s+"[A-Z]+\d*",', line):
            assert "#" in line, line


def test_ci_calls_make_test_and_nothing_else():
    script = (ROOT / ".ci" / "run").read_text()
    commands = [line for line in script.splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make test"]
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR


@pytest.mark.parametrize("target", ["install", "demo", "test", "lint"])
def test_make_knows_its_targets(target):
    shown = run("make", "--dry-run", "--always-make", target)
    assert shown.returncode == 0
    assert "make_venv.sh" in shown.stdout  # every target installs first
    if target == "demo":
        for command in ("compare --config examples/tiny_moe.yaml", "train --config examples/tiny_moe.yaml"):
            assert command in shown.stdout


def fake_python(folder: Path, name: str, body: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def find_python(tmp_path: Path, **environment: str):
    variables = {"HOME": str(tmp_path / "home"), "PYENV_ROOT": "", "PYTHON": "", "PATH": f"{tmp_path / 'bin'}:/bin"}
    return run("/bin/sh", str(ROOT / "scripts" / "find_python.sh"), environment=variables | environment)


SHIM = 'echo "pyenv: command not found" >&2; exit 127'
OLD = 'case "$2" in *version_info*) exit 1;; *) echo /old/python;; esac'
REAL = f'exec {sys.executable} "$@"'


def test_a_shim_that_fails_is_passed_over(tmp_path):
    fake_python(tmp_path / "bin", "python3.12", SHIM)
    fake_python(tmp_path / "bin", "python3.13", OLD)
    fake_python(tmp_path / "bin", "python3", REAL)
    found = find_python(tmp_path)
    assert (found.returncode, found.stdout.strip()) == (0, sys.executable)


@pytest.mark.parametrize("variable", ["HOME", "PYENV_ROOT"])
def test_versions_of_pyenv_are_found_behind_inactive_shims(tmp_path, variable):
    fake_python(tmp_path / "bin", "python3", SHIM)
    root = tmp_path / ("home/.pyenv" if variable == "HOME" else "pyenv")
    fake_python(root / "versions" / "3.11.7" / "bin", "python", OLD)
    fake_python(root / "versions" / "3.12.1" / "bin", "python", REAL)
    found = find_python(tmp_path, **({} if variable == "HOME" else {"PYENV_ROOT": str(root)}))
    assert (found.returncode, found.stdout.strip()) == (0, sys.executable)


def test_without_a_python_it_says_what_to_install(tmp_path):
    for name in ("python3.12", "python3.13", "python3"):
        fake_python(tmp_path / "bin", name, SHIM)
    found = find_python(tmp_path)
    assert found.returncode == 1
    assert found.stdout == ""
    for part in ("Python >= 3.12", "apt-get install python3.12 python3.12-venv", "pyenv install 3.12", "PYTHON="):
        assert part in found.stderr


def test_a_named_python_must_work(tmp_path):
    fake_python(tmp_path / "bin", "python3", REAL)
    found = find_python(tmp_path, PYTHON="/nowhere/python3.12")
    assert found.returncode == 1
    assert "PYTHON=/nowhere/python3.12" in found.stderr


@pytest.fixture
def runner(monkeypatch):
    """The module tests/run_tests.py."""
    spec = importlib.util.spec_from_file_location("run_tests", ROOT / "tests" / "run_tests.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_tests", module)
    spec.loader.exec_module(module)
    return module


def outcomes(**tests: str) -> list[dict[str, str]]:
    return [{"test": test, "outcome": outcome, "text": ""} for test, outcome in tests.items()]


def test_a_test_counts_once_over_all_runs(runner):
    verdict = runner.judge(
        [
            runner.Run(1, "", {0: outcomes(a="passed", b="skipped", g="deselected")}),
            runner.Run(2, "", {0: outcomes(a="skipped", b="passed"), 1: outcomes(a="skipped", b="passed")}),
        ]
    )
    assert (verdict.passed, verdict.deselected, verdict.is_good) == (["a", "b"], ["g"], True)


def test_a_failure_on_any_rank_is_one(runner):
    reports = {0: outcomes(a="passed"), 1: outcomes(a="failed")}
    verdict = runner.judge([runner.Run(2, "ended with exit code 1", reports)])
    assert (verdict.passed, verdict.failed, verdict.broken) == ([], ["a"], [])


def test_a_test_skipped_at_every_number_of_ranks_never_ran(runner):
    verdict = runner.judge([runner.Run(1, "", {0: outcomes(a="passed", b="skipped")})])
    assert (verdict.never_ran, verdict.is_good) == (["b"], False)


@pytest.mark.parametrize(
    ("ranks", "fault", "reports", "message"),
    [
        (1, "", {0: []}, "no test ran"),
        (1, "", {0: outcomes(g="deselected")}, "no test ran"),
        (1, "ended with exit code 3", {0: []}, "the run with 1 ranks ended with exit code 3, and no test says why"),
        (2, "", {0: outcomes(a="passed")}, "only 1 of 2 ranks reported"),
    ],
)
def test_a_run_that_no_test_stands_for_is_broken(runner, ranks, fault, reports, message):
    assert runner.judge([runner.Run(ranks, fault, reports)]).broken == [message]


def test_the_runner_judges_several_ranks_together(tmp_path):
    """The real thing: a failure on a rank that is not shown is printed; what is deselected is counted."""
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "RANK, RANKS = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        "@pytest.mark.skipif(RANKS != 2, reason='needs 2 ranks')\n"
        "def test_two():\n    pass\n"
        "def test_every():\n    pass\n"
        "@pytest.mark.gpu\n@pytest.mark.te\n"
        "def test_gpu():\n    assert 0\n"
        "def test_wrong():\n    assert RANK == 0, 'only here'\n"
    )
    done = run(sys.executable, "tests/run_tests.py", "--ranks", "1", "2", "--suite", str(tmp_path))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[-1] == "2 passed, 1 failed, 0 skipped"
    assert lines[-2] == "1 deselected (they need gpu or te)"
    assert "only here" in done.stdout


def test_the_runner_ends_ranks_that_hang(tmp_path):
    (tmp_path / "test_it.py").write_text("import time\ndef test_a():\n    time.sleep(60)\n")
    done = run(sys.executable, "tests/run_tests.py", "--ranks", "1", "--suite", str(tmp_path), "--limit", "8")
    assert done.returncode == 1
    assert "did not end within 8 s" in done.stdout


def torchrun(*words: str):
    return run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words),
        environment={"OMP_NUM_THREADS": "1"},
    )


def test_the_script_of_ones_own_runs_pairs():
    done = torchrun("examples/megatron_script.py")
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+), 3 forward-backward pairs", done.stdout)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


def test_a_mistake_under_torchrun_is_said_once():
    words = ("--config", "examples/tiny_moe.yaml", "model.num_moe_experts=3")
    done = torchrun("-m", "combined_1f1b", "train", *words)
    assert done.returncode != 0
    assert done.stderr.count("combined_1f1b: error: ") == 1
    assert "rank 1: error" not in done.stderr
