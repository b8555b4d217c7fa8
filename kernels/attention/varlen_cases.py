"""Named inputs of attention over packed sequences, for certificates, tests and benchmarks.

The smallest set that visits each branch: every head dim and kind, sequences without queries, without keys and without
both, lengths around a tile's edge, used lengths, one sequence and many. Rows of no sequence hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .facts import AttentionFacts
from .reference import attention_ref, visible
from .varlen import attention_varlen, facts_of

BF16, FP16 = "bfloat16", "float16"


@dataclass(frozen=True, slots=True)
class VarlenCase:
    """One call; the log-sum-exp is asked for too where `lse`. Outputs are those of the sequences, behind each other."""

    lengths: tuple[int, ...]  #: of the sequences, in q
    heads: tuple[int, int]  #: of q; of k and v
    head_dim: int
    head_dim_v: int = 0  #: 0: the same
    lengths_k: tuple[int, ...] = ()  #: (): the same
    used: tuple[bool, bool] = (False, False)  #: whether room for 5 rows more lies behind each sequence, of q, of k
    dtype: str = BF16
    causal: str = "none"
    window: tuple[int, int] | None = None
    layout: str = "plain"  #: or "packed": slices of q, k and v in one tensor
    scale: float | None = None
    magnitude: float = 1.0  #: of q and k
    lse: bool = True
    index_dtype: str = "int32"

    @property
    def name(self) -> str:
        def brief(lengths: tuple[int, ...]) -> str:
            return "-".join(map(str, lengths[:6])) + (f"-and{len(lengths) - 6}" if len(lengths) > 6 else "")

        size = f"d{self.head_dim}" + (f"_{self.head_dim_v}" if self.head_dim_v else "")
        parts = [f"varlen_{self.dtype}", f"l{brief(self.lengths)}"]
        parts += [f"k{brief(self.lengths_k)}" if self.lengths_k else None, f"h{self.heads[0]}_{self.heads[1]}", size]
        parts += [None if self.causal == "none" else self.causal.replace("_", "")]
        parts += [None if self.window is None else f"window{self.window[0]}_{self.window[1]}"]
        parts += [f"used-{name}" if flag else None for name, flag in zip("qk", self.used, strict=True)]
        parts += [None if self.layout == "plain" else self.layout, None if self.lse else "nolse"]
        parts += [None if self.scale is None else f"scale{self.scale:g}"]
        parts += [None if self.magnitude == 1.0 else f"times{self.magnitude:g}"]
        parts += [None if self.index_dtype == "int32" else self.index_dtype]
        return "_".join(part for part in parts if part)

    @property
    def kernels(self) -> tuple[str, ...]:
        return ("sm90_fwd",)

    @property
    def call(self) -> str | None:
        """The yardstick is torch's scaled_dot_product_attention, sequence by sequence, see `portable`."""
        return None

    @property
    def dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v or self.head_dim

    @property
    def all_lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.lengths, self.lengths_k or self.lengths

    @property
    def facts(self) -> AttentionFacts:
        q, k, v = (
            torch.empty(17, heads, size, dtype=getattr(torch, self.dtype), device="meta")
            for heads, size in zip((self.heads[0], *self.heads[1:] * 2), (self.dims[0], *self.dims), strict=True)
        )
        longest = (max(lengths) for lengths in self.all_lengths)
        return facts_of(q, k, v, len(self.lengths), *longest, self.causal, self.window, self.lse)

    def starts(self, side: int) -> list[int]:
        """Of q (0) or of k and v (1): the first row of each sequence, and the end; two rows of nobody come first."""
        found = [2]
        for length in self.all_lengths[side]:
            found.append(found[-1] + length + (5 if self.used[side] else 0))
        return found

    def pieces(self, side: int) -> list[slice]:
        """The rows of each sequence."""
        return [slice(a, a + n) for a, n in zip(self.starts(side), self.all_lengths[side], strict=False)]

    def make(self, device: torch.device | str, generator: torch.Generator) -> dict[str, Any]:
        """q, k, v and the lengths, the same values for a generator on every device."""
        made: dict[str, Any] = {}
        totals = [self.starts(side)[-1] + 7 for side in (0, 1)]
        for name, side, heads, size in (
            ("q", 0, self.heads[0], self.dims[0]),
            ("k", 1, self.heads[1], self.dims[0]),
            ("v", 1, self.heads[1], self.dims[1]),
        ):
            values = torch.full((totals[side], heads, size), torch.nan)
            for piece in self.pieces(side):
                drawn = torch.randn(values[piece].shape, generator=generator)
                values[piece] = drawn * (1.0 if name == "v" else self.magnitude)
            made[name] = values.to(device, getattr(torch, self.dtype))
            if self.layout == "packed":
                holder = torch.full_like(made[name], torch.nan).repeat(1, 3, 1)
                made[name] = holder[:, heads : 2 * heads].copy_(made[name])
        dtype = getattr(torch, self.index_dtype)
        for side, letter in enumerate("qk"):
            made[f"cu_seqlens_{letter}"] = torch.tensor(self.starts(side), dtype=dtype, device=device)
            if self.used[side]:
                made[f"seqused_{letter}"] = torch.tensor(self.all_lengths[side], dtype=dtype, device=device)
        return made

    def run(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        q, k, v, lengths = inputs["q"], inputs["k"], inputs["v"], {n: t for n, t in inputs.items() if "_" in n}
        longest = [max(n) for n in self.all_lengths]
        found = attention_varlen(
            q, k, v, **lengths, max_seqlen_q=longest[0], max_seqlen_k=longest[1], causal=self.causal,
            window=self.window, scale=self.scale, return_lse=self.lse,
        )  # fmt: skip
        out, lse = found if isinstance(found, tuple) else (found, None)
        made = {"out": torch.cat([out[piece] for piece in self.pieces(0)])}
        return made if lse is None else {**made, "lse": torch.cat([lse[:, piece] for piece in self.pieces(0)], 1)}

    def oracle(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        return self.reference(inputs, torch.float64)

    def reference(self, inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
        def formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return attention_ref(q, k, v, causal=self.causal, window=self.window, scale=self.scale, dtype=dtype)

        out, lse = self.each(inputs, formula)
        return {"out": out, "lse": lse} if self.lse else {"out": out}

    def portable(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The yardstick: torch's own attention in the call's dtype, and for the log-sum-exp the formula in fp32."""
        group = self.heads[0] // self.heads[1]

        def theirs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            nothing = q.new_zeros(1, *q.shape[1:3])
            if k.shape[2] == 0 or q.shape[2] == 0:
                return q.new_zeros(*q.shape[:3], v.shape[3]), nothing
            seen = visible(q.shape[2], k.shape[2], self.causal, self.window, q.device)
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
            return (out if seen is None else torch.where(seen.any(-1, keepdim=True), out, 0.0)), nothing

        made = {"out": self.each(inputs, theirs)[0]}
        return {**made, "lse": self.reference(inputs, torch.float32)["lse"]} if self.lse else made

    def each(
        self, inputs: dict[str, Any], compute: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """(rows of all sequences, heads, head_dim_v) and (heads, rows), from (1, heads, rows, ...) of each."""
        outs, sums = [], []
        for one, other in zip(self.pieces(0), self.pieces(1), strict=True):
            parts = (
                inputs[name][piece].transpose(0, 1)[None] for name, piece in (("q", one), ("k", other), ("v", other))
            )
            out, lse = compute(*parts)
            outs.append(out[0].transpose(0, 1))
            sums.append(lse[0])
        return torch.cat(outs), torch.cat(sums, 1)


def _cases() -> tuple[VarlenCase, ...]:
    made = []
    base = VarlenCase((130, 0, 257, 1, 64), (4, 2), 128)
    for head_dim, head_dim_v in ((64, 0), (72, 0), (96, 0), (128, 0), (192, 128), (256, 0)):
        for causal, window in (("none", None), ("top_left", None), ("bottom_right", (70, 0))):
            made.append(replace(base, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal, window=window))
    for causal in ("none", "top_left", "bottom_right"):
        cross = replace(base, lengths_k=(40, 50, 0, 300, 127), causal=causal)
        made += [cross, replace(cross, used=(True, True)), replace(cross, used=(False, True), head_dim=64)]
    made.append(replace(base, used=(True, False), causal="top_left", window=(30, -1)))
    made.append(replace(base, dtype=FP16, lse=False, causal="bottom_right", index_dtype="int64"))
    made.append(replace(base, dtype=FP16, head_dim=256, lse=False, scale=0.3, magnitude=6.0))
    made.append(replace(base, layout="packed", causal="top_left", head_dim=72))
    made.append(replace(base, heads=(1, 1), lengths=(17,)))
    made.append(replace(base, heads=(6, 1), lengths=(0, 0, 5), causal="top_left"))
    made.append(replace(base, lengths=tuple(i * 37 % 200 for i in range(100)), causal="bottom_right"))
    made.append(VarlenCase((1024, 2048, 300, 2700), (8, 2), 128, causal="top_left"))
    return tuple(made)


VARLEN_CASES = _cases()
