"""Run the whole suite at 1, 2 and 4 ranks and judge it as one: the command behind `make test`.

A test that needs another number of ranks skips; one that was skipped at every number never ran, and that is a failure.
Tests that need a GPU or Transformer Engine are deselected where those are missing, and counted. The last line reads
`N passed, N failed, N skipped`: tests that passed wherever they ran, failed anywhere, or never ran.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUITE = "tests/unit_tests/a2a_overlap"


def marker_expression() -> str:
    """Deselect what this machine cannot run; "" where it can run all."""
    import torch

    missing = []
    if not torch.cuda.is_available():
        missing.append("not gpu")
    if importlib.util.find_spec("transformer_engine") is None:
        missing.append("not te")
    return " and ".join(missing)


@dataclass(frozen=True, slots=True)
class Run:
    """The suite at one number of ranks.

    fault: what went wrong with the run as a whole, "" when nothing did.
    reports: the outcome lines of each rank, by rank.
    """

    ranks: int
    fault: str
    reports: dict[int, list[dict[str, str]]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """All runs judged as one: names of tests, and faults that no test stands for."""

    passed: list[str]
    failed: list[str]
    never_ran: list[str]
    deselected: list[str]
    broken: list[str]

    @property
    def is_good(self) -> bool:
        return not (self.failed or self.never_ran or self.broken)


def judge(runs: list[Run]) -> Verdict:
    """A test passes when it passed somewhere and failed nowhere; one that only ever skipped never ran."""
    outcomes: dict[str, set[str]] = defaultdict(set)
    broken: list[str] = []
    for run in runs:
        entries = [entry for report in run.reports.values() for entry in report]
        for entry in entries:
            outcomes[entry["test"]].add(entry["outcome"])
        if any(entry["outcome"] == "failed" for entry in entries):
            continue
        if run.fault:
            broken.append(f"the run with {run.ranks} ranks {run.fault}, and no test says why")
        elif len(run.reports) < run.ranks:
            broken.append(f"only {len(run.reports)} of {run.ranks} ranks reported")
    ran = {test: seen - {"deselected"} for test, seen in outcomes.items() if seen != {"deselected"}}
    if not ran and not broken:
        broken.append("no test ran")
    return Verdict(
        passed=[test for test, seen in ran.items() if "passed" in seen and "failed" not in seen],
        failed=sorted(test for test, seen in ran.items() if "failed" in seen),
        never_ran=sorted(test for test, seen in ran.items() if seen == {"skipped"}),
        deselected=sorted(outcomes.keys() - ran.keys()),
        broken=broken,
    )


def run_ranks(*, ranks: int, folder: Path, expression: str, options: argparse.Namespace) -> Run:
    """Run the suite with one number of ranks.

    Args:
        ranks: processes to start.
        folder: where each rank writes its report.
        expression: pytest marker expression, may be empty.
        options: the command line: suite, limit in seconds after which all ranks are ended, pytest_arguments.
    """
    # Ranks are in lockstep: after one failure the others wait in a collective, so the first failure ends the run and
    # torchrun ends the other ranks. A single rank has nothing to wait for and shows all its failures.
    stop_early = ["--maxfail=1"] if ranks > 1 else []
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("--max-restarts", "0", "--local-ranks-filter", "0"),
        *("--log-dir", str(folder / "logs"), "-m", "pytest", options.suite, "-q", "-p", "rank_report"),
        *stop_early,
        *(["-m", expression] if expression else []),
        *options.pytest_arguments,
    ]
    environment = os.environ | {
        "RANK_REPORT": str(folder),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")])),
    }
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        code = process.wait(timeout=options.limit)
        fault = "" if code == 0 else f"ended with exit code {code}"
    except subprocess.TimeoutExpired:
        fault = f"did not end within {options.limit:.0f} s"
    finally:
        end(process)
    return Run(ranks, fault, read_reports(folder))


def end(process: subprocess.Popen) -> None:
    """End torchrun, which ends its ranks when it is asked to; they are in sessions of their own."""
    process.terminate()
    try:
        process.wait(timeout=40)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_reports(folder: Path) -> dict[int, list[dict[str, str]]]:
    return {
        int(path.stem.removeprefix("rank")): [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("rank*.jsonl"))
    }


def show_failures_of_other_ranks(run: Run) -> None:
    """Rank 0 has shown its own failures."""
    for rank, entries in run.reports.items():
        for entry in entries:
            if rank != 0 and entry["outcome"] == "failed":
                print(f"-- rank {rank} of {run.ranks}: {entry['test']}\n{entry['text']}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks to run with")
    parser.add_argument("--suite", default=SUITE, help="folder or file of tests")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one number of ranks")
    parser.add_argument("pytest_arguments", nargs="*", help="after `--`: more arguments for pytest, such as -k NAME")
    options = parser.parse_args()

    expression = marker_expression()
    runs = []
    for ranks in options.ranks:
        start = time.monotonic()
        print(f"== ranks: {ranks} ==", flush=True)
        with tempfile.TemporaryDirectory() as name:
            runs.append(run_ranks(ranks=ranks, folder=Path(name), expression=expression, options=options))
        show_failures_of_other_ranks(runs[-1])
        print(f"== ranks: {ranks}, {time.monotonic() - start:.0f} s ==", flush=True)

    verdict = judge(runs)
    for kind, names in (("failed", verdict.failed), ("never ran", verdict.never_ran), ("broken", verdict.broken)):
        for name in names:
            print(f"{kind}: {name}")
    missing = expression.replace("not ", "").replace("and", "or")
    print(f"{len(verdict.deselected)} deselected" + (f" (they need {missing})" if missing else ""))
    failures = len(verdict.failed) + len(verdict.broken)
    print(f"{len(verdict.passed)} passed, {failures} failed, {len(verdict.never_ran)} skipped")
    return 0 if verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
