"""The driver for one pipeline stage (PP=1): one plan is one iteration.

    F0 | (F1,B0) (F2,B1) ... (F{n-1},B{n-2}) | B{n-1}                      n micro-batches, n-1 pairs
    (F0,F1) | (F2,B0) (F3,B1) ... (F{n-1},B{n-3}) | (B{n-2},B{n-1})        with pair_head_and_tail

Megatron's `forward_backward_no_pipelining` keeps what is around the schedule: timers, finalizing gradients, reports.
"""

from __future__ import annotations

import torch

from combined_1f1b.config import OverlapOptions
from combined_1f1b.schedule.iteration import Iteration, Pipeline, StepReport
from combined_1f1b.schedule.layer_plan import ModelChunk
from combined_1f1b.schedule.step import StepInputs


def run_iteration(
    inputs: StepInputs, *, chunk: ModelChunk, options: OverlapOptions
) -> tuple[StepReport, list[torch.Tensor]]:
    """Run all forwards and backwards of one iteration.

    Args:
        inputs: what Megatron's driver hands over.
        chunk: the model, cut into nodes.
        options: what Megatron's config has no field for.

    Returns:
        The report, and the token counts of the micro-batches.

    Raises:
        ConfigError: the number of micro-batches cannot work, or forward_step cannot be recorded.
        Exception: whatever user code raises, unchanged. The model can be used for a retry afterwards.
    """
    iteration = Iteration([inputs], chunks=[chunk], options=options, pipeline=Pipeline())
    iteration.open()
    iteration.run()
    return iteration.finish(), iteration.num_tokens
