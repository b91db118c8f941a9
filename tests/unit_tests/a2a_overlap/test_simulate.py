"""Exact overlap counts, closed forms of simulated times, and what head and tail pairing costs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from plan_cases import pipelines, plans, ranks

from combined_1f1b.schedule import PlanShape, build_plan, simulate, simulate_ranks
from combined_1f1b.schedule.ops import Kind, Lane
from combined_1f1b.schedule.pipeline_order import Slot, calls, pair_up, slots
from combined_1f1b.schedule.simulate import CostModel
from combined_1f1b.schedule.slot_simulation import slot_makespan

pytestmark = pytest.mark.world_size(1)


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("sharded", [False, True])
def test_all_traffic_but_the_first_forward_and_the_last_backward_has_a_partner(num_layers, num_microbatches, sharded):
    plan = build_plan(num_layers=num_layers, num_microbatches=num_microbatches, sharded=sharded)
    simulation = simulate(plan)
    assert simulation.comm_ops == 4 * num_layers * num_microbatches
    assert simulation.comm_ops_under_partner == 4 * num_layers * (num_microbatches - 1)


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("num_microbatches", [2, 3, 8])
@pytest.mark.parametrize("sharded", [False, True])
def test_with_head_and_tail_paired_two_ops_are_left_alone(num_layers, num_microbatches, sharded):
    """The tail's first dispatch, beside which the second backward has a norm, and its last, beside an embedding."""
    plan = build_plan(
        num_layers=num_layers, num_microbatches=num_microbatches, sharded=sharded, pair_head_and_tail=True
    )
    simulation = simulate(plan)
    assert simulation.comm_ops == 4 * num_layers * num_microbatches
    assert simulation.comm_ops - simulation.comm_ops_under_partner == 2


def test_one_microbatch_has_no_partner_even_when_paired():
    assert simulate(build_plan(num_layers=3, num_microbatches=1, pair_head_and_tail=True)).comm_ops_under_partner == 0


def test_dense_layers_have_no_traffic():
    simulation = simulate(build_plan(num_layers=3, num_microbatches=3, moe_layers=()))
    assert simulation.comm_ops == simulation.comm_ops_under_partner == simulation.comm_busy == 0
    assert simulation.hidden_fraction == 1.0
    assert simulation.makespan == pytest.approx(simulation.compute_busy)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 16])
def test_hidden_fraction_without_pairing(num_microbatches):
    """Exactly the first forward's and the last backward's traffic is exposed."""
    simulation = simulate(build_plan(num_layers=4, num_microbatches=num_microbatches))
    assert simulation.hidden_fraction == pytest.approx(1 - 1 / num_microbatches)
    assert simulation.makespan == pytest.approx(simulation.compute_busy + simulation.exposed_comm)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("num_microbatches", [2, 3, 4, 16])
def test_pairing_and_delayed_weight_gradients_hide_everything(sharded, num_microbatches):
    plan = build_plan(
        num_layers=4, num_microbatches=num_microbatches, sharded=sharded, pair_head_and_tail=True, delay_wgrad=True
    )
    simulation = simulate(plan)
    assert simulation.exposed_comm == pytest.approx(0.0)
    assert simulation.hidden_fraction == pytest.approx(1.0)


@pytest.mark.parametrize("num_microbatches", [2, 3, 4, 16])
def test_pairing_alone_leaves_at_most_two_all_to_alls(num_microbatches):
    """The first backward dispatch of the tail has only a norm beside it, the last one only the embedding."""
    cost = CostModel()
    plan = build_plan(num_layers=4, num_microbatches=num_microbatches, pair_head_and_tail=True)
    assert 0 < simulate(plan, cost).exposed_comm <= 2 * cost.dispatch


def test_gathers_and_reductions_stay_off_the_critical_path():
    """With parameters gathered one layer ahead, a sharded plan is longer by its ends and by packing only."""
    cost = CostModel()
    for paired in (False, True):
        arguments = {"num_layers": 4, "num_microbatches": 8, "pair_head_and_tail": paired, "delay_wgrad": True}
        plain = simulate(build_plan(**arguments), cost)
        plan = build_plan(**arguments, sharded=True)
        sharded = simulate(plan, cost)
        packing = sharded.compute_busy - plain.compute_busy
        first_gathers = 3 * cost.gather
        last_reductions = 3 * cost.reduce
        assert sharded.makespan - plain.makespan <= packing + first_gathers + last_reductions


@pytest.mark.parametrize(
    ("num_microbatches", "plain", "paired"), [(1, 1, 1), (2, 2, 2), (3, 2, 3), (4, 2, 3), (16, 2, 3)]
)
def test_peak_microbatches(num_microbatches, plain, paired):
    """Pairing costs the activations of one more micro-batch."""
    for expected, pair_head_and_tail in ((plain, False), (paired, True)):
        plan = build_plan(
            num_layers=2, num_microbatches=num_microbatches, pair_head_and_tail=pair_head_and_tail, delay_wgrad=True
        )
        assert simulate(plan).peak_microbatches == expected


def test_costs_are_used():
    cost = CostModel(
        embedding=1,
        attention=10,
        dispatch=100,
        experts=1000,
        combine=10_000,
        final_norm=2,
        output_layer=3,
        loss=4,
        backward=3,
        weight=2,
    )
    forward = 1 + 10 + 1000 + 2 + 3 + 4
    simulation = simulate(build_plan(num_layers=1, num_microbatches=1), cost)
    assert simulation.compute_busy == forward * (1 + 3)
    assert simulation.comm_busy == 2 * 10_100
    assert simulation.makespan == simulation.compute_busy + simulation.comm_busy
    # Split weight gradients take nothing away in total; W of the experts hides all of the dispatch here.
    split = simulate(build_plan(num_layers=1, num_microbatches=1, delay_wgrad=True), cost)
    assert split.compute_busy == simulation.compute_busy
    assert split.makespan == simulation.makespan - 100


def test_unit_scale_makes_a_unit_larger():
    plan = build_plan(num_layers=1, num_microbatches=1, sharded=True, moe_layers=())
    small = simulate(plan, CostModel(unit_scale={}))
    large = simulate(plan, CostModel(unit_scale={"embedding": 50.0}))
    assert large.makespan > small.makespan + 49 * CostModel().gather


@settings(max_examples=80, deadline=None)
@given(plans())
def test_spans_obey_the_plan(plan):
    simulation = simulate(plan)
    issued: dict[int, tuple[float, float]] = {}
    lane_end = dict.fromkeys(Lane, 0.0)
    for span in simulation.spans:
        op = plan.ops[span.op_index]
        assert lane_end[span.lane] <= span.start <= span.end
        lane_end[span.lane] = span.end
        if span.op_index not in issued:
            assert span.lane is op.issue_lane
            issued[span.op_index] = (span.start, span.end)
            for other in plan.wait_indices[span.op_index]:
                assert span.start >= issued[other][1]
        else:
            assert (op.kind, span.lane) == (Kind.REDUCE, Lane.REDUCE)
            assert span.start >= issued[span.op_index][1]
    assert len(issued) == len(plan.ops)
    assert simulation.makespan == max(lane_end.values())
    assert 0 <= simulation.hidden_fraction <= 1 + 1e-9
    assert math.isclose(simulation.exposed_comm, simulation.comm_busy * (1 - simulation.hidden_fraction), abs_tol=1e-9)
    assert simulation.makespan >= simulation.compute_busy - 1e-9
    assert simulation.comm_ops_under_partner <= simulation.comm_ops


def plain_slots(shape: PlanShape) -> list[Slot]:
    """Megatron's 1F1B without pairs: pp - 1 - rank forwards, then one forward and one backward in turn."""
    warmup = min(shape.pp - 1 - shape.rank, shape.num_microbatches)
    row = pair_up(*calls(shape), warmup)
    return [part for slot in row for part in (Slot(slot.forwards, ()), Slot((), slot.backwards)) if any(part)]


def shapes(pp: int, num_microbatches: int, **more) -> list[PlanShape]:
    return [PlanShape(num_layers=pp, num_microbatches=num_microbatches, pp=pp, rank=rank, **more) for rank in range(pp)]


@pytest.mark.parametrize("pp", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("factor", [1, 2, 4, 8])
def test_pairs_cost_no_time_with_enough_warm_up_forwards(pp, factor):
    """As long as plain 1F1B, whose traffic costs nothing here. With pp - rank warm-up forwards, 1.6 to 1.9 times."""
    every = shapes(pp, factor * pp)
    plain = slot_makespan([plain_slots(shape) for shape in every])
    assert plain == 3 * (factor * pp + pp - 1)
    assert slot_makespan([slots(shape) for shape in every]) == plain
    short = slot_makespan([pair_up(*calls(shape), pp - shape.rank) for shape in every])
    if factor >= 4:
        assert 1.6 <= short / plain <= 1.9


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_one_warm_up_forward_less_on_any_rank_costs_time(pp):
    every = shapes(pp, 4 * pp)
    best = slot_makespan([slots(shape) for shape in every])
    for rank in range(pp - 1):
        rows = [pair_up(*calls(shape), 2 * (pp - 1 - shape.rank) + 1 - (shape.rank == rank)) for shape in every]
        assert slot_makespan(rows) > best


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_when_pairing_head_and_tail_pays(pp):
    """From a traffic of (pp - 1) / (2 pp) of a pair's compute, as long as a forward is bound by compute."""
    forward, backward, count = 1.0, 2.0, 4 * pp
    border = (pp - 1) / (2 * pp) * (forward + backward)
    for traffic in (0.0, 0.4, 0.7, 0.8, 1.0):
        plain, paired = (
            slot_makespan([slots(shape) for shape in shapes(pp, count, pair_head_and_tail=flag)], traffic=traffic)
            for flag in (False, True)
        )
        assert plain - paired == pytest.approx(2 * pp * (traffic - border))
        assert (paired < plain) == (traffic > border)


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("transfer", [0.0, 0.4])
def test_transfers_and_all_to_alls_of_the_steady_state_are_hidden(vpp, transfer):
    """One more round of micro-batches takes exactly the slowest rank's compute, which is the last one's.

    A gradient's way and the combine after it fit beside the attention of the forward that runs with it: 0.4 + 0.6 of 1.
    """
    pp = 4

    def simulated(count):
        cost = CostModel(transfer=transfer)
        return simulate_ranks(ranks(num_layers=8, num_microbatches=count, pp=pp, vpp=vpp), cost)

    few, more = simulated(4 * pp), simulated(5 * pp)
    took = max(result.makespan for result in more) - max(result.makespan for result in few)
    compute = [b.compute_busy - a.compute_busy for a, b in zip(few, more, strict=True)]
    assert max(compute) == compute[-1]
    assert took == pytest.approx(compute[-1])
    assert more[-1].exposed_comm == pytest.approx(few[-1].exposed_comm)


def test_a_rank_by_itself_never_waits_for_its_neighbours():
    """Alone, a rank takes its compute and what traffic is exposed; with its neighbours there is the bubble too."""
    plans = ranks(num_layers=4, num_microbatches=8, pp=2)
    for plan, result in zip(plans, simulate_ranks(plans), strict=True):
        alone = simulate(plan)
        assert alone.makespan < result.makespan
        assert alone.compute_busy == pytest.approx(result.compute_busy)


@settings(max_examples=40, deadline=None)
@given(pipelines())
def test_a_receive_ends_with_its_send_or_later(plans):
    sent: dict[tuple[str, int], float] = {}
    results = simulate_ranks(plans)
    for plan, result in zip(plans, results, strict=True):
        for span in result.spans:
            op = plan.ops[span.op_index]
            stage = (
                plan.shape.chunks[plan.shape.chunk_of[op.stage]].pipeline_stage
                if op.stage in plan.shape.chunk_of
                else 0
            )
            if op.kind is Kind.SEND_FORWARD:
                sent[f"F{op.microbatch}", stage + 1] = span.end
            elif op.kind is Kind.SEND_BACKWARD:
                sent[f"B{op.microbatch}", stage - 1] = span.end
    received = 0
    for plan, result in zip(plans, results, strict=True):
        for span in result.spans:
            op = plan.ops[span.op_index]
            if op.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
                stage = plan.shape.chunks[plan.shape.chunk_of[op.stage]].pipeline_stage
                flow = "F" if op.kind is Kind.RECEIVE_FORWARD else "B"
                assert span.end >= sent[f"{flow}{op.microbatch}", stage]
                received += 1
    assert received == len(sent)
