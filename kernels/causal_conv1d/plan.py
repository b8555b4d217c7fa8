"""plan(facts, arch): which convolution kernel serves a call, or why none does.

Pure: no tensors, no device calls, no environment.
"""

from __future__ import annotations

from accel.outcome import Choice, Declined

from ..blocks.dtypes import WIDTH
from ..runtime import arch as archs
from .config import ACTIVATIONS, MAX_STATE, WIDTHS
from .facts import ConvFacts

FAMILY = "causal_conv1d"
FORWARD, UPDATE = "any_fwd", "any_update"
COPY_NOTE = "x is copied first: its channels do not lie next to each other"


def plan(facts: ConvFacts, arch: str) -> Choice | Declined:
    """A Choice of "any_fwd" or "any_update" on a CUDA arch, of "portable" on "cpu", or the reason for neither."""
    reason = unsupported(facts)
    if reason is not None:
        return Declined(reason)
    if arch == archs.CPU:
        return Choice(FAMILY, "portable")
    if archs.limits(arch) is None:
        return Declined(f"no {FAMILY} kernel for {arch}: it needs one of {', '.join(archs.known_archs())}")
    if facts.mode == "update":
        return Choice(FAMILY, UPDATE)
    vector = 16 // WIDTH[facts.dtype]
    if facts.n_channels % vector:
        return Declined(f"n_channels={facts.n_channels} is not a multiple of {vector} ({facts.dtype})")
    return Choice(FAMILY, FORWARD, notes=() if facts.channels_last else (COPY_NOTE,))


def unsupported(facts: ConvFacts) -> str | None:
    """Why no kernel of the family, on any arch, takes the call; None: one does."""
    if facts.mode not in ("forward", "update"):
        return f"mode={facts.mode} is neither forward nor update"
    if facts.needs_grad:
        return "a gradient is needed: the kernels have none"
    if facts.dtype not in WIDTH:
        return f"dtype={facts.dtype} is none of {', '.join(WIDTH)}"
    if facts.weight_dtype != facts.dtype:
        return f"weight dtype={facts.weight_dtype} is not x's {facts.dtype}"
    if facts.state_dtype not in (None, facts.dtype):
        return f"state dtype={facts.state_dtype} is not x's {facts.dtype}"
    if facts.width not in WIDTHS:
        return f"width={facts.width} is none of {', '.join(map(str, WIDTHS))}"
    if facts.activation not in ACTIVATIONS:
        return f"activation={facts.activation} is neither None nor silu"
    if facts.state_dtype is not None and facts.state_len < facts.width - 1:
        return f"state_len={facts.state_len} < width - 1 = {facts.width - 1}"
    if facts.mode == "update" and facts.state_len > MAX_STATE:
        return f"state_len={facts.state_len} > {MAX_STATE}"
    return None
