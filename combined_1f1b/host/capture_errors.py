"""The errors of CUDA's stream capture, by their names in the CUDA runtime."""

from __future__ import annotations

import enum

import torch


class CaptureFault(enum.Enum):
    """A rule of stream capture that was broken: the runtime's error name, and the sentence CUDA prints for it."""

    UNSUPPORTED = ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing")
    INVALIDATED = ("cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture")
    UNJOINED = ("cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work")
    ISOLATION = ("cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream")
    IMPLICIT = (
        "cudaErrorStreamCaptureImplicit",
        "operation would make the legacy stream depend on a capturing blocking stream",
    )
    CAPTURED_EVENT = (
        "cudaErrorCapturedEvent",
        "operation not permitted on an event last recorded in a capturing stream",
    )

    def error(self, detail: str) -> torch.AcceleratorError:
        """The exception that torch raises for it.

        Args:
            detail: which stream, event or operation broke the rule; CUDA itself does not say.
        """
        name, sentence = self.value
        return torch.AcceleratorError(f"CUDA error: {sentence}\n`{name}': {detail}")
