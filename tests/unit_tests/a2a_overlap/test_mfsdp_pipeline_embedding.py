"""The word embedding that the first and the last pipeline stage hold copies of, sharded: its gradients add up once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_models import config_of, differing
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from mfsdp_pipeline_testing import build_chunks, named, optimizer_of, run, shard, two_stages
from parity_testing import FP32

import combined_1f1b
from combined_1f1b.fsdp_adapter import mfsdp_v2
from combined_1f1b.fsdp_adapter.grad_norm import grad_norm
from combined_1f1b.fsdp_adapter.shared_embedding import SharedEmbedding
from combined_1f1b.fsdp_adapter.wrapper import ShardedDataParallel

TIED = {"share_embeddings_and_output_weights": True}
POSITIONS = {"position_embedding_type": "learned_absolute"}  # packed with the word embedding on one stage only


@pytest.fixture(autouse=True)
def installed(device):
    with combined_1f1b.install():
        yield


def sharded(vpp: int = 1, **changes: Any) -> list[Any]:
    return shard(build_chunks(vpp=vpp, **{**TIED, **changes}), combined=True)


def full_copies(wrapped: list[Any], method: str) -> list[torch.Tensor]:
    """The weight or its gradient, of both stages, on every rank of the embedding group."""
    (own,) = (one for one in wrapped if one.shared_embedding is not None)
    mine = getattr(own, method)()[own.shared_embedding.name]
    copies = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(copies, mine, group=parallel_state.get_embedding_group())
    return copies


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("register_hooks", [False, True])
@pytest.mark.parametrize("changes", [{**TIED, **POSITIONS}, {"mtp_num_layers": 1}, {"mtp_num_layers": 1, **TIED}])
def test_gradients_are_those_of_megatron_ddp_bitwise(changes, register_hooks):
    """One micro-batch in fp32: with more, the sums over ranks and over micro-batches are taken in other orders."""
    with two_stages(vpp=1):
        (plain,) = build_chunks(vpp=1, **FP32, **changes)
        ddp = DistributedDataParallel(plain.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), plain)
        ddp.zero_grad_buffer()
        losses = run([ddp], num_microbatches=1)
        expected = {f"0.{name}": parameter.main_grad for name, parameter in plain.named_parameters()}
        wrapped = shard(build_chunks(vpp=1, **FP32, **changes), combined=not register_hooks)
        assert run(wrapped, num_microbatches=1) == losses
        assert differing(named(wrapped, "full_gradients"), expected) == set()
        assert torch.equal(grad_norm(wrapped, plain.config), grad_norm(ddp, plain.config))  # one copy counts


@pytest.mark.world_size(4)
@pytest.mark.parametrize("vpp", [2, 1])
def test_copies_stay_equal_over_steps_and_hold_the_same_rows(vpp):
    with two_stages(vpp=vpp, ep=2):
        wrapped = sharded(vpp, **POSITIONS)
        optimizer = optimizer_of(wrapped)
        for _ in range(2):
            run(wrapped)
            assert torch.equal(*full_copies(wrapped, "full_gradients"))
            before = named(wrapped, "full_gradients")
            for one in wrapped:
                one.finish_grad_sync()  # the iteration's finalisation has done it
            assert differing(before, named(wrapped, "full_gradients")) == set()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*full_copies(wrapped, "full_parameters"))


@pytest.mark.world_size(2)
def test_without_megatron_s_finalisation_the_step_asks_for_it():
    with two_stages(vpp=1):
        (wrapped,) = sharded()
        config_of(wrapped).finalize_model_grads_func = None
        optimizer = optimizer_of([wrapped])
        with wrapped.no_sync():
            run([wrapped])
        run([wrapped])
        with pytest.raises(ValueError, match=r"weight lacks what the other pipeline stages.*finish_grad_sync"):
            optimizer.step()
        wrapped.finish_grad_sync()
        optimizer.step()
        assert torch.equal(*full_copies([wrapped], "full_parameters"))


@pytest.mark.world_size(2)
def test_gradients_are_not_added_to_those_that_were_exchanged():
    with two_stages(vpp=1):
        wrapped = sharded()
        run(wrapped)
        first = named(wrapped, "full_gradients")
        with pytest.raises(ValueError, match=r"would be added again.*zero_grad_buffer"):
            wrapped[0].shared_embedding.begin()
        wrapped[0].zero_grad_buffer()
        run(wrapped)
        assert differing(first, named(wrapped, "full_gradients")) == set()


@pytest.mark.world_size(2)
def test_copies_that_are_not_trained_alike_are_refused_before_anything_is_changed():
    with two_stages(vpp=1):
        chunks = build_chunks(vpp=1, frozen="output_layer", **TIED)
        with pytest.raises(ValueError, match=r"trained: \[1, 0\].*copies on the pipeline stages differ"):
            shard(chunks, combined=True)
        assert not any(isinstance(module, mfsdp_v2.FsdpModule) for module in chunks[0].modules())


# Faults put back on purpose.


@pytest.mark.world_size(2)
def test_without_the_exchange_the_copies_part(monkeypatch):
    monkeypatch.setattr(ShardedDataParallel, "finish_grad_sync", lambda self, force_all_reduce=False: None)
    with two_stages(vpp=1):
        wrapped = sharded()
        run(wrapped)
        assert not torch.equal(*full_copies(wrapped, "full_gradients"))


@pytest.mark.world_size(2)
def test_without_the_mark_megatron_adds_the_gradients_a_second_time(monkeypatch):
    begin = SharedEmbedding.begin

    def begin_unmarked(self: SharedEmbedding) -> None:
        for parameter in self._parameters.sharded_parameters:
            vars(parameter).pop("main_grad", None)
        begin(self)

    with two_stages(vpp=1):
        wrapped = sharded()
        run(wrapped)
        once, _ = full_copies(wrapped, "full_gradients")
        wrapped[0].zero_grad_buffer()
        monkeypatch.setattr(SharedEmbedding, "begin", begin_unmarked)
        run(wrapped)
        (parameter,) = wrapped[0].shared_embedding._parameters.sharded_parameters
        assert not isinstance(parameter.grad, type(parameter.data))  # a plain tensor in place of the shard's
        assert torch.equal(parameter.grad, 2 * once)


@pytest.mark.world_size(4)
def test_packed_with_other_weights_the_copies_would_hold_other_rows():
    with two_stages(vpp=1, ep=2):
        chunks = build_chunks(vpp=1, **TIED, **POSITIONS)
        for parameter in chunks[0].parameters():
            vars(parameter).pop("shared_embedding", None)
        (wrapped,) = shard(chunks, combined=False)  # the hooks' root unit, and Megatron's own call
        sizes = [torch.tensor(wrapped.groups[-1].main_weight.local_buffer.numel())]
        gathered = [torch.empty_like(sizes[0]) for _ in range(2)]
        dist.all_gather(gathered, sizes[0], group=parallel_state.get_embedding_group())
        assert len({int(size) for size in gathered}) == 2
