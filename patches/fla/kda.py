"""`chunk_kda` and `fused_recurrent_kda`: Kimi Delta Attention.

Every holder is rebound by identity: modules under any name, and the closures in which transformers freezes FLA's
functions. References kept elsewhere reach `chunk_kda` through FLA's dispatch (`dispatch.py`).

Not reached: references to `fused_recurrent_kda` kept in instances, partials or containers; `fused_recurrent_kda_fwd`
with its paged state pool, updated in place (vLLM's decoding); whoever calls `ChunkKDAFunction.apply` directly; copies
of FLA that other packages carry.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from accel.kernels.kda import kda, recurrent_kda
from accel.kernels.kda.facts import KdaFacts
from accel.kernels.kda.plan import plan
from accel.kernels.runtime.interned import interned
from accel.outcome import Choice, Decline, Declined
from accel.rebind import Rebinding
from accel.state import TargetState

from ..checks import dtype_name, needs_grad
from ..portable import PortableAdapter
from . import delta_rule as rule
from .delta_rule import NOT_GIVEN

CERTIFIES = "kda"
_facts = interned(KdaFacts)
Tensors = tuple[torch.Tensor, torch.Tensor | None]


def patch(module: ModuleType, state: TargetState) -> Iterable[Rebinding]:
    if state.name == "fla.kda":
        return rule.rebind(module, "chunk_kda", ChunkKda, "kda", state)
    return rule.rebind(module, "fused_recurrent_kda", FusedRecurrentKda, None, state)


def upstream(case: Any) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None:
    """FLA's results and gradients for a case of the family; None for the recurrent ones, without a gradient there."""
    if case.call != "chunk_kda":
        return None
    function = rule.in_our_words(importlib.import_module("fla.ops.kda").chunk_kda)

    def run(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = case.call_with(function, inputs)
        return outputs

    return run


class ChunkKda(PortableAdapter):
    """`chunk_kda`: training and prefill. The keyword-only parameters hide in upstream's **kwargs."""

    family = "kda"

    def __init__(self, original: Callable[..., Any]) -> None:
        #: FLA 0.6.0 takes the bounded gate without A_log, and has use_graph; 0.5.2 neither.
        self.gate_without_A_log = "use_graph" in inspect.signature(original).parameters

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
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        disable_recompute: bool = False,
        return_intermediate_states: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
        cp_context: Any = None,
        use_graph: bool = False,
        max_num_seqs: int | None = None,
        *,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        chunk_size: int = 64,
        transpose_state_layout: Any = NOT_GIVEN,
        **unknown: Any,
    ) -> tuple[KdaFacts, torch.device]:
        rule.check_call(unknown, NOT_GIVEN, transpose_state_layout, state_v_first, cp_context, scale)
        if return_intermediate_states:
            raise Decline("return_intermediate_states")
        if use_graph:
            raise Decline("use_graph: rows that cu_seqlens does not cover are left undefined")
        if chunk_size not in (32, 64):
            raise Decline(f"chunk_size={chunk_size} is not 32 or 64")
        rule.check_beta_options(use_beta_sigmoid_in_kernel, allow_neg_eigval)
        _check_gate(use_gate_in_kernel, safe_gate, lower_bound)
        if not use_gate_in_kernel:
            A_log = dt_bias = lower_bound = None
        elif A_log is None and (lower_bound is None or not self.gate_without_A_log):
            raise Decline("use_gate_in_kernel without A_log")

        device = rule.check_tensors(
            5, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, A_log=A_log, dt_bias=dt_bias,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        batch, seqlen, n_heads, n_value_heads, head_dim, head_dim_v = rule.check_qkv(q, k, v)
        rule.check_chunked(q, k, v)
        heads = (batch, seqlen, n_value_heads)
        rule.check_shape("g", g, (*heads, head_dim))
        rule.check_shape("beta", beta, heads)
        rule.check_elements("A_log", A_log, n_value_heads)
        rule.check_elements("dt_bias", dt_bias, n_value_heads * head_dim)
        v_first = rule.v_first(state_v_first, transpose_state_layout)
        rule.check_state(initial_state, q, v, cu_seqlens, v_first)
        if initial_state is not None and initial_state.dtype != torch.float32:
            raise Decline(f"initial_state is {initial_state.dtype}, not float32")
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
            has_lower_bound=lower_bound is not None,
            safe_gate=bool(safe_gate),
            use_beta_sigmoid=bool(use_beta_sigmoid_in_kernel),
            allow_neg_eigval=bool(allow_neg_eigval),
            needs_grad=needs_grad(q, k, v, g, beta, initial_state, A_log, dt_bias),
            device_type="cpu" if q.is_cpu else "cuda",
        )
        return facts, device

    def plan(self, facts: KdaFacts, arch: str) -> Choice | Declined:
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
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        disable_recompute: bool = False,
        return_intermediate_states: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
        cp_context: Any = None,
        use_graph: bool = False,
        max_num_seqs: int | None = None,
        *,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        chunk_size: int = 64,
        transpose_state_layout: Any = NOT_GIVEN,
    ) -> Tensors:
        """`disable_recompute` trades upstream's memory for time; a planned launch (`cu_seqlens_cpu`) is FLA's."""
        rule.warn_deprecated(transpose_state_layout)
        if not use_gate_in_kernel:
            A_log = dt_bias = lower_bound = None
        o, final_state = kda(
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
            A_log=rule.flat(A_log),
            dt_bias=rule.flat(dt_bias),
            use_beta_sigmoid=bool(use_beta_sigmoid_in_kernel),
            allow_neg_eigval=bool(allow_neg_eigval),
            state_v_first=rule.v_first(state_v_first, transpose_state_layout),
            cu_seqlens=cu_seqlens,
            lower_bound=lower_bound,
            safe_gate=bool(safe_gate),
        )
        return o, rule.fp32(final_state)


class FusedRecurrentKda(PortableAdapter):
    """`fused_recurrent_kda`: decoding, one token after the other. As upstream's, its results carry no gradient."""

    family = "kda"

    def __init__(self, original: Callable[..., Any]) -> None:
        pass

    def facts(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool | None = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        *,
        transpose_state_layout: Any = NOT_GIVEN,
        **unknown: Any,
    ) -> tuple[KdaFacts, torch.device]:
        rule.check_call(unknown, NOT_GIVEN, transpose_state_layout, state_v_first, None, scale)
        rule.check_beta_options(use_beta_sigmoid_in_kernel, allow_neg_eigval)
        _check_gate(use_gate_in_kernel, False, lower_bound)
        if not use_gate_in_kernel:
            A_log = dt_bias = lower_bound = None
        elif A_log is None and lower_bound is None:
            raise Decline("use_gate_in_kernel without A_log")

        device = rule.check_tensors(
            5, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, A_log=A_log, dt_bias=dt_bias,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        batch, seqlen, n_heads, n_value_heads, head_dim, head_dim_v = rule.check_qkv(q, k, v)
        rule.check_recurrent(q, k, v)
        heads = (batch, seqlen, n_value_heads)
        rule.check_shape("g", g, (*heads, head_dim))
        rule.check_shape("beta", beta, heads, (*heads, head_dim_v))
        rule.check_elements("A_log", A_log, n_value_heads)
        rule.check_elements("dt_bias", dt_bias, n_value_heads * head_dim)
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
            has_lower_bound=lower_bound is not None,
            use_beta_sigmoid=bool(use_beta_sigmoid_in_kernel),
            allow_neg_eigval=bool(allow_neg_eigval),
            beta_per_channel=beta.dim() == 4,
            device_type="cpu" if q.is_cpu else "cuda",
        )
        return facts, device

    def plan(self, facts: KdaFacts, arch: str) -> Choice | Declined:
        return plan(facts, arch)

    def run(
        self,
        choice: Choice,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool | None = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        *,
        transpose_state_layout: Any = NOT_GIVEN,
    ) -> Tensors:
        rule.warn_deprecated(transpose_state_layout)
        if not use_gate_in_kernel:
            A_log = dt_bias = lower_bound = None
        with torch.no_grad():
            o, final_state = recurrent_kda(
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
                A_log=rule.flat(A_log),
                dt_bias=rule.flat(dt_bias),
                use_beta_sigmoid=bool(use_beta_sigmoid_in_kernel),
                allow_neg_eigval=bool(allow_neg_eigval),
                state_v_first=rule.v_first(state_v_first, transpose_state_layout),
                cu_seqlens=cu_seqlens,
                lower_bound=lower_bound,
            )
            return o, rule.fp32(final_state)


def _check_gate(use_gate_in_kernel: Any, safe_gate: Any, lower_bound: Any) -> None:
    """The bounded gate's bound. Without the gate in the kernel upstream reads neither of the two arguments."""
    rule.check_number("lower_bound", lower_bound)
    if safe_gate and use_gate_in_kernel:
        if lower_bound is None:
            raise Decline("safe_gate and use_gate_in_kernel without lower_bound")
        if not -5 <= lower_bound < 0:
            raise Decline(f"lower_bound={lower_bound} is outside [-5, 0), safe_gate's range")
