"""Checkpoints: everything a run needs to go on bit for bit, written by torch.distributed.checkpoint.

Each rank writes its own shard (its main weights, optimizer state, buffers and random state) under its rank's name, so a
run is resumed with the sizes it was saved with. Alternative considered: a layout that any other number of ranks can
read; expert parameters share their names over expert ranks, so that needs a global numbering of experts.

A checkpoint is written to a temporary folder beside its place and renamed when every rank has finished: a folder named
`iteration_...` is always whole.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from combined_1f1b.errors import ConfigError
from combined_1f1b.training.config import RunConfig
from combined_1f1b.training.distributed import flatten, is_first_rank

if TYPE_CHECKING:
    import torch

    from combined_1f1b.training.loop import Trainer

_PREFIX = "iteration_"
_LAYOUT_FILE = "layout.json"
# What must be the same for a checkpoint to fit; the rest (lengths, intervals, rates) may change.
_MUST_MATCH = ("model.", "distributed.data_parallel", "optimizer.optimizer")
# The schedule does not change what is saved, so that a run may go on under another one.
_MAY_DIFFER = ("model.overlap_moe_expert_parallel_comm",)


def folder_of(config: RunConfig) -> Path:
    return Path(config.output) / "checkpoints"


def newest_checkpoint(config: RunConfig) -> Path:
    """The checkpoint of the highest iteration.

    Raises:
        ConfigError: there is none.
    """
    folder = folder_of(config)
    found = sorted(path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit())
    if not found:
        fix = "set training.resume=false, or output to the folder of the run to go on with"
        raise ConfigError.of("training.resume", True, f"no checkpoint in {folder}", fix)
    return found[-1]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, sharing its storage."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """This rank's main weights by name, the live tensors."""
    return {
        f"parameter.{index}": _local(parameter.detach()) for index, parameter in enumerate(trainer.optimizer.parameters)
    }


def _states(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What else changes as a run goes on: optimizer state and buffers (the live tensors), random state (copies)."""
    tensors: dict[str, torch.Tensor] = {}
    for index, parameter in enumerate(trainer.optimizer.parameters):
        for key, value in trainer.optimizer.optimizer.state[parameter].items():
            tensors[f"optimizer.{index}.{key}"] = _local(value.detach())
    for number, chunk in enumerate(trainer.chunks):
        for name, buffer in chunk.named_buffers():
            tensors[f"buffer.{number}.{name}"] = buffer
    return tensors | _random_state()


def _random_state() -> dict[str, torch.Tensor]:
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {f"random.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    return states | {"random.cpu": torch.get_rng_state(), "random.cuda": torch.cuda.get_rng_state()}


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(state.pop("random.cpu"))
    torch.cuda.set_rng_state(state.pop("random.cuda"))
    get_cuda_rng_tracker().set_states({name.removeprefix("random."): value for name, value in state.items()})


def _layout(config: RunConfig) -> dict[str, str]:
    """The settings that a checkpoint is tied to."""
    import torch

    settings = {
        key: value for key, value in flatten(config).items() if key.startswith(_MUST_MATCH) and key not in _MAY_DIFFER
    }
    return settings | {"number of ranks": str(torch.distributed.get_world_size())}


def save(trainer: Trainer, iteration: int) -> Path:
    """Write a checkpoint after `iteration` iterations; every rank calls this.

    Returns:
        its folder.
    """
    import torch
    from torch.distributed import checkpoint

    path = folder_of(trainer.config) / f"{_PREFIX}{iteration:08d}"
    scratch = path.with_name(f".unfinished_{path.name}")
    if is_first_rank():
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        (scratch / _LAYOUT_FILE).write_text(json.dumps(_layout(trainer.config), indent=1))
    torch.distributed.barrier()
    with _quiet():
        checkpoint.save(_named(_parameters(trainer) | _states(trainer)), checkpoint_id=str(scratch))
    torch.distributed.barrier()
    if is_first_rank():
        shutil.rmtree(path, ignore_errors=True)
        scratch.rename(path)
    torch.distributed.barrier()
    return path


def restore(path: Path, trainer: Trainer) -> int:
    """Load a checkpoint into a freshly built trainer; every rank calls this.

    Returns:
        the number of iterations that are done.
    Raises:
        ConfigError: the checkpoint is of another model, number of ranks or optimizer.
    """
    _check_layout(path, _layout(trainer.config))
    _load(path, _parameters(trainer))
    # An optimizer step that changes nothing: it makes the optimizer's state, and whoever keeps 16-bit copies of the
    # main weights renews them after a step.
    trainer.optimizer.idle_step()
    states = _states(trainer)
    _load(path, states)
    _set_random_state({name: value for name, value in states.items() if name.startswith("random.")})
    return int(path.name.removeprefix(_PREFIX))


def _named(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors under names that no other rank has."""
    import torch

    rank = torch.distributed.get_rank()
    return {f"rank{rank}.{name}": tensor for name, tensor in tensors.items()}


def _load(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read this rank's tensors in place."""
    from torch.distributed import checkpoint

    with _quiet():
        checkpoint.load(_named(tensors), checkpoint_id=str(path))


def _check_layout(path: Path, expected: dict[str, str]) -> None:
    saved = json.loads((path / _LAYOUT_FILE).read_text())
    for key in sorted(expected.keys() | saved.keys()):
        mine, theirs = expected.get(key, "(not set)"), saved.get(key, "(not set)")
        if mine != theirs:
            reason = f"the checkpoint {path} was saved with {theirs}"
            raise ConfigError.of(key, mine, reason, "use that value, or set training.resume=false")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.distributed.checkpoint warns about its own use of older torch calls; nothing that a user can act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
