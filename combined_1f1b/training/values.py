"""Checks one configuration value against a type annotation, with messages that name the key, the value and the fix."""

from __future__ import annotations

import difflib
import enum
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from combined_1f1b.errors import ConfigError


def unknown_key(key: str, known: Iterable[str], *, prefix: str = "") -> ConfigError:
    """The error for a key that does not exist, with the nearest one that does.

    Args:
        key: the last part of what the user wrote.
        known: the keys that exist there.
        prefix: the sections above it, with a trailing dot, or "".
    """
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(names[:12])}"
    return ConfigError(f"{prefix}{key}: unknown key; {hint}")


def describe(annotation: Any) -> str:
    """An annotation in words, for messages."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(argument) for argument in arguments)
    if origin in (list, tuple):
        inner = [argument for argument in arguments if argument is not Ellipsis]
        return f"a list of {describe(inner[0])}" if inner else "a list"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(annotation.__members__)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


class _MismatchError(Exception):
    """The value does not fit the annotation; never leaves this module."""


def _fit_sequence(value: Any, annotation: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise _MismatchError
    origin = typing.get_origin(annotation) or annotation
    arguments = typing.get_args(annotation)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(arguments) != len(value):
            raise _MismatchError
        return tuple(_fit(item, argument) for item, argument in zip(value, arguments, strict=True))
    inner = arguments[0] if arguments else Any
    return origin(_fit(item, inner) for item in value)


def _fit_union(value: Any, annotation: Any) -> Any:
    # Exact fits first, so that 1 stays a whole number under "float or int".
    for argument in sorted(typing.get_args(annotation), key=lambda item: item is not type(value)):
        try:
            return _fit(value, argument)
        except _MismatchError:
            continue
    raise _MismatchError


def _fit_enum(value: Any, annotation: type[enum.Enum]) -> Any:
    if isinstance(value, str) and value in annotation.__members__:
        return annotation[value]
    raise _MismatchError


def _fit(value: Any, annotation: Any) -> Any:
    """The value as the annotation wants it, or _MismatchError."""
    origin = typing.get_origin(annotation)
    if annotation is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _fit_union(value, annotation)
    if origin is typing.Literal:
        if any(value == item and type(value) is type(item) for item in typing.get_args(annotation)):
            return value
        raise _MismatchError
    if (origin or annotation) in (list, tuple):
        return _fit_sequence(value, annotation)
    if not isinstance(annotation, type):
        raise _MismatchError
    if issubclass(annotation, enum.Enum):
        return _fit_enum(value, annotation)
    if annotation is float and type(value) is int:
        return float(value)
    # bool is a kind of int in Python; `steps: true` is a mistake all the same
    if isinstance(value, annotation) and (type(value) is not bool or annotation is bool):
        return value
    raise _MismatchError


def checked(
    key: str, value: Any, annotation: Any, *, convert: Callable[[str, Any, Any], tuple[bool, Any]] | None = None
) -> Any:
    """Return the value as the annotation wants it.

    Args:
        key: full dotted key, for the message.
        value: what the YAML file or an override gave.
        annotation: a type annotation: plain types, Optional, Union, Literal, list, tuple, enumerations.
        convert: tried first; returns (True, converted) for kinds that YAML has no form for.
    Raises:
        ConfigError: the value has another type.
    """
    if convert is not None:
        done, converted = convert(key, value, annotation)
        if done:
            return converted
    try:
        return _fit(value, annotation)
    except _MismatchError:
        raise ConfigError(f"{key}={value!r}: must be {describe(annotation)}; change the value") from None
