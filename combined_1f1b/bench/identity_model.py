"""A model whose parts do nothing, for measuring what a schedule itself costs the host.

    attention  hidden -> (hidden, hidden), detaches the residual     dispatch  detaches the probabilities
    experts    tokens + probabilities                                combine   output + residual

The detaches and the two additions are what the graph of a real mixture-of-experts layer needs, so that every gradient
which a node passes on exists; tensors are empty ([0]), so the additions reach no kernel. Both schedules run these same
functions in place of what `build_layer_callables` makes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.fine_grained_callables import build_transformer_layer_callables
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

# A dropless dispatcher's attributes between dispatch and combine.
_DISPATCHER_STATE = (
    "capacity",
    "hidden_shape",
    "hidden_shape_before_permute",
    "input_splits",
    "num_global_tokens_per_local_expert",
    "num_out_tokens",
    "output_splits",
    "output_splits_tp",
    "probs",
    "reversed_local_input_permutation_mapping",
    "routing_map",
    "tokens_per_expert",
)


def identity_callables() -> list[Any]:
    """The five callables of a layer, in Megatron's order."""

    def attention(node: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        node.layer_state.residual = node.detach(hidden)
        return hidden, hidden

    def dispatch(node: Any, tokens: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        node.layer_state.dispatched_probs = node.detach(probabilities)
        return tokens

    def experts(node: Any, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + node.layer_state.dispatched_probs

    def combine(node: Any, output: torch.Tensor) -> torch.Tensor:
        residual, node.layer_state.residual = node.layer_state.residual, None
        return output + residual

    return [attention, dispatch, experts, combine, None]


def build_callables(layer: IdentityLayer) -> tuple[list[Any], dict[str, Any]]:
    """Stand in for Megatron's `build_layer_callables`: do its work, and give the identity functions instead."""
    build_transformer_layer_callables(layer)
    return identity_callables(), {}


def reuse_callables(layer: IdentityLayer) -> tuple[list[Any], dict[str, Any]]:
    """Stand in for a `build_layer_callables` that costs nothing."""
    return layer.ready_callables, {}


def layer_metadata(_layer: Any) -> tuple[bool, int]:
    """Stand in for Megatron's `get_layer_moe_metadata`: a mixture of 8 local experts."""
    return True, 8


class _IdentityExperts(MoELayer):
    """A MoELayer without its parts, which need process groups."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.use_shared_expert = False
        self.token_dispatcher = SimpleNamespace(**dict.fromkeys(_DISPATCHER_STATE))


class _IdentityAttention(torch.nn.Module):
    def backward_dw(self) -> None:
        """No weights."""


class IdentityLayer(TransformerLayer):
    """What the schedules look at in a layer; a TransformerLayer without its parts, which need process groups."""

    def __init__(self, config: TransformerConfig, number: int) -> None:
        torch.nn.Module.__init__(self)
        self.config = config
        self.layer_number = number
        self.is_moe_layer = True
        self.mlp = _IdentityExperts()
        self.self_attention = _IdentityAttention()
        self.ready_callables = identity_callables()

    def get_inner_quantization_context(self) -> AbstractContextManager[None]:
        """As in a layer without fp8."""
        return nullcontext()


class IdentityModel(torch.nn.Module):
    """What the schedules look at in a GPTModel.

    Args:
        num_layers: identical layers of the decoder.
    """

    forward = GPTModel.forward  # its signature is used, never its body: the schedules run the parts
    pre_process = True
    post_process = True
    share_embeddings_and_output_weights = False
    mtp_process = False
    vp_stage = None

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=8,
            num_attention_heads=1,
            num_moe_experts=8,
            moe_token_dispatcher_type="alltoall",
            add_bias_linear=False,
        )
        self.weight = torch.nn.Parameter(torch.zeros(0))
        self.decoder = torch.nn.Module()
        layers = (IdentityLayer(self.config, number) for number in range(1, num_layers + 1))
        self.decoder.layers = torch.nn.ModuleList(layers)
        self.decoder.final_layernorm = None
        self.decoder.input_tensor = None
        self.pg_collection = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))

    def set_input_tensor(self, _tensors: Any) -> None:
        """There is no pipeline."""

    def _preprocess(self, **_arguments: Any) -> tuple[Any, ...]:
        return self.weight + self.weight, None, None, None, None, None

    def _postprocess(self, *, hidden_states: torch.Tensor, **_arguments: Any) -> torch.Tensor:
        return hidden_states
