"""The forward and backward of one model chunk's micro-batches, op by op: what every driver's handlers come to.

start            record the user's forward_step                            start_backward   the output's gradient enters
F{m}.<node>      run a node on what the node before left                   B{m}.loss        grad_scale_func, engine
F{m}.loss        the user's loss_func through Megatron's own scaling       B{m}.<node>      run its backward
finish_forward   the output leaves to the next pipeline stage              input_gradient   the input's gradient leaves

A chunk with the embedding starts at that op and ends there; one with the loss ends its forward and starts its backward
at that op. A chunk between others is started and finished by its driver.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import utils as megatron_utils
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss, set_current_microbatch
from megatron.core.utils import get_attr_wrapped_model, nvtx_range_pop, nvtx_range_push

from combined_1f1b.fsdp_adapter.protocol import NullSharding, RankDriver, ShardingDriver
from combined_1f1b.schedule.executor import Handler, Issue
from combined_1f1b.schedule.layer_plan import MicroBatch, ModelChunk
from combined_1f1b.schedule.model_check import check_arguments
from combined_1f1b.schedule.node import Node
from combined_1f1b.schedule.ops import Kind, Op
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
        synchronises: whether the last backward leaves it: if not, the driver does after the last op.
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
    synchronises: bool = True


class _PhaseTimer:
    """One of Megatron's timers for a phase that several micro-batches may be in: it runs while any is, started once."""

    def __init__(self, name: str, timers: Any) -> None:
        self._name = name
        self._timers = timers
        self._open = 0

    def open(self) -> None:
        """A micro-batch enters the phase."""
        self._open += 1
        if self._timers is not None and self._open == 1:
            self._timers(self._name, log_level=2).start()

    def close(self, *, stop: bool = True) -> None:
        """A micro-batch leaves the phase. With stop=False somebody else stops the timer, see `resume`."""
        self._open -= 1
        if self._timers is not None and stop and self._open == 0:
            self._timers(self._name).stop()

    def resume(self) -> None:
        """Somebody else has stopped the timer: start it again if a micro-batch is still in the phase."""
        if self._timers is not None and self._open > 0:
            self._timers(self._name, log_level=2).start()


class Step:
    """One iteration of one model chunk. It is opened before the first op, and closed after the last or a failure.

    Args:
        inputs: what Megatron's driver hands over.
        chunk: the model, cut into nodes.
        driver: the sharding driver.
        held_gradients: op index -> units that the op gives gradients while another micro-batch's are not reduced yet.
        interleaved: micro-batches whose forward runs interleaved with another's forward.

    Attributes:
        num_tokens: what the loss functions counted, one tensor per micro-batch.
    """

    def __init__(
        self,
        *,
        inputs: StepInputs,
        chunk: ModelChunk,
        driver: ShardingDriver,
        held_gradients: Mapping[int, tuple[str, ...]],
        interleaved: Container[int],
    ) -> None:
        self._inputs = inputs
        self._config = inputs.config
        self._chunk = chunk
        self._driver = driver
        self._apart = self._needs_shared_weights()
        self._microbatches: dict[int, MicroBatch] = {}
        self._held_gradients = held_gradients
        self._interleaved = interleaved
        self._held: dict[str, list[torch.Tensor | None]] = {}
        self._forward_timer = _PhaseTimer("forward-compute", inputs.config.timers)
        self._backward_timer = _PhaseTimer("backward-compute", inputs.config.timers)
        self._unsynchronised = ExitStack()
        self._is_unsynchronised = False
        self.num_tokens: list[torch.Tensor] = []

    def open(self) -> None:
        """Before the first op: prepare the modules."""
        self._chunk.begin_iteration()

    def close(self) -> None:
        """Leave the no_sync context and put the modules' own state back, after the last op as after a failure."""
        with ExitStack() as closing:
            closing.callback(self._chunk.end_iteration)
            closing.callback(self._microbatches.clear)
            closing.callback(self._unsynchronised.close)

    def _needs_shared_weights(self) -> bool:
        """Whether several nodes use a weight, so that its contributions have to be held together (`shared_weights.py`).

        With a sharded model `.grad` is empty when a micro-batch's backward starts, and they add up there.
        """
        return self._chunk.uses_of_shared_weights > 1 and isinstance(self._driver, NullSharding)

    def forward(self, issue: Issue) -> Any:
        """Run a node; returns what entered it."""
        if not self._config.enable_autocast:
            return self._forward_op(issue.op)
        with self._autocast():
            return self._forward_op(issue.op)

    def _forward_op(self, op: Op) -> Any:
        if op.microbatch not in self._microbatches:
            self.start(op.microbatch)
        microbatch = self._microbatches[op.microbatch]
        if op.stage == "loss":
            return self._forward_loss(microbatch)
        entered = microbatch.values
        microbatch.values = microbatch.forward_node((op.stage, op.part)).forward(entered)
        return entered

    def backward(self, issue: Issue) -> Any:
        """Run a node's backward; returns the references to hold."""
        op = issue.op
        microbatch = self._microbatches[op.microbatch]
        self._synchronise_gradients(op.microbatch)
        if op.stage == "loss":
            return self._backward_loss(microbatch)
        node = microbatch.backward_node((op.stage, op.part))
        is_first_user = (
            microbatch.shared is not None and (op.stage, op.part) == self._chunk.first_user_of_shared_weights
        )
        if is_first_user and op.stage == "embedding":
            with microbatch.shared.joining():
                microbatch.gradients, held = node.backward(microbatch.gradients)
        elif is_first_user:
            microbatch.gradients, held = node.backward(microbatch.gradients)
            microbatch.shared.deliver()
        elif issue.index in self._held_gradients:
            with self._gradients_kept_apart(issue.index):
                microbatch.gradients, held = node.backward(microbatch.gradients)
        else:
            microbatch.gradients, held = node.backward(microbatch.gradients)
        if op.stage == "embedding":
            self._end(microbatch)
        return held

    def weight(self, issue: Issue) -> Any:
        """Run a node's delayed weight gradients; returns the references to hold."""
        op = issue.op
        node = self._microbatches[op.microbatch].backward_node((op.stage, op.part))
        self._synchronise_gradients(op.microbatch)
        with self._autocast(), self._gradients_kept_apart(issue.index):
            return node.weight_gradients()

    @contextmanager
    def _gradients_kept_apart(self, index: int) -> Iterator[None]:
        """Around an op whose gradients of some units must not mix with those that wait for their reduction."""
        units = self._held_gradients.get(index, ())
        waiting = {unit: self._driver.swap_gradients(unit, self._held.get(unit)) for unit in units}
        yield
        for unit, gradients in waiting.items():
            self._held[unit] = self._driver.swap_gradients(unit, gradients)

    def reduce(self, issue: Issue) -> None:
        """Reduce a unit's gradients, and let in what was held back meanwhile."""
        unit = issue.op.unit
        self._driver.reduce(unit, is_last=issue.is_last_reduction)
        if unit in self._held:
            self._driver.swap_gradients(unit, self._held.pop(unit))

    def _synchronise_gradients(self, microbatch: int) -> None:
        """Data-parallel wrappers synchronise in the ops of the last micro-batch's backward and in no others."""
        unsynchronised = not self._inputs.synchronises or microbatch != self._inputs.num_microbatches - 1
        if unsynchronised and not self._is_unsynchronised:
            self._unsynchronised.enter_context(self._inputs.no_sync())
        elif self._is_unsynchronised and not unsynchronised:
            self._unsynchronised.close()
        self._is_unsynchronised = unsynchronised

    def start(self, index: int, input_tensor: torch.Tensor | None = None) -> None:
        """Record the user's forward_step for a micro-batch.

        Args:
            index: the micro-batch.
            input_tensor: [sequence, batch, hidden] from the previous pipeline stage, or None on the first.
        """
        inputs, model = self._inputs, self._inputs.model
        self._forward_timer.open()
        if inputs.is_first_microbatch(index) and hasattr(model, "set_is_first_microbatch"):
            model.set_is_first_microbatch()
        set_current_microbatch(model, index)
        get_attr_wrapped_model(model, "set_input_tensor")([input_tensor])
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
        self._microbatches[index] = self._chunk.start_microbatch(
            index=index, call=call, apart=self._apart, is_interleaved=index in self._interleaved
        )
        if input_tensor is not None:
            with self._autocast():
                self._microbatches[index].enter(input_tensor.detach().requires_grad_(input_tensor.requires_grad))

    def has_started(self, index: int) -> bool:
        """Whether a micro-batch's forward has started."""
        return index in self._microbatches

    def finish_forward(self, index: int) -> torch.Tensor:
        """The output of a micro-batch's forward: the loss, or [sequence, batch, hidden] for the next stage."""
        microbatch = self._microbatches[index]
        if microbatch.loss is not None:
            return microbatch.loss
        self._forward_timer.close(stop=False)
        (output,), microbatch.values = microbatch.values, ()
        output, num_tokens = self._through_loss_step(microbatch, output, is_last_stage=False)
        self._forward_timer.resume()
        self.num_tokens.append(num_tokens)
        return output.detach()

    def start_backward(self, index: int, output_gradient: torch.Tensor | None) -> None:
        """A micro-batch's backward begins with the gradient of what `finish_forward` returned; None at the loss."""
        if output_gradient is not None:
            self._backward_timer.open()
            self._microbatches[index].gradients = (output_gradient,)

    def input_gradient(self, index: int) -> torch.Tensor | None:
        """The gradient of a micro-batch's input, once its nodes have run; None on the first stage."""
        microbatch = self._microbatches.get(index)
        if microbatch is None:
            return None
        (gradient,) = microbatch.gradients
        return gradient

    def finish_backward(self, index: int) -> None:
        """A micro-batch's backward is over, delayed weight gradients too. With the embedding it has ended itself."""
        microbatch = self._microbatches.get(index)
        if microbatch is not None:
            self._end(microbatch)

    def _forward_loss(self, microbatch: MicroBatch) -> None:
        self._forward_timer.close(stop=False)  # Megatron's loss step stops it
        losses: list[torch.Tensor] = []

        def loss_segment(_node: Node, output: torch.Tensor) -> Any:
            loss, num_tokens = self._through_loss_step(microbatch, output, is_last_stage=True)
            self.num_tokens.append(num_tokens)
            losses.append(loss)
            return loss

        microbatch.loss_node = Node(loss_segment, layer_state=None, chunk_state=microbatch.chunk_state)
        microbatch.loss_node.forward(microbatch.values)
        self._forward_timer.resume()
        microbatch.values = ()
        microbatch.loss_func = None
        microbatch.loss = losses[0]

    def _backward_loss(self, microbatch: MicroBatch) -> None:
        loss, microbatch.loss = microbatch.loss, None
        self._backward_timer.open()
        assert loss is not None
        assert microbatch.loss_node is not None
        if self._config.grad_scale_func is not None:
            loss = self._config.grad_scale_func(loss)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        microbatch.gradients = microbatch.loss_node.take_input_gradients()

    def _through_loss_step(
        self, microbatch: MicroBatch, output: torch.Tensor, *, is_last_stage: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Megatron's step after a forward: on the last stage loss_func and scaling, on all auxiliary losses' scale."""
        inputs = self._inputs
        result: tuple[torch.Tensor, torch.Tensor] = forward_step_calc_loss(
            inputs.model,
            output,
            microbatch.loss_func,
            self._config,
            self._chunk.model.vp_stage,
            inputs.collect_non_loss_data,
            inputs.num_microbatches,
            inputs.forward_data_store,
            self._chunk.model.pg_collection.cp.size(),
            is_last_stage,
        )
        return result

    def _end(self, microbatch: MicroBatch) -> None:
        self._chunk.end_microbatch(self._microbatches.pop(microbatch.index))
        self._backward_timer.close()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._config.enable_autocast:
            return torch.autocast("cuda", dtype=self._config.autocast_dtype)
        return nullcontext()


def handlers_of(steps: Mapping[str, Step], driver: RankDriver) -> dict[Kind, Handler]:
    """The executor's table for a plan without transfers.

    Args:
        steps: the step of the chunk that a stage, a unit or a chunk's own name belongs to.
        driver: the sharding driver of all chunks.
    """
    return {
        Kind.FORWARD: lambda issue: steps[issue.op.stage].forward(issue),
        Kind.BACKWARD: lambda issue: steps[issue.op.stage].backward(issue),
        Kind.WEIGHT: lambda issue: steps[issue.op.stage].weight(issue),
        Kind.GATHER: lambda issue: driver.gather(issue.op.unit),
        Kind.FREE: lambda issue: driver.free(issue.op.unit),
        Kind.REDUCE: lambda issue: steps[issue.op.stage].reduce(issue),
        Kind.BEGIN_BACKWARD: lambda _issue: driver.begin_backward(),
    }


def with_ranges(handlers: Mapping[Kind, Handler]) -> Mapping[Kind, Handler]:
    """With Megatron's NVTX profiling on, each op is a range of its name."""
    if not megatron_utils._nvtx_enabled:
        return handlers
    return {kind: _in_range(handler) for kind, handler in handlers.items()}


def _in_range(handler: Handler) -> Handler:
    def run(issue: Issue) -> Any:
        ranges = megatron_utils._nvtx_range_messages
        outside = len(ranges)
        nvtx_range_push(issue.op.name)
        try:
            result = handler(issue)
        except BaseException:
            while len(ranges) > outside:  # a failure inside a range of Megatron's own leaves that one open
                ranges.pop()
                torch.cuda.nvtx.range_pop()
            raise
        nvtx_range_pop(issue.op.name)
        return result

    return run
