"""Part of a plan as text with an arrow at one op, for error messages."""

from __future__ import annotations

from collections.abc import Sequence

from combined_1f1b.errors import PlanError
from combined_1f1b.schedule.ops import Op


def excerpt(ops: Sequence[Op], index: int, radius: int = 5) -> str:
    """Return the lines around `ops[index]`, numbered as in the plan, with an arrow at it."""
    first, last = max(0, index - radius), min(len(ops), index + radius + 1)
    width = len(str(last))
    lines = [f"{'-->' if i == index else '   '} {i:>{width}}  {ops[i].line}" for i in range(first, last)]
    return "\n".join(lines)


def bad_op(ops: Sequence[Op], index: int, reason: str) -> PlanError:
    """Build the error for `ops[index]`; an index past the end means that the plan ends too early."""
    if index < len(ops):
        return PlanError(f"op {index}, {ops[index].name}: {reason}\n{excerpt(ops, index)}")
    tail = excerpt(ops, len(ops) - 1) if ops else "(no ops)"
    return PlanError(f"end of the plan: {reason}\n{tail}")
