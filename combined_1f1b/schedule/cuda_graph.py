"""A whole iteration in one CUDA graph, around a forward-backward function that does not know it.

    call 1 .. warmup_iterations   run eagerly, on the capture stream
    the next call                 capture, then replay
    every later call              copy the batches into the static buffers, replay

Every call is one real iteration, and everything of it runs on the capture stream, after and before the caller's work:
buffers are written and read in one order. Training and evaluation (`forward_only=True`) have a graph each. All state
lives on the instance: several can live in one process. What a graph needs of the schedule (side streams forked from the
captured stream and joined back) the schedule does in every iteration, captured or not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.full_cuda_graph import get_shared_capture_stream
from megatron.core.tensor_parallel.random import get_all_rng_states

from combined_1f1b.errors import ConfigError
from combined_1f1b.fsdp_adapter.protocol import driver_of
from combined_1f1b.schedule.graph_checks import (
    captured_settings,
    check_capturable,
    check_unchanged,
    trainable_parameters,
)
from combined_1f1b.schedule.static_batches import StaticBatches

_REQUIRED = ("model", "data_iterator", "num_microbatches")


class FullIterationGraph:
    """Captures one iteration and replays it.

    Called with the keyword arguments of the forward-backward function. Batches are copied to static device buffers, and
    `forward_step` sees those. Results are static tensors too: they are valid until the next call of their kind. Every
    training call overwrites `.grad`, whatever it held before, and binds it again, however the loop cleared it;
    gradients in the buffers of Megatron-DDP add up as always, until `zero_grad_buffer()`.

    Args:
        forward_backward_func: what `get_forward_backward_func()` returned.
        warmup_iterations: eager iterations of each kind before its capture, at least 1: allocators, communicators and
            caches settle.

    Raises:
        ConfigError: a setting that cannot be captured (before any work), or an argument, a batch, a setting or a
            parameter that differs from the captured one.
        Exception: whatever the iteration raises. A capture that fails says so in notes, with the plan's op where one
            was being issued; the model and its gradients are as before the call and can be trained eagerly.
    """

    def __init__(self, forward_backward_func: Callable[..., Any], *, warmup_iterations: int = 2) -> None:
        if warmup_iterations < 1:
            raise ConfigError.of(
                "warmup_iterations",
                warmup_iterations,
                "a capture needs settled communicators and caches",
                "use at least 1",
            )
        self._function = forward_backward_func
        self._warmup_iterations = warmup_iterations
        self.reset()

    def reset(self) -> None:
        """Forget the graphs, their buffers and their results; the next calls warm up again."""
        self._iterations: dict[bool, _Iteration] = {}
        self._last: _Iteration | None = None

    @property
    def is_captured(self) -> bool:
        """Whether the next call of the same kind as the last (training or evaluation) replays."""
        return self._last is not None and self._last.graph is not None

    def __call__(self, **arguments: Any) -> Any:
        """Run one iteration; see the class."""
        for name in _REQUIRED:
            if name not in arguments:
                raise TypeError(
                    f"FullIterationGraph needs the keyword argument {name!r} of the forward-backward function"
                )
        is_training = not arguments.get("forward_only", False)
        iteration = self._iterations.get(is_training) or _Iteration(arguments, is_training=is_training)
        iteration.check(arguments)
        self._iterations[is_training] = self._last = iteration
        with on_capture_stream():
            arguments = {**arguments, "data_iterator": iteration.load(arguments)}
            if iteration.graph is None and iteration.calls < self._warmup_iterations:
                iteration.run(self._function, arguments)
            else:
                if iteration.graph is None:
                    iteration.capture(self._function, arguments)
                iteration.replay()
        iteration.calls += 1
        return iteration.result


class _Iteration:
    """One kind of iteration, from its first call: its buffers, its graph, its results.

    Attributes:
        calls: calls that have succeeded.
        graph: the graph, once captured.
        result: what the function returned at the last call.
    """

    def __init__(self, arguments: dict[str, Any], *, is_training: bool) -> None:
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Any = None
        self._is_training = is_training
        self._models = _as_list(arguments["model"])
        for model in self._models:
            check_capturable(model, is_training=is_training)
        self._arguments = _fixed(arguments)
        self._settings = captured_settings(self._models)
        self._batches = [StaticBatches() for _ in self._models]
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []

    def check(self, arguments: dict[str, Any]) -> None:
        """Refuse what a replay would ignore."""
        check_unchanged(_fixed(arguments), self._arguments)
        check_unchanged(captured_settings(self._models), self._settings)

    def load(self, arguments: dict[str, Any]) -> Any:
        """Copy the batches into the buffers of each chunk; returns iterators in place of the caller's."""
        iterators = _as_list(arguments["data_iterator"])
        if len(iterators) != len(self._models):
            raise ConfigError.of(
                "data_iterator", f"{len(iterators)} iterators", f"the model has {len(self._models)} chunks",
                "pass one iterator for each chunk, None for a chunk that reads no data",
            )  # fmt: skip
        loaded = [
            batches.load(iterator, arguments["num_microbatches"])
            for batches, iterator in zip(self._batches, iterators, strict=True)
        ]
        return loaded if isinstance(arguments["data_iterator"], list | tuple) else loaded[0]

    def run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Run the iteration's Python on empty gradients: that is where overwriting or adding is decided."""
        if self._is_training:
            for parameter in trainable_parameters(self._models):
                parameter.grad = None
        self.result = function(**arguments)

    def capture(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Capture the iteration on the current stream, without computing anything."""
        before = [(parameter, parameter.grad) for parameter in trainable_parameters(self._models)]
        graph = torch.cuda.CUDAGraph()
        for state in get_all_rng_states().values():
            graph.register_generator_state(state)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            self.run(function, arguments)
            graph.capture_end()
            gradients = [(parameter, parameter.grad) for parameter in trainable_parameters(self._models)]
            if self._is_training and not any(_has_gradient(*bound) for bound in gradients):
                raise ConfigError.of(
                    "model", "no gradients", "the iteration gives no trainable parameter a gradient, so every update "
                    "would be skipped", "train a loss that depends on the parameters of this model",
                )  # fmt: skip
        except BaseException as error:
            error.add_note("while capturing the iteration in a CUDA graph: nothing was computed")
            _end_failed_capture(graph, error)
            self._return_to_rest(before)
            raise
        self.graph = graph
        self._gradients = gradients if self._is_training else []

    def replay(self) -> None:
        """Run the graph and bind the gradients, which zero_grad(set_to_none=True) has dropped: no Python runs again."""
        assert self.graph is not None
        self.graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if self._is_training:
            for model in self._models:
                if hasattr(model, "rebind_gradients"):
                    model.rebind_gradients()

    def _return_to_rest(self, gradients: Sequence[tuple[torch.nn.Parameter, torch.Tensor | None]]) -> None:
        """Free the sharded units again: while the capture lasted, its streams refused to wait."""
        for model in self._models:
            try:
                driver_of(model).abort()
            except ConfigError:  # MFSDP's hooks drive it
                while not hasattr(model, "context"):
                    model = model.module
                for module in model.context.forward_order:
                    module.rest()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _fixed(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "data_iterator"}


def _has_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> bool:
    return gradient is not None or hasattr(parameter, "main_grad")


def _end_failed_capture(graph: torch.cuda.CUDAGraph, error: BaseException) -> None:
    """Take streams and random generators out of capture mode. What goes wrong here is noted: the failure must get out.

    A capture that ends with an error leaves the generators in capture mode; an empty one that succeeds takes them out.
    """
    try:
        if torch.cuda.is_current_stream_capturing():
            graph.capture_end()
            return
    except RuntimeError as ending:
        error.add_note(f"ending the capture: {ending}")
    empty = torch.cuda.CUDAGraph()
    for state in get_all_rng_states().values():
        empty.register_generator_state(state)
    empty.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=torch.cuda.current_device())
    empty.capture_end()


@contextmanager
def on_capture_stream() -> Iterator[None]:
    """Run on Megatron's capture stream, on which DDP models are built too, after and before the caller's stream."""
    caller, stream = torch.cuda.current_stream(), get_shared_capture_stream()
    stream.wait_stream(caller)
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(caller)
        caller.wait_stream(stream)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
