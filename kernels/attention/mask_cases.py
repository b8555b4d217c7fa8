"""Boolean masks of the families that models build, for the attention cases: as values and as they lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

#: "left_causal": left padding under causality; "right": right padding; "window": a sliding window; "packed": sequences
#: behind each other, each causal; "keys": (batch, 1, 1, k), keys missing in the middle; "blocks": tiles of all kinds
#: side by side and rows that see nothing; "random"; "nothing": nobody sees anything; "per_head"; "head_keys": keys by
#: head; "expanded": of one batch entry and one head, stride 0; "odd": rows that start anywhere; "transposed": keys that
#: are not contiguous
MASKS = (
    "left_causal", "right", "window", "packed", "keys", "blocks", "random", "nothing", "per_head", "head_keys",
    "expanded", "odd", "transposed",
)  # fmt: skip


def mask_of(
    kind: str, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device | str = "cpu"
) -> Tensor:
    """(batch or 1, heads or 1, seqlen_q or 1, seqlen_k), True: attend; the same values every time, on every device."""
    keys, rows = torch.arange(seqlen_k), torch.arange(seqlen_q)[:, None]
    entries = torch.arange(batch)[:, None, None, None]
    diagonal = rows + seqlen_k - seqlen_q
    draw = torch.Generator().manual_seed(seqlen_q + seqlen_k)
    if kind == "left_causal":
        seen = (keys <= diagonal) & (keys >= entries * 137 % max(seqlen_k, 1))
    elif kind == "right":
        seen = (keys < seqlen_k - entries * 137 % max(seqlen_k, 1)).expand(batch, 1, seqlen_q, seqlen_k)
    elif kind == "window":
        seen = ((keys <= diagonal) & (keys > diagonal - 200))[None, None]
    elif kind == "packed":
        seen = ((keys <= diagonal) & (keys // 150 == diagonal // 150))[None, None]
    elif kind == "keys":
        middle = (keys < seqlen_k // 3) | (keys >= seqlen_k // 3 + 100 * entries)
        seen = (middle & (keys % 50 != 7)).expand(batch, 1, 1, seqlen_k)
    elif kind == "nothing":
        seen = torch.zeros(batch, 1, seqlen_q, seqlen_k, dtype=torch.bool)
    elif kind == "head_keys":
        seen = torch.rand(1, heads, 1, seqlen_k, generator=draw) < 0.5
    else:
        shape = (1 if kind == "expanded" else batch, heads if kind == "per_head" else 1, seqlen_q, seqlen_k)
        seen = torch.rand(shape, generator=draw) < 0.3
        if kind != "random":
            tiles = torch.randint(0, 3, (*shape[:2], seqlen_q // 128 + 1, seqlen_k // 128 + 1), generator=draw)
            tiles = tiles.repeat_interleave(128, 2)[:, :, :seqlen_q].repeat_interleave(128, 3)[..., :seqlen_k]
            seen = (tiles == 1) | ((tiles == 2) & seen)
            seen[:, :, seqlen_q // 2] = False
    return in_memory(kind, seen.to(device), batch, heads)


def in_memory(kind: str, seen: Tensor, batch: int, heads: int) -> Tensor:
    """The values in a tensor with the strides that the kind is about."""
    if kind == "expanded":
        return seen.expand(batch, heads, -1, -1)
    if kind == "odd":
        view = seen.new_ones(*seen.shape[:3], seen.shape[3] + 3)[..., 1:-2]
    elif kind == "transposed":
        view = seen.new_ones(*seen.shape[:2], seen.shape[3], seen.shape[2]).mT
    else:
        return seen.contiguous()
    return view.copy_(seen)
