"""Helpers for the tests of the command line: a small configuration, and commands run in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from combined_1f1b.cli import main

TINY = """\
model:
  num_layers: 2
  hidden_size: 16
  num_attention_heads: 2
  ffn_hidden_size: 32
  num_moe_experts: 4
  moe_ffn_hidden_size: 32
  moe_router_topk: 2
  moe_router_load_balancing_type: aux_loss
  moe_aux_loss_coeff: 0.01
  moe_token_dispatcher_type: alltoall
  expert_model_parallel_size: 2
  add_bias_linear: false
  normalization: RMSNorm
  hidden_dropout: 0.0
  attention_dropout: 0.0
  bf16: true
  overlap_moe_expert_parallel_comm: true
data:
  sequence_length: 16
  micro_batch_size: 2
  num_microbatches: 3
  max_bytes: 100000
optimizer:
  lr: 3.0e-3
training:
  train_iters: 4
distributed:
  timeout_seconds: 60
"""


def write_config(folder: Path, text: str = TINY) -> str:
    """Write a configuration file; returns its path."""
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def fails(capsys, *words: str) -> str:
    """Run a command that must fail as a user error does: exit code 2, one line on stderr, no traceback.

    Returns:
        the line.
    """
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert "Traceback" not in error
    return error


def shared_folder(folder: Path) -> Path:
    """Rank 0's folder, on every rank."""
    name = [str(folder)]
    torch.distributed.broadcast_object_list(name, src=0)
    return Path(name[0])


@contextmanager
def ending_process_groups() -> Iterator[None]:
    """Destroy the groups that a block made: a command's process would end with them, here each keeps its threads."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    before = set(groups)
    try:
        yield
    finally:
        for group in set(groups) - before:
            torch.distributed.destroy_process_group(group)
