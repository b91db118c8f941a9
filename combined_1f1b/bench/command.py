"""Run the `bench` command."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def bench(arguments: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for."""
    from combined_1f1b.bench.host_cost import measure_host_cost, print_host_cost

    result = measure_host_cost(samples=arguments.samples or 30, processes=arguments.processes)
    print_host_cost(result)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1))
    return 0
