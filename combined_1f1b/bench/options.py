"""What to measure: presets, flags and `key=value` overrides, checked. Plain Python.

A group is what is compared with each other (one way of launching, one kind of layers, one kind of data parallelism);
its variants take turns, sample by sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from combined_1f1b.errors import ConfigError
from combined_1f1b.training.values import unknown_key

DEFAULT, BUILT_IN, OURS, PAIRED = "default", "built-in", "ours", "ours-paired"
SCHEDULES = (DEFAULT, BUILT_IN, OURS, PAIRED)
MODES = ("eager", "graph")
LAYERS = ("local", "te")
DATA_PARALLEL = ("none", "mfsdp")
LINKS = ("spin", "copy", "real", "slowed", "none")
REAL_LINKS = ("real", "slowed")
"""Links with tokens that really leave their rank."""

_LABELS = {
    DEFAULT: "Megatron default",
    BUILT_IN: "Megatron combined",
    OURS: "combined_1f1b",
    PAIRED: "combined_1f1b, head and tail paired",
}
_WRAPPERS = {"none": "", "ddp": ", DDP", "mfsdp": ", MFSDP v2", "mfsdp-hooks": ", MFSDP v2 by its hooks"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The model and the step, under Megatron's names; sequence_length and micro_batch_size as in `train`.

    moe_expert_capacity_factor: every expert takes this times its even share of the tokens, padded (drop-and-pad), so
    that shapes are known and an iteration can be captured.
    """

    num_layers: int = 4
    hidden_size: int = 4096
    num_attention_heads: int = 8
    sequence_length: int = 4096
    num_moe_experts: int = 8
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int = 4096
    moe_expert_capacity_factor: float = 1.0
    vocab_size: int = 32000
    num_microbatches: int = 8
    micro_batch_size: int = 1


PRESETS = {
    "large": ModelSize(),
    "small": ModelSize(hidden_size=1024, num_attention_heads=2, sequence_length=1024, moe_ffn_hidden_size=1024),
    "tiny": ModelSize(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        sequence_length=16,
        num_moe_experts=4,
        moe_ffn_hidden_size=16,
        vocab_size=64,
        num_microbatches=3,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What is compared with each other.

    mode: launched by Python, or replayed as one CUDA graph. layers: Megatron's local ones or Transformer Engine's.
    data_parallel: none, or Megatron-FSDP v2 against Megatron's DDP with fp32 main_grad.
    """

    mode: str
    layers: str
    data_parallel: str

    @property
    def name(self) -> str:
        kind = {"local": "local layers", "te": "Transformer Engine"}[self.layers]
        return f"{kind}, {self.mode}" + (", MFSDP v2 against DDP" if self.data_parallel == "mfsdp" else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One row of a group's table. wrapper: "none", "ddp", "mfsdp" (driven by the schedule) or "mfsdp-hooks"."""

    schedule: str
    wrapper: str = "none"
    delay_wgrad: bool = False
    traffic: bool = True

    @property
    def name(self) -> str:
        delayed = ", delayed wgrad" if self.delay_wgrad else ""
        return f"{_LABELS[self.schedule]}{_WRAPPERS[self.wrapper]}{delayed}"

    @property
    def loses_gradients(self) -> bool:
        """Whether other gradients are Megatron's own known fault: those of earlier micro-batches are overwritten."""
        return self.schedule == BUILT_IN and self.delay_wgrad and self.wrapper == "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """A whole measurement.

    no_traffic: schedules that run without traffic too. bandwidth: GB/s of the spinning link. samples: of each variant.
    warmup: iterations before them. traces: profile one more step of each variant for exposed and blocking traffic.
    trace_folder: where those steps' Kineto traces stay.
    """

    preset: str
    size: ModelSize
    modes: tuple[str, ...] = MODES
    layers: tuple[str, ...] = ("local",)
    data_parallel: tuple[str, ...] = DATA_PARALLEL
    schedules: tuple[str, ...] = SCHEDULES
    delay_wgrad: bool = False
    no_traffic: tuple[str, ...] = SCHEDULES
    link: str = "spin"
    bandwidth: float = 80.0
    samples: int = 10
    warmup: int = 2
    traces: bool = True
    trace_folder: str | None = None

    def groups(self) -> list[Group]:
        """The groups, in the order in which they are measured."""
        return [
            Group(mode=mode, layers=layers, data_parallel=data_parallel)
            for layers in self.layers
            for data_parallel in self.data_parallel
            for mode in self.modes
        ]

    def variants(self, group: Group) -> list[Variant]:
        """The rows of a group, Megatron's default schedule with traffic first: it is the reference."""
        sharded = group.data_parallel == "mfsdp"
        rows: list[tuple[str, str, bool]] = []
        for schedule in self.schedules:
            if sharded and schedule == DEFAULT:
                rows += [(schedule, "ddp", False), (schedule, "mfsdp-hooks", False)]
            elif not (sharded and schedule == BUILT_IN):  # which cannot drive it
                rows.append((schedule, "mfsdp" if sharded else "none", False))
        if self.delay_wgrad:
            # The built-in delays only what Transformer Engine's modules delay, the default schedule nothing.
            kinds = (BUILT_IN, OURS, PAIRED) if group.layers == "te" else (OURS, PAIRED)
            rows += [(schedule, wrapper, True) for schedule, wrapper, _ in list(rows) if schedule in kinds]
        return [
            Variant(schedule=schedule, wrapper=wrapper, delay_wgrad=delayed, traffic=traffic)
            for schedule, wrapper, delayed in rows
            for traffic in ((True, False) if schedule in self.no_traffic else (True,))
        ]


def choices(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Read a comma-separated choice of known names, each once, in the order of `known`.

    Raises:
        ConfigError: an unknown name, or none.
    """
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise ConfigError.of(flag, name, "not known", f"choose from {','.join(known)}")
    if not names:
        raise ConfigError.of(flag, text, "nothing is chosen", f"choose from {','.join(known)}")
    return tuple(name for name in known if name in names)


def sized(size: ModelSize, overrides: Iterable[str]) -> ModelSize:
    """Apply `key=value` overrides.

    Raises:
        ConfigError: not of this form, an unknown key, or a value that is no positive number of the field's type.
    """
    changes: dict[str, Any] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"{override!r}: not an override; write key=value, for example num_microbatches=4")
        fields = {field.name: type(getattr(size, field.name)) for field in dataclasses.fields(size)}
        if key not in fields:
            raise unknown_key(key, tuple(fields))
        try:
            changes[key] = fields[key](text)
        except ValueError:
            kind = "a whole number" if fields[key] is int else "a number"
            raise ConfigError.of(key, text, f"not {kind}", f"write {kind}") from None
        if not changes[key] > 0:
            raise ConfigError.of(key, changes[key], "nothing is left to measure", "use a positive number")
    return dataclasses.replace(size, **changes)


def check(options: BenchOptions, *, has_cuda: bool, ranks: int) -> None:
    """Check the options against the machine, before any work.

    Raises:
        ConfigError: what cannot be measured here.
    """
    import importlib.util

    if options.samples < 1:
        raise ConfigError.of("--samples", options.samples, "nothing would be measured", "use at least 1")
    if options.warmup < 1:
        raise ConfigError.of("--warmup", options.warmup, "the first iteration allocates everything", "use at least 1")
    if not options.bandwidth > 0:
        raise ConfigError.of("--bandwidth", options.bandwidth, "a link carries something", "use a positive number")
    if DEFAULT not in options.schedules:
        raise ConfigError.of(
            "--schedules", ",".join(options.schedules), "every row is compared with the default schedule", "add default"
        )
    if options.link not in REAL_LINKS and ranks > 1:
        raise ConfigError.of(
            "--link", options.link, f"{ranks} ranks have traffic of their own", "use --link real or slowed, or one rank"
        )
    if options.trace_folder is not None and not (options.traces and has_cuda):
        raise ConfigError.of(
            "--keep-traces", options.trace_folder, "steps are profiled on a GPU, without --no-traces", "leave it out"
        )
    if options.link in ("spin", "copy") and not has_cuda:
        raise ConfigError.of("--link", options.link, "the host device has no link to model", "use --link none")
    if "te" in options.layers and importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError.of("--layers", "te", "Transformer Engine is not installed", "use --layers local")
    if options.size.num_moe_experts % ranks:
        raise ConfigError.of(
            "num_moe_experts", options.size.num_moe_experts, f"does not divide by the {ranks} ranks",
            f"use a multiple of {ranks}",
        )  # fmt: skip
