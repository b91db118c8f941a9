"""What cannot work with pipeline stages is refused on every rank, before any work, and a good call works afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_models import config_of, parallel
from parity_testing import forward_step
from pipeline_testing import Stages, run_pipeline, set_flags

import combined_1f1b
from combined_1f1b.errors import ConfigError

pytestmark = pytest.mark.world_size(2)


@pytest.fixture(autouse=True)
def on_device(device):
    return device


def build(vpp: int, **changes: Any) -> list[Any]:
    chunks: list[Any] = Stages(pp=2, vpp=vpp, changes=changes).build()
    set_flags(chunks, True)
    return chunks


def groups(vpp: int) -> Any:
    virtual = {"virtual_pipeline_model_parallel_size": vpp} if vpp > 1 else {}
    return parallel(pipeline_model_parallel_size=2, **virtual)


def two_shapes(received: list[Any], sent: list[Any]) -> tuple[list[Any], list[Any]]:
    return received * 2, sent * 2


FLAG = "overlap_moe_expert_parallel_comm"
CALLS: dict[str, tuple[int, dict[str, Any], str]] = {
    "several tensors between stages": (
        1, {"adjust_tensor_shapes_fn": two_shapes}, f"adjust_tensor_shapes_fn=.*one shape, or set {FLAG}=False",
    ),
    "no micro-batch": (1, {"num_microbatches": 0}, "num_microbatches=0: .*use at least 1"),
    "chunks, no micro-batch": (2, {"num_microbatches": 0}, "num_microbatches=0: .*use at least 1"),
    "chunks, fewer micro-batches than stages": (
        2, {"num_microbatches": 1}, r"num_microbatches=1: fewer than pp=2; use at least 2",
    ),
    "chunks, a group too small": (2, {"num_microbatches": 3}, r"num_microbatches=3: the last group .*; use 2 or 4"),
}  # fmt: skip
SETTINGS: dict[str, tuple[int, dict[str, Any], str]] = {
    "lengths that vary": (1, {"variable_seq_lengths": True}, "variable_seq_lengths=True: .*pad to one length"),
    "checkpoints of some micro-batches": (
        1, {"num_microbatches_with_partial_activation_checkpoints": 1},
        "num_microbatches_with_partial_activation_checkpoints=1: .*use None",
    ),
    "Megatron's overlap without chunks": (1, {"overlap_p2p_comm": True}, "overlap_p2p_comm=True: .*=False"),
    "no mixture of experts": (1, {"moe_layer_freq": [0, 0]}, r"moe_layer_freq=\[0, 0\]: .*at least one layer"),
    "chunks, no mixture of experts": (2, {"moe_layer_freq": [0] * 4}, r"moe_layer_freq=\[0, 0, 0, 0\]: .*at least"),
    "chunks, a group smaller than the stages": (
        2, {"microbatch_group_size_per_vp_stage": 1}, "microbatch_group_size_per_vp_stage=1: .*use 2 to 4",
    ),
    "chunks, a group larger than the iteration": (
        2, {"microbatch_group_size_per_vp_stage": 5}, "microbatch_group_size_per_vp_stage=5: .*use 2 to 4",
    ),
}  # fmt: skip


def assert_refused(chunks: list[Any], pattern: str, *, num_microbatches: int = 4, **options: Any) -> None:
    calls: list[Any] = []

    def step(data: Any, model: Any) -> Any:
        calls.append(model)
        return forward_step(data, model)

    with pytest.raises(ConfigError, match=pattern):
        run_pipeline(chunks, num_microbatches=num_microbatches, step=step, **options)
    assert not calls


def assert_usable(chunks: list[Any]) -> None:
    run_pipeline(chunks, num_microbatches=4)
    assert all(parameter.grad is not None for chunk in chunks for parameter in chunk.parameters())
    assert combined_1f1b.last_step().num_microbatches == 4


@pytest.mark.parametrize(("vpp", "options", "pattern"), CALLS.values(), ids=CALLS)
def test_arguments(vpp, options, pattern):
    with groups(vpp), combined_1f1b.install():
        chunks = build(vpp)
        assert_refused(chunks, pattern, **options)
        assert_usable(chunks)


@pytest.mark.parametrize(("vpp", "settings", "pattern"), SETTINGS.values(), ids=SETTINGS)
def test_settings(vpp, settings, pattern):
    """Set after the models are built, as the constructor would refuse most of them itself."""
    with groups(vpp), combined_1f1b.install():
        chunks = build(vpp)
        for chunk in chunks:
            vars(config_of(chunk)).update(settings)
        assert_refused(chunks, pattern)


def test_head_and_tail_are_not_paired_with_chunks():
    with groups(2):
        with combined_1f1b.install(combined_1f1b.OverlapOptions(pair_head_and_tail=True)):
            chunks = build(2)
            assert_refused(chunks, "pair_head_and_tail=True: .*use pair_head_and_tail=False with vpp > 1")
        with combined_1f1b.install():
            assert_usable(chunks)


@pytest.mark.parametrize("vpp", [1, 2])
def test_stages_that_disagree_on_the_number_of_microbatches_all_say_so(vpp):
    mine = 4 + 2 * torch.distributed.get_rank()
    with groups(vpp), combined_1f1b.install():
        chunks = build(vpp)
        for _ in range(2):
            pattern = rf"num_microbatches={mine}: ranks disagree, by rank of the pipeline-parallel group: \[4, 6\]"
            assert_refused(chunks, pattern, num_microbatches=mine)
        assert_usable(chunks)


@pytest.mark.parametrize(("vpp", "layers"), [(1, 3), (2, 2), (2, 6)])
def test_layers_that_cannot_be_split_are_refused_by_megatron_when_the_model_is_built(vpp, layers):
    with groups(vpp), combined_1f1b.install(), pytest.raises((AssertionError, ValueError), match="divi"):
        build(vpp, num_layers=layers)


def test_dense_layers_and_stages_without_experts_run():
    with groups(2), combined_1f1b.install():
        assert_usable(build(2, moe_layer_freq=[0, 0, 1, 0]))
