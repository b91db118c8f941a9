"""Methods of one instance, replaced for a while and then as they were: the user may have set some of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def shadowed(owner: Any, **replacements: Callable[..., Any]) -> Iterator[None]:
    """For the length of the context, the methods of this one instance are the replacements."""
    attributes = vars(owner)
    before = {name: attributes[name] for name in replacements if name in attributes}
    attributes.update(replacements)
    try:
        yield
    finally:
        for name in replacements:
            attributes.pop(name, None)
        attributes.update(before)
