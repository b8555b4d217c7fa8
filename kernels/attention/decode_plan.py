"""Which calls the decode kernel serves, in which configuration, and how many CTAs share the keys. Pure."""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

from accel.outcome import Choice

from ..runtime import arch as archs
from .decode_config import AT_ONCE, COUNTERS, DTYPES, HEAD_DIMS, ROWS, DecodeConfig
from .facts import AttentionFacts

KERNEL = "any_decode"
MAX_SEQLEN_Q = 16
MAX_SEQLEN_K = 2**30

# What `splits_for` and `bundle_for` weigh, in bytes/us and us: an H200, and only the ratios matter.
SM_RATE = 32.5e3  #: of all SMs at once, each
CTA_RATE = 60e3  #: of one CTA that has the memory to itself
HALF_RATE = 0.8  #: of that rate, with hardly a CTA an SM; all of it with all CTAs that fit
ADD_RATE = 100e3  #: partial results out of the L2, for one SM
ADD_LATENCY = 0.3  #: of the reads that a thread has under way at once
ARRIVAL = 2.0  #: partial results written, the others counted, until the last of them can be read


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
def splits_for(
    pairs: int, stretches: int, slots: int, ctas_per_sm: int, stretch_bytes: int, partial_bytes: int, threads: int
) -> int:
    """CTAs that share the `stretches` of keys of each of `pairs` (batch, kv head)s, `slots` of all of them at once.

    Each gets two stretches or more. What reading takes, its longest CTA in every wave, and what adding up takes is
    weighed: where few pairs share long keys a CTA more an SM reads no quicker, and is one more to add up. Counters are
    kept for 1024 (batch, kv head) pairs; so many fill any GPU without being split.
    """
    if pairs > COUNTERS:
        return 1
    best, least, before = 1, float("inf"), 0
    for splits in range(1, min(stretches // 2, 4 * slots // pairs) + 1):
        share = -(-stretches // splits)
        if share != before:
            before = share
            waves, ctas = -(-pairs * splits // slots), min(pairs * splits, slots)
            card = SM_RATE * slots / ctas_per_sm * (HALF_RATE + (1 - HALF_RATE) * ctas / slots)
            took = waves * share * stretch_bytes / min(CTA_RATE, card / ctas)
            took += adding_takes(splits, bundle_for(pairs, splits, partial_bytes, threads), partial_bytes, threads)
            if took < least:
                best, least = splits, took
    return best


@lru_cache(maxsize=4096)
def bundle_for(pairs: int, splits: int, partial_bytes: int, threads: int) -> int:
    """How many partial results one CTA adds up: all `splits` of a pair, or about as many as then are sums to add up."""
    if splits > 1 and pairs > COUNTERS:
        raise ValueError(f"splits={splits} of {pairs} (batch, kv head) pairs: more than {COUNTERS} are not split")
    root = isqrt(max(splits - 1, 0)) + 1
    if pairs * (-(-splits // root) + 1) > COUNTERS:
        return splits
    return min((splits, root), key=lambda bundle: adding_takes(splits, bundle, partial_bytes, threads))


def adding_takes(splits: int, bundle: int, partial_bytes: int, threads: int) -> float:
    """Microseconds from the last CTA's partial result to the sum."""
    if splits == 1:
        return 0.0
    bundles = -(-splits // bundle)
    took = 0.0
    for count in (bundle, bundles) if bundles > 1 else (splits,):
        reads = -(-partial_bytes // (16 * threads)) * -(-count // AT_ONCE)
        took += ARRIVAL + reads * ADD_LATENCY + count * partial_bytes / ADD_RATE
    return took
