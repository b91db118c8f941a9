"""The `plan` and `simulate` commands: a plan from flags, without torch, or from a run's configuration."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
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


def layer_counts_of(model: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Decoder layers of each pipeline stage, as Megatron reads its settings for uneven splits; None for an even one.

    Raises:
        ConfigError: layers that cannot be split so.
    """
    pp = model.get("pipeline_model_parallel_size") or 1
    if layout := model.get("pipeline_model_parallel_layout"):
        from megatron.core.transformer.enums import LayerType
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        ranks = PipelineParallelLayerLayout(layout, pp).layout  # [rank][chunk] -> layers
        return tuple(stage.count(LayerType.decoder) for chunk in zip(*ranks, strict=True) for stage in chunk)
    vpp = model.get("virtual_pipeline_model_parallel_size") or 1
    ends = [model.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")]
    standing_in = [bool(model.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss")]
    if ends == [None, None] and not any(standing_in):
        return None
    layers = model["num_layers"] + sum(standing_in)
    between = pp - sum(end is not None for end in ends)
    inner = (layers - sum(end or 0 for end in ends)) // between if between else 0
    per_rank = [inner] * pp
    for rank, end in ((0, ends[0]), (-1, ends[1])):
        per_rank[rank] = per_rank[rank] if end is None else end
    if sum(per_rank) != layers or any(count % vpp for count in per_rank):
        reason = f"cannot be split over {pp} ranks with {vpp} chunks as the settings for uneven splits say"
        raise ConfigError.of("model.num_layers", model["num_layers"], reason, "change one of them")
    counts = [count // vpp for count in per_rank] * vpp
    counts[0] -= standing_in[0]
    counts[-1] -= standing_in[1]
    return tuple(counts)


def plan_arguments(config: RunConfig) -> dict[str, Any]:
    """What build_plan takes, from a run's configuration: the plan that this package would run it by."""
    pp = config.model.get("pipeline_model_parallel_size") or 1
    pipeline = {
        "pp": pp,
        "vpp": config.model.get("virtual_pipeline_model_parallel_size") or 1,
        "microbatch_group_size_per_vp_stage": config.model.get("microbatch_group_size_per_vp_stage"),
        "layer_counts": layer_counts_of(config.model),
    }
    return (pipeline if pp > 1 else {}) | {
        "num_layers": config.model["num_layers"],
        "num_microbatches": config.data.num_microbatches,
        "moe_layers": moe_layers_of(config.model),
        "num_mtp_layers": config.model.get("mtp_num_layers") or 0,
        "tied_embeddings": config.gpt.share_embeddings_and_output_weights,
        "sharded": config.distributed.data_parallel == "mfsdp_v2",
        "pair_head_and_tail": pipeline["vpp"] == 1 and bool(config.overlap.get("pair_head_and_tail", False)),
        "delay_wgrad": bool(config.model.get("delay_wgrad_compute", False)),
        "early_attention_release": bool(config.model.get("ep_overlap_early_attn_memory_release", False)),
    }


def _arguments_from_flags(flags: argparse.Namespace) -> dict[str, Any]:
    arguments: dict[str, Any] = {"num_layers": 4, "num_microbatches": 4}
    if flags.config is not None:
        from combined_1f1b.training.config import load_config

        arguments = plan_arguments(load_config(flags.config, flags.overrides))
    elif flags.overrides:
        raise ConfigError.of(
            "--config", None, f"{flags.overrides[0]} is a setting on top of a file",
            "name the file, or use the flags that `plan --help` lists",
        )  # fmt: skip
    given = {
        "num_layers": flags.layers,
        "num_microbatches": flags.microbatches,
        "num_mtp_layers": flags.mtp_layers,
        "tied_embeddings": flags.tied,
        "sharded": flags.sharded,
        "pair_head_and_tail": flags.pair_head_and_tail,
        "delay_wgrad": flags.delay_wgrad,
        "early_attention_release": flags.early_attention_release,
        "pp": flags.pp,
        "vpp": flags.vpp,
        "microbatch_group_size_per_vp_stage": flags.microbatch_group_size,
        "layer_counts": flags.layer_counts,
    }
    if flags.layers is not None or flags.pp is not None or flags.vpp is not None:
        arguments.pop("layer_counts", None)  # the file's split is for its own numbers
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


def _plans_of_all_ranks(arguments: Mapping[str, Any]) -> list[Plan]:
    from combined_1f1b.schedule import build_plan, validate_ranks

    plans = [build_plan(**arguments, rank=rank) for rank in range(arguments.get("pp", 1))]
    validate_ranks(plans)
    return plans


def show_plan(flags: argparse.Namespace) -> int:
    """Print, or draw, the plan that the flags describe; returns the exit code.

    With pipeline ranks, one plan after the other, with an empty line between them.
    """
    plans = _plans_of_all_ranks(_arguments_from_flags(flags))
    if flags.rank is not None:
        if not 0 <= flags.rank < len(plans):
            fix = f"use 0 to {len(plans) - 1}"
            raise ConfigError.of("--rank", flags.rank, f"there are {len(plans)} pipeline ranks", fix)
        plans = [plans[flags.rank]]
    if flags.draw:
        print(f"wrote {draw_plan(plans, Path(flags.draw))}")
    if flags.table:
        from combined_1f1b.schedule.render import to_text

        print("\n\n".join(f"{plan.shape}\n{to_text(plan)}" if len(plans) > 1 else to_text(plan) for plan in plans))
    elif not flags.draw:
        print("\n\n".join(map(str, plans)))
    return 0


def draw_plan(plans: Plan | Sequence[Plan], path: Path) -> Path:
    """Write the picture of a plan, or of those of several pipeline ranks, as SVG.

    Raises:
        ConfigError: the file cannot be written.
    """
    from combined_1f1b.schedule.render import to_svg

    if path.suffix != ".svg":
        raise ConfigError.of("--draw", str(path), "the picture is SVG", "end the name in .svg")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        to_svg(plans, str(path))
    except OSError as error:
        raise ConfigError.of("--draw", str(path), f"cannot be written ({error.strerror})", "name another") from error
    return path


def show_simulation(flags: argparse.Namespace) -> int:
    """Print what the plan hides, with and without pairing head and tail, or on each pipeline rank.

    Returns:
        the exit code.
    """
    from combined_1f1b.schedule import simulate, simulate_ranks

    arguments = _arguments_from_flags(flags)
    print(f"{arguments['num_layers']} layers, {arguments['num_microbatches']} micro-batches; times in units of one")
    print("attention forward of one layer, so compare them with each other, not with a clock")
    print()
    if arguments.get("pp", 1) > 1:
        plans = _plans_of_all_ranks(arguments)
        results = simulate_ranks(plans)
        _print_columns([f"rank {plan.shape.rank}" for plan in plans], results, width=14)
        _print_pipeline_notes(plans, results)
        if plans[0].shape.vpp == 1:
            flag = "pair_head_and_tail"
            times = [_time_of_all_ranks(arguments | {flag: paired}) for paired in (False, True)]
            chosen = "on" if arguments.get(flag) else "off"
            print(f"the iteration takes {times[0]:.1f} without {flag} and {times[1]:.1f} with it; here it is {chosen}")
        return 0
    chosen = arguments.pop("pair_head_and_tail", False)
    plans = [_plans_of_all_ranks(arguments | {"pair_head_and_tail": paired})[0] for paired in (False, True)]
    _print_columns(["plain", "head and tail paired"], [simulate(plan) for plan in plans], width=24)
    if chosen:
        print("pair_head_and_tail is on: the right-hand column is this run's")
    else:
        print("pair_head_and_tail is off: the left-hand column is this run's; pairing keeps one more micro-batch")
        print("of activations alive and hides the first forward and the last backward too")
    return 0


def _time_of_all_ranks(arguments: Mapping[str, Any]) -> float:
    from combined_1f1b.schedule import simulate_ranks

    return max(result.makespan for result in simulate_ranks(_plans_of_all_ranks(arguments)))


def _print_columns(names: Sequence[str], results: Sequence[Simulation], width: int) -> None:
    print(f"{'':24}" + "".join(f"{name:>{width}}" for name in names))
    for label, value in _MEASURES:
        print(f"{label:24}" + "".join(f"{value(result):>{width}}" for result in results))
    print()


def _print_pipeline_notes(plans: Sequence[Plan], results: Sequence[Simulation]) -> None:
    end = max(result.makespan for result in results)
    idle = [1 - (result.compute_busy + result.exposed_comm) / end for result in results]
    print(f"neither compute nor traffic for {min(idle):.0%} to {max(idle):.0%} of {end:.1f}: the pipeline's bubble")
    shape = plans[0].shape
    if shape.vpp > 1:
        print("micro-batches alive count once for every chunk that holds them")
        return
    most = min(2 * shape.pp - 1 + shape.pair_head_and_tail, shape.num_microbatches)
    print(f"rank 0 holds up to {most} whole micro-batches and one in part; without pairs it would hold {shape.pp}.")
    print("A pair's forward and backward end together: with fewer under way the ranks would wait for each other")


def _share(result: Simulation) -> str:
    return f"{result.hidden_fraction:.0%}"


_MEASURES = (
    ("time", lambda result: f"{result.makespan:.1f}"),
    ("compute", lambda result: f"{result.compute_busy:.1f}"),
    ("traffic", lambda result: f"{result.comm_busy:.1f}"),
    ("traffic exposed", lambda result: f"{result.exposed_comm:.1f}"),
    ("traffic hidden", _share),
    ("all-to-alls paired", lambda result: f"{result.comm_ops_under_partner} of {result.comm_ops}"),
    ("micro-batches alive", lambda result: f"{result.peak_microbatches}"),
)
