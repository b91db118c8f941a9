"""The command line: train, compare and bench under torchrun; plan, simulate and doctor anywhere.

A mistake of the user is one line on stderr and exit code 2; a comparison that finds a difference exits with 1. Under
torchrun every rank finds the same mistake: rank 0 says it, and the others hold back for a moment.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence

from combined_1f1b.bench.arguments import add_bench_command
from combined_1f1b.errors import OverlapError

USER_ERROR = 2
# Longer than rank 0 needs to print the same line and exit, after which torchrun ends the other ranks.
_HOLD_BACK_SECONDS = 3.0

_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 2 -m combined_1f1b compare --config examples/tiny_moe.yaml
  torchrun --nproc-per-node 2 -m combined_1f1b train --config examples/tiny_moe.yaml training.train_iters=100
  python -m combined_1f1b plan --layers 4 --microbatches 4 --sharded --draw plan.svg
  python -m combined_1f1b plan --layers 4 --microbatches 4 --pp 2 --vpp 2 --draw pipeline.svg
  python -m combined_1f1b simulate --layers 4 --microbatches 8
  python -m combined_1f1b bench --preset tiny
  python -m combined_1f1b doctor
"""


def _quiet_imports() -> None:
    """Hold back what Megatron and torch say at import about packages that are not there; `doctor` says it."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", module=r"torch\.jit")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _train(arguments: argparse.Namespace) -> int:
    from combined_1f1b.training.config import load_config
    from combined_1f1b.training.train import train

    train(load_config(arguments.config, arguments.overrides))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from combined_1f1b.training.compare import compare
    from combined_1f1b.training.config import load_config

    return compare(load_config(arguments.config, arguments.overrides))


def _plan(arguments: argparse.Namespace) -> int:
    from combined_1f1b.training.plans import show_plan

    return show_plan(arguments)


def _simulate(arguments: argparse.Namespace) -> int:
    from combined_1f1b.training.plans import show_simulation

    return show_simulation(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    from combined_1f1b.bench.command import bench

    return bench(arguments)


def _doctor(arguments: argparse.Namespace) -> int:  # noqa: ARG001 - every command takes the parsed arguments
    from combined_1f1b.training.doctor import report

    return report()


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,3") from None


def _add_run_command(commands: argparse._SubParsersAction, name: str, run: Callable[..., int], text: str) -> None:
    parser = commands.add_parser(name, help=text, description=f"{text}. Start it with torchrun.")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file, such as examples/tiny_moe.yaml")
    _add_overrides(parser)
    parser.set_defaults(run=run)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings on top of the file, such as data.num_microbatches=8"
    )


def _add_shape_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="take the shape from a YAML file; the flags below win over it")
    parser.add_argument("--layers", type=int, metavar="N", help="transformer layers (default 4)")
    parser.add_argument("--microbatches", type=int, metavar="N", help="micro-batches of one iteration (default 4)")
    parser.add_argument("--dense-layers", type=_whole_numbers, metavar="0,2", help="layers without experts")
    parser.add_argument("--mtp-layers", type=int, metavar="N", help="multi-token-prediction layers")
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline ranks (default 1)")
    parser.add_argument("--vpp", type=int, metavar="N", help="model chunks of each pipeline rank (default 1)")
    parser.add_argument(
        "--layer-counts", type=_whole_numbers, metavar="1,3", help="layers of each of the pp * vpp pipeline stages"
    )
    parser.add_argument(
        "--microbatch-group-size", type=int, metavar="N", help="micro-batches that a chunk runs in a row (default pp)"
    )
    for flag, text in (
        ("--tied", "the output layer shares the embedding's weight"),
        ("--sharded", "with the gathers, frees and reductions of Megatron-FSDP v2"),
        ("--pair-head-and-tail", "pair the first two forwards and the last two backwards too"),
        ("--delay-wgrad", "weight gradients as steps of their own"),
        ("--early-attention-release", "run the attention backward before the paired experts"),
    ):
        parser.add_argument(flag, action="store_true", default=None, help=text)
    _add_overrides(parser)


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(
        prog="combined_1f1b",
        description="Hide the expert-parallel all-to-all of MoE training in Megatron-Core.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_run_command(commands, "train", _train, "Train a model from a configuration file")
    _add_run_command(
        commands, "compare", _compare, "Run Megatron's schedules and this one on the same weights and data"
    )

    plan = commands.add_parser("plan", help="Print, or draw, the order in which everything will run")
    _add_shape_flags(plan)
    plan.add_argument("--draw", metavar="FILE.svg", help="write a picture of it")
    plan.add_argument("--rank", type=int, metavar="N", help="show one pipeline rank only")
    plan.add_argument("--table", action="store_true", help="print lanes side by side instead of one step a line")
    plan.set_defaults(run=_plan)

    simulate = commands.add_parser("simulate", help="Estimate what a plan hides, without running anything")
    _add_shape_flags(simulate)
    simulate.set_defaults(run=_simulate)

    add_bench_command(commands, _bench)

    doctor = commands.add_parser("doctor", help="Say what is installed here and what it means")
    doctor.set_defaults(run=_doctor)
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: words of the command line; default sys.argv.
    Returns:
        the exit code.
    """
    parsed = build_parser().parse_args(arguments)
    rank = int(os.environ.get("RANK", "0"))
    if not parsed.debug:
        _quiet_imports()
    try:
        return parsed.run(parsed)
    except OverlapError as error:
        if rank != 0:
            time.sleep(_HOLD_BACK_SECONDS)
        if parsed.debug:
            traceback.print_exc()
        where = "" if rank == 0 else f"rank {rank}: "
        print(f"combined_1f1b: {where}error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: nothing is wrong here.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("combined_1f1b: interrupted", file=sys.stderr)
        return 130
