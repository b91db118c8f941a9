"""How long the slots of all pipeline ranks take, each as one block: what the number of warm-up forwards is chosen by.

A slot starts when its rank is free and everything that enters it is there, and all that leaves it leaves at its end. So
neither traffic nor the order of nodes inside a slot counts here; `simulate_ranks` has both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from combined_1f1b.schedule.pipeline_order import Slot


def slot_makespan(
    rows: Sequence[Sequence[Slot]],
    *,
    vpp: int = 1,
    forward: float = 1.0,
    backward: float = 2.0,
    traffic: float = 0.0,
) -> float:
    """Return the time of an iteration.

    Args:
        rows: every rank's slots.
        vpp: model chunks of each rank.
        forward, backward: compute of one micro-batch through one chunk.
        traffic: all-to-alls of one direction. Alone, a flow takes the sum of both; two together hide one another's.
    """
    pp = len(rows)
    last = pp * vpp - 1
    done: dict[tuple[bool, int, int], float] = {}  # (forward, micro-batch, pipeline stage) -> end
    free = [0.0] * pp
    at = [0] * pp
    waiting = deque(range(pp))
    idle = 0
    while waiting:
        rank = waiting.popleft()
        slot = rows[rank][at[rank]]
        flows = [(True, call.microbatch, call.chunk * pp + rank) for call in slot.forwards]
        flows += [(False, call.microbatch, call.chunk * pp + rank) for call in slot.backwards]
        needed = [flow for flow in (_needed(*flow, last) for flow in flows) if flow]
        if all(flow in done for flow in needed):
            compute = forward * len(slot.forwards) + backward * len(slot.backwards)
            takes = compute + traffic if len(flows) == 1 else max(compute, 2 * traffic)
            free[rank] = max([free[rank], *(done[flow] for flow in needed)]) + takes
            done |= dict.fromkeys(flows, free[rank])
            at[rank] += 1
            idle = 0
        else:
            idle += 1
            assert idle <= len(waiting) + 1, "the ranks wait for each other"
        if at[rank] < len(rows[rank]):
            waiting.append(rank)
    return max(free)


def _needed(forward: bool, microbatch: int, stage: int, last: int) -> tuple[bool, int, int] | None:
    """What a flow takes: the forward of the stage before, the backward of the stage after, or its own forward."""
    if forward:
        return (True, microbatch, stage - 1) if stage else None
    return (False, microbatch, stage + 1) if stage < last else (True, microbatch, stage)
