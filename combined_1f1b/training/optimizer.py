"""The optimizer of a run: torch's AdamW or SGD over fp32 main weights, gradient clipping, a learning-rate schedule.

Under Megatron's DistributedDataParallel the main weights of a 16-bit model are kept here; Megatron-FSDP v2 keeps its
own, as sharded parameters. Megatron's own optimizer was considered: it cannot drive Megatron-FSDP v2, and one optimizer
for both is what makes their results comparable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from combined_1f1b.training.config import OptimizerConfig, RunConfig

if TYPE_CHECKING:
    import torch

# What gradient norms need to know of a parameter.
_ATTRIBUTES = (
    "allreduce",
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "sequence_parallel",
    "shared",
    "is_embedding_or_output_parameter",
)


def learning_rate(config: OptimizerConfig, iteration: int, iterations: int) -> float:
    """The rate of one iteration: linear warm-up to `lr`, then constant, or a half cosine down to `min_lr`.

    Args:
        config: the section `optimizer`.
        iteration: counted from 0.
        iterations: of the whole run.
    """
    if iteration < config.lr_warmup_iters:
        return config.lr * (iteration + 1) / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return config.lr
    span = max(1, iterations - config.lr_warmup_iters)
    progress = min(1.0, (iteration - config.lr_warmup_iters) / span)
    return config.min_lr + 0.5 * (config.lr - config.min_lr) * (1.0 + math.cos(math.pi * progress))


class MainWeights:
    """fp32 copies of 16-bit parameters under DistributedDataParallel; fp32 parameters stand for themselves."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        import torch

        self.pairs: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
        for parameter in parameters:
            main = parameter
            if parameter.dtype != torch.float32:
                main = torch.nn.Parameter(parameter.detach().float().clone())
                for name in _ATTRIBUTES:
                    if hasattr(parameter, name):
                        setattr(main, name, getattr(parameter, name))
            self.pairs.append((parameter, main))

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [main for _, main in self.pairs]

    def take_gradients(self) -> None:
        """Point each main weight's gradient at the reduced buffer of DistributedDataParallel."""
        for parameter, main in self.pairs:
            main.grad = parameter.main_grad.to(main.dtype)  # no copy where the buffer is fp32 already

    def publish(self) -> None:
        """Round the main weights into the model."""
        import torch

        with torch.no_grad():
            for parameter, main in self.pairs:
                if main is not parameter:
                    parameter.copy_(main)


class TrainingOptimizer:
    """Steps the parameters of wrapped chunks.

    Args:
        chunks: wrapped model chunks.
        transformer_config: their config.
        config: the whole run.
    """

    def __init__(self, chunks: list[Any], transformer_config: Any, config: RunConfig):
        self.chunks = chunks
        self.transformer_config = transformer_config
        self.config = config.optimizer
        self.iterations = config.training.train_iters
        trainable = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
        sharded = config.distributed.data_parallel == "mfsdp_v2"
        self.main_weights = None if sharded else MainWeights(trainable)
        self.parameters = trainable if self.main_weights is None else self.main_weights.parameters
        self.optimizer = self._build()
        if sharded:
            import combined_1f1b

            combined_1f1b.prepare_optimizer(self.optimizer, chunks)

    def _build(self) -> torch.optim.Optimizer:
        import torch

        # Norm weights and biases are not decayed.
        groups = [
            {"params": [item for item in self.parameters if item.dim() > 1], "weight_decay": self.config.weight_decay},
            {"params": [item for item in self.parameters if item.dim() <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if self.config.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=self.config.lr, momentum=self.config.sgd_momentum)
        betas = (self.config.adam_beta1, self.config.adam_beta2)
        return torch.optim.AdamW(groups, lr=self.config.lr, betas=betas, eps=self.config.adam_eps)

    def zero_grad(self) -> None:
        """Clear the gradients before an iteration, buffers of the wrapper included."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, iteration: int) -> tuple[float, float | None]:
        """Clip and step.

        Returns:
            the learning rate, and the gradient norm before clipping (None when clipping is off).
        """
        rate = learning_rate(self.config, iteration, self.iterations)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.main_weights is not None:
            self.main_weights.take_gradients()
        norm = None
        if self.config.clip_grad > 0.0:
            from combined_1f1b.fsdp_adapter.grad_norm import clip_grad_norm_

            norm = float(clip_grad_norm_(self.parameters, self.config.clip_grad, self.transformer_config))
        self.optimizer.step()
        if self.main_weights is not None:
            self.main_weights.publish()
        return rate, norm

    def idle_step(self) -> None:
        """A step with zero gradients and rate: makes the optimizer's state, publishes the main weights as they are."""
        import torch

        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.main_weights is not None:
            self.main_weights.publish()
