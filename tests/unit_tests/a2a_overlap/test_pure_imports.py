"""Planning needs no torch: the pure files import, build, check, simulate and draw where torch cannot load."""

from __future__ import annotations

import subprocess
import sys

import pytest

import combined_1f1b.schedule

pytestmark = pytest.mark.world_size(1)

PURE = (
    *("ops", "shape", "order", "excerpt", "dependencies"),
    *("passes", "plan", "validate", "simulate", "render"),
    *("chunks", "tables", "pipeline_order", "transfers", "ranks", "slot_simulation"),
)

PROGRAM = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron", "numpy", "matplotlib"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
for name in {names!r}:
    importlib.import_module("combined_1f1b.schedule." + name)
from combined_1f1b.schedule import build_plan, simulate, Plan
from combined_1f1b.schedule.render import to_perfetto, to_text
plan = build_plan(num_layers=3, num_microbatches=3, sharded=True, pair_head_and_tail=True)
plan.validate()
assert Plan.parse(str(plan)) == plan
assert simulate(plan).hidden_fraction > 0.5
assert to_text(plan) and to_perfetto(plan)
assert not {{"torch", "megatron", "numpy", "matplotlib"}} & set(sys.modules)
print("pure")
"""


def test_pure_files_need_no_torch():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(names=PURE)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "pure"


def test_public_names():
    names = combined_1f1b.schedule.__all__
    functions = ["build_plan", "simulate", "simulate_ranks", "validate_ranks"]
    assert names == sorted(names) == ["Op", "Plan", "PlanShape", *functions]
    for name in names:
        # `simulate` is the function, whichever of its file and itself is imported first.
        assert callable(getattr(combined_1f1b.schedule, name))
