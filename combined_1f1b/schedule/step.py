"""The forward and backward of micro-batches, op by op: the handlers that every driver gives to the executor.

F{m}.embedding   record the user's forward_step, then run the first node   B{m}.loss       grad_scale_func, engine
F{m}.<node>      run a node on what the node before left                   B{m}.<node>     run its backward
F{m}.loss        the user's loss_func through Megatron's own scaling       B{m}.embedding  the micro-batch is over
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss, set_current_microbatch
from megatron.core.utils import get_attr_wrapped_model, nvtx_range_pop, nvtx_range_push

from combined_1f1b.fsdp_adapter.protocol import NullSharding, ShardingDriver
from combined_1f1b.schedule.executor import Handler, Issue
from combined_1f1b.schedule.layer_plan import MicroBatch, ModelChunk
from combined_1f1b.schedule.model_check import check_arguments
from combined_1f1b.schedule.node import Node
from combined_1f1b.schedule.ops import Kind
from combined_1f1b.schedule.recorder import record_forward_step


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What Megatron's driver hands to one iteration.

    Attributes:
        forward_step_func: the user's function, unchanged.
        data_iterator: its first argument.
        model: the model as the user wrapped it.
        num_microbatches: micro-batches of the iteration.
        config: the model's TransformerConfig.
        forward_data_store: list that receives what the loss function reports, in the order of the micro-batches.
        collect_non_loss_data: Megatron's option of the same name.
        is_first_microbatch: Megatron's rule for `set_is_first_microbatch`, by micro-batch index.
        no_sync: context in which gradients are not synchronised, for every backward but the last.
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: torch.nn.Module
    num_microbatches: int
    config: Any
    forward_data_store: list[Any] = field(default_factory=list)
    collect_non_loss_data: bool = False
    is_first_microbatch: Callable[[int], bool] = lambda index: index == 0
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext


class Step:
    """One iteration of one model chunk.

    Args:
        inputs: what Megatron's driver hands over.
        chunk: the model, cut into nodes.
        driver: the sharding driver.

    Attributes:
        num_tokens: what the loss functions counted, one tensor per micro-batch.
    """

    def __init__(self, *, inputs: StepInputs, chunk: ModelChunk, driver: ShardingDriver) -> None:
        self._inputs = inputs
        self._config = inputs.config
        self._chunk = chunk
        self._driver = driver
        self._apart = self._needs_shared_weights()
        self._microbatches: dict[int, MicroBatch] = {}
        self._unsynchronised = ExitStack()
        self._is_unsynchronised = False
        self.num_tokens: list[torch.Tensor] = []

    def handlers(self) -> dict[Kind, Handler]:
        """The table for the executor."""
        return {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.GATHER: lambda issue: self._driver.gather(issue.op.unit),
            Kind.FREE: lambda issue: self._driver.free(issue.op.unit),
            Kind.REDUCE: lambda issue: self._driver.reduce(issue.op.unit, is_last=issue.is_last_reduction),
            Kind.BEGIN_BACKWARD: self._begin_backward,
        }

    def close(self) -> None:
        """Leave the no_sync context and put the modules' own state back, after the last op as after a failure."""
        self._unsynchronised.close()
        self._microbatches.clear()
        self._chunk.reset_module_state()

    def _needs_shared_weights(self) -> bool:
        """Whether several nodes use a weight, so that its contributions have to be held together (`shared_weights.py`).

        With a sharded model `.grad` is empty when a micro-batch's backward starts, and they add up there.
        """
        several_uses = self._chunk.tied_embeddings or bool(self._chunk.mtp_layers)
        return several_uses and isinstance(self._driver, NullSharding)

    def _forward(self, issue: Issue) -> Any:
        op = issue.op
        nvtx_range_push(op.name)
        try:
            with self._autocast():
                if op.stage == "embedding":
                    self._start(op.microbatch)
                microbatch = self._microbatches[op.microbatch]
                if op.stage == "loss":
                    return self._forward_loss(microbatch)
                entered = microbatch.values
                microbatch.values = microbatch.node((op.stage, op.part)).forward(entered)
                return entered
        finally:
            nvtx_range_pop(op.name)

    def _backward(self, issue: Issue) -> Any:
        op = issue.op
        microbatch = self._microbatches[op.microbatch]
        nvtx_range_push(op.name)
        try:
            if op.stage == "loss":
                return self._backward_loss(microbatch)
            node = microbatch.node((op.stage, op.part))
            if op.stage != "embedding":
                microbatch.gradients, held = node.backward(microbatch.gradients)
                return held
            self._end(microbatch, node)
            return None
        finally:
            nvtx_range_pop(op.name)

    def _begin_backward(self, issue: Issue) -> None:
        self._synchronise_gradients(only_if_last=issue.op.microbatch)
        self._driver.begin_backward()

    def _synchronise_gradients(self, *, only_if_last: int) -> None:
        """Data-parallel wrappers synchronise in the last micro-batch's backward and in no other."""
        wanted = only_if_last != self._inputs.num_microbatches - 1
        if wanted and not self._is_unsynchronised:
            self._unsynchronised.enter_context(self._inputs.no_sync())
        elif self._is_unsynchronised and not wanted:
            self._unsynchronised.close()
        self._is_unsynchronised = wanted

    def _start(self, index: int) -> None:
        inputs, model = self._inputs, self._inputs.model
        if self._config.timers is not None:
            self._config.timers("forward-compute", log_level=2).start()  # Megatron's loss step stops it
        if inputs.is_first_microbatch(index) and hasattr(model, "set_is_first_microbatch"):
            model.set_is_first_microbatch()
        set_current_microbatch(model, index)
        get_attr_wrapped_model(model, "set_input_tensor")([None])
        try:
            with self._driver.recording():
                call = record_forward_step(
                    forward_step_func=inputs.forward_step_func,
                    data_iterator=inputs.data_iterator,
                    model=model,
                    innermost=self._chunk.model,
                )
        except StopIteration as error:
            error.add_note(f"the data iterator ended at micro-batch {index} of {inputs.num_microbatches}")
            raise
        check_arguments(self._config, call.arguments)
        self._microbatches[index] = MicroBatch(index=index, chunk=self._chunk, call=call, apart=self._apart)

    def _forward_loss(self, microbatch: MicroBatch) -> None:
        inputs = self._inputs
        losses: list[torch.Tensor] = []

        def loss_segment(_node: Node, output: torch.Tensor) -> Any:
            loss, num_tokens = forward_step_calc_loss(
                inputs.model,
                output,
                microbatch.loss_func,
                self._config,
                None,
                inputs.collect_non_loss_data,
                inputs.num_microbatches,
                inputs.forward_data_store,
                self._chunk.model.pg_collection.cp.size(),
                True,
            )
            self.num_tokens.append(num_tokens)
            losses.append(loss)
            return loss

        microbatch.loss_node = Node(loss_segment, layer_state=None, chunk_state=microbatch.chunk_state)
        microbatch.loss_node.forward(microbatch.values)
        microbatch.values = ()
        microbatch.loss_func = None
        microbatch.loss = losses[0]

    def _backward_loss(self, microbatch: MicroBatch) -> None:
        loss, microbatch.loss = microbatch.loss, None
        if self._config.timers is not None:
            self._config.timers("backward-compute", log_level=2).start()
        assert loss is not None
        assert microbatch.loss_node is not None
        if self._config.grad_scale_func is not None:
            loss = self._config.grad_scale_func(loss)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        microbatch.gradients = microbatch.loss_node.take_input_gradients()

    def _end(self, microbatch: MicroBatch, node: Node) -> None:
        with nullcontext() if microbatch.shared is None else microbatch.shared.joining():
            node.backward(microbatch.gradients)
        for state in self._chunk.layer_states:
            state.forget(microbatch.index)
        del self._microbatches[microbatch.index]
        if self._config.timers is not None:
            self._config.timers("backward-compute").stop()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._config.enable_autocast:
            return torch.autocast("cuda", dtype=self._config.autocast_dtype)
        return nullcontext()
