"""Named inputs of decode, for certificates, tests and benchmarks.

The smallest set that visits each branch of the kernel: every head dim, row tile and mask kind, both dtypes, one block
and many, one split and many, lengths around a block's edge, rows and whole blocks without keys, layouts, large scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import attention
from .decode import decode
from .facts import AttentionFacts, read

BF16, FP16 = "bfloat16", "float16"
MASKS = ("none", "left", "static", "holes", "nothing", "window", "random", "per_q", "per_head", "full_rank")
LAYOUTS = ("cache", "static", "transposed", "packed")


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One call, with the log-sum-exp."""

    batch: int
    heads: tuple[int, int]  #: of q; of k and v
    seqlens: tuple[int, int]  #: of q; of k and v
    head_dim: int
    head_dim_v: int = 0  #: 0: the same
    dtype: str = BF16
    causal: str = "none"
    mask: str = "none"
    layout: str = "cache"
    scale: float | None = None
    magnitude: float = 1.0  #: of q and k
    lse: bool = True
    splits: int | None = None

    @property
    def name(self) -> str:
        size = f"d{self.head_dim}" + (f"_{self.head_dim_v}" if self.head_dim_v else "")
        parts = [f"decode_{self.dtype}", f"b{self.batch}", f"q{self.seqlens[0]}", f"k{self.seqlens[1]}"]
        parts += [f"h{self.heads[0]}_{self.heads[1]}", size]
        parts += [None if self.causal == "none" else self.causal.replace("_", "")]
        parts += [None if self.mask == "none" else f"mask-{self.mask}"]
        parts += [None if self.layout == "cache" else self.layout]
        parts += [None if self.magnitude == 1.0 else f"times{self.magnitude:g}"]
        parts += [None if self.scale is None else f"scale{self.scale:g}", None if self.lse else "nolse"]
        parts += [None if self.splits is None else f"splits{self.splits}"]
        return "_".join(part for part in parts if part)

    @property
    def kernels(self) -> tuple[str, ...]:
        return ("any_decode",)

    @property
    def call(self) -> str | None:
        """The yardstick is torch's scaled_dot_product_attention, see `portable`."""
        return None

    @property
    def dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v or self.head_dim

    @property
    def facts(self) -> AttentionFacts:
        made = self.make("meta", None)
        return read(made["q"], made["k"], made["v"], made.get("mask"), causal=self.causal, lse=self.lse)

    def make(self, device: torch.device | str, generator: torch.Generator | None) -> dict[str, Any]:
        """q, k, v and the mask, the same values for a generator on every device."""
        dtype = getattr(torch, self.dtype)
        made: dict[str, Any] = {}
        for name, heads, seqlen, size in (
            ("q", self.heads[0], self.seqlens[0], self.dims[0]),
            ("k", self.heads[1], self.seqlens[1], self.dims[0]),
            ("v", self.heads[1], self.seqlens[1], self.dims[1]),
        ):
            shape = (self.batch, heads, seqlen, size)
            if torch.device(device).type == "meta":
                values = torch.empty(shape, device="meta", dtype=dtype)
            else:
                values = torch.randn(shape, generator=generator) * (1.0 if name == "v" else self.magnitude)
            made[name] = laid_out(values.to(device, dtype), self.layout, name == "q")
        if self.mask != "none":
            made["mask"] = mask_of(self.mask, self.batch, self.heads[0], *self.seqlens).to(device)
        return made

    def run(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        q, k, v, mask = inputs["q"], inputs["k"], inputs["v"], inputs.get("mask")
        if self.splits is None:
            causal = self.causal if self.causal != "none" else False
            found = attention(q, k, v, mask=mask, causal=causal, scale=self.scale, return_lse=self.lse)
        else:
            found = decode(q, k, v, mask=mask, causal=self.causal, scale=self.scale, lse=self.lse, splits=self.splits)
        out, lse = found if isinstance(found, tuple) else (found, None)
        return {"out": out} if lse is None else {"out": out, "lse": lse}

    def oracle(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        return self.formula(inputs, torch.float64)

    def formula(self, inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
        """The same names by the formula, softmax and all, in `dtype`."""
        q, k, v = (inputs[name].to(dtype) for name in ("q", "k", "v"))
        group = self.heads[0] // self.heads[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(2, 3) * (self.head_dim**-0.5 if self.scale is None else self.scale)
        seen = self.visible(inputs)
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
        return {"out": weights @ v, "lse": lse} if self.lse else {"out": weights @ v}

    def visible(self, inputs: dict[str, Any]) -> Tensor | None:
        """(1 or batch, 1 or heads, 1 or q, k), True where a query sees a key; None: everything."""
        seqlen_q, seqlen_k = self.seqlens
        seen = inputs.get("mask")
        if self.causal != "none":
            offset = 0 if self.causal == "top_left" else seqlen_k - seqlen_q
            device = inputs["q"].device
            keys = torch.arange(seqlen_k, device=device)
            diagonal = (keys <= torch.arange(seqlen_q, device=device)[:, None] + offset)[None, None]
            seen = diagonal if seen is None else seen & diagonal
        return seen

    def portable(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The yardstick: torch's own attention in the call's dtype, and for the log-sum-exp the formula in fp32."""
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        group = self.heads[0] // self.heads[1]
        if self.seqlens[1] == 0:
            out = q.new_zeros(*q.shape[:3], v.shape[3])
        else:
            k, v, seen = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), self.visible(inputs)
            # Torch's own kernels take a mask with contiguous rows only; for others it falls back to fp32 throughout.
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=None if seen is None else seen.contiguous(), scale=self.scale
            )
            if seen is not None:  # some of torch's backends make NaN of rows without keys
                out = torch.where(seen.any(-1, keepdim=True), out, 0.0)
        return {"out": out, "lse": self.formula(inputs, torch.float32)["lse"]} if self.lse else {"out": out}


def laid_out(values: Tensor, layout: str, is_q: bool) -> Tensor:
    """(batch, heads, seqlen, head_dim) values as caches lie in memory; NaN around them.

    "cache": contiguous; "static": of a longer cache; "transposed": (batch, seqlen, heads, head_dim); "packed":
    one of three slices of a (batch, seqlen, 3, heads, head_dim) tensor.
    """
    batch, heads, seqlen, size = values.shape
    if layout == "cache" or (layout == "static" and is_q):
        return values
    if layout == "static":
        view = values.new_full((batch, heads, seqlen + 37, size), torch.nan)[:, :, :seqlen]
    elif layout == "transposed":
        view = values.new_full((batch, seqlen, heads, size), torch.nan).transpose(1, 2)
    elif layout == "packed":
        view = values.new_full((batch, seqlen, 3, heads, size), torch.nan)[:, :, 1].transpose(1, 2)
    else:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return view.copy_(values)


def mask_of(kind: str, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """A boolean mask of a family that models build, True: attend; the same one every time."""
    keys, rows = torch.arange(seqlen_k), torch.arange(batch)[:, None]
    draw = torch.Generator().manual_seed(seqlen_k)
    if kind == "left":  # left padding, more for every batch entry
        return (keys >= rows * 37 % max(seqlen_k, 1))[:, None, None]
    if kind == "static":  # a static cache that is filled to two thirds
        return (keys < max(1, 2 * seqlen_k // 3))[None, None, None].expand(batch, 1, 1, seqlen_k)
    if kind == "holes":  # whole blocks without a key between blocks with a few
        return ((keys // 100 % 3 == 1) & (keys % 7 == 0)).expand(batch, -1)[:, None, None]
    if kind == "nothing":  # every other batch entry sees no key at all
        return (rows % 2 == 1).expand(batch, seqlen_k)[:, None, None]
    if kind == "window":
        distance = keys - (seqlen_k - seqlen_q) - torch.arange(seqlen_q)[:, None]
        return ((distance <= 0) & (distance > -200))[None, None]
    if kind == "random":
        return torch.rand(batch, 1, 1, seqlen_k, generator=draw) < 0.5
    if kind == "per_q":  # the first row sees nothing
        seen = torch.rand(batch, 1, seqlen_q, seqlen_k, generator=draw) < 0.3
        return seen & (torch.arange(seqlen_q) > 0)[:, None]
    if kind == "per_head":
        return torch.rand(1, heads, 1, seqlen_k, generator=draw) < 0.3
    if kind == "full_rank":  # not contiguous in its keys
        return (torch.rand(seqlen_k, batch, heads, seqlen_q, generator=draw) < 0.3).permute(1, 2, 3, 0)
    raise ValueError(f"mask must be one of {', '.join(MASKS)}, got {kind!r}")


def _cases() -> tuple[DecodeCase, ...]:
    made = []
    base = DecodeCase(3, (8, 2), (1, 1500), 128)
    for head_dim, head_dim_v in ((64, 0), (80, 0), (96, 0), (128, 0), (192, 128), (256, 0)):
        for dtype in (BF16, FP16):
            for mask in ("none", "left", "per_q"):
                made.append(replace(base, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, mask=mask))
        for heads, seqlen_q in (((8, 2), 4), ((16, 2), 4), ((16, 2), 8), ((4, 4), 16)):
            made.append(
                replace(
                    base,
                    head_dim=head_dim,
                    head_dim_v=head_dim_v,
                    heads=heads,
                    seqlens=(seqlen_q, 1500),
                    causal="bottom_right",
                )
            )
    for seqlen_k in (0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 257, 1021, 4099):
        made.append(replace(base, seqlens=(1, seqlen_k)))
        made.append(replace(base, seqlens=(3, seqlen_k), causal="bottom_right"))
        made.append(replace(base, seqlens=(2, seqlen_k), mask="random"))
    for mask in MASKS[1:]:
        made.append(replace(base, mask=mask))
        made.append(replace(base, mask=mask, seqlens=(5, 3001), causal="bottom_right" if mask == "random" else "none"))
        made.append(replace(base, mask=mask, seqlens=(16, 700), heads=(8, 2), head_dim=64))
    for layout in LAYOUTS[1:]:
        made.append(replace(base, layout=layout))
        made.append(replace(base, layout=layout, mask="left", head_dim=256))
    for splits in (1, 2, 3, 7, 33):
        made.append(replace(base, splits=splits, seqlens=(4, 2000), causal="bottom_right"))
        made.append(replace(base, splits=splits, seqlens=(1, 2000), mask="holes"))
    long = replace(base, batch=2, seqlens=(1, 9001))
    for splits in (17, 64, 100, 129, 300):  # many partial results: added up at once, and in bundles
        made.append(replace(long, splits=splits, heads=(16, 2)))
        made.append(replace(long, splits=splits, heads=(16, 2), head_dim=256))
        made.append(replace(long, splits=splits, seqlens=(4, 9001), causal="bottom_right"))
        made.append(replace(long, splits=splits, mask="holes", head_dim=64))
        made.append(replace(long, splits=splits, mask="nothing"))
    made.append(replace(long, splits=200, mask="per_q", seqlens=(4, 3000)))
    made.append(replace(long, splits=200, mask="left", seqlens=(1, 3000), dtype=FP16))
    for heads, head_dim in (((8, 1), 128), ((16, 2), 256), ((28, 4), 128)):
        for seqlen_k in (9000, 33000):
            made.append(replace(base, batch=1, heads=heads, head_dim=head_dim, seqlens=(1, seqlen_k)))
    for heads in ((1, 1), (3, 3), (32, 2), (40, 1), (64, 1)):
        made.append(replace(base, heads=heads))
    for magnitude in (8.0, 100.0):
        made.append(replace(base, magnitude=magnitude))
    made.append(replace(base, causal="top_left", seqlens=(16, 16)))
    made.append(replace(base, scale=0.5, lse=False))
    made.append(replace(base, batch=400, seqlens=(1, 300)))
    made.append(replace(base, batch=1, heads=(8, 1), seqlens=(1, 200001)))
    return tuple(dict.fromkeys(made))


DECODE_CASES = _cases()
