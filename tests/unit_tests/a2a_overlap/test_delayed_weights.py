"""Weight gradients of local layers as ops of their own: the same bits, in every way a gradient can be taken up."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch
from host_models import build, config_of, parallel
from parity_testing import EXPERT_SIZE, FP32, assert_parity, assert_same, forward_step, run, set_flag, train
from test_parity_ddp import train_ddp
from test_parity_mfsdp import assert_same_sharded, train_sharded

import combined_1f1b
from combined_1f1b.errors import ConfigError
from combined_1f1b.schedule import weight_gradients
from combined_1f1b.schedule.node import Node
from combined_1f1b.schedule.ops import Kind

DELAYED = {"delay_wgrad_compute": True, "overlap_moe_expert_parallel_comm": True}
CASES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "drop and pad": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "dense last, odd count": {"num_layers": 3, "moe_layer_freq": [1, 1, 0]},
    "tied, multi-token prediction": {"share_embeddings_and_output_weights": True, "mtp_num_layers": 1},
    "shared experts": {"moe_shared_expert_intermediate_size": 16},
    "shared experts recomputed": {
        "moe_shared_expert_intermediate_size": 16,
        "recompute_granularity": "selective",
        "recompute_modules": ["shared_experts", "core_attn"],
    },
    "fp32": FP32,
    "autocast": {"enable_autocast": True, "autocast_dtype": torch.bfloat16, "moe_router_dtype": "fp64", **FP32},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "early attention release": {"ep_overlap_early_attn_memory_release": True},
}


@pytest.fixture(autouse=True)
def installed(device):
    with combined_1f1b.install(), parallel(expert_model_parallel_size=EXPERT_SIZE):
        yield


def weight_ops() -> int:
    return sum(op.kind is Kind.WEIGHT for op in combined_1f1b.last_step().plan.ops)


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("paired", [False, True], ids=["plain", "head and tail paired"])
def test_losses_gradients_and_parameters_keep_their_bits(changes, paired):
    combined_1f1b.install(combined_1f1b.OverlapOptions(pair_head_and_tail=paired))
    assert_parity(**DELAYED, **changes) if not paired else assert_paired(**DELAYED, **changes)
    assert weight_ops() >= 3 * 2 * 2


def assert_paired(**changes: Any) -> None:
    assert_same(train(combined=False, **changes), train(combined=True, **changes))
    assert combined_1f1b.last_step().tail_pairs == 1


@pytest.mark.world_size(2)  # Megatron's local experts cannot add their bias at EP=1
def test_biases_keep_their_bits():
    assert_parity(normalization="LayerNorm", add_bias_linear=True, **DELAYED)


@pytest.mark.world_size(1, 2)
def test_every_linear_of_a_layer_is_split(monkeypatch):
    """Between a B op and its W op no linear weight of the layer has a gradient; after it all have."""
    model = build(expert_model_parallel_size=EXPERT_SIZE, **DELAYED)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: set[str] = set()
    accumulate = weight_gradients.DelayedWeights.accumulate

    def watching(self: Any, pending: Any) -> Any:
        for left in pending:
            assert left.weight.grad is None
            seen.add(names[id(left.weight)])
        return accumulate(self, pending)

    monkeypatch.setattr(weight_gradients.DelayedWeights, "accumulate", watching)
    run(model, num_microbatches=1)
    linears = {name for name in names.values() if ".linear_" in name}
    assert seen == linears
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize("frozen", ["embedding", "layers.0.", "experts"])
def test_frozen_weights_stay_frozen_and_others_keep_their_bits(frozen):
    def freeze(model: torch.nn.Module) -> torch.nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        return model

    assert_parity(prepare=freeze, **DELAYED)


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize("settings", [{}, {"use_distributed_optimizer": True, "overlap_grad_reduce": True}])
@pytest.mark.parametrize("paired", [False, True], ids=["plain", "head and tail paired"])
def test_hooks_of_megatrons_ddp_fire_with_the_weight_op(settings, paired):
    combined_1f1b.install(combined_1f1b.OverlapOptions(pair_head_and_tail=paired))
    reference = train_ddp(flags=(False,) * 3, settings=settings, **DELAYED)
    assert_same(reference, train_ddp(flags=(True,) * 3, settings=settings, **DELAYED))


@pytest.mark.world_size(2, on_gpu=1)
@pytest.mark.parametrize("paired", [False, True], ids=["plain", "head and tail paired"])
def test_a_sharded_unit_is_reduced_after_its_weight_gradients(paired):
    combined_1f1b.install(combined_1f1b.OverlapOptions(pair_head_and_tail=paired))
    assert_same_sharded(train_sharded(combined=False), train_sharded(combined=True, **DELAYED))
    assert weight_ops()


@pytest.mark.world_size(1, 2)
def test_mutation_a_reduction_before_the_weight_gradients_loses_them(monkeypatch):
    """The rule is the plan's: W ops that come too late for their unit's REDUCE change the gradients."""
    accumulate = weight_gradients.DelayedWeights.accumulate
    late: list[Any] = []

    def one_late(self: Any, pending: Any) -> Any:
        late.append((self, [*pending]))
        pending.clear()
        return accumulate(*late.pop(0)) if len(late) > 1 else []

    monkeypatch.setattr(weight_gradients.DelayedWeights, "accumulate", one_late)
    with pytest.raises(AssertionError):
        assert_same_sharded(train_sharded(combined=False), train_sharded(combined=True, **DELAYED))


@pytest.mark.world_size(1)
def test_hooks_on_a_weight_see_its_gradient_once_per_micro_batch():
    model = build(expert_model_parallel_size=EXPERT_SIZE, **DELAYED)
    seen = []
    weight = next(parameter for name, parameter in model.named_parameters() if "linear_qkv.weight" in name)
    weight.register_hook(lambda gradient: seen.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda _weight: seen.append("accumulated"))
    run(model, num_microbatches=3)
    assert seen == ["gradient", "accumulated"] * 3


@pytest.mark.world_size(1)
def test_outside_of_an_iteration_the_linears_are_megatrons_own():
    model = build(expert_model_parallel_size=EXPERT_SIZE, **DELAYED)
    linears = [module for module in model.modules() if hasattr(module, "_forward_impl")]
    run(model)
    assert not any("_forward_impl" in vars(module) for module in linears)

    def fail(data: Any, model: Any) -> Any:
        raise RuntimeError("as asked")

    with pytest.raises(RuntimeError, match="as asked"):
        run(model, step=fail)
    assert not any("_forward_impl" in vars(module) for module in linears)
    set_flag(model, False)
    run(model, step=forward_step)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.world_size(1)
def test_the_setting_may_change_between_iterations():
    model = build(expert_model_parallel_size=EXPERT_SIZE, overlap_moe_expert_parallel_comm=True)
    run(model)
    assert not weight_ops()
    config_of(model).delay_wgrad_compute = True
    run(model)
    assert weight_ops()


@pytest.mark.world_size(1)
def test_fused_accumulation_of_local_layers_is_refused():
    model = build(expert_model_parallel_size=EXPERT_SIZE, **DELAYED)
    for module in model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = True
    with pytest.raises(ConfigError, match="gradient_accumulation_fusion=True"):
        run(model)


class Store:
    """What Transformer Engine's WeightGradStore is to the outside."""

    def __init__(self) -> None:
        self.context: queue.Queue[Any] = queue.Queue()

    def delay_wgrad_compute(self) -> bool:
        return True


class QueuedLinear(torch.nn.Module):
    """A stand-in with the habits of Transformer Engine's grouped linear, which needs a GPU.

    Its backward returns a buffer that is not filled yet; emptying the queue assigns `.grad`.
    """

    fuse_wgrad_accumulation = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
        self.weight.skip_backward_post_hook = True
        self.wgrad_store = Store()

    def forward(self, entered: torch.Tensor) -> torch.Tensor:
        store = self.wgrad_store

        class Linear(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, entered: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(entered, weight)
                return entered @ weight.t()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                entered, weight = ctx.saved_tensors
                store.context.put([[entered, gradient]])
                return gradient @ weight, torch.full_like(weight, torch.nan)

        return Linear.apply(entered, self.weight)

    def backward_dw(self) -> None:
        ((entered, gradient),) = self.wgrad_store.context.get()
        self.weight.grad = gradient.t() @ entered


def two_micro_batches_through(module: QueuedLinear, seen: list[torch.Tensor]) -> torch.Tensor:
    module.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    delayed = weight_gradients.DelayedWeights([module])
    delayed.begin()
    nodes = [
        Node(lambda _node, tensor: module(tensor), layer_state=None, chunk_state=None, delayed=delayed)
        for _ in range(2)
    ]
    entered = [torch.full((4, 3), 1.0 + index, requires_grad=True) for index in range(2)]
    for node, tensor in zip(nodes, entered, strict=True):
        node.forward((tensor,))
    for node in nodes:
        node.backward((torch.ones(4, 2),))
        node.weight_gradients()
    delayed.reset()
    return module.weight.grad


@pytest.mark.world_size(1)
def test_what_a_queue_assigns_is_accumulated_and_its_unfilled_buffers_reach_nobody():
    seen: list[torch.Tensor] = []
    module = QueuedLinear()
    assert torch.equal(two_micro_batches_through(module, seen), torch.full((2, 3), 4.0 * (1.0 + 2.0)))
    assert [gradient[0, 0].item() for gradient in seen] == [4.0, 8.0]
    assert "forward" not in vars(module)


@pytest.mark.world_size(1)
def test_a_forward_that_the_user_has_set_on_a_linear_runs_and_is_put_back():
    model = build(expert_model_parallel_size=EXPERT_SIZE, num_layers=1, **DELAYED)
    queued, local = QueuedLinear(), model.module.decoder.layers[0].self_attention.linear_proj
    delayed = weight_gradients.DelayedWeights([queued])
    run(model, num_microbatches=1)
    calls = []

    def counted(plain: Any) -> Any:
        return lambda *arguments, **options: (calls.append(plain), plain(*arguments, **options))[1]

    own = [counted(queued.forward), counted(local._forward_impl)]
    vars(queued)["forward"], vars(local)["_forward_impl"] = own
    delayed.begin()
    assert queued.forward is not own[0]
    queued(torch.ones(4, 3))
    delayed.reset()
    local.weight.requires_grad_(False)  # else the product is split
    run(model, num_microbatches=1)
    assert [vars(queued)["forward"], vars(local)["_forward_impl"]] == own
    assert len(calls) == 2


@pytest.mark.world_size(1)
def test_mutation_without_aliases_the_unfilled_buffers_reach_the_hooks(monkeypatch):
    monkeypatch.setattr(weight_gradients.DelayedWeights, "_on_aliases", lambda self, module, plain: plain)
    seen: list[torch.Tensor] = []
    two_micro_batches_through(QueuedLinear(), seen)
    assert any(gradient.isnan().any() for gradient in seen)


@pytest.mark.world_size(1)
def test_a_queue_is_emptied_after_a_failure():
    module = QueuedLinear()
    delayed = weight_gradients.DelayedWeights([module])
    delayed.begin()
    module.wgrad_store.context.put("left by a failed iteration")
    delayed.reset()
    assert module.wgrad_store.context.empty()
