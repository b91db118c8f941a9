"""The host device: programs written for CUDA streams run on CPU tensors, for machines without a GPU.

    with host.activate() as device:      # torch.device("cpu"), or the current CUDA device where there is one
        torch.distributed.init_process_group("gloo")
        ...                              # Megatron-Core, MFSDP v2 and this package, unchanged

While active, the names of torch.cuda that those libraries use are replaced (tables of patches in cuda.py, tensors.py,
autocast.py and collectives.py): streams and events become plain objects, a CUDA device argument means the CPU, and work
runs at once in the order in which it is issued. Names that code outside took from torch.cuda before (`from torch.cuda
import Stream`) stay what they were.
"""

from __future__ import annotations

from combined_1f1b.host.activation import activate, is_active, observing, patches
from combined_1f1b.host.streams import HostEvent, HostStream, Observer, Step, StreamStep

__all__ = [
    "HostEvent",
    "HostStream",
    "Observer",
    "Step",
    "StreamStep",
    "activate",
    "is_active",
    "observing",
    "patches",
]
