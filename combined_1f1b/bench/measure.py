"""Measure the variants of a group in turn: A B C A B C ..., so that whatever drifts reaches all of them alike.

    prepare   each variant alone: warm-up, capture where the group's mode is a graph, memory, gradients; what does not
              run on one rank runs on none
    sample    barrier, synchronise, issue (host time ends), synchronise (step time ends); losses are copied after it
    trace     one more step of each variant with traffic, profiled

Gradients are cleared outside of the times.
"""

from __future__ import annotations

import dataclasses
import gc
import gzip
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from combined_1f1b.bench.link import Link
from combined_1f1b.bench.options import BUILT_IN, REAL_LINKS, BenchOptions, Group, Variant
from combined_1f1b.bench.trace import TrafficShares, read_shares
from combined_1f1b.bench.workload import Workload, forward_backward, run_config, selected
from combined_1f1b.errors import ConfigError
from combined_1f1b.registration import Installation
from combined_1f1b.schedule.cuda_graph import FullIterationGraph, on_capture_stream
from combined_1f1b.training.progress import say


@dataclass(kw_only=True)
class Run:
    """A variant while it is measured.

    Attributes:
        refused: why it does not run, "" when it does.
        seconds, host_seconds: of each sample.
        losses: of the micro-batches of a step, on this rank; losses_moved: whether a later sample gave other bits.
        peak_allocated, peak_reserved: bytes, the model's own included.
        gradients: how they compare on this rank, "" when not compared.
    """

    variant: Variant
    workload: Workload | None = None
    function: Any = None
    refused: str = ""
    seconds: list[float] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)
    losses: torch.Tensor | None = None
    losses_moved: bool = False
    peak_allocated: int = 0
    peak_reserved: int = 0
    gradients: str = ""
    shares: TrafficShares | None = None


class GroupMeasurement:
    """Measures one group.

    Args:
        link: already in the place of the all-to-all.
    """

    def __init__(
        self, group: Group, options: BenchOptions, *, link: Link, installation: Installation, device: torch.device
    ) -> None:
        self._group = group
        self._options = options
        self._link = link
        self._installation = installation
        self._device = device
        self._workloads: dict[tuple[str, bool], Workload] = {}
        self._references: dict[str, dict[str, torch.Tensor]] = {}

    def measure(self) -> dict[str, Any]:
        """Measure; returns the group for the report's JSON."""
        runs = [Run(variant=variant) for variant in self._options.variants(self._group)]
        for run in runs:
            self._prepare(run)
        self._references.clear()
        gc.collect()
        gc.freeze()
        try:
            running = [run for run in runs if not run.refused]
            for _ in range(self._options.samples):
                for run in running:
                    self._sample(run)
            if self._options.traces and self._device.type == "cuda":
                for run in running:
                    if run.variant.traffic:
                        run.shares = self._trace(run)
        finally:
            gc.unfreeze()
        return self._as_dict(runs)

    def _prepare(self, run: Run) -> None:
        say(f"  preparing {run.variant.name}{'' if run.variant.traffic else ', no traffic'}")
        for part in (self._build, self._warm_up, self._compare_gradients):
            self._attempt(part, run)
            if run.refused:
                run.workload = run.function = None
                say(f"    does not run: {run.refused}")
                return

    def _attempt(self, part: Callable[[Run], None], run: Run) -> None:
        """Do a part of the preparation. Where it fails on one rank, the variant is refused on all of them.

        A rank that fails in the middle of a step leaves the others in its collectives, until their group's time-out.
        """
        try:
            part(run)
        except Exception as error:
            # What Megatron's own schedule cannot do here is a finding; a failure of this package's is none.
            if not isinstance(error, ConfigError | torch.OutOfMemoryError) and run.variant.schedule != BUILT_IN:
                raise
            run.refused = f"{type(error).__name__}: {error}".splitlines()[0]
        run.refused = next(filter(None, _of_all_ranks(run.refused)), "")

    def _build(self, run: Run) -> None:
        variant = run.variant
        key = (variant.wrapper, variant.delay_wgrad)
        if key not in self._workloads:
            config = run_config(
                self._options,
                layers=self._group.layers,
                wrapper=variant.wrapper,
                delay_wgrad=variant.delay_wgrad,
                ranks=torch.distributed.get_world_size(),
            )
            self._workloads[key] = Workload(config, self._options.size, wrapper=variant.wrapper, device=self._device)
        run.workload = self._workloads[key]
        run.function = forward_backward()
        if self._group.mode == "graph":
            run.function = FullIterationGraph(run.function, warmup_iterations=self._options.warmup)

    def _warm_up(self, run: Run) -> None:
        assert run.workload is not None
        for workload in self._workloads.values():
            workload.clear_gradients()
        gc.collect()  # of a variant that failed, too
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(self._options.warmup + 1):  # in a graph, the last one captures
            run.workload.clear_gradients()
            results = self._step(run)
        torch.cuda.synchronize()
        run.peak_allocated = torch.cuda.max_memory_allocated() - allocated + run.workload.model_bytes
        run.peak_reserved = torch.cuda.memory_reserved() - reserved + run.workload.model_bytes
        run.losses = _losses(results)

    def _compare_gradients(self, run: Run) -> None:
        """With those of Megatron's default schedule with traffic under the same kind of wrapper, which comes first."""
        assert run.workload is not None
        kind = run.workload.wrapper.split("-")[0]
        if kind == "mfsdp" and torch.distributed.get_world_size() > 2:
            return  # the partitions of hooks and schedule differ, and sums of three terms depend on their order
        gradients = run.workload.gradients()
        if kind not in self._references:
            self._references[kind] = {name: gradient.clone() for name, gradient in gradients.items()}
            run.gradients = "reference"
        elif self._link_keeps_values(run.variant):
            reference = self._references[kind]
            same = gradients.keys() == reference.keys() and all(
                torch.equal(gradient, reference[name]) for name, gradient in gradients.items()
            )
            run.gradients = "equal" if same else "different"

    def _link_keeps_values(self, variant: Variant) -> bool:
        """Without traffic a real link leaves every token at home, which gives other losses."""
        return self._link.kind not in REAL_LINKS or variant.traffic or torch.distributed.get_world_size() == 1

    def _step(self, run: Run) -> list[dict[str, torch.Tensor]]:
        assert run.workload is not None
        with (
            selected(run.variant, run.workload, self._link, self._installation),
            on_capture_stream(),
        ):
            results: list[dict[str, torch.Tensor]] = run.function(**run.workload.arguments())
        return results

    def _sample(self, run: Run) -> None:
        assert run.workload is not None
        run.workload.clear_gradients()
        torch.distributed.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        results = self._step(run)
        issued = time.perf_counter()
        torch.cuda.synchronize()
        end = time.perf_counter()
        run.seconds.append(end - start)
        run.host_seconds.append(issued - start)
        assert run.losses is not None
        run.losses_moved = run.losses_moved or not torch.equal(_losses(results), run.losses)

    def _trace(self, run: Run) -> TrafficShares | None:
        from torch.profiler import ProfilerActivity, profile

        assert run.workload is not None
        run.workload.clear_gradients()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self._step(run)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            if self._options.trace_folder is not None:
                kept = Path(self._options.trace_folder) / self._trace_name(run)
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_bytes(gzip.compress(path.read_bytes()))
            return read_shares(path, link=self._link.kind)

    def _trace_name(self, run: Run) -> str:
        words = f"{self._group.name} {run.variant.name} rank {torch.distributed.get_rank()}"
        return re.sub(r"[^a-z0-9]+", "-", words.lower()) + ".json.gz"

    def _as_dict(self, runs: list[Run]) -> dict[str, Any]:
        return {
            "mode": self._group.mode,
            "layers": self._group.layers,
            "data_parallel": self._group.data_parallel,
            "variants": [self._row(run, reference=runs[0]) for run in runs],
        }

    def _row(self, run: Run, *, reference: Run) -> dict[str, Any]:
        return dataclasses.asdict(run.variant) | {
            "refused": run.refused,
            "seconds": _slowest_rank(run.seconds),
            "host_seconds": _slowest_rank(run.host_seconds),
            "losses": [] if run.losses is None else run.losses.tolist(),
            "losses_compared": self._compare_losses(run, reference),
            "gradients_compared": run.gradients if "different" not in _of_all_ranks(run.gradients) else "different",
            "peak_allocated": run.peak_allocated,
            "peak_reserved": run.peak_reserved,
            "traffic_shares": None if run.shares is None else run.shares.as_dict(),
        }

    def _compare_losses(self, run: Run, reference: Run) -> str:
        if run.losses is None or reference.losses is None:
            return ""
        if not self._link_keeps_values(run.variant):
            return ""
        same = all(_of_all_ranks(not run.losses_moved and torch.equal(run.losses, reference.losses)))
        return "different" if not same else "reference" if run is reference else "equal"


def _losses(results: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The losses of a step's micro-batches, copied to the CPU: a replay overwrites them."""
    return torch.stack([result["loss"].detach() for result in results]).cpu()


def _of_all_ranks[Value](value: Value) -> list[Value]:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, value)
    return everyone


def _slowest_rank(samples: list[float]) -> list[float]:
    """Sample by sample the slowest rank's: the step is over when every rank's is."""
    return [max(values) for values in zip(*_of_all_ranks(samples), strict=True)]
