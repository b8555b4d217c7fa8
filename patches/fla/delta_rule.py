"""What FLA's four delta-rule functions share: their checks, the deprecated state layout, and how calls are rebound.

Everything is checked from metadata. What upstream would reject is declined, so that upstream raises its own error.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from accel import serve
from accel.imports import being_imported
from accel.outcome import Decline
from accel.rebind import Rebinding
from accel.serve import Adapter
from accel.state import TargetState

from ..checks import plain, unknown_keywords
from . import dispatch

#: Tells an argument that was not given from one that was given as None.
NOT_GIVEN: Any = object()
#: The chunked kernels of FLA hold a key row in one block.
MAX_HEAD_DIM = 256


def rebind(
    module: ModuleType, name: str, adapter: Callable[[Any], Adapter], operation: str | None, state: TargetState
) -> list[Rebinding]:
    """Every holder of the function defined as `name`, and FLA's dispatch under `operation` for what holds it unseen.

    `module` is the one that defines it, or the `backends` module beside that. `adapter` makes the adapter from
    upstream's function.
    """
    if module.__name__.endswith(".backends"):
        defining = sys.modules.get(module.__name__.removesuffix("backends") + "chunk")
        if defining is None or being_imported(defining):
            return []  # its own turn comes
        module = defining
    current = vars(module)[name]
    call = serve.behind(module, name, state)
    if call is None:
        made = serve.everywhere(module, name, adapter(current), state)
        call = serve.wrapped_call(state.wrappers[id(current)], state)
    else:
        made = serve.everywhere(module, name, call.adapter, state)
    assert call is not None
    return made + (dispatch.entry(call.original, operation, call) if operation else [])


def in_our_words(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of FLA under our ops' keywords, for the cases of a kernel family."""
    names = {name: f"{name}_in_kernel" for name in ("use_qk_l2norm", "use_gate", "use_beta_sigmoid")}

    def call(**arguments: Any) -> Any:
        return function(**{names.get(name, name): value for name, value in arguments.items()})

    return call


def check_call(
    unknown: dict[str, Any],
    head_first: Any,
    transpose_state_layout: Any,
    state_v_first: Any,
    cp_context: Any,
    scale: Any,
) -> None:
    """What is declined before a tensor is looked at."""
    unknown_keywords(unknown)
    if head_first is not NOT_GIVEN:
        raise Decline("head_first was removed upstream")
    if transpose_state_layout is not NOT_GIVEN and state_v_first:
        raise Decline("both state_v_first and transpose_state_layout")
    if cp_context is not None:
        raise Decline("cp_context: context parallelism")
    check_number("scale", scale)


def check_beta_options(use_beta_sigmoid: Any, allow_neg_eigval: Any) -> None:
    if allow_neg_eigval and not use_beta_sigmoid:
        raise Decline("allow_neg_eigval without use_beta_sigmoid_in_kernel")


def check_number(name: str, value: Any) -> None:
    """Decline an optional number that is none, e.g. a tensor."""
    if value is not None and not isinstance(value, (int, float)):
        raise Decline(f"{name} is a {type(value).__name__}, not a number")


def check_tensors(required: int, /, **tensors: Any) -> torch.device:
    """Decline what is no plain tensor, and a missing one among the first `required`; the device they share."""
    try:
        device = plain(**tensors)
    except Decline:
        for index, (name, value) in enumerate(tensors.items()):
            if not isinstance(value, torch.Tensor) and (value is not None or index < required):
                raise Decline(f"{name} is a {type(value).__name__}, not a tensor") from None
        raise
    for name in itertools.islice(tensors, required):
        if tensors[name] is None:
            raise Decline(f"{name} is a NoneType, not a tensor")
    return device


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    """q, k [B, T, H, K] and v [B, T, HV, V], HV a multiple of H. Returns (B, T, H, HV, K, V)."""
    q_shape, v_shape = q.shape, v.shape
    if len(q_shape) != 4 or len(v_shape) != 4:
        raise Decline(f"q is {_shape(q)} and v {_shape(v)}, not [B, T, heads, head_dim]")
    if k.shape != q_shape:
        raise Decline(f"k is {_shape(k)}, q is {_shape(q)}")
    batch, seqlen, heads, head_dim = q_shape
    v_batch, v_seqlen, v_heads, head_dim_v = v_shape
    if v_batch != batch or v_seqlen != seqlen:
        raise Decline(f"v is {_shape(v)}, q is {_shape(q)}")
    if heads == 0 or v_heads % heads:
        raise Decline(f"{v_heads} value heads are no multiple of {heads} heads")
    return batch, seqlen, heads, v_heads, head_dim, head_dim_v


def check_chunked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """What FLA's chunked kernels need beyond that: they multiply q, k and v with each other as they are."""
    if not q.dtype == k.dtype == v.dtype:
        raise Decline(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape[3] > MAX_HEAD_DIM:
        raise Decline(f"head_dim={q.shape[3]} > {MAX_HEAD_DIM}, upstream's limit")


def check_recurrent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The facts carry one dtype for q and k; v may have another."""
    if q.dtype != k.dtype:
        raise Decline(f"q is {q.dtype}, k is {k.dtype}")


def check_shape(name: str, tensor: torch.Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Decline a tensor of none of these shapes, or one that is not floating point."""
    if tensor is None:
        return
    if tensor.shape not in shapes:
        raise Decline(f"{name} is {_shape(tensor)}, not {' or '.join(str(list(shape)) for shape in shapes)}")
    if not tensor.is_floating_point():
        raise Decline(f"{name} is {tensor.dtype}")


def check_elements(name: str, tensor: torch.Tensor | None, count: int) -> None:
    """Decline a parameter of another size; its kernels read it flat, so the shape is free."""
    if tensor is not None and tensor.numel() != count:
        raise Decline(f"{name} has {tensor.numel()} elements, not {count}")


def check_state(
    initial_state: torch.Tensor | None,
    q: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    v_first: Any,
) -> None:
    """cu_seqlens [N + 1] with a batch of 1; initial_state [N, HV, K, V], or [N, HV, V, K] if `v_first`."""
    if cu_seqlens is None and initial_state is None:
        return
    sequences = q.shape[0]
    if cu_seqlens is not None:
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise Decline(f"cu_seqlens is {cu_seqlens.dtype}, not int32 or int64")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise Decline(f"cu_seqlens is {_shape(cu_seqlens)}, not [N + 1]")
        if q.shape[0] != 1:
            raise Decline(f"cu_seqlens with a batch of {q.shape[0]}")
        sequences = cu_seqlens.shape[0] - 1
    k_dim, v_dim = q.shape[3], v.shape[3]
    inner = (v_dim, k_dim) if v_first else (k_dim, v_dim)
    check_shape("initial_state", initial_state, (sequences, v.shape[2], *inner))


def v_first(state_v_first: Any, transpose_state_layout: Any) -> bool:
    """The state layout a call asks for, by its present or its deprecated name."""
    return bool(state_v_first if transpose_state_layout is NOT_GIVEN else transpose_state_layout)


def warn_deprecated(transpose_state_layout: Any) -> None:
    """Upstream's deprecation warning, at the line that makes the call."""
    if transpose_state_layout is NOT_GIVEN:
        return
    # frames between: this one, run, ServedCall._run, ServedCall.__call__, the wrapper
    warnings.warn(
        "`transpose_state_layout` is deprecated and renamed to `state_v_first`.", DeprecationWarning, stacklevel=6
    )


def fp32(final_state: torch.Tensor | None) -> torch.Tensor | None:
    """FLA's final states are fp32 whatever the inputs are."""
    return None if final_state is None else final_state.float()


def flat(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.reshape(-1)


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
