"""The data-parallel wrapper that Megatron's schedules, finalisation and training loops see around a sharded model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.utils import make_viewless_tensor
from torch import nn
from torch.distributed.tensor import DTensor

from combined_1f1b.errors import ConfigError
from combined_1f1b.fsdp_adapter import mfsdp_v2
from combined_1f1b.fsdp_adapter.schedule_driver import ScheduleDriver
from combined_1f1b.fsdp_adapter.shared_embedding import SharedEmbedding

_FLAG = "overlap_moe_expert_parallel_comm"


class ShardedDataParallel(_BaseDataParallel):  # type: ignore[misc]
    """One model chunk whose parameters, gradients and main weights MFSDP v2 shards over the data-parallel ranks.

    ``parameters()`` are the sharded main weights. Their ``.grad`` is set when a forward-backward function returns.

    Attributes:
        module: the wrapped chunk, precision wrappers included.
        context: MFSDP's context: streams and the order of units.
        ddp_config: what Megatron's gradient finalisation reads of a wrapper.
        shared_embedding: the chunk's copy of a word embedding that other pipeline stages hold too, or None.
    """

    def __init__(
        self,
        *,
        config: Any,
        module: nn.Module,
        context: Any,
        units: tuple[nn.Module, ...],
        driver: ScheduleDriver | None,
        dense_size: int,
        shared_embedding: SharedEmbedding | None = None,
    ) -> None:
        """Wrap a chunk that ``shard_model`` has sharded.

        Args:
            config: Megatron's TransformerConfig.
            module: the chunk.
            context: MFSDP's context of the chunk.
            units: the modules that own parameter groups, innermost first.
            driver: the driver of a chunk that a schedule drives; None if MFSDP's hooks drive it.
            dense_size: ranks in the dense data-parallel group.
            shared_embedding: the chunk's copy of a word embedding that other pipeline stages hold too.
        """
        super().__init__(config=config, module=module)
        self.shared_embedding = shared_embedding
        self.context = context
        # Megatron's finalisation then works on local shards in place. Its other path calls DTensor.full_tensor(),
        # which is wrong for MFSDP's uneven shards.
        self.ddp_config = DistributedDataParallelConfig(
            use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params", grad_reduce_in_fp32=True
        )
        self._driver = driver
        self._dense_size = dense_size
        # Each group with the prefix that makes its parameters' names those of the innermost model.
        self.named_groups: tuple[tuple[str, Any], ...] = tuple(
            (f"{unit.name}." if unit.name else "", group) for unit in units for group in unit.parameter_groups
        )

    def sharding_driver(self) -> ScheduleDriver:
        """The driver through which a schedule runs this chunk.

        Raises:
            ConfigError: MFSDP's own hooks drive the chunk.
        """
        if self._driver is None:
            raise ConfigError.of(
                "register_hooks",
                True,
                "MFSDP's own hooks drive this model, so no schedule can",
                f"shard it with register_hooks=False, or train it with {_FLAG}=False",
            )
        return self._driver

    @property
    def groups(self) -> tuple[Any, ...]:
        """MFSDP's parameter groups of the chunk."""
        return tuple(group for _, group in self.named_groups)

    def named_sharded_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each sharded parameter with its name in the innermost model, whether its unit is free or not."""
        for prefix, group in self.named_groups:
            for name, parameter in zip(group.parameter_names, group.sharded_parameters, strict=True):
                yield prefix + name, parameter

    def gathered_units(self) -> tuple[str, ...]:
        """The units whose full parameters exist now; none does between iterations."""
        if self._driver is not None:
            return self._driver.gathered_units
        return tuple(prefix.rstrip(".") or "root" for prefix, group in self.named_groups if mfsdp_v2.is_gathered(group))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the chunk with full parameters.

        Raises:
            ConfigError: a training forward in the mode that the model was not sharded for.
        """
        is_overlapped = bool(getattr(self.config, _FLAG, False))
        if self.shared_embedding is not None and self.training and torch.is_grad_enabled():
            self.shared_embedding.begin()
        if self._driver is None:
            if is_overlapped and self.training and torch.is_grad_enabled():
                raise ConfigError.of(
                    _FLAG, True, "the model was sharded for MFSDP's own hooks", "shard it with register_hooks=False"
                )
            output = self.module(*inputs, **kwargs)
            if isinstance(output, torch.Tensor) and output._base is not None:
                # A backward hook makes the output a view, and a pipeline schedule refuses to release views.
                output = make_viewless_tensor(output, requires_grad=output.requires_grad, keep_graph=True)
            return output
        if self._driver.is_recording:
            return self.module(*inputs, **kwargs)
        if torch.is_grad_enabled() and self.training:
            raise ConfigError.of(
                _FLAG,
                is_overlapped,
                "the model was sharded for the schedule, which alone can train it",
                f"call combined_1f1b.install() and train with {_FLAG}=True, shard with register_hooks=True, "
                "or call the model under torch.no_grad()",
            )
        # The full parameters are gone when this returns, so nothing may keep a graph over them.
        with torch.no_grad(), self._driver.evaluating():
            return self.module(*inputs, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Mark the micro-batches inside as not the last: gradients are reduced anyway, and added up sharded."""
        if self._driver is not None:
            return nullcontext()
        return self._not_last()

    @contextmanager
    def _not_last(self) -> Iterator[None]:
        self.context.is_last_microbatch = False
        try:
            yield
        finally:
            self.context.is_last_microbatch = True

    def start_grad_sync(self, *unused: Any) -> None:
        """Nothing to start: each micro-batch's backward reduces its gradients."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:  # noqa: ARG002 (the signature is Megatron's)
        """Add the gradients of a word embedding that several pipeline stages hold copies of, once per iteration.

        All others are reduced, bound and joined when the backward of the iteration returns.
        """
        if self.shared_embedding is not None:
            self.shared_embedding.exchange()

    def start_param_sync(  # the signature is Megatron's
        self,
        *unused: Any,  # noqa: ARG002
        force_sync: bool = False,
        force_dispatch: bool = False,  # noqa: ARG002
    ) -> None:
        """Refresh the compute weights from the main weights, if forced: optimizer steps do it by themselves."""
        if force_sync:
            for group in self.groups:
                group.sync_model_weight_from_main_weight()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all reduced gradients in place."""
        for group in self.groups:
            mfsdp_v2.scale_gradients(group, scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Drop all gradients: the next reduction overwrites instead of adding."""
        for group in self.groups:
            mfsdp_v2.drop_gradients(group)
            mfsdp_v2.clear_gradients(group)

    def rebind_gradients(self) -> None:
        """Point every ``.grad`` at its reduced gradient again, after a replay that ran no Python."""
        mfsdp_v2.rebind_gradients(self.groups)
        if self.shared_embedding is not None:
            self.shared_embedding.replayed()

    def broadcast_params(self) -> None:
        """Refuse: every shard exists once, so replicas that differed were lost when the model was sharded.

        Raises:
            ConfigError: there is more than one data-parallel rank.
        """
        if self._dense_size > 1:
            raise ConfigError.of(
                "broadcast_params",
                f"{self._dense_size} data-parallel ranks",
                "a sharded model has no replicas to make equal",
                "load or broadcast the weights before shard_model",
            )

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """All-gather the main weights. Every data-parallel rank must call it.

        Returns:
            Full tensors in the main weights' dtype, by their names in the innermost model.
        """
        full: dict[str, torch.Tensor] = {}
        for prefix, group in self.named_groups:
            for name, tensor in zip(group.parameter_names, mfsdp_v2.full_weights(group), strict=True):
                full[prefix + name] = tensor
        return full

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """All-gather the reduced gradients. Every data-parallel rank must call it.

        Returns:
            Full tensors in the main gradients' dtype, by name; parameters without a gradient are left out.
        """
        full: dict[str, torch.Tensor] = {}
        for prefix, group in self.named_groups:
            tensors = mfsdp_v2.full_gradients(group)
            if tensors is None:
                continue
            for name, parameter, tensor in zip(group.parameter_names, group.sharded_parameters, tensors, strict=True):
                if parameter.grad is not None:
                    full[prefix + name] = tensor
        return full

    def state_dict(self, prefix: str = "", keep_vars: bool = False, destination: Any = None) -> Any:
        """The chunk's state with full tensors in the main weights' dtype. Every data-parallel rank must call it."""
        state = self.module.state_dict(prefix=prefix, keep_vars=keep_vars, destination=destination)
        for name, tensor in self.full_parameters().items():
            if prefix + name in state:
                state[prefix + name] = tensor
        return state

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """The same as ``state_dict``."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(self, *unused: Any, **kwargs: Any) -> Any:  # noqa: ARG002 (the signature is Megatron's)
        """Refuse: Megatron's distributed checkpoints do not know MFSDP v2's uneven shards.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "sharded_state_dict: Megatron's distributed checkpoints cannot describe uneven shards; "
            "save state_dict(), which holds full tensors"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load full tensors, each rank its shards, and refresh the compute weights.

        Args:
            state_dict: full tensors and the chunk's buffers, as ``state_dict`` or an unsharded model gives them.
            strict: whether the keys must match exactly.
        """
        own_values = dict(state_dict)
        for name, parameter in self.named_sharded_parameters():
            if name not in state_dict:
                continue
            value = state_dict[name]
            if isinstance(value, DTensor):
                raise ConfigError(f"state_dict[{name!r}] is a DTensor; pass the full tensor")
            if value.shape != parameter.shape:
                raise ConfigError(
                    f"state_dict[{name!r}] has shape {tuple(value.shape)}, the model {tuple(parameter.shape)}; "
                    "load the state of a model of the same shape"
                )
            # The module then copies the parameter onto itself, so that torch checks keys and loads buffers.
            own_values[name] = parameter.detach()
        self.module.load_state_dict(own_values, strict=strict)
        for prefix, group in self.named_groups:
            mfsdp_v2.load_weights(group, [state_dict.get(prefix + name) for name in group.parameter_names])
