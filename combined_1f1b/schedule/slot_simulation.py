"""How long the slots of all pipeline ranks take, each as one block: what the number of warm-up forwards is chosen by.

A slot starts when its rank is free and everything that enters it is there, and all that leaves it leaves at its end. So
neither traffic nor the order of nodes inside a slot counts here; `simulate_ranks` has both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from combined_1f1b.schedule.pipeline_order import Slot


def slot_makespan(
    rows: Sequence[Sequence[Slot]], *, vpp: int = 1, forward: float = 1.0, backward: float = 2.0
) -> float:
    """Return the time of an iteration.

    Args:
        rows: every rank's slots.
        vpp: model chunks of each rank.
        forward, backward: time of one micro-batch through one chunk; a pair takes the sum.
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
        flows = [
            (kind, call.microbatch, call.chunk * pp + rank)
            for kind, call in zip((True, False), slot, strict=True)
            if call
        ]
        needed = []
        for is_forward, microbatch, stage in flows:
            if is_forward and stage > 0:
                needed.append((True, microbatch, stage - 1))
            if not is_forward:
                needed.append((False, microbatch, stage + 1) if stage < last else (True, microbatch, stage))
        if all(flow in done for flow in needed):
            start = max([free[rank], *(done[flow] for flow in needed)])
            free[rank] = start + sum(forward if kind else backward for kind, _, _ in flows)
            done |= dict.fromkeys(flows, free[rank])
            at[rank] += 1
            idle = 0
        else:
            idle += 1
            assert idle <= len(waiting) + 1, "the ranks wait for each other"
        if at[rank] < len(rows[rank]):
            waiting.append(rank)
    return max(free)
