"""Issue a plan's ops, one after the other, each on its lane after its waits. Nothing here decides an order.

    for op in plan:  wait on the op's lane  ->  drop what no lane reads any more  ->  handlers[op.kind](op)  ->  record

A handler returns references that have to outlive the lanes' use of them (see `node.py`); the plan says at which op the
allocating lane has caught up, and they are dropped once that op's waits are issued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from combined_1f1b.schedule.ops import NODE_KINDS, Kind, Lane, Op
from combined_1f1b.schedule.plan import Plan
from combined_1f1b.schedule.streams import Lanes


class Issue(NamedTuple):
    """One op as the executor needs it.

    Attributes:
        index: position in the plan.
        op: the op.
        lane: the lane whose stream issues it.
        waits: indices of the ops whose events its lane waits for.
        signals: whether another lane waits for it.
        release: index of the op at which its held references are dropped; its own index if there are none.
        is_last_reduction: whether it is its unit's last REDUCE.
    """

    index: int
    op: Op
    lane: Lane
    waits: tuple[int, ...]
    signals: bool
    release: int
    is_last_reduction: bool


Handler = Callable[[Issue], Any]

_OTHER_LANE = {Lane.COMPUTE: Lane.COMM, Lane.COMM: Lane.COMPUTE}


@lru_cache(maxsize=64)
def compile_plan(plan: Plan) -> tuple[Issue, ...]:
    """Look up once per plan what the loop would otherwise look up at every op."""
    neighbour: dict[tuple[Kind, int | None, int], Lane] = {}
    issues = []
    for index, op in enumerate(plan.ops):
        release = index
        if op.kind in NODE_KINDS:
            flow = (op.kind, op.microbatch, plan.shape.chunk_of[op.stage])
            # What a W op reads came from its backward, which may have it from either lane.
            if op.kind is Kind.WEIGHT or neighbour.get(flow, op.lane) is not op.lane:
                release = plan.release_after(index, _OTHER_LANE[op.lane])
            neighbour[flow] = op.lane
        issues.append(
            Issue(
                index=index,
                op=op,
                lane=op.issue_lane,
                waits=plan.wait_indices[index],
                signals=index in plan.signals,
                release=release,
                is_last_reduction=index in plan.last_reductions,
            )
        )
    return tuple(issues)


class Carried(NamedTuple):
    """What ops leave for later ops, also for those of a later call of `execute`.

    Attributes:
        events: op index -> the event recorded after it.
        held: op index -> references that are dropped there.
    """

    events: dict[int, Any]
    held: dict[int, list[Any]]


def execute(
    plan: Plan,
    *,
    lanes: Lanes,
    handlers: Mapping[Kind, Handler],
    start: int = 0,
    end: int | None = None,
    carried: Carried | None = None,
) -> None:
    """Issue the plan's ops from `start` to before `end`, all of them by default.

    The side lanes are forked from the caller's stream before the first op and joined to it after the last one. The
    caller's stream is current again afterwards, also after a failure.

    Backwards run in this thread: handing each node's backward to one of the engine's threads costs more than issuing
    it.

    Args:
        plan: the iteration's plan.
        lanes: its streams.
        handlers: what to do for each kind of op.
        carried: the same object for every call with ops of one iteration.

    Raises:
        Exception: whatever a handler raises, unchanged, with the plan around the op as a note.
    """
    streams, current = lanes.streams, lanes.compute
    events, held = carried or Carried({}, {})
    index = -1
    lanes.fork()
    held.clear()  # the lanes have met twice since the call before: at its end, and now
    try:
        with torch.autograd.set_multithreading_enabled(False):
            for issue in compile_plan(plan)[start:end]:
                index, op, lane, waits, signals, release, _ = issue
                stream = streams[lane]
                if stream is not current:
                    torch.cuda.set_stream(stream)
                    current = stream
                for awaited in waits:
                    stream.wait_event(events[awaited])
                held.pop(index, None)
                references = handlers[op.kind](issue)
                if release > index and references:
                    held.setdefault(release, []).append(references)
                del references  # what nothing has to hold is free before the next op allocates
                if signals:
                    events[index] = stream.record_event()
    except Exception as error:
        if index >= 0:
            error.add_note(f"while issuing op {index}, {plan.ops[index].name}, of the plan:\n{plan.excerpt(index)}")
        raise
    finally:
        torch.cuda.set_stream(lanes.compute)
    lanes.join()  # what is held to the end may go only after this
