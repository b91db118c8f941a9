"""The cut of a GPTModel into nodes: the only place that knows Megatron's model.

    embedding | L0: attention dispatch experts combine | ... | final_norm | M0: ... postprocess | output_layer

Layers are cut by Megatron's own `build_layer_callables`, so that shared experts, multi-token prediction, flex
dispatchers and recompute stay in step with Megatron. What those callables leave out against the plain forward is added
here (padding mask for the router, fp32 residual, the random-state fork of sequence parallelism) or refused in
`config.py`. No decoder layer is told that it is the last one: the final norm is a node of its own, on the compute lane,
and a dense last layer keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.fine_grained_callables import build_layer_callables
from megatron.core.transformer.module import float16_to_fp32
from megatron.core.utils import make_viewless_tensor

from combined_1f1b.schedule.chunks import layer_name, predictor_name
from combined_1f1b.schedule.module_state import LayerModuleState
from combined_1f1b.schedule.node import Node, no_record_stream
from combined_1f1b.schedule.recorder import RecordedCall
from combined_1f1b.schedule.shadowing import shadowed
from combined_1f1b.schedule.shape import DENSE_PARTS, MOE_PARTS, MTP_PARTS, WEIGHT_PARTS
from combined_1f1b.schedule.shared_weights import SharedWeights
from combined_1f1b.schedule.weight_gradients import DelayedWeights

NodeKey = tuple[str, str]
"""(stage, part) as in an op; the part is "" for a stage without parts."""


class NodeTemplate(NamedTuple):
    """What the nodes of one (stage, part) share between micro-batches."""

    function: Callable[..., Any]
    layer_state: LayerModuleState | None
    keep_graph: bool
    is_first_layer: bool
    is_last_layer: bool
    is_mtp: bool
    delayed: DelayedWeights | None = None


class MicroBatch:
    """One micro-batch on its way through the nodes of a model chunk. The chunk keeps it for a later one to use.

    Attributes:
        values: outputs of the node that ran last forward, inputs of the next.
        gradients: input gradients of the node that ran last backward, output gradients of the next.
        loss: what the loss function returned, scaled as Megatron scales it, between its forward and its backward.
        loss_node: the segment that computed it.
        chunk_state: what all its nodes share.
        shared: holds contributions to weights that several nodes use apart, or None.
    """

    def __init__(self, chunk: ModelChunk) -> None:
        self.chunk_state = SimpleNamespace()
        self.loss_func: Callable[..., Any] | None = None
        self._chunk = chunk
        self._layer_states: dict[str, SimpleNamespace] = {}
        self._nodes: dict[NodeKey, Node] = {}
        self.clear()

    def start(self, *, index: int, call: RecordedCall, apart: bool, is_interleaved: bool) -> None:
        """Become micro-batch `index`, which runs the recorded call; see `ModelChunk.start_microbatch`."""
        self.index = index
        self._is_interleaved = is_interleaved
        self.loss_func = call.loss_func
        self.shared = SharedWeights() if apart else None
        state = self.chunk_state
        vars(state).update(call.arguments)
        state.call = call
        state.shared = self.shared
        state.model = self._chunk.view(self.shared)
        state.context = state.context_mask = state.attention_bias = state.mtp_hidden_states = None

    def enter(self, hidden: torch.Tensor) -> None:
        """Begin behind the embedding, with what the previous pipeline stage computed: [sequence, batch, hidden]."""
        self._chunk.preprocess(self.chunk_state, decoder_input=hidden)
        self.chunk_state.decoder_input = None  # as in Megatron, where only the first stage has one
        self.values = (hidden,)

    def clear(self) -> None:
        """Drop every reference to a tensor."""
        self.index = -1
        self.values: tuple[torch.Tensor | None, ...] = ()
        self.gradients: tuple[torch.Tensor | None, ...] = ()
        self.loss: torch.Tensor | None = None
        self.loss_node: Node | None = None
        self.loss_func = None
        self.shared: SharedWeights | None = None
        vars(self.chunk_state).clear()
        for state in self._layer_states.values():
            vars(state).clear()

    def forward_node(self, key: NodeKey) -> Node:
        """The node of this (stage, part), about to run forward: the layer's modules hold this micro-batch's state."""
        state = self._chunk.templates[key].layer_state
        if state is not None and (self._is_interleaved or state.is_needed_in_backward):
            state.activate(self.index)
        return self._nodes.get(key) or self._make_node(key)

    def backward_node(self, key: NodeKey) -> Node:
        """The node of this (stage, part), about to run backward, where a recomputed forward needs the state too."""
        state = self._chunk.templates[key].layer_state
        if state is not None and state.is_needed_in_backward:
            state.activate(self.index)
        return self._nodes[key]

    def _make_node(self, key: NodeKey) -> Node:
        template = self._chunk.templates[key]
        node = self._nodes[key] = Node(
            template.function,
            layer_state=self._layer_states.setdefault(key[0], SimpleNamespace()),
            chunk_state=self.chunk_state,
            keep_graph=template.keep_graph,
            delayed=template.delayed,
            is_first_layer=template.is_first_layer,
            is_last_layer=template.is_last_layer,
            is_mtp=template.is_mtp,
        )
        return node


class ModelChunk:
    """A GPTModel cut into node templates. Built once per model; `is_current` says whether the model is still the same.

    Args:
        model: the innermost model, a megatron.core GPTModel.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config
        self._parts = _cut_parts(model)
        self.layers = tuple(model.decoder.layers)
        self.mtp_layers = tuple(model.mtp.layers) if getattr(model, "mtp_process", False) else ()
        self.layer_states: list[LayerModuleState] = []
        self._delayed: list[DelayedWeights] = []
        self._unused: list[MicroBatch] = []
        self.templates: dict[NodeKey, NodeTemplate] = {
            ("embedding", ""): _template(self._embedding),
            ("final_norm", ""): _template(self._final_norm),
            ("output_layer", ""): _template(self._output_layer),
        }
        for index, layer in enumerate(self.layers):
            name = stage_name(layer)
            self._add_layer(name, layer, layer, is_first_layer=index == 0, is_last_layer=False, is_mtp=False)
        for index, layer in enumerate(self.mtp_layers):
            last = index == len(self.mtp_layers) - 1
            inner = layer.mtp_model_layer
            self._add_layer(
                predictor_name(index), layer, inner, is_first_layer=index == 0, is_last_layer=last, is_mtp=True
            )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the chunk's mixture-of-experts layers, counted through the whole model."""
        return tuple(
            layer.layer_number - 1 for layer in self.layers if (stage_name(layer), "dispatch") in self.templates
        )

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output layer uses the embedding's weight."""
        return bool(self.model.share_embeddings_and_output_weights)

    @property
    def uses_of_shared_weights(self) -> int:
        """How many of the chunk's nodes use the embedding's weight, its own or its copy on another pipeline stage."""
        output = self.model.post_process and self.tied_embeddings
        return self.model.pre_process + output + bool(self.mtp_layers)

    @property
    def first_user_of_shared_weights(self) -> NodeKey:
        """The node whose backward is the last that gives that weight a gradient."""
        return ("embedding", "") if self.model.pre_process else (predictor_name(0), MTP_PARTS[0])

    @property
    def has_final_norm(self) -> bool:
        """Whether the chunk's decoder ends with a norm."""
        return self.model.decoder.final_layernorm is not None

    def is_current(self) -> bool:
        """Whether the layers and their dispatchers are still those that were cut."""
        return self._parts == _cut_parts(self.model)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """It is kept on the model, whose copies cut themselves anew."""
        return type(None), ()

    def view(self, shared: SharedWeights | None) -> Any:
        """What Megatron's callables see as the model: the multi-token prediction layers embed through it."""
        embedding = getattr(self.model, "embedding", None)
        if shared is not None and embedding is not None:
            embedding = _AliasedEmbedding(embedding, shared)
        return SimpleNamespace(decoder=self.model.decoder, embedding=embedding, vp_stage=self.model.vp_stage)

    def start_microbatch(self, *, index: int, call: RecordedCall, apart: bool, is_interleaved: bool) -> MicroBatch:
        """A micro-batch at its start, with the nodes of an earlier one where there are any.

        Args:
            apart: hold its contributions to weights that several nodes use apart.
            is_interleaved: another micro-batch's forward runs in between its own nodes.
        """
        microbatch = self._unused.pop() if self._unused else MicroBatch(self)
        microbatch.start(index=index, call=call, apart=apart, is_interleaved=is_interleaved)
        return microbatch

    def end_microbatch(self, microbatch: MicroBatch) -> None:
        """A micro-batch's backward is over."""
        for state in self.layer_states:
            state.forget(microbatch.index)
        microbatch.clear()
        self._unused.append(microbatch)

    def begin_iteration(self) -> None:
        """Prepare the layers' modules for the nodes, until `end_iteration`."""
        for delayed in self._delayed:
            delayed.begin()

    def end_iteration(self) -> None:
        """Put the layers' modules back, and forget what they keep of any micro-batch; after a failure too."""
        for state in self.layer_states:
            state.reset()
        for delayed in self._delayed:
            delayed.reset()

    def _add_layer(self, stage: str, layer: Any, inner: Any, **flags: bool) -> None:
        functions, _ = build_layer_callables(layer)
        is_moe = hasattr(inner.mlp, "token_dispatcher")
        state = LayerModuleState(inner) if is_moe else None
        if state is not None:
            self.layer_states.append(state)
        parts = MTP_PARTS if flags["is_mtp"] else MOE_PARTS
        for part, function in zip(parts, functions, strict=False):
            if not is_moe and part in ("dispatch", "combine"):
                continue
            if part == "attention" and is_moe:
                function = _with_padding_mask(function, inner.mlp)
            if part == "attention" and flags["is_mtp"] and self.config.mtp_detach_heads:
                function = _with_detached_trunk(function, layer)
            if part == "combine":
                function = _with_own_residual(function, fp32=self.config.fp32_residual_connection)
            if self.config.sequence_parallel and not flags["is_mtp"]:
                function = _with_random_fork(function)
            part = part if is_moe or part == "attention" else DENSE_PARTS[1]
            delayed = None
            if self.config.delay_wgrad_compute and part in WEIGHT_PARTS:
                delayed = DelayedWeights(_modules_with_delayed_weights(layer, inner, part))
                self._delayed.append(delayed)
            self.templates[stage, part] = NodeTemplate(
                function, state, keep_graph=part in ("dispatch", "combine"), delayed=delayed, **flags
            )

    def _embedding(self, node: Node) -> torch.Tensor:
        return self.preprocess(node.chunk_state, decoder_input=node.chunk_state.decoder_input)

    def preprocess(self, state: Any, *, decoder_input: torch.Tensor | None) -> torch.Tensor:
        """Megatron's work before the first layer: embeddings unless decoder_input is given, and rotary embeddings."""
        preprocessed = self.model._preprocess(
            input_ids=state.input_ids,
            position_ids=state.position_ids,
            decoder_input=decoder_input,
            packed_seq_params=state.packed_seq_params,
            padding_mask=state.padding_mask,
        )
        hidden, state.rotary_pos_emb, state.rotary_pos_cos, state.rotary_pos_sin = preprocessed[:4]
        state.sequence_len_offset, state.padding_mask = preprocessed[4:6]
        state.decoder_input = hidden
        return hidden

    def _final_norm(self, _node: Node, hidden: torch.Tensor) -> torch.Tensor:
        output = self.model.decoder.final_layernorm(hidden)
        return make_viewless_tensor(inp=output, requires_grad=output.requires_grad, keep_graph=True)

    def _output_layer(self, node: Node, hidden: torch.Tensor) -> torch.Tensor:
        state = node.chunk_state
        recorded = state.call.arguments  # multi-token prediction has rolled the ids and the mask in the chunk state
        with self._aliased_output_weight(state.shared):
            output = self.model._postprocess(
                hidden_states=hidden,
                input_ids=recorded["input_ids"],
                position_ids=recorded["position_ids"],
                labels=state.labels,
                rotary_pos_emb=state.rotary_pos_emb,
                rotary_pos_cos=state.rotary_pos_cos,
                rotary_pos_sin=state.rotary_pos_sin,
                mtp_in_postprocess=False,
                loss_mask=state.loss_mask,
                decoder_input=state.decoder_input,
                attention_mask=state.attention_mask,
                padding_mask=state.padding_mask,
                packed_seq_params=state.packed_seq_params,
                sequence_len_offset=state.sequence_len_offset,
                runtime_gather_output=state.runtime_gather_output,
                output_processor=state.output_processor,
                output_processor_context=state.output_processor_context,
            )
        return float16_to_fp32(output) if state.call.output_to_float32 else output

    def _aliased_output_weight(self, shared: SharedWeights | None) -> Any:
        if shared is None or not self.tied_embeddings:
            return nullcontext()
        weight = shared.alias(self.model.shared_embedding_or_output_weight())
        return shadowed(self.model, shared_embedding_or_output_weight=lambda: weight)


class _AliasedEmbedding:
    """Calls the model's embedding with aliases of its weights, so that their gradients are held apart."""

    def __init__(self, embedding: torch.nn.Module, shared: SharedWeights) -> None:
        self._embedding = embedding
        self._shared = shared

    def __call__(self, **kwargs: Any) -> Any:
        aliases = {name: self._shared.alias(weight) for name, weight in self._embedding.named_parameters()}
        return torch.func.functional_call(self._embedding, aliases, args=(), kwargs=kwargs)


def stage_name(layer: Any) -> str:
    """A decoder layer's name in a plan: Megatron numbers layers from 1, through all pipeline stages."""
    return layer_name(layer.layer_number - 1)


def _cut_parts(model: Any) -> list[Any]:
    layers = [*model.decoder.layers, *(model.mtp.layers if getattr(model, "mtp_process", False) else ())]
    inner = [getattr(layer, "mtp_model_layer", layer) for layer in layers]
    mlps = [getattr(layer, "mlp", None) for layer in inner]
    return [
        model.config.delay_wgrad_compute,
        *layers,
        *inner,
        *mlps,
        *(getattr(mlp, "token_dispatcher", None) for mlp in mlps),
    ]


def _modules_with_delayed_weights(layer: Any, inner: Any, part: str) -> list[torch.nn.Module]:
    """The modules whose weight gradients the part's W op computes.

    The latent projection behind the experts runs in the combine, whose lane has no W op: it goes with the experts.
    """
    behind = [inner.mlp] if part == "mlp" else [inner.mlp.experts] if hasattr(inner.mlp, "experts") else [inner.mlp]
    if getattr(inner.mlp, "fc2_latent_proj", None) is not None:
        behind.append(inner.mlp.fc2_latent_proj)
    there = [module for owner in behind for module in owner.modules()]
    if part != "attention":
        return there
    known = {id(module) for module in there}
    return [module for module in layer.modules() if id(module) not in known]


def _template(function: Callable[..., Any]) -> NodeTemplate:
    return NodeTemplate(function, None, keep_graph=False, is_first_layer=False, is_last_layer=False, is_mtp=False)


def _with_padding_mask(function: Callable[..., Any], moe: Any) -> Callable[..., Any]:
    """The plain forward routes with the padding mask ([batch, sequence], True where padded); the callable drops it."""

    def attention(node: Node, *tensors: torch.Tensor) -> Any:
        if node.chunk_state.padding_mask is None:
            return function(node, *tensors)
        route = moe.route

        def route_with_mask(hidden_states: torch.Tensor) -> Any:
            # Read here: a multi-token prediction layer rolls the mask before it routes.
            return route(hidden_states, node.chunk_state.padding_mask.transpose(0, 1).bool())

        with shadowed(moe, route=route_with_mask):
            return function(node, *tensors)

    return attention


def _with_detached_trunk(function: Callable[..., Any], layer: Any) -> Callable[..., Any]:
    """With `mtp_detach_heads` the prediction layer sends no gradient to the trunk; the callable forgets to detach."""

    def attention(node: Node, *tensors: torch.Tensor) -> Any:
        get_embeddings = layer._get_embeddings

        def get_embeddings_detached(*, hidden_states: torch.Tensor, **arguments: Any) -> Any:
            return get_embeddings(hidden_states=hidden_states.detach(), **arguments)

        with shadowed(layer, _get_embeddings=get_embeddings_detached):
            return function(node, *tensors)

    return attention


def _with_own_residual(function: Callable[..., Any], *, fp32: bool) -> Callable[..., Any]:
    """Megatron keeps the residual stream in fp32 on request, and the callable calls record_stream on the residual."""
    if not fp32:
        return function

    def combine(node: Node, *tensors: torch.Tensor) -> Any:
        residual = node.layer_state.residual.float()
        residual.record_stream = no_record_stream
        node.layer_state.residual = residual
        return function(node, *tensors)

    return combine


def _with_random_fork(function: Callable[..., Any]) -> Callable[..., Any]:
    """Under sequence parallelism the decoder draws from the model-parallel random state."""

    def forked(node: Node, *tensors: torch.Tensor) -> Any:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return function(node, *tensors)

    return forked
