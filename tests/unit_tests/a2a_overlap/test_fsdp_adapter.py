"""The sharding protocol, its fakes, how a model is cut into units, and what shard_model refuses."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from sharding_recording import RecordingSharding
from sharding_testing import batches, build, drive, parallel, shard

import combined_1f1b
from combined_1f1b.errors import ConfigError, SurfaceError, UnsupportedModelError
from combined_1f1b.fsdp_adapter import mfsdp_v2
from combined_1f1b.fsdp_adapter.data_parallel import shard_model
from combined_1f1b.fsdp_adapter.protocol import NullSharding, RankDriver, ShardingDriver, driver_of
from combined_1f1b.fsdp_adapter.several_chunks import joined

PACKAGE = pathlib.Path(combined_1f1b.__file__).parent


@pytest.mark.world_size(1)
def test_the_three_drivers_keep_the_protocol(device):
    with parallel():
        drivers = [NullSharding(), RecordingSharding(), shard(build()).sharding_driver()]
        assert all(isinstance(driver, ShardingDriver) for driver in drivers)


@pytest.mark.world_size(1)
def test_the_null_driver_has_nothing_to_do_and_refuses_what_only_a_sharded_plan_asks():
    driver = NullSharding()
    assert (driver.units, driver.trainable_units, driver.gather_stream, driver.reduce_stream) == ((), (), None, None)
    driver.begin_iteration()
    driver.begin_backward()
    with driver.recording():
        pass
    driver.finish_iteration()
    driver.abort()
    for call in (lambda: driver.gather("L0"), lambda: driver.free("L0"), lambda: driver.reduce("L0", is_last=True)):
        with pytest.raises(AssertionError, match=r"L0.*not sharded"):
            call()


@pytest.mark.world_size(1)
def test_the_recording_driver_writes_down_what_it_forwards(device):
    with parallel():
        inner = shard(build()).sharding_driver()
        driver = RecordingSharding(inner)
        assert driver.units == inner.units
        assert driver.trainable_units == inner.trainable_units
        assert driver.gather_stream is inner.gather_stream
        assert driver.reduce_stream is inner.reduce_stream
        driver.begin_iteration()
        with driver.recording():
            assert inner.is_recording
        driver.gather("L1")
        assert inner.gathered_units == ("L1",)
        driver.begin_backward()
        driver.reduce("L1", is_last=False)
        driver.reduce("L1", is_last=True)
        driver.free("L1")
        driver.finish_iteration()
        driver.abort()
        assert driver.calls == [
            "BEGIN_ITERATION",
            "RECORDING",
            "GATHER.L1",
            "BEGIN_BACKWARD",
            "REDUCE.L1",
            "REDUCE.L1 last",
            "FREE.L1",
            "FINISH_ITERATION",
            "ABORT",
        ]


@pytest.mark.world_size(1)
def test_several_chunks_are_driven_each_by_its_own_driver():
    """Reductions are not asked of the joined driver: it has no method for them."""
    first, second = RecordingSharding(units=("L0",)), RecordingSharding(units=("L1",))
    driver = joined([first, second])
    assert isinstance(driver, RankDriver)
    assert not isinstance(driver, ShardingDriver)
    assert driver.units == driver.trainable_units == ("L0", "L1")
    driver.begin_iteration()
    driver.gather("L1")
    driver.begin_backward()
    driver.free("L1")
    driver.finish_iteration()
    driver.abort()
    assert first.calls == ["BEGIN_ITERATION", "BEGIN_BACKWARD", "FINISH_ITERATION", "ABORT"]
    assert second.calls == ["BEGIN_ITERATION", "GATHER.L1", "FREE.L1", "FINISH_ITERATION", "ABORT"]


@pytest.mark.world_size(1)
def test_the_recording_driver_works_alone():
    driver = RecordingSharding(units=("L0",))
    driver.gather("L0")
    driver.free("L0")
    with driver.recording():
        pass
    assert driver.units == driver.trainable_units == ("L0",)
    assert driver.calls == ["GATHER.L0", "FREE.L0", "RECORDING"]


@pytest.mark.world_size(1)
@pytest.mark.parametrize("before", ["nothing", "an iteration", "a failed iteration"])
def test_gradients_of_the_user_outlive_a_failure_before_the_iteration_begins(before, device):
    """As when another chunk of the rank cannot begin: this one is aborted too, and has reduced nothing."""
    with parallel():
        wrapped = shard(build())
        driver = wrapped.sharding_driver()
        if before == "an iteration":
            drive(wrapped, batches(1))
        elif before == "a failed iteration":
            driver.begin_iteration()
            driver.abort()
        for parameter in wrapped.parameters():
            parameter.grad = torch.ones_like(parameter)
        driver.abort()
        assert all(parameter.grad is not None for parameter in wrapped.parameters())


@pytest.mark.world_size(1)
def test_driver_of_finds_the_wrapper_and_refuses_hooks(device):
    class Around(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    with parallel():
        wrapped = shard(build(dtype="bf16"))
        assert driver_of(wrapped) is wrapped.sharding_driver()
        assert driver_of([wrapped]) is wrapped.sharding_driver()
        assert driver_of(Around(wrapped)) is wrapped.sharding_driver()
        assert isinstance(driver_of(build(dtype="bf16")), NullSharding)
        with pytest.raises(ValueError, match="one model chunk"):
            driver_of([wrapped, wrapped])
        with pytest.raises(ConfigError, match="register_hooks=True"):
            driver_of(shard(build(), register_hooks=True))


@pytest.mark.world_size(1)
@pytest.mark.parametrize(
    ("changes", "units"),
    [
        ({}, "embedding L0.experts L0 L1 L2.experts L2 final_norm output_layer"),
        ({"tied": True}, "embedding L0.experts L0 L1 L2.experts L2 final_norm"),
        (
            {"mtp_num_layers": 1, "moe_layer_freq": [1, 1, 1]},
            "embedding L0.experts L0 L1.experts L1 L2.experts L2 final_norm M0.experts M0 output_layer root",
        ),
    ],
)
def test_units_are_named_as_plans_name_them_and_own_every_parameter_once(device, changes, units):
    with parallel():
        names = {name for name, _ in build(**changes).named_parameters()}
        wrapped = shard(build(**changes))
        driver = wrapped.sharding_driver()
        assert driver.units == tuple(units.split())
        assert driver.trainable_units == driver.units
        owned = [name for name, _ in wrapped.named_sharded_parameters()]
        assert len(owned) == len(set(owned))
        assert set(owned) == names


@pytest.mark.world_size(1)
def test_hook_driven_models_keep_mfsdp_s_partition(device):
    with parallel():
        wrapped = shard(build(), register_hooks=True)
        owners = [unit.name for unit in wrapped.context.forward_order]
        layers = ["decoder.layers.0", "decoder.layers.1", "decoder.layers.2"]
        experts = ["decoder.layers.0.mlp.experts", "decoder.layers.2.mlp.experts"]
        assert sorted(owners) == sorted(["", *layers, *experts])


@pytest.mark.world_size(1)
def test_register_hooks_follows_the_flag(device):
    with parallel():
        for flag in (False, True):
            model = build()
            model.config.overlap_moe_expert_parallel_comm = flag
            wrapped = shard_model(model, model.config)
            assert (wrapped._driver is not None) == flag


@pytest.mark.world_size(1)
def test_unit_types_choose_modules_for_hooks_and_must_name_layers_for_the_schedule(device):
    with parallel():
        wrapped = shard(build(), register_hooks=True, unit_types=(TransformerLayer, MLP))
        assert "decoder.layers.1.mlp" in [unit.name for unit in wrapped.context.forward_order]
        assert "L1" in shard(build(), unit_types=TransformerLayer).sharding_driver().units
        with pytest.raises(ConfigError, match=r"unit_types='MLP'.*decoder\.layers\.0\.mlp"):
            shard(build(), unit_types=(TransformerLayer, MLP))
        with pytest.raises(ConfigError, match=r"unit_types.*L0 is a TransformerLayer"):
            shard(build(), unit_types=())


@pytest.mark.world_size(1)
def test_a_model_that_is_wrapped_or_no_gpt_model_is_refused_untouched(device):
    with parallel():
        wrapped = shard(build())
        with pytest.raises(ConfigError, match="sharded already"):
            shard_model(wrapped, wrapped.config)
        with pytest.raises(ConfigError, match="sharded already"):
            shard_model(wrapped.module, wrapped.config)
        model = build()
        ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        with pytest.raises(ConfigError, match=r"DistributedDataParallel.*already"):
            shard_model(ddp, model.config)
        with pytest.raises(ConfigError, match="not a module"):
            shard_model("model", model.config)
        linear = torch.nn.Linear(2, 2)
        with pytest.raises(UnsupportedModelError, match=r"decoder\.layers"):
            shard_model(linear, wrapped.config, register_hooks=False)
        assert type(linear) is torch.nn.Linear


@pytest.mark.world_size(1)
def test_parameters_that_cannot_be_sharded_are_refused_by_name(device):
    with parallel():
        model = build()
        model.decoder.layers[1].gate = torch.nn.Parameter(torch.ones(()))
        with pytest.raises(ConfigError, match=r"decoder\.layers\.1\.gate.*scalar"):
            shard(model)
        model = build()
        model.decoder.layers[1].mlp.linear_fc1.weight.allreduce = False
        with pytest.raises(UnsupportedModelError, match=r"mlp\.linear_fc1\.weight.*L1 mixes"):
            shard(model)
        assert not any(isinstance(module, mfsdp_v2.FsdpModule) for module in model.modules())


@pytest.mark.world_size(1)
@pytest.mark.parametrize(
    ("flag", "value", "register_hooks"),
    [
        ("gradient_accumulation_fusion", True, False),
        ("gradient_accumulation_fusion", True, True),
        ("delay_wgrad_compute", True, True),
        ("gtp_weight_remat_size", 2, False),
    ],
)
def test_settings_that_sharding_cannot_keep_are_refused(device, flag, value, register_hooks):
    with parallel():
        model = build()
        setattr(model.config, flag, value)
        with pytest.raises(ConfigError, match=f"{flag}={value}"):
            shard(model, register_hooks=register_hooks)


@pytest.mark.world_size(1)
def test_missing_process_groups_are_refused(device):
    with parallel():
        model = build()
        with pytest.raises(ConfigError, match=r"pg_collection.*dp_cp"):
            shard(model, pg_collection=object())
    with pytest.raises(ConfigError, match="parallel_state"):
        shard(model)


@pytest.mark.world_size(1, 2)
def test_process_groups_can_be_given(device):
    from megatron.core.process_groups_config import ProcessGroupCollection

    with parallel(expert_model_parallel_size=torch.distributed.get_world_size()):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        wrapped = shard(build(), pg_collection=groups)
        sizes = {group.mesh.get_group(0).size() for group in wrapped.groups}
        assert sizes == {torch.distributed.get_world_size(), 1}


@pytest.mark.world_size(1)
@pytest.mark.parametrize(
    ("module", "name", "member"),
    [
        (module, name, member)
        for module, names in mfsdp_v2.SURFACE.items()
        for name, members in names.items()
        for member in (*members[:2], "gone")
    ],
)
def test_a_private_name_that_has_gone_is_named(module, name, member):
    surface = {module: {name: (member,)}}
    if member != "gone":
        mfsdp_v2.check_surface(surface)
        return
    with pytest.raises(SurfaceError, match=rf"{module}\.{name}\.gone"):
        mfsdp_v2.check_surface(surface)
    with pytest.raises(SurfaceError, match=rf"{module}\.{name}Gone has gone"):
        mfsdp_v2.check_surface({module: {name + "Gone": ()}})
    with pytest.raises(SurfaceError, match=rf"{module}_gone"):
        mfsdp_v2.check_surface({module + "_gone": {}})


@pytest.mark.world_size(1)
def test_import_fails_with_the_name_that_has_gone():
    program = """
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.parameter_group import FsdpParameterGroup
del FsdpParameterGroup.unshard_parameters
import combined_1f1b.fsdp_adapter.mfsdp_v2
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 1
    assert "SurfaceError" in run.stderr.splitlines()[-1]
    assert "FsdpParameterGroup.unshard_parameters has gone" in run.stderr.splitlines()[-1]


@pytest.mark.world_size(1)
def test_one_file_imports_mfsdp_and_uses_its_private_names():
    private = {
        name
        for names in mfsdp_v2.SURFACE.values()
        for members in names.values()
        for name in members
        if name.startswith("_") and name != "_name"
    }
    for path in PACKAGE.rglob("*.py"):
        if path.name == "mfsdp_v2.py":
            continue
        text = path.read_text()
        assert "megatron_fsdp.experimental" not in text, path
        assert not [name for name in private if f".{name}" in text], path


@pytest.mark.world_size(1)
def test_the_protocol_imports_neither_torch_nor_megatron():
    program = "import sys, combined_1f1b.fsdp_adapter.protocol; print({'torch', 'megatron'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "set()"
