"""The exceptions of combined_1f1b: a short tree, so that a caller can catch the whole package or one kind of fault."""

from __future__ import annotations


class OverlapError(Exception):
    """Base of every exception that this package defines."""


class ConfigError(OverlapError, ValueError):
    """A setting that cannot work, found before any work: the message names the flag, its value and the fix."""

    @classmethod
    def of(cls, flag: str, value: object, reason: str, fix: str) -> ConfigError:
        """Build the one message form that all refusals share.

        Args:
            flag: name of the setting, as the user writes it.
            value: the value that was found.
            reason: why it cannot work, one clause.
            fix: what to set instead, one imperative clause.
        """
        return cls(f"{flag}={value!r}: {reason}; {fix}")


class UnsupportedModelError(ConfigError):
    """A model that the schedule cannot cut into nodes."""


class PlanError(OverlapError, ValueError):
    """A plan that breaks a rule: the message names the first bad op and shows the plan around it."""


class SurfaceError(OverlapError, ImportError):
    """A private name of Megatron-Core that this package relies on has gone: the message names it."""
