"""Wraps model chunks for data parallelism: Megatron's DistributedDataParallel, or Megatron-FSDP v2 by this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from combined_1f1b.training.config import DistributedConfig

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig


def wrap_chunks(
    chunks: list[Any], transformer_config: TransformerConfig, config: DistributedConfig
) -> list[torch.nn.Module]:
    """Wrap every chunk and tell Megatron's schedules how gradients are synchronised.

    Args:
        chunks: GPTModel chunks of this rank.
        transformer_config: their config; its no_sync_func, grad_sync_func and finalize_model_grads_func are set here.
        config: which wrapper, and its options.
    """
    from megatron.core.distributed import finalize_model_grads

    if config.data_parallel == "mfsdp_v2":
        import combined_1f1b

        wrapped = combined_1f1b.shard_model(chunks, transformer_config)
    else:
        wrapped = [_wrap_ddp(chunk, number, transformer_config, config) for number, chunk in enumerate(chunks)]
    no_sync = [chunk.no_sync for chunk in wrapped]
    transformer_config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    if config.data_parallel == "ddp" and config.overlap_grad_reduce:
        grad_sync = [chunk.start_grad_sync for chunk in wrapped]
        transformer_config.grad_sync_func = grad_sync if len(wrapped) > 1 else grad_sync[0]
    transformer_config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def _wrap_ddp(chunk: Any, number: int, transformer_config: TransformerConfig, config: DistributedConfig) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.grad_reduce_in_fp32, overlap_grad_reduce=config.overlap_grad_reduce
    )
    # Buckets of later chunks would be reduced while the first is still in backward; Megatron turns them off there too.
    wrapped = DistributedDataParallel(
        config=transformer_config, ddp_config=ddp_config, module=chunk, disable_bucketing=number > 0
    )
    wrapped.broadcast_params()
    return wrapped
