"""Named inputs of the recurrent kernel: forward only, states as decoders keep them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..linear_attention import case as base
from ..linear_attention.case import Inputs, Outputs
from . import decode_gated_delta_rule, launch, recurrent_gated_delta_rule
from .facts import GatedDeltaRuleFacts
from .reference import gated_delta_rule_reference

BF16, FP16, FP32 = "bfloat16", "float16", "float32"


@dataclass(frozen=True, slots=True)
class RecurrentCase(base.Case):
    """One call without gradients; with `state` "in_place" or "pool" the initial state is overwritten."""

    family: ClassVar[str] = "gated_delta_rule"
    per_channel: ClassVar[bool] = False
    forward_only: ClassVar[bool] = True

    mode: str = "recurrent"
    state: str = "new"  #: new | in_place | pool | final (nothing before) | initial (nothing after) | padded
    state_dtype: str = FP32
    scalar_dtype: str = FP32  #: of g, beta, A_log and dt_bias
    v_dtype: str = ""  #: "": dtype
    bare: bool = False  #: without g and beta

    @property
    def name(self) -> str:
        parts = [
            base.Case.name.fget(self),  # type: ignore[attr-defined]
            "forward",
            "" if self.state == "new" else self.state,
            "" if self.state_dtype == FP32 else f"state_{self.state_dtype}",
            "" if self.scalar_dtype == FP32 else f"gates_{self.scalar_dtype}",
            f"v_{self.v_dtype}" if self.v_dtype else "",
            "bare" if self.bare else "",
        ]
        return "_".join(part for part in parts if part)

    @property
    def kernels(self) -> tuple[str, ...]:
        return ("any_recurrent",)

    @property
    def call(self) -> str | None:
        return "fused_recurrent_gated_delta_rule"

    @property
    def in_place(self) -> bool:
        return self.state in ("in_place", "pool")

    @property
    def facts(self) -> GatedDeltaRuleFacts:
        common = {**self.common_facts(), "needs_grad": False, "has_g": not self.bare}
        return GatedDeltaRuleFacts(**common, v_dtype=self.v_dtype or self.dtype)

    def make(self, device: torch.device | str, generator: torch.Generator) -> Inputs:
        made = base.Case.make(self, device, generator)
        made = {name: x.detach() for name, x in made.items() if not name.startswith("d_")}
        if self.v_dtype:
            made["v"] = made["v"].to(getattr(torch, self.v_dtype))
        for name in ("g", "beta", "A_log", "dt_bias"):
            if name in made:
                made[name] = made[name].to(getattr(torch, self.scalar_dtype))
        if self.bare:
            del made["g"], made["beta"]
        if self.state == "final":
            del made["initial_state"]
        if "initial_state" in made:
            state = made["initial_state"].to(getattr(torch, self.state_dtype))
            if self.state == "padded":
                wide = state.new_full((*state.shape[:-1], state.shape[-1] + 4), torch.nan)
                state = wide[..., : state.shape[-1]].copy_(state)
            if self.state == "pool":
                state, made["indices"] = pooled(state, generator)
            made["initial_state"] = state
        return made

    def run(self, inputs: Inputs) -> Outputs:
        """Through the public ops; on a GPU only by the kernel."""
        given = dict(inputs)
        if not self.in_place:
            function = launch.recurrent if inputs["q"].is_cuda else recurrent_gated_delta_rule
            out, final = function(**given, **self.forward_options())
            return {"o": out} if final is None else {"o": out, "final_state": final}
        if inputs["q"].is_cuda:
            out, state = launch.recurrent(**given, in_place=True, **self.forward_options())
            assert state is not None
            return {"o": out, "final_state": state}
        state = given.pop("initial_state")
        options = self.forward_options()
        del options["output_final_state"]
        g, beta = given.pop("g", None), given.pop("beta", None)
        out = decode_gated_delta_rule(
            given.pop("q"), given.pop("k"), given.pop("v"), g, beta, state, **given, **options
        )
        return {"o": out, "final_state": state}

    def oracle(self, inputs: Inputs) -> Outputs:
        given = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        return self.with_pool(gated_delta_rule_reference, given)

    def forward_options(self) -> dict[str, Any]:
        return {**self.options(), "output_final_state": self.state != "initial"}

    def with_pool(self, function: Any, inputs: Inputs) -> Outputs:
        """What `function`, which knows no pool and overwrites nothing, makes of the case."""
        given = dict(inputs)
        indices = given.pop("indices", None)
        state = given.get("initial_state")
        if indices is None:
            out, final = function(**given, **self.forward_options())
            return {"o": out} if final is None else {"o": out, "final_state": final}
        assert state is not None
        given["initial_state"] = state[indices.clamp(min=0).long()]
        out, final = function(**given, **self.forward_options())
        after, out = state.clone(), out.clone()
        bounds = given["cu_seqlens"].tolist() if self.packed else None
        for n, index in enumerate(indices.tolist()):
            if index >= 0:
                after[index] = final[n].to(state.dtype)
            elif bounds is None:
                out[n] = 0
            else:
                out[0, bounds[n] : bounds[n + 1]] = 0
        return {"o": out, "final_state": after}

    def like_run(self, function: Any, inputs: Inputs) -> Outputs:
        """What `function`, which knows no pool and takes tensors of these dtypes, makes of the case."""
        return self.rounded(self.with_pool(function, inputs), inputs)

    def rounded(self, found: Outputs, inputs: Inputs) -> Outputs:
        """In the dtypes of `run`."""
        found["o"] = found["o"].to(inputs["v"].dtype)
        if "final_state" in found:
            dtype = getattr(torch, self.state_dtype) if self.in_place else torch.float32
            found["final_state"] = found["final_state"].to(dtype)
        return found


def pooled(state: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(a pool that holds the states in another order, others between them; indices, every third of them -1)."""
    count = state.shape[0]
    places = torch.randperm(2 * count + 3, generator=generator)[:count]
    pool = torch.randn(2 * count + 3, *state.shape[1:], generator=generator).to(state.device, state.dtype)
    pool[places.to(state.device)] = state
    indices = torch.where(torch.arange(count) % 3 == 2, -1, places)
    return pool, indices.to(state.device, torch.int32 if count % 2 else torch.int64)


def portable(case: RecurrentCase, inputs: Inputs) -> Outputs:
    """The portable path in fp32, rounded to the dtypes of `run`."""
    given = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    return case.rounded(case.with_pool(recurrent_portable, given), inputs)


def recurrent_portable(**arguments: Any) -> tuple[Tensor, Tensor | None]:
    from .portable import recurrent_gated_delta_rule as plain

    return plain(**arguments)


ONE = (1,)
RECURRENT_CASES = (
    RecurrentCase(ONE, (16, 32), (128, 128), BF16),
    RecurrentCase(ONE * 3, (2, 4), (128, 128), BF16, gate="softplus", use_beta_sigmoid=True, state_v_first=True),
    RecurrentCase(ONE * 70, (16, 32), (128, 128), BF16, gate="softplus", use_beta_sigmoid=True, state="in_place"),
    RecurrentCase(ONE * 64, (16, 32), (128, 128), BF16, state_v_first=True, layout="split"),
    RecurrentCase(ONE * 5, (2, 4), (64, 64), FP32, gate="softplus", use_beta_sigmoid=True, allow_neg_eigval=True),
    RecurrentCase(ONE * 5, (2, 4), (64, 96), FP32, state_v_first=True, use_qk_l2norm=False),
    RecurrentCase(ONE * 2, (3, 3), (256, 512), BF16, state_v_first=True, gate="softplus", use_beta_sigmoid=True),
    RecurrentCase(ONE * 2, (3, 6), (256, 512), FP16, layout="split"),
    RecurrentCase(ONE * 9, (2, 2), (256, 64), FP32, gate="strong", state="in_place", state_v_first=True),
    RecurrentCase((7, 7), (2, 4), (128, 128), BF16, gate="softplus", use_beta_sigmoid=True, state="in_place"),
    RecurrentCase((33, 33), (2, 4), (64, 64), FP32, state_v_first=True),
    RecurrentCase((64, 64), (2, 4), (128, 128), FP32, gate="strong"),
    RecurrentCase((40,), (2, 2), (128, 64), FP32, gate="resets", layout="split"),
    RecurrentCase((64,), (2, 2), (256, 128), BF16, gate="zero", state="final"),
    RecurrentCase((20,), (2, 2), (256, 128), FP16, state="initial", state_v_first=True),
    RecurrentCase((5, 0, 1, 20, 3), (2, 4), (128, 128), FP16, packed=True),
    RecurrentCase((1, 2, 0, 64, 0), (2, 4), (128, 64), BF16, packed=True, state_v_first=True, state="padded"),
    RecurrentCase((1, 3) * 50, (1, 2), (64, 64), BF16, packed=True, gate="softplus", use_beta_sigmoid=True),
    RecurrentCase((1, 3, 0, 2, 5), (1, 2), (64, 64), FP32, packed=True, state="pool", state_dtype=BF16),
    RecurrentCase(ONE * 40, (4, 8), (128, 128), BF16, state="pool", gate="softplus", use_beta_sigmoid=True),
    RecurrentCase(ONE * 7, (2, 4), (128, 128), BF16, state="pool", state_v_first=True, state_dtype=BF16),
    RecurrentCase((4,) * 7, (2, 4), (128, 128), FP16, state="pool", state_v_first=True, state_dtype=FP16),
    RecurrentCase(ONE * 4, (2, 4), (128, 128), BF16, state="in_place", state_dtype=BF16, scalar_dtype=BF16),
    RecurrentCase(ONE * 4, (2, 4), (128, 128), FP16, gate="softplus", use_beta_sigmoid=True, scalar_dtype=FP16),
    RecurrentCase(ONE * 4, (2, 4), (128, 128), BF16, v_dtype=FP32),
    RecurrentCase((3, 3), (2, 2), (64, 64), BF16, bare=True),
    RecurrentCase(ONE * 2, (2, 4), (128, 128), BF16, layout="time_last"),
    RecurrentCase((6,), (2, 4), (128, 128), BF16, layout="time_last", state="padded"),
)
