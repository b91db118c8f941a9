"""The `train` command: build, resume, step, report, save."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from combined_1f1b.training.config import RunConfig
from combined_1f1b.training.distributed import distributed, parallel_sizes, world_size
from combined_1f1b.training.megatron_config import build_transformer_config
from combined_1f1b.training.model import check_implementation
from combined_1f1b.training.progress import Progress, say


@contextlib.contextmanager
def selected_schedule(config: RunConfig) -> Iterator[None]:
    """Install this package's schedule for the length of a block when the configuration asks for it."""
    if not config.model.get("overlap_moe_expert_parallel_comm"):
        yield
        return
    import combined_1f1b

    with combined_1f1b.install(combined_1f1b.OverlapOptions(**config.overlap)):
        yield


def check_before_start(config: RunConfig) -> None:
    """Everything that can be refused without a process group.

    Raises:
        ConfigError: sizes, layers or data that cannot work.
    """
    from combined_1f1b.errors import ConfigError
    from combined_1f1b.training.data import load_sequences

    parallel_sizes(config, world_size())
    check_implementation(config)
    if config.model.get("fp16"):
        raise ConfigError.of("model.fp16", True, "this command has no loss scaler", "set model.bf16=true instead")
    load_sequences(config.data, vocab_size=config.gpt.vocab_size)


def describe_run(trainer: Any) -> Iterator[str]:
    """The start-up report, line by line."""
    config: RunConfig = trainer.config
    sizes = parallel_sizes(config, world_size())
    parameters = sum(parameter.numel() for chunk in trainer.chunks for parameter in chunk.parameters())
    overlap = config.model.get("overlap_moe_expert_parallel_comm", False)
    yield f"data: {trainer.sampler.sequences.description}"
    yield (
        f"model: {config.model['num_layers']} layers, {parameters:,} parameters on this rank, "
        f"{config.distributed.data_parallel}; ranks: {sizes.world} (tensor {sizes.tensor}, pipeline {sizes.pipeline}, "
        f"expert {sizes.expert}, data {sizes.data})"
    )
    yield f"schedule: {'combined 1F1B' if overlap else 'Megatron default'} (overlap_moe_expert_parallel_comm={overlap})"


def _describe_schedule() -> Iterator[str]:
    """What the last iteration ran, when this package's schedule ran it."""
    import combined_1f1b

    report = combined_1f1b.last_step()
    if report is not None:
        yield (
            f"last iteration: {report.schedule}, {report.num_microbatches} micro-batches, "
            f"{report.forward_backward_pairs} forward-backward pairs, {report.head_pairs} head pairs, "
            f"{report.tail_pairs} tail pairs"
        )


def train(config: RunConfig) -> None:
    """Run the training that a configuration describes.

    Raises:
        ConfigError: a setting that cannot work, before any work.
        OverlapError: a loss that is no longer a number.
    """
    from combined_1f1b.training.checkpoint import newest_checkpoint, restore, save
    from combined_1f1b.training.loop import Trainer

    check_before_start(config)
    with distributed(config) as device, selected_schedule(config):
        trainer = Trainer(config, build_transformer_config(config.model), device)
        for line in describe_run(trainer):
            say(line)
        first = 0
        if config.training.resume:
            path = newest_checkpoint(config)
            first = restore(path, trainer)
            say(f"resumed from {path} at iteration {first}")
        losses: list[float] = []
        with Progress(config, first) as progress:
            for iteration in range(first, config.training.train_iters):
                report = trainer.step(iteration)
                losses.append(report.loss)
                progress.show(report)
                done = iteration + 1
                interval = config.training.save_interval
                if interval and (done % interval == 0 or done == config.training.train_iters):
                    progress.say(f"saved {save(trainer, done)}")
        if losses:
            say(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} over {len(losses)} iterations")
        else:
            say(f"nothing to do: training.train_iters={config.training.train_iters} is reached already")
        for line in _describe_schedule():
            say(line)
