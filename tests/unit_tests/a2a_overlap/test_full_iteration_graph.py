"""FullIterationGraph around the schedules: kinds of iterations, inputs, gradients, refusals and failed captures."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_models import BATCH, SEQUENCE, batches, build, config_of, differing, parallel, seed
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader, get_shared_capture_stream
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from parity_testing import EXPERT_SIZE, assert_parity, forward_step

import combined_1f1b
from combined_1f1b import OverlapOptions
from combined_1f1b.errors import ConfigError
from combined_1f1b.fsdp_adapter import mfsdp_v2
from combined_1f1b.schedule.cuda_graph import FullIterationGraph
from combined_1f1b.schedule.graph_checks import check_capturable

STATIC = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


@pytest.fixture(autouse=True)
def installed(device):
    if torch.distributed.get_backend() == "gloo" and device.type == "cuda":
        pytest.skip("gloo copies through the host, which no CUDA graph captures: run one rank per GPU")
    with combined_1f1b.install(), parallel(expert_model_parallel_size=EXPERT_SIZE, graphable_random_state=True):
        yield


class Trainer:
    """A small model, sharded, in Megatron-DDP or plain, an SGD optimizer, and iterations through a graph or eager."""

    def __init__(
        self, *, kind: str = "sharded", captured: bool, warmup: int = 1, combined: bool = True, **changes: Any
    ):
        stream = get_shared_capture_stream()  # AccumulateGrad nodes remember the stream that DDP is built on
        with torch.cuda.stream(stream):
            module = build(expert_model_parallel_size=EXPERT_SIZE, **STATIC, **changes)
            self.config = config_of(module)
            self.config.overlap_moe_expert_parallel_comm = combined
            if kind == "sharded":
                self.model = combined_1f1b.shard_model(module, self.config)
            elif kind == "ddp":
                self.model = DistributedDataParallel(self.config, DistributedDataParallelConfig(), module)
                self.config.no_sync_func = self.model.no_sync
                self.config.finalize_model_grads_func = finalize_model_grads
            else:
                self.model = module
        self.kind = kind
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        if kind == "sharded":
            combined_1f1b.prepare_optimizer(self.optimizer, self.model)
        function = get_forward_backward_func()
        self.call = FullIterationGraph(function, warmup_iterations=warmup) if captured else function
        seed(3, graphable=True)

    def run(self, *, data: Any = None, step: Any = forward_step, **changes: Any) -> torch.Tensor:
        arguments = {
            "forward_step_func": step,
            "data_iterator": batches(2) if data is None else data,
            "model": [self.model],
            "num_microbatches": 2,
            "seq_length": SEQUENCE,
            "micro_batch_size": BATCH,
            "forward_only": False,
        }
        return torch.stack([report["loss"] for report in self.call(**{**arguments, **changes})])

    def evaluate(self) -> torch.Tensor:
        self.model.eval()
        losses = self.run(forward_only=True)
        self.model.train()
        return losses

    def train(self, *, set_to_none: bool = True, step: Any = forward_step) -> torch.Tensor:
        losses = self.run(step=step).clone()
        if self.kind == "ddp":
            for parameter in self.model.parameters():
                parameter.grad = parameter.main_grad.to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if self.kind == "ddp":  # what stands in .grad is main_grad, to which its hooks would add it
            self.optimizer.zero_grad()
            self.model.zero_grad_buffer()
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        if self.kind == "sharded":
            return self.model.full_parameters()
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


def assert_same_bits(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize("kind", ["sharded", "ddp", "plain"])
def test_training_and_evaluation_of_two_models_in_one_process(kind):
    def history(captured):
        first, second = (Trainer(kind=kind, captured=captured, hidden_size=size) for size in (16, 24))
        losses = []
        for number in range(4):
            losses += [first.train(set_to_none=number % 2 == 0), second.train(), first.evaluate().clone()]
        assert not captured or (first.call.is_captured and second.call.is_captured)
        return losses, first.weights(), second.weights()

    assert_same_bits(history(True), history(False))


CASES: dict[str, tuple[dict[str, Any], OverlapOptions]] = {
    "head and tail pairing": ({}, OverlapOptions(pair_head_and_tail=True)),
    "delayed weight gradients": (
        {"delay_wgrad_compute": True, "overlap_moe_expert_parallel_comm": True},
        OverlapOptions(pair_head_and_tail=True),
    ),
    "router losses and bias": (
        {
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.1,
            "moe_z_loss_coeff": 0.1,
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
        OverlapOptions(),
    ),
    "tied embeddings, multi-token prediction": (
        {"share_embeddings_and_output_weights": True, "mtp_num_layers": 1},
        OverlapOptions(),
    ),
    "recomputed attention": (
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        OverlapOptions(),
    ),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", CASES)
def test_what_the_schedule_can_do_can_be_captured(case):
    changes, options = CASES[case]
    kinds = ("sharded", "ddp") if "delayed" in case else ("sharded",)
    with combined_1f1b.install(options):
        for kind in kinds:
            trainer, eager = (Trainer(kind=kind, captured=captured, **changes) for captured in (True, False))
            for _ in range(4):
                assert_same_bits(trainer.train(), eager.train())
            assert_same_bits(trainer.weights(), eager.weights())
            assert_same_bits(_buffers(trainer), _buffers(eager))


def _buffers(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in trainer.model.named_buffers() if buffer.is_floating_point()}


@pytest.mark.world_size(1)
def test_reset_forgets_everything_and_begins_again():
    trainer, eager = Trainer(captured=True), Trainer(captured=False)
    for number in range(5):
        if number == 3:
            trainer.call.reset()
            assert not trainer.call.is_captured
        assert_same_bits(trainer.train(), eager.train())
        assert trainer.call.is_captured == (number in (1, 2, 4))
    assert_same_bits(trainer.weights(), eager.weights())


class TestGradients:
    pytestmark = pytest.mark.world_size(1)

    def test_a_binding_that_a_replay_loses_is_noticed(self, monkeypatch):
        """Mutation: bindings lost across replays must not let the optimizer skip every update."""
        trainer = Trainer(captured=True)
        trainer.train(), trainer.train()
        monkeypatch.setattr(_iteration(trainer), "_gradients", [])
        monkeypatch.setattr(type(trainer.model), "rebind_gradients", lambda self: None)
        with pytest.raises(ConfigError, match="has no gradient"):
            trainer.train()

    def test_a_plain_model_relies_on_the_binding(self, monkeypatch):
        trainer = Trainer(kind="plain", captured=True)
        for _ in range(3):
            before = trainer.weights()
            trainer.train()
            assert differing(trainer.weights(), before)
        monkeypatch.setattr(_iteration(trainer), "_gradients", [])  # mutation
        before = trainer.weights()
        trainer.train()
        assert_same_bits(trainer.weights(), before)

    def test_whatever_a_gradient_held_is_overwritten(self):
        trainer, eager = Trainer(captured=True), Trainer(captured=False)
        for _ in range(4):
            for parameter in trainer.model.parameters():
                parameter.grad = torch.full_like(parameter, float("nan"))
            assert_same_bits(trainer.train(), eager.train())
        assert_same_bits(trainer.weights(), eager.weights())

    def test_stale_compute_weights_are_noticed(self, monkeypatch):
        """Mutation: compute weights that no longer follow the optimizer change the losses of every replay."""
        trainer, eager = Trainer(captured=True), Trainer(captured=False)
        assert_same_bits(trainer.train(), eager.train())
        with monkeypatch.context() as patch:
            patch.setattr(mfsdp_v2.FsdpParameterGroup, "sync_model_weight_from_main_weight", lambda self: None)
            trainer.train()
        eager.train()
        assert not torch.equal(trainer.run(), eager.run())

    def test_a_model_without_gradients_is_refused(self):
        trainer = Trainer(captured=True)
        graph = FullIterationGraph(lambda **arguments: [], warmup_iterations=1)
        trainer.call = lambda **arguments: graph(**arguments) or [{"loss": torch.zeros(1)}]
        trainer.run()
        with pytest.raises(ConfigError, match="no trainable parameter a gradient"):
            trainer.run()


def _iteration(trainer: Trainer) -> Any:
    return trainer.call._iterations[True]


class Scaler:
    """What Megatron's optimizers offer as `config.grad_scale_func`."""

    def __init__(self) -> None:
        self.scale = torch.ones(1, device="cuda")

    def get_loss_scale(self) -> torch.Tensor:
        return self.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return self.scale * loss


def _embedding(trainer: Trainer) -> torch.nn.Parameter:
    weight: torch.nn.Parameter = trainer.model.module.embedding.word_embeddings.weight
    return weight


# What happens after the capture: a change, arguments of the next call, and what the refusal names.
CHANGES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "frozen": (
        lambda trainer, scaler: _embedding(trainer).requires_grad_(False),
        {},
        r"embeddings\.weight\.requires_grad",
    ),
    "moved": (
        lambda trainer, scaler: setattr(_embedding(trainer), "data", _embedding(trainer).data.clone()),
        {},
        r"the memory of model\[0\].*word_embeddings",
    ),
    "mode": (lambda trainer, scaler: trainer.model.eval(), {}, r"model\[0\]\.training=False"),
    "flag": (
        lambda trainer, scaler: setattr(trainer.config, "overlap_moe_expert_parallel_comm", False),
        {},
        "overlap_moe_expert_parallel_comm=False",
    ),
    "scale": (lambda trainer, scaler: setattr(scaler, "scale", torch.ones(1, device="cuda")), {}, "grad_scale_func"),
    "list": (lambda trainer, scaler: trainer.config.grad_sync_func.append(print), {}, "grad_sync_func"),
    "count": (lambda trainer, scaler: None, {"num_microbatches": 1}, "num_microbatches=1"),
    "function": (lambda trainer, scaler: None, {"step": partial(forward_step)}, "forward_step_func"),
    "iterator": (lambda trainer, scaler: None, {"data_iterator": None}, "data_iterator"),
}


@pytest.mark.world_size(1)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_a_replay_would_ignore_is_refused(name):
    change, arguments, message = CHANGES[name]
    trainer, scaler = Trainer(kind="plain", captured=True), Scaler()
    trainer.config.grad_scale_func = scaler.scale_loss
    trainer.config.grad_sync_func = [max, max]
    trainer.run(), trainer.run()
    change(trainer, scaler)
    with pytest.raises(ConfigError, match=rf"(?s){message}.*reset"):
        trainer.run(**arguments)


def dynamic_scaler() -> Any:
    scaler = DynamicGradScaler(
        initial_scale=2.0, min_scale=1.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=1, hysteresis=1
    )
    owner = Scaler()
    owner.grad_scaler = scaler  # type: ignore[attr-defined]
    return owner.scale_loss


UNCAPTURABLE: dict[str, Any] = {
    "moe_pad_expert_input_to_capacity": lambda model, config: setattr(
        config, "moe_pad_expert_input_to_capacity", False
    ),
    "timers": lambda model, config: setattr(config, "timers", object()),
    "cuda_graph_impl": lambda model, config: setattr(config, "cuda_graph_impl", "local"),
    "variable_seq_lengths": lambda model, config: (
        setattr(config, "variable_seq_lengths", True),
        setattr(config, "pipeline_model_parallel_size", 2),
    ),
    "batch_p2p_sync": lambda model, config: setattr(config, "pipeline_model_parallel_size", 2),
    "check_for_nan_in_grad": lambda model, config: setattr(
        model, "ddp_config", DistributedDataParallelConfig(check_for_nan_in_grad=True)
    ),
    "check_for_large_grads": lambda model, config: setattr(
        model, "ddp_config", DistributedDataParallelConfig(check_for_large_grads=True)
    ),
    "overlap_param_gather": lambda model, config: setattr(
        model, "ddp_config", SimpleNamespace(overlap_param_gather=True)
    ),
    "grad_scale_func": lambda model, config: setattr(config, "grad_scale_func", dynamic_scaler()),
    "use_cudagraphable_rng": lambda model, config: seed(3),
    "recompute_granularity": lambda model, config: (
        setattr(config, "recompute_granularity", "selective"),
        setattr(config, "hidden_dropout", 0.1),
    ),
}


@pytest.mark.world_size(1)
@pytest.mark.parametrize("name", UNCAPTURABLE)
def test_what_cannot_be_captured_is_refused_before_any_work(name):
    model = build(expert_model_parallel_size=1, **STATIC)
    seed(3, graphable=True)
    UNCAPTURABLE[name](model, config_of(model))
    called, data = [], batches(1)
    graph = FullIterationGraph(lambda **arguments: called.append(arguments))
    with pytest.raises(ConfigError, match=f"^{name}="):
        graph(model=[model], data_iterator=data, num_microbatches=1)
    assert not called
    assert next(data)  # nothing was read either


@pytest.mark.world_size(1)
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo"])
def test_gloo_is_refused_on_a_gpu_however_it_was_named(monkeypatch, backend):
    model = build(expert_model_parallel_size=1, **STATIC)
    group = torch.distributed.new_group(backend=backend)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_group", lambda: group)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"^backend='gloo'"):
        check_capturable(model, is_training=True)


@pytest.mark.world_size(1)
def test_transfers_that_synchronise_are_refused_where_megatron_makes_them():
    """Without virtual stages the schedule has its own transfers; an evaluation is Megatron's whatever the flag."""
    model = build(expert_model_parallel_size=1, **STATIC)
    config = config_of(model)
    config.pipeline_model_parallel_size, config.overlap_moe_expert_parallel_comm = 2, True
    seed(3, graphable=True)
    graph = FullIterationGraph(lambda **arguments: arguments["forward_only"])
    arguments = {"model": [model], "data_iterator": None, "num_microbatches": 1}
    assert graph(**arguments, forward_only=False) is False
    with pytest.raises(ConfigError, match=r"^batch_p2p_sync="):
        graph(**arguments, forward_only=True)


@pytest.mark.world_size(1)
def test_a_graph_needs_a_warm_up():
    with pytest.raises(ConfigError, match="warmup_iterations=0"):
        FullIterationGraph(get_forward_backward_func(), warmup_iterations=0)


FAILURES: dict[str, tuple[str, str]] = {
    "user": ("as asked", r"F1\.embedding"),
    "item": (r"(?i)captur", r"F0\.loss"),
    "event": (r"(?i)captur", r"F1\.embedding"),
}


class Failing:
    """A forward step that breaks a capture at its second micro-batch, or in its loss."""

    def __init__(self, cause: str) -> None:
        self.cause = cause
        self._outside = torch.cuda.Stream().record_event()
        self._calls = 0

    def __call__(self, data: Any, model: Any) -> Any:
        self._calls += 1
        cause = self.cause if torch.cuda.is_current_stream_capturing() else ""
        if self._calls % 2 == 0 and cause == "user":
            raise ValueError("as asked")
        if self._calls % 2 == 0 and cause == "event":
            torch.cuda.current_stream().wait_event(self._outside)
        output, loss = forward_step(data, model)
        return output, (lambda tensor: (tensor.mean() * tensor.sum().item(), {})) if cause == "item" else loss


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize(("kind", "cause"), [("sharded", "user"), ("sharded", "event"), ("plain", "item")])
def test_a_failed_capture_names_the_op_and_leaves_everything_as_it_was(kind, cause):
    eager = Trainer(kind=kind, captured=False, hidden_dropout=0.1)
    expected = [eager.train() for _ in range(3)]
    trainer, step = Trainer(kind=kind, captured=True, hidden_dropout=0.1), Failing(cause)
    assert_same_bits(trainer.train(step=step), expected[0])
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in trainer.model.parameters()]
    stream, states, weights = torch.cuda.current_stream(), set(get_cuda_rng_tracker().get_states()), trainer.weights()
    message, op = FAILURES[cause]
    with pytest.raises((RuntimeError, ValueError), match=message) as caught:
        trainer.run(step=step)
    notes = "\n".join(caught.value.__notes__)
    assert "while capturing the iteration" in notes
    assert re.search(rf"--> +\d+ +{op}", notes), notes
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    assert set(get_cuda_rng_tracker().get_states()) == states
    assert get_cuda_rng_tracker()._current_state_name == "default-rng"
    for parameter, gradient in zip(trainer.model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
    assert kind == "plain" or trainer.model.gathered_units() == ()
    assert_same_bits(trainer.weights(), weights)
    step.cause = ""
    for losses in expected[1:]:  # capture and replay, with the random numbers that the failure did not draw
        assert_same_bits(trainer.train(step=step), losses)
    assert trainer.call.is_captured
    assert_same_bits(trainer.weights(), eager.weights())


@pytest.mark.world_size(1)
def test_a_failed_capture_of_a_model_that_hooks_drive_frees_its_units():
    eager, trainer = (Trainer(captured=captured, combined=False) for captured in (False, True))
    step = Failing("event")
    assert_same_bits(trainer.train(step=step), eager.train())
    with pytest.raises(RuntimeError, match=r"(?i)captur"):
        trainer.run(step=step)
    assert trainer.model.gathered_units() == ()
    step.cause = ""
    for _ in range(2):
        assert_same_bits(trainer.train(step=step), eager.train())


@pytest.fixture
def wrapper():
    """Megatron's own wrapper keeps its graphs in class attributes."""
    yield FullCudaGraphWrapper
    for table, empty in (
        (FullCudaGraphWrapper.curr_iteration, 0),
        (FullCudaGraphWrapper.cuda_graph, None),
        (FullCudaGraphWrapper.result, None),
    ):
        table.update(training=empty, validation=empty)
    for buffers in StaticBufferLoader.static_buffers.values():
        buffers.clear()


FULL_ITERATION = {"cuda_graph_impl": "full_iteration", "overlap_moe_expert_parallel_comm": True}
"""With this value Megatron's training loop uses its wrapper."""


@pytest.mark.world_size(2)
def test_the_setting_of_megatrons_own_wrapper_keeps_the_bits():
    """Without drop-and-pad it also moves the dispatcher's copies to the CPU from the permutation to the all-to-all."""
    assert_parity(num_microbatches=2, steps=1, prepare=_with_late_copies, **FULL_ITERATION)


def _with_late_copies(model: torch.nn.Module) -> torch.nn.Module:
    points = [layer.mlp.token_dispatcher.cuda_dtoh_point for layer in model.module.decoder.layers]
    assert points == ["before_ep_alltoall"] * 2
    return model


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize("kind", ["sharded", "plain"])
def test_megatrons_own_wrapper_works_around_the_schedule(kind, wrapper):
    trainer, eager = (Trainer(kind=kind, captured=False, **FULL_ITERATION) for _ in range(2))
    trainer.call = wrapper(get_forward_backward_func(), cuda_graph_warmup_steps=1)
    trainer.run(), eager.run()  # it captures what Python decides: gradients must exist, and be zeroed in place
    for each in (trainer, eager):
        each.optimizer.zero_grad(set_to_none=False)
    for _ in range(3):
        assert_same_bits(trainer.train(set_to_none=False), eager.train(set_to_none=False))
    assert wrapper.cuda_graph["training"] is not None
    assert_same_bits(trainer.weights(), eager.weights())
    assert combined_1f1b.last_step().forward_backward_pairs == 1


@pytest.mark.world_size(1)
def test_a_capture_that_fails_in_megatrons_own_wrapper_leaves_a_model_that_can_be_trained(wrapper):
    """Nobody but the driver frees the units: in the invalidated capture it cannot, and Megatron does not ask again."""
    trainer, eager, step = Trainer(captured=False), Trainer(captured=False), Failing("event")
    function = trainer.call
    trainer.call = wrapper(function, cuda_graph_warmup_steps=1)
    stream = torch.cuda.current_stream()
    assert_same_bits(trainer.train(step=step), eager.train())
    with pytest.raises(RuntimeError, match=r"(?i)captur"):
        trainer.run(step=step)
    assert trainer.model.gathered_units()
    torch.cuda.set_stream(stream)  # torch's graph context leaves its own behind when the end of the capture raises
    trainer.call = function
    for _ in range(2):
        assert_same_bits(trainer.train(), eager.train())
    assert trainer.model.gathered_units() == ()
    assert_same_bits(trainer.weights(), eager.weights())
