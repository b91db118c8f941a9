"""A pipeline rank that dies or fails alone: the others end with an error that names the peer and the op, in time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from host_models import loss_of, parallel
from parity_testing import forward_step
from pipeline_testing import Stages, run_pipeline, set_flags

import combined_1f1b

PROGRAM = """
import datetime, os, sys, traceback, warnings
warnings.filterwarnings("ignore")
import torch
import combined_1f1b, combined_1f1b.host as host
vpp = int(sys.argv[1])
torch.set_num_threads(1)
with host.activate():
    torch.distributed.init_process_group(
        "gloo", init_method="file://" + sys.argv[2], rank=int(os.environ["RANK"]), world_size=2,
        timeout=datetime.timedelta(seconds=20),
    )
    from host_models import parallel
    from parity_testing import forward_step
    from pipeline_testing import Stages, run_pipeline, set_flags

    calls = []

    def step(data, model):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 3:
            os._exit(7)
        return forward_step(data, model)

    virtual = {"virtual_pipeline_model_parallel_size": vpp} if vpp > 1 else {}
    with combined_1f1b.install(), parallel(pipeline_model_parallel_size=2, **virtual):
        chunks = Stages(pp=2, vpp=vpp).build()
        set_flags(chunks, True)
        try:
            run_pipeline(chunks, num_microbatches=6, step=step)
        except RuntimeError:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(3)
"""

REPORTS = {
    1: r"in (RECV_B|SEND_F)\d, a transfer with rank 1, pipeline stage 1",
    2: r"after \d+ of \d+ slots of pipeline rank 0 \(neighbours: rank 1, rank 1\)",
}


@pytest.mark.world_size(1)
@pytest.mark.parametrize("vpp", [1, 2])
def test_a_stage_whose_neighbour_dies_says_for_which_peer_and_op_it_waited(vpp, tmp_path):
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parents[2])])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(vpp), str(tmp_path / "store")],
            env={**os.environ, "PYTHONPATH": path, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output = ranks[0].communicate(timeout=90)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == 3, output
    assert re.search(REPORTS[vpp], output), output
    assert "-->" in output, "the plan around the op"


@pytest.mark.world_size(2)
def test_a_stage_whose_neighbour_fails_and_lives_on_says_so_within_the_timeout(device):
    """The last stage's loss function raises at micro-batch 2, so the gradient of that one never comes."""
    calls: list[int] = []

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        calls.append(1)
        if len(calls) == 3:
            raise OSError("out of luck")
        return loss_of(output)

    seconds = 4
    groups = parallel(pipeline_model_parallel_size=2, distributed_timeout_minutes=seconds / 60)
    with combined_1f1b.install(), groups:
        chunks: list[Any] = Stages(pp=2).build()
        set_flags(chunks, True)
        step = partial(forward_step, loss=loss)
        with pytest.raises((OSError, RuntimeError)) as caught:
            run_pipeline(chunks, num_microbatches=6, step=step)
    torch.distributed.barrier()  # or the first one's error would be that the last one has ended
    if torch.distributed.get_rank() == 1:
        assert str(caught.value) == "out of luck"
        return
    assert f"Timed out waiting {1000 * seconds}ms" in str(caught.value)
    where, excerpt = caught.value.__notes__[:2]
    assert where == "in RECV_B2, a transfer with rank 1, pipeline stage 1"
    assert "--> " in excerpt
