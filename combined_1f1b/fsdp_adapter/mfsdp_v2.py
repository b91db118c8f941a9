"""The only contact with MFSDP v2's private names: module mixins, contexts and the operations on one parameter group.

Written for megatron-core 0.19.x. Every private name used here or by the files above is listed in ``SURFACE`` and
looked up at import, so that a Megatron release that renames one fails at once, with the name, instead of deep inside
a step.

Two mixins attach MFSDP to a module the way its own ``fully_shard`` does (a new class of the same instance):

* ``ScheduledModule`` registers no hooks: a plan's ops drive it.
* ``HookedModule`` is MFSDP driving itself, the reference for parity, with what it lacks to be right with Megatron:
  the gradient factor of the unit, zeros for gradients that a backward did not produce, and frozen modules that stay
  whole until the backward has ended.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh

from combined_1f1b.errors import SurfaceError

_PACKAGE = "megatron.core.distributed.fsdp.src.megatron_fsdp"

SURFACE: dict[str, dict[str, tuple[str, ...]]] = {
    "experimental.module": {
        "FsdpContext": (
            "allgather_stream",
            "reduce_scatter_stream",
            "is_last_microbatch",
            "root_module",
            "forward_order",
            "backward_order",
            "current_stream",
            "register_post_backward_final_callback",
        ),
        "FsdpModule": (
            "_context",
            "_name",
            "_unshard_event",
            "_num_trainable_parameters",
            "_parameter_groups",
            "_ready_grad_parameters",
            "_make_grad_hook",
            "_register_hooks",
            "_lazy_init_context",
            "_reduce_gradient_groups",
            "_reshard_parameter_groups",
            "context",
            "parameter_groups",
            "pre_forward",
            "post_forward",
            "pre_backward",
            "post_backward",
        ),
        "_collect_backward_order": (),
    },
    "experimental.parameter_group": {
        "FsdpParameterGroup": (
            "parameter_names",
            "sharded_parameters",
            "unsharded_parameters",
            "requires_grad",
            "mesh",
            "main_weight",
            "model_weight",
            "main_grad",
            "_unsharded_model_weight",
            "_install_sharded_grads",
            "_symm_mem_pool",
            "allocate_partial_grad_buffer",
            "copy_gradients_to_partial_buffer",
            "reduce_partial_gradients",
            "release_unsharded_storage",
            "reshard_parameters",
            "sync_model_weight_from_main_weight",
            "unshard_parameters",
        ),
        "get_containing_parameter_group": (),
        "_CONTAINING_PARAMETER_GROUP_ATTR": (),
    },
    "experimental.dbuffer": {
        "DBuffer": (
            "layout",
            "local_buffer",
            "mesh",
            "offset",
            "placements",
            "_create_or_validate_out",
            "distribute_tensors",
            "get_dtensor",
            "get_local_tensor",
            "redistribute",
        ),
    },
    "experimental.placement": {"Flat": (), "Partial": (), "Placements": (), "Replicate": ()},
    "experimental.optimizer": {"fully_shard_optimizer": ()},
    "mixed_precision": {"MixedPrecisionPolicy": ("main_params_dtype", "main_grads_dtype")},
}


def check_surface(surface: dict[str, dict[str, tuple[str, ...]]] = SURFACE) -> dict[str, ModuleType]:
    """Import MFSDP's modules and check that every listed name exists.

    Args:
        surface: module (relative to MFSDP's package) to its names, each with the members that are relied on.

    Returns:
        The imported modules by their relative names.

    Raises:
        SurfaceError: a module, a name or a member has gone; the message names it.
    """
    modules: dict[str, ModuleType] = {}
    for module_name, names in surface.items():
        path = f"{_PACKAGE}.{module_name}"
        try:
            modules[module_name] = importlib.import_module(path)
        except ImportError as error:
            raise SurfaceError(f"{path} cannot be imported: this package needs megatron-core 0.19.x") from error
        for name, members in names.items():
            if not hasattr(modules[module_name], name):
                raise SurfaceError(f"{path}.{name} has gone: this package needs megatron-core 0.19.x")
            owner = getattr(modules[module_name], name)
            # Attributes that only instances have are declared as annotations of the class.
            declared = set(dir(owner)) | set(getattr(owner, "__annotations__", {}))
            for member in members:
                if member not in declared:
                    raise SurfaceError(f"{path}.{name}.{member} has gone: this package needs megatron-core 0.19.x")
    return modules


_modules = check_surface()
FsdpContext = _modules["experimental.module"].FsdpContext
FsdpModule = _modules["experimental.module"].FsdpModule
FsdpParameterGroup = _modules["experimental.parameter_group"].FsdpParameterGroup
DBuffer = _modules["experimental.dbuffer"].DBuffer
Partial = _modules["experimental.placement"].Partial
Replicate = _modules["experimental.placement"].Replicate
MixedPrecisionPolicy = _modules["mixed_precision"].MixedPrecisionPolicy
fully_shard_optimizer = _modules["experimental.optimizer"].fully_shard_optimizer
parameter_group_of = _modules["experimental.parameter_group"].get_containing_parameter_group
_GROUP_ATTRIBUTE = _modules["experimental.parameter_group"]._CONTAINING_PARAMETER_GROUP_ATTR


class ScheduledContext(FsdpContext):  # type: ignore[misc, valid-type]
    """Streams shared by every unit that one schedule drives, over all chunks of a rank."""

    def pre_backward(self) -> None:
        """Fork the reduction stream from the current stream.

        A stream enters a CUDA-graph capture only through such a wait. Without it the first allocation of a captured
        iteration's first reduction runs on a stream outside the capture, which CUDA refuses.
        """
        self.reduce_scatter_stream.wait_stream(self.current_stream())


class ScheduledModule(FsdpModule):  # type: ignore[misc, valid-type]
    """A unit that only a plan's ops touch."""

    def _register_hooks(self) -> None:
        """Register nothing: the schedule calls what MFSDP's hooks would."""

    def _lazy_init_context(self) -> None:
        assert self._context is not None, "the context is built eagerly, with the wrapper"


class HookedContext(FsdpContext):  # type: ignore[misc, valid-type]
    """MFSDP's own context, whose end-of-backward callback also settles what the backward left open."""

    def register_post_backward_final_callback(self) -> None:
        """Queue the settlement, then the join with the reduction stream, for the end of the running backward."""

        def settle_and_join() -> None:
            for module in self.forward_order:
                module.settle_backward()
            self.current_stream().wait_stream(self.reduce_scatter_stream)

        torch.autograd.Variable._execution_engine.queue_callback(settle_and_join)


class HookedModule(FsdpModule):  # type: ignore[misc, valid-type]
    """A module that MFSDP's hooks drive, corrected for Megatron."""

    gradient_factor: float
    _is_reduced: bool
    _is_backward_open: bool

    def _register_hooks(self) -> None:
        """Register MFSDP's hooks, without the one that frees a frozen module before its own backward."""
        self._is_reduced = False
        self._is_backward_open = False
        self.register_forward_pre_hook(lambda _module, _arguments: self.pre_forward())
        self.register_forward_hook(lambda _module, _arguments, _output: self.post_forward())
        self.register_full_backward_pre_hook(lambda _module, _gradients: self.pre_backward())
        for group in self.parameter_groups:
            self.watch(group)

    def watch(self, group: Any) -> None:
        """Let each gradient of a group count towards the module's post_backward."""
        if group.requires_grad:
            for parameter in group.unsharded_parameters:
                parameter.register_post_accumulate_grad_hook(self._make_grad_hook(parameter))

    def _lazy_init_context(self) -> None:
        assert self._context is not None, "the context is built eagerly, with the wrapper"

    def pre_forward(self) -> None:
        if self.context.root_module is self:
            # A root forward starts from rest, whatever a failed iteration left behind.
            for module in self.context.forward_order:
                module.rest()
        super().pre_forward()

    def pre_backward(self) -> None:
        self._is_backward_open = True
        super().pre_backward()

    def post_backward(self) -> None:
        self._is_backward_open = False
        self._is_reduced = True
        super().post_backward()

    def rest(self) -> None:
        """Free the module and forget gradients that no reduction has taken, and how far a backward had come."""
        if self._unshard_event is not None:
            self._reshard_parameter_groups()
        for group in self.parameter_groups:
            drop_gradients(group)
        self._is_backward_open = False
        self._is_reduced = False

    def settle_backward(self) -> None:
        """At the end of a backward: reduce zeros for what produced no gradient, and free what is still whole."""
        if self._is_backward_open:
            self.post_backward()
        elif not self._is_reduced and self._num_trainable_parameters > 0:
            self._reduce_gradient_groups()
        self._ready_grad_parameters.clear()
        self.rest()

    def _reduce_gradient_groups(self) -> None:
        reduce_gradients(self, factor=self.gradient_factor, is_last=self.context.is_last_microbatch)


def attach(
    module: nn.Module,
    mixin: type[Any],
    *,
    mesh: DeviceMesh,
    mixed_precision: Any,
    alone: nn.Parameter | None = None,
) -> None:
    """Put a module under MFSDP in place: it owns the parameters of its subtree that no unit below it owns.

    Args:
        module: the module; children that are units of their own must be attached before it.
        mixin: ``ScheduledModule`` or ``HookedModule``.
        mesh: one-dimensional mesh to shard over.
        mixed_precision: MFSDP's ``MixedPrecisionPolicy``.
        alone: a parameter that gets a group of its own if the module owns it, so that its shards depend on its shape
            and the mesh only.
    """
    placement = _modules["experimental.placement"]
    flat = [placement.Flat()]
    sharding = {
        "mesh": mesh,
        "placements": placement.Placements(dp_axes=[0], parameter=flat, gradient=flat, optimizer=flat),
        "mixed_precision_policy": mixed_precision,
    }
    original_class = module.__class__
    attributes = {id(parameter): dict(vars(parameter)) for parameter in module.parameters()}
    alone_name = next((name for name, parameter in module.named_parameters() if parameter is alone), None)
    module.__class__ = type(f"{mixin.__name__}{original_class.__name__}", (mixin, original_class), {})
    try:
        if alone_name is None:
            FsdpModule.__init__(module, **sharding)
        else:
            _attach_with_one_alone(module, alone_name, sharding)
    except Exception:
        module.__class__ = original_class
        raise
    for group in module.parameter_groups:
        for sharded, unsharded in zip(group.sharded_parameters, group.unsharded_parameters, strict=True):
            # MFSDP drops what Megatron wrote on its parameters; optimizers, norms and TP reductions read it.
            for name, value in attributes[id(unsharded)].items():
                setattr(sharded, name, value)


def _attach_with_one_alone(module: Any, name: str, sharding: dict[str, Any]) -> None:
    owner_name, _, own_name = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    parameter = owner._parameters[own_name]
    owner._parameters[own_name] = None  # MFSDP passes it by
    try:
        FsdpModule.__init__(module, **sharding)
    finally:
        owner._parameters[own_name] = parameter
    group = FsdpParameterGroup(owning_module=module, parameters={name: parameter}, **sharding)
    module._parameter_groups = (*module._parameter_groups, group)
    if group.requires_grad:
        module._num_trainable_parameters += 1
    if isinstance(module, HookedModule):
        module.watch(group)


def attach_context(context: Any, root: nn.Module) -> None:
    """Share one context with every unit below a root, in MFSDP's own orders."""
    for name, module in root.named_modules():
        if isinstance(module, FsdpModule):
            module._context = context
            module._name = name
            context.forward_order.append(module)
    _modules["experimental.module"]._collect_backward_order(root, context.backward_order)


def gradient_factor(*, is_expert: bool, per_token_loss: bool, dense_size: int, expert_size: int) -> float:
    """What a unit's data-parallel average must be multiplied by to give Megatron's gradient.

    MFSDP averages over the unit's own group. Megatron divides every gradient, also an expert's, by the size of the
    dense group: for an expert that is 1/ep on top of the average over its group. With a loss per token it sums
    instead, and divides by the number of tokens at the end.

    Args:
        is_expert: whether the unit's parameters are sharded over the expert-data-parallel group.
        per_token_loss: the config's ``calculate_per_token_loss``.
        dense_size: ranks in the dense data-parallel group (context parallel ranks included).
        expert_size: ranks in the expert-data-parallel group.
    """
    if per_token_loss:
        return float(expert_size if is_expert else dense_size)
    return expert_size / dense_size if is_expert else 1.0


def fill_missing_gradients(group: Any) -> None:
    """Give every parameter of a group a gradient: a parameter that the micro-batch did not use has gradient zero."""
    for parameter in group.unsharded_parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def fill_missing_reduced_gradients(group: Any) -> None:
    """Give a group without reduced gradients zeros."""
    if group.requires_grad and not has_gradients(group):
        group.main_grad.local_buffer.zero_()
        group._install_sharded_grads()


class _PackedGradients(DBuffer):  # type: ignore[misc, valid-type]
    """The buffer that a unit's gradients are packed and reduced in, with the layout of what they are reduced to.

    MFSDP would compute that layout anew for this buffer and for each that it makes of it, 0.6 to 0.75 ms every time.
    """

    def __init__(self, like: Any, *, placements: tuple[Any, ...], dtype: torch.dtype) -> None:
        self.mesh, self.layout, self.placements = like.mesh, like.layout, placements
        self.offset, numel = self.layout.get_local_range(self.mesh, placements)
        self.local_buffer = torch.empty(numel, dtype=dtype, device=like.device)

    @classmethod
    def of(cls, group: Any) -> Any:
        """A buffer for a group's gradients, allocated on the current stream."""
        if group._symm_mem_pool is not None:
            return group.allocate_partial_grad_buffer()
        average = Partial(torch.distributed.ReduceOp.AVG)
        dtype = group.unsharded_parameters[0].grad.dtype
        return cls(group.main_grad, placements=(average,) * group.mesh.ndim, dtype=dtype)

    def _create_or_validate_out(
        self, out: Any, *, placements: Iterable[Any] | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        if out is not None:
            return super()._create_or_validate_out(out, placements=placements, dtype=dtype)
        placements = self.placements if placements is None else tuple(placements)
        return _PackedGradients(self, placements=placements, dtype=dtype or self.dtype)


def reduce_gradients(module: Any, *, factor: float, is_last: bool) -> None:
    """Pack a unit's gradients on the current stream and reduce them on the reduction stream, in MFSDP's own order.

    The current stream waits for the reduction stream before it packs, since the packed buffer was allocated there.
    """
    context = module.context
    context.is_last_microbatch = is_last
    reduction = context.reduce_scatter_stream
    current = context.current_stream()
    for group in module.parameter_groups:
        if not group.requires_grad:
            continue
        fill_missing_gradients(group)
        with torch.cuda.stream(reduction):
            partial = _PackedGradients.of(group)
        current.wait_stream(reduction)
        group.copy_gradients_to_partial_buffer(partial)
        reduction.wait_stream(current)
        with torch.cuda.stream(reduction):
            # Before the reduction, since afterwards it is added to earlier micro-batches.
            if factor != 1.0:
                partial.local_buffer.mul_(factor)
            group.reduce_partial_gradients(partial, is_last)


def gather_group(group: Any) -> None:
    """Materialise a group's full parameters on the current stream and install them."""
    group.unshard_parameters()


def free_group(group: Any) -> None:
    """Install a group's sharded parameters and release the full storage on the current stream."""
    group.reshard_parameters()
    group.release_unsharded_storage()


def drop_gradients(group: Any) -> None:
    """Forget gradients of full parameters that no reduction has taken."""
    for parameter in group.unsharded_parameters:
        parameter.grad = None


def scale_gradients(group: Any, factor: float | torch.Tensor) -> None:
    """Multiply a group's reduced gradients in place, if it has any."""
    if group.main_grad is not None and has_gradients(group):
        group.main_grad.local_buffer.mul_(factor)


def unsharded_bytes(groups: Iterable[Any]) -> int:
    """Bytes of full-parameter storage that groups hold now."""
    return sum(group._unsharded_model_weight.local_buffer.untyped_storage().nbytes() for group in groups)


def is_gathered(group: Any) -> bool:
    """Whether a group's full parameters exist now."""
    return unsharded_bytes([group]) > 0


def has_gradients(group: Any) -> bool:
    """Whether any sharded parameter of a group has a gradient."""
    return any(parameter.grad is not None for parameter in group.sharded_parameters)


def clear_gradients(group: Any) -> None:
    """Unbind a group's gradients: the next reduction overwrites the persistent buffer instead of adding to it."""
    for parameter in group.sharded_parameters:
        parameter.grad = None


def adopt_gradients(group: Any) -> None:
    """Bring gradients that the user has set or cleared one by one into the persistent buffer that reductions add to.

    MFSDP adds to its buffer as soon as any parameter has a gradient, wherever that gradient lives, and refuses a group
    in which only some have one.
    """
    if not group.requires_grad or not has_gradients(group):
        return
    owner = group.main_grad.local_buffer.untyped_storage().data_ptr()
    is_foreign = False
    for index, parameter in enumerate(group.sharded_parameters):
        bound = group.main_grad.get_local_tensor(index)
        if parameter.grad is None:
            bound.zero_()
            is_foreign = True
        elif bound.numel() and parameter.grad.to_local().untyped_storage().data_ptr() != owner:
            bound.copy_(parameter.grad.to_local())
            is_foreign = True
    if is_foreign:
        group._install_sharded_grads()


def rebind_gradients(groups: Iterable[Any]) -> None:
    """Point every sharded parameter's ``.grad`` at its persistent reduced gradient, whatever it held."""
    for group in groups:
        if group.requires_grad:
            group._install_sharded_grads()


def full_weights(group: Any) -> list[torch.Tensor]:
    """All-gather a group's main weights: one full tensor per parameter, in the main weights' dtype."""
    full = group.main_weight.redistribute([Replicate()] * group.mesh.ndim)
    return [full.get_local_tensor(index).clone() for index in range(len(group.parameter_names))]


def full_gradients(group: Any) -> list[torch.Tensor] | None:
    """All-gather what ``.grad`` of a group's sharded parameters holds, or None if no parameter has a gradient."""
    gradients = [parameter.grad for parameter in group.sharded_parameters]
    if group.main_grad is None or all(gradient is None for gradient in gradients):
        return None
    buffer = DBuffer(
        mesh=group.mesh,
        placements=group.main_weight.placements,
        tensor_shapes=group.main_weight.layout.tensor_shapes,
        dtype=group.main_grad.dtype,
        device=group.main_grad.device,
    )
    buffer.local_buffer.zero_()
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            buffer.get_local_tensor(index).copy_(gradient.to_local())
    full = buffer.redistribute([Replicate()] * group.mesh.ndim)
    return [full.get_local_tensor(index).clone() for index in range(len(gradients))]


def load_weights(group: Any, tensors: Sequence[torch.Tensor | None]) -> None:
    """Copy this rank's shards out of full tensors into a group's main weights, and refresh the compute weights.

    Args:
        group: the parameter group.
        tensors: one full tensor per parameter of the group; None keeps the parameter as it is.
    """
    weight = group.main_weight
    shards = DBuffer.distribute_tensors(
        [
            torch.empty(shape, dtype=weight.dtype) if tensor is None else tensor.to(weight.device, weight.dtype)
            for tensor, shape in zip(tensors, weight.layout.tensor_shapes, strict=True)
        ],
        mesh=group.mesh,
        placements=weight.placements,
    )
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            weight.get_local_tensor(index).copy_(shards.get_local_tensor(index))
    group.sync_model_weight_from_main_weight()
