"""Patches of torch.cuda: streams, devices, random state, memory figures and markers."""

from __future__ import annotations

import collections
import contextlib
from types import SimpleNamespace
from typing import Any

import torch

from combined_1f1b.host.contexts import DeviceContext, StreamContext
from combined_1f1b.host.patch import Patch
from combined_1f1b.host.random import HostDefaultGenerator
from combined_1f1b.host.streams import HostEvent, HostExternalStream, HostStream, StreamState

DEVICE_NAME = "host device (CPU)"


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _no(*args: Any, **kwargs: Any) -> bool:
    return False


def _yes(*args: Any, **kwargs: Any) -> bool:
    return True


def _memory_stats(*args: Any, **kwargs: Any) -> dict[str, int]:
    """Every figure is 0: CPU memory is not counted."""
    return collections.defaultdict(int)


def _device_properties(*args: Any, **kwargs: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name=DEVICE_NAME, major=0, minor=0, total_memory=0, multi_processor_count=1, warp_size=32, gcnArchName=""
    )


def _capability(*args: Any, **kwargs: Any) -> tuple[int, int]:
    """Lower than any GPU's, so that no library takes a path that needs one."""
    return (0, 0)


def _runtime() -> SimpleNamespace:
    """The two functions of the CUDA runtime that Megatron's training loop calls."""
    return SimpleNamespace(cudaProfilerStart=_zero, cudaProfilerStop=_zero)


@contextlib.contextmanager
def _range(*args: Any, **kwargs: Any) -> Any:
    yield


def cuda_patches(state: StreamState) -> tuple[Patch, ...]:
    """The patches of `torch.cuda` and its submodules.

    `torch.cuda.is_available()` stays False. Whoever asks wants to launch CUDA kernels, and must hear that it cannot:
    Megatron then leaves out Transformer Engine's tensors, straggler detection and cache trimming, MFSDP v2 does not
    ask, and torch keeps off its CUDA paths (Triton, pinned data loading, NCCL). Answering True helps nowhere, since
    every torch.cuda name that Megatron uses without asking is replaced here.
    """
    cuda, random, memory, nvtx = torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.nvtx

    def table(owner: Any, reason: str, **values: Any) -> tuple[Patch, ...]:
        return tuple(Patch(owner=owner, name=name, value=value, reason=reason) for name, value in values.items())

    return (
        *table(
            cuda,
            "Megatron imports _lazy_call and _lazy_init by name; while this is True the first runs its argument at "
            "once and the second does nothing",
            _initialized=True,
        ),
        *table(cuda, "stays False, for the reasons above", is_available=_no),
        *table(
            cuda,
            "stream and event objects",
            Stream=HostStream,
            ExternalStream=HostExternalStream,
            Event=HostEvent,
            StreamContext=StreamContext,
            stream=StreamContext,
            current_stream=state.current_stream,
            default_stream=state.default_stream,
            set_stream=state.set_stream,
            synchronize=state.synchronize,
        ),
        *table(
            cuda,
            "the current device",
            device=DeviceContext,
            current_device=state.current_device,
            set_device=state.set_device,
            device_count=state.device_count,
            get_device_name=lambda device=None: DEVICE_NAME,
            get_device_properties=_device_properties,
            get_device_capability=_capability,
            is_bf16_supported=_yes,
        ),
        *table(
            cuda,
            "random operators on CPU tensors draw from the CPU generator, so that is what the CUDA generators are",
            default_generators=(HostDefaultGenerator(),) * state.device_count(),
        ),
        *table(
            random,
            "names that torch.cuda.random imported from torch.cuda",
            current_device=state.current_device,
            device_count=state.device_count,
        ),
        *(
            patch
            for owner in (cuda, memory)
            for patch in table(
                owner,
                "memory is not counted",
                memory_allocated=_zero,
                max_memory_allocated=_zero,
                memory_reserved=_zero,
                max_memory_reserved=_zero,
                memory_stats=_memory_stats,
                memory_summary=lambda *args, **kwargs: "",
                memory_snapshot=lambda *args, **kwargs: [],
                mem_get_info=lambda *args, **kwargs: (0, 0),
                empty_cache=_nothing,
                reset_peak_memory_stats=_nothing,
            )
        ),
        *table(cuda, "asked by memory reports", device_memory_used=_zero, ipc_collect=_nothing),
        *table(
            nvtx,
            "profiler markers",
            range_push=_zero,
            range_pop=_zero,
            mark=_nothing,
            range=_range,
            range_start=_zero,
            range_end=_nothing,
        ),
        *table(torch.cuda.profiler, "profiler control", start=_nothing, stop=_nothing),
        *table(cuda, "profiler control", cudart=_runtime),
    )
