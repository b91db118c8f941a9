"""Model chunks: which stages of the model one pipeline rank holds, and what enters and leaves them.

With pp ranks and vpp chunks on each, chunk c of rank r is pipeline stage c * pp + r. A micro-batch passes the pipeline
stages in order:

    stage 0      embedding, its layers
    ...          its layers, maybe none
    last stage   its layers, multi-token prediction, output layer, loss

The final norm is on the last stage; with multi-token prediction it is where the last decoder layer is, as in Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from combined_1f1b.schedule.shape import PlanShape

MOE_PARTS = ("attention", "dispatch", "experts", "combine")
DENSE_PARTS = ("attention", "mlp")
MTP_PARTS = (*MOE_PARTS, "postprocess")


def layer_name(number: int) -> str:
    """The stage of a decoder layer, counted from 0 through all pipeline stages."""
    return f"L{number}"


def predictor_name(number: int) -> str:
    """The stage of a multi-token prediction layer, counted from 0."""
    return f"M{number}"


class Stage(NamedTuple):
    """A stage of the forward: its name, its parts ("" for a stage without parts) and whether it is a layer."""

    name: str
    parts: tuple[str, ...]
    is_layer: bool


@dataclass(frozen=True)
class Chunk:
    """One model chunk of a rank.

    Attributes:
        name: "c0", "c1", ...; "" where a rank has only one.
        number: index among the rank's chunks.
        pipeline_stage: number * pp + rank.
        stages: its stages in forward order; a chunk between others may have none.
        receives: an activation enters it from the previous pipeline stage, and its gradient leaves to there.
        sends: an activation leaves it to the next pipeline stage, and its gradient enters from there.
    """

    name: str
    number: int
    pipeline_stage: int
    stages: tuple[Stage, ...]
    receives: bool
    sends: bool

    @cached_property
    def layers(self) -> tuple[Stage, ...]:
        """The layers, in forward order."""
        return tuple(stage for stage in self.stages if stage.is_layer)

    @cached_property
    def lead(self) -> tuple[str, ...]:
        """Names of the stages before the first layer."""
        return self._between[0]

    @cached_property
    def after(self) -> tuple[tuple[str, ...], ...]:
        """For every layer, the names of the stages between it and the next layer."""
        return self._between[1:]

    @cached_property
    def _between(self) -> tuple[tuple[str, ...], ...]:
        runs: list[list[str]] = [[]]
        for stage in self.stages:
            if stage.is_layer:
                runs.append([])
            else:
                runs[-1].append(stage.name)
        return tuple(map(tuple, runs))

    @cached_property
    def nodes(self) -> tuple[tuple[str, str], ...]:
        """(stage, part) of every node, in forward order."""
        return tuple((stage.name, part) for stage in self.stages for part in stage.parts)


def chunks_of(shape: PlanShape) -> tuple[Chunk, ...]:
    """The model chunks of the shape's rank."""
    counts = shape.stage_layers
    last = len(counts) - 1
    holders = [stage for stage, count in enumerate(counts) if count]
    norm_stage = holders[-1] if shape.num_mtp_layers else last
    moe = set(shape.moe_layers)
    chunks = []
    for number in range(shape.vpp):
        here = number * shape.pp + shape.rank
        first = sum(counts[:here])
        stages = [_plain("embedding")] if here == 0 else []
        layers = range(first, first + counts[here])
        stages += [Stage(layer_name(layer), MOE_PARTS if layer in moe else DENSE_PARTS, True) for layer in layers]
        if shape.has_final_norm and here == norm_stage:
            stages.append(_plain("final_norm"))
        if here == last:
            stages += [Stage(predictor_name(layer), MTP_PARTS, True) for layer in range(shape.num_mtp_layers)]
            stages += [_plain("output_layer"), _plain("loss")]
        name = f"c{number}" if shape.vpp > 1 else ""
        chunks.append(Chunk(name, number, here, tuple(stages), receives=here > 0, sends=here < last))
    return tuple(chunks)


def _plain(name: str) -> Stage:
    return Stage(name, ("",), False)
