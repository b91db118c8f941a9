"""The driver for pipelines with virtual stages (PP>1, VPP>1): Megatron's, which asks for one slot of the plan a call.

    Megatron   warm-up F F ...   steady (F,B) (F,B) ...   cool-down B B ...      sends, receives, bookkeeping
    each call  the plan's next fragment: input and output gradient enter, its ops run, output and input gradient leave

The order of the calls is known beforehand, so the plan is the whole iteration's: gathers go ahead over the borders of
calls, and a call that is not the one that the plan has next is a mistake and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core import parallel_state

from combined_1f1b.config import OverlapOptions
from combined_1f1b.errors import PlanError
from combined_1f1b.schedule.iteration import Iteration, Pipeline, StepReport
from combined_1f1b.schedule.layer_plan import ModelChunk
from combined_1f1b.schedule.pipeline_order import Call
from combined_1f1b.schedule.step import StepInputs


class InterleavedIteration:
    """One iteration of a rank with several model chunks, run in the fragments that Megatron asks for.

    Args:
        inputs: what Megatron's driver hands over, one for each chunk.
        chunks: the chunks, cut into nodes.
        options: what Megatron's config has no field for.
        pipeline: where this rank stands.
    """

    def __init__(
        self, inputs: Sequence[StepInputs], *, chunks: Sequence[ModelChunk], options: OverlapOptions, pipeline: Pipeline
    ) -> None:
        self._iteration = Iteration(inputs, chunks=chunks, options=options, pipeline=pipeline)
        self._next = 0
        group = parallel_state.get_pipeline_model_parallel_group()
        near = [(pipeline.rank + step) % pipeline.size for step in (-1, 1)]
        self._neighbours = ", ".join(f"rank {torch.distributed.get_global_rank(group, rank)}" for rank in near)
        self._iteration.open()

    def run(
        self,
        *,
        forward: Call | None,
        backward: Call | None,
        input_tensor: torch.Tensor | None,
        output_gradient: torch.Tensor | None,
        before: Callable[[], None],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Run the next fragment.

        Args:
            forward, backward: what Megatron asks for.
            input_tensor: the forward's input, [sequence, batch, hidden]; None on the first stage.
            output_gradient: of the backward's output; None at the loss.
            before: called before the first op: it waits for what is on its way.

        Returns:
            The forward's output, its number of tokens, and the gradient of the backward's input.

        Raises:
            PlanError: it is not the plan's next fragment.
        """
        steps, plan = self._iteration.steps, self._iteration.plan
        fragment = plan.fragments[self._next]
        asked = ((forward,) if forward else (), (backward,) if backward else ())
        if asked != (fragment.forwards, fragment.backwards):
            raise PlanError(
                f"Megatron asks for {asked}, the plan's next fragment runs {(fragment.forwards, fragment.backwards)}:\n"
                + plan.excerpt(fragment.start)
            )
        self._next += 1
        output = num_tokens = input_gradient = None
        with self._iteration.aborting():
            before()
            if forward:
                steps[forward.chunk].start(forward.microbatch, input_tensor)
            if backward:
                steps[backward.chunk].start_backward(backward.microbatch, output_gradient)
            self._iteration.run(fragment.start, fragment.end)
            if forward:
                output = steps[forward.chunk].finish_forward(forward.microbatch)
                num_tokens = steps[forward.chunk].num_tokens[-1]
            if backward:
                input_gradient = steps[backward.chunk].input_gradient(backward.microbatch)
                steps[backward.chunk].finish_backward(backward.microbatch)
        return output, num_tokens, input_gradient

    @property
    def is_over(self) -> bool:
        """Whether every fragment has run."""
        return self._next == len(self._iteration.plan.fragments)

    def finish(self) -> StepReport:
        """After the last fragment."""
        return self._iteration.finish()

    def abort(self, error: BaseException) -> None:
        """After a failure. One outside of a fragment, in Megatron's own part of the iteration, gets notes here."""
        if self._iteration.is_aborted:
            return
        plan = self._iteration.plan
        fragments = plan.fragments
        start = fragments[self._next].start if self._next < len(fragments) else len(plan.ops) - 1
        error.add_note(
            f"in Megatron's transfers after {self._next} of {len(fragments)} slots of pipeline rank {plan.shape.rank} "
            f"(neighbours: {self._neighbours}); next in the plan:\n{plan.excerpt(start)}"
        )
        self._iteration.abort(error)
