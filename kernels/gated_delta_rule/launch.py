"""The recurrent kernel, host side: the configuration of a call, its outputs, the launch.

Kept short on purpose: every token of every layer pays for each line of `recurrent`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel.outcome import Decline, Declined

from ..runtime import arch as archs
from ..runtime.compile import Kernel, build_object, function
from ..runtime.tensors import INDEX_NAMES, NAMES, aligned_rows, dtype_name, reachable
from .config import COLUMNS, HEAD_DIMS, VECTOR, RecurrentConfig
from .facts import GatedDeltaRuleFacts
from .plan import CHUNKED, FAMILY, RECURRENT, plan

MANY = 2048  #: warps of a launch from which CTAs have four of them; below, one, so that every SM gets some
_loaded: dict[tuple[Any, ...], Callable[..., Any]] = {}


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    beta: Tensor | None = None,
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
    in_place: bool = False,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`recurrent_gated_delta_rule` on a CUDA device, of shapes that were checked. No gradient is recorded.

    `in_place`: `initial_state` is overwritten with the final state and returned. `indices` [N] (with in_place): the
    entries of `initial_state` that belong to the sequences. Raises Decline where the kernel does not take the call.
    """
    batch, tokens, _, head_dim = q.shape
    _, _, heads_v, head_dim_v = v.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = v.new_empty(batch, tokens, heads_v, head_dim_v)
    if in_place:
        final = initial_state
    elif output_final_state:
        inner = (head_dim_v, head_dim) if state_v_first else (head_dim, head_dim_v)
        final = v.new_empty(sequences, heads_v, *inner, dtype=torch.float32)
    else:
        final = None
    if sequences == 0 or tokens == 0 or heads_v == 0:
        return _nothing(out, initial_state, final)
    single = tokens == 1 and cu_seqlens is None
    many = sequences * heads_v * (head_dim_v // COLUMNS) > MANY
    if not use_gate:
        A_log = dt_bias = None
    key = (
        head_dim, head_dim_v % COLUMNS, q.dtype, k.dtype, v.dtype, g is None or g.dtype, beta is None or beta.dtype,
        A_log is None or A_log.dtype, dt_bias is None or dt_bias.dtype, initial_state is None or initial_state.dtype,
        final is None or final.dtype, state_v_first, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval,
        indices is None or indices.dtype, cu_seqlens is None or cu_seqlens.dtype, single, many, q.get_device(),
    )  # fmt: skip
    launch = _loaded.get(key)
    if launch is None:
        config = config_of(
            q, k, v, g, beta, A_log, dt_bias, initial_state, final, state_v_first, use_qk_l2norm, use_beta_sigmoid,
            allow_neg_eigval, indices, cu_seqlens, single, many,
        )  # fmt: skip
        target = archs.compile_target(archs.dispatch_arch(q.device))
        launch = _loaded[key] = function(Kernel(FAMILY, RECURRENT, config), target)
    start = initial_state
    if (
        start is not None
        and not (start.is_contiguous() and start.data_ptr() & 15 == 0)
        and not reachable(start, VECTOR)
    ):
        if in_place:
            raise Decline(f"the state's rows are not aligned: strides {start.stride()}, at {start.data_ptr() & 15}")
        start = start.clone(memory_format=torch.contiguous_format)
    if in_place:
        final = start
    launch(
        aligned_rows(q),
        aligned_rows(k),
        aligned_rows(v),
        out if g is None else g,
        out if beta is None else beta,
        out if A_log is None else _flat(A_log),
        out if dt_bias is None else _flat(dt_bias),
        out if start is None else start,
        out if final is None else final,
        out if indices is None else indices,
        out if cu_seqlens is None else cu_seqlens,
        out,
        head_dim**-0.5 if scale is None else scale,
    )
    return out, final


def config_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial: Tensor | None,
    final: Tensor | None,
    v_first: bool,
    l2norm: bool,
    sigmoid: bool,
    twice: bool,
    indices: Tensor | None,
    cu_seqlens: Tensor | None,
    single: bool,
    many: bool,
) -> RecurrentConfig:
    """Raises Decline where there is no such kernel, for what the plan looks at and for dtypes of the other tensors."""
    arch = archs.dispatch_arch(q.device)
    facts = GatedDeltaRuleFacts(
        mode="recurrent",
        dtype=dtype_name(q),
        v_dtype=dtype_name(v),
        n_heads=q.shape[2],
        n_value_heads=v.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        use_beta_sigmoid=sigmoid,
        allow_neg_eigval=twice,
        device_type=q.device.type,
    )
    choice = plan(facts, arch)
    if isinstance(choice, Declined):
        raise Decline(choice.reason)
    if choice.kernel != RECURRENT:
        raise Decline(f"the {choice.kernel} kernel launches nothing on {q.device}")
    if k.dtype != q.dtype:
        raise Decline(f"q is {q.dtype}, k is {k.dtype}")
    names: dict[str, str | None] = {}
    for name, tensor, known in (
        ("g", g, NAMES),
        ("beta", beta, NAMES),
        ("A_log", A_log, NAMES),
        ("dt_bias", dt_bias, NAMES),
        ("initial_state", initial, NAMES),
        ("final_state", final, NAMES),
        ("indices", indices, INDEX_NAMES),
        ("cu_seqlens", cu_seqlens, INDEX_NAMES),
    ):
        if tensor is not None and tensor.dtype not in known:
            raise Decline(f"{name} is {tensor.dtype}: the recurrent kernel takes {', '.join(known.values())}")
        if tensor is not None and tensor.get_device() != q.get_device():
            raise Decline(f"{name} is on {tensor.device}, q on {q.device}")
        names[name] = None if tensor is None else known[tensor.dtype]
    return RecurrentConfig(
        head_dim=q.shape[3],
        dtype=dtype_name(q),
        v_dtype=dtype_name(v),
        g_dtype=names["g"],
        beta_dtype=names["beta"],
        a_dtype=names["A_log"],
        bias_dtype=names["dt_bias"],
        initial=names["initial_state"],
        final=names["final_state"],
        v_first=v_first,
        l2norm=l2norm,
        beta="plain" if not sigmoid else "twice_sigmoid" if twice else "sigmoid",
        index=names["indices"],
        packed=names["cu_seqlens"],
        single=single,
        warps=4 if many else 1,
        overlap=archs.overlaps(arch),
    )


def _nothing(out: Tensor, initial: Tensor | None, final: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """No token or no state at all."""
    if final is not None and final is not initial:
        if initial is None:
            final.zero_()
        else:
            final.copy_(initial)
    return out.zero_(), final


def _flat(t: Tensor) -> Tensor:
    return t if t.dim() == 1 and t.is_contiguous() else t.reshape(-1).contiguous()


def builds(target: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, thunk that compiles into the disk cache) for what models' layers call, on a target's archs.

    Other dtypes and options compile on first use, the recurrent kernel in under a second.
    """
    from . import chunk  # which imports the plan as this module does, and is of no use to decoding

    for arch in archs.archs_of(target):
        for config in common_configs(arch):
            layer = "raw gates, state [V, K]" if config.v_first else "log decays, state [K, V]"
            name = f"{RECURRENT} K={config.head_dim}, {layer}, {'one token' if config.single else 'more'},"
            yield (
                f"{name} {config.warps} warps ({arch})",
                partial(build_object, Kernel(FAMILY, RECURRENT, config), target),
            )
        if arch == "sm_90":
            for chunked in chunk.common_configs():
                yield chunk.described(chunked), partial(build_object, Kernel(FAMILY, CHUNKED, chunked), target)


def common_configs(arch: str) -> Iterator[RecurrentConfig]:
    for head_dim in HEAD_DIMS:
        for warps in (1, 4):
            for single in (True, False):
                raw = ("bfloat16", "bfloat16", "float32", "float32")
                activated = ("float32", "bfloat16", None, None)
                for v_first, scalars in ((True, raw), (False, activated)):
                    yield RecurrentConfig(
                        head_dim, "bfloat16", "bfloat16", *scalars, "float32", "float32", v_first, True,
                        "sigmoid" if v_first else "plain", None, None, single, warps, archs.overlaps(arch),
                    )  # fmt: skip
