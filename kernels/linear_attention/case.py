"""A named input of either family, for certificates, tests and benchmarks; each family's `cases` lists its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

Inputs = dict[str, Any]
Outputs = dict[str, Tensor]

#: Tensor inputs in the order in which their gradients are returned.
DIFFERENTIATED = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


@dataclass(frozen=True, slots=True)
class Case:
    """One call and its gradients. Without `packed` all sequences have one length and are the batch."""

    family: ClassVar[str]
    per_channel: ClassVar[bool]  #: the gate is one log decay per key channel

    lengths: tuple[int, ...]
    heads: tuple[int, int]  #: query/key heads, value heads
    dims: tuple[int, int]  #: K, V
    dtype: str = "bfloat16"
    mode: str = "chunk"  #: chunk | recurrent
    packed: bool = False
    gate: str = (
        "mild"  #: mild | zero | strong (-20) | resets (-1000 here and there) | softplus | bounded: in the kernel
    )
    layout: str = (
        "contiguous"  #: contiguous | split (q, k, v are slices of one tensor) | time_last (unit stride along T)
    )
    states: bool = True  #: with an initial and a final state
    state_v_first: bool = False
    use_qk_l2norm: bool = True
    use_beta_sigmoid: bool = False
    allow_neg_eigval: bool = False

    @property
    def name(self) -> str:
        dense = f"{len(self.lengths)}x{max(self.lengths, default=0)}"
        shape = "+".join(map(str, self.lengths)) if self.packed else dense
        options = [
            self.gate,
            "" if self.layout == "contiguous" else self.layout,
            "" if self.states else "stateless",
            "v_first" if self.state_v_first else "",
            "" if self.use_qk_l2norm else "unnormalised",
            "beta_logits" if self.use_beta_sigmoid else "",
            "neg_eigval" if self.allow_neg_eigval else "",
        ]
        size = f"{shape}_h{self.heads[0]}-{self.heads[1]}_d{self.dims[0]}-{self.dims[1]}"
        return "_".join(part for part in (self.family, self.mode, self.dtype, size, *options) if part)

    @property
    def kernels(self) -> tuple[str, ...]:
        return ("portable",)

    def common_facts(self) -> dict[str, Any]:
        """What both families' facts have in common."""
        return {
            "mode": self.mode,
            "dtype": self.dtype,
            "n_heads": self.heads[0],
            "n_value_heads": self.heads[1],
            "head_dim": self.dims[0],
            "head_dim_v": self.dims[1],
            "packed": self.packed,
            "has_initial_state": self.states,
            "output_final_state": self.states,
            "state_v_first": self.state_v_first,
            "use_qk_l2norm": self.use_qk_l2norm,
            "use_gate": self.in_kernel_gate,
            "use_beta_sigmoid": self.use_beta_sigmoid,
            "allow_neg_eigval": self.allow_neg_eigval,
            "needs_grad": True,
        }

    @property
    def in_kernel_gate(self) -> bool:
        return self.gate in ("softplus", "bounded")

    @property
    def lower_bound(self) -> float | None:
        return -5.0 if self.gate == "bounded" else None

    def options(self) -> dict[str, Any]:
        """The keywords that are not tensors."""
        chosen = {
            "output_final_state": self.states,
            "use_qk_l2norm": self.use_qk_l2norm,
            "use_gate": self.in_kernel_gate,
            "use_beta_sigmoid": self.use_beta_sigmoid,
            "allow_neg_eigval": self.allow_neg_eigval,
            "state_v_first": self.state_v_first,
        }
        return {**chosen, "lower_bound": self.lower_bound} if self.per_channel else chosen

    def make(self, device: torch.device | str, generator: torch.Generator) -> Inputs:
        """Fresh inputs, and gradients d_o and d_final_state of the results; equal for a generator on every device."""
        dtype = getattr(torch, self.dtype)
        (heads, value_heads), (dim, dim_v) = self.heads, self.dims
        batch, tokens = (1, sum(self.lengths)) if self.packed else (len(self.lengths), max(self.lengths, default=0))

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        q, k, v = laid_out(
            [draw(batch, tokens, heads, dim), draw(batch, tokens, heads, dim), draw(batch, tokens, value_heads, dim_v)],
            self.layout,
            device,
            dtype,
        )
        gate_shape = (batch, tokens, value_heads, *((dim,) if self.per_channel else ()))
        beta = draw(batch, tokens, value_heads)
        made: Inputs = {
            "q": q if self.use_qk_l2norm else (q * dim**-0.5).to(dtype),
            "k": k if self.use_qk_l2norm else (k * dim**-0.5).to(dtype),
            "v": v,
            "g": self._gate(draw(*gate_shape), generator).to(device),
            "beta": (beta if self.use_beta_sigmoid else beta.sigmoid()).to(device, dtype),
        }
        if self.in_kernel_gate:
            made["A_log"] = draw(value_heads).to(device)
            made["dt_bias"] = draw(value_heads * (dim if self.per_channel else 1)).to(device)
        if self.states:
            inner = (dim_v, dim) if self.state_v_first else (dim, dim_v)
            made["initial_state"] = draw(len(self.lengths), value_heads, *inner).to(device)
            made["d_final_state"] = draw(len(self.lengths), value_heads, *inner).to(device)
        made["d_o"] = draw(batch, tokens, value_heads, dim_v).to(device, dtype)
        if self.packed:
            ends = torch.tensor((0, *self.lengths)).cumsum(0)
            made["cu_seqlens"] = ends.to(device, torch.int32 if len(self.lengths) % 2 else torch.int64)
        for name in DIFFERENTIATED:
            if name in made:
                x = made[name].detach()
                made[name] = (x.double() if dtype == torch.float64 else x).requires_grad_()
        return made

    def _gate(self, noise: Tensor, generator: torch.Generator) -> Tensor:
        if self.in_kernel_gate:
            return noise
        if self.gate == "resets":
            return -torch.where(torch.rand(noise.shape, generator=generator) < 0.1, 1000.0, noise.sigmoid())
        return noise.sigmoid() * {"mild": -0.5, "zero": 0.0, "strong": -20.0}[self.gate]

    def call_with(self, function: Callable[..., tuple[Tensor, Tensor | None]], inputs: Inputs) -> Outputs:
        """Results of `function` and every gradient, by name."""
        tensors = {name: x for name, x in inputs.items() if not name.startswith("d_")}
        out, final = function(**tensors, **self.options())
        return with_gradients(inputs, out, final)


def with_gradients(inputs: Inputs, out: Tensor, final: Tensor | None) -> Outputs:
    """{"o", "final_state", "d_<input>"}: the results, and their gradients for the upstream gradients in `inputs`."""
    names = [name for name in DIFFERENTIATED if name in inputs]
    results = [(out, inputs["d_o"])] if final is None else [(out, inputs["d_o"]), (final, inputs["d_final_state"])]
    connected = [
        (x, d.to(x.dtype)) for x, d in results if x.requires_grad
    ]  # of no tokens, an output depends on nothing
    wanted = [inputs[name] for name in names]
    grads = torch.autograd.grad([x for x, _ in connected], wanted, [d for _, d in connected], allow_unused=True)
    found = {"o": out.detach()} if final is None else {"o": out.detach(), "final_state": final.detach()}
    for name, grad in zip(names, grads, strict=True):
        found[f"d_{name}"] = torch.zeros_like(inputs[name]) if grad is None else grad
    return found


def upcast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Detached copies in `dtype`; integers stay."""
    made: Inputs = {}
    for name, x in inputs.items():
        made[name] = x.detach().to(dtype, copy=True).requires_grad_(x.requires_grad) if x.is_floating_point() else x
    return made


def result_dtype(name: str, inputs: Inputs) -> torch.dtype:
    """The dtype in which the public ops return the result or gradient `name`."""
    if name in ("o", "final_state"):
        return inputs["q"].dtype if name == "o" else torch.float32
    return inputs[name.removeprefix("d_")].dtype


def laid_out(tensors: list[Tensor], layout: str, device: torch.device | str, dtype: torch.dtype) -> list[Tensor]:
    """The values of [B, T, heads, dim] tensors in `dtype` on `device`, in the layout asked for."""
    tensors = [x.to(device, dtype) for x in tensors]
    if layout == "contiguous":
        return tensors
    if layout == "time_last":
        return [x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in tensors]
    if layout == "split":
        widths = [x.shape[2] * x.shape[3] for x in tensors]
        parts = torch.cat([x.flatten(2) for x in tensors], 2).split(widths, 2)
        return [part.unflatten(2, x.shape[2:]) for part, x in zip(parts, tensors, strict=True)]
    raise ValueError(f"layout must be contiguous, split or time_last, got {layout!r}")
