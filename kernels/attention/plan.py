"""Which kernel serves an attention call, decided from its facts alone."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from accel.outcome import Choice, Declined

from ..runtime import arch as archs
from . import decode_plan
from .config import FwdConfig
from .facts import AttentionFacts
from .sm80_config import sm80_config

FAMILY = "attention"
DTYPES = ("bfloat16", "float16")
#: q, k and v tiles of more do not fit into the 227 KB of shared memory that an SM of sm_90 and sm_100 has.
MAX_HEAD_DIM = 256


def plan(facts: AttentionFacts, arch: str) -> Choice | Declined:
    """The decision for `facts` on dispatch arch `arch`: a kernel with its configuration, or why nothing serves. Pure.

    "any_decode" takes up to 16 q positions, on every arch. "sm90_fwd" takes more: below, its tiles of 64 queries would
    be mostly empty, and it does not split a long row of keys over the GPU. Packed sequences are "sm90_fwd"'s alone.
    Every other arch that kernels are built for has "sm80_fwd" in place of it.

    Lengths do not decide. For a length that it has not seen upstream plans for 30 to 130 ms; for a length that it has,
    not at all; and which of the two a call is, only upstream knows. Generation and serving are made of new lengths, so
    what is served is served at every length: dtypes, head dims and mask kinds for which the kernel is never more than
    10% slower on a seen length, as measured (benchmarks/notes/attention.md). Where it loses by more, upstream runs. So
    no value on the device is read, and nothing is remembered about lengths that could grow.
    """
    if arch == archs.CPU:
        return Declined("upstream's own code serves a CPU")
    reason = limit(facts)
    if reason is None and archs.limits(arch) is None:
        reason = f"no attention kernel for {arch} yet: upstream's own code runs"
    if reason is None and facts.seqlen_q <= decode_plan.MAX_SEQLEN_Q and not (facts.varlen and arch == "sm_90"):
        choice = decode_plan.choose(facts, arch)
        return Declined(choice) if isinstance(choice, str) else choice
    if reason is None:
        reason = beyond_sm90(facts) if arch == "sm_90" else beyond_sm80(facts)
    if reason is not None:
        return Declined(reason)
    if arch != "sm_90":
        older = sm80_config(facts.dtype, facts.head_dim, facts.head_dim_v, kind(facts), facts.lse, arch)
        if older is None:
            return Declined(f"head_dim={facts.head_dim}: no tile fits the shared memory of {arch}")
        return Choice(FAMILY, "sm80_fwd", older)
    config = forward_config(facts.dtype, facts.head_dim, facts.head_dim_v, kind(facts), facts.lse, facts.varlen)
    return Choice(FAMILY, "sm90_fwd", config)


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


def beyond_sm90(facts: AttentionFacts) -> str | None:
    """What the family takes and the sm_90 kernel does not."""
    if facts.varlen and facts.mask != "none":
        return f"a mask ({facts.mask}) over packed sequences"
    if facts.unaligned is not None:
        return f"the rows of {facts.unaligned} do not all start at multiples of 16 bytes, as TMA needs"
    if max(facts.seqlen_q, facts.seqlen_k) >= 2**30:
        return f"seqlen_q={facts.seqlen_q}, seqlen_k={facts.seqlen_k}: lengths must stay below 2**30"
    return None


def beyond_sm80(facts: AttentionFacts) -> str | None:
    """What the family takes and the kernel of the other archs does not."""
    if facts.varlen:
        return "packed sequences: the sm80 kernel has none"
    if facts.unaligned is not None:
        return f"the rows of {facts.unaligned} do not all start at multiples of 16 bytes"
    if max(facts.seqlen_q, facts.seqlen_k) >= 2**29:
        return f"seqlen_q={facts.seqlen_q}, seqlen_k={facts.seqlen_k}: lengths must stay below 2**29"
    return None


def kind(facts: AttentionFacts) -> str:
    """Which keys a query sees, as `FwdConfig.kind`."""
    if facts.mask != "none":
        return "mask"
    if facts.window is not None:
        return "window"
    return "full" if facts.causal == "none" else "causal"


@lru_cache(maxsize=1024)
def forward_config(dtype: str, head_dim: int, head_dim_v: int, kind: str, lse: bool, varlen: bool = False) -> FwdConfig:
    """Tiles per head dim: accumulators of q @ k.T (tile_n / 2 registers) and of the output (head_dim_v / 2) and P
    (tile_n / 4) within 240 registers a thread, or 160 with three warpgroups; both rings twice in shared memory.

    Measured on an H200, bf16 (benchmarks/notes/attention.md). A CTA an SM wins by 1-4%, with the overlap of its tiles
    where products are small: 577 queries and keys of d64 70 us against 88, d80 600 against 694. A CTA for every tile
    wins for d192 of 8192 (by 4%) and under masks, where the lengths of tiles vary most (8 packed sequences: by 15%).
    """
    if varlen:
        base = forward_config(dtype, head_dim, head_dim_v, kind, lse)
        return replace(base, varlen=True, tile_n=min(base.tile_n, 64) if head_dim_v > 128 else base.tile_n)
    what = (dtype, head_dim, head_dim_v, kind, lse)
    if kind == "mask":  # 128 x 128, or halves of that where the output takes half of the registers
        if head_dim_v <= 128:
            return FwdConfig(*what, turns=head_dim <= 128, early_rescale=head_dim > 96, persistent=False, own_out=False)
        return FwdConfig(*what, tile_n=64, turns=False, early_rescale=True, persistent=False, own_out=False)
    if head_dim <= 64:
        return FwdConfig(*what, warpgroups=2 if kind == "full" else 3, ahead=True)
    if head_dim <= 80:
        return FwdConfig(*what, warpgroups=3, tile_n=112, ahead=True)
    if head_dim <= 96:
        return FwdConfig(*what, ahead=kind == "full")
    if head_dim <= 128:
        return FwdConfig(*what, turns=kind != "full", early_rescale=True)
    if head_dim_v <= 128:
        return FwdConfig(*what, turns=False, early_rescale=True, persistent=False, own_out=False)
    return FwdConfig(*what, tile_n=80, turns=False, early_rescale=True, own_out=False)
