"""The configuration of a run: a YAML file of sections, `key=value` overrides on top, every key and type checked.

The section `model` takes the fields of Megatron's TransformerConfig under their own names, parallel sizes and
`overlap_moe_expert_parallel_comm` included, and four settings of GPTModel (see GPTSettings). The other sections are the
dataclasses below. Where Megatron has a name for a setting, this package uses it.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from combined_1f1b.errors import ConfigError
from combined_1f1b.training.values import checked, unknown_key


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSettings:
    """What GPTModel takes beside its TransformerConfig; written in the section `model`."""

    vocab_size: int = 256
    max_sequence_length: int | None = None  # default: data.sequence_length
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope"
    share_embeddings_and_output_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What a run reads.

    text: files or folders, read as bytes (one token a byte); null means the Python standard library's sources.
    megatron_dataset: prefix of a Megatron .bin/.idx pair, instead of text.
    sequence_length: tokens of one sequence. micro_batch_size: sequences of one micro-batch on one rank.
    """

    text: str | list[str] | None = None
    pattern: str = "*"
    max_bytes: int = 4_000_000
    megatron_dataset: str | None = None
    sequence_length: int = 128
    micro_batch_size: int = 1
    num_microbatches: int = 4
    seed: int = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, under Megatron's names. clip_grad: largest gradient norm, 0 for no clipping."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    min_lr: float = 0.0
    lr_warmup_iters: int = 0
    lr_decay_style: Literal["constant", "cosine"] = "constant"
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    clip_grad: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The loop. save_interval: iterations between checkpoints, 0 for none. resume: go on from the newest checkpoint."""

    train_iters: int = 20
    seed: int = 1234
    log_interval: int = 1
    tensorboard: bool = False
    save_interval: int = 0
    resume: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedConfig:
    """How ranks work together.

    data_parallel: Megatron's DistributedDataParallel, or Megatron-FSDP v2 (combined_1f1b.shard_model).
    timeout_seconds: how long a collective may wait before every rank ends with an error.
    """

    data_parallel: Literal["ddp", "mfsdp_v2"] = "ddp"
    grad_reduce_in_fp32: bool = True
    overlap_grad_reduce: bool = False
    timeout_seconds: int = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareConfig:
    """The compare command. rounds: optimizer steps of every schedule; the first is left out of the times."""

    rounds: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole run. `model` and `overlap` stay mappings: they become Megatron's config and OverlapOptions."""

    model: Mapping[str, Any]
    gpt: GPTSettings = field(default_factory=GPTSettings)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    overlap: Mapping[str, Any] = field(default_factory=dict)
    output: str = "runs/run"


_SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "training": TrainingConfig,
    "distributed": DistributedConfig,
    "compare": CompareConfig,
}
_TOP_LEVEL = ("model", *_SECTIONS, "overlap", "output")
# Keys that must be at least this much; checked once the types are.
_AT_LEAST = {
    "data.max_bytes": 1,
    "data.sequence_length": 1,
    "data.micro_batch_size": 1,
    "data.num_microbatches": 1,
    "optimizer.lr_warmup_iters": 0,
    "optimizer.clip_grad": 0.0,
    "optimizer.lr": 0.0,
    "training.train_iters": 1,
    "training.log_interval": 1,
    "training.save_interval": 0,
    "distributed.timeout_seconds": 1,
    "compare.rounds": 1,
}

Converter = Callable[[str, Any, Any], tuple[bool, Any]]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `key=value` overrides and check every key and type.

    Args:
        path: the YAML file.
        overrides: such as "data.num_microbatches=8"; values are parsed as YAML.
    Raises:
        ConfigError: a file that cannot be read, an unknown key, a value of the wrong type or range.
    """
    raw = _read(Path(path), overrides)
    for key in raw:
        if key not in _TOP_LEVEL:
            raise _misplaced(key)
    sections = {name: _section(name, raw.get(name), cls) for name, cls in _SECTIONS.items()}
    model, gpt = _model(_mapping("model", raw.get("model")))
    output = checked("output", raw.get("output", f"runs/{Path(path).stem}"), str)
    config = RunConfig(model=model, gpt=gpt, overlap=_overlap(raw.get("overlap")), output=output, **sections)
    _check_ranges(config)
    return config


def _read(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for override in overrides:
        if "=" not in override or override.startswith("="):
            raise ConfigError(f"{override!r}: not an override; write key=value, for example data.num_microbatches=8")
    try:
        base = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError.of("--config", str(path), "no such file", "name an existing YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("--config", str(path), f"cannot be read ({error})", "name a YAML file") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError.of("--config", str(path), f"not valid YAML{line} ({problem})", "correct the file") from error
    if not OmegaConf.is_dict(base):
        raise ConfigError.of("--config", str(path), "not a mapping of sections", "start it with `model:`")
    try:
        merged = OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))
        container = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, yaml.YAMLError, TypeError, ValueError) as error:
        problem = str(error).splitlines()[0]
        raise ConfigError(f"{path} with {list(overrides)}: {problem}; correct the file or the override") from error
    return {str(key): value for key, value in container.items()}


def _misplaced(key: str) -> ConfigError:
    """The error for an unknown top-level key: a field name without its section is the usual slip."""
    homes = [f"{name}.{key}" for name, cls in _SECTIONS.items() if key in _names(cls)]
    if key in _model_annotations() or key in _names(GPTSettings):
        homes.append(f"model.{key}")
    if homes:
        return ConfigError(f"{key}: unknown key; did you mean {homes[0]}?")
    return unknown_key(key, _TOP_LEVEL)


def _names(cls: type) -> set[str]:
    return {item.name for item in dataclasses.fields(cls)}


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError.of(name, value, "must be a section", f"write keys under `{name}:`")
    return {str(key): item for key, item in value.items()}


def _section(name: str, value: Any, cls: type) -> Any:
    annotations = typing.get_type_hints(cls)
    return cls(**_check_keys(name, _mapping(name, value), annotations))


def _check_keys(
    name: str, values: Mapping[str, Any], annotations: Mapping[str, Any], convert: Converter | None = None
) -> dict[str, Any]:
    for key in values:
        if key not in annotations:
            raise unknown_key(key, annotations, prefix=f"{name}.")
    return {key: checked(f"{name}.{key}", value, annotations[key], convert=convert) for key, value in values.items()}


def _model_annotations() -> dict[str, Any]:
    """Every field of Megatron's two transformer configs, with its type."""
    from combined_1f1b.training.megatron_config import field_annotations

    return field_annotations()


def _model(values: Mapping[str, Any]) -> tuple[dict[str, Any], GPTSettings]:
    """Split the section `model` into Megatron's fields and GPTModel's settings, both checked."""
    from combined_1f1b.training.megatron_config import convert_field

    annotations = typing.get_type_hints(GPTSettings)
    every = _check_keys("model", values, _model_annotations() | annotations, convert_field)
    for required in ("num_layers", "hidden_size", "num_attention_heads"):
        if required not in every:
            raise ConfigError(f"model.{required}: missing; set it in the config file")
    gpt = {key: every.pop(key) for key in list(every) if key in annotations}
    return every, GPTSettings(**gpt)


def _overlap(value: Any) -> dict[str, Any]:
    """The section `overlap`: fields of OverlapOptions."""
    values = _mapping("overlap", value)
    if not values:
        return {}
    from combined_1f1b.config import OverlapOptions

    return _check_keys("overlap", values, typing.get_type_hints(OverlapOptions))


def _check_ranges(config: RunConfig) -> None:
    for key, least in _AT_LEAST.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value < least:
            raise ConfigError.of(key, value, f"must be at least {least}", "raise it")
    length = config.gpt.max_sequence_length
    if length is not None and length < config.data.sequence_length:
        fix = f"set it to {config.data.sequence_length} or more, or shorten data.sequence_length"
        raise ConfigError.of("model.max_sequence_length", length, "shorter than data.sequence_length", fix)
    if config.data.text is not None and config.data.megatron_dataset is not None:
        raise ConfigError.of(
            "data.megatron_dataset", config.data.megatron_dataset, "data.text is set too", "keep one of the two"
        )
