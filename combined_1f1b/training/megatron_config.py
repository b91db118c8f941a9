"""Megatron's TransformerConfig as a configuration section: its fields, values YAML has no form for, and building it."""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from combined_1f1b.errors import ConfigError

_DTYPES = ("float32", "float16", "bfloat16")
_ACTIVATIONS = ("gelu", "relu", "silu")


@functools.cache
def field_annotations() -> dict[str, Any]:
    """Field names of TransformerConfig and MLATransformerConfig with their types. Imports Megatron."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return typing.get_type_hints(MLATransformerConfig)


def convert_field(key: str, value: Any, annotation: Any) -> tuple[bool, Any]:
    """Convert a name to a torch.dtype or an activation function where the field wants one.

    Returns:
        (True, converted), or (False, None) for a field of a plain type.
    Raises:
        ConfigError: a name that is not known, or a field that takes a function and so cannot be written in YAML.
    """
    import torch

    choices = typing.get_args(annotation) or (annotation,)
    if value is None and type(None) in choices:
        return True, None
    if torch.dtype in choices:
        if value not in _DTYPES:
            raise ConfigError.of(key, value, "not a number format", f"use one of {', '.join(_DTYPES)}")
        return True, getattr(torch, value)
    if key == "model.activation_func":
        if value not in _ACTIVATIONS:
            raise ConfigError.of(key, value, "not a known activation", f"use one of {', '.join(_ACTIVATIONS)}")
        return True, getattr(torch.nn.functional, value)
    if any(typing.get_origin(choice) is Callable or choice is Callable for choice in (annotation, *choices)) or any(
        "Callable" in str(choice) or "ContextManager" in str(choice) for choice in choices
    ):
        raise ConfigError.of(key, value, "takes a function, which a config file cannot hold", "remove it")
    return False, None


@contextlib.contextmanager
def megatron_refusals() -> Iterator[None]:
    """Turn what Megatron raises while it checks settings into one line for the user; its own words are kept.

    Raises:
        ConfigError: for an assertion, a wrong value or a missing optional package inside the block.
    """
    try:
        yield
    except ConfigError:
        raise
    except (AssertionError, ValueError, TypeError, ImportError) as error:
        problem = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"model: Megatron refuses this combination: {problem}") from error


def build_transformer_config(fields: Mapping[str, Any], **extra: Any) -> Any:
    """Build Megatron's config, with what a training run needs filled in where the user left it out.

    Args:
        fields: the checked section `model`.
        extra: fields that win over the section's.
    Raises:
        ConfigError: Megatron refused the combination; the message is Megatron's own.
    """
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    values = {"transformer_impl": "local", **fields, **extra}
    for flag, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if values.get(flag):
            values.setdefault("params_dtype", dtype)
    if values.get("pipeline_model_parallel_size", 1) > 1:
        values.setdefault("pipeline_dtype", values.get("params_dtype", torch.float32))
    cls = MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig
    allowed = typing.get_type_hints(cls)
    for name in values:
        if name not in allowed:
            raise ConfigError.of(
                f"model.{name}", values[name], "only multi-latent attention has this field",
                "set model.multi_latent_attention=true or remove it",
            )  # fmt: skip
    with megatron_refusals():
        return cls(**values)
