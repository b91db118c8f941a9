"""The training loop: Megatron's forward-backward function, an optimizer step, a report, nothing else.

The forward step below is a plain one: batch, model, loss. Which schedule runs it is Megatron's choice by the flag
`overlap_moe_expert_parallel_comm`, and nothing here knows.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from combined_1f1b.errors import OverlapError
from combined_1f1b.training.config import RunConfig
from combined_1f1b.training.data import Batch, BatchSampler, load_sequences
from combined_1f1b.training.model import build_chunks
from combined_1f1b.training.optimizer import TrainingOptimizer
from combined_1f1b.training.parallel import wrap_chunks

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReport:
    """One iteration over all ranks. loss: mean per token. tokens: of all ranks. grad_norm: None without clipping."""

    iteration: int
    loss: float
    tokens: int
    seconds: float
    learning_rate: float
    grad_norm: float | None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def masked_loss(
    config: Any, loss_mask: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Megatron's loss function: mean over tokens, or sum and count with calculate_per_token_loss.

    Args:
        config: TransformerConfig.
        loss_mask: [micro-batch, sequence], 1.0 where a token counts.
        token_losses: [micro-batch, sequence].
    """
    import torch

    mask = loss_mask.float()
    total, count = (token_losses.float() * mask).sum(), mask.sum()
    report = {"sums": torch.stack([total.detach(), count])}
    if config.calculate_per_token_loss:
        return total, count.to(torch.int), report
    return total / count, report


def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Any]]:
    """A forward step as any Megatron script has it."""
    from megatron.core.utils import get_model_config

    batch = next(data_iterator)
    output = model(batch.tokens, batch.position_ids, None, labels=batch.labels)
    return output, functools.partial(masked_loss, get_model_config(model), batch.loss_mask)


class Trainer:
    """A model, its data and its optimizer, stepped one iteration at a time.

    Args:
        config: the whole run.
        transformer_config: Megatron's config built from it.
        device: for parameters and batches.
        step_function: the forward step; a schedule that needs another form of it gets one here.
    Raises:
        ConfigError: data that cannot be read, before the model is built.
    """

    def __init__(
        self,
        config: RunConfig,
        transformer_config: Any,
        device: torch.device,
        *,
        step_function: Callable[..., Any] = forward_step,
    ):
        from megatron.core import parallel_state

        self.config = config
        self.device = device
        self.step_function = step_function
        self.transformer_config = transformer_config
        self.sampler = BatchSampler(
            load_sequences(config.data, vocab_size=config.gpt.vocab_size),
            config.data,
            rank=parallel_state.get_data_parallel_rank(),
            ranks=parallel_state.get_data_parallel_world_size(),
            vocab_size=config.gpt.vocab_size,
        )
        self.chunks = wrap_chunks(
            build_chunks(config, transformer_config, device), transformer_config, config.distributed
        )
        for chunk in self.chunks:
            chunk.train()
        self.optimizer = TrainingOptimizer(self.chunks, transformer_config, config)

    def forward_backward(self, iteration: int) -> list[dict[str, torch.Tensor]]:
        """Gradients of one iteration; returns what the loss function reported per micro-batch (last stage only)."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        data = self.config.data
        return get_forward_backward_func()(
            forward_step_func=self.step_function,
            data_iterator=[self.sampler.iterator(iteration, self.device) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=data.num_microbatches,
            seq_length=data.sequence_length,
            micro_batch_size=data.micro_batch_size,
            forward_only=False,
        )

    def step(self, iteration: int) -> IterationReport:
        """One iteration: gradients, optimizer step.

        Raises:
            OverlapError: the loss is no longer a number.
        """
        import torch

        start = time.perf_counter()
        self.optimizer.zero_grad()
        reports = self.forward_backward(iteration)
        rate, norm = self.optimizer.step(iteration)
        loss = mean_loss(reports, self.device)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if not loss == loss or loss in (float("inf"), float("-inf")):
            raise OverlapError(f"iteration {iteration}: the loss is {loss}; lower optimizer.lr or check the data")
        data = self.config.data
        tokens = data.micro_batch_size * data.sequence_length * data.num_microbatches * self.sampler.ranks
        return IterationReport(
            iteration=iteration, loss=loss, tokens=tokens, seconds=seconds, learning_rate=rate, grad_norm=norm
        )


def mean_loss(reports: list[dict[str, torch.Tensor]], device: torch.device) -> float:
    """Mean loss per token over all micro-batches and ranks.

    Stages that compute no loss add nothing; tensor-parallel ranks report the same sums, which cancels in the ratio.
    """
    import torch

    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for report in reports:
        sums += report["sums"].double()
    torch.distributed.all_reduce(sums)
    total, count = sums.tolist()
    return total / count
