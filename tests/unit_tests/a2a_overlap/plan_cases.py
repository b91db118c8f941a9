"""Shapes that the plan tests go through: a grid, and a hypothesis strategy over the whole space."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

from hypothesis import strategies as st

from combined_1f1b.schedule import Plan, build_plan


def lines(plan: Plan) -> list[str]:
    """The plan's ops as it prints them, with runs of spaces made one."""
    return [" ".join(op.line.split()) for op in plan.ops]


def grid() -> list[dict[str, Any]]:
    """Arguments of build_plan: every choice that changes the order with every other, on small models."""
    flags = ("sharded", "pair_head_and_tail", "delay_wgrad", "early_attention_release", "combine_parameters")
    models = ((1, None, 0), (2, (0,), 0), (3, (1, 2), 1), (2, None, 2))
    return [
        dict(zip(flags, values, strict=True))
        | {
            "num_layers": num_layers,
            "moe_layers": moe_layers,
            "num_mtp_layers": num_mtp_layers,
            "num_microbatches": num_microbatches,
            "tied_embeddings": num_layers == 2,
            "has_final_norm": num_layers != 1,
        }
        for values in product((False, True), repeat=len(flags))
        for num_layers, moe_layers, num_mtp_layers in models
        for num_microbatches in (1, 2, 3, 5)
    ]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan of a small model, with subsets of the units present and trained."""
    num_layers = draw(st.integers(1, 4))
    arguments: dict[str, Any] = {
        "num_layers": num_layers,
        "num_microbatches": draw(st.integers(1, 5)),
        "moe_layers": draw(st.none() | st.sets(st.integers(0, num_layers - 1))),
        "num_mtp_layers": draw(st.integers(0, 2)),
    }
    for flag in (
        "sharded",
        "pair_head_and_tail",
        "interleave_head",
        "delay_wgrad",
        "early_attention_release",
        "combine_parameters",
        "tied_embeddings",
        "has_final_norm",
    ):
        arguments[flag] = draw(st.booleans())
    known = build_plan(**arguments | {"sharded": True}).shape.gathered_units
    for flag in ("units", "trainable_units"):
        subset = draw(st.none() | st.sets(st.sampled_from(known)))
        arguments[flag] = None if subset is None else tuple(unit for unit in known if unit in subset)
    return build_plan(**arguments)


@st.composite
def pipelines(draw: st.DrawFn) -> list[Plan]:
    """The plans of all ranks of a small pipeline, with any split of the layers."""
    pp = draw(st.integers(2, 4))
    vpp = draw(st.integers(1, 3))
    num_layers = draw(st.integers(1, 2 * pp * vpp))
    bounds = sorted(draw(st.lists(st.integers(0, num_layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
    group = draw(st.integers(pp, pp + 2))
    rest = draw(st.just(0) | st.integers(pp, group - 1)) if group > pp else 0
    arguments: dict[str, Any] = {
        "num_layers": num_layers,
        "layer_counts": [end - start for start, end in pairwise([0, *bounds, num_layers])],
        "num_microbatches": group * draw(st.integers(1, 2)) + rest if vpp > 1 else draw(st.integers(1, 9)),
        "microbatch_group_size_per_vp_stage": group,
        "moe_layers": draw(st.none() | st.sets(st.integers(0, num_layers - 1))),
        "num_mtp_layers": draw(st.integers(0, 1)),
        "pp": pp,
        "vpp": vpp,
    }
    flags = ["sharded", "delay_wgrad", "early_attention_release", "tied_embeddings", "has_final_norm"]
    flags += ["combine_parameters", "interleave_head"]
    for flag in flags if vpp > 1 else [*flags, "pair_head_and_tail"]:
        arguments[flag] = draw(st.booleans())
    return ranks(**arguments)


def ranks(**arguments: Any) -> list[Plan]:
    """The plans of all ranks of a pipeline."""
    return [build_plan(**arguments, rank=rank) for rank in range(arguments["pp"])]
