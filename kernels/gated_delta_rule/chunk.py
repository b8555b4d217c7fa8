"""The chunked kernels, host side: the configuration of a call, its memory, the launch. Nothing is read on the host.

Kept short on purpose, as `launch.recurrent` is: every layer of a model pays for each line of `chunk`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from accel.outcome import Decline, Declined

from ..runtime import arch as archs
from ..runtime.compile import Kernel, function
from ..runtime.launch import sm_count
from ..runtime.tensors import ALIGNMENT, INDEX_NAMES, NAMES, dtype_name, reachable
from . import chunk_config
from .chunk_config import ChunkConfig
from .config import VECTOR
from .facts import GatedDeltaRuleFacts
from .plan import CHUNKED, FAMILY, plan

_loaded: dict[tuple[Any, ...], Callable[..., Any]] = {}


def chunk(
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
    """`gated_delta_rule` on a CUDA device, of shapes that were checked. No gradient is recorded.

    Raises Decline where the kernels do not take the call.
    """
    batch, tokens, _, head_dim = q.shape
    _, _, heads_v, head_dim_v = v.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if not use_gate:
        A_log = dt_bias = None
    index = q.get_device()
    width = chunk_config.warpgroups(head_dim, head_dim_v, sequences * heads_v, sm_count(index))
    key = (
        head_dim, head_dim_v, q.dtype, k.dtype, v.dtype, g.dtype, beta.dtype, A_log is None or A_log.dtype,
        dt_bias is None or dt_bias.dtype, initial_state is None or initial_state.dtype, output_final_state,
        state_v_first, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, cu_seqlens is None or cu_seqlens.dtype,
        width, index,
    )  # fmt: skip
    launch = _loaded.get(key)
    if launch is None:
        config = config_of(
            q, k, v, g, beta, A_log, dt_bias, initial_state, bool(output_final_state), state_v_first, use_qk_l2norm,
            use_beta_sigmoid, allow_neg_eigval, cu_seqlens, width,
        )  # fmt: skip
        target = archs.compile_target(archs.dispatch_arch(q.device))
        launch = _loaded[key] = function(Kernel(FAMILY, CHUNKED, config), target)
    out = v.new_empty(batch, tokens, heads_v, head_dim_v)
    final = None
    if output_final_state:
        inner = (head_dim_v, head_dim) if state_v_first else (head_dim, head_dim_v)
        final = v.new_empty(sequences, heads_v, *inner, dtype=torch.float32)
    if sequences == 0 or tokens == 0 or heads_v == 0:
        return nothing(out, initial_state, final)
    slots = chunk_config.slots(batch * tokens, sequences, cu_seqlens is not None)
    size = chunk_config.workspace_bytes(slots, sequences, heads_v, head_dim, head_dim_v)
    launch(
        packed_rows(q),
        packed_rows(k),
        packed_rows(v),
        per_head(g),
        per_head(beta),
        out if A_log is None else flat(A_log),
        out if dt_bias is None else flat(dt_bias),
        out if initial_state is None else state_rows(initial_state),
        out if final is None else final,
        out if cu_seqlens is None else cu_seqlens.contiguous(),
        v.new_empty(size, dtype=torch.uint8),
        out,
        sequences,
        head_dim**-0.5 if scale is None else scale,
    )
    return out, final


def packed_rows(t: Tensor) -> Tensor:
    """A [B, T, heads, D] tensor whose rows lie T apart from batch to batch, as the copy engine reaches them; or a copy.

    The engine wants the channels next to each other, and everything else at multiples of 16 bytes.
    """
    batch, row, head, channel = t.stride()
    if (
        channel == 1
        and not (batch | row | head) & (ALIGNMENT // 2 - 1)
        and (batch == row * t.shape[1] or t.shape[0] == 1)
        and row > 0 < head
        and not t.data_ptr() & (ALIGNMENT - 1)
    ):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def per_head(t: Tensor) -> Tensor:
    """A [B, T, heads] tensor whose rows lie T apart from batch to batch; or a copy."""
    return t if t.shape[0] == 1 or t.stride(0) == t.stride(1) * t.shape[1] else t.contiguous()


def state_rows(t: Tensor) -> Tensor:
    """States whose rows begin at multiples of `VECTOR` elements, the first of 16 bytes; or a copy."""
    if not t.data_ptr() & (ALIGNMENT - 1) and (t.is_contiguous() or reachable(t, VECTOR)):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def flat(t: Tensor) -> Tensor:
    return t if t.dim() == 1 and t.is_contiguous() else t.reshape(-1).contiguous()


def nothing(out: Tensor, initial: Tensor | None, final: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """No token or no state at all."""
    if final is not None:
        if initial is None:
            final.zero_()
        else:
            final.copy_(initial)
    return out.zero_(), final


def config_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial: Tensor | None,
    final: bool,
    v_first: bool,
    l2norm: bool,
    sigmoid: bool,
    twice: bool,
    cu_seqlens: Tensor | None,
    warpgroups: int,
) -> ChunkConfig:
    """Raises Decline where there is no such kernel, for what the plan looks at and for dtypes of the other tensors."""
    facts = GatedDeltaRuleFacts(
        mode="chunk",
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
    arch = archs.dispatch_arch(q.device)
    choice = plan(facts, arch)
    if isinstance(choice, Declined):
        raise Decline(choice.reason)
    if choice.kernel != CHUNKED:
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
        ("cu_seqlens", cu_seqlens, INDEX_NAMES),
    ):
        if tensor is not None and tensor.dtype not in known:
            raise Decline(f"{name} is {tensor.dtype}: the chunked kernel takes {', '.join(known.values())}")
        if tensor is not None and tensor.get_device() != q.get_device():
            raise Decline(f"{name} is on {tensor.device}, q on {q.device}")
        names[name] = None if tensor is None else known[tensor.dtype]
    assert names["g"] is not None and names["beta"] is not None
    return ChunkConfig(
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=dtype_name(q),
        g_dtype=names["g"],
        beta_dtype=names["beta"],
        a_dtype=names["A_log"],
        bias_dtype=names["dt_bias"],
        initial=names["initial_state"],
        final="float32" if final else None,
        v_first=v_first,
        l2norm=l2norm,
        beta="plain" if not sigmoid else "twice_sigmoid" if twice else "sigmoid",
        packed=names["cu_seqlens"],
        warpgroups=warpgroups,
        stages=chunk_config.stages(q.shape[3], warpgroups),
        overlap=archs.overlaps(arch),
    )


def common_configs() -> Iterator[ChunkConfig]:
    """What models' layers call: FLA's raw gates with states [V, K], and transformers' log decays with states [K, V]."""
    layers = (
        ((128, 128), True, None),
        ((128, 128), True, "float32"),
        ((128, 128), False, "float32"),
        ((256, 512), True, None),
        ((256, 512), True, "float32"),
    )
    for (head_dim, head_dim_v), raw, final in layers:
        scalars = ("bfloat16", "bfloat16", "float32", "float32") if raw else ("float32", "bfloat16", None, None)
        for width in sorted({chunk_config.warpgroups(head_dim, head_dim_v, n, 132) for n in (1, 1 << 20)}):
            yield ChunkConfig(
                head_dim, head_dim_v, "bfloat16", *scalars, None, final, raw, True, "sigmoid" if raw else "plain",
                None, width, chunk_config.stages(head_dim, width),
            )  # fmt: skip


def described(c: ChunkConfig) -> str:
    layer = "raw gates, state [V, K]" if c.v_first else "log decays, state [K, V]"
    kept = "final state" if c.final else "no final state"
    return f"{CHUNKED} K={c.head_dim} V={c.head_dim_v}, {layer}, {kept}, {c.warpgroups} warpgroups (sm_90)"
