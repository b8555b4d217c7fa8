"""Named inputs of the attention family, for certificates, tests and benchmarks.

The smallest set that visits each branch of the kernel: every head dim and tile shape, both dtypes, every mask kind, one
step and many, tails of queries and keys, tile edges and their neighbours, no keys, rows that see none, every head
grouping, layouts, large scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.outcome import Choice, Declined

from . import attention, launch
from .decode_cases import DECODE_CASES, DecodeCase
from .facts import AttentionFacts, read
from .mask_cases import MASKS, mask_of
from .plan import plan
from .reference import attention_ref, visible
from .varlen_cases import VARLEN_CASES, VarlenCase

BF16, FP16 = "bfloat16", "float16"
LAYOUTS = ("bhsd", "bshd", "packed", "rows")


@dataclass(frozen=True, slots=True)
class Case:
    """One forward call; the log-sum-exp is asked for too where `lse`."""

    batch: int
    heads: tuple[int, int]  #: of q; of k and v
    seqlens: tuple[int, int]  #: of q; of k and v
    head_dim: int
    head_dim_v: int = 0  #: 0: the same
    dtype: str = BF16
    causal: str = "none"
    window: tuple[int, int] | None = None
    layout: str = "bshd"  #: in memory: as transposed views, as they are, slices of packed q, k, v, or with padded rows
    scale: float | None = None
    magnitude: float = 1.0  #: of q and k
    lse: bool = True
    mask: str = "none"  #: see mask_cases.MASKS
    #: Run sm80_fwd as it is on this arch, compiled for the GPU at hand, where the plan would choose another kernel.
    as_arch: str = ""

    @property
    def name(self) -> str:
        size = f"d{self.head_dim}" + (f"_{self.head_dim_v}" if self.head_dim_v else "")
        parts = [f"attention_{self.dtype}", f"b{self.batch}", f"l{self.seqlens[0]}"]
        parts += [f"k{self.seqlens[1]}" if self.seqlens[1] != self.seqlens[0] else None]
        parts += [f"h{self.heads[0]}" + (f"_{self.heads[1]}" if self.heads[1] != self.heads[0] else ""), size]
        parts += [None if self.causal == "none" else self.causal.replace("_", "")]
        parts += [None if self.window is None else f"window{self.window[0]}_{self.window[1]}"]
        parts += [
            None if self.mask == "none" else f"mask-{self.mask}",
            None if self.layout == "bshd" else self.layout,
            None if self.magnitude == 1.0 else f"times{self.magnitude:g}",
        ]
        parts += [None if self.scale is None else f"scale{self.scale:g}", None if self.lse else "nolse"]
        return "_".join(part for part in (*parts, self.as_arch and f"as-{self.as_arch}") if part)

    @property
    def kernels(self) -> tuple[str, ...]:
        kernel = "sm80_fwd" if self.as_arch else "sm90_fwd"
        return (kernel,) if self.mask == "none" else (kernel, "any_classify")

    def choice(self, arch: str) -> Choice | Declined:
        """What runs this case on dispatch arch `arch`: what the plan chooses, or the kernel of another arch."""
        if not self.as_arch:
            return plan(self.facts, arch)
        if arch != "sm_90":
            return Declined(f"the plan itself chooses sm80_fwd on {arch}")
        decision = plan(self.facts, self.as_arch)
        if isinstance(decision, Declined) or decision.kernel != "sm80_fwd":
            raise ValueError(f"no case for sm80_fwd: {self.name}, {decision}")
        return decision

    @property
    def call(self) -> str | None:
        """The yardstick is torch's scaled_dot_product_attention, see `portable`."""
        return None

    @property
    def dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v or self.head_dim

    @property
    def facts(self) -> AttentionFacts:
        mask = None if self.mask == "none" else mask_of(self.mask, *self.shape)
        q, k, v = (
            torch.empty(self.batch, heads, seqlen, size, dtype=getattr(torch, self.dtype), device="meta")
            for heads, seqlen, size in zip(
                (self.heads[0], self.heads[1], self.heads[1]),
                (self.seqlens[0], self.seqlens[1], self.seqlens[1]),
                (self.dims[0], *self.dims),
                strict=True,
            )
        )
        return replace(read(q, k, v, mask, causal=self.causal, lse=self.lse), window=self.window)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the scores."""
        return self.batch, self.heads[0], *self.seqlens

    def make(self, device: torch.device | str, generator: torch.Generator) -> dict[str, Any]:
        """q, k, v and the mask, the same values for a generator on every device."""
        dtype = getattr(torch, self.dtype)
        made: dict[str, Any] = {}
        for name, heads, seqlen, size in (
            ("q", self.heads[0], self.seqlens[0], self.dims[0]),
            ("k", self.heads[1], self.seqlens[1], self.dims[0]),
            ("v", self.heads[1], self.seqlens[1], self.dims[1]),
        ):
            values = torch.randn(self.batch, heads, seqlen, size, generator=generator)
            values = values * (1.0 if name == "v" else self.magnitude)
            made[name] = laid_out(values.to(device, dtype), self.layout)
        if self.mask != "none":
            made["mask"] = mask_of(self.mask, *self.shape, device)
        return made

    def run(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        if self.as_arch:
            return self.run_older(inputs)
        found = attention(
            inputs["q"], inputs["k"], inputs["v"], mask=inputs.get("mask"),
            causal=self.causal if self.causal != "none" else False,
            window=self.window, scale=self.scale, return_lse=self.lse,
        )  # fmt: skip
        return {"out": found[0], "lse": found[1]} if isinstance(found, tuple) else {"out": found}

    def run_older(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """By the kernel of `as_arch`, past the plan."""
        decision = self.choice("sm_90")
        assert isinstance(decision, Choice)
        out, lse = launch.forward(
            decision.config,  # type: ignore[arg-type]
            inputs["q"], inputs["k"], inputs["v"], mask=inputs.get("mask"),
            causal=self.causal, window=self.window, scale=self.scale,
        )  # fmt: skip
        return {"out": out} if lse is None else {"out": out, "lse": lse}

    def oracle(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        return self.reference(inputs, torch.float64)

    def reference(self, inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
        out, lse = attention_ref(
            inputs["q"], inputs["k"], inputs["v"], mask=inputs.get("mask"),
            causal=self.causal, window=self.window, scale=self.scale, dtype=dtype,
        )  # fmt: skip
        return {"out": out, "lse": lse} if self.lse else {"out": out}


def portable(case: Case | DecodeCase | VarlenCase, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The yardstick: torch's own attention in the call's dtype, and for the log-sum-exp the formula in fp32."""
    if isinstance(case, DecodeCase | VarlenCase):
        return case.portable(inputs)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    group = case.heads[0] // case.heads[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen, mask = visible(*case.seqlens, case.causal, case.window, q.device), inputs.get("mask")
    if case.seqlens[1] == 0:
        out = q.new_zeros(*q.shape[:3], v.shape[3])
    elif mask is not None:
        # Torch's own kernels take a mask with contiguous rows only; for others it falls back to fp32 throughout.
        seen = (mask if seen is None else mask & seen).contiguous()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=case.scale)
        out = torch.where(
            seen.any(-1, keepdim=True), out, 0.0
        )  # some of torch's backends make NaN of rows without keys
    elif seen is None or (case.causal == "top_left" and case.window is None):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=seen is not None, scale=case.scale)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=case.scale)
    found = {"out": out}
    if case.lse:
        found["lse"] = case.reference(inputs, torch.float32)["lse"]
    return found


def laid_out(values: Tensor, layout: str) -> Tensor:
    """(batch, heads, seqlen, head_dim) values in a tensor of the given layout, with NaN around them."""
    batch, heads, seqlen, size = values.shape
    if layout == "bhsd":
        return values
    if layout == "bshd":
        view = values.new_full((batch, seqlen, heads, size), torch.nan).transpose(1, 2)
    elif layout == "packed":
        holder = values.new_full((batch, seqlen, 3, heads, size), torch.nan)
        view = holder[:, :, 1].transpose(1, 2)
    elif layout == "rows":
        holder = values.new_full((batch, heads, seqlen + 2, size + 8), torch.nan)
        view = holder[:, :, 1 : seqlen + 1, :size]
    else:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    view.copy_(values)
    return view


def _cases() -> tuple[Case, ...]:
    made = []
    base = Case(2, (4, 2), (300, 300), 128)
    for head_dim, head_dim_v in ((64, 0), (72, 0), (80, 0), (96, 0), (128, 0), (192, 128), (256, 0)):
        for causal in ("none", "top_left"):
            made.append(replace(base, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal))
        made.append(replace(base, head_dim=head_dim, head_dim_v=head_dim_v, causal="bottom_right", window=(70, 0)))
    for head_dim in (8, 24, 40, 112, 136, 160, 192, 248):
        made.append(replace(base, head_dim=head_dim, causal="top_left"))
    for head_dim in (64, 128, 256):
        made.append(replace(base, head_dim=head_dim, dtype=FP16, causal="top_left"))
        made.append(replace(base, head_dim=head_dim, dtype=FP16, lse=False))
    for seqlen in (17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257):
        made.append(replace(base, seqlens=(seqlen, seqlen), causal="top_left"))
        made.append(replace(base, seqlens=(seqlen, seqlen)))
    for seqlens in ((100, 1), (100, 0), (77, 500), (500, 77), (130, 1031), (1031, 130), (64, 4096)):
        for causal in ("none", "top_left", "bottom_right"):
            made.append(replace(base, seqlens=seqlens, causal=causal))
    for window in ((0, 0), (5, 5), (128, 0), (-1, 3), (200, -1), (1000, 1000)):
        made.append(replace(base, seqlens=(300, 450), window=window))
        made.append(replace(base, seqlens=(450, 300), causal="top_left", window=window))
    for heads in ((1, 1), (3, 3), (8, 1), (6, 2)):
        made.append(replace(base, heads=heads, causal="top_left"))
    for layout in LAYOUTS:
        made.append(replace(base, layout=layout, causal="top_left"))
        made.append(replace(base, layout=layout, head_dim=72))
    for magnitude in (8.0, 100.0):
        made.append(replace(base, magnitude=magnitude, causal="top_left"))
    made.append(replace(base, scale=0.5))
    made.append(replace(base, batch=1, heads=(1, 1), layout="bhsd"))
    made.append(Case(2, (8, 2), (2048, 2048), 128, causal="top_left"))
    made.append(Case(2, (8, 8), (2048, 2048), 64, causal="top_left"))
    made.append(Case(1, (4, 2), (2048, 2048), 256, causal="top_left"))
    made.append(Case(1, (4, 4), (4352, 4352), 128))
    for head_dim, head_dim_v in ((64, 0), (72, 0), (96, 0), (128, 0), (192, 128), (256, 0)):
        for mask in ("left_causal", "blocks"):
            made.append(replace(base, head_dim=head_dim, head_dim_v=head_dim_v, seqlens=(300, 450), mask=mask))
    for head_dim, mask in ((128, "random"), (256, "blocks"), (64, "keys")):
        made.append(replace(base, head_dim=head_dim, mask=mask, dtype=FP16, lse=False))
    for mask in MASKS:
        made.append(replace(base, seqlens=(300, 1100), mask=mask))
        made.append(replace(base, seqlens=(1100, 300), mask=mask, causal="bottom_right"))
    for mask in ("keys", "blocks", "per_head"):
        for causal, window in (("top_left", None), ("none", (150, 40)), ("top_left", (200, -1))):
            made.append(replace(base, seqlens=(400, 640), mask=mask, causal=causal, window=window))
    for seqlens in ((17, 33), (128, 128), (129, 127), (100, 1), (100, 0), (64, 4096)):
        made.append(replace(base, seqlens=seqlens, mask="random"))
    made.append(Case(2, (8, 2), (2048, 2048), 128, mask="left_causal"))
    made.append(Case(1, (8, 2), (2048, 2048), 128, mask="packed"))
    made.append(Case(1, (4, 2), (512, 8192), 128, mask="window"))
    return tuple(dict.fromkeys(made))


def _sm80_cases() -> tuple[Case, ...]:
    """All forward cases by sm80_fwd as on sm_80, and those of short sequences as on the archs with other tiles."""
    made = [replace(case, as_arch="sm_80") for case in FWD_CASES]
    few = [case for case in FWD_CASES if max(case.seqlens) < 500 and case.layout == "bshd" and case.magnitude == 1.0]
    for arch, every in (("sm_86", 2), ("sm_100", 3)):
        made += [replace(case, as_arch=arch) for case in few[::every]]
    return tuple(made)


FWD_CASES = _cases()
SM80_CASES = _sm80_cases()
CASES: tuple[Case | DecodeCase | VarlenCase, ...] = (*FWD_CASES, *SM80_CASES, *VARLEN_CASES, *DECODE_CASES)
