"""The fp64 oracle of attention, in plain torch: softmax(scale * q @ k.T + mask) @ v and its log-sum-exp; and what
`any_classify.py` makes of a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mask_config import BLOCK, TILE

ROWS = 2048  #: queries of one head that are computed at a time, so that long sequences fit into memory


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: str = "none",
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64: out (batch, heads_q, seqlen_q, head_dim_v), lse (batch, heads_q, seqlen_q).

    q, k, v are (batch, heads, seqlen, head_dim), heads of k and v dividing those of q; mask is boolean and expands to
    (batch, heads_q, seqlen_q, seqlen_k). A row that sees no key gives 0 and -inf. `dtype` is that of the arithmetic:
    the same operations in fp32 are the yardstick where no upstream is.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(batch, heads, seqlen_q, v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, seqlen_q), -torch.inf, dtype=dtype, device=q.device)
    if seqlen_k == 0:
        return out, lse
    seen = visible(seqlen_q, seqlen_k, causal, window, q.device)
    if mask is not None:
        mask = mask.expand(batch, heads, seqlen_q, seqlen_k)
    for b in range(batch):
        for h in range(heads):
            keys, values = (t[b, h // (heads // heads_kv)].to(dtype) for t in (k, v))
            for start in range(0, seqlen_q, ROWS):
                rows = slice(start, start + ROWS)
                scores = q[b, h, rows].to(dtype) @ keys.T * scale
                if seen is not None:
                    scores = scores.masked_fill(~seen[rows], -torch.inf)
                if mask is not None:
                    scores = scores.masked_fill(~mask[b, h, rows], -torch.inf)
                total = torch.logsumexp(scores, -1)
                weights = torch.where(total[:, None] == -torch.inf, 0.0, torch.exp(scores - total[:, None]))
                out[b, h, rows] = weights @ values
                lse[b, h, rows] = total
    return out, lse


def visible(
    seqlen_q: int, seqlen_k: int, causal: str, window: tuple[int, int] | None, device: torch.device | str = "cpu"
) -> Tensor | None:
    """(seqlen_q, seqlen_k), True where a query sees a key; None: everything."""
    if causal == "none" and window is None:
        return None
    offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    distance = torch.arange(seqlen_k, device=device) - torch.arange(seqlen_q, device=device)[:, None] - offset
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal != "none":
        seen &= distance <= 0
    if window is not None:
        if window[0] >= 0:
            seen &= distance >= -window[0]
        if window[1] >= 0:
            seen &= distance <= window[1]
    return seen


def classified_ref(seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(counts, lists, bits) of what each query sees, (batch, heads, seqlen_q, seqlen_k), on the CPU; laid out as
    `any_classify.py` says, with -1 and 0 where it leaves them undefined."""
    batch, heads, seqlen_q, seqlen_k = seen.shape
    blocks, tiles = -(-seqlen_q // BLOCK), -(-seqlen_k // TILE)
    counts = torch.zeros(batch, heads, blocks, 2, dtype=torch.int32)
    lists = torch.full((batch, heads, blocks, tiles), -1, dtype=torch.int32)
    bits = torch.zeros(batch, heads, blocks, tiles, BLOCK, 4, dtype=torch.int32)
    weights = 1 << torch.arange(32, dtype=torch.int64)
    for b in range(batch):
        for h in range(heads):
            for block in range(blocks):
                rows = seen[b, h, block * BLOCK : (block + 1) * BLOCK]
                full, partial = [], []
                for tile in range(tiles):
                    part = rows[:, tile * TILE : (tile + 1) * TILE]
                    if part.shape[1] == TILE and part.all():
                        full.append(tile)
                    elif part.any():
                        partial.append(tile)
                        padded = torch.zeros(BLOCK, TILE, dtype=torch.bool)
                        padded[: part.shape[0], : part.shape[1]] = part
                        words = (padded.view(BLOCK, 4, 32) * weights).sum(-1)
                        bits[b, h, block, tile] = torch.where(words >= 2**31, words - 2**32, words).int()
                counts[b, h, block] = torch.tensor([len(full), len(partial)])
                lists[b, h, block, : len(full)] = torch.tensor(full, dtype=torch.int32)
                lists[b, h, block, tiles - len(partial) :] = torch.tensor(partial[::-1], dtype=torch.int32)
    return counts, lists, bits
