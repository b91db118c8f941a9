"""Plans as text: small ones written out by hand, and properties that hold for all."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from plan_cases import grid, lines, plans

from combined_1f1b.errors import ConfigError, PlanError
from combined_1f1b.schedule import Plan, PlanShape, build_plan, simulate
from combined_1f1b.schedule.ops import Kind, Lane
from combined_1f1b.schedule.passes import PASSES, add_waits, apply_passes

pytestmark = pytest.mark.world_size(1)


def names(plan: Plan) -> str:
    return " ".join(op.name for op in plan.ops)


def test_one_dense_layer_one_microbatch():
    plan = build_plan(num_layers=1, num_microbatches=1, moe_layers=())
    assert str(plan).splitlines()[0] == "plan num_layers=1 num_microbatches=1"
    assert lines(plan) == [
        "F0.embedding compute",
        "F0.L0.attention compute",
        "F0.L0.mlp compute",
        "F0.final_norm compute",
        "F0.output_layer compute",
        "F0.loss compute",
        "BEGIN_BACKWARD.0 compute",
        "B0.loss compute",
        "B0.output_layer compute",
        "B0.final_norm compute",
        "B0.L0.mlp compute",
        "B0.L0.attention compute",
        "B0.embedding compute",
    ]
    assert plan.pairs.forward_backward_pairs == plan.pairs.head_pairs == plan.pairs.tail_pairs == 0
    assert plan.signals == frozenset()


def test_two_layers_one_of_them_dense():
    plan = build_plan(num_layers=2, num_microbatches=2, moe_layers=[0])
    assert lines(plan) == [
        "F0.embedding compute",
        "F0.L0.attention compute",
        "F0.L0.dispatch comm after F0.L0.attention",
        "F0.L0.experts compute after F0.L0.dispatch",
        "F0.L0.combine comm after F0.L0.experts",
        "F0.L1.attention compute after F0.L0.combine",
        "F0.L1.mlp compute",
        "F0.final_norm compute",
        "F0.output_layer compute",
        "F0.loss compute",
        "F1.embedding compute",
        "BEGIN_BACKWARD.0 compute",
        "B0.loss compute",
        "B0.output_layer compute",
        "B0.final_norm compute",
        "F1.L0.attention compute",
        "B0.L1.mlp compute",
        "F1.L0.dispatch comm after F1.L0.attention",
        "F1.L0.experts compute after F1.L0.dispatch",
        "F1.L0.combine comm after F1.L0.experts",
        "B0.L1.attention compute",
        "B0.L0.combine comm after B0.L1.attention",
        "F1.L1.attention compute after F1.L0.combine",
        "B0.L0.experts compute after B0.L0.combine",
        "B0.L0.dispatch comm after B0.L0.experts",
        "F1.L1.mlp compute",
        "B0.L0.attention compute after B0.L0.dispatch",
        "F1.final_norm compute",
        "F1.output_layer compute",
        "F1.loss compute",
        "B0.embedding compute",
        "BEGIN_BACKWARD.1 compute",
        "B1.loss compute",
        "B1.output_layer compute",
        "B1.final_norm compute",
        "B1.L1.mlp compute",
        "B1.L1.attention compute",
        "B1.L0.combine comm after B1.L1.attention",
        "B1.L0.experts compute after B1.L0.combine",
        "B1.L0.dispatch comm after B1.L0.experts",
        "B1.L0.attention compute after B1.L0.dispatch",
        "B1.embedding compute",
    ]


def layer_pair(plan: Plan) -> list[str]:
    """The ops of the only layer pair of a plan with one layer and two micro-batches."""
    text = names(plan)
    start, end = text.index("B0.L0.combine"), text.index("F1.final_norm")
    return text[start:end].split()


def test_layer_pair_with_delayed_weight_gradients():
    plan = build_plan(num_layers=1, num_microbatches=2, delay_wgrad=True)
    assert layer_pair(plan) == [
        "B0.L0.combine",
        "F1.L0.attention",
        "B0.L0.experts",
        "F1.L0.dispatch",
        "W0.L0.experts",
        "B0.L0.dispatch",
        "F1.L0.experts",
        "F1.L0.combine",
        "B0.L0.attention",
        "W0.L0.attention",
    ]


def test_layer_pair_with_early_attention_release():
    plan = build_plan(num_layers=1, num_microbatches=2, early_attention_release=True)
    assert layer_pair(plan) == [
        "B0.L0.combine",
        "F1.L0.attention",
        "B0.L0.experts",
        "F1.L0.dispatch",
        "B0.L0.dispatch",
        "B0.L0.attention",
        "F1.L0.experts",
        "F1.L0.combine",
    ]


def test_multi_token_prediction_pair():
    plan = build_plan(num_layers=1, num_microbatches=2, moe_layers=(), num_mtp_layers=1)
    assert names(plan).split("B0.output_layer ")[1].split(" F1.output_layer")[0].split() == [
        # M0 of the backward meets L0 of the forward, then the other way round.
        "B0.M0.postprocess",
        "B0.M0.combine",
        "F1.L0.attention",
        "B0.M0.experts",
        "B0.M0.dispatch",
        "F1.L0.mlp",
        "B0.M0.attention",
        "F1.final_norm",
        "B0.final_norm",
        "F1.M0.attention",
        "B0.L0.mlp",
        "F1.M0.dispatch",
        "F1.M0.experts",
        "F1.M0.combine",
        "B0.L0.attention",
        "F1.M0.postprocess",
    ]


def test_head_and_tail_of_two_microbatches():
    plan = build_plan(num_layers=2, num_microbatches=2, pair_head_and_tail=True)
    assert names(plan).split(" BEGIN_BACKWARD.0 ")[0].split() == [
        *("F0.embedding", "F1.embedding"),
        *("F0.L0.attention", "F1.L0.attention", "F0.L0.dispatch", "F0.L0.experts"),
        *("F1.L0.dispatch", "F0.L0.combine", "F1.L0.experts", "F1.L0.combine"),
        *("F0.L1.attention", "F1.L1.attention", "F0.L1.dispatch", "F0.L1.experts"),
        *("F1.L1.dispatch", "F0.L1.combine", "F1.L1.experts", "F1.L1.combine"),
        *("F0.final_norm", "F0.output_layer", "F0.loss", "F1.final_norm", "F1.output_layer", "F1.loss"),
    ]
    assert names(plan).split(" BEGIN_BACKWARD.0 ")[1].split() == [
        *("B0.loss", "B0.output_layer", "B0.final_norm", "B0.L1.combine"),
        *("BEGIN_BACKWARD.1", "B1.loss", "B1.output_layer"),
        *("B0.L1.experts", "B0.L1.dispatch", "B1.final_norm", "B1.L1.combine", "B0.L1.attention"),
        *("B0.L0.combine", "B1.L1.experts", "B1.L1.dispatch"),
        *("B0.L0.experts", "B0.L0.dispatch", "B1.L1.attention", "B1.L0.combine", "B0.L0.attention"),
        *("B1.L0.experts", "B1.L0.dispatch", "B0.embedding", "B1.L0.attention", "B1.embedding"),
    ]
    assert (plan.pairs.forward_backward_pairs, plan.pairs.head_pairs, plan.pairs.tail_pairs) == (0, 1, 1)


@pytest.mark.parametrize("num_microbatches", range(1, 8))
@pytest.mark.parametrize("interleave_head", [True, False])
def test_pair_counts(num_microbatches, interleave_head):
    def pairs(paired):
        plan = build_plan(
            num_layers=2,
            num_microbatches=num_microbatches,
            pair_head_and_tail=paired,
            interleave_head=interleave_head,
        )
        return plan.pairs.forward_backward_pairs, plan.pairs.head_pairs, plan.pairs.tail_pairs

    assert pairs(False) == (num_microbatches - 1, 0, 0)
    expected = (num_microbatches - 2, int(interleave_head), 1) if num_microbatches > 1 else (0, 0, 0)
    assert pairs(True) == expected


def test_forwards_of_a_plan_without_interleaved_head_run_in_turn():
    plan = build_plan(num_layers=2, num_microbatches=3, pair_head_and_tail=True, interleave_head=False)
    flows = [op.microbatch for op in plan.ops if op.kind is Kind.FORWARD]
    assert flows == sorted(flows)


def test_each_pass_is_pure_and_named():
    shape = PlanShape(num_layers=2, num_microbatches=2, moe_layers=(0, 1), sharded=True)
    bare = tuple(op.with_waits(()) for op in build_plan(num_layers=2, num_microbatches=2).ops)
    before = list(bare)
    assert [add.__name__ for add in PASSES] == ["add_sharding", "add_waits"]
    ops = apply_passes(shape, bare)
    assert list(bare) == before
    assert ops == build_plan(num_layers=2, num_microbatches=2, sharded=True).ops
    assert add_waits(shape, ops) == ops


@settings(max_examples=150, deadline=None)
@given(plans())
def test_round_trip_and_validity(plan):
    plan.validate()
    assert Plan.parse(str(plan)) == plan
    assert PlanShape.parse(str(plan.shape)) == plan.shape


def test_every_plan_of_the_grid_is_valid():
    for case in grid():
        plan = build_plan(**case)
        plan.validate()
        kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT, Kind.BEGIN_BACKWARD)
        nodes = [op.name for op in plan.ops if op.kind in kinds]
        assert len(nodes) == len(set(nodes))
        assert simulate(plan).makespan > 0


@settings(max_examples=60, deadline=None)
@given(plans())
def test_waits_and_signals_are_exactly_the_needed_ones(plan):
    """Without any one of its waits a plan is refused, and the signals are what is waited for."""
    assert plan.signals == {index for waits in plan.wait_indices for index in waits}
    waiting = [index for index, op in enumerate(plan.ops) if op.waits]
    for index in waiting[:: max(1, len(waiting) // 8)]:
        op = plan.ops[index]
        for name in op.waits:
            fewer = op.with_waits(tuple(other for other in op.waits if other != name))
            with pytest.raises(PlanError, match="does not wait for"):
                Plan(plan.shape, (*plan.ops[:index], fewer, *plan.ops[index + 1 :])).validate()


def reached(plan: Plan, source: int) -> set[int]:
    """Ops that start only when op `source` is done, found by walking lanes and waits."""
    after = {source}
    followed = {plan.ops[source].issue_lane}
    for index in range(source + 1, len(plan.ops)):
        lane = plan.ops[index].issue_lane
        if lane in followed or any(other in after for other in plan.wait_indices[index]):
            after.add(index)
            followed.add(lane)
    return after


@settings(max_examples=30, deadline=None)
@given(plans())
def test_release_after_is_the_first_op_that_follows(plan):
    for consumer in range(0, len(plan.ops), max(1, len(plan.ops) // 15)):
        after = reached(plan, consumer)
        for lane in (Lane.COMPUTE, Lane.COMM, Lane.GATHER):
            if lane is plan.ops[consumer].issue_lane:
                assert plan.release_after(consumer, lane) == consumer
                continue
            expected = [index for index in sorted(after) if plan.ops[index].issue_lane is lane]
            assert plan.release_after(consumer, lane) == (expected[0] if expected else len(plan.ops))


def test_equal_plans_are_one_key():
    first, second = (build_plan(num_layers=2, num_microbatches=2) for _ in range(2))
    other = build_plan(num_layers=2, num_microbatches=3)
    assert first is not second
    assert {first: "plan"}[second] == "plan"
    assert first != other


def test_excerpt_points_at_the_op():
    plan = build_plan(num_layers=1, num_microbatches=1)
    text = plan.excerpt(3, radius=1).splitlines()
    assert [line.split()[:3] for line in text] == [
        ["2", "F0.L0.dispatch", "comm"],
        ["-->", "3", "F0.L0.experts"],
        ["4", "F0.L0.combine", "comm"],
    ]


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"moe_layers": [2]}, "moe_layers"),
        ({"moe_layers": [-1]}, "moe_layers"),
        ({"num_mtp_layers": -1}, "num_mtp_layers"),
        ({"pp": 3}, "pp"),
        ({"vpp": 2}, "vpp"),
        ({"rank": 1}, "rank"),
        ({"units": ["L7"]}, "units"),
        ({"trainable_units": ["head"]}, "trainable_units"),
    ],
)
def test_values_that_cannot_work_are_refused(arguments, flag):
    with pytest.raises(ConfigError, match=f"^{flag}=.*use "):
        build_plan(**{"num_layers": 2, "num_microbatches": 2, "sharded": True} | arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty text"),
        ("F0.embedding compute", "a plan starts with a line"),
        ("plan num_layers=1 num_microbatches=1 colour=red", "unknown field 'colour'"),
        ("plan num_layers=1 num_microbatches=1\nF0.embedding comm", "runs on lane compute"),
        ("plan num_layers=1 num_microbatches=1\nnonsense", "cannot read an op"),
        ("plan num_layers=one num_microbatches=1", "cannot read num_layers"),
        ("plan num_layers=1 num_microbatches=1 sharded=maybe", "cannot read sharded"),
        ("plan num_microbatches=1", "num_layers is missing"),
    ],
)
def test_unreadable_plans_are_refused(text, message):
    with pytest.raises(PlanError, match=message):
        Plan.parse(text)


LARGE_PLAN = """
import time
from combined_1f1b.schedule import build_plan, simulate

def yardstick():
    start = time.process_time()
    table = {("op", i % 64, i): [i] for i in range(400_000)}
    sum(len(values) for values in table.values())
    return time.process_time() - start

before = yardstick()
start = time.process_time()
plan = build_plan(num_layers=64, num_microbatches=128, sharded=True, pair_head_and_tail=True)
plan.validate()
simulate(plan)
taken = time.process_time() - start
print(taken, (before + yardstick()) / 2)
"""

YARDSTICK = 0.3
"""Seconds that `yardstick` in LARGE_PLAN takes on the processor for which the bar of 3 s was set (measured, idle)."""


def test_a_large_plan_takes_under_three_seconds():
    """64 layers x 128 micro-batches, in a process of its own: in this one the collector walks the heap of all tests.

    The best of up to three. A processor that is slower, or busy with others' work, is given the more time that fixed
    work of the same kind takes it.
    """
    taken = []
    for _ in range(3):
        output = subprocess.run([sys.executable, "-c", LARGE_PLAN], capture_output=True, text=True, check=True).stdout
        seconds, yardstick = map(float, output.split())
        taken.append(seconds / max(1.0, yardstick / YARDSTICK))
        if taken[-1] < 3.0:
            break
    assert min(taken) < 3.0, taken


def test_plans_grow_linearly():
    """Ops of a plan are an exact linear function of the micro-batches and of the layers."""

    def size(num_layers, num_microbatches):
        return len(build_plan(num_layers=num_layers, num_microbatches=num_microbatches, sharded=True).ops)

    by_microbatch = [size(4, n) for n in range(2, 8)]
    by_layer = [size(n, 4) for n in range(4, 16, 2)]
    for sizes in (by_microbatch, by_layer):
        steps = {after - before for before, after in pairwise(sizes)}
        assert len(steps) == 1, sizes
