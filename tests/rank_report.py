"""A pytest plugin that writes one JSON line per test outcome, so that a run of several ranks can be judged as a whole.

Each rank appends to its own file in the folder that RANK_REPORT names. Lines are written as tests end: what a rank did
before it was killed is kept.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


class RankReport:
    """Collects the outcome of each test of this rank.

    Args:
        path: file to append to, one JSON object a line.
    """

    def __init__(self, path: Path):
        self.path = path

    def _write(self, **entry: object) -> None:
        with self.path.open("a") as stream:
            stream.write(json.dumps(entry) + "\n")

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            self._write(test=item.nodeid, outcome="deselected")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, outcome="failed", text=str(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test passes at its call; set-up and tear-down count only where they fail or skip it.
        if report.failed:
            self._write(test=report.nodeid, outcome="failed", text=f"({report.when}) {report.longreprtext}")
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._write(test=report.nodeid, outcome="skipped", text=reason)
        elif report.when == "call":
            self._write(test=report.nodeid, outcome="passed")


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get("RANK_REPORT")
    if folder:
        path = Path(folder) / f"rank{os.environ.get('RANK', '0')}.jsonl"
        config.pluginmanager.register(RankReport(path), "rank-report")
