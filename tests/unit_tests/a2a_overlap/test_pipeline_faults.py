"""A pipeline rank that dies: the others end with an error that names the peer and the op, within the timeout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.world_size(1)

PROGRAM = """
import datetime, os, sys, traceback, warnings
warnings.filterwarnings("ignore")
import torch
import combined_1f1b, combined_1f1b.host as host
from functools import partial
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

    def dying_step(data, model):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 3:
            os._exit(7)
        return forward_step(data, model)

    virtual = {"virtual_pipeline_model_parallel_size": vpp} if vpp > 1 else {}
    with combined_1f1b.install(), parallel(pipeline_model_parallel_size=2, **virtual):
        chunks = Stages(pp=2, vpp=vpp).build()
        set_flags(chunks, True)
        try:
            run_pipeline(chunks, num_microbatches=6, step=dying_step)
        except RuntimeError:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(3)
"""


@pytest.mark.parametrize("vpp", [1, 2])
def test_the_others_say_which_peer_and_op_they_wait_for(vpp, tmp_path):
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parents[2])])
    streams = [(tmp_path / f"rank{rank}").open("w") for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(vpp), str(tmp_path / "store")],
            env={**os.environ, "PYTHONPATH": path, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=streams[rank],
        )
        for rank in range(2)
    ]
    try:
        ranks[0].wait(timeout=90)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for stream in streams:
            stream.close()
    output = (tmp_path / "rank0").read_text()
    assert ranks[0].returncode == 3, output
    assert "rank 1" in output
    assert "-->" in output, "the plan around the op"
    where = (
        r"in (RECV_B|SEND_F)\d, a transfer with rank 1, pipeline stage 1" if vpp == 1 else "slots of pipeline rank 0"
    )
    assert re.search(where, output), output
