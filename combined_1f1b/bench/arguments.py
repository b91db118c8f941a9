"""The words of the `bench` command. Plain Python: `--help` and a wrong word need no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable

_TEXT = """\
Measure Megatron's default schedule, its built-in combined one and this package's in one process, in turn, on the same
weights and data. Losses and gradients are compared bit for bit. Start it with torchrun for several ranks.
"""

_EXAMPLES = """\
examples:
  python -m combined_1f1b bench                                              the device that is here
  python -m combined_1f1b bench --preset small --link copy --modes graph num_microbatches=16
  torchrun --nproc-per-node 2 -m combined_1f1b bench --preset tiny           a real all-to-all
  python -m combined_1f1b bench --layers te --delay-wgrad --json te.json
  python -m combined_1f1b bench --from local.json te.json --markdown docs/benchmarks.md --plots docs
  python -m combined_1f1b bench --host-cost                                  needs no GPU
"""


def add_bench_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], run: Callable[[argparse.Namespace], int]
) -> None:
    """Add `bench` to the command line."""
    parser = commands.add_parser(
        "bench",
        help="Measure the schedules side by side",
        description=_TEXT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--preset", metavar="NAME", help="large, small or tiny (default: large on CUDA, tiny elsewhere)")
    what.add_argument(
        "overrides", nargs="*", metavar="key=value", help="fields of the preset, such as hidden_size=2048"
    )
    what.add_argument("--modes", default="eager,graph", metavar="LIST", help="of eager,graph (default: both)")
    what.add_argument("--layers", default="local", metavar="LIST", help="of local,te (default: local)")
    what.add_argument("--data-parallel", default="none,mfsdp", metavar="LIST", help="of none,mfsdp (default: both)")
    what.add_argument(
        "--schedules",
        default="default,built-in,ours,ours-paired",
        metavar="LIST",
        help="of default,built-in,ours,ours-paired (default: all)",
    )
    what.add_argument("--delay-wgrad", action="store_true", help="rows with delayed weight gradients too")
    what.add_argument(
        "--no-traffic",
        default="default,built-in,ours,ours-paired",
        metavar="LIST",
        help="schedules that run without traffic too, or none (default: all); each graph takes memory",
    )
    what.add_argument(
        "--link",
        metavar="KIND",
        help="spin, copy (modelled), real, slowed (real after copies) or none (default: what fits here)",
    )
    what.add_argument("--bandwidth", type=float, default=80.0, metavar="GB/S", help="of the spinning link (default 80)")
    how = parser.add_argument_group("how")
    how.add_argument("--samples", type=int, metavar="N", help="samples of each variant (default 10; host cost 30)")
    how.add_argument("--warmup", type=int, default=2, metavar="N", help="iterations before them (default 2)")
    how.add_argument("--no-traces", dest="traces", action="store_false", help="no profiled step of each variant")
    how.add_argument("--keep-traces", dest="trace_folder", metavar="FOLDER", help="keep those steps' Kineto traces")
    how.add_argument("--host-cost", action="store_true", help="host cost of a layer pair instead; needs no GPU")
    how.add_argument(
        "--processes", type=int, default=3, metavar="N", help="fresh processes for --host-cost (default 3)"
    )
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="FILE", help="write everything that was measured")
    results.add_argument("--from", dest="reports", nargs="+", metavar="FILE", help="read these instead of measuring")
    results.add_argument("--markdown", metavar="FILE.md", help="write the tables between the file's two marker lines")
    results.add_argument("--plots", metavar="FOLDER", help="draw step times and hidden traffic (SVG)")
    parser.set_defaults(run=run)
