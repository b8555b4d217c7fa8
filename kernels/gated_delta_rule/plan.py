"""plan(facts, arch): what serves a gated_delta_rule call, or why nothing does.

Pure: no tensors, no device calls, no environment. On a CPU the portable path takes every shape and option; on a GPU the
recurrent kernel takes what decoding needs, and on Hopper the chunked kernels what prefill does.
"""

from __future__ import annotations

from ...outcome import Choice, Declined
from ..blocks.dtypes import WIDTH
from ..linear_attention.support import unsupported
from ..runtime import arch as archs
from .chunk_config import DTYPES, MAX_HEAD_DIM_V, SLICE
from .config import COLUMNS, HEAD_DIMS
from .facts import GatedDeltaRuleFacts

FAMILY = "gated_delta_rule"
RECURRENT = "any_recurrent"
CHUNKED = "sm90_fwd"


def plan(facts: GatedDeltaRuleFacts, arch: str) -> Choice | Declined:
    """A Choice of "portable" on "cpu", of "any_recurrent" or "sm90_fwd" on a CUDA arch, or the reason against each."""
    reason = unsupported(facts)
    if reason is not None:
        return Declined(reason)
    if arch == archs.CPU:
        return Choice(FAMILY, "portable", backward="portable" if facts.needs_grad else None)
    if archs.limits(arch) is None:
        return Declined(f"no {FAMILY} kernel for {arch}: it needs one of {', '.join(archs.known_archs())}")
    if facts.mode == "chunk":
        if arch != "sm_90":
            return Declined(f"no chunked {FAMILY} kernel for {arch} yet: upstream's own runs")
        reason = not_chunked(facts)
        return Declined(reason) if reason is not None else Choice(FAMILY, CHUNKED)
    reason = not_recurrent(facts)
    return Declined(reason) if reason is not None else Choice(FAMILY, RECURRENT)


def not_recurrent(facts: GatedDeltaRuleFacts) -> str | None:
    """Why the recurrent kernel, on any arch, does not take the call; None: it does."""
    if facts.needs_grad:
        return "a gradient is needed: the recurrent kernel has none"
    for name, dtype in (("dtype", facts.dtype), ("v dtype", facts.v_dtype or facts.dtype)):
        if dtype not in WIDTH:
            return f"{name}={dtype}: the recurrent kernel takes {', '.join(WIDTH)}"
    if facts.head_dim not in HEAD_DIMS:
        return f"head_dim={facts.head_dim}: the recurrent kernel has {', '.join(map(str, HEAD_DIMS))}"
    if facts.head_dim_v == 0 or facts.head_dim_v % COLUMNS:
        return f"head_dim_v={facts.head_dim_v} is not a multiple of {COLUMNS}"
    if facts.has_gk or facts.has_gv:
        return f"{'gk' if facts.has_gk else 'gv'}: the recurrent kernel has one decay per head"
    if facts.beta_per_channel:
        return "beta is [B, T, HV, V]: the recurrent kernel takes [B, T, HV]"
    if facts.use_gate and not facts.has_g:
        return "a gate without g"
    return None


def not_chunked(facts: GatedDeltaRuleFacts) -> str | None:
    """Why the chunked kernels of sm_90 do not take the call; None: they do."""
    if facts.needs_grad:
        return "a gradient is needed: the chunked kernel has none yet"
    if facts.dtype not in DTYPES:
        return f"dtype={facts.dtype}: the chunked kernel takes {', '.join(DTYPES)}"
    if facts.v_dtype not in (None, facts.dtype):
        return f"v dtype={facts.v_dtype}: the chunked kernel takes q's, {facts.dtype}"
    if facts.head_dim not in HEAD_DIMS:
        return f"head_dim={facts.head_dim}: the chunked kernel has {', '.join(map(str, HEAD_DIMS))}"
    if facts.head_dim_v % SLICE or not SLICE <= facts.head_dim_v <= MAX_HEAD_DIM_V:
        return f"head_dim_v={facts.head_dim_v} is not a multiple of {SLICE} up to {MAX_HEAD_DIM_V}"
    return None
