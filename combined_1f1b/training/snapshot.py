"""What a step left behind, named, so that two schedules can be compared bit for bit; and the traffic it caused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of what one iteration computed on this rank, by kind ("losses", "gradients", "parameters") and name."""

    tensors: dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two snapshots first differ. largest: the largest absolute difference of that tensor."""

    name: str
    largest: float
    rank: int


def take_losses(reports: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The sum and count of every micro-batch, as the loss function reported them."""
    return {f"micro-batch {index}": report["sums"].clone() for index, report in enumerate(reports)}


def take_gradients(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Reduced gradients by name; full tensors when the model is sharded. Every data-parallel rank must call it."""
    result: dict[str, torch.Tensor] = {}
    for number, chunk in enumerate(chunks):
        if hasattr(chunk, "full_gradients"):
            named = chunk.full_gradients()
        else:
            parameters = chunk.module.named_parameters()
            named = {name: parameter.main_grad for name, parameter in parameters if parameter.requires_grad}
        result |= {f"{number}.{name}": tensor.detach().clone() for name, tensor in named.items()}
    return result


def take_parameters(trainer: Any) -> dict[str, torch.Tensor]:
    """Main weights by name; full tensors when the model is sharded. Every data-parallel rank must call it."""
    result: dict[str, torch.Tensor] = {}
    main_weights = trainer.optimizer.main_weights
    mains = {id(model): main for model, main in main_weights.pairs} if main_weights is not None else {}
    for number, chunk in enumerate(trainer.chunks):
        if hasattr(chunk, "full_parameters"):
            named = chunk.full_parameters()
        else:
            named = {name: mains.get(id(parameter), parameter) for name, parameter in chunk.module.named_parameters()}
        result |= {f"{number}.{name}": tensor.detach().clone() for name, tensor in named.items()}
    return result


def first_difference(mine: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> Difference | None:
    """Compare bit for bit over all ranks; every rank gets the same answer.

    Returns:
        None when every rank holds the same names with the same bits, else the first difference on the lowest rank.
    """
    import torch

    found: Difference | None = None
    rank = torch.distributed.get_rank()
    for name in sorted(mine.keys() | reference.keys()):
        left, right = mine.get(name), reference.get(name)
        if left is None or right is None:
            found = Difference(f"{name} ({'missing' if left is None else 'extra'})", float("inf"), rank)
            break
        if left.shape != right.shape or not torch.equal(left, right):
            largest = (left.double() - right.double()).abs().max().item() if left.shape == right.shape else float("inf")
            found = Difference(name, largest, rank)
            break
    everyone: list[Difference | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, found)
    return next((difference for difference in everyone if difference is not None), None)


@dataclass(slots=True)
class Traffic:
    """All-to-all calls of this rank and the bytes it sent in them."""

    calls: int = 0
    sent_bytes: int = 0


@contextlib.contextmanager
def counting_all_to_all() -> Iterator[Traffic]:
    """Count the all-to-all calls of a block. Megatron looks the function up at each call, so replacing it is enough."""
    import torch

    traffic = Traffic()
    original = torch.distributed.all_to_all_single

    def counted(output: torch.Tensor, input: torch.Tensor, *arguments: Any, **options: Any) -> Any:  # noqa: A002 - torch's name
        traffic.calls += 1
        traffic.sent_bytes += input.numel() * input.element_size()
        return original(output, input, *arguments, **options)

    torch.distributed.all_to_all_single = counted
    try:
        yield traffic
    finally:
        torch.distributed.all_to_all_single = original


@contextlib.contextmanager
def summing_in_rank_order() -> Iterator[None]:
    """Make reduce-scatters of a block add their terms in the order of the ranks.

    A ring adds each chunk in an order of its own, starting at another rank. Where two partitions put a parameter into
    different chunks, more than two ranks then give other last bits, though both are right. With one order for all,
    partitions can be compared bit for bit. It costs the same bytes, sent as an all-to-all.
    """
    import torch

    original = torch.distributed.reduce_scatter_tensor
    exchange = torch.distributed.all_to_all_single

    def ordered(
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        op: Any = torch.distributed.ReduceOp.SUM,
        group: Any = None,
        **options: Any,
    ) -> Any:
        ranks = torch.distributed.get_world_size(group)
        is_average = op == torch.distributed.ReduceOp.AVG
        if options.get("async_op") or not (is_average or op == torch.distributed.ReduceOp.SUM):
            return original(output, input, op=op, group=group, **options)
        received = torch.empty_like(input)
        exchange(received, input.contiguous(), group=group)
        terms = received.view(ranks, *output.shape)
        total = terms[0].clone()
        for term in terms[1:]:
            total += term
        output.copy_(total / ranks if is_average else total)
        return None

    torch.distributed.reduce_scatter_tensor = ordered
    try:
        yield
    finally:
        torch.distributed.reduce_scatter_tensor = original
