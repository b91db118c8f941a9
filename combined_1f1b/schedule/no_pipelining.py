"""The driver for one pipeline stage (PP=1): one plan is one iteration.

    F0 | (F1,B0) (F2,B1) ... (F{n-1},B{n-2}) | B{n-1}                      n micro-batches, n-1 pairs
    (F0,F1) | (F2,B0) (F3,B1) ... (F{n-1},B{n-3}) | (B{n-2},B{n-1})        with pair_head_and_tail

Megatron's `forward_backward_no_pipelining` keeps what is around the schedule: timers, finalizing gradients, reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from combined_1f1b.config import OverlapOptions, draws_random_numbers
from combined_1f1b.errors import ConfigError
from combined_1f1b.fsdp_adapter.protocol import ShardingDriver, driver_of
from combined_1f1b.schedule.executor import execute
from combined_1f1b.schedule.layer_plan import ModelChunk
from combined_1f1b.schedule.plan import Plan, build_plan
from combined_1f1b.schedule.step import Step, StepInputs
from combined_1f1b.schedule.streams import Lanes


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What the last iteration ran.

    Attributes:
        schedule: "combined_1f1b".
        num_microbatches: micro-batches of the iteration.
        forward_backward_pairs: pairs of a forward and a backward that ran interleaved.
        head_pairs, tail_pairs: interleaved pairs of two forwards, of two backwards.
        sharded: whether the plan drove MFSDP.
        plan: the plan that was executed.
    """

    schedule: str
    num_microbatches: int
    forward_backward_pairs: int
    head_pairs: int
    tail_pairs: int
    sharded: bool
    plan: Plan


@lru_cache(maxsize=64)
def _checked_plan(**shape: Any) -> Plan:
    plan = build_plan(**shape)
    plan.validate()
    return plan


def plan_for(
    *, chunk: ModelChunk, driver: ShardingDriver, num_microbatches: int, config: Any, options: OverlapOptions
) -> Plan:
    """The plan of one iteration of this model. Built and validated once for each number of micro-batches."""
    return _checked_plan(
        num_layers=len(chunk.layers),
        num_microbatches=num_microbatches,
        moe_layers=chunk.moe_layers,
        num_mtp_layers=len(chunk.mtp_layers),
        tied_embeddings=chunk.tied_embeddings,
        has_final_norm=chunk.has_final_norm,
        sharded=bool(driver.units),
        units=driver.units or None,
        trainable_units=driver.trainable_units if driver.units else None,
        delay_wgrad=config.delay_wgrad_compute,
        early_attention_release=config.ep_overlap_early_attn_memory_release,
        combine_parameters=bool(config.moe_latent_size),
        pair_head_and_tail=options.pair_head_and_tail,
        interleave_head=not (options.pair_head_and_tail and draws_random_numbers(config)),
    )


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
    if inputs.num_microbatches < 1:
        raise ConfigError.of("num_microbatches", inputs.num_microbatches, "there is nothing to run", "use at least 1")
    driver = driver_of(inputs.model)
    plan = plan_for(
        chunk=chunk, driver=driver, num_microbatches=inputs.num_microbatches, config=inputs.config, options=options
    )
    lanes = Lanes(gather=driver.gather_stream, high_priority=inputs.config.high_priority_a2a_comm_stream)
    step = Step(
        inputs=inputs,
        chunk=chunk,
        driver=driver,
        held_gradients=plan.held_gradients,
        interleaved=(0, 1) if plan.pairs.head_pairs else (),
    )
    try:
        step.open()
        driver.begin_iteration()
        lanes.fork()
        execute(plan, lanes=lanes, handlers=step.handlers())
        driver.finish_iteration()
    except BaseException as error:
        error.add_note(f"in an iteration of num_microbatches={inputs.num_microbatches} on this rank")
        try:
            lanes.join()
        except RuntimeError as joining:  # an invalidated capture refuses every wait: the failure itself must get out
            error.add_note(f"the lanes could not be joined: {joining}")
        driver.abort()
        raise
    finally:
        step.close()
    pairs = plan.pairs
    report = StepReport(
        schedule="combined_1f1b",
        num_microbatches=inputs.num_microbatches,
        forward_backward_pairs=pairs.forward_backward_pairs,
        head_pairs=pairs.head_pairs,
        tail_pairs=pairs.tail_pairs,
        sharded=bool(driver.units),
        plan=plan,
    )
    return report, step.num_tokens
