"""What there is to know about one attention call, read off the tensors' metadata."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from accel.outcome import Decline

from ..runtime.interned import interned

#: Copy engines and 16-byte loads want every row to start at a multiple of this.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """One configuration of softmax(scale * q @ k.T + mask) @ v with a positive scale.

    A layout says how a tensor lies in memory: "aligned" (last stride 1, and every row starts at a multiple of 16 bytes
    from the storage, as TMA and 16-byte loads need), "rows" (last stride 1) or "strided" (anything else). Dimensions of
    size 1 have no stride that counts.
    """

    dtype: str  #: of q, k and v, e.g. "bfloat16"
    batch: int
    heads_q: int
    heads_kv: int  #: divides heads_q: k and v are not repeated
    seqlen_q: int
    seqlen_k: int
    head_dim: int  #: of q and k
    head_dim_v: int
    #: "none"; "top_left": key j is seen by query i if j <= i; "bottom_right": if j - seqlen_k <= i - seqlen_q
    causal: str
    #: "none", or its kind and shape, with 1 where it is broadcast (size 1 or stride 0): "bool b1qk", "bool 11qk", ...
    mask: str
    mask_layout: str  #: "none" without a mask
    q_layout: str
    k_layout: str
    v_layout: str
    needs_grad: bool
    lse: bool = False  #: the log-sum-exp of every row is wanted too
    window: tuple[int, int] | None = None  #: keys seen before and after the diagonal, -1 without a bound
    varlen: bool = False  #: packed sequences with cu_seqlens on the device; lengths are then upper bounds

    @property
    def group(self) -> int:
        """q heads per kv head."""
        return self.heads_q // self.heads_kv

    @property
    def unaligned(self) -> str | None:
        """The first of q, k and v whose rows do not all start at multiples of 16 bytes."""
        layouts = (("q", self.q_layout), ("k", self.k_layout), ("v", self.v_layout))
        return next((name for name, layout in layouts if layout != "aligned"), None)


_facts = interned(AttentionFacts)

_MASKS = {
    (kind, b, h, q): f"{kind} {'b' if b else '1'}{'h' if h else '1'}{'q' if q else '1'}k"
    for kind in ("bool", "float")
    for b in (False, True)
    for h in (False, True)
    for q in (False, True)
}


def read(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: str = "none",
    needs_grad: bool = False,
    lse: bool = False,
    seqlen_dim: int = 2,
    only_seen_keys: bool = False,
    key_mask: bool = False,
) -> AttentionFacts:
    """The facts of a call. Metadata only: nothing is launched, copied or read.

    Args:
        q, k, v: (batch, heads, seqlen, head_dim), or (batch, seqlen, heads, head_dim) with `seqlen_dim=1`.
        mask: broadcastable to (batch, heads_q, seqlen_q, seqlen_k), of four dimensions and all of seqlen_k; boolean
            (True: attend) or additive. With `key_mask` it may also be (batch, seqlen_k).
        causal: as `AttentionFacts.causal`.
        only_seen_keys: leave out the keys after the first seqlen_q, which a top-left causal call does not look at.

    Raises:
        Decline: ranks, shapes or dtypes that do not fit together.
    """
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if len(q_shape) != 4 or len(k_shape) != 4 or len(v_shape) != 4:
        raise Decline(f"q, k, v have {len(q_shape)}, {len(k_shape)}, {len(v_shape)} dimensions, not 4")
    batch, heads_q, seqlen_q, head_dim = q_shape
    batch_k, heads_kv, keys, head_dim_k = k_shape
    batch_v, heads_v, values, head_dim_v = v_shape
    if seqlen_dim == 1:
        heads_q, seqlen_q = seqlen_q, heads_q
        heads_kv, keys = keys, heads_kv
        heads_v, values = values, heads_v
    if batch_v != batch_k or heads_v != heads_kv or values != keys:
        raise Decline(f"k is {tuple(k_shape)}, v {tuple(v_shape)}: they differ before the last dimension")
    if batch_k != batch:
        raise Decline(f"batch {batch} of q is not batch {batch_k} of k and v")
    if head_dim_k != head_dim:
        raise Decline(f"head_dim={head_dim} of q is not {head_dim_k} of k")
    if heads_kv == 0 or heads_q % heads_kv:
        raise Decline(f"heads_q={heads_q} is no multiple of heads_kv={heads_kv}")
    if only_seen_keys and keys > seqlen_q:
        keys = seqlen_q
    dtype = q.dtype
    if k.dtype is not dtype or v.dtype is not dtype:
        raise Decline(f"q is {_name(dtype)}, k {_name(k.dtype)}, v {_name(v.dtype)}")
    mask_kind, mask_layout = "none", "none"
    if mask is not None:
        mask_kind, mask_layout = _mask(mask, (batch, heads_q, seqlen_q, keys), key_mask)
    q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
    q_layout = k_layout = v_layout = "aligned"
    # The one test that nearly every call passes; the layouts one by one cost 0.7 us more.
    if q_strides[3] != 1 or k_strides[3] != 1 or v_strides[3] != 1 or (
        q_strides[0] | q_strides[1] | q_strides[2] | q.storage_offset()
        | k_strides[0] | k_strides[1] | k_strides[2] | k.storage_offset()
        | v_strides[0] | v_strides[1] | v_strides[2] | v.storage_offset()
    ) % (ALIGNMENT // q.element_size()):  # fmt: skip
        q_layout, k_layout, v_layout = layout(q), layout(k), layout(v)
    return _facts()(
        _name(dtype),
        batch,
        heads_q,
        heads_kv,
        seqlen_q,
        keys,
        head_dim,
        head_dim_v,
        causal,
        mask_kind,
        mask_layout,
        q_layout,
        k_layout,
        v_layout,
        needs_grad,
        lse,
    )


def layout(tensor: torch.Tensor) -> str:
    """ "aligned", "rows" or "strided", see `AttentionFacts`."""
    strides = tensor.stride()
    if strides[-1] != 1 and tensor.shape[-1] != 1:
        return "strided"
    bits = int(tensor.storage_offset())
    for size, stride in zip(tensor.shape[:-1], strides[:-1], strict=True):
        if size > 1:
            bits |= stride
    # The unit is a power of two: bits that are or-ed together are a multiple of it if each is.
    return "rows" if bits % (ALIGNMENT // tensor.element_size()) else "aligned"


def _mask(mask: torch.Tensor, shape: tuple[int, int, int, int], key_mask: bool) -> tuple[str, str]:
    """Kind and layout."""
    if mask.dtype is torch.bool:
        kind = "bool"
    elif mask.dtype.is_floating_point:
        kind = "float"
    else:
        raise Decline(f"the mask is {_name(mask.dtype)}, neither boolean nor additive")
    sizes, strides = mask.shape, mask.stride()
    if key_mask and sizes == (shape[0], shape[3]):
        b, h, q, k = sizes[0], 1, 1, sizes[1]
        s_b, s_h, s_q, s_k = strides[0], 0, 0, strides[1]
    else:
        if len(sizes) != 4:
            raise Decline(f"the mask has {len(sizes)} dimensions, not 4")
        b, h, q, k = sizes
        s_b, s_h, s_q, s_k = strides
        if k != shape[3] or (b != 1 and b != shape[0]) or (h != 1 and h != shape[1]) or (q != 1 and q != shape[2]):
            raise Decline(f"the mask is {tuple(sizes)}, the scores are {shape}")
    s_b, s_h, s_q = s_b if b > 1 else 0, s_h if h > 1 else 0, s_q if q > 1 else 0
    if s_k != 1 and k != 1:
        where = "strided"
    elif (s_b | s_h | s_q | mask.storage_offset()) % (ALIGNMENT // mask.element_size()):
        where = "rows"
    else:
        where = "aligned"
    return _MASKS[kind, s_b != 0, s_h != 0, s_q != 0], where


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype)[6:]
