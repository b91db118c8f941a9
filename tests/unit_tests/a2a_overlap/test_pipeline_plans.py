"""Plans of pipeline ranks: small ones written out by hand, and properties of all."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from plan_cases import pipelines, ranks

from combined_1f1b.errors import ConfigError, PlanError
from combined_1f1b.schedule import Op, Plan, PlanShape, build_plan, validate_ranks
from combined_1f1b.schedule.ops import FLOW_KINDS, NODE_KINDS, TRANSFER_KINDS, Kind, Lane
from combined_1f1b.schedule.pipeline_order import Call, peak_live_forwards, slots, warmup_forwards
from combined_1f1b.schedule.plan import Pairs
from combined_1f1b.schedule.simulate import peak_microbatches

pytestmark = pytest.mark.world_size(1)


def flows(plan: Plan) -> str:
    """The plan's transfers and, for all nodes of a flow, its letter and micro-batch, with | between paired ones."""
    words: list[str] = []
    for forwards, backwards, start, end in plan.fragments:
        ops = plan.ops[start:end]
        first = next(index for index, op in enumerate(ops) if op.kind in FLOW_KINDS)
        words += [op.name for op in ops[:first]]
        words.append(
            "|".join([f"F{call.microbatch}" for call in forwards] + [f"B{call.microbatch}" for call in backwards])
        )
        words += [op.name for op in ops[first:] if op.kind in TRANSFER_KINDS]
    return " ".join(words)


def test_two_ranks():
    first, last = ranks(num_layers=2, num_microbatches=4, pp=2)
    assert flows(first).split() == [
        *("F0", "SEND_F0", "F1", "SEND_F1", "F2", "SEND_F2", "RECV_B0"),
        *("F3|B0", "SEND_F3", "RECV_B1"),
        *("B1", "RECV_B2", "B2", "RECV_B3", "B3"),
    ]
    # Beside the last rank's forward there is the loss, so its backward ends first; the neighbour still meets F2 before
    # B0 on the link.
    assert flows(last).split() == [
        *("RECV_F0", "F0", "RECV_F1"),
        *("F1|B0", "RECV_F2", "SEND_B0", "F2|B1", "RECV_F3", "SEND_B1", "F3|B2", "SEND_B2"),
        *("B3", "SEND_B3"),
    ]


def test_two_ranks_with_head_and_tail_paired():
    first, last = ranks(num_layers=2, num_microbatches=5, pair_head_and_tail=True, pp=2)
    assert flows(first).split() == [
        *("F0|F1", "SEND_F0", "SEND_F1", "F2", "SEND_F2", "F3", "SEND_F3", "RECV_B0", "F4|B0", "SEND_F4", "RECV_B1"),
        *("B1", "RECV_B2", "B2", "RECV_B3", "RECV_B4", "B3|B4"),
    ]
    assert flows(last).split() == [
        *("RECV_F0", "RECV_F1", "F0|F1", "RECV_F2"),
        *("F2|B0", "RECV_F3", "SEND_B0", "F3|B1", "RECV_F4", "SEND_B1", "F4|B2", "SEND_B2"),
        *("B3|B4", "SEND_B3", "SEND_B4"),
    ]
    assert first.pairs == Pairs(forward_backward_pairs=1, head_pairs=1, tail_pairs=1)
    assert last.pairs == Pairs(forward_backward_pairs=3, head_pairs=1, tail_pairs=1)


def test_a_pair_of_the_middle_rank():
    plan = ranks(num_layers=3, num_microbatches=8, pp=3, delay_wgrad=True)[1]
    fragment = plan.fragments[3]
    assert fragment[:2] == ((Call(3, 3, 0),), (Call(0, 0, 0),))
    assert [op.line.split(None, 1) for op in plan.ops[fragment.start : fragment.end]] == [
        ["BEGIN_BACKWARD.0", "compute"],
        ["B0.L1.combine", "comm     after RECV_B0, BEGIN_BACKWARD.0"],
        ["F3.L1.attention", "compute  after RECV_F3"],
        ["B0.L1.experts", "compute  after B0.L1.combine"],
        ["F3.L1.dispatch", "comm     after F3.L1.attention"],
        ["W0.L1.experts", "compute"],
        ["B0.L1.dispatch", "comm     after B0.L1.experts"],
        ["F3.L1.experts", "compute  after F3.L1.dispatch"],
        ["F3.L1.combine", "comm     after F3.L1.experts"],
        ["SEND_F3", "next     after F3.L1.combine"],
        ["RECV_F4", "previous"],
        ["B0.L1.attention", "compute  after B0.L1.dispatch"],
        ["SEND_B0", "previous after B0.L1.attention"],
        ["RECV_B1", "next"],
        ["W0.L1.attention", "compute"],
    ]


def test_two_ranks_of_two_chunks():
    first, last = ranks(num_layers=4, num_microbatches=2, pp=2, vpp=2)
    assert flows(first).split() == [
        *("F0", "SEND_F0.c0", "F1", "SEND_F1.c0", "RECV_F0.c1", "F0", "SEND_F0.c1", "RECV_F1.c1"),
        *("F1", "SEND_F1.c1", "RECV_B0.c1"),
        *("B0", "SEND_B0.c1", "RECV_B1.c1", "B1", "SEND_B1.c1", "RECV_B0.c0", "B0", "RECV_B1.c0", "B1"),
    ]
    assert flows(last).split() == [
        *("RECV_F0.c0", "F0", "SEND_F0.c0", "RECV_F1.c0", "F1", "SEND_F1.c0", "RECV_F0.c1", "F0", "RECV_F1.c1"),
        *(
            "F1|B0",
            "SEND_B0.c1",
            "B1",
            "SEND_B1.c1",
            "RECV_B0.c0",
            "B0",
            "SEND_B0.c0",
            "RECV_B1.c0",
            "B1",
            "SEND_B1.c0",
        ),
    ]
    assert [stage.name for stage in first.shape.stages] == ["embedding", "L0", "L2"]
    assert [stage.name for stage in last.shape.stages] == ["L1", "L3", "final_norm", "output_layer", "loss"]


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_any_pipeline(plans):
    validate_ranks(plans)
    shape = plans[0].shape
    for plan in plans:
        assert Plan.parse(str(plan)) == plan
        assert peak_microbatches(plan) <= peak_live_forwards(plan.shape)
        if all(chunk.stages for chunk in plan.shape.chunks):
            assert peak_microbatches(plan) == peak_live_forwards(plan.shape)
        begun = Counter(op.name for op in plan.ops if op.kind is Kind.BEGIN_BACKWARD)
        assert len(begun) == begun.total() == shape.num_microbatches * shape.vpp
        reduced = Counter(op.unit for op in plan.ops if op.kind is Kind.REDUCE)
        assert reduced == dict.fromkeys(plan.shape.reduced_units, shape.num_microbatches)
        assert not plan.held_gradients
    # Every node of the model runs on one rank and on no other.
    model = build_plan(
        num_layers=shape.num_layers,
        num_microbatches=shape.num_microbatches,
        moe_layers=shape.moe_layers,
        num_mtp_layers=shape.num_mtp_layers,
        delay_wgrad=shape.delay_wgrad,
        has_final_norm=shape.has_final_norm,
    )
    nodes = [op.name for plan in plans for op in plan.ops if op.kind in NODE_KINDS]
    assert sorted(nodes) == sorted(op.name for op in model.ops if op.kind in NODE_KINDS)


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_fragments_are_the_slots_and_the_whole_plan(plans):
    for plan in plans:
        ops = []
        chunk_of = plan.shape.chunk_of
        for (forwards, backwards, start, end), slot in zip(plan.fragments, slots(plan.shape), strict=True):
            assert (forwards, backwards) == slot
            for op in plan.ops[start:end]:
                if op.kind in FLOW_KINDS:
                    calls = forwards if op.kind in (Kind.FORWARD, Kind.SEND_FORWARD) else backwards
                    assert (op.microbatch, chunk_of[op.stage]) in [call[1:] for call in calls]
            ops += plan.ops[start:end]
        assert tuple(ops) == plan.ops


@pytest.mark.parametrize("vpp", [1, 2, 3])
def test_gathers_come_one_layer_ahead_whatever_chunk_is_next(vpp):
    for plan in ranks(num_layers=4 * vpp, num_microbatches=4, pp=2, vpp=vpp, sharded=True):
        ops, uses = plan.ops, plan.shape.node_units
        first_use_comes_later = plan.fragments[1].start
        gathered: dict[str, int] = {}
        checked = 0
        for index, op in enumerate(ops):
            if op.kind is Kind.GATHER:
                gathered[op.unit] = index
            elif op.kind in NODE_KINDS:
                for unit in uses[op.stage, op.part]:
                    gather = gathered.pop(unit, None)
                    if gather is not None and index >= first_use_comes_later:
                        between = [other for other in ops[gather:index] if other.part and other.lane is Lane.COMPUTE]
                        assert between, f"{unit} is gathered right before {op.name}"
                        checked += 1
        assert checked > 4 * vpp


@pytest.mark.parametrize("pp", range(1, 17))
@pytest.mark.parametrize("paired", [False, True])
def test_any_number_of_ranks_and_micro_batches(pp, paired):
    for count in sorted({1, 2, 3, pp - 1, pp, pp + 1, 2 * pp - 1, 2 * pp, 2 * pp + 3, 4 * pp + 1} - {0}):
        plans = ranks(num_layers=pp, num_microbatches=count, moe_layers=(), pair_head_and_tail=paired, pp=pp)
        validate_ranks(plans)
        for plan in plans:
            rank = plan.shape.rank
            assert warmup_forwards(plan.shape) == min(count, 2 * (pp - 1 - rank) + 1 + paired)
            assert peak_microbatches(plan) == min(count, 2 * (pp - 1 - rank) + 2 + paired)


@pytest.mark.parametrize(
    ("counts", "chunks"),
    [
        # Embedding alone on the first stage, loss alone on the last: the norm is with the loss.
        ((0, 2, 2, 0), ["embedding", "L0 L1", "L2 L3", "final_norm output_layer loss"]),
        ((3, 0, 0, 1), ["embedding L0 L1 L2", "", "", "L3 final_norm output_layer loss"]),
        ((1, 1, 1, 1), ["embedding L0", "L1", "L2", "L3 final_norm output_layer loss"]),
    ],
)
@pytest.mark.parametrize("vpp", [1, 2])
def test_uneven_splits(counts, chunks, vpp):
    pp = 4 // vpp
    plans = ranks(num_layers=4, num_microbatches=4, layer_counts=counts, pp=pp, vpp=vpp, sharded=True)
    validate_ranks(plans)
    held = {chunk.pipeline_stage: chunk for plan in plans for chunk in plan.shape.chunks}
    assert [" ".join(stage.name for stage in held[number].stages) for number in range(4)] == chunks
    assert [held[number].receives for number in range(4)] == [False, True, True, True]
    assert [held[number].sends for number in range(4)] == [True, True, True, False]


def test_prediction_layers_are_on_the_last_stage_and_the_norm_behind_the_last_decoder_layer():
    plans = ranks(num_layers=3, num_microbatches=3, layer_counts=(1, 2, 0), num_mtp_layers=1, pp=3, sharded=True)
    validate_ranks(plans)
    names = [[stage.name for stage in plan.shape.stages] for plan in plans]
    assert names == [["embedding", "L0"], ["L1", "L2", "final_norm"], ["M0", "output_layer", "loss"]]
    # The last stage has a copy of the embedding for its prediction layer, the first one its own.
    assert [("embedding" in plan.shape.gathered_units) for plan in plans] == [True, False, True]


@pytest.mark.parametrize(
    ("tied", "mtp", "unit"), [(False, 0, "output_layer"), (True, 0, "output_layer"), (True, 1, "embedding")]
)
def test_the_output_layers_unit(tied, mtp, unit):
    """A tied output layer on another rank than the embedding has a copy of the weight: a unit of its own."""
    _, last = ranks(num_layers=2, num_microbatches=2, tied_embeddings=tied, num_mtp_layers=mtp, pp=2, sharded=True)
    assert last.shape.node_units["output_layer", ""] == (unit,)


GOOD = {"num_layers": 4, "num_microbatches": 4, "pp": 2}


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"pp": 3}, "pp"),
        ({"pp": 0}, "pp"),
        ({"vpp": 0}, "vpp"),
        ({"vpp": 3}, "vpp"),
        ({"pp": 1, "vpp": 2}, "vpp"),
        ({"num_layers": 2, "vpp": 2}, "vpp"),
        ({"rank": 2}, "rank"),
        ({"rank": -1}, "rank"),
        ({"vpp": 2, "pair_head_and_tail": True}, "pair_head_and_tail"),
        ({"layer_counts": (1, 2)}, "layer_counts"),
        ({"layer_counts": (1, 2, 1)}, "layer_counts"),
        ({"layer_counts": (5, -1)}, "layer_counts"),
        ({"vpp": 2, "num_microbatches": 1}, "num_microbatches"),
        ({"vpp": 2, "num_microbatches": 5}, "num_microbatches"),
        ({"vpp": 2, "microbatch_group_size_per_vp_stage": 1}, "microbatch_group_size_per_vp_stage"),
        ({"vpp": 2, "microbatch_group_size_per_vp_stage": 5}, "microbatch_group_size_per_vp_stage"),
    ],
)
def test_values_that_cannot_work_are_refused(arguments, flag):
    with pytest.raises(ConfigError, match=f"^{flag}=.*; use "):
        build_plan(**GOOD | arguments)


@pytest.mark.parametrize(
    ("edit", "op", "reason"),
    [
        (("drop", "RECV_F0"), "F0.L1.attention", "needs RECV_F0 first"),
        (("drop", "SEND_B1"), "end of the plan", "SEND_B1 is missing"),
        (("late", "SEND_B1"), "SEND_B0", "issued a second time"),
        (("early", "SEND_B1"), "SEND_B1", "needs B1.L1.dispatch first"),
        (("no wait", "SEND_B1"), "SEND_B1", "does not wait for B1.L1.attention"),
        (("no wait", "F1.L1.attention"), "F1.L1.attention", "does not wait for RECV_F1"),
        (("drop", "BEGIN_BACKWARD.1"), "B1.loss", "needs BEGIN_BACKWARD.1 first"),
        (("unknown", "RECV_B0"), "RECV_B0", "the model has no such transfer"),
        (("unknown", "BEGIN_BACKWARD.0.c1"), "BEGIN_BACKWARD.0.c1", "the rank has no such chunk"),
    ],
)
def test_a_bad_plan_of_one_rank(edit, op, reason):
    plan = ranks(num_layers=2, num_microbatches=2, pp=2)[1]
    how, name = edit
    ops = list(plan.ops)
    at = next((index for index, op in enumerate(ops) if op.name == name), 0)
    match how:
        case "drop":
            del ops[at]
        case "late":
            ops[at] = Op.parse("SEND_B0")
        case "early":
            ops.insert(at - 2, ops.pop(at).with_waits(()))
        case "no wait":
            ops[at] = ops[at].with_waits(())
        case "unknown":
            ops.insert(0, Op.parse(name))
    with pytest.raises(PlanError) as caught:
        Plan(plan.shape, tuple(ops)).validate()
    first = str(caught.value).splitlines()[0]
    assert op in first
    assert reason in first


def test_shapes_print_and_parse():
    pipeline = "pp=2 vpp=2 rank=1 microbatch_group_size_per_vp_stage=3 layer_counts=0,1,1,1"
    text = f"plan num_layers=3 num_microbatches=5 {pipeline}"
    shape = PlanShape.parse(text)
    assert shape.layer_counts == shape.stage_layers == (0, 1, 1, 1)
    assert str(shape) == text


LARGE_PLAN = """
import time
from combined_1f1b.schedule import build_plan, simulate
start = time.process_time()
plan = build_plan(num_layers=64, num_microbatches=128, sharded=True, pp=2, vpp=2)
plan.validate()
plan.fragments
simulate(plan)
print(time.process_time() - start)
"""


def test_a_large_plan_takes_under_three_seconds():
    output = subprocess.run([sys.executable, "-c", LARGE_PLAN], capture_output=True, text=True, check=True).stdout
    assert float(output) < 3.0
