"""The schedule: a plan that is pure data, the checks and pictures made from it, and the executor that obeys it.

What is imported here needs no torch. `simulate` is a function and a file of the same name: importing it here makes the
name mean the function.
"""

from __future__ import annotations

from combined_1f1b.schedule.ops import Op
from combined_1f1b.schedule.plan import Plan, build_plan
from combined_1f1b.schedule.ranks import validate_ranks
from combined_1f1b.schedule.shape import PlanShape
from combined_1f1b.schedule.simulate import simulate, simulate_ranks

__all__ = ["Op", "Plan", "PlanShape", "build_plan", "simulate", "simulate_ranks", "validate_ranks"]
