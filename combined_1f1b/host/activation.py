"""Put the host device in the place of torch.cuda for a block, and take every trace of it away again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from combined_1f1b.host.autocast import autocast_patches
from combined_1f1b.host.collectives import collective_patches
from combined_1f1b.host.cuda import cuda_patches
from combined_1f1b.host.graphs import graph_patches
from combined_1f1b.host.patch import AppliedPatches, Patch
from combined_1f1b.host.random import quiet_generator_watchers
from combined_1f1b.host.recompute import recompute_patches
from combined_1f1b.host.steps import Observer
from combined_1f1b.host.streams import StreamState, active_state
from combined_1f1b.host.tensors import CPU, tensor_patches


class _Activation(StreamState):
    """A stream state together with the patches that install it and the number of `activate` blocks that hold it."""

    def __init__(self) -> None:
        super().__init__(device_count=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.holders = 0
        self.resources = contextlib.ExitStack()

    def install(self) -> None:
        with contextlib.ExitStack() as resources:
            # Compiled functions (Megatron's jit_fuser is torch.compile) run eagerly: a host compiler is slow to start,
            # need not be there, and fuses into other bits than the plain operators give.
            resources.enter_context(torch.compiler.set_stance("force_eager"))
            resources.enter_context(quiet_generator_watchers())
            resources.callback(AppliedPatches(patches(self)).restore)
            self.resources = resources.pop_all()


def patches(state: StreamState) -> tuple[Patch, ...]:
    """Everything that `activate` replaces, as data."""
    return (
        *cuda_patches(state),
        *tensor_patches(state),
        *autocast_patches(),
        *collective_patches(),
        *graph_patches(state),
        *recompute_patches(),
    )


def is_active() -> bool:
    """Whether the host device stands in torch.cuda now."""
    return active_state() is not None


@contextlib.contextmanager
def activate() -> Iterator[torch.device]:
    """Make torch.cuda work on CPU tensors, for as long as the block lasts.

    Blocks may be nested or overlap: the first installs, the last to end restores every name to the very object that
    stood there, also after an exception. Where CUDA is available nothing is replaced.

    Yields:
        the device for tensors: `cpu`, or the current CUDA device where CUDA is available.
    """
    active = active_state()
    if active is None and torch.cuda.is_available():
        yield torch.device("cuda", torch.cuda.current_device())
        return
    activation = _Activation() if active is None else active
    assert isinstance(activation, _Activation)
    if activation.holders == 0:
        activation.install()
    activation.holders += 1
    try:
        yield CPU
    finally:
        activation.holders -= 1
        if activation.holders == 0:
            activation.resources.close()


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call `observer` with every `StreamStep` while the block lasts, after the observers that are there already.

    Raises:
        RuntimeError: the host device is not active.
    """
    state = active_state()
    if state is None:
        raise RuntimeError("the host device is not active: use `with combined_1f1b.host.activate():`")
    state.observers.append(observer)
    try:
        yield
    finally:
        # The last equal one is this block's: blocks need not end in the order in which they began.
        del state.observers[len(state.observers) - 1 - state.observers[::-1].index(observer)]
