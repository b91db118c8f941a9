"""The interleaved plan is Megatron's: its own driver runs with stand-ins and every call and transfer is compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from plan_cases import ranks

import combined_1f1b.host as host
from combined_1f1b.schedule import Plan
from combined_1f1b.schedule.ops import TRANSFER_KINDS, Kind
from combined_1f1b.schedule.transfers import RECEIVE_KINDS

pytestmark = pytest.mark.world_size(1)


class Group:
    """A process group as far as the driver asks for its size and this rank's place."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Communicator:
    """Stands in for Megatron's P2PCommunicator: notes what is sent and received, and numbers what arrives."""

    def __init__(self, plan: Plan, config: Any, log: list[Any]) -> None:
        self.pp_group = Group(plan.shape.pp, plan.shape.rank)
        self.virtual_pipeline_model_parallel_size = plan.shape.vpp
        self.config = config
        self.is_pp_last_stage = plan.shape.rank == plan.shape.pp - 1
        self._log = log
        self._arrived = {Kind.RECEIVE_FORWARD: 0, Kind.RECEIVE_BACKWARD: 0}

    def _receive(self, kind: Kind, wanted: bool) -> tuple[Kind, int] | None:
        if not wanted:
            return None
        self._log.append(kind)
        self._arrived[kind] += 1
        return kind, self._arrived[kind] - 1

    def _send(self, kind: Kind, tensor: Any) -> None:
        if tensor is not None:
            self._log.append(kind)

    def recv_forward(self, _shape: Any, is_first_stage: bool) -> Any:
        return self._receive(Kind.RECEIVE_FORWARD, not is_first_stage)

    def recv_backward(self, _shape: Any, is_last_stage: bool) -> Any:
        return self._receive(Kind.RECEIVE_BACKWARD, not is_last_stage)

    def send_forward_recv_forward(self, output: Any, *, recv_prev: bool, tensor_shape: Any) -> Any:
        self._send(Kind.SEND_FORWARD, output)
        return self._receive(Kind.RECEIVE_FORWARD, recv_prev)

    def send_backward_recv_backward(self, gradient: Any, *, recv_next: bool, tensor_shape: Any) -> Any:
        self._send(Kind.SEND_BACKWARD, gradient)
        return self._receive(Kind.RECEIVE_BACKWARD, recv_next)

    def send_forward_backward_recv_forward_backward(
        self, output: Any, gradient: Any, *, recv_prev: bool, recv_next: bool, tensor_shape: Any
    ) -> Any:
        self._send(Kind.SEND_FORWARD, output)
        forward = self._receive(Kind.RECEIVE_FORWARD, recv_prev)
        self._send(Kind.SEND_BACKWARD, gradient)
        return forward, self._receive(Kind.RECEIVE_BACKWARD, recv_next)


def run_megatron(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run Megatron's interleaved driver for one rank; returns its calls and transfers in order.

    A call is (forward or None, backward or None); each of them is (micro-batch, chunk, number of what it takes).
    """
    shape, log = plan.shape, []
    config = SimpleNamespace(
        overlap_p2p_comm=False,
        overlap_p2p_comm_warmup_flush=False,
        batch_p2p_comm=False,
        finalize_model_grads_func=None,
        timers=None,
        no_sync_func=None,
        grad_sync_func=None,
        param_sync_func=None,
        microbatch_group_size_per_vp_stage=shape.microbatch_group_size_per_vp_stage,
        hidden_size=8,
        sequence_parallel=False,
        overlap_moe_expert_parallel_comm=True,
        num_microbatches_with_partial_activation_checkpoints=None,
        virtual_pipeline_model_parallel_size=shape.vpp,
        deallocate_pipeline_outputs=False,
        calculate_per_token_loss=False,
    )
    backwards_run = [0] * shape.vpp

    def combined_step(
        *arguments: Any, f_virtual_microbatch_id: Any = None, b_virtual_microbatch_id: Any = None, **_: Any
    ):
        f_pre, f_post, b_pre, b_post, microbatch_of, chunk_of = arguments[6:12]
        forward = backward = None
        if f_virtual_microbatch_id is not None:
            chunk = chunk_of(f_virtual_microbatch_id, forward=True)
            microbatch = microbatch_of(f_virtual_microbatch_id, forward=True)
            taken = f_pre(f_virtual_microbatch_id, chunk, microbatch)
            forward = (microbatch, chunk, taken)
            f_post(chunk, object(), torch.zeros([], dtype=torch.int))
        if b_virtual_microbatch_id is not None:
            chunk = chunk_of(b_virtual_microbatch_id, forward=False)
            _, _, taken = b_pre(b_virtual_microbatch_id, chunk)
            backward = (backwards_run[chunk], chunk, taken)
            backwards_run[chunk] += 1
            b_post(b_virtual_microbatch_id)
        log.append((forward, backward))
        return object(), object()

    monkeypatch.setattr(schedules, "combined_1f1b_schedule_for_interleaved_pipelining", combined_step)
    # Megatron's own look at torch.distributed, which is not there in this process.
    monkeypatch.setattr(schedules, "is_pp_first_stage", lambda group: group.rank() == 0)
    monkeypatch.setattr(schedules, "is_pp_last_stage", lambda group: group.rank() == group.size() - 1)
    model = [torch.nn.Linear(1, 1) for _ in range(shape.vpp)]
    for chunk in model:
        chunk.config, chunk.model_type = config, ModelType.encoder_or_decoder
    one = Group(1, 0)
    schedules.forward_backward_pipelining_with_interleaving(
        forward_step_func=None,
        data_iterator=[None] * shape.vpp,
        model=model,
        num_microbatches=shape.num_microbatches,
        seq_length=4,
        micro_batch_size=1,
        p2p_communicator=Communicator(plan, config, log),
        pg_collection=SimpleNamespace(tp=one, cp=one, pp=Group(shape.pp, shape.rank)),
    )
    return log


def planned(plan: Plan) -> list[Any]:
    """The same from the plan. Megatron's transfers come after the call whose fragment holds them."""
    arrived: dict[tuple[Kind, int, int], tuple[Kind, int]] = {}
    counts = dict.fromkeys(RECEIVE_KINDS, 0)
    chunk_of = plan.shape.chunk_of
    log: list[Any] = []
    for forwards, backwards, start, end in plan.fragments:
        transfers = [op for op in plan.ops[start:end] if op.kind in TRANSFER_KINDS]
        for op in transfers:
            if op.kind in RECEIVE_KINDS:
                arrived[op.kind, op.microbatch, chunk_of[op.stage]] = (op.kind, counts[op.kind])
                counts[op.kind] += 1
        if start == 0 and transfers and transfers[0].kind is Kind.RECEIVE_FORWARD and plan.shape.rank > 0:
            log.append(transfers.pop(0).kind)  # before the first call
        call = []
        for kind, flows in ((Kind.RECEIVE_FORWARD, forwards), (Kind.RECEIVE_BACKWARD, backwards)):
            call.append((*flows[0][1:], arrived.get((kind, *flows[0][1:]))) if flows else None)
        log += [tuple(call), *(op.kind for op in transfers)]
    return log


CASES = [
    (pp, vpp, group, count)
    for pp in (2, 3, 4)
    for vpp in (2, 3)
    for group in (pp, pp + 1, 2 * pp)
    for count in (group, 2 * group, 2 * group + pp)
]


@pytest.mark.parametrize(("pp", "vpp", "group", "count"), CASES)
def test_order_of_every_call_and_transfer(pp, vpp, group, count, monkeypatch):
    plans = ranks(
        num_layers=pp * vpp,
        num_microbatches=count,
        moe_layers=(),
        pp=pp,
        vpp=vpp,
        microbatch_group_size_per_vp_stage=group,
    )
    with host.activate():
        for plan in plans:
            ours, theirs = planned(plan), run_megatron(plan, monkeypatch)
            assert sum(isinstance(entry, tuple) for entry in theirs) == len(plan.fragments)
            assert ours == theirs
