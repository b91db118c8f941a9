"""The combined schedule in a training script of your own: the lines marked <- are all that is added.

    torchrun --nproc-per-node 2 examples/megatron_script.py
"""

from __future__ import annotations

import os

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

import combined_1f1b
import combined_1f1b.host as host


def forward_step(data_iterator, model):
    tokens = next(data_iterator)
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(tokens.shape[0], -1)
    losses = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())
    return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})


def main():
    with host.activate() as device:  # a no-op where CUDA is available
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        combined_1f1b.install()  # <- the flag now selects this package's schedule
        config = TransformerConfig(
            num_layers=2, hidden_size=64, num_attention_heads=4, num_moe_experts=4, moe_ffn_hidden_size=64,
            expert_model_parallel_size=2, moe_token_dispatcher_type="alltoall", add_bias_linear=False,
            bf16=True, params_dtype=torch.bfloat16, overlap_moe_expert_parallel_comm=True,
        )  # fmt: skip
        spec = get_gpt_layer_local_spec(num_experts=4)
        model = GPTModel(config, spec, vocab_size=256, max_sequence_length=64, position_embedding_type="rope")
        model = combined_1f1b.shard_model(model.to(device), config)  # <- Megatron-FSDP v2, driven by the schedule
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        combined_1f1b.prepare_optimizer(optimizer, model)  # <-

        batches = [torch.randint(256, (2, 65), device=device) for _ in range(4)]
        for iteration in range(5):
            optimizer.zero_grad()
            reports = get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iter(batches), model=model, num_microbatches=4,
                seq_length=64, micro_batch_size=2,
            )  # fmt: skip
            optimizer.step()
            if torch.distributed.get_rank() == 0:
                loss = torch.stack([report["loss"] for report in reports]).mean()
                pairs = combined_1f1b.last_step().forward_backward_pairs
                print(f"iteration {iteration}: loss {loss:.4f}, {pairs} forward-backward pairs")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
