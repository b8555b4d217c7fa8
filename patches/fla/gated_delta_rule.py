"""`chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule` (aliases `chunk_gdn`, `fused_recurrent_gdn`).

Every holder is rebound by identity: modules under any name, and the closures in which transformers freezes FLA's
functions. References kept elsewhere reach `chunk_gated_delta_rule` through FLA's dispatch (`dispatch.py`).

Not reached: references to `fused_recurrent_gated_delta_rule` kept in instances, partials or containers; whoever calls
`ChunkGatedDeltaRuleFunction.apply` or the `*_fwd` functions directly; copies of FLA that other packages carry.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from accel.kernels.gated_delta_rule import chunk, gated_delta_rule, launch, recurrent_gated_delta_rule
from accel.kernels.gated_delta_rule.facts import GatedDeltaRuleFacts
from accel.kernels.gated_delta_rule.plan import CHUNKED, RECURRENT, plan
from accel.kernels.runtime.interned import interned
from accel.outcome import Choice, Decline, Declined
from accel.rebind import Rebinding
from accel.state import TargetState

from ..checks import dtype_name, needs_grad
from ..portable import PortableAdapter
from . import delta_rule as rule
from .delta_rule import NOT_GIVEN

CERTIFIES = "gated_delta_rule"
_facts = interned(GatedDeltaRuleFacts)
Tensors = tuple[torch.Tensor, torch.Tensor | None]


def patch(module: ModuleType, state: TargetState) -> Iterable[Rebinding]:
    if state.name == "fla.gated_delta_rule":
        return rule.rebind(module, "chunk_gated_delta_rule", ChunkGatedDeltaRule, "gated_delta_rule", state)
    return rule.rebind(module, "fused_recurrent_gated_delta_rule", FusedRecurrentGatedDeltaRule, None, state)


def upstream(case: Any) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None:
    """FLA's results for a case of the family, with gradients where it has any; None for gradients token by token."""
    ops = importlib.import_module("fla.ops.gated_delta_rule")
    if getattr(case, "forward_only", False):
        function = rule.in_our_words(getattr(ops, case.call))
        return lambda inputs: case.like_run(function, inputs)
    if case.call != "chunk_gated_delta_rule":
        return None
    function = rule.in_our_words(ops.chunk_gated_delta_rule)

    def run(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = case.call_with(function, inputs)
        return outputs

    return run


class ChunkGatedDeltaRule(PortableAdapter):
    """`chunk_gated_delta_rule`: training and prefill. The keyword-only parameters hide in upstream's **kwargs."""

    family = "gated_delta_rule"

    def __init__(self, original: Callable[..., Any]) -> None:
        #: FLA 0.6.0 has it before cp_context; 0.5.2 ignores it as a keyword, and has cp_context in its place.
        self.knows_chunk_indices = "chunk_indices" in inspect.signature(original).parameters

    def facts(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool | None = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None,
        cp_context: Any = None,
        *,
        use_gate_in_kernel: bool = False,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        chunk_size: int = 64,
        transpose_state_layout: Any = NOT_GIVEN,
        head_first: Any = NOT_GIVEN,
        **unknown: Any,
    ) -> tuple[GatedDeltaRuleFacts, torch.device]:
        rule.check_call(unknown, head_first, transpose_state_layout, state_v_first, cp_context, scale)
        if chunk_indices is not None and not self.knows_chunk_indices:
            raise Decline("chunk_indices, which this FLA release does not have")
        if chunk_size not in (16, 32, 64):
            raise Decline(f"chunk_size={chunk_size} is not 16, 32 or 64")
        rule.check_beta_options(use_beta_sigmoid_in_kernel, allow_neg_eigval)
        if not use_gate_in_kernel:
            A_log = dt_bias = None
        elif A_log is None:
            raise Decline("use_gate_in_kernel without A_log")

        device = rule.check_tensors(
            5, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, A_log=A_log, dt_bias=dt_bias,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        batch, seqlen, n_heads, n_value_heads, head_dim, head_dim_v = rule.check_qkv(q, k, v)
        rule.check_chunked(q, k, v)
        heads = (batch, seqlen, n_value_heads)
        rule.check_shape("g", g, heads)
        rule.check_shape("beta", beta, heads)
        rule.check_elements("A_log", A_log, n_value_heads)
        rule.check_elements("dt_bias", dt_bias, n_value_heads)
        v_first = rule.v_first(state_v_first, transpose_state_layout)
        rule.check_state(initial_state, q, v, cu_seqlens, v_first)
        facts = _facts()(
            mode="chunk",
            dtype=dtype_name(q.dtype),
            n_heads=n_heads,
            n_value_heads=n_value_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            packed=cu_seqlens is not None,
            has_initial_state=initial_state is not None,
            output_final_state=bool(output_final_state),
            state_v_first=v_first,
            use_qk_l2norm=bool(use_qk_l2norm_in_kernel),
            use_gate=bool(use_gate_in_kernel),
            use_beta_sigmoid=bool(use_beta_sigmoid_in_kernel),
            allow_neg_eigval=bool(allow_neg_eigval),
            needs_grad=needs_grad(q, k, v, g, beta, initial_state, A_log, dt_bias),
            device_type="cpu" if q.is_cpu else "cuda",
        )
        return facts, device

    def plan(self, facts: GatedDeltaRuleFacts, arch: str) -> Choice | Declined:
        return plan(facts, arch)

    def run(
        self,
        choice: Choice,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool | None = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None,
        cp_context: Any = None,
        *,
        use_gate_in_kernel: bool = False,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        chunk_size: int = 64,
        transpose_state_layout: Any = NOT_GIVEN,
    ) -> Tensors:
        """The kernels have a chunk size of their own; a planned launch (`cu_seqlens_cpu`, `chunk_indices`) is FLA's."""
        rule.warn_deprecated(transpose_state_layout)
        compute = chunk.chunk if choice.kernel == CHUNKED else gated_delta_rule
        o, final_state = compute(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm=bool(use_qk_l2norm_in_kernel),
            use_gate=bool(use_gate_in_kernel),
            A_log=rule.flat(A_log) if use_gate_in_kernel else None,
            dt_bias=rule.flat(dt_bias) if use_gate_in_kernel else None,
            use_beta_sigmoid=bool(use_beta_sigmoid_in_kernel),
            allow_neg_eigval=bool(allow_neg_eigval),
            state_v_first=rule.v_first(state_v_first, transpose_state_layout),
            cu_seqlens=cu_seqlens,
        )
        return o, rule.fp32(final_state)


class FusedRecurrentGatedDeltaRule(PortableAdapter):
    """`fused_recurrent_gated_delta_rule`: decoding, one token after the other.

    Upstream has a forward pass only: its result carries a gradient function that raises, and so does ours.
    """

    family = "gated_delta_rule"

    def __init__(self, original: Callable[..., Any]) -> None:
        pass

    def facts(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None = None,
        gk: torch.Tensor | None = None,
        gv: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool | None = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        *,
        transpose_state_layout: Any = NOT_GIVEN,
        **unknown: Any,
    ) -> tuple[GatedDeltaRuleFacts, torch.device]:
        rule.check_call(unknown, NOT_GIVEN, transpose_state_layout, state_v_first, None, scale)
        rule.check_beta_options(use_beta_sigmoid_in_kernel, allow_neg_eigval)
        if not use_gate_in_kernel:
            A_log = dt_bias = None
        elif A_log is None or g is None:
            raise Decline(f"use_gate_in_kernel without {'A_log' if A_log is None else 'g'}")

        optional = {
            "g": g, "gk": gk, "gv": gv, "beta": beta, "initial_state": initial_state, "A_log": A_log,
            "dt_bias": dt_bias, "cu_seqlens": cu_seqlens,
        }  # fmt: skip
        device = rule.check_tensors(3, q=q, k=k, v=v, **optional)
        batch, seqlen, n_heads, n_value_heads, head_dim, head_dim_v = rule.check_qkv(q, k, v)
        rule.check_recurrent(q, k, v)
        heads = (batch, seqlen, n_value_heads)
        rule.check_shape("g", g, heads)
        rule.check_shape("gk", gk, (*heads, head_dim))
        rule.check_shape("gv", gv, (*heads, head_dim_v))
        rule.check_shape("beta", beta, heads, (*heads, head_dim_v))
        rule.check_elements("A_log", A_log, n_value_heads)
        rule.check_elements("dt_bias", dt_bias, n_value_heads)
        v_first = rule.v_first(state_v_first, transpose_state_layout)
        rule.check_state(initial_state, q, v, cu_seqlens, v_first)
        facts = _facts()(
            mode="recurrent",
            dtype=dtype_name(q.dtype),
            n_heads=n_heads,
            n_value_heads=n_value_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            v_dtype=dtype_name(v.dtype),
            packed=cu_seqlens is not None,
            has_initial_state=initial_state is not None,
            output_final_state=bool(output_final_state),
            state_v_first=v_first,
            use_qk_l2norm=bool(use_qk_l2norm_in_kernel),
            use_gate=bool(use_gate_in_kernel),
            use_beta_sigmoid=bool(use_beta_sigmoid_in_kernel),
            allow_neg_eigval=bool(allow_neg_eigval),
            has_g=g is not None,
            has_gk=gk is not None,
            has_gv=gv is not None,
            beta_per_channel=beta is not None and beta.dim() == 4,
            device_type="cpu" if q.is_cpu else "cuda",
        )
        return facts, device

    def plan(self, facts: GatedDeltaRuleFacts, arch: str) -> Choice | Declined:
        return plan(facts, arch)

    def run(
        self,
        choice: Choice,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None = None,
        gk: torch.Tensor | None = None,
        gv: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool | None = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        *,
        transpose_state_layout: Any = NOT_GIVEN,
    ) -> Tensors:
        rule.warn_deprecated(transpose_state_layout)
        if not use_gate_in_kernel:
            A_log = dt_bias = None
        options: dict[str, Any] = {} if choice.kernel == RECURRENT else {"gk": gk, "gv": gv}
        compute = launch.recurrent if choice.kernel == RECURRENT else recurrent_gated_delta_rule
        with torch.no_grad():
            o, final_state = compute(
                q,
                k,
                v,
                g,
                **options,
                beta=beta,
                scale=scale,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm=bool(use_qk_l2norm_in_kernel),
                use_gate=bool(use_gate_in_kernel),
                A_log=rule.flat(A_log),
                dt_bias=rule.flat(dt_bias),
                use_beta_sigmoid=bool(use_beta_sigmoid_in_kernel),
                allow_neg_eigval=bool(allow_neg_eigval),
                state_v_first=rule.v_first(state_v_first, transpose_state_layout),
                cu_seqlens=cu_seqlens,
            )
            final_state = rule.fp32(final_state)
        inputs = [t for t in (q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state) if t is not None]
        if not needs_grad(*inputs):
            return o, final_state
        result: Tensors = _ForwardOnly.apply(o, final_state, *inputs)  # type: ignore[no-untyped-call]
        return result


class _ForwardOnly(torch.autograd.Function):
    """Hands on finished results as functions of the inputs, without a backward pass."""

    @staticmethod
    def forward(ctx: Any, o: torch.Tensor, final_state: torch.Tensor | None, *inputs: torch.Tensor) -> Tensors:
        return o.view_as(o), None if final_state is None else final_state.view_as(final_state)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        raise NotImplementedError(
            "fused_recurrent_gated_delta_rule has no backward pass, in FLA as here; chunk_gated_delta_rule has one"
        )
