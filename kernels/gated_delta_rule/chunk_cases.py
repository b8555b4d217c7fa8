"""Named inputs of the chunked kernels, and their yardstick where no upstream is at hand; forward only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..linear_attention import inputs as given
from ..linear_attention.case import Inputs, Outputs
from ..linear_attention.precision import own_precision
from . import chunk, gated_delta_rule
from .recurrent_cases import BF16, FP16, FP32, RecurrentCase

CHUNK = 64
LOUD = 30.0  #: the factor of loud values and states


@dataclass(frozen=True, slots=True)
class ChunkCase(RecurrentCase):
    """One call of gated_delta_rule without gradients. `gate` may be "slow" too: what FLA's layers start with."""

    mode: str = "chunk"
    state: str = "new"  #: new | final (nothing before) | initial (nothing after) | none | padded
    loud: bool = False  #: values and states of large magnitude

    @property
    def name(self) -> str:
        return RecurrentCase.name.fget(self) + ("_loud" if self.loud else "")  # type: ignore[attr-defined]

    @property
    def kernels(self) -> tuple[str, ...]:
        return ("sm90_fwd",)

    @property
    def call(self) -> str | None:
        return "chunk_gated_delta_rule"

    def make(self, device: torch.device | str, generator: torch.Generator) -> Inputs:
        made = RecurrentCase.make(self, device, generator)
        if self.state == "none":
            del made["initial_state"]
        if self.loud:
            for name in ("v", "initial_state"):
                if name in made:
                    made[name] *= LOUD
        return made

    def _gate(self, noise: Tensor, generator: torch.Generator) -> Tensor:
        if self.gate == "slow":
            rate = 16 * torch.rand(noise.shape[-1], generator=generator)
            step = torch.rand(noise.shape, generator=generator) * (math.log(0.1) - math.log(1e-3)) + math.log(1e-3)
            return -rate * step.exp()
        return RecurrentCase._gate(self, noise, generator)

    def run(self, inputs: Inputs) -> Outputs:
        """Through the public op; on a GPU only by the kernels."""
        function = chunk.chunk if inputs["q"].is_cuda else gated_delta_rule
        return self.with_pool(function, inputs)

    def forward_options(self) -> dict[str, Any]:
        return {**self.options(), "output_final_state": self.state not in ("initial", "none")}


def portable(case: ChunkCase, inputs: Inputs) -> Outputs:
    """The chunked algorithm as it is published for GPUs, rounded where its kernels round: see `published`."""
    return case.rounded(case.with_pool(published, inputs), inputs)


@torch.no_grad()
def published(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    use_qk_l2norm: bool = False,
    use_gate: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(o, final state) with fp32 sums, and what goes from kernel to kernel or into a product rounded to q's dtype.

    Rounded are: normalised q and k, the inverse, beta v and beta exp(b) k, W, U, the state as an operand, the new
    values with and without their decay, P. Chunks of 64 tokens.
    """
    dtype, groups = q.dtype, v.shape[2] // q.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    query, key = given.prepare_qk(q, k, torch.float32, use_qk_l2norm)
    query, key = (rounded(x).repeat_interleave(groups, 2) for x in (query, key))
    log_decay = g.float()
    if use_gate:
        assert A_log is not None
        bias = None if dt_bias is None else dt_bias.float().flatten()
        log_decay = given.softplus_decay(log_decay, A_log.float().flatten(), bias)
    rate = given.activate_beta(beta.float(), use_beta_sigmoid, allow_neg_eigval)
    states = given.start_state(initial_state, q, v, cu_seqlens, state_v_first, torch.float32).clone()
    out = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    if cu_seqlens is None:
        spans = [(slice(None), slice(None), 0, q.shape[1])]
    else:
        bounds = cu_seqlens.tolist()
        spans = [(slice(0, 1), slice(n, n + 1), *span) for n, span in enumerate(pairwise(bounds))]
    with own_precision(q):
        for batch, n, start, stop in spans:
            for first in range(start, stop, CHUNK):
                tokens = slice(first, min(first + CHUNK, stop))
                heads_first = [x[batch, tokens].transpose(1, 2) for x in (query, key, v.float(), log_decay, rate)]
                o, states[n] = _chunk(*heads_first, states[n], scale, rounded)
                out[batch, tokens] = o.transpose(1, 2)
    return out.to(dtype), given.end_state(states, output_final_state, state_v_first)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, rounded: Any
) -> tuple[Tensor, Tensor]:
    """A chunk of all heads: q, k, v [B, HV, C, D], g and beta [B, HV, C], state [B, HV, K, V]."""
    total = g.cumsum(-1)
    below = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~below, -torch.inf).exp()
    lower = (beta[..., None] * decay * (k @ k.mT)).tril(-1)
    one = torch.eye(g.shape[-1], device=g.device)
    inverse = rounded(torch.linalg.solve_triangular(lower + one, one.expand_as(lower), upper=False, unitriangular=True))
    w = rounded(inverse @ rounded(k * (beta * total.exp())[..., None]))
    u = rounded(inverse @ rounded(v * beta[..., None]))
    new = u - w @ rounded(state)
    pairs = rounded((q @ k.mT) * decay)
    out = scale * ((q @ rounded(state)) * total.exp()[..., None] + pairs @ rounded(new))
    last = total[..., -1:]
    after = state * last.exp()[..., None] + k.mT @ rounded(new * (last - total).exp()[..., None])
    return out, after


SOFTPLUS = {"gate": "softplus", "use_beta_sigmoid": True}
MODELS = (
    ChunkCase((512,), (4, 8), (128, 128), BF16, state="none"),
    ChunkCase((512,), (4, 8), (128, 128), BF16, **SOFTPLUS, state_v_first=True, layout="split"),
    ChunkCase((300, 300), (2, 2), (64, 64), BF16, **SOFTPLUS, state="final"),
    ChunkCase((200,), (3, 3), (256, 512), BF16, **SOFTPLUS, state_v_first=True, layout="split"),
    ChunkCase((2048,), (2, 4), (128, 128), BF16, gate="slow"),
    ChunkCase((2048,), (2, 2), (64, 128), FP16, gate="mild", state_v_first=True),
)
DIMS = tuple(
    ChunkCase((n,), heads, dims, dtype, gate=gate, state_v_first=v_first)
    for n, heads, dims, dtype, gate, v_first in (
        (65, (1, 1), (64, 64), FP16, "mild", False),
        (130, (1, 4), (64, 192), BF16, "slow", True),
        (64, (2, 4), (64, 512), BF16, "mild", False),
        (190, (2, 4), (128, 64), FP16, "slow", True),
        (129, (1, 3), (128, 192), BF16, "mild", False),
        (257, (2, 2), (128, 256), FP16, "mild", True),
        (100, (1, 1), (128, 512), BF16, "zero", False),
        (127, (1, 2), (256, 64), FP16, "slow", False),
        (66, (2, 2), (256, 128), BF16, "mild", True),
        (193, (1, 2), (256, 256), FP16, "mild", False),
    )
)
GATES = tuple(
    ChunkCase((200,), (2, 4), (128, 128), dtype, gate=gate, **options)
    for dtype in (BF16, FP16)
    for gate, options in (
        ("zero", {}),
        ("strong", {}),
        ("strong", {"use_qk_l2norm": False}),
        ("resets", {}),
        ("softplus", {"use_beta_sigmoid": True, "allow_neg_eigval": True}),
        ("slow", {"use_beta_sigmoid": True, "allow_neg_eigval": True}),
        ("mild", {"use_qk_l2norm": False, "layout": "time_last"}),
    )
)
PACKED = (
    ChunkCase((1, 0, 63, 64, 65, 0, 1, 200), (2, 4), (128, 128), BF16, packed=True),
    ChunkCase((0, 130, 1, 64), (1, 2), (64, 64), FP16, packed=True, state_v_first=True, **SOFTPLUS),
    ChunkCase((70, 0, 20), (2, 2), (256, 128), BF16, packed=True, state="final", gate="resets"),
    ChunkCase((1, 3, 0, 2) * 150, (1, 2), (64, 64), BF16, packed=True, state="final"),
    ChunkCase((1000, 5, 300), (2, 4), (128, 128), BF16, packed=True, layout="split", gate="slow"),
    ChunkCase((40, 100), (2, 4), (128, 256), FP16, packed=True, layout="time_last", state="none"),
)
STATES = (
    ChunkCase((100, 100), (2, 4), (128, 128), BF16, state="padded"),
    ChunkCase((100, 100), (2, 4), (128, 128), BF16, state="padded", state_v_first=True, state_dtype=BF16),
    ChunkCase((100,) * 3, (2, 4), (128, 128), FP16, state_dtype=FP16, scalar_dtype=FP16, **SOFTPLUS),
    ChunkCase((100,) * 3, (2, 4), (64, 64), BF16, state_dtype=BF16, scalar_dtype=BF16, **SOFTPLUS),
    ChunkCase((100,), (2, 4), (64, 128), BF16, state="initial", state_dtype=FP16, scalar_dtype=FP32),
    ChunkCase((150,), (2, 4), (128, 128), BF16, loud=True),
    ChunkCase((150,), (2, 4), (128, 128), FP16, loud=True, gate="slow"),
    ChunkCase((1,) * 5, (2, 4), (128, 128), BF16),
    ChunkCase((7,) * 40, (8, 16), (128, 128), BF16, state_v_first=True),
)
CHUNK_CASES = (*MODELS, *DIMS, *GATES, *PACKED, *STATES)
