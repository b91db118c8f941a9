"""Combined 1F1B: hide the expert-parallel all-to-all of MoE training in Megatron-Core."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "FullIterationGraph": "combined_1f1b.schedule.cuda_graph",
    "OverlapOptions": "combined_1f1b.config",
    "enable": "combined_1f1b.registration",
    "install": "combined_1f1b.registration",
    "last_step": "combined_1f1b.registration",
    "prepare_optimizer": "combined_1f1b.fsdp_adapter.data_parallel",
    "shard_model": "combined_1f1b.fsdp_adapter.data_parallel",
    "uninstall": "combined_1f1b.registration",
}

__all__ = [
    "FullIterationGraph",
    "OverlapOptions",
    "enable",
    "install",
    "last_step",
    "prepare_optimizer",
    "shard_model",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the pure parts need no torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
