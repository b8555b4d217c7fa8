"""Named inputs of the causal convolution, for certificates, tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import causal_conv1d, causal_conv1d_update, launch
from . import portable as plain
from .facts import ConvFacts
from .plan import FORWARD, UPDATE
from .reference import causal_conv1d_reference

Inputs = dict[str, Any]
Outputs = dict[str, Tensor]
BF16, FP16, FP32 = "bfloat16", "float16", "float32"


@dataclass(frozen=True, slots=True)
class Case:
    """One call. Without `packed` all sequences have one length and are the batch."""

    lengths: tuple[int, ...]
    channels: int
    dtype: str = BF16
    width: int = 4
    bias: bool = False
    activation: str | None = "silu"
    mode: str = "forward"
    packed: bool = False
    layout: str = "channels"  #: channels | time (unit stride along tokens) | split (a slice of wider rows)
    initial: int = 0  #: tokens of the initial state; update: of the state
    final: bool = False

    @property
    def name(self) -> str:
        shape = "+".join(map(str, self.lengths)) if self.packed else f"{len(self.lengths)}x{self.lengths[0]}"
        parts = [
            f"causal_conv1d_{self.mode}_{self.dtype}_{shape}_c{self.channels}_w{self.width}",
            "bias" if self.bias else "",
            self.activation or "linear",
            "" if self.layout == "channels" else self.layout,
            f"state{self.initial}" if self.initial else "",
            "final" if self.final else "",
        ]
        return "_".join(part for part in parts if part)

    @property
    def kernels(self) -> tuple[str, ...]:
        return (FORWARD if self.mode == "forward" else UPDATE,)

    @property
    def call(self) -> str | None:
        """Upstream's function has no states and no packed sequences."""
        if self.mode == "update":
            return "causal_conv1d_update"
        return None if self.packed or self.initial or self.final else "causal_conv1d_fn"

    @property
    def in_place(self) -> bool:
        return self.mode == "update"

    @property
    def facts(self) -> ConvFacts:
        return ConvFacts(
            self.mode,
            self.dtype,
            self.dtype,
            self.channels,
            self.width,
            self.activation,
            self.bias,
            self.layout != "time",
            self.dtype if self.initial else None,
            self.initial,
            self.final,
            self.packed,
        )

    def make(self, device: torch.device | str, generator: torch.Generator) -> Inputs:
        dtype = getattr(torch, self.dtype)
        batch, tokens = (1, sum(self.lengths)) if self.packed else (len(self.lengths), self.lengths[0])

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        x = draw(batch, tokens, self.channels).to(device, dtype)
        if self.layout == "time":
            x = x.mT.contiguous().mT
        elif self.layout == "split":
            x = torch.cat([x, torch.full_like(x, torch.nan)[..., :16]], 2)[..., : self.channels]
        made: Inputs = {"x": x, "weight": (draw(self.channels, self.width) * 0.5).to(device, dtype)}
        if self.bias:
            made["bias"] = draw(self.channels).to(device, dtype)
        if self.initial:
            made["state"] = draw(len(self.lengths), self.channels, self.initial).to(device, dtype)
        if self.packed:
            ends = torch.tensor((0, *self.lengths)).cumsum(0)
            made["cu_seqlens"] = ends.to(device, torch.int32 if len(self.lengths) % 2 else torch.int64)
        return made

    def run(self, inputs: Inputs) -> Outputs:
        """Through the public ops; on a GPU only by the kernels."""
        x, weight, bias, state = inputs["x"], inputs["weight"], inputs.get("bias"), inputs.get("state")
        if self.mode == "update":
            assert state is not None
            if x.is_cuda:
                return {"y": launch.update(x.mT, state, weight, bias, self.activation), "state": state}
            return {"y": causal_conv1d_update(x, state, weight, bias, activation=self.activation), "state": state}
        cu_seqlens = inputs.get("cu_seqlens")
        if x.is_cuda:
            y, final = launch.forward(x, weight, bias, self.activation, state, self.final, cu_seqlens)
        else:
            y, final = causal_conv1d(
                x, weight, bias, activation=self.activation, initial_state=state, output_final_state=self.final,
                cu_seqlens=cu_seqlens,
            )  # fmt: skip
        return {"y": y} if final is None else {"y": y, "final_state": final}

    @property
    def exact(self) -> frozenset[str]:
        return frozenset(("state", "final_state"))

    def oracle(self, inputs: Inputs) -> Outputs:
        y, final = causal_conv1d_reference(
            inputs["x"], inputs["weight"], inputs.get("bias"), activation=self.activation,
            initial_state=inputs.get("state"), cu_seqlens=inputs.get("cu_seqlens"),
            state_len=self.initial if self.mode == "update" else None,
        )  # fmt: skip
        if self.mode == "update":
            return {"y": y, "state": final}
        return {"y": y, "final_state": final} if self.final else {"y": y}


def portable(case: Case, inputs: Inputs) -> Outputs:
    """The portable path in fp32, rounded to the dtypes of `run`."""
    dtype = inputs["x"].dtype
    x, weight, bias, state = (
        None if t is None else t.float() for t in (inputs.get(n) for n in ("x", "weight", "bias", "state"))
    )
    assert x is not None and weight is not None
    if case.mode == "update":
        assert state is not None
        state = state.clone()
        y = plain.causal_conv1d_update(x, state, weight, bias, case.activation)
        return {"y": y.to(dtype), "state": state.to(dtype)}
    y, final = plain.causal_conv1d(x, weight, bias, case.activation, state, case.final, inputs.get("cu_seqlens"))
    return {"y": y.to(dtype)} if final is None else {"y": y.to(dtype), "final_state": final.to(dtype)}


CASES = (
    Case((8192,), 8192),
    Case((100, 100), 1536),
    Case((100, 100), 1536, FP16, bias=True, activation=None),
    Case((65, 65), 520, FP32, bias=True),
    Case((33,), 24, width=2, layout="split"),
    Case((33,), 24, width=3, bias=True, layout="time"),
    Case((700,) * 2, 256, layout="time"),
    Case((1,), 64),
    Case((3,) * 3, 64, initial=4, final=True),
    Case((64,) * 2, 128, initial=3, final=True, bias=True),
    Case((31,), 128, FP32, initial=6, final=True, width=3),
    Case((1, 2, 0, 63, 64, 65, 0, 1), 256, packed=True, initial=4, final=True),
    Case((15, 100, 1, 300), 512, packed=True, final=True, bias=True),
    Case((0, 0, 40, 0), 64, FP16, packed=True, width=2, initial=1, final=True),
    Case((1, 2, 3) * 100, 128, FP32, packed=True, initial=3),
    Case((1,) * 32, 8192, mode="update", initial=4),
    Case((1,) * 3, 100, FP16, mode="update", initial=3, bias=True, layout="split"),
    Case((1,) * 2, 130, FP32, mode="update", initial=8, activation=None),
    Case((5,) * 2, 96, mode="update", initial=4, layout="time"),
    Case((3,), 64, mode="update", initial=1, width=2, bias=True),
    Case((4,), 64, mode="update", initial=2, width=3),
)
