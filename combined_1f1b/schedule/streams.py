"""The streams behind a plan's lanes, forked from the caller's stream when an iteration starts, joined at its end.

compute   the caller's current stream: the step runs where the caller works, captured or not
comm      Megatron's own communication stream, on which its modules also put work
gather    the sharding driver's all-gather stream, which the driver forks and joins itself
reduce    the sharding driver's reduction stream; BEGIN_BACKWARD forks it, once per micro-batch backward
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
    """

    def __init__(self, *, gather: Any, high_priority: bool) -> None:
        set_streams(high_priority=high_priority)
        self.compute = torch.cuda.current_stream()
        self.comm = get_comm_stream()
        self.streams: dict[Lane, Any] = {Lane.COMPUTE: self.compute, Lane.COMM: self.comm, Lane.GATHER: gather}

    def fork(self) -> None:
        """Let the comm lane start after what the caller has issued: it sees its weights and enters its capture."""
        self.comm.wait_stream(self.compute)

    def join(self) -> None:
        """Let the caller's stream continue after the comm lane."""
        self.compute.wait_stream(self.comm)
