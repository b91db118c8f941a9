"""Races between streams, found while everything runs in order: what a GPU might do at the same time is reported.

    with host.checking_races():
        iteration()          # raises RaceError at the second of two accesses that no event orders

On the host device a missing wait does no harm, so a test of results cannot see it. Here each stream has a vector
clock: how far it has come, and up to where it has waited for every other stream. An event keeps the clock of the stream
that recorded it. A storage keeps who wrote and who read which of its bytes; an access that needs an earlier one of
another stream, which the clock of its own stream does not cover, is a race.

Memory follows the rule of CUDA's caching allocator: what dies, or is resized, goes back to the stream that allocated
it, whose next allocation may get it at once. If another stream may still be using it then, that is a use after free,
unless `record_stream` has named that stream.

Asynchronous collectives run on a stream of their group's, as NCCL's do, and transfers on one for each peer: forked
where they are called, joined to the stream that is current at `Work.wait`, and until then the Work keeps their tensors.

On the host device all tensors are on the CPU. Those that a GPU program would have on the CPU too are known by how they
were made (a factory without `device` or with "cpu", the random state, or nothing but such tensors); they are never in a
race, and reading them does not synchronise. `.cuda()` and `.to(device)` turn them into device memory.

What is not caught:

* faults that depend on which stream CUDA's autograd engine runs a node on. It takes the stream of the node's forward,
  and lets the streams of two nodes wait for each other; the CPU engine runs all nodes on the stream that is current at
  `backward`. So a backward that is called on the wrong stream is judged as if it ran there.
* accesses that a dispatch mode does not see: in kernels that pass no operator, through `numpy()` and `data_ptr()`.
* what was done before the block, which counts as done. Memory that was allocated before it is never reused.

A strided view counts as all bytes from its first element to its last. Only the order of this run is judged.

`torch.cuda._sanitizer` does the first half of this for real streams. It is not used because importing it switches on
a trace of every CUDA call of the process for good, and because it knows no byte ranges, collectives or allocator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from combined_1f1b.host.accesses import (
    Access,
    Memory,
    Signature,
    Stream,
    extent_of,
    place_of_call,
    stream_name,
    tensors_in,
)
from combined_1f1b.host.activation import observing
from combined_1f1b.host.clocks import Clock, Clocks
from combined_1f1b.host.patch import AppliedPatches, Patch
from combined_1f1b.host.steps import Step, StreamStep

# Functions whose result is on the host when no device is given.
_HOST_FACTORIES = (
    "arange", "empty", "from_numpy", "full", "get_rng_state", "linspace", "ones", "rand", "randint", "randn",
    "randperm", "tensor", "zeros",
)  # fmt: skip
_READING_ON_HOST = ("cpu", "tolist")


class RaceError(RuntimeError):
    """Two accesses to the same memory from different streams that no event orders."""


class RaceChecker(TorchDispatchMode):
    """What `checking_races` yields.

    Attributes:
        operations: number of operations that were checked.
        streams: the streams that they ran on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.streams: set[Stream] = set()
        self._clocks = Clocks()
        self._signatures: dict[Any, Signature] = {}
        self._memory: dict[int, Memory] = {}
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._returned: dict[Stream, list[Memory]] = {}
        self._works: dict[Work, tuple[Clock, Any]] = {}
        self._has_reported = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)
        # A wrapper such as DTensor unwraps itself first: its inner tensors come back here.
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented
        if self._has_reported:  # what cleans up after a report may do as it likes
            return func(*args, **kwargs)
        signature = self._signatures.get(func)
        if signature is None:
            signature = self._signatures[func] = Signature(func)
        return self._operate(signature, func, args, kwargs)

    def observe(self, step: StreamStep) -> None:
        """Hear of a stream or an event."""
        self._clocks.observe(step)
        if step.step is Step.TENSOR_RECORDED and step.tensor is not None:
            self._memory_of(step.tensor.untyped_storage()).recorded.add(step.stream)

    def patches(self) -> tuple[Patch, ...]:
        """What a dispatch mode does not see."""

        def table(owner: Any, wrap: Callable[..., Any], *names: str, reason: str) -> tuple[Patch, ...]:
            return tuple(
                Patch(owner=owner, name=name, value=wrap(getattr(owner, name), name), reason=reason) for name in names
            )

        return (
            *table(Work, self._joining, "wait", "synchronize", reason="join a collective"),
            *table(torch.UntypedStorage, self._resizing, "resize_", reason="frees and allocates"),
            *table(torch.Tensor, self._reading, *_READING_ON_HOST, reason="read, and synchronise the host"),
            *table(torch.Tensor, self._moving, "cuda", "to", reason="copy from the host to the device"),
            *table(torch, self._making, *_HOST_FACTORIES, reason="make tensors on the host"),
        )

    def _joining(self, original: Callable[..., Any], _name: str) -> Callable[..., Any]:
        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            clock, _tensors = self._works.pop(work, ({}, None))
            self._clocks.wait(torch.cuda.current_stream(), clock)
            return result

        return wait

    def _resizing(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            if storage.nbytes():
                self._give_back(self._memory_of(storage))
            result = original(storage, size)
            if not self._has_reported:
                self._allocate(storage, self._next(torch.cuda.current_stream(), f"UntypedStorage.{name}"))
            return result

        return resize

    def _reading(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            memory = self._memory_of(tensor.untyped_storage())
            if not self._has_reported and not memory.is_host:
                stream = torch.cuda.current_stream()
                self._check(tensor, memory, self._next(stream, f"Tensor.{name}"), is_write=False)
                self._clocks.synchronise_host(self._clocks.of(stream))
            return original(tensor, *args, **kwargs)

        return read

    def _moving(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            moved = original(tensor, *args, **kwargs)
            device = kwargs.get("device", args[0] if args else None)
            is_moved = isinstance(device, torch.device | int) or (isinstance(device, str) and device != "cpu")
            if name == "cuda" or is_moved:
                storage = moved.untyped_storage()
                if not self._has_reported and self._memory_of(storage).is_host:
                    self._allocate(storage, self._next(torch.cuda.current_stream(), f"Tensor.{name}"), moved)
            return moved

        return move

    def _making(self, original: Callable[..., Any], _name: str) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            tensor = original(*args, **kwargs)
            device = kwargs.get("device")
            if device is None or device == "cpu":  # a torch.device of the CPU is what a "CUDA" tensor has here
                self._memory_of(tensor.untyped_storage()).is_host = True
            return tensor

        return make

    def _operate(self, signature: Signature, func: Any, args: Any, kwargs: Any) -> Any:
        given = [(t, self._memory_of(t.untyped_storage()), kind) for t, kind in signature.given(args, kwargs)]
        if given and all(memory.is_host for _, memory, _ in given):
            outputs = func(*args, **kwargs)
            for tensor in self._made(outputs):
                self._memory_of(tensor.untyped_storage()).is_host = True
            return outputs
        stream = torch.cuda.current_stream()
        is_asynchronous = signature.is_asynchronous(args)
        if is_asynchronous:
            current, stream = stream, signature.group_stream(args)
            self._clocks.wait(stream, self._clocks.of(current))
        access = None
        if any(is_write is not None for _, _, is_write in given):
            access = self._next(stream, signature.operation)
            # Before the operation: a collective that is under way could not be taken back.
            for tensor, memory, is_write in given:
                if is_write is not None and not memory.is_host:
                    self._check(tensor, memory, access, is_write=is_write)
        if is_asynchronous:
            outputs = func(*args, **kwargs)
            self._works[_work_of(outputs)] = (dict(self._clocks.of(stream)), given)
        elif signature.is_collective:
            outputs = _run_on_copies(func, args, [(tensor, is_write) for tensor, _, is_write in given])
        else:
            outputs = func(*args, **kwargs)
            for tensor in self._made(outputs):
                access = access or self._next(stream, signature.operation)
                self._allocate(tensor.untyped_storage(), access, tensor)
        if signature.synchronises(args):
            self._clocks.synchronise_host(self._clocks.of(stream))
        return outputs

    def _made(self, outputs: Any) -> list[torch.Tensor]:
        """The outputs whose storages are new."""
        return [tensor for tensor in tensors_in(outputs) if tensor.untyped_storage()._cdata not in self._memory]

    def _next(self, stream: Stream, operation: str) -> Access:
        self.operations += 1
        self.streams.add(stream)
        return Access(stream, self._clocks.next(stream), operation, *place_of_call())

    def _check(self, tensor: torch.Tensor, memory: Memory, access: Access, *, is_write: bool) -> None:
        extent = extent_of(tensor)
        if extent[0] == extent[1]:
            return
        memory.last = (tensor.shape, tensor.dtype)
        for what, earlier in memory.earlier(extent, reads=is_write):
            if not self._clocks.covers(access.stream, earlier):
                self._report(
                    f"{memory} is {'written' if is_write else 'read'} by {access}, and was {what} by "
                    f"{earlier}: no event orders the second after the first"
                )
        memory.add(extent, access, is_write=is_write)

    def _allocate(self, storage: torch.UntypedStorage, access: Access, tensor: torch.Tensor | None = None) -> None:
        """The allocator gives a storage memory of the access's stream: perhaps what has been returned there.

        It counts as written there, since whatever the memory was before belongs to that stream.
        """
        self._memory_of(storage)
        if storage.nbytes() == 0:
            return
        for dead in self._returned.pop(access.stream, ()):
            for what, earlier in dead.earlier(None, reads=True):
                if earlier.stream not in dead.recorded and not self._clocks.covers(access.stream, earlier):
                    self._report(
                        f"the memory of {dead}, which is dead, may be given to {access}, and was {what} by {earlier}: "
                        f"no event orders the second after the first. Hold the tensor until "
                        f"{stream_name(access.stream)} has waited, or use record_stream"
                    )
        memory = self._memory[storage._cdata] = Memory(access.stream)
        memory.last = None if tensor is None else (tensor.shape, tensor.dtype)
        memory.add((0, storage.nbytes()), access, is_write=True)

    def _memory_of(self, storage: torch.UntypedStorage) -> Memory:
        address = storage._cdata
        memory = self._memory.get(address)
        if memory is None:
            self._deaths[address] = weakref.ref(storage, partial(self._forget, address))
            memory = self._memory[address] = Memory()
        return memory

    def _forget(self, address: int, _dead: Any) -> None:
        del self._deaths[address]
        self._give_back(self._memory.pop(address))

    def _give_back(self, memory: Memory) -> None:
        if memory.allocated_on is not None:
            self._returned.setdefault(memory.allocated_on, []).append(memory)

    def _report(self, message: str) -> None:
        self._has_reported = True
        raise RaceError(message)


def _run_on_copies(func: Any, args: Any, given: list[tuple[torch.Tensor, bool | None]]) -> Any:
    """Run a collective to its end on copies: gloo's threads let go of its tensors at a moment that nobody controls."""
    copies = {id(tensor): tensor.clone() for tensor, _ in given}
    outputs = func(*tree_map_only(torch.Tensor, lambda tensor: copies[id(tensor)], args))
    _work_of(outputs).wait()
    for tensor, is_write in given:
        if is_write:
            tensor.data.copy_(copies[id(tensor)])  # .data: autograd counts no change, as in the collective itself
    return outputs


def _work_of(outputs: Any) -> Work:
    return Work.unbox(outputs[-1] if isinstance(outputs, tuple) else outputs)


@contextmanager
def checking_races() -> Iterator[RaceChecker]:
    """Check every access to a tensor while the block lasts.

    Yields:
        the checker, which counts what it has checked.

    Raises:
        RaceError: at the second of two accesses that no event orders, and at an allocation that may reuse memory which
            another stream may still be using. It names the tensor, both operations, their streams, where they were
            called, and the ops of the plan. After the first report the block checks nothing any more.
        RuntimeError: the host device is not active.
    """
    checker = RaceChecker()
    with observing(checker.observe):
        patches = AppliedPatches(checker.patches())
        try:
            with checker:
                yield checker
        finally:
            patches.restore()
