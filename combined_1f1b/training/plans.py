"""The `plan` and `simulate` commands: a plan from flags, without torch, or from a run's configuration."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from combined_1f1b.errors import ConfigError

if TYPE_CHECKING:
    from combined_1f1b.schedule import Plan
    from combined_1f1b.schedule.simulate import Simulation
    from combined_1f1b.training.config import RunConfig


def moe_layers_of(model: Mapping[str, Any]) -> tuple[int, ...]:
    """Indices of the layers with experts, as Megatron reads `moe_layer_freq`.

    Raises:
        ConfigError: a list that does not have one entry a layer.
    """
    layers = model["num_layers"]
    if not model.get("num_moe_experts"):
        return ()
    frequency = model.get("moe_layer_freq", 1)
    if isinstance(frequency, int):
        return tuple(range(0, layers, frequency))
    if len(frequency) != layers:
        fix = f"give it {layers} entries of 0 or 1"
        raise ConfigError.of("model.moe_layer_freq", frequency, f"has {len(frequency)} entries", fix)
    return tuple(index for index, is_moe in enumerate(frequency) if is_moe)


def plan_arguments(config: RunConfig) -> dict[str, Any]:
    """What build_plan takes, from a run's configuration: the plan that this package would run it by."""
    return {
        "num_layers": config.model["num_layers"],
        "num_microbatches": config.data.num_microbatches,
        "moe_layers": moe_layers_of(config.model),
        "num_mtp_layers": config.model.get("mtp_num_layers") or 0,
        "tied_embeddings": config.gpt.share_embeddings_and_output_weights,
        "sharded": config.distributed.data_parallel == "mfsdp_v2",
        "pair_head_and_tail": bool(config.overlap.get("pair_head_and_tail", False)),
        "delay_wgrad": bool(config.model.get("delay_wgrad_compute", False)),
        "early_attention_release": bool(config.model.get("ep_overlap_early_attn_memory_release", False)),
    }


def _arguments_from_flags(flags: argparse.Namespace) -> dict[str, Any]:
    arguments: dict[str, Any] = {"num_layers": 4, "num_microbatches": 4}
    if flags.config is not None:
        from combined_1f1b.training.config import load_config

        arguments = plan_arguments(load_config(flags.config))
    given = {
        "num_layers": flags.layers,
        "num_microbatches": flags.microbatches,
        "num_mtp_layers": flags.mtp_layers,
        "tied_embeddings": flags.tied,
        "sharded": flags.sharded,
        "pair_head_and_tail": flags.pair_head_and_tail,
        "delay_wgrad": flags.delay_wgrad,
        "early_attention_release": flags.early_attention_release,
    }
    arguments |= {name: value for name, value in given.items() if value is not None}
    for flag in ("num_layers", "num_microbatches"):
        if arguments[flag] < 1:
            name = {"num_layers": "--layers", "num_microbatches": "--microbatches"}[flag]
            raise ConfigError.of(name, arguments[flag], "must be at least 1", "raise it")
    layers = arguments["num_layers"]
    if flags.dense_layers is not None:
        outside = [layer for layer in flags.dense_layers if not 0 <= layer < layers]
        if outside:
            fix = f"use numbers from 0 to {layers - 1}"
            raise ConfigError.of("--dense-layers", outside[0], "there is no such layer", fix)
        arguments["moe_layers"] = tuple(layer for layer in range(layers) if layer not in flags.dense_layers)
    elif flags.layers is not None:
        arguments.pop("moe_layers", None)  # the file's layer pattern is for its own number of layers
    return arguments


def show_plan(flags: argparse.Namespace) -> int:
    """Print, or draw, the plan that the flags describe; returns the exit code."""
    from combined_1f1b.schedule import build_plan

    plan = build_plan(**_arguments_from_flags(flags))
    plan.validate()
    if flags.draw:
        print(f"wrote {draw_plan(plan, Path(flags.draw))}")
    if flags.table:
        from combined_1f1b.schedule.render import to_text

        print(to_text(plan))
    elif not flags.draw:
        print(plan)
    return 0


def draw_plan(plan: Plan, path: Path) -> Path:
    """Write the picture of a plan as SVG.

    Raises:
        ConfigError: the file cannot be written.
    """
    from combined_1f1b.schedule.render import to_svg

    if path.suffix != ".svg":
        raise ConfigError.of("--draw", str(path), "the picture is SVG", "end the name in .svg")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        to_svg(plan, str(path))
    except OSError as error:
        raise ConfigError.of("--draw", str(path), f"cannot be written ({error.strerror})", "name another") from error
    return path


def show_simulation(flags: argparse.Namespace) -> int:
    """Print what the plan hides, with and without pairing head and tail; returns the exit code."""
    from combined_1f1b.schedule import build_plan, simulate

    arguments = _arguments_from_flags(flags)
    rows = []
    for paired in (False, True):
        plan = build_plan(**arguments | {"pair_head_and_tail": paired})
        plan.validate()
        rows.append(("head and tail paired" if paired else "plain", simulate(plan)))
    chosen = arguments.get("pair_head_and_tail", False)
    print(f"{arguments['num_layers']} layers, {arguments['num_microbatches']} micro-batches; times in units of one")
    print("attention forward of one layer, so compare them with each other, not with a clock")
    print()
    print(f"{'':24}" + "".join(f"{name:>24}" for name, _ in rows))
    for label, value in _MEASURES:
        print(f"{label:24}" + "".join(f"{value(result):>24}" for _, result in rows))
    print()
    if chosen:
        print("pair_head_and_tail is on: the right-hand column is this run's")
    else:
        print("pair_head_and_tail is off: the left-hand column is this run's; pairing keeps one more micro-batch")
        print("of activations alive and hides the first forward and the last backward too")
    return 0


def _share(result: Simulation) -> str:
    return f"{result.hidden_fraction:.0%}"


_MEASURES = (
    ("iteration", lambda result: f"{result.makespan:.1f}"),
    ("compute", lambda result: f"{result.compute_busy:.1f}"),
    ("traffic", lambda result: f"{result.comm_busy:.1f}"),
    ("traffic exposed", lambda result: f"{result.exposed_comm:.1f}"),
    ("traffic hidden", _share),
    ("all-to-alls paired", lambda result: f"{result.comm_ops_under_partner} of {result.comm_ops}"),
    ("micro-batches alive", lambda result: f"{result.peak_microbatches}"),
)
