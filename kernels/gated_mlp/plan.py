"""plan(facts, arch): which kernel serves a gated MLP, or why none does.

Pure: no tensors, no device calls, no environment.
"""

from __future__ import annotations

from accel.outcome import Choice, Declined

from .facts import ACTIVATIONS, GatedMlpFacts

FAMILY = "gated_mlp"
DTYPES = ("bfloat16", "float16")
#: 16 bytes: what TMA needs of every row, and what a vector access is.
MULTIPLE = 8


def plan(facts: GatedMlpFacts, arch: str) -> Choice | Declined:
    """A Choice of "portable" on "cpu", or the reason against every kernel; on a GPU there is none yet."""
    if facts.activation not in ACTIVATIONS:
        return Declined(f"activation={facts.activation} is none of {', '.join(ACTIVATIONS)}")
    for weight_dtype in facts.weight_dtypes:
        if weight_dtype != facts.dtype:
            return Declined(f"weight dtype={weight_dtype} is not x's {facts.dtype}")
    if arch == "cpu":
        return Choice(FAMILY, "portable", backward="portable" if facts.needs_grad else None)
    reason = unsupported(facts)
    return Declined(reason or f"no {FAMILY} kernel for {arch} yet: upstream's own runs")


def unsupported(facts: GatedMlpFacts) -> str | None:
    """Why no device kernel, on any arch, would take the call; None: one could."""
    if facts.dtype not in DTYPES:
        return f"dtype={facts.dtype} is none of {', '.join(DTYPES)}"
    for name, size in (("hidden", facts.hidden), ("intermediate", facts.intermediate), ("out", facts.out)):
        if size == 0 or size % MULTIPLE:
            return f"{name}={size} is not a positive multiple of {MULTIPLE}"
    if facts.gate_bias or facts.up_bias or facts.down_bias:
        return "the projections have biases"
    if not facts.weights_contiguous:
        return "a weight is not contiguous"
    if not facts.x_contiguous:
        return "x's last dimension is not contiguous"
    return None
