"""Checks of a plan. Each bad plan is refused at its first bad op, with the plan around it.

What an op needs is asked of `dependencies`. This file adds what concerns lanes: waits name earlier ops of other lanes,
and every dependency on another lane is covered by a wait, directly or through what the waited-for op has seen.
"""

from __future__ import annotations

from combined_1f1b.schedule.dependencies import LANE_NUMBER, dependencies
from combined_1f1b.schedule.excerpt import bad_op
from combined_1f1b.schedule.plan import Plan


def validate(plan: Plan) -> None:
    """Check a plan.

    Raises:
        PlanError: the plan breaks a rule; the message names the first bad op and shows the plan around it.
    """
    ops = plan.ops
    needed = dependencies(plan.shape, ops)
    lanes = [LANE_NUMBER[op.issue_lane] for op in ops]
    for index, waits in enumerate(plan.wait_indices):
        for other in waits:
            if lanes[other] == lanes[index]:
                lane = ops[index].issue_lane.value
                raise bad_op(ops, index, f"waits for {ops[other].name}, which is issued on its own lane {lane}")
    for index, clock in enumerate(plan.clocks):
        for other in needed[index]:
            if clock[lanes[other]] < other:
                raise bad_op(
                    ops,
                    index,
                    f"does not wait for {ops[other].name} (op {other}) on lane {ops[other].issue_lane.value}",
                )
