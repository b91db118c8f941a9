"""The combined schedule has no race between its streams, and would have one without any single wait, hold or fork.

A training step runs under `host.checking_races()`. The mutations take one thing away at a time, on small plans one wait
after the other; each has to be reported, or the rule that makes it harmless stands beside it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from host_models import build, config_of, iteration, parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel.utils import get_comm_stream
from parity_testing import EXPERT_SIZE, run

import combined_1f1b
import combined_1f1b.host as host
from combined_1f1b.schedule import executor
from combined_1f1b.schedule.dependencies import LANE_NUMBER
from combined_1f1b.schedule.executor import Issue
from combined_1f1b.schedule.node import BackwardResult, Node
from combined_1f1b.schedule.ops import Kind, Lane
from combined_1f1b.schedule.plan import Plan

# Dropless dispatch synchronises the host in every forward, which orders more than the plan does.
NO_HOST_SYNC = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
CASES: dict[str, dict[str, Any]] = {
    "dropless": {"moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False},
    "drop and pad": {},
    "dense last": {"num_layers": 3, "moe_layer_freq": [1, 1, 0]},
    "tied": {"share_embeddings_and_output_weights": True},
    "multi-token prediction, tied": {"mtp_num_layers": 1, "share_embeddings_and_output_weights": True},
    "shared experts": {"moe_shared_expert_intermediate_size": 16},
    "early attention release": {"ep_overlap_early_attn_memory_release": True, "overlap_moe_expert_parallel_comm": True},
    "delayed weight gradients": {"delay_wgrad_compute": True, "overlap_moe_expert_parallel_comm": True},
}


@pytest.fixture(autouse=True)
def on_host(device):
    if not host.is_active():
        pytest.skip("the host device stands in for CUDA, which is there")


@contextmanager
def prepared(*, wrapper: str = "none", pair: bool = False, num_microbatches: int = 3, **changes: Any) -> Iterator[Any]:
    """A small model: yields a function that runs one training step of it; its `model` is the wrapped model."""
    options = combined_1f1b.OverlapOptions(pair_head_and_tail=pair)
    with combined_1f1b.install(options), parallel(expert_model_parallel_size=EXPERT_SIZE):
        module = build(expert_model_parallel_size=EXPERT_SIZE, **{**NO_HOST_SYNC, **changes})
        config = config_of(module)
        config.overlap_moe_expert_parallel_comm = True
        model = module
        if wrapper == "mfsdp":
            model = combined_1f1b.shard_model(module, config)
        elif wrapper == "ddp":
            settings = DistributedDataParallelConfig(bucket_size=400, overlap_grad_reduce=True)
            model = DistributedDataParallel(config, settings, module)
            config.no_sync_func = model.no_sync
            config.finalize_model_grads_func = finalize_model_grads
        optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
        if wrapper == "mfsdp":
            combined_1f1b.prepare_optimizer(optimizer, model)

        def step() -> None:
            if wrapper == "ddp":
                model.zero_grad_buffer()
            iteration(model, combined=True, num_microbatches=num_microbatches)
            if wrapper == "ddp":
                for parameter in model.parameters():
                    parameter.grad = parameter.main_grad.to(parameter.dtype)
            optimizer.step()
            optimizer.zero_grad()

        step.model = model
        yield step


def race_in(step: Callable[[], None], *, steps: int = 1) -> host.RaceError | None:
    """What race checking says to training steps. A second one reads what the first one's optimizer wrote."""
    try:
        with host.checking_races():
            for _ in range(steps):
                step()
    except host.RaceError as error:
        return error
    return None


RUNS = (
    *((name, wrapper, True) for name in CASES for wrapper in ("none", "mfsdp")),
    *((name, wrapper, False) for name in ("dropless", "drop and pad") for wrapper in ("none", "mfsdp")),
    *(("multi-token prediction, tied", "ddp", pair) for pair in (False, True)),
)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("name", "wrapper", "pair"), RUNS)
def test_models(name, wrapper, pair):
    with prepared(wrapper=wrapper, pair=pair, **CASES[name]) as step, host.checking_races() as checker:
        step()
    # compute and communication; and DDP's collectives in two groups, or MFSDP's gathers and reductions
    assert len(checker.streams) == (2 if wrapper == "none" else 4)


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize("wrapper", ["none", "ddp", "mfsdp"])
def test_two_steps_and_an_evaluation(wrapper):
    with prepared(wrapper=wrapper, pair=True) as step, host.checking_races():
        for _ in range(2):
            step()
            with torch.no_grad():
                run(step.model, forward_only=True)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("records", [True, False], ids=["with record_stream", "without"])
def test_megatrons_own_combined_schedule(records, monkeypatch):
    """Another program that is right, so that the checker does not just agree with ours; it relies on record_stream."""
    if not records:
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    with parallel(expert_model_parallel_size=EXPERT_SIZE):
        model = build(expert_model_parallel_size=EXPERT_SIZE, **NO_HOST_SYNC)
        error = race_in(lambda: iteration(model, combined=True))
    assert (error is None) == records, error


PLANS = {"unsharded": ("none", False), "unsharded, paired": ("none", True), "sharded": ("mfsdp", False)}


@pytest.fixture(params=PLANS)
def one_layer(request, monkeypatch):
    """A training step of one layer, the plan that it runs, and a function that runs it as compiled otherwise."""
    wrapper, pair = PLANS[request.param]
    with prepared(wrapper=wrapper, pair=pair, num_layers=1, num_microbatches=2) as step:
        step()
        plan = combined_1f1b.last_step().plan
        issues = executor.compile_plan(plan)

        def race_with(changed: dict[int, Issue]) -> host.RaceError | None:
            mutated = tuple(changed.get(issue.index, issue) for issue in issues)
            with monkeypatch.context() as patch:
                patch.setattr(executor, "compile_plan", lambda _plan: mutated)
                return race_in(step)

        yield plan, issues, race_with
        assert race_in(step) is None, "a race was reported with everything in place"


def is_covered(plan: Plan, index: int, wait: int) -> bool:
    """Whether a FREE does not need one of its waits, because the gather lane gives its memory to nobody before it waits
    for the same op, or a later one, anyway."""
    if plan.ops[index].kind is not Kind.FREE:
        return False
    waits = tuple(name for name in plan.ops[index].waits if name != plan.ops[wait].name)
    without = Plan(plan.shape, (*plan.ops[:index], plan.ops[index].with_waits(waits), *plan.ops[index + 1 :]))
    gathers = (later for later in range(index, len(plan.ops)) if plan.ops[later].kind is Kind.GATHER)
    lane = LANE_NUMBER[plan.ops[wait].issue_lane]
    return all(without.clocks[gather][lane] >= wait for gather in gathers)


@pytest.mark.world_size(2)
def test_every_wait_of_a_plan_is_needed(one_layer):
    plan, issues, race_with = one_layer
    for index, issue in enumerate(issues):
        for wait in issue.waits:
            error = race_with({index: issue._replace(waits=tuple(other for other in issue.waits if other != wait))})
            what = f"{issue.op.name} without its wait for {plan.ops[wait].name}"
            assert (error is None) == is_covered(plan, index, wait), f"{what}: {error}"
            if error is not None:
                assert len(re.findall(r" in (\S+) \(", str(error))) == 2, "a report names the plan's ops"


@pytest.mark.world_size(2)
def test_every_reference_is_held_as_long_as_needed(one_layer):
    """Dropped too early, what an op used may be overwritten by the ops that its allocating lane issues meanwhile."""
    plan, issues, race_with = one_layer
    held = [issue for issue in issues if issue.release > issue.index]
    other = {Lane.COMPUTE: Lane.COMM, Lane.COMM: Lane.COMPUTE}
    needed = [
        issue
        for issue in held
        if any(op.issue_lane is other[issue.op.lane] for op in plan.ops[issue.index + 1 : issue.release])
    ]
    for issue in needed:
        error = race_with({issue.index: issue._replace(release=issue.index)})
        assert "dead" in str(error), f"{issue.op.name} holds nothing: {error}"
    assert (
        race_with({issue.index: issue._replace(release=issue.index) for issue in held if issue not in needed}) is None
    )


# Where a wait is, what waits or is waited for, and what is reported without it. None: only a capture needs that wait,
# since the waits of the plan or of the reductions order the same accesses.
FORKS_AND_JOINS: dict[str, tuple[str, str, str | None]] = {
    "gathers wait for the optimizer": ("begin_iteration", "gather", r"read by c10d._allgather_base_"),
    "packing waits for the packed buffer": ("reduce_gradients", "current", r"written by aten.copy_ .*by aten.empty "),
    "reductions wait for the packing": ("reduce_gradients", "reduce", r"in REDUCE.*written by aten.copy_ .*in REDUCE"),
    "the optimizer waits for the reductions": ("finish_iteration", "current", r"read by aten.add_ .*in REDUCE"),
    "the communication lane waits for the caller": ("fork", "comm", None),
    "the caller waits for the communication lane": ("join", "current", None),
    "reductions wait for the backward": ("pre_backward", "reduce", None),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", FORKS_AND_JOINS)
def test_forks_and_joins(name, monkeypatch):
    function, role, report = FORKS_AND_JOINS[name]
    with prepared(wrapper="mfsdp", num_layers=1, num_microbatches=2) as step:
        context = step.model.context
        roles = {context.allgather_stream: "gather", context.reduce_scatter_stream: "reduce", get_comm_stream(): "comm"}
        wait_stream, dropped = host.HostStream.wait_stream, []

        def wait(waiting: host.HostStream, other: host.HostStream) -> None:
            callers = {sys._getframe(depth).f_code.co_name for depth in (1, 2)}
            if function in callers and roles.get(waiting, "current") == role:
                dropped.append(function)
            else:
                wait_stream(waiting, other)

        monkeypatch.setattr(host.HostStream, "wait_stream", wait)
        error = race_in(step, steps=2)
    assert dropped
    if report is None:
        assert error is None
    else:
        assert re.search(report, str(error)), error


HELD: dict[str, Callable[[Any], bool]] = {
    "gradients": lambda one: isinstance(one, torch.Tensor),
    "what entered": lambda one: isinstance(one, torch.UntypedStorage),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", HELD)
def test_what_a_backward_holds(name, monkeypatch):
    """With one expert on each rank, its first linear saves the very tensor that the dispatch has made."""
    backward = Node.backward

    def backward_that_holds_less(node: Node, gradients: Any) -> BackwardResult:
        result = backward(node, gradients)
        return result._replace(held=tuple(one for one in result.held if not HELD[name](one)))

    monkeypatch.setattr(Node, "backward", backward_that_holds_less)
    one_each = {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}
    with prepared(num_layers=1, **one_each) as step:
        assert "dead" in str(race_in(step))


@pytest.mark.world_size(1)
@pytest.mark.parametrize("keep_graph", [False, True])
def test_a_kept_graph_holds_what_it_saved(keep_graph):
    """The graphs of the local layers' communication nodes save nothing of the compute lane's that nobody else holds;
    a dispatcher's own functions may."""
    comm = torch.cuda.Stream()
    with host.checking_races():
        node = Node(
            lambda _node, entered: (entered * entered.detach().exp()).sum(),
            layer_state=None,
            chunk_state=None,
            keep_graph=keep_graph,
        )
        node.forward([torch.ones(5, device="cuda", requires_grad=True)])
        gradient = torch.ones((), device="cuda")
        comm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(comm):
            result = node.backward([gradient])
        held = [one for one in result.held if not isinstance(one, torch.UntypedStorage)]
        del result
        if keep_graph:
            torch.zeros(5, device="cuda")
        else:
            with pytest.raises(host.RaceError, match="dead"):
                torch.zeros(5, device="cuda")
        del held
