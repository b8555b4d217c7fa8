"""Which facts of a linear attention call no path takes, on any arch: the same for both families."""

from __future__ import annotations

from typing import Protocol

#: What the portable path computes: half precisions and fp32 in fp32, fp64 in fp64.
DTYPES = ("bfloat16", "float16", "float32", "float64")
MODES = ("chunk", "recurrent")


class LinearAttentionFacts(Protocol):
    """The facts that both families share."""

    @property
    def mode(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def v_dtype(self) -> str | None: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_value_heads(self) -> int: ...
    @property
    def beta_per_channel(self) -> bool: ...
    @property
    def allow_neg_eigval(self) -> bool: ...
    @property
    def use_beta_sigmoid(self) -> bool: ...


def unsupported(facts: LinearAttentionFacts) -> str | None:
    """Why no path, on any arch, takes the call; None: one does."""
    if facts.mode not in MODES:
        return f"mode={facts.mode} is none of {', '.join(MODES)}"
    if facts.dtype not in DTYPES:
        return f"dtype={facts.dtype} is none of {', '.join(DTYPES)}"
    if facts.v_dtype is not None and facts.v_dtype not in DTYPES:
        return f"v dtype={facts.v_dtype} is none of {', '.join(DTYPES)}"
    if facts.n_heads == 0 or facts.n_value_heads % facts.n_heads:
        return f"value heads={facts.n_value_heads} is not a multiple of heads={facts.n_heads}"
    if facts.beta_per_channel and facts.mode == "chunk":
        return "beta is [B, T, HV, V]: the chunked rule takes [B, T, HV]"
    if facts.allow_neg_eigval and not facts.use_beta_sigmoid:
        return "allow_neg_eigval=True without use_beta_sigmoid=True"
    return None
