"""How a Megatron model is cut into units: the modules, their names in a plan, and the mesh each is sharded over.

A unit owns the parameters of its module's subtree that no unit inside it owns, so units are listed innermost first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from combined_1f1b.errors import ConfigError, UnsupportedModelError

ROOT = "root"


@dataclass(frozen=True, slots=True)
class UnitModule:
    """One unit before it is sharded.

    Attributes:
        name: the name that ops carry, such as ``L3.experts``; in hook-driven mode the module's path.
        module: the module that owns the unit's parameters.
        is_expert: whether the parameters are sharded over the expert-data-parallel mesh.
    """

    name: str
    module: nn.Module
    is_expert: bool


def innermost(model: nn.Module) -> nn.Module:
    """The model itself, without precision wrappers around it."""
    *_, model = wrappers_of(model)
    return model


def wrappers_of(model: nn.Module) -> Iterator[nn.Module]:
    """What is around a model, from outside, and the model itself last."""
    yield model
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
        yield model


def experts_of(layer: nn.Module) -> nn.Module | None:
    """The module of a layer's routed experts, or None for a dense layer."""
    experts = getattr(getattr(layer, "mlp", None), "experts", None)
    return experts if isinstance(experts, nn.Module) else None


def schedule_units(model: nn.Module, unit_types: tuple[type[nn.Module], ...] | None) -> tuple[UnitModule, ...]:
    """Cut a GPT model into the units that a plan names, innermost first and otherwise in forward order.

    Args:
        model: the innermost model chunk.
        unit_types: types that the user wants as units; they must be the types of the layers, since a plan has no
            names for others. None accepts any layer.

    Returns:
        The units that own at least one parameter, the root last; the root is listed even when it owns none.

    Raises:
        UnsupportedModelError: the model has no decoder layers, or expert and other parameters share a module.
        ConfigError: ``unit_types`` asks for units that the plan cannot name.
    """
    units = [unit for unit in _schedule_units(model) if unit.name == ROOT or _owns_parameters(unit.module)]
    if unit_types is not None:
        _check_unit_types(model, units, unit_types)
    _check_meshes(units)
    return tuple(units)


def hook_units(model: nn.Module, unit_types: tuple[type[nn.Module], ...] | None) -> tuple[UnitModule, ...]:
    """Cut a model the way MFSDP users do: experts, modules of the unit types (default: layers), the root.

    Args:
        model: the innermost model chunk.
        unit_types: module types that become units; None means Megatron's transformer layers.

    Returns:
        The units, innermost first, the root last.
    """
    if unit_types is None:
        from megatron.core.transformer.transformer_layer import BaseTransformerLayer

        unit_types = (BaseTransformerLayer,)
    units: list[UnitModule] = []

    def visit(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child)
        is_unit = path.endswith("mlp.experts") or isinstance(module, unit_types)
        if path and is_unit and _owns_parameters(module):
            units.append(UnitModule(path, module, "mlp.experts" in path and _is_expert(module)))

    visit("", model)
    units.append(UnitModule(ROOT, model, is_expert=False))
    _check_meshes(units)
    return tuple(units)


def _schedule_units(model: nn.Module) -> Iterator[UnitModule]:
    layers = getattr(getattr(model, "decoder", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedModelError.of(
            "model", type(model).__name__, "it has no decoder.layers to shard", "pass a megatron.core GPTModel"
        )
    if isinstance(getattr(model, "embedding", None), nn.Module):
        yield UnitModule("embedding", model.embedding, is_expert=False)
    for layer in layers:
        yield from _layer_units(f"L{layer.layer_number - 1}", layer)  # Megatron counts from 1, through all stages
    if isinstance(model.decoder.final_layernorm, nn.Module):
        yield UnitModule("final_norm", model.decoder.final_layernorm, is_expert=False)
    if isinstance(getattr(model, "mtp", None), nn.Module):
        for position, layer in enumerate(model.mtp.layers):
            yield from _layer_units(f"M{position}", layer.mtp_model_layer)
    if isinstance(getattr(model, "output_layer", None), nn.Module):
        yield UnitModule("output_layer", model.output_layer, is_expert=False)
    yield UnitModule(ROOT, model, is_expert=False)


def _layer_units(name: str, layer: nn.Module) -> Iterator[UnitModule]:
    experts = experts_of(layer)
    if experts is not None:
        yield UnitModule(f"{name}.experts", experts, _is_expert(experts))
    yield UnitModule(name, layer, is_expert=False)


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_expert(module: nn.Module) -> bool:
    """Whether Megatron reduces the module's parameters over the expert-data-parallel group."""
    return any(not getattr(parameter, "allreduce", True) for parameter in module.parameters())


def _check_meshes(units: list[UnitModule]) -> None:
    inner: set[int] = set()
    for unit in units:
        for name, parameter in unit.module.named_parameters():
            if id(parameter) in inner:
                continue
            inner.add(id(parameter))
            if unit.is_expert == getattr(parameter, "allreduce", True):
                raise UnsupportedModelError.of(
                    "model",
                    name,
                    f"unit {unit.name} mixes expert-parallel and other parameters",
                    "keep expert-parallel parameters under mlp.experts",
                )


def _check_unit_types(model: nn.Module, units: list[UnitModule], unit_types: tuple[type[nn.Module], ...]) -> None:
    named = {id(unit.module) for unit in units}
    for path, module in model.named_modules():
        if isinstance(module, unit_types) and id(module) not in named:
            raise ConfigError.of(
                "unit_types",
                type(module).__name__,
                f"the schedule has no name for the unit {path}",
                "pass layer types only, or register_hooks=True",
            )
    for unit in units:
        if unit.name[0] in "LM" and unit.name[1:].isdigit() and not isinstance(unit.module, unit_types):
            raise ConfigError.of(
                "unit_types",
                tuple(kind.__name__ for kind in unit_types),
                f"the schedule shards layer by layer, and {unit.name} is a {type(unit.module).__name__}",
                "add its type, or pass register_hooks=True",
            )
