"""Process groups of a run: torchrun's environment, Megatron's parallel state, a check that all ranks agree."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from combined_1f1b.errors import ConfigError
from combined_1f1b.training.config import RunConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """How the ranks are divided. world: all ranks; the rest as Megatron names them."""

    world: int
    tensor: int
    pipeline: int
    virtual_pipeline: int | None
    expert: int
    expert_tensor: int

    @property
    def data(self) -> int:
        """Replicas of the dense part."""
        return self.world // (self.tensor * self.pipeline)


def parallel_sizes(config: RunConfig, world: int) -> ParallelSizes:
    """Read the parallel sizes from the section `model` and check them against the number of ranks.

    Raises:
        ConfigError: a size that does not divide the ranks, or experts that cannot be spread evenly.
    """
    model = config.model
    tensor = model.get("tensor_model_parallel_size", 1)
    sizes = ParallelSizes(
        world=world,
        tensor=tensor,
        pipeline=model.get("pipeline_model_parallel_size", 1),
        virtual_pipeline=model.get("virtual_pipeline_model_parallel_size"),
        expert=model.get("expert_model_parallel_size", 1),
        expert_tensor=model.get("expert_tensor_parallel_size") or tensor,
    )
    for name, size in (
        ("tensor_model_parallel_size", sizes.tensor),
        ("pipeline_model_parallel_size", sizes.pipeline),
        ("expert_model_parallel_size", sizes.expert),
    ):
        if size < 1 or world % size:
            ranks = f"{world} rank{'s' if world > 1 else ''}"
            fix = f"start {size} ranks or a multiple (torchrun --nproc-per-node {size}), or set a divisor of {world}"
            raise ConfigError.of(f"model.{name}", size, f"does not divide the {ranks} of this run", fix)
    dense = sizes.tensor * sizes.pipeline
    if world % dense:
        fix = f"start a multiple of {dense} ranks"
        reason = f"tensor x pipeline = {dense} does not divide the {world} ranks of this run"
        raise ConfigError.of("model.tensor_model_parallel_size", sizes.tensor, reason, fix)
    sparse = sizes.expert * sizes.expert_tensor * sizes.pipeline
    if world % sparse:
        fix = f"start a multiple of {sparse} ranks or lower it"
        reason = f"expert x expert tensor x pipeline = {sparse} does not divide the {world} ranks of this run"
        raise ConfigError.of("model.expert_model_parallel_size", sizes.expert, reason, fix)
    context = model.get("context_parallel_size", 1)
    if context != 1:
        fix = "set it to 1, or use the schedule from your own training script"
        raise ConfigError.of("model.context_parallel_size", context, "this command does not split sequences", fix)
    experts = model.get("num_moe_experts")
    if sizes.expert > 1 and experts is None:
        fix = "set model.num_moe_experts or model.expert_model_parallel_size=1"
        raise ConfigError.of("model.expert_model_parallel_size", sizes.expert, "the model has no experts", fix)
    if experts is not None and experts % sizes.expert:
        fix = f"use a multiple of {sizes.expert} experts or a divisor of {experts}"
        reason = f"does not divide model.num_moe_experts={experts}"
        raise ConfigError.of("model.expert_model_parallel_size", sizes.expert, reason, fix)
    return sizes


def world_size() -> int:
    """Ranks of this run, as torchrun says; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


@contextlib.contextmanager
def distributed(config: RunConfig) -> Iterator[torch.device]:
    """Process group and Megatron's parallel state for the length of a block; gloo on the host device, NCCL on CUDA.

    A process group that is there already is used and left as it is.

    Yields:
        the device for tensors.
    Raises:
        ConfigError: sizes that do not fit, or ranks that were started with different configurations.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    import combined_1f1b.host as host

    sizes = parallel_sizes(config, world_size())
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    with host.activate() as device, _process_group(config.distributed.timeout_seconds):
        if device.type == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        check_ranks_agree(config)
        # Megatron keeps the routers' losses in a global that has the first model's number of layers.
        destroy_moe_metrics_tracker()
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=sizes.tensor,
                pipeline_model_parallel_size=sizes.pipeline,
                virtual_pipeline_model_parallel_size=sizes.virtual_pipeline,
                expert_model_parallel_size=sizes.expert,
                expert_tensor_parallel_size=sizes.expert_tensor,
                distributed_timeout_minutes=max(1, config.distributed.timeout_seconds // 60),
            )
            yield device
        finally:
            parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def _process_group(timeout_seconds: int) -> Iterator[None]:
    """The default process group for the length of a block, unless there is one."""
    import torch

    if torch.distributed.is_initialized():
        yield
        return
    # NCCL refuses two ranks on one GPU.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = "nccl" if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        address: dict[str, Any] = {}
        if "RANK" not in os.environ:
            address = {"init_method": f"file://{folder}/store", "rank": 0, "world_size": 1}
        torch.distributed.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_seconds), **address)
        yield
        # Only after success: when this rank failed, the others may sit in a collective, and a barrier here would wait
        # for them. Ending the process is what lets them fail in time.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def flatten(config: RunConfig) -> dict[str, str]:
    """Every setting as {dotted key: text}, for comparing and logging."""
    result: dict[str, str] = {}
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if dataclasses.is_dataclass(value):
            value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        if isinstance(value, dict):
            name = "model" if section.name == "gpt" else section.name
            result |= {f"{name}.{key}": str(item) for key, item in value.items()}
        else:
            result[section.name] = str(value)
    return result


def check_ranks_agree(config: RunConfig) -> None:
    """Compare the configuration over all ranks, so that a difference is an error here and not a hang later.

    Raises:
        ConfigError: on every rank, naming the first setting that differs and who has what.
    """
    import torch

    mine = flatten(config)
    everyone: list[dict[str, str]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    for key in sorted(set().union(*everyone)):
        values = [settings.get(key, "(not set)") for settings in everyone]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            reason = f"ranks disagree: rank 0 has {values[0]}, rank {other} has {values[other]}"
            raise ConfigError.of(key, mine.get(key, "(not set)"), reason, "start every rank with the same settings")
