"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere, TensorBoard scalars (rank 0)."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from combined_1f1b.training.config import RunConfig
from combined_1f1b.training.distributed import is_first_rank
from combined_1f1b.training.loop import IterationReport


def say(text: str) -> None:
    """Print one line, on rank 0."""
    if is_first_rank():
        print(text, flush=True)


def describe_iteration(report: IterationReport, iterations: int) -> str:
    """One iteration as a plain line."""
    norm = "" if report.grad_norm is None else f"  grad norm {report.grad_norm:.3f}"
    return (
        f"iteration {report.iteration + 1:>{len(str(iterations))}}/{iterations}  loss {report.loss:.4f}{norm}"
        f"  lr {report.learning_rate:.2e}  {report.seconds * 1e3:.0f} ms/step  {report.tokens_per_second:,.0f} tokens/s"
    )


class Progress:
    """Shows iterations as they end; a context manager.

    Args:
        config: the whole run.
        first_iteration: where the run starts, not 0 after a resume.
    """

    def __init__(self, config: RunConfig, first_iteration: int):
        self.config = config
        self.iterations = config.training.train_iters
        self.first_iteration = first_iteration
        self.resources = contextlib.ExitStack()
        self.bar: Any = None
        self.task: Any = None
        self.writer: Any = None

    def __enter__(self) -> Self:
        if not is_first_rank():
            return self
        if sys.stdout.isatty():
            self._open_bar()
        if self.config.training.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(Path(self.config.output) / "tensorboard"), purge_step=self.first_iteration)
            self.resources.callback(self.writer.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resources.close()

    def _open_bar(self) -> None:
        from rich import progress

        self.bar = self.resources.enter_context(
            progress.Progress(
                progress.TextColumn("{task.completed}/{task.total}"),
                progress.BarColumn(),
                progress.TextColumn("{task.description}"),
                progress.TimeRemainingColumn(),
            )
        )
        self.task = self.bar.add_task("first iteration", total=self.iterations, completed=self.first_iteration)

    def show(self, report: IterationReport) -> None:
        """Show one finished iteration."""
        if not is_first_rank():
            return
        if self.writer is not None:
            self._write_scalars(report)
        if self.bar is not None:
            speed = f"{report.tokens_per_second:,.0f} tokens/s  {report.seconds * 1e3:.0f} ms/step"
            self.bar.update(self.task, completed=report.iteration + 1, description=f"loss {report.loss:.4f}  {speed}")
        elif self._is_due(report.iteration):
            print(describe_iteration(report, self.iterations), flush=True)

    def say(self, text: str) -> None:
        """Print one line without breaking the bar."""
        if self.bar is not None:
            self.bar.console.print(text, highlight=False)
        else:
            say(text)

    def _is_due(self, iteration: int) -> bool:
        last = iteration + 1 == self.iterations
        return last or iteration == self.first_iteration or (iteration + 1) % self.config.training.log_interval == 0

    def _write_scalars(self, report: IterationReport) -> None:
        scalars = {
            "loss": report.loss,
            "learning rate": report.learning_rate,
            "step seconds": report.seconds,
            "tokens per second": report.tokens_per_second,
        }
        if report.grad_norm is not None:
            scalars["grad norm"] = report.grad_norm
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, report.iteration)
