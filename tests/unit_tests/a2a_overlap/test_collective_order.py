"""Ranks issue the collectives of every group in the same order, and each transfer has its other end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from collective_testing import Record, Recorder, differences, gathered
from host_models import config_of, iteration, parallel
from megatron.core.distributed import finalize_model_grads
from pipeline_testing import Stages, run_pipeline, set_flags

import combined_1f1b
from combined_1f1b.schedule import executor
from combined_1f1b.schedule.executor import Issue
from combined_1f1b.schedule.plan import Plan

TIED = {"share_embeddings_and_output_weights": True}
CASES_OF_ONE_STAGE: dict[str, dict[str, Any]] = {
    "no pipelining": {},
    "no pipelining, paired": {"pair": True},
    "no pipelining, sharded": {"sharded": True},
}
CASES_OF_TWO_STAGES: dict[str, dict[str, Any]] = {
    "interleaved": {"pp": 2, "vpp": 2},
    "interleaved, sharded": {"pp": 2, "vpp": 2, "sharded": True},
    "pipelining": {"pp": 2},
    "pipelining, paired": {"pp": 2, "pair": True},
    "pipelining, sharded": {"pp": 2, "sharded": True},
}


@contextmanager
def prepared(
    *, pp: int = 1, vpp: int = 1, pair: bool = False, sharded: bool = False, **changes: Any
) -> Iterator[list[Any]]:
    """Chunks of a model of four layers; where there are ranks enough, two are expert-parallel."""
    sizes = {"pipeline_model_parallel_size": pp} if pp > 1 else {}
    sizes |= {"virtual_pipeline_model_parallel_size": vpp} if vpp > 1 else {}
    experts = min(2, torch.distributed.get_world_size() // pp)
    options = combined_1f1b.OverlapOptions(pair_head_and_tail=pair)
    with combined_1f1b.install(options), parallel(**sizes, expert_model_parallel_size=experts):
        chunks: list[Any] = Stages(pp=pp, vpp=vpp, changes={"num_layers": 4, **TIED, **changes}).build()
        for chunk in chunks:
            config_of(chunk).finalize_model_grads_func = finalize_model_grads if sharded else None
        set_flags(chunks, True)
        yield combined_1f1b.shard_model(chunks, config_of(chunks[0])) if sharded else chunks


def run(chunks: list[Any]) -> None:
    if len(chunks) == 1 and config_of(chunks).pipeline_model_parallel_size == 1:
        iteration(chunks[0], combined=True, num_microbatches=4)
    else:
        run_pipeline(chunks, num_microbatches=4)
    for chunk in chunks:
        chunk.zero_grad()


def recorded(chunks: list[Any]) -> list[list[Record]]:
    """What every rank issues in one iteration."""
    run(chunks)  # what is exchanged only once, such as the number of micro-batches
    with Recorder() as recorder:
        run(chunks)
    return gathered(recorder)


@pytest.fixture(autouse=True)
def on_device(device):
    return device


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", CASES_OF_ONE_STAGE.values(), ids=CASES_OF_ONE_STAGE)
def test_one_stage(case):
    assert_one_order(case)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", CASES_OF_TWO_STAGES.values(), ids=CASES_OF_TWO_STAGES)
def test_two_stages(case):
    assert_one_order(case)


def assert_one_order(case: dict[str, Any]) -> None:
    with prepared(**case) as chunks:
        records = recorded(chunks)
    vpp, pp = case.get("vpp", 1), case.get("pp", 1)
    assert differences(records, links=vpp == 1) == []
    for own in records:
        kinds = Counter(record.kind for record in own)
        in_plan = Counter(re.split(r"[\d.]", record.op)[0] for record in own)
        # 4 micro-batches; tokens and probabilities dispatched and tokens combined, for each of the rank's layers
        assert in_plan["F"] >= in_plan["B"] == 4 * 3 * (4 // pp)
        if vpp > 1:
            assert kinds["send"] + kinds["recv_"] == 4 * 2 * (pp * vpp - 1)
        elif pp > 1:
            assert [in_plan[end] for end in ("SEND_F", "RECV_B", "SEND_B", "RECV_F")].count(4) == 2
        if case.get("sharded"):
            assert min(in_plan["GATHER"], in_plan["REDUCE"]) > 4


def moved(plan: Plan, first: str, second: str, *, compiled: Callable[[Plan], tuple[Issue, ...]]) -> tuple[Issue, ...]:
    """The plan as compiled, but with its first op directly behind the second."""
    issues = list(compiled(plan))
    names = [op.name for op in plan.ops]
    issue = issues.pop(names.index(first))
    issues.insert(names.index(second), issue)
    return tuple(issues)


MOVES: dict[str, tuple[dict[str, Any], tuple[str, str], str]] = {
    "two all-to-alls of one size": ({}, ("F2.L1.combine", "B1.L1.combine"), r"F2\.L1\.combine, .*B1\.L1\.combine"),
    "two transfers of one link": ({"pp": 2}, ("RECV_F2", "SEND_B0"), r"in SEND_F2, send .* in SEND_B0"),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("case", "names", "report"), MOVES.values(), ids=MOVES)
def test_one_rank_in_another_order_is_noticed(case, names, report, monkeypatch):
    if torch.distributed.get_rank() == 1:
        changed = partial(moved, first=names[0], second=names[1], compiled=executor.compile_plan)
        monkeypatch.setattr(executor, "compile_plan", changed)
    with prepared(**case, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True) as chunks:
        (difference,) = differences(recorded(chunks), links=True)
    assert re.search(report, difference), difference
