"""A node: one segment of a micro-batch's autograd graph, run forward and backward at moments that the plan chooses.

    forward:   tensors from the node before --(entry)--> function --> tensors for the node after
    backward:  gradients from the node after --> engine --> (entry) gradients for the node before

An entry cuts the graph: it is an identity whose backward keeps the gradients instead of passing them on. The graph
holds no reference to a tensor that entered, and a node holds its outputs as gradient edges, so an activation lives
exactly as long as some operation saved it. Nothing is freed by resizing a storage, which an output may alias.

Memory of one stream that a second stream still reads is safe as long as it is referenced (the caching allocator reuses
a block at once on the stream that allocated it). `Node.backward` therefore returns what has to be held, and the
executor drops it at the point where the plan says the allocating lane has waited for the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from combined_1f1b.schedule.weight_gradients import DelayedWeights, Pending


class _Entry(torch.autograd.Function):
    """Identity at the start of a segment; its backward stops there and leaves the gradients in the node's slots.

    The tensors come in a tuple, so that they are no inputs of the graph: what came before them stays apart. The anchor
    requires a gradient, so the aliases do too.
    """

    @staticmethod
    def forward(
        ctx: Any, _anchor: torch.Tensor, slots: list[torch.Tensor | None], tensors: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        ctx.slots = slots
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        """Keep the gradients; nothing flows on. Multi-token prediction's postprocess reaches back to its layer's entry,
        so a second engine call may bring a second contribution."""
        slots = ctx.slots
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                slots[index] = gradient if slots[index] is None else slots[index] + gradient
        return None, None, None


class BackwardResult(NamedTuple):
    """Gradients of a node's inputs, in order, and the references that the executor holds until the lanes have met."""

    input_gradients: tuple[torch.Tensor | None, ...]
    held: list[Any]


def no_record_stream(_stream: Any) -> None:
    """Stand-in for Tensor.record_stream, which makes captured memory grow: the executor holds the tensor instead."""


class Node:
    """One segment of one micro-batch. Megatron's layer callables receive it as their `node` argument.

    They use `layer_state`, `chunk_state`, `detach()`, `is_first_layer`, `is_last_layer` and `is_mtp`.

    Args:
        function: called as `function(node, *tensors)`; returns a tensor or a tuple of tensors.
        layer_state: attributes that the parts of one layer share.
        chunk_state: attributes that all nodes of the micro-batch share.
        keep_graph: keep what the graph saved until the executor drops it (nodes on the communication lane save tensors
            that the compute lane allocated).
        delayed: the part's weight gradients, when `weight_gradients` computes them instead of `backward`.
    """

    __slots__ = (
        "_anchor",
        "_before_detached",
        "_delayed",
        "_detached",
        "_edges",
        "_entered",
        "_function",
        "_has_slot",
        "_keep_graph",
        "_pending",
        "_slots",
        "chunk_state",
        "is_first_layer",
        "is_last_layer",
        "is_mtp",
        "layer_state",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        layer_state: Any,
        chunk_state: Any,
        keep_graph: bool = False,
        delayed: DelayedWeights | None = None,
        is_first_layer: bool = False,
        is_last_layer: bool = False,
        is_mtp: bool = False,
    ) -> None:
        self._function = function
        self._keep_graph = keep_graph
        self._delayed = delayed
        self._pending: Pending = []
        self._anchor = torch.empty(
            0, device="cpu", requires_grad=True
        )  # on the CPU it brings no stream into the engine
        self.layer_state = layer_state
        self.chunk_state = chunk_state
        self.is_first_layer = is_first_layer
        self.is_last_layer = is_last_layer
        self.is_mtp = is_mtp
        self.clear()

    def clear(self) -> None:
        """Forget the segment and its delayed weight gradients."""
        self._forget_segment()
        self._pending.clear()

    def _forget_segment(self) -> None:
        self._slots: list[torch.Tensor | None] = []
        self._has_slot: tuple[bool, ...] | None = None
        self._entered: list[StorageWeakRef] = []
        self._edges: list[GradientEdge | None] = []
        self._detached: list[torch.Tensor] = []
        self._before_detached: list[GradientEdge | None] = []

    def forward(self, inputs: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Run the function on aliases of `inputs` and keep the gradient edges of what it returns."""
        entering = tuple([tensor for tensor in inputs if tensor is not None and tensor.requires_grad])
        entries: tuple[torch.Tensor, ...] = ()
        if entering:
            self._slots = [None] * len(entering)
            entries = _Entry.apply(self._anchor, self._slots, entering)
        if len(entering) == len(inputs):
            arguments: Sequence[torch.Tensor | None] = entries
        else:
            self._has_slot = tuple([tensor is not None and tensor.requires_grad for tensor in inputs])
            entry = iter(entries)
            arguments = [
                next(entry) if has_slot else None if tensor is None else tensor.detach()
                for has_slot, tensor in zip(self._has_slot, inputs, strict=True)
            ]
        if not self._keep_graph:
            self._entered = [StorageWeakRef(tensor.untyped_storage()) for tensor in entering]
        delayed = self._delayed
        if delayed is not None:
            delayed.pending = self._pending
        outputs = self._function(self, *arguments)
        if delayed is not None:
            delayed.pending = None
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        self._edges = [_edge(output) for output in outputs]
        return outputs

    def detach(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cut `tensor` out of this segment for a later node of the layer; its gradient joins this node's backward.

        Returns:
            A leaf that aliases `tensor` and whose `record_stream` does nothing.
        """
        leaf = tensor.detach().requires_grad_(tensor.requires_grad)
        leaf.record_stream = no_record_stream  # type: ignore[method-assign]
        self._detached.append(leaf)
        self._before_detached.append(_edge(tensor))
        return leaf

    def backward(self, output_gradients: Sequence[torch.Tensor | None]) -> BackwardResult:
        """Run the engine over this segment once, from its outputs and its detached tensors.

        Args:
            output_gradients: one for each output of the forward; None where none arrived.
        """
        assert len(output_gradients) == len(self._edges), "one gradient for each output"
        held: list[Any] = [*output_gradients, *[leaf.grad for leaf in self._detached]]
        ends = zip((*self._edges, *self._before_detached), held, strict=True)
        reached = [end for end in ends if end[0] is not None and end[1] is not None]
        if not self._keep_graph:
            held += [torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in self._entered]
        delayed = self._delayed
        if delayed is not None:
            delayed.pending = self._pending  # a recomputed forward runs inside the engine
        if reached:
            roots, gradients = zip(*reached, strict=True)
            run_engine(roots, gradients, keep_graph=self._keep_graph)
            if self._keep_graph:
                held.append(roots)
        if delayed is not None:
            delayed.pending = None
        return BackwardResult(self.take_input_gradients(), held)

    def weight_gradients(self) -> list[Any]:
        """Compute and accumulate the weight gradients that `backward` has left; returns the references to hold."""
        assert self._delayed is not None, "the node's backward has computed them"
        return self._delayed.accumulate(self._pending)

    def take_input_gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Return what the entries kept, one for each input, and forget the segment."""
        gradients = tuple(self._slots)
        if self._has_slot is not None:
            slot = iter(gradients)
            gradients = tuple([next(slot) if has_slot else None for has_slot in self._has_slot])
        self._forget_segment()
        return gradients


def run_engine(roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], *, keep_graph: bool) -> None:
    """`torch.autograd.backward` for roots that have their gradients: without the checks, which cost half of a call."""
    torch.autograd.Variable._execution_engine.run_backward(
        roots, gradients, keep_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _edge(output: Any) -> GradientEdge | None:
    if not isinstance(output, torch.Tensor) or not output.requires_grad:
        return None
    node = output.grad_fn
    if node is None:
        return get_gradient_edge(output)
    if isinstance(node, torch._C._FunctionBase):  # what Python holds of such a node does not keep its graph
        return GradientEdge(output.view_as(output).grad_fn, 0)
    return GradientEdge(node, output.output_nr)
