"""The words of the `bench` command. Plain Python: `--help` and a wrong word need no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def add_bench_command(commands: argparse._SubParsersAction, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `bench` to the command line."""
    parser = commands.add_parser("bench", help="Measure the schedules side by side")
    parser.add_argument("--host-cost", action="store_true", help="host cost of a layer pair instead; needs no GPU")
    parser.add_argument("--samples", type=int, metavar="N", help="samples of each variant")
    parser.add_argument("--processes", type=int, default=3, metavar="N", help="fresh processes for --host-cost")
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    parser.set_defaults(run=run)
