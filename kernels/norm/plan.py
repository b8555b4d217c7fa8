"""plan(facts, arch): which norm kernel serves a call, in which launch configuration, or why none does.

Pure: no tensors, no device calls, no environment. A configuration never depends on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from accel.outcome import Choice, Declined

from ..runtime import arch as archs
from .config import ACTIVATIONS, FORMS, WARP, WIDTH, BwdConfig, FwdConfig
from .facts import NormFacts

FAMILY = "norm"
MIN_HIDDEN, MAX_HIDDEN = 64, 16384
COPY_NOTE = "x or its gate is copied first: its rows are not reachable with two strides, or not 16-byte aligned"


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
            f"hidden={facts.hidden} {facts.dtype}: the backward of a row needs more than {limit} KB of shared memory on {arch}"
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
    tpr = threads_per_row(hidden // (16 // WIDTH[dtype]), small=4 if activation is None else 2)
    forward = FwdConfig(*key, tpr, rows_per_cta(tpr, 128))
    return NormConfigs(forward, backward_config(key, arch))


def threads_per_row(vectors: int, small: int) -> int:
    """Threads for a row of 16-byte vectors: about four vectors each (`small` in rows under a warp), little of it idle."""
    narrow = [1 << k for k in range(6)]
    wide = [WARP * k for k in range(2, 17)]
    best = None
    for tpr in narrow + wide:
        count = -(-vectors // tpr)
        if count > (4 if tpr < 512 else 8):
            continue
        waste = (count * tpr - vectors) / vectors
        wanted = small if tpr <= WARP else 4
        cost = waste + 0.05 * abs(count - wanted) + 0.0005 * tpr / WARP
        if best is None or cost < best[0]:
            best = (cost, tpr)
    if best is None:
        raise ValueError(f"a row of {vectors} vectors is too long for 512 threads of 8 vectors")
    return best[1]


def rows_per_cta(tpr: int, threads: int) -> int:
    """Rows for a CTA of about `threads` threads, in whole warps."""
    return max(1, threads // tpr)


def backward_config(key: tuple, arch: str) -> BwdConfig | None:
    """Two CTAs an SM with two or three stages each where they fit, else one CTA with what fits; None: not one stage."""
    limits = archs.limits(arch)
    dtype, hidden, gated = key[0], key[2], key[4] is not None
    tpr = threads_per_row(hidden // (16 // WIDTH[dtype]), small=2 if gated else 4)
    rows = rows_per_cta(tpr, 256)
    for ctas in (2, 1):
        budget = min(limits.smem_per_cta, limits.smem_per_sm // ctas - limits.smem_reserved)
        for stages in (3, 2) if ctas == 2 else (4, 3, 2, 1):
            config = BwdConfig(*key, tpr, rows, stages=stages, ctas_per_sm=ctas)
            if config.smem_bytes <= budget:
                return config
    return None
