"""The plans of all ranks together: what is refused, and that the simulated deadlocks are real ones."""

from __future__ import annotations

import pytest
from plan_cases import ranks

from combined_1f1b.errors import PlanError
from combined_1f1b.schedule import Op, Plan, build_plan, validate_ranks
from combined_1f1b.schedule.ops import TRANSFER_KINDS
from combined_1f1b.schedule.passes import add_waits
from combined_1f1b.schedule.ranks import check_deadlock

pytestmark = pytest.mark.world_size(1)


def pipeline(**arguments) -> list[Plan]:
    return ranks(**{"num_layers": 4, "num_microbatches": 6, "pp": 4, "moe_layers": ()} | arguments)


def reordered(plan: Plan, name: str, *, before: str) -> Plan:
    """The plan with one op moved, and the waits that it then needs."""
    ops = [op.with_waits(()) for op in plan.ops]
    names = [op.name for op in ops]
    moved = ops.pop(names.index(name))
    names.remove(name)
    ops.insert(names.index(before), moved)
    return Plan(plan.shape, add_waits(plan.shape, tuple(ops)))


def replaced(plans: list[Plan], plan: Plan) -> list[Plan]:
    return [plan if other.shape.rank == plan.shape.rank else other for other in plans]


def test_valid_in_any_order_with_peers():
    plans = pipeline()
    validate_ranks(plans[::-1] + plans)


@pytest.mark.parametrize("plans", [[], pipeline()[1:], pipeline()[:-1]])
def test_missing_ranks(plans):
    with pytest.raises(PlanError, match="plans of ranks"):
        validate_ranks(plans)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"num_microbatches": 7}, "num_microbatches"),
        ({"layer_counts": (2, 1, 1, 0)}, "stage_layers"),
        ({"num_layers": 8}, "num_layers"),
    ],
)
def test_ranks_of_different_runs(other, field):
    with pytest.raises(PlanError, match=f"differ in {field}"):
        validate_ranks(replaced(pipeline(), pipeline(**other)[1]))


def test_transfers_in_another_order():
    """Rank 1 receives F1 before F0: it has no use for the order, but its neighbour sends F0 first."""
    plans = pipeline()
    with pytest.raises(PlanError, match=r"rank 0: op \d+, SEND_F0: its neighbour receives RECV_F1"):
        validate_ranks(replaced(plans, reordered(plans[1], "RECV_F1", before="RECV_F0")))


def test_neighbours_that_meet_their_transfers_in_different_orders_wait_for_ever():
    """Rank 2 sends B0 before it receives F4, which rank 1 sends before it receives B0.

    Large messages of NCCL on one communicator hang so; buffered ones do not.
    """
    plans = pipeline()
    bad = replaced(plans, reordered(plans[2], "RECV_F4", before="RECV_B1"))
    check_deadlock(bad, buffered=True)
    with pytest.raises(PlanError, match="wait for each other") as caught:
        validate_ranks(bad)
    assert "rank 2 waits for rank 1 at op" in str(caught.value)
    assert "SEND_B0" in str(caught.value)
    assert "rank 1 waits for rank 2 at op" in str(caught.value)


def test_a_ring_of_chunks_needs_its_transfers_in_groups():
    plans = pipeline(num_layers=8, num_microbatches=8, vpp=2)
    check_deadlock(plans, buffered=False, grouped=True)
    check_deadlock(plans, buffered=True, grouped=False)
    with pytest.raises(PlanError, match="wait for each other"):
        check_deadlock(plans, buffered=False, grouped=False)


def test_a_receive_of_what_is_never_sent():
    plans = pipeline()
    silent = Plan(plans[3].shape, tuple(op for op in plans[3].ops if op.name != "SEND_B5"))
    with pytest.raises(PlanError, match="wait for each other"):
        check_deadlock(replaced(plans, silent), buffered=True)
    with pytest.raises(PlanError, match="SEND_B5 is missing"):
        validate_ranks(replaced(plans, silent))


def test_peers_with_different_orders():
    """Expert-parallel peers that issue two all-to-alls of one group crosswise hang, at scale only."""
    arguments = {"moe_layers": None, "num_layers": 8}
    plans = pipeline(**arguments)
    other_compute = build_plan(num_microbatches=6, pp=4, rank=2, early_attention_release=True, **arguments)
    validate_ranks([*plans, other_compute])
    crossed = reordered(plans[2], "B0.L5.dispatch", before="F3.L4.dispatch")
    crossed.validate()
    with pytest.raises(PlanError, match=r"F3\.L4\.dispatch: peers issue collectives in different orders"):
        validate_ranks([*plans, crossed])


def test_more_micro_batches_than_the_formula():
    """Rank 3 runs all its forwards first."""
    plans = pipeline()
    shape = plans[3].shape
    ops = [op.with_waits(()) for op in plans[3].ops]
    forwards = [op for op in ops if op.name.startswith(("F", "RECV_F"))]
    others = [op for op in ops if not op.name.startswith(("F", "RECV_F"))]
    greedy = Plan(shape, add_waits(shape, (*forwards, *others)))
    with pytest.raises(PlanError, match="rank 3 holds 6 micro-batches at one time, more than 2"):
        validate_ranks(replaced(plans, greedy))


def test_transfers_of_the_last_rank_are_those_of_its_neighbour():
    plans = pipeline()
    names = [[op.name for op in plan.ops if op.kind in TRANSFER_KINDS] for plan in plans]
    assert {name[:4] for name in names[0]} == {"SEND", "RECV"}
    assert len(names[0]) == len(names[3]) == 2 * 6
    assert len(names[1]) == len(names[2]) == 4 * 6
    assert all(Op.parse(name).name == name for row in names for name in row)
