"""What a plan can answer: serve the call with a kernel, or decline it and say why.

A leaf module: it imports nothing of the project, and every other layer may import it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """The call is served: by which kernel of which family, and how it is launched."""

    family: str  #: folder under kernels/, e.g. "norm"
    kernel: str  #: e.g. "any_fwd", "sm90_fwd", "portable"; certificates are written per (family, kernel, arch)
    config: Hashable = None  #: the family's own frozen launch configuration
    backward: str | None = None  #: the kernel that will compute the gradients, where one is needed
    notes: tuple[str, ...] = ()  #: what a user may want to know, e.g. "q is copied: its last stride is 8"

    def __str__(self) -> str:
        name = f"{self.family}.{self.kernel}"
        return name if not self.notes else f"{name} ({'; '.join(self.notes)})"


@dataclass(frozen=True, slots=True)
class Declined:
    """The call runs upstream's own code; `reason` is one line naming the fact and the limit."""

    reason: str

    def __str__(self) -> str:
        return f"declined: {self.reason}"


class Decline(Exception):  # noqa: N818 - it reports a decision, not an error
    """Raised on the way to a plan; the wrapper then calls the original with untouched arguments."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CompileError(RuntimeError):
    """A kernel could not be compiled or loaded; the message names the kernel, the target and the cause."""
