"""A whole training iteration in one CUDA graph, around a forward-backward function that does not know it.

    call 1 .. warmup_iterations   run eagerly, on the capture stream
    the next call                 capture, then replay
    every later call              copy the batches into the static buffers, replay

Every call is one real iteration. All state lives on the instance: several graphs can live in one process. What a graph
needs of the schedule (side streams forked from the captured stream and joined back) the schedule does in every
iteration, captured or not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.full_cuda_graph import get_shared_capture_stream
from megatron.core.tensor_parallel.random import get_all_rng_states, get_cuda_rng_tracker
from megatron.core.utils import get_model_config

from combined_1f1b.config import draws_random_numbers
from combined_1f1b.errors import ConfigError
from combined_1f1b.schedule.static_batches import StaticBatches

_PER_CALL = ("data_iterator",)


class FullIterationGraph:
    """Captures one training iteration and replays it.

    Called with the keyword arguments of the forward-backward function. Batches are copied to static device buffers, and
    `forward_step` sees those. Results are static tensors too: they are valid until the next call. A replay overwrites
    the gradients, whatever `.grad` held before, and binds them again, however the loop cleared them.

    Args:
        forward_backward_func: what `get_forward_backward_func()` returned.
        warmup_iterations: eager iterations before the capture, at least 1: allocators, communicators and caches settle.

    Raises:
        ConfigError: a setting that cannot be captured (before any work), or an argument or batch that differs from the
            captured one.
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
        """Forget the graph, its buffers and its results; the next calls warm up again."""
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batches = StaticBatches()
        self._arguments: dict[str, Any] | None = None
        self._result: Any = None
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []

    @property
    def is_captured(self) -> bool:
        """Whether the next call replays."""
        return self._graph is not None

    def __call__(self, **arguments: Any) -> Any:
        """Run one iteration; see the class."""
        models = _as_list(arguments["model"])
        self._check(arguments, models)
        data = self._load(arguments)
        if self._graph is None and self._calls < self._warmup_iterations:
            self._result = self._run_eagerly({**arguments, **data})
        else:
            if self._graph is None:
                self._capture({**arguments, **data}, models)
            self._graph.replay()
            self._bind_gradients(models)
        self._calls += 1
        return self._result

    def _check(self, arguments: dict[str, Any], models: Sequence[torch.nn.Module]) -> None:
        fixed = {name: value for name, value in arguments.items() if name not in _PER_CALL}
        if self._arguments is None:
            for model in models:
                _check_capturable(model)
            self._arguments = fixed
            return
        for name in fixed.keys() | self._arguments.keys():
            now, then = fixed.get(name), self._arguments.get(name)
            if now is not then and now != then:
                raise ConfigError.of(name, now, f"the graph was built for {then!r}", "call reset() first")

    def _load(self, arguments: dict[str, Any]) -> dict[str, Any]:
        iterator, count = arguments["data_iterator"], arguments["num_microbatches"]
        if isinstance(iterator, list) and len(iterator) != 1:
            raise ConfigError.of(
                "data_iterator", f"list of {len(iterator)}", "only one model chunk is captured yet", "use PP=1"
            )
        if isinstance(iterator, list):
            return {"data_iterator": [self._batches.load(iterator[0], count)]}
        return {"data_iterator": self._batches.load(iterator, count)}

    def _run_eagerly(self, arguments: dict[str, Any]) -> Any:
        with _on_capture_stream():
            return self._function(**arguments)

    def _capture(self, arguments: dict[str, Any], models: Sequence[torch.nn.Module]) -> None:
        for parameter in _parameters(models):
            parameter.grad = None  # overwrite or accumulate is decided by Python, now: a replay overwrites
        graph = torch.cuda.CUDAGraph()
        for state in get_all_rng_states().values():
            graph.register_generator_state(state)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with _on_capture_stream():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = self._function(**arguments)
            except BaseException as error:
                try:
                    graph.capture_end()
                except RuntimeError as ending:
                    error.add_note(f"ending the capture: {ending}")
                    _end_capture_of_generators()
                raise
            graph.capture_end()
        self._graph, self._result = graph, result
        self._gradients = [(parameter, parameter.grad) for parameter in _parameters(models)]

    def _bind_gradients(self, models: Sequence[torch.nn.Module]) -> None:
        """Replay reruns no Python: what zero_grad(set_to_none=True) has dropped is put back."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for model in models:
            if hasattr(model, "rebind_gradients"):
                model.rebind_gradients()


def _check_capturable(model: torch.nn.Module) -> None:
    config = get_model_config(model)
    if config.num_moe_experts and not config.moe_pad_expert_input_to_capacity:
        raise ConfigError.of(
            "moe_pad_expert_input_to_capacity", False, "dropless routing copies token counts to the CPU in every layer",
            "set it, with moe_expert_capacity_factor",
        )  # fmt: skip
    if config.timers is not None:
        raise ConfigError.of("timers", "set", "Megatron's timers synchronise inside the iteration", "use timers=None")
    ddp_config = getattr(model, "ddp_config", None)
    for name in ("check_for_nan_in_grad", "check_for_large_grads"):
        if getattr(ddp_config, name, False):
            raise ConfigError.of(name, True, "the check synchronises inside the iteration", f"use {name}=False")
    if draws_random_numbers(config) and not getattr(get_cuda_rng_tracker(), "use_cudagraphable_rng", False):
        raise ConfigError.of(
            "use_cudagraphable_rng", False, "a replay would repeat the captured random numbers",
            "call model_parallel_cuda_manual_seed(seed, use_cudagraphable_rng=True)",
        )  # fmt: skip


def _end_capture_of_generators() -> None:
    """A capture that fails leaves the random generators in capture mode; an empty one that succeeds takes them out."""
    graph = torch.cuda.CUDAGraph()
    for state in get_all_rng_states().values():
        graph.register_generator_state(state)
    graph.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=torch.cuda.current_device())
    graph.capture_end()


class _on_capture_stream:  # noqa: N801  used as a context manager only
    """Run on Megatron's capture stream, on which DDP models are built too, after and before the caller's stream."""

    def __enter__(self) -> None:
        self._caller = torch.cuda.current_stream()
        self._stream = get_shared_capture_stream()
        self._stream.wait_stream(self._caller)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_exception: Any) -> None:
        torch.cuda.set_stream(self._caller)
        self._caller.wait_stream(self._stream)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _parameters(models: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    for model in models:
        yield from (parameter for parameter in model.parameters() if parameter.requires_grad)
