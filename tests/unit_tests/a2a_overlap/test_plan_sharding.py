"""GATHER, FREE, REDUCE and BEGIN_BACKWARD: small plans by hand, and closed forms for large ones."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from plan_cases import lines, plans

from combined_1f1b.schedule import Plan, build_plan
from combined_1f1b.schedule.ops import NODE_KINDS, Kind

pytestmark = pytest.mark.world_size(1)


def count(plan: Plan, kind: Kind) -> Counter[str]:
    return Counter(op.unit for op in plan.ops if op.kind is kind)


def test_one_dense_layer():
    plan = build_plan(num_layers=1, num_microbatches=1, moe_layers=(), sharded=True)
    assert lines(plan) == [
        "GATHER.embedding gather",
        "GATHER.L0 gather",
        "F0.embedding compute after GATHER.embedding",
        "FREE.embedding gather after F0.embedding",
        # What follows the layer is gathered when the layer begins, and kept for the backward that follows at once.
        "GATHER.final_norm gather",
        "GATHER.output_layer gather",
        "F0.L0.attention compute after GATHER.L0",
        "F0.L0.mlp compute",
        "F0.final_norm compute after GATHER.final_norm",
        "F0.output_layer compute after GATHER.output_layer",
        "F0.loss compute",
        "BEGIN_BACKWARD.0 compute",
        "B0.loss compute",
        "B0.output_layer compute",
        "REDUCE.output_layer reduce",
        "FREE.output_layer gather after REDUCE.output_layer",
        "B0.final_norm compute",
        "B0.L0.mlp compute",
        # Not right after its gradient: it would wait for the output layer's reduction on the compute lane.
        "REDUCE.final_norm reduce",
        "FREE.final_norm gather after REDUCE.final_norm",
        "B0.L0.attention compute",
        "REDUCE.L0 reduce",
        "FREE.L0 gather after REDUCE.L0",
        "B0.embedding compute",  # the gradient of a lookup reads no weights
        "REDUCE.embedding reduce",
    ]


def test_two_moe_layers_forward():
    plan = build_plan(num_layers=2, num_microbatches=1, sharded=True)
    assert lines(plan)[: lines(plan).index("F0.loss compute")] == [
        "GATHER.embedding gather",
        "GATHER.L0 gather",
        "GATHER.L0.experts gather",
        "F0.embedding compute after GATHER.embedding",
        "FREE.embedding gather after F0.embedding",
        "GATHER.L1 gather",
        "GATHER.L1.experts gather",
        "F0.L0.attention compute after GATHER.L0",
        "FREE.L0 gather after F0.L0.attention",
        "F0.L0.dispatch comm after F0.L0.attention",
        "F0.L0.experts compute after GATHER.L0.experts, F0.L0.dispatch",
        "FREE.L0.experts gather after F0.L0.experts",
        "F0.L0.combine comm after F0.L0.experts",
        "GATHER.final_norm gather",
        "GATHER.output_layer gather",
        "F0.L1.attention compute after GATHER.L1, F0.L0.combine",
        "F0.L1.dispatch comm after F0.L1.attention",
        "F0.L1.experts compute after GATHER.L1.experts, F0.L1.dispatch",
        "F0.L1.combine comm after F0.L1.experts",
        "F0.final_norm compute after GATHER.final_norm, F0.L1.combine",
        "F0.output_layer compute after GATHER.output_layer",
    ]


def test_gathers_begin_one_layer_ahead_in_both_flows_of_a_pair():
    plan = build_plan(num_layers=6, num_microbatches=3, sharded=True)
    names = [op.name for op in plan.ops]
    for first_op, unit in (("F2.L1.attention", "L2"), ("B1.L4.combine", "L3")):
        place = names.index(first_op)
        nearby = names[place - 2 : place]
        assert nearby == [f"GATHER.{unit}", f"GATHER.{unit}.experts"] or nearby == [
            f"GATHER.{unit}.experts",
            f"GATHER.{unit}",
        ]


def test_the_layer_in_the_middle_is_gathered_once_for_both_flows():
    plan = build_plan(num_layers=5, num_microbatches=2, sharded=True)
    names = [op.name for op in plan.ops]
    start, end = names.index("F1.L0.attention"), names.index("F1.L3.attention")
    assert names[start:end].count("GATHER.L2") == names[start:end].count("FREE.L2") == 1
    free = names.index("FREE.L2", start)
    assert names.index("F1.L2.attention") < free
    assert names.index("REDUCE.L2") < free


@pytest.mark.parametrize("num_layers", [6, 8])
@pytest.mark.parametrize("num_microbatches", [2, 5])
def test_number_of_gathers(num_layers, num_microbatches):
    """Every flow gathers every layer once, less what the flow beside or before it still holds."""
    n = num_microbatches
    plan = build_plan(num_layers=num_layers, num_microbatches=n, sharded=True)
    expected = dict.fromkeys(range(num_layers), 2 * n)
    # A backward begins with the layer with which the forward of its micro-batch ended.
    expected[num_layers - 1] -= n
    # A pair's forward begins with the layer with which the backward of the pair before ended.
    expected[0] -= n - 2
    # In the middle of a pair the two flows swap two layers.
    for layer in (num_layers // 2 - 1, num_layers // 2):
        expected[layer] -= n - 1
    gathers = count(plan, Kind.GATHER)
    assert gathers == count(plan, Kind.FREE)
    assert {layer: gathers[f"L{layer}"] for layer in expected} == expected
    assert {layer: gathers[f"L{layer}.experts"] for layer in expected} == expected
    # Held from the forward's end to the backward's start.
    assert gathers["output_layer"] == gathers["final_norm"] == n
    assert gathers["embedding"] == n, "no backward reads it"


@pytest.mark.parametrize("pair_head_and_tail", [False, True])
@pytest.mark.parametrize("delay_wgrad", [False, True])
def test_at_most_five_layers_are_gathered_at_once(pair_head_and_tail, delay_wgrad):
    """Two layers of each of two flows, and one more while a flow passes from one layer to the next."""
    plan = build_plan(
        num_layers=12,
        num_microbatches=5,
        sharded=True,
        pair_head_and_tail=pair_head_and_tail,
        delay_wgrad=delay_wgrad,
    )
    gathered: set[str] = set()
    peak = 0
    for op in plan.ops:
        if op.kind is Kind.GATHER:
            gathered.add(op.unit)
        elif op.kind is Kind.FREE:
            gathered.remove(op.unit)
        peak = max(peak, sum(unit.endswith(".experts") for unit in gathered))
    assert 4 <= peak <= 5
    assert not gathered


@settings(max_examples=80, deadline=None)
@given(plans())
def test_every_unit_is_reduced_once_a_microbatch_after_its_last_gradient(plan):
    shape = plan.shape
    assert count(plan, Kind.REDUCE) == dict.fromkeys(shape.reduced_units, shape.num_microbatches)
    if not shape.sharded:
        assert not any(op.kind in (Kind.GATHER, Kind.FREE) for op in plan.ops)
    begun: set[int] = set()
    last: dict[tuple[str, int], int] = {}
    reductions: dict[str, list[int]] = {unit: [] for unit in shape.reduced_units}
    for index, op in enumerate(plan.ops):
        if op.kind is Kind.BEGIN_BACKWARD:
            begun.add(op.microbatch)
        elif op.kind is Kind.REDUCE:
            assert len(reductions[op.unit]) in begun
            reductions[op.unit].append(index)
        elif op.kind in (Kind.BACKWARD, Kind.WEIGHT):
            for unit in shape.node_units[op.stage, op.part]:
                last[unit, op.microbatch] = index
    assert begun == set(range(shape.num_microbatches))
    for unit, indices in reductions.items():
        for microbatch, index in enumerate(indices):
            assert last[unit, microbatch] < index
    assert plan.last_reductions == {indices[-1] for indices in reductions.values()}


@settings(max_examples=80, deadline=None)
@given(plans())
def test_a_unit_is_reduced_before_the_next_backward_writes_it(plan):
    """The rule that lets two backwards interleave. Gradients that come early are listed: the embedding's only."""
    reductions = dict.fromkeys(plan.shape.reduced_units, 0)
    early: dict[int, tuple[str, ...]] = {}
    for index, op in enumerate(plan.ops):
        if op.kind is Kind.REDUCE:
            reductions[op.unit] += 1
        elif op.kind in (Kind.BACKWARD, Kind.WEIGHT):
            units = [unit for unit in plan.shape.node_units[op.stage, op.part] if unit in reductions]
            before = tuple(unit for unit in units if reductions[unit] < op.microbatch)
            if before:
                early[index] = before
    assert plan.held_gradients == early
    if not plan.pairs.tail_pairs:
        assert not early
    for index, units in early.items():
        assert units == ("embedding",)
        assert plan.ops[index].microbatch == plan.shape.num_microbatches - 1
        assert plan.ops[index].stage != "embedding"


def test_held_gradients_of_a_tied_tail():
    plan = build_plan(num_layers=2, num_microbatches=4, sharded=True, pair_head_and_tail=True, tied_embeddings=True)
    assert {plan.ops[index].name: units for index, units in plan.held_gradients.items()} == {
        "B3.output_layer": ("embedding",)
    }
    assert count(plan, Kind.REDUCE)["embedding"] == 4
    assert "output_layer" not in plan.shape.gathered_units


def test_units_of_a_multi_token_prediction_model():
    plan = build_plan(num_layers=1, num_microbatches=2, num_mtp_layers=1, sharded=True)
    assert plan.shape.gathered_units == (
        *("embedding", "L0", "L0.experts", "final_norm"),
        *("M0", "root", "M0.experts", "output_layer"),
    )
    assert plan.shape.node_units["M0", "attention"] == ("M0", "root", "embedding")
    assert plan.shape.node_units["M0", "postprocess"] == ("root",)
    names = [op.name for op in plan.ops]
    # The embedding's gradients of a micro-batch are complete only at the end of the backward.
    assert names.index("B0.embedding") < names.index("REDUCE.embedding")
    assert names.index("REDUCE.root") == names.index("B0.M0.attention") + 1
    assert names.index("REDUCE.M0") == names.index("B0.M0.attention") + 2


def test_combine_parameters_belong_to_the_layer():
    plan = build_plan(num_layers=2, num_microbatches=2, sharded=True, combine_parameters=True)
    names = [op.name for op in plan.ops]
    assert names.index("F0.L0.combine") < names.index("FREE.L0")
    one = build_plan(num_layers=2, num_microbatches=1, sharded=True, combine_parameters=True)
    assert "FREE.L0 gather after F0.L0.combine" in lines(one)
    assert "B0.L0.combine comm after GATHER.L0, B0.L1.attention" in lines(one)


def test_subset_of_units():
    units = ("L0", "L1", "L0.experts")
    plan = build_plan(num_layers=2, num_microbatches=2, sharded=True, units=units, trainable_units=("L0", "L1"))
    assert set(count(plan, Kind.GATHER)) == set(units)
    assert set(count(plan, Kind.REDUCE)) == {"L0", "L1"}
    plan.validate()


def test_no_units_at_all():
    plan = build_plan(num_layers=2, num_microbatches=2, sharded=True, units=())
    plain = build_plan(num_layers=2, num_microbatches=2)
    assert plan.ops == plain.ops


def test_weight_gradients_come_before_the_reduction():
    plan = build_plan(num_layers=2, num_microbatches=2, sharded=True, delay_wgrad=True)
    names = [op.name for op in plan.ops]
    for microbatch in (0, 1):
        for weight, unit in ((f"W{microbatch}.L1.experts", "L1.experts"), (f"W{microbatch}.L0.attention", "L0")):
            assert names[names.index(weight) + 1] == f"REDUCE.{unit}"


@settings(max_examples=60, deadline=None)
@given(plans())
def test_begin_backward_opens_its_flow_and_nothing_else_moves(plan):
    names = [op.name for op in plan.ops]
    for microbatch in range(plan.shape.num_microbatches):
        begin = names.index(f"BEGIN_BACKWARD.{microbatch}")
        following = [op.name for op in plan.ops[begin + 1 :] if op.kind in NODE_KINDS]
        assert following[0] == f"B{microbatch}.loss"
        # After the paired forward has started.
        paired = microbatch + 1 + plan.shape.pair_head_and_tail
        if paired < plan.shape.num_microbatches:
            assert names.index(f"F{paired}.embedding") < begin
