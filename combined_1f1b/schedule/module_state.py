"""What Megatron's modules remember from one node of a layer to the next, swapped in and out per micro-batch.

A layer's token dispatcher keeps splits and permutation maps between dispatch preprocess, dispatch, combine and
unpermute. With the nodes of two micro-batches interleaved, a second forward of the layer would overwrite them. Each
micro-batch whose nodes interleave with another's so has its own values of the names below, and a layer's modules hold
those of the micro-batch that ran last.
"""

from __future__ import annotations

from typing import Any

_LAYER = ("pre_mlp_norm_checkpoint", "mlp_norm_manager")

_ALLTOALL_DISPATCHER = (
    "capacity",
    "cuda_sync_point",
    "d2h_event",
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

_FLEX_DISPATCHER = ("hidden_shape",)

_FLEX_MANAGER = (
    "_original_num_tokens",
    "_padded_num_tokens",
    "capacity",
    "dispatched_indices",
    "dispatched_probs",
    "dispatched_routing_map",
    "handle",
    "hidden_shape_before_permute",
    "num_local_tokens",
    "num_permuted_tokens",
    "pad_multiple",
    "reversed_mapping_for_combine",
    "routing_map",
    "token_indices",
    "token_probs",
    "tokens_per_expert",
)

_ABSENT = object()


class LayerModuleState:
    """The swapped attributes of one mixture-of-experts layer.

    Args:
        layer: a Megatron TransformerLayer whose `mlp` is a MoELayer.

    Attributes:
        is_needed_in_backward: a backward runs forwards again, or the dispatcher's own functions may read it.
    """

    def __init__(self, layer: Any) -> None:
        dispatcher = layer.mlp.token_dispatcher
        manager = getattr(dispatcher, "_comm_manager", None)
        names = _ALLTOALL_DISPATCHER if manager is None else _FLEX_DISPATCHER
        self._places = [(layer, name) for name in _LAYER] + [(dispatcher, name) for name in names]
        if manager is not None:
            self._places += [(manager, name) for name in _FLEX_MANAGER]
        self.is_needed_in_backward = layer.config.recompute_granularity is not None or manager is not None
        self._resting = self._read()
        self._saved: dict[int, list[Any]] = {}
        self._resident: int | None = None

    def activate(self, microbatch: int) -> None:
        """Make the modules hold the values of this micro-batch; a new micro-batch starts from the resting ones."""
        if self._resident == microbatch:
            return
        if self._resident is not None:
            self._saved[self._resident] = self._read()
        self._write(self._saved.pop(microbatch, self._resting))
        self._resident = microbatch

    def forget(self, microbatch: int) -> None:
        """Drop the values of a micro-batch whose backward is over."""
        self._saved.pop(microbatch, None)
        if self._resident == microbatch:
            self._write(self._resting)
            self._resident = None

    def reset(self) -> None:
        """Put the resting values back and forget every micro-batch, at the end of a step and after a failure."""
        self._write(self._resting)
        self._saved.clear()
        self._resident = None

    def _read(self) -> list[Any]:
        return [vars(owner).get(name, _ABSENT) for owner, name in self._places]

    def _write(self, values: list[Any]) -> None:
        for (owner, name), value in zip(self._places, values, strict=True):
            if value is _ABSENT:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = value
