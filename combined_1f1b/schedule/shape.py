"""What a plan is built for: the model's stages and parts, the FSDP units they use, and the choices about the order.

A micro-batch's forward visits the stages in this order, its backward in reverse:

    embedding   L0 .. L{n-1}   final_norm   M0 .. M{k-1}   output_layer   loss

A mixture-of-experts layer has the parts attention, dispatch, experts, combine; a dense one attention, mlp; a
multi-token-prediction layer M{i} ends with a part postprocess. The other stages have no parts. With pp > 1 a shape is
that of one pipeline rank, which holds the stages of its chunks (`chunks.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property

from combined_1f1b.errors import ConfigError, PlanError
from combined_1f1b.schedule.chunks import DENSE_PARTS, MOE_PARTS, MTP_PARTS, Chunk, Stage, chunks_of
from combined_1f1b.schedule.pipeline_order import check_pipeline

__all__ = ["DENSE_PARTS", "MOE_PARTS", "MTP_PARTS", "WEIGHT_PARTS", "PlanShape", "Stage"]

WEIGHT_PARTS = ("attention", "experts", "mlp")
"""Parts whose weight gradients are an op of their own when they are delayed."""


LOOKED_UP = "embedding"
"""The unit whose weights a lookup reads. The gradient of a lookup needs its indices alone: it is gathered for no
backward but that of an output layer tied to it, and its gradients are reduced whether it is gathered or not."""


@dataclass(frozen=True, kw_only=True)
class PlanShape:
    """Everything that determines a plan.

    Attributes:
        num_layers: decoder layers, numbered globally.
        num_microbatches: micro-batches of one iteration.
        moe_layers: indices of the mixture-of-experts layers, ascending.
        num_mtp_layers: multi-token-prediction layers (always mixture-of-experts).
        tied_embeddings: the output layer uses the embedding's weight.
        sharded: the model is sharded by FSDP and the plan drives it.
        units: FSDP units that exist; None means all that the shape implies.
        trainable_units: units that get gradients; None means all units.
        pair_head_and_tail: interleave the first two forwards and the last two backwards.
        interleave_head: with pair_head_and_tail, False runs the first two forwards one after the other (needed when
            they draw random numbers); the tail is interleaved all the same.
        delay_wgrad: weight gradients are ops of their own.
        early_attention_release: issue the attention's backward before the other micro-batch's experts.
        combine_parameters: a layer's combine uses parameters of the layer (latent projections).
        has_final_norm: the decoder ends with a norm.
        pp, vpp, rank: pipeline-parallel size, model chunks per rank, pipeline rank.
        microbatch_group_size_per_vp_stage: with vpp > 1, how many micro-batches a chunk runs in a row; else 0.
        layer_counts: decoder layers of each of the pp * vpp pipeline stages, in the order in which a micro-batch passes
            them; 0 is allowed. None splits them evenly.

    Raises:
        ConfigError: a value cannot work.
    """

    num_layers: int
    num_microbatches: int
    moe_layers: tuple[int, ...] = ()
    num_mtp_layers: int = 0
    tied_embeddings: bool = False
    sharded: bool = False
    units: tuple[str, ...] | None = None
    trainable_units: tuple[str, ...] | None = None
    pair_head_and_tail: bool = False
    interleave_head: bool = True
    delay_wgrad: bool = False
    early_attention_release: bool = False
    combine_parameters: bool = False
    has_final_norm: bool = True
    pp: int = 1
    vpp: int = 1
    rank: int = 0
    microbatch_group_size_per_vp_stage: int = 0
    layer_counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for flag, least in (("num_layers", 1), ("num_microbatches", 1), ("num_mtp_layers", 0)):
            if getattr(self, flag) < least:
                raise ConfigError.of(flag, getattr(self, flag), "too small", f"use at least {least}")
        check_pipeline(self)
        bad = [layer for layer in self.moe_layers if not 0 <= layer < self.num_layers]
        if bad or list(self.moe_layers) != sorted(set(self.moe_layers)):
            raise ConfigError.of(
                "moe_layers",
                self.moe_layers,
                "not ascending indices of layers",
                f"use indices from 0 to {self.num_layers - 1}",
            )
        for flag in ("units", "trainable_units"):
            unknown = sorted(set(getattr(self, flag) or ()) - set(self._implied_units))
            if unknown:
                known = ", ".join(self._implied_units)
                raise ConfigError.of(flag, unknown, "the shape has no such unit", f"use some of {known}")

    @cached_property
    def stage_layers(self) -> tuple[int, ...]:
        """Decoder layers of each pipeline stage."""
        count = self.pp * self.vpp
        return self.layer_counts or (self.num_layers // count,) * count

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The rank's model chunks."""
        return chunks_of(self)

    @cached_property
    def chunk_of(self) -> dict[str, int]:
        """Number of the chunk that a stage belongs to, by the stage's name and by the chunk's own."""
        names = {chunk.name: chunk.number for chunk in self.chunks}
        return names | {stage.name: chunk.number for chunk in self.chunks for stage in chunk.stages}

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The rank's stages in forward order."""
        return tuple(stage for chunk in self.chunks for stage in chunk.stages)

    @cached_property
    def layer_stages(self) -> tuple[Stage, ...]:
        """The rank's decoder layers and multi-token-prediction layers, in forward order."""
        return tuple(stage for stage in self.stages if stage.is_layer)

    @cached_property
    def _implied_units(self) -> tuple[str, ...]:
        used: dict[str, None] = {}
        for stage in self.stages:
            for part in stage.parts:
                used.update(dict.fromkeys(self._implied_uses(stage.name, part)))
        return tuple(used)

    def _implied_uses(self, stage: str, part: str) -> tuple[str, ...]:
        """Units whose parameters a node uses, in the order in which they are gathered."""
        if part == "experts":
            return (f"{stage}.experts",)
        if part == "dispatch" or stage == "loss":
            return ()
        if part == "combine":
            return (stage,) if self.combine_parameters else ()
        if part == "postprocess":
            return ("root",)
        if part == "attention" and stage.startswith("M"):
            return (stage, "root", "embedding")
        if stage == "output_layer" and self.tied_embeddings and (self.pp == 1 or self.num_mtp_layers):
            return ("embedding",)  # else the last pipeline stage has a copy of the weight, a unit of its own
        return (stage,)

    @cached_property
    def gathered_units(self) -> tuple[str, ...]:
        """Units that the plan gathers and frees, in the order of their first use; empty when nothing is sharded."""
        if not self.sharded:
            return ()
        return tuple(unit for unit in self._implied_units if self.units is None or unit in self.units)

    @cached_property
    def reduced_units(self) -> tuple[str, ...]:
        """Units whose gradients the plan reduces."""
        trainable = self.trainable_units
        return tuple(unit for unit in self.gathered_units if trainable is None or unit in trainable)

    @cached_property
    def node_units(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """(stage, part) -> gathered units whose parameters the node uses: its forward reads all of them."""
        known = set(self.gathered_units)
        return {
            (stage.name, part): tuple(unit for unit in self._implied_uses(stage.name, part) if unit in known)
            for stage in self.stages
            for part in stage.parts
        }

    @cached_property
    def backward_units(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """(stage, part) -> those of its units that the node's backward reads: not what its forward only looks up."""
        return {
            node: tuple(unit for unit in units if unit != LOOKED_UP or node[0] == "output_layer")
            for node, units in self.node_units.items()
        }

    @cached_property
    def held_units(self) -> tuple[str, ...]:
        """Units whose gradients of one micro-batch come from both ends of the model.

        That is the embedding, when it is tied or multi-token prediction reads it. When two backwards are interleaved,
        the second one's early gradients arrive before the first one's reduction, and the executor keeps them apart.
        In a pipeline no stage has both ends: multi-token prediction reads a copy of the embedding.
        """
        both_ends = self.pp == 1 and (self.tied_embeddings or self.num_mtp_layers > 0)
        return ("embedding",) if both_ends and "embedding" in self.reduced_units else ()

    def __str__(self) -> str:
        """One line of `field=value` for every field that differs from its default."""
        words = [
            f"{f.name}={_value_text(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) != f.default
        ]
        return " ".join(["plan", *words])

    @classmethod
    def parse(cls, text: str) -> PlanShape:
        """Read what `str` prints.

        Raises:
            PlanError: the text is not such a line.
            ConfigError: a value cannot work.
        """
        first, *words = text.split() or [""]
        if first != "plan":
            raise PlanError(f"a plan starts with a line 'plan num_layers=... num_microbatches=...', not with {text!r}")
        known = {f.name: str(f.type) for f in fields(cls)}
        values: dict[str, object] = {}
        for word in words:
            name, _, value = word.partition("=")
            if name not in known:
                raise PlanError(f"unknown field {name!r} in {text!r}")
            try:
                values[name] = _parse_value(known[name], value)
            except (KeyError, ValueError):
                raise PlanError(f"cannot read {name} from {value!r}: expected {known[name]}") from None
        for name in ("num_layers", "num_microbatches"):
            if name not in values:
                raise PlanError(f"{name} is missing in {text!r}")
        return cls(**values)  # type: ignore[arg-type]  # the values were read by the fields' own types


def _value_text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value) or "-"
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _parse_value(type_name: str, text: str) -> object:
    if type_name == "int":
        return int(text)
    if type_name == "bool":
        return {"no": False, "yes": True}[text]
    items: Iterable[str] = () if text == "-" else text.split(",")
    return tuple(int(item) for item in items) if type_name.startswith("tuple[int") else tuple(items)
