"""Which kernel serves an attention call, decided from its facts alone."""

from __future__ import annotations

from accel.outcome import Choice, Declined

from .facts import AttentionFacts

DTYPES = ("bfloat16", "float16")
#: q, k and v tiles of more do not fit into the 227 KB of shared memory that an SM of sm_90 and sm_100 has.
MAX_HEAD_DIM = 256


def plan(facts: AttentionFacts, arch: str) -> Choice | Declined:
    """The decision for `facts` on dispatch arch `arch`. Pure.

    Declines whatever no kernel of this family is made for (see `limit`), and, as there is no kernel yet, all the rest.
    """
    if arch == "cpu":
        return Declined("upstream's own code serves a CPU")
    reason = limit(facts) or f"no attention kernel for {arch} yet: upstream's own code runs"
    return Declined(reason)


def limit(facts: AttentionFacts) -> str | None:
    """The first limit of the family that `facts` are beyond; None within all of them."""
    if facts.needs_grad:
        return "a gradient is needed, and attention has no backward yet"
    if facts.dtype not in DTYPES:
        return f"dtype={facts.dtype}: only {' and '.join(DTYPES)}"
    if facts.mask.startswith("float"):
        return "an additive mask: only boolean ones"
    for name, size in (("head_dim", facts.head_dim), ("head_dim_v", facts.head_dim_v)):
        if size > MAX_HEAD_DIM:
            return f"{name}={size} > {MAX_HEAD_DIM}"
        if size % 8 or size == 0:
            return f"{name}={size} is no multiple of 8"
    if facts.head_dim != facts.head_dim_v and (facts.head_dim, facts.head_dim_v) != (192, 128):
        return f"head_dim={facts.head_dim}, head_dim_v={facts.head_dim_v}: they may differ as 192 and 128 only"
    for name, layout in (("q", facts.q_layout), ("k", facts.k_layout), ("v", facts.v_layout)):
        if layout == "strided":
            return f"the last dimension of {name} is not contiguous"
    if facts.batch * facts.heads_q * facts.seqlen_q == 0:
        return f"nothing to compute: batch={facts.batch}, heads_q={facts.heads_q}, seqlen_q={facts.seqlen_q}"
    return None
