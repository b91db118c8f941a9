"""Patch of Megatron's recompute without output: it compiles a C++ extension, which is no work for CPU tensors.

Its `CheckpointWithoutOutput` frees an output after the forward and fills it again in the backward. What reads it there
may be a view of it that another module saved, so the storage is filled and not the tensor. The extension makes one
storage stand for another's memory; on the CPU that memory is copied, so the bytes exist twice until the backward ends.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from combined_1f1b.host.patch import Patch


def _all_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage, as a flat tensor whose changes autograd does not count."""
    return tensor.data.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def share_storage(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Give the storage of `dst` the size and the bytes of that of `src`: every tensor that views it sees the data.

    A resize and one copy, both on the current stream. That is what a capture records, and what a race check judges as
    memory of that stream. No version counter moves, so autograd takes saved views for unchanged.
    """
    assert dst.dtype == src.dtype
    dst.untyped_storage().resize_(src.untyped_storage().nbytes())
    _all_bytes(dst).copy_(_all_bytes(src))


def _get_share_storage() -> Callable[[torch.Tensor, torch.Tensor], None]:
    return share_storage


def recompute_patches() -> tuple[Patch, ...]:
    """The patches of `megatron.core.tensor_parallel.random`, which is imported for them."""
    from megatron.core.tensor_parallel import random

    return (
        Patch(
            owner=random,
            name="_get_share_storage",
            value=_get_share_storage,
            reason="Megatron's own runs a C++ compiler, for half a minute on a new machine",
        ),
    )
