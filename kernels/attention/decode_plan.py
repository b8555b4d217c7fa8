"""Which calls the decode kernel serves, in which configuration, and how many CTAs share the keys. Pure."""

from __future__ import annotations

from functools import lru_cache

from accel.outcome import Choice

from ..runtime import arch as archs
from .decode_config import COUNTERS, DTYPES, HEAD_DIMS, ROWS, DecodeConfig
from .facts import AttentionFacts

KERNEL = "any_decode"
MAX_SEQLEN_Q = 16
MAX_SEQLEN_K = 2**30
GOOD = 0.95  #: the fewest splits whose last wave is this full, against the fullest, are taken


def choose(facts: AttentionFacts, arch: str) -> Choice | str:
    """The choice for a call of up to MAX_SEQLEN_Q q positions on a CUDA arch, or why there is none."""
    rows = facts.group * facts.seqlen_q
    reason = beyond(facts, rows)
    if reason is not None:
        return reason
    mask = "none" if facts.mask == "none" else "keys" if facts.mask.endswith("11k") else "rows"
    config = decode_config(facts.dtype, facts.head_dim, facts.head_dim_v, rows, mask, facts.lse, arch)
    if config is None:
        return f"head_dim={facts.head_dim} with {rows} rows of q for a kv head: too much for {arch}"
    return Choice("attention", KERNEL, config)


def beyond(facts: AttentionFacts, rows: int) -> str | None:
    """What the family takes and the decode kernel does not, on any arch."""
    if facts.varlen:
        return "packed sequences: the decode kernel has none"
    if facts.window is not None:
        return f"window={facts.window}: the decode kernel has causality and masks only"
    if (facts.head_dim, facts.head_dim_v) not in HEAD_DIMS:
        sizes = ", ".join(f"{d}/{dv}" if d != dv else str(d) for d, dv in HEAD_DIMS)
        return f"head_dim={facts.head_dim}: the decode kernel has {sizes}"
    if rows > ROWS[-1]:
        return f"seqlen_q={facts.seqlen_q} of {facts.group} q heads a kv head are {rows} rows > {ROWS[-1]}"
    if facts.unaligned is not None:
        return f"the rows of {facts.unaligned} do not all start at multiples of 16 bytes"
    if facts.seqlen_k >= MAX_SEQLEN_K:
        return f"seqlen_k={facts.seqlen_k} >= {MAX_SEQLEN_K}"
    return None


@lru_cache(maxsize=1024)
def decode_config(
    dtype: str, head_dim: int, head_dim_v: int, rows: int, mask: str, lse: bool, arch: str
) -> DecodeConfig | None:
    """Two CTAs an SM if each still has three slots of 16 or 32 keys a group, else one; None: no kernel takes it.

    Three slots keep two in flight: 128 KB an SM at head_dim 128, where 64 KB saturate an H200's memory.
    """
    limits = archs.limits(arch)
    if limits is None or dtype not in DTYPES or (head_dim, head_dim_v) not in HEAD_DIMS or not 0 < rows <= ROWS[-1]:
        return None
    tile = next(r for r in ROWS if rows <= r)
    for ctas, warps in ((2, 4), (1, 4), (1, 2)):
        limit = min(limits.smem_per_cta, limits.smem_per_sm // ctas - limits.smem_reserved)
        for block in (32, 16):
            for slots in range(12, 2, -1):
                try:
                    config = DecodeConfig(dtype, head_dim, head_dim_v, tile, mask, lse, block, slots, warps, ctas)
                except ValueError:
                    continue
                if config.smem_bytes <= limit:
                    return config
    return None


@lru_cache(maxsize=4096)
def splits_for(pairs: int, most: int, slots: int) -> int:
    """CTAs per (batch, kv head): the fewest, up to `most`, whose waves over `slots` CTAs are nearly as full as any.

    Counters are kept for 1024 (batch, kv head) pairs; so many fill any GPU without being split.
    """
    if pairs > COUNTERS or most <= 1:
        return 1
    full = [pairs * s / (-(-pairs * s // slots) * slots) for s in range(1, most + 1)]
    return next(s for s, fill in enumerate(full, 1) if fill >= GOOD * max(full))
