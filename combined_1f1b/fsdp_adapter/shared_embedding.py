"""The word embedding that two pipeline stages hold copies of: their gradients are added once per iteration.

Megatron copies the weight to the last stage when the output layer is tied to it, or when multi-token prediction embeds
there, and adds the copies' gradients in `finalize_model_grads`. With MFSDP v2 that call would add shards of different
rows, or set a gradient of the wrong kind. So here::

    shard_model         the weight gets a parameter group of its own: both stages' shards then hold the same rows
    finish_grad_sync    the shards of both stages are added over Megatron's embedding group
    Megatron's call     finds main_grad = None on the sharded weight, which means a frozen weight to it, and passes by

Alternatives considered: bringing both full gradients together works for any packing, but each data-parallel rank then
holds and sends a gradient of the whole vocabulary instead of its shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup

from combined_1f1b.errors import ConfigError
from combined_1f1b.fsdp_adapter import mfsdp_v2


@dataclass(frozen=True)
class CopiedWeight:
    """A word embedding's copy on this stage, before the chunk is sharded.

    Attributes:
        name: the weight's name in the innermost model.
        weight: the full weight.
        group: Megatron's embedding group: this data-parallel rank's peers on the stages with a copy.
    """

    name: str
    weight: nn.Parameter
    group: ProcessGroup


def copied_weight(model: Any, mesh: DeviceMesh) -> CopiedWeight | None:
    """Find the weight that Megatron has marked as one of several stages' copies, and compare it with the others.

    The ranks of all stages with a copy must call it.

    Args:
        model: an unsharded chunk, the innermost model.
        mesh: what the weight will be sharded over.

    Raises:
        ConfigError: the copies differ in shape, place of their shards, precision, or whether they are trained.
    """
    marked = [(name, weight) for name, weight in model.named_parameters() if getattr(weight, "shared_embedding", False)]
    if not marked:
        return None
    ((name, weight),) = marked
    group = model.embd_group
    if group is None or dist.get_rank() not in dist.get_process_group_ranks(group):
        raise ConfigError.of(
            "pg_collection.embd",
            group,
            f"pipeline stages hold copies of {name}, and this rank cannot reach the others",
            "build the model with the embedding group of its first and last stage",
        )
    description = {
        "rows": weight.shape[0],
        "columns": weight.shape[1],
        "bytes of an element": weight.element_size(),
        "trained": int(weight.requires_grad),
        "data-parallel rank": mesh.get_local_rank(),
        "data-parallel ranks": mesh.size(),
    }
    mine = torch.tensor(list(description.values()), dtype=torch.int64, device=weight.device)
    copies = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(copies, mine, group=group)
    for position, what in enumerate(description):
        values = [int(copy[position]) for copy in copies]
        if len(set(values)) > 1:
            raise ConfigError.of(
                name,
                f"{what}: {values}",
                "its copies on the pipeline stages differ, so their gradients cannot be added",
                "build, freeze and shard the stages in the same way",
            )
    return CopiedWeight(name, weight, group)


class SharedEmbedding:
    """A copy after its chunk was sharded, with the weight alone in its parameter group.

    Attributes:
        name: the weight's name in the innermost model.
    """

    def __init__(self, copied: CopiedWeight) -> None:
        self.name = copied.name
        self._group = copied.group
        self._parameters = mfsdp_v2.parameter_group_of(copied.weight)
        self._is_exchanged = False
        self._is_exchanged_by_replay = False
        (sharded,) = self._parameters.sharded_parameters
        sharded.main_grad = None

    @property
    def is_pending(self) -> bool:
        """Whether there is a gradient that lacks the other stage's part."""
        return not self._is_exchanged and mfsdp_v2.has_gradients(self._parameters)

    def begin(self) -> None:
        """A training forward starts: what it adds to the gradient has to be exchanged.

        Raises:
            ConfigError: the gradient has been exchanged already, and would count twice.
        """
        if self._is_exchanged and mfsdp_v2.has_gradients(self._parameters):
            raise ConfigError.of(
                self.name,
                "with a gradient",
                "pipeline stages hold copies of it, the gradients of an earlier iteration have been added over them, "
                "and would be added again with those of this one",
                "call zero_grad_buffer() or zero_grad(set_to_none=True) before each iteration",
            )
        self._is_exchanged = False

    def exchange(self) -> None:
        """Add the copies' gradients, once per iteration. The ranks of all stages with a copy must call it."""
        if self.is_pending:
            dist.all_reduce(self._parameters.main_grad.local_buffer, group=self._group)
            self._is_exchanged = True
            self._is_exchanged_by_replay = torch.cuda.is_current_stream_capturing()

    def replayed(self) -> None:
        """A CUDA graph of the iteration was replayed, with the exchange or without it."""
        self._is_exchanged = self._is_exchanged_by_replay
