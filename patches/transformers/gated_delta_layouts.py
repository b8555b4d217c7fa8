"""How GatedDeltaNet classes arrange their projections, and which class has which arrangement, by its source.

The forward of these classes decides and calls, so it is recognised whole: it is one of the sources listed here, by a
hash that is blind to comments, formatting and annotations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from accel.outcome import Decline

from .. import checks
from . import recognise


@dataclass(frozen=True, slots=True)
class Projected:
    """What the rule and the norm read, tokens first; views where the projections' layout allows it."""

    qkv: Tensor  #: [B, T, C], contiguous: queries, keys, values
    z: Tensor  #: the norm's gate, [B T HV, V], or [B, T, H, HV / H, V] where it is a view
    beta: Tensor  #: [B, T, HV], before the sigmoid
    g: Tensor  #: [B, T, HV], before softplus


@dataclass(frozen=True, slots=True)
class Layout:
    """How a class arranges its projections."""

    project: Callable[[Any, Tensor], Projected]
    norm: str  #: attribute of the gated norm
    out: str  #: attribute of the last projection
    neg_eigval: bool = False  #: the module says whether beta is doubled
    method: str | None = None  #: fingerprint of fix_query_key_value_ordering
    whole_cache: bool = False  #: it goes by whether the cache's last layer has seen tokens, not its own


def _qwen3_next(module: Any, x: Tensor) -> Projected:
    """Everything of a key head lies together: its query, key, values and gates, then its betas and decays."""
    heads, heads_v = module.num_k_heads, module.num_v_heads
    head_dim, head_dim_v, ratio = module.head_k_dim, module.head_v_dim, heads_v // heads
    batch, tokens, _ = x.shape
    key_dim, value_dim = heads * head_dim, heads_v * head_dim_v
    width, channels = 2 * (head_dim + ratio * head_dim_v), 2 * key_dim + value_dim
    grouped = _rows("in_proj_qkvz", module.in_proj_qkvz(x), batch, tokens, heads * width)
    scalars = _rows("in_proj_ba", module.in_proj_ba(x), batch, tokens, 2 * heads_v)
    rows, row, first = batch * tokens, heads * width, grouped.storage_offset()
    qkv = grouped.new_empty(batch, tokens, channels)
    qkv.as_strided((rows, 2, heads, head_dim), (channels, key_dim, head_dim, 1)).copy_(
        grouped.as_strided((rows, 2, heads, head_dim), (row, head_dim, width, 1), first)
    )
    qkv.as_strided((rows, heads, ratio * head_dim_v), (channels, ratio * head_dim_v, 1), 2 * key_dim).copy_(
        grouped.as_strided((rows, heads, ratio * head_dim_v), (row, width, 1), first + 2 * head_dim)
    )
    z = grouped.as_strided(
        (batch, tokens, heads, ratio, head_dim_v),
        (tokens * row, row, width, head_dim_v, 1),
        first + 2 * head_dim + ratio * head_dim_v,
    )
    if tokens == 1:  # the host takes longer to describe a view of two strides to the norm than to copy a few rows
        z = z.contiguous().view(-1, head_dim_v)
    scalars = scalars.as_strided(
        (rows, 2, heads, ratio), (2 * heads_v, ratio, 2 * ratio, 1), scalars.storage_offset()
    ).contiguous()
    strides = (2 * tokens * heads_v, 2 * heads_v, 1)
    first = scalars.storage_offset()
    beta = scalars.as_strided((batch, tokens, heads_v), strides, first)
    return Projected(qkv, z, beta, scalars.as_strided((batch, tokens, heads_v), strides, first + heads_v))


def _qwen3_5(module: Any, x: Tensor) -> Projected:
    heads_v, head_dim_v = module.num_v_heads, module.head_v_dim
    batch, tokens, _ = x.shape
    value_dim = heads_v * head_dim_v
    qkv = _rows("in_proj_qkv", module.in_proj_qkv(x), batch, tokens, 2 * module.key_dim + value_dim)
    z = _rows("in_proj_z", module.in_proj_z(x), batch, tokens, value_dim)
    beta = _rows("in_proj_b", module.in_proj_b(x), batch, tokens, heads_v)
    g = _rows("in_proj_a", module.in_proj_a(x), batch, tokens, heads_v)
    return Projected(qkv, z.view(-1, head_dim_v), beta, g)


def _olmo_hybrid(module: Any, x: Tensor) -> Projected:
    heads_v, head_dim_v = module.num_v_heads, module.head_v_dim
    batch, tokens, _ = x.shape
    value_dim = heads_v * head_dim_v
    qkv = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], dim=-1)
    qkv = _rows("q_proj, k_proj and v_proj", qkv, batch, tokens, 2 * module.key_dim + value_dim)
    beta = _rows("b_proj", module.b_proj(x), batch, tokens, heads_v)
    g = _rows("a_proj", module.a_proj(x), batch, tokens, heads_v)
    z = _rows("g_proj", module.g_proj(x), batch, tokens, value_dim)
    return Projected(qkv, z.view(-1, head_dim_v), beta, g)


def _rows(name: str, y: Any, batch: int, tokens: int, size: int) -> Tensor:
    """What a projection returned, contiguous; it may be any layer. Raises Decline where it is no such tensor."""
    if type(y) not in checks.PLAIN or y.shape != (batch, tokens, size):
        shape = list(y.shape) if isinstance(y, Tensor) else ""
        raise Decline(f"{name} returned a {type(y).__name__} {shape}, not a tensor {[batch, tokens, size]}")
    return y if y.is_contiguous() else y.contiguous()  # type: ignore[no-any-return]


_NEXT = Layout(_qwen3_next, "norm", "out_proj", method="06cb1c915da346b3")
_QWEN3_5 = Layout(_qwen3_5, "norm", "out_proj")
_OLMO = Layout(_olmo_hybrid, "o_norm", "o_proj", neg_eigval=True)
#: Where the decorators of these forwards are made.
_DECORATORS = ("transformers.integrations.accelerate", "transformers.utils.deprecation")
#: Fingerprints of the forwards in transformers 5.17 to 5.20, in 5.21 and 5.22, in 5.23, and in 5.24. They differ in how
#: they ask the cache, in whether query and key heads are repeated, and in the name of the cache.
LAYOUTS = {
    **dict.fromkeys(("ad83f9f27978ad4e", "183abfb7e7a285eb", "bc6731436e5d7641", "a1d5bf0af72f4553"), _NEXT),
    **dict.fromkeys(("e14e1e24499ba19a", "f27f1607a71214fd", "f9e45734c460b08c", "c248bec9f6223ff4"), _QWEN3_5),
    "dfc889e4c470a09c": replace(_OLMO, whole_cache=True),
    **dict.fromkeys(("d1ac368ebdb48ddf", "3b869c4bb5e61ab7", "8a54641b6dd5cc71"), _OLMO),
}


def recognised(cls: type) -> tuple[Layout, FunctionType] | None:
    """The layout of a class whose own forward is one of the known sources, and that forward undecorated."""
    found = recognise.fingerprint(vars(cls).get("forward"), _DECORATORS)
    layout = None if found is None else LAYOUTS.get(found[0])
    if found is None or layout is None:
        return None
    if layout.method is not None:
        ordering = recognise.fingerprint(vars(cls).get("fix_query_key_value_ordering"))
        if ordering is None or ordering[0] != layout.method:
            return None
    return layout, found[1]
