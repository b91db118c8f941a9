"""The streams behind a plan's lanes, forked from the caller's stream when ops are issued, joined after the last one.

compute         the caller's current stream: the step runs where the caller works, captured or not
comm            Megatron's own communication stream, on which its modules also put work
gather          the sharding driver's all-gather stream, which the driver forks and joins itself
reduce          the sharding driver's reduction stream; BEGIN_BACKWARD forks it, once per micro-batch backward
previous, next  where a pipeline's tensors go from and to a neighbouring rank: what is sent waits for its node alone
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import get_comm_stream, set_streams

from combined_1f1b.schedule.ops import Lane


class Lanes:
    """Stream of each lane for one iteration.

    Args:
        gather: the driver's all-gather stream, or None when nothing is sharded.
        high_priority: give the communication stream high priority when it is first made.
        links: the streams of the lanes PREVIOUS and NEXT, where the plan's own ops transfer tensors.
    """

    def __init__(self, *, gather: Any, high_priority: bool, links: tuple[Any, Any] | None = None) -> None:
        set_streams(high_priority=high_priority)
        self.compute = torch.cuda.current_stream()
        self.comm = get_comm_stream()
        self.streams: dict[Lane, Any] = {Lane.COMPUTE: self.compute, Lane.COMM: self.comm, Lane.GATHER: gather}
        # Without links Megatron makes the transfers, on the caller's stream.
        self.streams[Lane.PREVIOUS], self.streams[Lane.NEXT] = links or (self.compute, self.compute)
        self._forked = [self.comm, *(links or ())]

    def fork(self) -> None:
        """Let the lanes start after what the caller has issued: they see its weights and enter its capture."""
        for stream in self._forked:
            stream.wait_stream(self.compute)

    def join(self) -> None:
        """Let the caller's stream continue after the lanes."""
        for stream in self._forked:
            self.compute.wait_stream(stream)
