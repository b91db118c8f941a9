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
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
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


def run_ranks(*, ranks: int, folder: Path, expression: str, limit: float, pytest_arguments: list[str]) -> str:
    """Run the suite with one number of ranks.

    Args:
        ranks: processes to start.
        folder: where each rank writes its report.
        expression: pytest marker expression, may be empty.
        limit: seconds after which all ranks are killed.
        pytest_arguments: what the user added.
    Returns:
        What went wrong with the run as a whole, "" when nothing did.
    """
    # Ranks are in lockstep: after one failure the others wait in a collective, so the first failure ends the run and
    # torchrun ends the other ranks. A single rank has nothing to wait for and shows all its failures.
    stop_early = ["--maxfail=1"] if ranks > 1 else []
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("--max-restarts", "0", "--local-ranks-filter", "0"),
        *("--log-dir", str(folder / "logs"), "-m", "pytest", SUITE, "-q", "-p", "rank_report"),
        *stop_early,
        *(["-m", expression] if expression else []),
        *pytest_arguments,
    ]
    environment = os.environ | {
        "RANK_REPORT": str(folder),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")])),
    }
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"did not end within {limit:.0f} s"
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return "" if code == 0 else f"ended with exit code {code}"


def read_reports(folder: Path) -> dict[int, list[dict[str, str]]]:
    """The outcome lines of each rank."""
    return {
        int(path.stem.removeprefix("rank")): [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("rank*.jsonl"))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks to run with")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for one number of ranks")
    parser.add_argument("pytest_arguments", nargs="*", help="after `--`: more arguments for pytest, such as -k NAME")
    arguments = parser.parse_args()

    expression = marker_expression()
    outcomes: dict[str, set[str]] = defaultdict(set)
    deselected: set[str] = set()
    broken: list[str] = []
    for ranks in arguments.ranks:
        print(f"== {ranks} rank{'s' if ranks > 1 else ''} ==", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            fault = run_ranks(
                ranks=ranks,
                folder=folder,
                expression=expression,
                limit=arguments.limit,
                pytest_arguments=arguments.pytest_arguments,
            )
            reports = read_reports(folder)
        print(f"== {ranks} rank{'s' if ranks > 1 else ''}: {time.monotonic() - start:.0f} s ==", flush=True)
        failures = 0
        for rank, entries in reports.items():
            for entry in entries:
                if entry["outcome"] == "deselected":
                    deselected.add(entry["test"])
                    continue
                outcomes[entry["test"]].add(entry["outcome"])
                if entry["outcome"] == "failed":
                    failures += 1
                    if rank != 0:  # rank 0 has shown its own
                        print(f"-- rank {rank} of {ranks}: {entry['test']}\n{entry['text']}", flush=True)
        if fault and not failures:
            broken.append(f"the run with {ranks} ranks {fault}, and no test says why")
        elif len(reports) < ranks and not failures:
            broken.append(f"only {len(reports)} of {ranks} ranks reported")

    failed = sorted(test for test, seen in outcomes.items() if "failed" in seen)
    passed = [test for test, seen in outcomes.items() if "passed" in seen and "failed" not in seen]
    never_ran = sorted(test for test, seen in outcomes.items() if seen == {"skipped"})

    for test in failed:
        print(f"failed: {test}")
    for test in never_ran:
        print(f"never ran: {test} was skipped with every number of ranks")
    for fault in broken:
        print(f"broken: {fault}")
    if not outcomes:
        broken.append("no test ran")
        print("broken: no test ran")
    print(f"{len(deselected)} deselected (they need {expression.replace('not ', '') or 'nothing'})")
    print(f"{len(passed)} passed, {len(failed) + len(broken)} failed, {len(never_ran)} skipped")
    return 1 if failed or never_ran or broken else 0


if __name__ == "__main__":
    sys.exit(main())
