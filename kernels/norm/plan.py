"""plan(facts, arch): which norm kernel serves a call, in which launch configuration, or why none does.

Pure: no tensors, no device calls, no environment. A configuration never depends on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from accel.outcome import Choice, Declined

from ..runtime import arch as archs
from .config import ACTIVATIONS, FORMS, WARP, WIDTH, BwdConfig, FwdConfig
from .facts import NormFacts

FAMILY = "norm"
MIN_HIDDEN, MAX_HIDDEN = 64, 16384
RING_BYTES = 144 * archs.KIB  #: of the backward's ring; a deeper one was slower
COPY_NOTE = "x or its gate is copied first: its rows are not reachable with two strides, or not 16-byte aligned"

_Key = tuple[str, str, int, str, "str | None", bool]  #: dtype, weight_dtype, hidden, form, activation, two_level


@dataclass(frozen=True, slots=True)
class NormConfigs:
    """Forward and backward are decided together."""

    forward: FwdConfig
    backward: BwdConfig | None  #: None: no gradient is needed


def plan(facts: NormFacts, arch: str) -> Choice | Declined:
    """A Choice of "any_fwd" (and "any_bwd") on a CUDA arch, of "portable" on "cpu", or the reason for neither."""
    reason = unsupported(facts)
    if reason is not None:
        return Declined(reason)
    if arch == archs.CPU:
        return Choice(FAMILY, "portable", backward="portable" if facts.needs_grad else None)
    if archs.limits(arch) is None:
        return Declined(f"no norm kernel for {arch}: it needs one of {', '.join(archs.known_archs())}")
    configs = _configs(
        facts.dtype, facts.weight_dtype, facts.hidden, facts.form, facts.activation, facts.row_levels == 2, arch
    )
    if facts.needs_grad and configs.backward is None:
        limit = archs.limits(arch).smem_per_cta // archs.KIB
        return Declined(
            f"hidden={facts.hidden} {facts.dtype}: the backward of a row needs more than {limit} KB of shared memory"
            f" on {arch}"
        )
    return Choice(
        FAMILY,
        "any_fwd",
        configs if facts.needs_grad else NormConfigs(configs.forward, None),
        "any_bwd" if facts.needs_grad else None,
        (COPY_NOTE,) if facts.row_levels > 2 else (),
    )


def unsupported(facts: NormFacts) -> str | None:
    """Why no kernel of the family, on any arch, takes the call; None: one does."""
    if facts.form not in FORMS:
        return f"form={facts.form} is none of {', '.join(FORMS)}"
    if facts.activation is not None and facts.activation not in ACTIVATIONS:
        return f"activation={facts.activation} is none of {', '.join(ACTIVATIONS)}"
    if facts.activation is not None and facts.form == "zero_centred":
        return "form=zero_centred has no gated kernel"
    if facts.dtype not in WIDTH:
        return f"dtype={facts.dtype} is none of {', '.join(WIDTH)}"
    if facts.weight_dtype not in (facts.dtype, "float32"):
        return f"weight dtype={facts.weight_dtype} is neither x's {facts.dtype} nor float32"
    if facts.gate_dtype is not None and facts.gate_dtype != facts.dtype:
        return f"gate dtype={facts.gate_dtype} is not x's {facts.dtype}"
    if facts.weight_shape is not None and facts.weight_shape != (facts.hidden,):
        return f"weight shape={facts.weight_shape} is not ({facts.hidden},)"
    if facts.device_type not in ("cuda", "cpu"):
        return f"device={facts.device_type} is neither cuda nor cpu"
    if facts.device_type == "cpu":
        return None
    if not MIN_HIDDEN <= facts.hidden <= MAX_HIDDEN:
        return f"hidden={facts.hidden} is outside {MIN_HIDDEN}..{MAX_HIDDEN}"
    vector = 16 // WIDTH[facts.dtype]
    if facts.hidden % vector:
        return f"hidden={facts.hidden} is not a multiple of {vector} ({facts.dtype})"
    if facts.n_rows >= 2**31:
        return f"n_rows={facts.n_rows} >= 2**31"
    return None


@lru_cache(maxsize=1024)
def _configs(
    dtype: str, weight_dtype: str, hidden: int, form: str, activation: str | None, two_level: bool, arch: str
) -> NormConfigs:
    key = (dtype, weight_dtype, hidden, form, activation, two_level)
    return NormConfigs(forward_config(key, arch), backward_config(key, arch))


def forward_config(key: _Key, arch: str) -> FwdConfig:
    """Two 16-byte vectors of x a thread, or one and one of the gate. Measured on an H200, 8192 rows, bf16: against four
    vectors 3-4% faster at hidden 2048 to 8192, and 2% for the gated norm of 262144 x 128.
    """
    tpr = threads_per_row(_vectors(key), wanted=2 if key[4] is None else 1)
    return FwdConfig(*key, tpr, max(1, 128 // tpr), archs.overlaps(arch))


def backward_config(key: _Key, arch: str) -> BwdConfig | None:
    """One CTA of about 512 threads an SM: a ring of 96 to 144 KB keeps the memory busy, and half as many partial sums
    are left for the second kernel as with two CTAs. Measured on an H200, 8192 rows, bf16: 256 threads are 9% slower at
    hidden 2048 and 10% at 4096; two CTAs 4 to 6% slower at 2048 and 4096; a third stage 2% slower at 4096 and 8192.

    None: not one stage fits.
    """
    limits = archs.limits(arch)
    gated = key[4] is not None
    vectors = _vectors(key)
    # Few vectors a thread in rows under a warp: one slot adds up the sums of all the others at the end.
    tpr = threads_per_row(vectors, wanted=1 if vectors < 16 else 2 if gated or vectors < 4 * WARP else 4)
    most = max(1, 512 // tpr)
    for ring in (RING_BYTES, limits.smem_per_cta):
        for rows in dict.fromkeys((most, max(1, most // 2), 1)):
            if tpr * rows % WARP:
                continue
            for stages in (3, 2):
                config = BwdConfig(*key, tpr, rows, archs.overlaps(arch), stages=stages)
                if config.ring_bytes <= ring and config.smem_bytes <= limits.smem_per_cta:
                    return _with_registers(config, arch)
    config = BwdConfig(*key, tpr, max(1, WARP // tpr), archs.overlaps(arch), stages=1)
    return _with_registers(config, arch) if config.smem_bytes <= limits.smem_per_cta else None


def _with_registers(config: BwdConfig, arch: str) -> BwdConfig:
    """The weight is read again for every row where it and the sums of dweight would not fit a thread's registers."""
    many = config.vectors_per_thread * config.vector > 16
    # With more than 256 threads a thread has 128 registers; the code for sm_100 needs a few more than that for sm_90.
    tight = config.threads > 256 and arch not in ("sm_80", "sm_86", "sm_89", "sm_90")
    crowded = many and (config.gated or config.dtype == "float32" or config.threads_per_row > 256 or tight)
    return replace(config, reload_weight=True) if crowded else config


def _vectors(key: _Key) -> int:
    return key[2] // (16 // WIDTH[key[0]])


def threads_per_row(vectors: int, wanted: int) -> int:
    """Threads for a row of 16-byte vectors: near `wanted` vectors each, with few of them idle; at most 512 threads."""
    narrow = [1 << k for k in range(6)]
    wide = [WARP * k for k in range(2, 17)]
    best = None
    for tpr in narrow + wide:
        count = -(-vectors // tpr)
        if count > 8:
            continue
        waste = (count * tpr - vectors) / vectors
        cost = waste + 0.05 * abs(count - wanted) + 0.0005 * tpr / WARP
        if best is None or cost < best[0]:
            best = (cost, tpr)
    if best is None:
        raise ValueError(f"a row of {vectors} vectors is too long for 512 threads of 8 vectors")
    return best[1]
