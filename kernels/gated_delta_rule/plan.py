"""plan(facts, arch): what serves a gated_delta_rule call, or why nothing does.

Pure: no tensors, no device calls, no environment. On a CPU the portable path takes every shape and option; there is no
device kernel yet.
"""

from __future__ import annotations

from ...outcome import Choice, Declined
from ..linear_attention.support import unsupported
from .facts import GatedDeltaRuleFacts

FAMILY = "gated_delta_rule"


def plan(facts: GatedDeltaRuleFacts, arch: str) -> Choice | Declined:
    """A Choice of "portable" on "cpu", or the reason against it."""
    reason = unsupported(facts)
    if reason is not None:
        return Declined(reason)
    if arch != "cpu":
        return Declined(f"no {FAMILY} kernel for {arch} yet: upstream's own runs")
    return Choice(FAMILY, "portable", backward="portable" if facts.needs_grad else None)
