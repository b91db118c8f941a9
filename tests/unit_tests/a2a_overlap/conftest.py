"""Shared set-up of the a2a_overlap suite: the host device, one process group per session, and the world_size marker.

Run it the field's way: `torchrun --nproc-per-node N -m pytest tests/unit_tests/a2a_overlap` for N = 1, 2, 4.
"""

from __future__ import annotations

import datetime
import gc
import os
import tempfile
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.layout import GlobalLayout

import combined_1f1b.host as host

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
TIMEOUT = datetime.timedelta(seconds=60)


class OneDeviceGloo(torch.distributed.ProcessGroupGloo):
    """gloo groups that share one device.

    A group with devices of its own keeps threads that wake 100 times a second, and the suite makes over 100 groups:
    their wake-ups alone filled both cores.
    """

    devices: ClassVar[list[Any]] = []

    def __init__(self, store: Any, rank: int, size: int, *, timeout: datetime.timedelta) -> None:
        options = self._Options()
        OneDeviceGloo.devices = OneDeviceGloo.devices or [self.create_default_device()]
        options._devices = OneDeviceGloo.devices
        options._timeout = min(timeout, TIMEOUT)  # Megatron asks for half an hour
        super().__init__(store, rank, size, options)


def pytest_collection_modifyitems(items):
    """Skip, with the reason, what needs another number of ranks."""
    for item in items:
        marker = item.get_closest_marker("world_size")
        if marker is None:
            continue
        sizes = marker.args
        if torch.cuda.is_available() and "on_gpu" in marker.kwargs:
            sizes = (*sizes, marker.kwargs["on_gpu"])
        if WORLD_SIZE not in sizes:
            wanted = " or ".join(str(size) for size in sizes)
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} ranks, this run has {WORLD_SIZE}"))


@pytest.fixture(scope="session")
def device():
    """The device for tensors, with the process group up and 60 s to time out.

    gloo on the host device and where ranks share a GPU, which NCCL refuses; NCCL where every rank has its own.
    """
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    backend = "nccl" if gpus >= WORLD_SIZE else "gloo"
    with (
        host.activate() as active_device,
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("torch.distributed.distributed_c10d.ProcessGroupGloo", OneDeviceGloo)
        # MFSDP computes the layout of a buffer for each reduction, in most of a millisecond.
        patch.setattr(GlobalLayout, "build", cache(GlobalLayout.build))
        gc.collect()
        gc.freeze()  # what the imports left is nobody's garbage: tests that collect look at their own objects
        address = {} if "RANK" in os.environ else {"init_method": f"file://{folder}/store", "rank": 0, "world_size": 1}
        torch.distributed.init_process_group(backend, timeout=TIMEOUT, **address)
        try:
            yield active_device
        finally:
            torch.distributed.destroy_process_group()
