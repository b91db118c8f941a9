"""What one forward/backward layer pair costs the host: this package's schedule against Megatron's built-in combined.

Both run whole iterations of the same identity model (`identity_model.py`) on streams that do nothing
(`stub_streams.py`), everything else real: nodes are made, run forward and backward by the autograd engine, and dropped.

    time of a pair = (T(many layers) - T(few layers)) / (difference in layers x micro-batches)

The built-in makes the callables of a layer anew for every micro-batch (`build_layer_callables`). That is part of its
cost; a third measurement leaves it out.

The difference takes out what is not per layer. An iteration of n micro-batches has n - 1 pairs, and a forward and a
backward alone, which together cost what a pair costs. Counts are exact: a second difference, over the number of
micro-batches too, leaves those of a pair alone.

As pyperf does, several fresh processes each take several values, the schedules in turn; the best and the median of all
are shown. Other work on the machine only ever adds time, so the best is the figure to compare.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common import fine_grained_callables
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan

from combined_1f1b.bench.host_cost_table import BUILT_IN, BUILT_IN_REUSED, OURS, SCHEDULES
from combined_1f1b.bench.identity_model import IdentityModel, build_callables, layer_metadata, reuse_callables
from combined_1f1b.bench.stub_streams import StubEvent, StubStream, counting, stub_streams
from combined_1f1b.bench.summary import summarize
from combined_1f1b.config import OverlapOptions
from combined_1f1b.host.patch import AppliedPatches, Patch
from combined_1f1b.schedule import layer_plan
from combined_1f1b.schedule.layer_plan import ModelChunk
from combined_1f1b.schedule.no_pipelining import run_iteration
from combined_1f1b.schedule.step import StepInputs

FEW_LAYERS, MANY_LAYERS, MICROBATCHES = 2, 12, 8
Iteration = Callable[[], None]


def _forward_step(_data: Any, model: Any) -> Any:
    return model(None, None, None), lambda output: (output.sum(), {})


def our_iteration(num_layers: int, num_microbatches: int) -> Iteration:
    """One iteration through this package's schedule, everything but the model real."""
    model = IdentityModel(num_layers)
    chunk = ModelChunk(model)
    options = OverlapOptions()

    def iterate() -> None:
        inputs = StepInputs(
            forward_step_func=_forward_step,
            data_iterator=None,
            model=model,
            num_microbatches=num_microbatches,
            config=model.config,
        )
        run_iteration(inputs, chunk=chunk, options=options)

    return iterate


def built_in_iteration(
    num_layers: int, num_microbatches: int, *, compute: StubStream, communication: StubStream, reuse: bool
) -> Iteration:
    """One iteration through the built-in's layer plans, made anew for every micro-batch as it makes them.

    Args:
        reuse: leave out the work of `build_layer_callables`, which the built-in repeats for every micro-batch.
    """
    build = reuse_callables if reuse else build_callables
    layers = list(IdentityModel(num_layers).decoder.layers)

    def make_plans() -> list[TransformerLayerSchedulePlan]:
        event, state = StubEvent(), SimpleNamespace()
        last = len(layers) - 1
        return [
            TransformerLayerSchedulePlan(
                layer,
                event,
                state,
                lambda: compute,
                lambda: communication,
                {"is_first_layer": index == 0, "is_last_layer": index == last},
            )
            for index, layer in enumerate(layers)
        ]

    def iterate() -> None:
        fine_grained_callables.build_layer_callables = build  # `_iterations` puts Megatron's back
        backwards: list[Any] = []
        for microbatch in range(num_microbatches + 1):
            forwards = make_plans() if microbatch < num_microbatches else [None] * len(layers)
            hidden = torch.zeros(0, requires_grad=True)
            gradient = torch.zeros(0)
            for forward in forwards:
                backward = backwards.pop() if backwards else None
                hidden, gradient = TransformerLayerSchedulePlan.run(forward, backward, hidden, gradient)
                if backward is not None:
                    backward.release_state()
            backwards = forwards if microbatch < num_microbatches else []

    return iterate


@contextmanager
def _iterations() -> Iterator[Callable[[str, int, int], Iteration]]:
    """Makes iterations, inside a block with the stubs in place: `make(schedule, num_layers, num_microbatches)`."""
    reason = "both schedules run the same identity callables"
    replaced = (
        (fine_grained_callables, "build_layer_callables", build_callables),
        (fine_grained_callables, "get_layer_moe_metadata", layer_metadata),
        (layer_plan, "build_layer_callables", build_callables),
    )
    applied = AppliedPatches(Patch(owner=o, name=n, value=v, reason=reason) for o, n, v in replaced)
    try:
        with stub_streams() as (compute, communication):

            def make(schedule: str, num_layers: int, num_microbatches: int) -> Iteration:
                if schedule == OURS:
                    return our_iteration(num_layers, num_microbatches)
                streams = {"compute": compute, "communication": communication}
                return built_in_iteration(num_layers, num_microbatches, reuse=schedule == BUILT_IN_REUSED, **streams)

            yield make
    finally:
        applied.restore()


def count_calls() -> dict[str, dict[str, int]]:
    """Calls per layer pair, by schedule and kind of call.

    C(layers, micro-batches) = a + b * layers + c * micro-batches + pair * layers * micro-batches, solved for `pair`.
    """
    result = {}
    with _iterations() as make:
        for schedule in SCHEDULES:
            total: Counter[str] = Counter()
            for layers, microbatches, sign in ((2, 2, 1), (2, 3, -1), (3, 2, -1), (3, 3, 1)):
                iterate = make(schedule, layers, microbatches)
                iterate()  # whatever is made once is made
                with counting() as counts:
                    iterate()
                for kind, number in counts.items():
                    total[kind] += sign * number
            result[schedule] = dict(total)
    return result


def _time(iterate: Iteration, loops: int) -> float:
    gc.collect()
    start = time.perf_counter()
    for _ in range(loops):
        iterate()
    return (time.perf_counter() - start) / loops


def take_values(samples: int, *, seconds_per_value: float = 0.05) -> dict[str, dict[str, list[float]]]:
    """Time the schedules in this process, in turn.

    Args:
        samples: values per schedule.
        seconds_per_value: loops are calibrated so that one timing takes at least this long.

    Returns:
        by schedule, the seconds of an iteration with "few" and with "many" layers, one a sample.
    """
    torch.set_num_threads(1)
    sizes = {"few": FEW_LAYERS, "many": MANY_LAYERS}
    with _iterations() as make:
        runs = {
            (schedule, size): make(schedule, layers, MICROBATCHES)
            for schedule in SCHEDULES
            for size, layers in sizes.items()
        }
        loops = {}
        for key, iterate in runs.items():
            iterate()
            start = time.perf_counter()
            iterate()
            loops[key] = max(1, round(seconds_per_value / (time.perf_counter() - start)))
        values: dict[str, dict[str, list[float]]] = {name: {size: [] for size in sizes} for name in SCHEDULES}
        gc.collect()
        gc.freeze()  # what the imports left is nobody's garbage here
        try:
            for _ in range(samples):
                for (schedule, size), iterate in runs.items():
                    values[schedule][size].append(_time(iterate, loops[schedule, size]))
        finally:
            gc.unfreeze()
    return values


def _values_of_processes(samples: int, processes: int) -> dict[str, dict[str, list[float]]]:
    if processes == 1:
        return take_values(samples)
    program = (
        "import json, sys, warnings; warnings.filterwarnings('ignore')\n"
        "from combined_1f1b.bench.host_cost import take_values\n"
        "print(json.dumps(take_values(int(sys.argv[1]))))"
    )
    merged: dict[str, dict[str, list[float]]] = {}
    for process in range(processes):
        share = samples // processes + (process < samples % processes)
        command = [sys.executable, "-c", program, str(share)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        for schedule, sizes in json.loads(output.splitlines()[-1]).items():
            for size, values in sizes.items():
                merged.setdefault(schedule, {}).setdefault(size, []).extend(values)
    return merged


def measure_host_cost(*, samples: int = 30, processes: int = 3) -> dict[str, Any]:
    """Time and count a layer pair of both schedules.

    Args:
        samples: values per schedule, over all processes.
        processes: fresh interpreters to take them in, one after the other; 1 means this one.

    Returns:
        for JSON: "seconds_per_pair" (by schedule: best, median, low, high), "ratio" to the built-in (best to best),
        "calls_per_pair", "samples" (seconds of iterations) and the sizes they were taken with.
    """
    values = _values_of_processes(samples, processes)
    pairs = (MANY_LAYERS - FEW_LAYERS) * MICROBATCHES
    per_pair = {}
    for schedule, sizes in values.items():
        each = [(many - few) / pairs for many, few in zip(sizes["many"], sizes["few"], strict=True)]
        summary = summarize(each)
        best = (min(sizes["many"]) - min(sizes["few"])) / pairs
        per_pair[schedule] = {"best": best, "median": summary.median, "low": summary.low, "high": summary.high}
    return {
        "seconds_per_pair": per_pair,
        "ratio": per_pair[OURS]["best"] / per_pair[BUILT_IN]["best"],
        "calls_per_pair": count_calls(),
        "sizes": {"few_layers": FEW_LAYERS, "many_layers": MANY_LAYERS, "num_microbatches": MICROBATCHES},
        "processes": processes,
        "samples": values,
    }
