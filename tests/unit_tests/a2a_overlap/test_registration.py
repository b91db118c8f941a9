"""install(), uninstall(), enable() and what they leave alone."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from host_models import BASE, build, config_of, parallel
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from parity_testing import run, set_flag

import combined_1f1b
from combined_1f1b import registration
from combined_1f1b.errors import ConfigError, UnsupportedModelError

pytestmark = pytest.mark.world_size(1)
NAME = "combined_1f1b_schedule_for_no_pipelining"
ALONE = {**BASE, "expert_model_parallel_size": 1}


def names():
    return getattr(schedules, NAME), TransformerConfig.__post_init__


def test_uninstall_puts_back_exactly_what_was_there():
    before = names()
    combined_1f1b.install()
    assert all(now is not then for now, then in zip(names(), before, strict=True))
    combined_1f1b.uninstall()
    assert names() == before
    combined_1f1b.uninstall()
    assert names() == before


def test_install_is_idempotent_and_a_second_call_replaces_the_options():
    before = names()
    first = combined_1f1b.install()
    installed = names()
    options = combined_1f1b.OverlapOptions()
    assert combined_1f1b.install(options) is first
    assert first.options is options
    assert names() == installed
    combined_1f1b.uninstall()
    assert names() == before


def test_as_a_context_manager_it_uninstalls_also_after_an_error():
    before = names()
    with pytest.raises(KeyError), combined_1f1b.install():
        raise KeyError
    assert names() == before


def test_a_function_fetched_before_install_runs_our_schedule(device):
    with parallel():
        function = get_forward_backward_func()
        with combined_1f1b.install():
            assert get_forward_backward_func() is function
            model = build(expert_model_parallel_size=1)
            set_flag(model, True)
            run(model)
            assert combined_1f1b.last_step().schedule == "combined_1f1b"


def test_last_step_reports_what_ran(device):
    assert combined_1f1b.last_step() is None
    with parallel(), combined_1f1b.install():
        assert combined_1f1b.last_step() is None
        model = build(expert_model_parallel_size=1)
        run(model)
        assert combined_1f1b.last_step() is None, "the flag is off: nothing of ours ran"
        set_flag(model, True)
        run(model, num_microbatches=4)
        report = combined_1f1b.last_step()
        assert (report.num_microbatches, report.forward_backward_pairs, report.head_pairs, report.tail_pairs) == (
            4,
            3,
            0,
            0,
        )
        assert not report.sharded
        assert report.plan.pairs.forward_backward_pairs == 3


def test_the_constructor_accepts_what_megatron_refuses_and_this_package_runs():
    with pytest.raises(AssertionError):
        TransformerConfig(**ALONE, overlap_moe_expert_parallel_comm=True)
    fp32 = {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}
    with combined_1f1b.install():
        config = TransformerConfig(**{**ALONE, **fp32}, overlap_moe_expert_parallel_comm=True)
        assert config.overlap_moe_expert_parallel_comm
        early = TransformerConfig(
            **ALONE, overlap_moe_expert_parallel_comm=True, ep_overlap_early_attn_memory_release=True
        )
        assert early.ep_overlap_early_attn_memory_release
        assert MLATransformerConfig(**ALONE, overlap_moe_expert_parallel_comm=True).overlap_moe_expert_parallel_comm


def test_megatrons_other_checks_still_run():
    with combined_1f1b.install(), pytest.raises((ValueError, AssertionError)):
        TransformerConfig(**{**ALONE, "num_attention_heads": 3, "tensor_model_parallel_size": 2})


REFUSED = {
    "moe_layer_freq": [0, 0],
    "num_moe_experts": None,
    "moe_token_dispatcher_type": "allgather",
    "num_microbatches_with_partial_activation_checkpoints": 1,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "moe_shared_expert_overlap": True,
    "mtp_num_layers": 2,
    "fp8": "hybrid",
    "fp4": "e2m1",
    "overlap_dispatch_backward_with_experts_wgrad": True,
    "cuda_graph_impl": "local",
    "cpu_offloading": True,
    "fine_grained_activation_offloading": True,
    "moe_paged_stash": True,
    "hybrid_context_parallel": True,
    "mlp_chunks_for_training": 2,
    "transformer_impl": "inference_optimized",
}


@pytest.mark.parametrize("flag", REFUSED)
def test_every_refusal_names_the_flag_its_value_and_the_fix(flag):
    config = TransformerConfig(**ALONE)
    setattr(config, flag, REFUSED[flag])
    with pytest.raises(ConfigError, match=flag) as caught:
        combined_1f1b.enable(config)
    message = str(caught.value)
    assert repr(REFUSED[flag]) in message
    assert ";" in message, "the fix comes last"
    assert not config.overlap_moe_expert_parallel_comm


def test_recomputing_the_whole_moe_layer_is_refused():
    config = TransformerConfig(**ALONE)
    config.recompute_granularity, config.recompute_modules = "selective", ["moe"]
    with pytest.raises(ConfigError, match="recompute_modules"):
        combined_1f1b.enable(config)


@pytest.mark.parametrize("module", ["layernorm", "moe_act", "mla_up_proj", "gdn_norm_out"])
def test_recomputation_that_calls_into_transformer_engine_is_refused_without_it(module, monkeypatch):
    config = TransformerConfig(**ALONE)
    config.recompute_modules = [module]
    name = "megatron.core.tensor_parallel.random.FP8GlobalStateManager"
    monkeypatch.delattr(name, raising=False)
    combined_1f1b.enable(config)  # nothing is recomputed
    config.recompute_granularity = "selective"
    with pytest.raises(ConfigError, match=rf"recompute_modules=\['{module}'\].*Transformer Engine"):
        combined_1f1b.enable(config)
    monkeypatch.setattr(name, object(), raising=False)
    combined_1f1b.enable(config)


def test_fused_operators_of_transformer_engine_are_refused_with_delayed_weight_gradients():
    config = TransformerConfig(**ALONE)
    config.use_transformer_engine_op_fuser = True
    combined_1f1b.enable(config)
    config.delay_wgrad_compute = True
    with pytest.raises(ConfigError, match="use_transformer_engine_op_fuser=True"):
        combined_1f1b.enable(config)


def test_lengths_that_vary_are_refused_where_stages_receive_ahead():
    config = TransformerConfig(**ALONE)
    config.variable_seq_lengths = True
    combined_1f1b.enable(config)
    config.pipeline_model_parallel_size = 2
    with pytest.raises(ConfigError, match="variable_seq_lengths=True"):
        combined_1f1b.enable(config)


def test_the_list_of_refusals_is_tested_whole():
    from combined_1f1b.config import REFUSED_FLAGS

    assert set(REFUSED_FLAGS) == {
        *REFUSED,
        "recompute_modules",
        "use_transformer_engine_op_fuser",
        "variable_seq_lengths",
    }


def test_settings_that_need_the_flag_are_refused_without_it():
    with combined_1f1b.install():
        for flag in ("delay_wgrad_compute", "ep_overlap_early_attn_memory_release"):
            with pytest.raises(ConfigError, match=flag):
                TransformerConfig(**ALONE, **{flag: True})


def test_enable_sets_the_flag():
    config = TransformerConfig(**ALONE)
    combined_1f1b.enable(config)
    assert config.overlap_moe_expert_parallel_comm


def test_a_flag_set_by_assignment_is_checked_at_the_first_call(device):
    with parallel(), combined_1f1b.install():
        model = build(expert_model_parallel_size=1)
        set_flag(model, True)
        config_of(model).cuda_graph_impl = "local"
        with pytest.raises(ConfigError, match="cuda_graph_impl"):
            run(model)


class OwnModel(torch.nn.Module):
    """A user's model that is no GPTModel."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model_type = ModelType.encoder_or_decoder
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def set_input_tensor(self, tensor):
        pass


@pytest.mark.parametrize(
    "kind",
    [
        "own model", "no experts", "forward hook", "backward hook", "pre-hook", "hook on the model",
        "hook on a wrapper", "layer class", "layer forward", "shared mlp", "torch wrapper",
    ],
)  # fmt: skip
def test_models_that_cannot_be_cut_are_refused_before_any_work(device, kind):
    with parallel(), combined_1f1b.install():
        changes = {"num_layers": 1, "moe_layer_freq": [0]} if kind == "no experts" else {}
        model = build(expert_model_parallel_size=1, **changes)
        layer = model.module.decoder.layers[0]
        if kind == "own model":
            model = OwnModel(config_of(model))
        elif kind == "no experts":
            config_of(model).moe_layer_freq = 1  # as with a layer spec of one's own
        elif kind == "forward hook":
            layer.register_forward_hook(lambda *_: None)
        elif kind == "backward hook":
            layer.mlp.register_full_backward_hook(lambda *_: None)
        elif kind == "pre-hook":
            layer.register_forward_pre_hook(lambda *_: None)
        elif kind == "hook on the model":
            model.module.register_forward_hook(lambda *_: None)
        elif kind == "hook on a wrapper":
            model.register_full_backward_hook(lambda *_: None)
        elif kind == "shared mlp":
            model.module.decoder.layers[1].mlp = layer.mlp
        elif kind == "torch wrapper":
            model = torch.nn.parallel.DistributedDataParallel(model)
        elif kind == "layer class":
            model.module.decoder.layers[0] = torch.nn.Identity()
        elif kind == "layer forward":
            layer.__class__ = type("OwnLayer", (type(layer),), {"forward": lambda self, *args, **kwargs: None})
        set_flag(model, True)
        asked = []
        with pytest.raises(UnsupportedModelError, match="overlap_moe_expert_parallel_comm=False"):
            run(model, step=lambda data, model: asked.append(1))
        assert not asked


def test_a_hook_added_after_the_first_step_is_refused_too(device):
    with parallel(), combined_1f1b.install():
        model = build(expert_model_parallel_size=1)
        set_flag(model, True)
        run(model)
        model.module.decoder.layers[0].register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedModelError, match="forward hooks"):
            run(model)


def test_a_model_ends_while_the_package_stays_installed(device):
    with parallel(), combined_1f1b.install():
        model = build(expert_model_parallel_size=1)
        config = config_of(model)
        config.no_sync_func = lambda held=model: nullcontext()  # Megatron's loops put a method of the wrapper here
        set_flag(model, True)
        run(model)
        config.no_sync_func = None
        assert copy.deepcopy(vars(model.module)["_combined_1f1b_chunk"]) is None, "a copied model is cut anew"
        ended = weakref.ref(model.module)
        del model, config
        gc.collect()
        assert ended() is None


def test_uninstall_leaves_nothing_on_a_model(device):
    with parallel():
        model = build(expert_model_parallel_size=1)
        before = set(vars(model.module))
        with combined_1f1b.install():
            set_flag(model, True)
            run(model)
            assert set(vars(model.module)) != before
        assert set(vars(model.module)) == before


def test_a_replaced_dispatcher_is_noticed(device):
    options = combined_1f1b.OverlapOptions(pair_head_and_tail=True)
    with parallel(), combined_1f1b.install(options):
        model = build(expert_model_parallel_size=1)
        set_flag(model, True)
        losses = run(model)
        mlp = model.module.decoder.layers[0].mlp
        mlp.token_dispatcher = copy.copy(mlp.token_dispatcher)
        assert str(run(model)) == str(losses)


def test_nested_contexts_put_the_outer_options_back():
    before = names()
    outer, inner = combined_1f1b.OverlapOptions(pair_head_and_tail=True), combined_1f1b.OverlapOptions()
    with combined_1f1b.install(outer) as installation:
        with combined_1f1b.install(inner):
            assert installation.options is inner
        assert installation.options is outer
        assert names() != before
    assert names() == before


def test_leaving_a_context_removes_its_own_installation_only():
    before = names()
    with combined_1f1b.install():
        combined_1f1b.uninstall()
        combined_1f1b.install()
    assert names() != before
    combined_1f1b.uninstall()
    assert names() == before


def test_a_models_own_groups_compare_the_micro_batches(device, monkeypatch):
    """Not those of Megatron's global state, which need not be there; and new ones are compared anew."""
    compared = []
    gather = torch.distributed.all_gather
    monkeypatch.setattr(torch.distributed, "all_gather", lambda *a, **o: (compared.append(o["group"]), gather(*a, **o)))
    with parallel():
        model = build(expert_model_parallel_size=1)
    groups = model.module.pg_collection
    with combined_1f1b.install() as installation:
        for _ in range(2):
            installation.agree(3, model=model)
        assert compared == [groups.dp_cp, groups.tp]
        installation.agree(3, model=model, across_stages=True)
        assert compared[2:] == [groups.dp_cp, groups.tp, groups.pp]


@pytest.mark.parametrize("name", registration._ENTRY_POINTS)
def test_a_name_of_megatron_that_has_gone_is_named(name, monkeypatch):
    monkeypatch.delattr(schedules, name)
    with pytest.raises(ImportError, match=name):
        combined_1f1b.install()


def test_the_public_names_are_sorted_and_importable():
    assert list(combined_1f1b.__all__) == sorted(combined_1f1b.__all__)
    for name in combined_1f1b.__all__:
        assert getattr(combined_1f1b, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        combined_1f1b.no_such_name  # noqa: B018  the lookup is the test
