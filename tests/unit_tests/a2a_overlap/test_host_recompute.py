"""Megatron's recompute without output runs on the host device: no compiler, in captures, under race checks."""

from __future__ import annotations

import pytest
import torch
from host_models import parallel
from megatron.core.tensor_parallel import CheckpointWithoutOutput, random

from combined_1f1b import host

pytestmark = [
    pytest.mark.world_size(1),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the host device is for machines without a GPU"),
]


@pytest.fixture(autouse=True)
def active(device, monkeypatch):
    def load_inline(**options):
        raise AssertionError("a compiler was called")

    monkeypatch.setattr(random, "load_inline", load_inline)
    monkeypatch.setattr(random, "_share_storage_ext", None)
    with parallel(graphable_random_state=True):
        yield


def loss_of(source: torch.Tensor, weight: torch.Tensor, *, recomputes: bool) -> torch.Tensor:
    """A product with an activation of which the backward needs a view: the one that was saved, or the recomputed."""
    if not recomputes:
        return (torch.nn.functional.gelu(source).view(2, 6) @ weight).square().sum()
    checkpoint = CheckpointWithoutOutput(fp8=None)
    activation = checkpoint.checkpoint(torch.nn.functional.gelu, source)
    product = activation.view(2, 6) @ weight
    checkpoint.discard_output_and_register_recompute(product)
    assert activation.untyped_storage().nbytes() == 0
    return product.square().sum()


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(*shape, generator=generator).requires_grad_() for shape in ((3, 4), (6, 2)))


def gradients(*, recomputes: bool) -> list[torch.Tensor]:
    inputs = leaves()
    loss_of(*inputs, recomputes=recomputes).backward()
    return [tensor.grad for tensor in inputs]


def test_gradients_are_those_without_recompute():
    assert all(map(torch.equal, gradients(recomputes=True), gradients(recomputes=False)))


def test_the_storage_is_filled_below_autograd():
    dst, src = torch.zeros(12), torch.arange(20.0)[4:16]
    view = dst.view(3, 4)[1]
    versions = dst._version, view._version
    dst.untyped_storage().resize_(0)
    random._get_share_storage()(dst, src)
    assert torch.equal(dst, torch.arange(12.0))  # the source's storage from its start, as the extension does it
    assert torch.equal(view, torch.arange(4.0, 8.0))
    assert dst.untyped_storage().nbytes() == src.untyped_storage().nbytes() == 80
    assert (dst._version, view._version) == versions


def test_a_graph_replays_it():
    source, weight = leaves()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss_of(source, weight, recomputes=True).backward()
    captured = [tensor.grad for tensor in (source, weight)]
    for turn in range(2):
        with torch.no_grad():
            source.add_(turn)
            captured[0].zero_()
            captured[1].zero_()
        graph.replay()
        fresh = [tensor.detach().clone().requires_grad_() for tensor in (source, weight)]
        loss_of(*fresh, recomputes=False).backward()
        assert all(torch.equal(one, two.grad) for one, two in zip(captured, fresh, strict=True))


@pytest.mark.parametrize("waits", [True, False])
def test_races(waits):
    """The filling is an access of the stream that it is called on."""
    with host.checking_races():
        dst, src = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        dst.untyped_storage().resize_(0)
        random._get_share_storage()(dst, src)
        if waits:
            side.wait_stream(current)
            with torch.cuda.stream(side):
                dst.sum()
        else:
            with torch.cuda.stream(side), pytest.raises(host.RaceError, match=r"aten.sum.*written by aten.copy_"):
                dst.sum()
