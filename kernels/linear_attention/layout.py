"""Tokens to chunks and back: which token goes to which row of which chunk, for equal and for packed sequences.

Chunks are stored step-major: first the first chunk of every sequence, then the second chunk of every sequence that has
one, and so on, longest sequences first. So the chunks that the scan handles in step i are one contiguous slice, the
sequences still running are a prefix of the state tensor, and no chunk exists that holds no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

#: Tokens per chunk, at most. A power of two, as the dyadic pair products need.
MAX_CHUNK = 64


@dataclass(frozen=True)
class ChunkLayout:
    """Where B sequences of T tokens (or the packed sequences of `cu_seqlens`) live in chunks of `chunk` tokens."""

    batch: int
    tokens: int
    chunk: int
    active: tuple[int, ...]  #: how many sequences have an i-th chunk; never increases
    order: Tensor | None = None  #: [N] packed only: the sequences, longest first
    slots: Tensor | None = None  #: [covered] packed only: each covered token's place among all chunk rows
    covered: slice | None = None  #: packed only: the tokens that belong to a sequence

    @property
    def sequences(self) -> int:
        return self.batch if self.order is None else self.order.shape[0]

    @property
    def chunks(self) -> int:
        return sum(self.active)

    def steps(self, heads: int) -> list[slice]:
        """The rows of [chunks * heads, ...] that each step of the scan handles."""
        bounds, start = [], 0
        for active in self.active:
            bounds.append(slice(start * heads, (start + active) * heads))
            start += active
        return bounds

    def to_chunks(self, x: Tensor) -> Tensor:
        """[B, T, heads, D] -> [chunks, heads, chunk, D], contiguous; zeros where there is no token; may be a view."""
        heads, dim = x.shape[2:]
        if self.slots is not None:
            rows = x.new_zeros(self.chunks * self.chunk, heads, dim).index_copy_(0, self.slots, x[0, self.covered])
            return rows.view(self.chunks, self.chunk, heads, dim).transpose(1, 2).contiguous()
        if self.tokens == 1:
            return x.transpose(1, 2).contiguous()
        steps = len(self.active)
        if steps * self.chunk > self.tokens:
            x = F.pad(x, (0, 0, 0, 0, 0, steps * self.chunk - self.tokens))
        x = x.unflatten(1, (steps, self.chunk)).permute(1, 0, 3, 2, 4)
        return x.reshape(self.chunks, heads, self.chunk, dim).contiguous()

    def to_tokens(self, rows: Tensor) -> Tensor:
        """[chunks, heads, chunk, D] -> [B, T, heads, D], contiguous: the inverse, zeros for tokens of no sequence."""
        heads, dim = rows.shape[1], rows.shape[3]
        if self.slots is not None:
            x = rows.new_zeros(1, self.tokens, heads, dim)
            by_token = rows.transpose(1, 2).reshape(self.chunks * self.chunk, heads, dim)
            x[0, self.covered] = by_token.index_select(0, self.slots)
            return x
        if self.tokens == 1:
            return rows.transpose(1, 2).contiguous()
        steps = len(self.active)
        x = rows.view(steps, self.batch, heads, self.chunk, dim).permute(1, 0, 3, 2, 4)
        return x.reshape(self.batch, steps * self.chunk, heads, dim)[:, : self.tokens].contiguous()

    def sort_states(self, state: Tensor) -> Tensor:
        """[N, ...] in the caller's order -> a new contiguous tensor, longest sequence first."""
        if self.order is None:
            return state.clone(memory_format=torch.contiguous_format)
        return state.index_select(0, self.order)

    def unsort_states(self, state: Tensor) -> Tensor:
        """[N, ...] longest sequence first -> the caller's order."""
        return state if self.order is None else torch.empty_like(state).index_copy_(0, self.order, state)


@dataclass(frozen=True)
class HeadRows:
    """Tokens as rows [M, C, D], M = chunks x value heads; a query/key head serves `groups` value heads."""

    layout: ChunkLayout
    heads: int
    groups: int

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, HV, D] -> [M, C, D]; may be a view."""
        return self.layout.to_chunks(x).flatten(0, 1)

    def pack_qk(self, x: Tensor) -> Tensor:
        """[B, T, H, K] -> [M, C, K]: repeated for each value head that a query/key head serves."""
        return self.pack(x if self.groups == 1 else x.repeat_interleave(self.groups, 2))

    def unpack(self, rows: Tensor) -> Tensor:
        """[M, C, D] -> [B, T, HV, D]"""
        return self.layout.to_tokens(rows.view(self.layout.chunks, self.heads, self.layout.chunk, rows.shape[2]))

    def unpack_qk(self, rows: Tensor) -> Tensor:
        """[M, C, K] -> [B, T, H, K], summed over the value heads that a query/key head serves."""
        x = self.unpack(rows)
        return x if self.groups == 1 else x.unflatten(2, (self.heads // self.groups, self.groups)).sum(3)

    def steps(self) -> list[slice]:
        """The rows that each step of the scan handles."""
        return self.layout.steps(self.heads)


def chunk_layout(batch: int, tokens: int, cu_seqlens: Tensor | None, chunk: int | None = None) -> ChunkLayout:
    """The layout of `batch` sequences of `tokens` tokens, or of the packed sequences that `cu_seqlens` [N+1] delimits.

    `chunk` None takes the smallest that suits the longest sequence. Reads `cu_seqlens` on the host. Raises ValueError
    where it decreases or leaves [0, tokens].
    """
    if cu_seqlens is None:
        chunk = chunk or chunk_size(tokens)
        return ChunkLayout(batch, tokens, chunk, active=(batch,) * -(-tokens // chunk))
    bounds = cu_seqlens.to(torch.int64)
    lengths = bounds.diff()
    limits = bounds.tolist()
    check_bounds(limits, tokens)
    longest = int(lengths.max()) if lengths.numel() else 0
    chunk = chunk or chunk_size(longest)
    chunks = (lengths + (chunk - 1)).div(chunk, rounding_mode="floor")
    order = torch.argsort(chunks, descending=True, stable=True)
    steps = torch.arange(-(-longest // chunk), device=bounds.device)
    active = (chunks[:, None] > steps).sum(0)
    first_chunk = active.cumsum(0) - active
    rank = torch.empty_like(order).index_copy_(0, order, torch.arange(order.shape[0], device=bounds.device))
    sequence = torch.repeat_interleave(torch.arange(lengths.shape[0], device=bounds.device), lengths)
    position = torch.arange(limits[0], limits[-1], device=bounds.device) - bounds[sequence]
    slots = (first_chunk[position // chunk] + rank[sequence]) * chunk + position % chunk
    return ChunkLayout(batch, tokens, chunk, tuple(active.tolist()), order, slots, slice(limits[0], limits[-1]))


def chunk_size(longest: int) -> int:
    """The smallest power of two that holds `longest` tokens, at most MAX_CHUNK."""
    return min(MAX_CHUNK, 1 << max(longest - 1, 0).bit_length())


def check_bounds(limits: list[int], tokens: int) -> None:
    """Raise ValueError unless the sequence bounds `limits` never decrease and stay inside [0, tokens]."""
    if any(b < a for a, b in pairwise(limits)):
        raise ValueError(f"cu_seqlens must not decrease, got {limits}")
    if limits[0] < 0 or limits[-1] > tokens:
        raise ValueError(f"cu_seqlens must stay within 0 and T={tokens}, got {limits[0]} to {limits[-1]}")
