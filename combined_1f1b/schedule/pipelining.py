"""The driver for pipelines without virtual stages (PP>1), which Megatron's combined schedule does not have.

    warm-up F F ...   steady (F,B) (F,B) ...   cool-down B B ...       see pipeline_order.py for how many forwards

The whole iteration is one plan with its transfers: what a rank sends and receives travels beside the computation of the
pairs. What stands around the schedule is what `forward_backward_pipelining_without_interleaving` of Megatron does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    clear_embedding_activation_buffer,
    finish_embedding_wgrad_compute,
    get_tensor_shapes,
)

from combined_1f1b.config import OverlapOptions
from combined_1f1b.errors import ConfigError
from combined_1f1b.schedule.executor import Handler, Issue
from combined_1f1b.schedule.iteration import Iteration, StepReport, pipeline_of
from combined_1f1b.schedule.layer_plan import ModelChunk
from combined_1f1b.schedule.links import PipelineLinks
from combined_1f1b.schedule.ops import Kind, Lane
from combined_1f1b.schedule.step import StepInputs


@dataclass(frozen=True, kw_only=True)
class PipelineCall:
    """The arguments of Megatron's function, resolved.

    Attributes:
        model, data_iterator: the rank's one chunk and its data.
        communicator: Megatron's P2PCommunicator.
        groups: Megatron's ProcessGroupCollection.
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: torch.nn.Module
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None
    collect_non_loss_data: bool
    adjust_tensor_shapes_fn: Callable[..., Any] | None
    communicator: Any
    groups: Any
    force_all_reduce: bool | None


class _Transfers:
    """Handlers of SEND and RECV: a tensor enters where its flow starts, and leaves where it ends.

    Args:
        iteration: whose step takes and gives the tensors.
        received, sent: shape of what comes from the previous stage, of what goes to the next: gradients have the same.
    """

    def __init__(
        self,
        iteration: Iteration,
        links: PipelineLinks,
        *,
        received: tuple[int, ...],
        sent: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        (self._step,) = iteration.steps
        (self._chunk,) = iteration.plan.shape.chunks
        self._lanes = iteration.lanes
        # Where weight gradients are delayed, the first layer's come after its input's gradient has left.
        delayed = iteration.plan.shape.delay_wgrad and self._chunk.receives and bool(self._chunk.layers)
        self._last_weights = (self._chunk.layers[0].name, "attention") if delayed else None
        self._in_backward: set[int] = set()
        self._links = links
        self._received = received
        self._sent = sent
        self._dtype = dtype

    def table(self, own: Mapping[Kind, Handler]) -> Mapping[Kind, Handler]:
        """The handlers; those of the step run after what enters has entered."""

        def run_forward(issue: Issue) -> Any:
            if self._chunk.receives and not self._step.has_started(issue.op.microbatch):
                self._enter(issue.op.microbatch)
            return own[Kind.FORWARD](issue)

        def run_backward(issue: Issue) -> Any:
            self._enter_backward(issue.op.microbatch)
            held = own[Kind.BACKWARD](issue)
            if issue.op.stage == "embedding":
                self._end(issue.op.microbatch)
            return held

        def run_weight(issue: Issue) -> Any:
            held = own[Kind.WEIGHT](issue)
            if (issue.op.stage, issue.op.part) == self._last_weights:
                self._end(issue.op.microbatch)
            return held

        return {
            Kind.FORWARD: run_forward,
            Kind.BACKWARD: run_backward,
            Kind.WEIGHT: run_weight,
            Kind.RECEIVE_FORWARD: lambda issue: self._receive(issue, self._received),
            Kind.RECEIVE_BACKWARD: lambda issue: self._receive(issue, self._sent),
            Kind.SEND_FORWARD: self._send_forward,
            Kind.SEND_BACKWARD: self._send_backward,
        }

    def _enter(self, microbatch: int) -> None:
        self._step.start(microbatch, self._links.take(Lane.PREVIOUS, microbatch).requires_grad_())

    def _enter_backward(self, microbatch: int) -> None:
        """At the backward's first node, whose lane alone waits for the gradient."""
        if self._chunk.sends and microbatch not in self._in_backward:
            self._in_backward.add(microbatch)
            self._step.start_backward(microbatch, self._links.take(Lane.NEXT, microbatch))

    def _receive(self, issue: Issue, shape: tuple[int, ...]) -> None:
        self._links.receive(issue.op, shape=shape, dtype=self._dtype)

    def _send_forward(self, issue: Issue) -> None:
        if not self._step.has_started(issue.op.microbatch):  # a stage without a node
            with torch.cuda.stream(self._lanes.compute):
                self._enter(issue.op.microbatch)
        output = self._step.finish_forward(issue.op.microbatch)
        if output.shape != self._sent or output.dtype != self._dtype:
            raise ConfigError.of(
                "seq_length, micro_batch_size and pipeline_dtype", (*self._sent, self._dtype),
                f"the output of micro-batch {issue.op.microbatch} is {(*output.shape, output.dtype)}, which the next "
                "stage does not expect", "announce what the batches have",
            )  # fmt: skip
        self._links.send(issue.op, output, producer=self._producer)

    def _send_backward(self, issue: Issue) -> None:
        with torch.cuda.stream(self._lanes.compute):
            self._enter_backward(issue.op.microbatch)  # a stage without a node
        gradient = self._step.input_gradient(issue.op.microbatch)
        assert gradient is not None, f"{issue.op.name}: the input got no gradient"
        self._links.send(issue.op, gradient, producer=self._lanes.compute)
        if self._last_weights is None:
            with torch.cuda.stream(self._lanes.compute):
                self._end(issue.op.microbatch)

    def _end(self, microbatch: int) -> None:
        """The current stream has issued the last op that reads what was received."""
        self._step.finish_backward(microbatch)
        self._links.release(microbatch)

    @property
    def _producer(self) -> Any:
        """The stream of the chunk's last forward node."""
        in_traffic = bool(self._chunk.nodes) and self._chunk.nodes[-1][1] == "combine"
        return self._lanes.comm if in_traffic else self._lanes.compute


def run_pipeline(
    call: PipelineCall, *, chunk: ModelChunk, options: OverlapOptions, links: PipelineLinks
) -> tuple[StepReport, list[Any]]:
    """Run one iteration of a rank and what Megatron's function does around it.

    Args:
        call: the function's arguments.
        chunk: the model, cut into nodes.
        options: what Megatron's config has no field for.
        links: to the neighbouring stages, on which the iteration has begun.

    Returns:
        The report, and what the loss functions reported; empty except on the last stage.

    Raises:
        ConfigError: a setting that cannot work.
        Exception: whatever user code raises, unchanged. The model can be used for a retry if every rank failed.
    """
    config, communicator = chunk.config, call.communicator
    if config.overlap_p2p_comm:
        raise ConfigError.of(
            "overlap_p2p_comm", True, "it is for virtual stages, and the plan overlaps transfers without it",
            "use overlap_p2p_comm=False, or set virtual_pipeline_model_parallel_size",
        )  # fmt: skip
    received, sent = _shapes(call, config)
    first, last = communicator.is_pp_first_stage, communicator.is_pp_last_stage
    # Later stages reduce in the pipeline's bubble, all at the same time, when there is a function for it.
    synchronises = config.grad_sync_func is None or first
    inputs = StepInputs(
        forward_step_func=call.forward_step_func,
        data_iterator=call.data_iterator,
        model=call.model,
        num_microbatches=call.num_microbatches,
        config=config,
        collect_non_loss_data=call.collect_non_loss_data,
        no_sync=config.no_sync_func or nullcontext,
        synchronises=synchronises,
    )
    group = communicator.pp_group
    iteration = Iteration(
        [inputs],
        chunks=[chunk],
        options=options,
        pipeline=pipeline_of(config, size=group.size(), rank=group.rank(), chunks=1),
        transfers=lambda iteration, own: _Transfers(
            iteration, links, received=received, sent=sent, dtype=config.pipeline_dtype
        ).table(own),
        links=links.streams,
    )
    if config.finalize_model_grads_func is not None:
        embedding_module = clear_embedding_activation_buffer(config, call.model, last)
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    try:
        iteration.open()
        iteration.run()
        with iteration.aborting():
            links.finish()
            iteration.lanes.join()  # the last tensors have left before the caller goes on
    except BaseException:
        links.abort()
        raise
    report = iteration.finish()
    if not synchronises:
        config.grad_sync_func(call.model.parameters())
    if config.finalize_model_grads_func is not None:
        total_num_tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
        for tokens in iteration.num_tokens:
            total_num_tokens += tokens
        finish_embedding_wgrad_compute(config, embedding_module, last, call.groups.tp)
        config.finalize_model_grads_func(
            [call.model],
            total_num_tokens if config.calculate_per_token_loss else None,
            pg_collection=call.groups,
            force_all_reduce=call.force_all_reduce,
        )
    if config.timers is not None:
        config.timers("forward-backward").stop()
    return report, inputs.forward_data_store


def _shapes(call: PipelineCall, config: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of what is received from the previous stage and of what is sent to the next."""
    received, sent = (
        get_tensor_shapes(
            seq_length=call.seq_length,
            micro_batch_size=call.micro_batch_size,
            decoder_seq_length=call.decoder_seq_length,
            config=config,
            tp_group=call.groups.tp,
            cp_group=call.groups.cp,
        )
        for _ in range(2)
    )
    if call.adjust_tensor_shapes_fn is not None:
        received, sent = call.adjust_tensor_shapes_fn(received, sent)
    for shapes in (received, sent):
        if len(shapes) != 1:
            raise ConfigError.of(
                "adjust_tensor_shapes_fn", shapes, "the schedule sends one tensor between stages",
                "return lists of one shape, or set overlap_moe_expert_parallel_comm=False",
            )  # fmt: skip
    return tuple(received[0]), tuple(sent[0])
