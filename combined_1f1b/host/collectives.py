"""Patch of the all-to-all: Megatron hands over its split sizes as they are, which on the CPU means as tensors.

Megatron copies the splits of the MoE dispatch to the host as numpy arrays when the tensors are on a GPU and leaves CPU
tensors alone; `all_to_all_single` takes lists of ints only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed import distributed_c10d

from combined_1f1b.host.patch import Patch


def _as_list(splits: Any) -> Any:
    return splits.tolist() if hasattr(splits, "tolist") else splits


def collective_patches() -> tuple[Patch, ...]:
    """The patches of `torch.distributed`."""
    original = distributed_c10d.all_to_all_single

    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's own keyword
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return original(output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), *args, **kwargs)

    return tuple(
        Patch(owner=owner, name="all_to_all_single", value=all_to_all_single, reason="split sizes may be CPU tensors")
        for owner in (torch.distributed, distributed_c10d)
    )
