"""The host device: programs written for CUDA streams run on CPU tensors, for machines without a GPU.

    with host.activate() as device:      # torch.device("cpu"), or the current CUDA device where there is one
        torch.distributed.init_process_group("gloo")
        ...                              # Megatron-Core, MFSDP v2 and this package, unchanged

While active, the names of torch.cuda that those libraries use are replaced (tables of patches in cuda.py, tensors.py,
autocast.py and collectives.py), and one of Megatron's own (recompute.py): streams and events become plain objects, a
CUDA device argument means the CPU, and work runs at once in the order in which it is issued. Replacing names has two
limits: a module that took one for itself before (`from torch.cuda import Stream`) keeps the stock one, and a module
imported inside the block that takes one keeps ours after the end. Of the names that Megatron-Core 0.19 takes so, none
is used in training under our torch; it may be imported before, and is when the block begins.

Streams and events keep identity and report what happens to them (`observing`). Two parts check what they imply:

* `torch.cuda.CUDAGraph` and `torch.cuda.graph` capture under CUDA's rules, with CUDA's error names (capture.py), and
  replay the recorded operations on the same tensors without running Python again (recording.py, tape.py).
* `checking_races` reports accesses of different streams that no event orders (races.py).
"""

from __future__ import annotations

from combined_1f1b.host.activation import activate, is_active, observing, patches
from combined_1f1b.host.races import RaceChecker, RaceError, checking_races
from combined_1f1b.host.steps import Observer, Step, StreamStep
from combined_1f1b.host.streams import HostEvent, HostStream

__all__ = [
    "HostEvent",
    "HostStream",
    "Observer",
    "RaceChecker",
    "RaceError",
    "Step",
    "StreamStep",
    "activate",
    "checking_races",
    "is_active",
    "observing",
    "patches",
]
