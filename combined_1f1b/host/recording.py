"""Record the operations of a capture on a tape, and keep the promise that a capture computes nothing.

On CUDA the operations of a capture run at the first replay. Here they run while they are recorded, since Python needs
tensors to go on with; so what they did to memory from before the capture is undone at its end, random states included,
and what they computed is overwritten with NaN, which only a replay turns into results.

What belongs into the graph: work on "CUDA" tensors that is issued to a stream of the capture. Every tensor here is a
CPU tensor, so the recording keeps track of those that would be CPU tensors on a GPU machine too (made without a device,
or with the string "cpu"; a torch.device of the CPU may be that of a "CUDA" tensor). Work on them is left out of the
graph, as CUDA leaves it out. A tensor from before the capture counts as a CUDA tensor.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor
from torch.distributed import Work
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from combined_1f1b.host.accesses import Signature
from combined_1f1b.host.capture import Capture, Started
from combined_1f1b.host.capture_errors import CaptureFault
from combined_1f1b.host.random import HostDefaultGenerator, HostGeneratorState
from combined_1f1b.host.tape import (
    Collective,
    GeneratorSwap,
    Operation,
    StorageSize,
    Tape,
    Wait,
    alias,
    storage_key,
    tensors_of,
    works_of,
)

_OUTSIDE_RNG = "Attempt to increase offset for a CUDA generator not in capture mode."
_EMPTY = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})
_WRITES_BY_INDEX = frozenset({"aten::index_put_", "aten::index_put", "aten::_index_put_impl_"})
_MASKS = (torch.bool, torch.uint8)


class Placement(enum.Enum):
    """The device that a call in progress names for its result."""

    UNNAMED = enum.auto()  # C++ allocates where its arguments are
    DEFAULT = enum.auto()  # Python's constructors without a device mean the host
    DEVICE = enum.auto()
    HOST = enum.auto()


class _Awaited(NamedTuple):
    """What `Work.wait` waits for; without a collective it started outside the capture.

    Attributes:
        started: how the capture knows it, if it is asynchronous.
        is_host: it moves memory of the host, which is no work of the graph.
    """

    work: Work
    collective: Collective | None = None
    started: Started | None = None
    is_host: bool = False


class Recording(TorchDispatchMode):
    """Records what is issued between `start` and `finish`.

    Args:
        capture: the rules of the capture.
        generator: the default generator.
        registered: the graph-safe states that may be drawn from, besides the one that is current.
        current_stream: the stream that work goes to now.
    """

    def __init__(
        self,
        capture: Capture,
        *,
        generator: HostDefaultGenerator,
        registered: Iterable[HostGeneratorState],
        current_stream: Callable[[], Any],
    ) -> None:
        super().__init__()
        self.capture = capture
        self.placement = Placement.UNNAMED
        self._current_stream = current_stream
        self._generator = generator
        self._state = generator.graphsafe_get_state()
        self._registered = {id(state): state for state in (self._state, *registered)}
        self._random_states = [(state, state.get_state()) for state in self._registered.values()]
        self._tape = Tape(generator, self._state)
        self._born: dict[int, torch.Tensor] = {}
        self._host: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._works: dict[int, _Awaited] = {}
        self._is_suspended = False

    def finish(self) -> Tape:
        """Undo what the capture did to memory and random states from before it.

        Returns:
            What a replay runs.
        """
        for storage, content in self._before.values():
            if storage.nbytes() != content.nbytes():
                storage.resize_(content.nbytes())
            storage.copy_(content)
        self._generator.graphsafe_set_state(self._state)
        for state, values in self._random_states:
            state.set_state(values)
        for tensor in self._born.values():
            if tensor.dtype.is_floating_point and tensor.untyped_storage().nbytes():
                tensor.fill_(float("nan"))
        return self._tape

    # What the dispatcher does not see

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave out the operations of a block: the copies inside a collective's wait, which a replay waits for too."""
        outside, self._is_suspended = self._is_suspended, True
        try:
            yield
        finally:
            self._is_suspended = outside

    @contextlib.contextmanager
    def placing(self, placement: Placement) -> Iterator[None]:
        """Around a call that names the device of its result."""
        outside, self.placement = self.placement, placement
        try:
            yield
        finally:
            self.placement = outside

    def read_on_host(self, tensor: torch.Tensor, call: str) -> None:
        """The host asks for a tensor's values, which on CUDA synchronises the stream."""
        if not self._is_host(tensor):
            raise self.capture.fail(CaptureFault.UNSUPPORTED, f"{call} waits for the device")

    def copy_from_host(self, tensor: torch.Tensor, call: str) -> None:
        """The host's pageable memory is copied to the device, which on CUDA synchronises the stream."""
        if self._is_host(tensor):
            raise self.capture.fail(CaptureFault.UNSUPPORTED, f"{call} copies from memory of the host")

    def mark_host(self, value: Any) -> Any:
        """Remember tensors as what would be CPU tensors on a GPU machine too."""
        for tensor in tensors_of(value):
            self._host[storage_key(tensor)] = tensor
        return value

    def wait(self, work: Work) -> None:
        """Python waits for a collective."""
        awaited = self._works.get(id(work), _Awaited(work))
        if awaited.is_host:
            return
        if awaited.collective is None or awaited.started is not None:
            self.capture.join(self._current_stream(), awaited.started)
        if awaited.collective is not None:
            self._tape.steps.append(Wait(awaited.collective))

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """A storage is about to be resized."""
        if self._current_stream() in self.capture and not self._is_suspended:
            with self.suspended():
                self._save(storage)
            self._tape.steps.append(StorageSize(storage, size))

    def swap(self, state: HostGeneratorState) -> None:
        """A graph-safe state becomes current."""
        if self._current_stream() in self.capture:
            self._tape.steps.append(GeneratorSwap(self._generator, state))

    # The dispatch mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_suspended:
            return func(*args, **kwargs)
        inputs = tensors_of((args, kwargs))
        if any(isinstance(tensor, FakeTensor) for tensor in inputs):
            return func(*args, **kwargs)  # DTensor asks for shapes only
        if any(type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for tensor in inputs):
            return NotImplemented  # a DTensor: it issues operations on its local tensor, and those are recorded
        if not self._is_device_work(func, inputs):
            result = self.mark_host(func(*args, **kwargs))
            if func.namespace == "c10d":
                self._remember(result, is_host=True)
            return result
        if _reads_values(func, args, kwargs):
            raise self.capture.fail(CaptureFault.UNSUPPORTED, f"{func} waits for the device")
        stream = self._current_stream()
        if stream in self.capture:
            return self._record(func, args, kwargs, inputs, stream)
        result = func(*args, **kwargs)
        if self.capture.refuses_unsafe_calls and self._fresh(result, inputs):
            # CUDA's allocator may still have a free block for that stream. Then the next wait for it fails instead.
            error = self.capture.fail(
                CaptureFault.UNSUPPORTED, f"{func} allocates on {stream!r}, which is outside the capture"
            )
            error.add_note(f"where the allocator has a free block: {CaptureFault.ISOLATION.value[0]} at the next wait")
            raise error
        return result

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor], stream: Any
    ) -> Any:
        if _is_view(func):
            return func(*args, **kwargs)
        self.capture.require_valid(stream)
        if torch.Tag.nondeterministic_seeded in func.tags and id(self._generator.live) not in self._registered:
            raise RuntimeError(_OUTSIDE_RNG)
        for tensor in _written(func, args, kwargs):
            self._save(tensor.untyped_storage())
        recorded = alias((args, kwargs))
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            collective = Collective(function=func, arguments=recorded[0], keywords=recorded[1])
            self._tape.steps.append(collective)
            signature, started = Signature(func), None
            if signature.is_asynchronous(args):
                started = self.capture.start(signature.operation, signature.group_stream(args), stream)
            else:
                self.capture.work(stream)
            self._remember(result, collective=collective, started=started)
            return result
        leaves = pytree.tree_leaves(result)
        fresh = {id(tensor) for tensor in self._fresh(result, inputs)}
        targets = tuple(alias(leaf) if id(leaf) in fresh else None for leaf in leaves)
        for target in targets:
            if target is not None:
                storage = target.untyped_storage()
                self._born[storage._cdata] = target
                self._tape.steps.append(StorageSize(storage, storage.nbytes()))
        if func._schema.name not in _EMPTY:
            self._tape.steps.append(
                Operation(function=func, arguments=recorded[0], keywords=recorded[1], targets=targets)
            )
            self.capture.work(stream)
        return result

    def _remember(self, result: Any, **awaited: Any) -> None:
        for boxed in works_of(result):
            work = Work.unbox(boxed)  # the very object on which Python will wait
            self._works[id(work)] = _Awaited(work, **awaited)

    def _is_host(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._host

    def _is_device_work(self, func: Any, inputs: list[torch.Tensor]) -> bool:
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor and its kin, which have filled a CPU tensor
            if self.placement is Placement.DEVICE:
                raise self.capture.fail(CaptureFault.UNSUPPORTED, "torch.tensor copies from memory of the host")
            return False
        if self.placement is Placement.HOST:
            return False
        if not inputs:
            return self.placement is not Placement.DEFAULT
        return not all(self._is_host(tensor) for tensor in inputs)

    def _fresh(self, result: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of a result whose memory the operation has allocated."""
        known = {storage_key(tensor) for tensor in inputs}
        return [tensor for tensor in tensors_of(result) if storage_key(tensor) not in known]

    def _save(self, storage: torch.UntypedStorage) -> None:
        """Keep the content of memory from before the capture, the first time that it is written."""
        if storage._cdata not in self._born and storage._cdata not in self._before:
            self._before[storage._cdata] = (storage, storage.clone())


def _is_view(func: Any) -> bool:
    """Whether an operator only makes an alias, or changes the shape of its argument: no work, and no replay."""
    if torch.Tag.inplace_view in func.tags:
        return True
    returns = func._schema.returns
    return bool(returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator may write. The schemas of collectives do not say, so those count as writing all."""
    if func.namespace == "c10d":
        return list(tensors_of((args, kwargs)))
    written: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += tensors_of(value)
    return written


def _reads_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator on CUDA tensors waits for their values, to return one or to know the shape of its result."""
    name = func._schema.name
    if name == "aten::index" or name in _WRITES_BY_INDEX:
        # One value written through a mask is a masked fill, which needs no count of what the mask selects.
        is_fill = name in _WRITES_BY_INDEX and args[2].numel() == 1 and not (len(args) > 3 and args[3])
        return not is_fill and any(tensor.dtype in _MASKS for tensor in tensors_of(args[1]))
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None and func._overloadname in ("Tensor", "self_Tensor")
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
