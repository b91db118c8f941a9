"""``shard_model`` and ``prepare_optimizer``: from a Megatron model to a wrapper over MFSDP v2, and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup

from combined_1f1b.errors import ConfigError
from combined_1f1b.fsdp_adapter import mfsdp_v2
from combined_1f1b.fsdp_adapter.optimizer import prepare_optimizer
from combined_1f1b.fsdp_adapter.schedule_driver import ScheduleDriver, Unit
from combined_1f1b.fsdp_adapter.shared_embedding import SharedEmbedding, copied_weight
from combined_1f1b.fsdp_adapter.units import UnitModule, hook_units, innermost, schedule_units
from combined_1f1b.fsdp_adapter.wrapper import ShardedDataParallel

__all__ = ["ShardedDataParallel", "prepare_optimizer", "shard_model"]


def shard_model(
    model: Any,
    config: Any,
    register_hooks: bool | None = None,
    mixed_precision: Any = None,
    pg_collection: Any = None,
    unit_types: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
) -> Any:
    """Shard a model in place over the data-parallel ranks with MFSDP v2, and wrap it for Megatron.

    Dense parameters are sharded over the data-parallel ranks (context parallel ranks included), expert-parallel
    ones over the expert-data-parallel ranks. Pipeline stages with copies of the word embedding compare them: the first
    and the last stage must call this at the same time.

    Args:
        model: a megatron.core GPTModel, a Float16Module around one, or a list of such chunks.
        config: the model's TransformerConfig.
        register_hooks: False: the schedule drives MFSDP. True: MFSDP's hooks do, as the reference. Default: True
            exactly if ``config.overlap_moe_expert_parallel_comm`` is False.
        mixed_precision: MFSDP's MixedPrecisionPolicy; default fp32 main weights and fp32 main gradients.
        pg_collection: Megatron's ProcessGroupCollection, of which ``dp_cp`` and ``expt_dp`` are used; default: the
            groups of ``parallel_state``.
        unit_types: module types that become units besides the experts; default: transformer layers.

    Returns:
        A wrapper; for a list a list of wrappers, which share one context if the schedule drives them.

    Raises:
        ConfigError: a setting or a model that cannot be sharded, before anything is changed.
    """
    chunks = list(model) if isinstance(model, Sequence | nn.ModuleList) else [model]
    if register_hooks is None:
        register_hooks = not config.overlap_moe_expert_parallel_comm
    if unit_types is not None and not isinstance(unit_types, tuple):
        unit_types = tuple(unit_types) if isinstance(unit_types, Sequence) else (unit_types,)
    _check_config(config, register_hooks)
    for chunk in chunks:
        _check_chunk(chunk)
    find_units = hook_units if register_hooks else schedule_units
    units_of_chunks = [find_units(innermost(chunk), unit_types) for chunk in chunks]

    meshes = _Meshes(pg_collection, device_type=next(chunks[0].parameters()).device.type)
    policy = mixed_precision or mfsdp_v2.MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32
    )
    copies = [copied_weight(innermost(chunk), meshes.dense) for chunk in chunks]
    shared_context = None
    wrappers = []
    for chunk, units, copied in zip(chunks, units_of_chunks, copies, strict=True):
        root = innermost(chunk)
        device = next(root.parameters()).device
        alone = copied.weight if copied is not None else None
        _attach_units(units, config, meshes, policy, is_hooked=register_hooks, alone=alone)
        if register_hooks:
            context = mfsdp_v2.HookedContext(device, root)
        else:
            shared_context = shared_context or mfsdp_v2.ScheduledContext(device, root)
            context = shared_context
        mfsdp_v2.attach_context(context, root)
        driver = None
        if not register_hooks:
            driven = tuple(Unit(unit.name, unit.module, meshes.factor(unit, config)) for unit in units)
            # A tied weight is read while the module that owns it is not running.
            used_outside = ("embedding", "output_layer") if root.share_embeddings_and_output_weights else ()
            driver = ScheduleDriver(driven, context, used_outside=used_outside, unread=_unread_units(root))
        wrappers.append(
            ShardedDataParallel(
                config=config,
                module=chunk,
                context=context,
                units=tuple(unit.module for unit in units),
                driver=driver,
                dense_size=meshes.dense.size(),
                shared_embedding=SharedEmbedding(copied) if copied is not None else None,
            )
        )
    return wrappers if isinstance(model, Sequence | nn.ModuleList) else wrappers[0]


class _Meshes:
    """The dense and the expert mesh of this rank."""

    def __init__(self, pg_collection: Any, *, device_type: str) -> None:
        dense_group, expert_group = _groups(pg_collection)
        self.dense = DeviceMesh.from_group(dense_group, device_type)
        self.expert = DeviceMesh.from_group(expert_group, device_type)

    def of(self, unit: UnitModule) -> DeviceMesh:
        return self.expert if unit.is_expert else self.dense

    def factor(self, unit: UnitModule, config: Any) -> float:
        return mfsdp_v2.gradient_factor(
            is_expert=unit.is_expert,
            per_token_loss=config.calculate_per_token_loss,
            dense_size=self.dense.size(),
            expert_size=self.expert.size(),
        )


def _unread_units(model: Any) -> tuple[str, ...]:
    """A last stage with multi-token prediction ties its output layer to its copy of the embedding, and has both."""
    is_tied_to_copy = model.share_embeddings_and_output_weights and model.mtp_process and not model.pre_process
    return ("output_layer",) if is_tied_to_copy else ()


def _attach_units(
    units: tuple[UnitModule, ...],
    config: Any,
    meshes: _Meshes,
    policy: Any,
    *,
    is_hooked: bool,
    alone: nn.Parameter | None,
) -> None:
    mixin = mfsdp_v2.HookedModule if is_hooked else mfsdp_v2.ScheduledModule
    for unit in units:
        mfsdp_v2.attach(unit.module, mixin, mesh=meshes.of(unit), mixed_precision=policy, alone=alone)
        if is_hooked:
            unit.module.gradient_factor = meshes.factor(unit, config)  # type: ignore[assignment]


def _groups(pg_collection: Any) -> tuple[ProcessGroup, ProcessGroup]:
    if pg_collection is not None:
        for name in ("dp_cp", "expt_dp"):
            if getattr(pg_collection, name, None) is None:
                raise ConfigError.of("pg_collection", f"without {name}", "sharding needs this group", f"set {name}")
        return pg_collection.dp_cp, pg_collection.expt_dp
    if not parallel_state.model_parallel_is_initialized():
        raise ConfigError.of(
            "pg_collection",
            None,
            "Megatron's parallel_state is not initialised",
            "call initialize_model_parallel first, or pass the groups",
        )
    return (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_group(),
    )


def _check_config(config: Any, register_hooks: bool) -> None:
    if config.gradient_accumulation_fusion:
        raise ConfigError.of(
            "gradient_accumulation_fusion",
            True,
            "its kernel writes into main_grad of the full weights, which a sharded model does not have",
            "set it to False",
        )
    if register_hooks and getattr(config, "delay_wgrad_compute", False):
        raise ConfigError.of(
            "delay_wgrad_compute",
            True,
            "MFSDP's hooks reduce gradients before the delayed ones exist",
            "set it to False, or shard with register_hooks=False",
        )
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if getattr(config, name, 1) > 1:
            raise ConfigError.of(name, getattr(config, name), "MFSDP v2 shards over one axis only", "set it to 1")


def _check_chunk(chunk: Any) -> None:
    if not isinstance(chunk, nn.Module):
        raise ConfigError.of("model", type(chunk).__name__, "not a module", "pass a GPTModel or a list of chunks")
    if any(isinstance(module, mfsdp_v2.FsdpModule) for module in chunk.modules()):
        raise ConfigError.of("model", type(chunk).__name__, "it is sharded already", "shard a model once")
    for module in chunk.modules():
        if isinstance(module, _BaseDataParallel):
            raise ConfigError.of(
                "model",
                type(module).__name__,
                "it is wrapped for data parallelism already",
                "pass the GPTModel or Float16Module inside",
            )
    for name, parameter in chunk.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError.of("model", name, "MFSDP v2 cannot shard a scalar parameter", "give it one dimension")
        if parameter.is_meta:
            raise ConfigError.of("model", name, "it is on the meta device", "materialise the model first")
        if type(parameter.data) is not torch.Tensor:
            raise ConfigError.of(
                "model",
                name,
                f"MFSDP v2 cannot shard a {type(parameter.data).__name__}",
                "keep parameters in fp32, bf16 or fp16 (fp8_param_gather off)",
            )
