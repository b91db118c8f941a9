"""Replace attributes of other modules and put them back exactly: a patch is data (owner, name, value, reason)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Marks a name that the owner itself did not define (it inherited the name, or had none), so that restoring deletes it.
_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One attribute to replace while the host device is active.

    Attributes:
        owner: the module or class that holds the name.
        name: the attribute.
        value: what stands there while active.
        reason: who needs it; a patch nobody needs has no place in the table.
    """

    owner: Any
    name: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__module__', '')}.{self.owner.__name__}.{self.name}".lstrip(".")


class AppliedPatches:
    """A table of patches that is in force, with what stood there before.

    Raw `__dict__` entries are kept instead of `getattr` results: a class attribute must come back as the very
    descriptor that was there, and an inherited one must disappear again.
    """

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._previous: list[tuple[Patch, Any]] = []
        try:
            for patch in patches:
                previous = vars(patch.owner).get(patch.name, _ABSENT)
                setattr(patch.owner, patch.name, patch.value)
                self._previous.append((patch, previous))
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Put everything back, last patch first, so that a name patched twice ends as it began."""
        while self._previous:
            patch, previous = self._previous.pop()
            if previous is _ABSENT:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, previous)
