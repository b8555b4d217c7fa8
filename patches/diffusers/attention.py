"""diffusers.sdpa: the `native` entry of diffusers' attention backend registry.

`dispatch_attention_fn` looks the entry up in every call, so replacing it reaches pipelines built before and after.
Models pinned to another backend keep theirs, and which backend is active does not change.

Not reached: processors that call torch themselves (`models/attention_processor.py`: Stable Diffusion 1.5, XL and 3, and
most VAEs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from accel import serve
from accel.kernels.attention import AttentionFacts, launch, plan, read
from accel.outcome import Choice, Decline, Declined
from accel.rebind import Rebinding
from accel.state import TargetState

from .. import checks, sdpa


class Native:
    """Reads what `_native_attention` is asked for, by its own rules."""

    family = "attention"
    in_place = False

    def facts(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
        **unknown: Any,
    ) -> tuple[AttentionFacts, torch.device]:
        """The facts of the one `scaled_dot_product_attention` that upstream would call.

        q, k and v are (batch, seqlen, heads, head_dim). A mask of (batch, seqlen_k) is one over the keys;
        of two other dimensions, upstream hands it to torch as (seqlen_q, seqlen_k).
        """
        checks.unknown_keywords(unknown)
        if return_lse:
            raise Decline("return_lse is given")
        if _parallel_config is not None:
            raise Decline("the attention is spread over ranks by a parallel configuration")
        if attn_mask is not None and is_causal:
            raise Decline("is_causal and a mask are given")
        if type(is_causal) is not bool:
            raise Decline(f"is_causal is a {type(is_causal).__name__}, not a bool")
        sdpa.call(dropout_p, scale)
        device = sdpa.device_of(query, key, value, "attn_mask", attn_mask)
        sdpa.ambient(query)
        needs_grad = checks.needs_grad(query, key, value, attn_mask)
        causal = "top_left" if is_causal else "none"
        facts = read(query, key, value, attn_mask, causal=causal, needs_grad=needs_grad, seqlen_dim=1, key_mask=True)
        if facts.group != 1 and not enable_gqa:
            raise Decline(f"q has {facts.heads_q} heads, k {facts.heads_kv}, and enable_gqa is off")
        return facts, device

    def plan(self, facts: AttentionFacts, arch: str) -> Choice | Declined:
        """The attention family's plan."""
        return plan(facts, arch)

    def run(
        self,
        choice: Choice,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> torch.Tensor:
        """(batch, seqlen, heads, head_dim)."""
        if attn_mask is not None and attn_mask.dim() == 2:
            attn_mask = attn_mask[:, None, None]
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        causal = "top_left" if is_causal else "none"
        config: Any = choice.config
        return launch.run(config, q, k, v, mask=attn_mask, causal=causal, scale=scale, seqlen_dim=1)[0]

    def compiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Upstream's own code, which Dynamo traces."""
        return original(*args, **kwargs)


def patch(module: ModuleType, state: TargetState) -> Iterable[Rebinding]:
    """The rebinding of the `native` entry, `module` being `diffusers.models.attention_dispatch`.

    Only the function is exchanged: the registry's constraints, argument names and active backend stay as they are.
    Raises LookupError where the entry is missing, or is not diffusers' own function: somebody chose another one.
    """
    entries = getattr(vars(module).get("_AttentionBackendRegistry"), "_backends", {})
    name = getattr(vars(module).get("AttentionBackendName"), "NATIVE", None)
    if name not in entries:
        raise LookupError(f"{module.__name__} has no attention backend registry with a native entry")

    def write(function: Callable[..., Any]) -> None:
        entries[name] = function

    return serve.entry(
        "_AttentionBackendRegistry._backends['native']",
        lambda: entries[name],
        write,
        Native(),
        state,
        own=vars(module).get("_native_attention"),
    )
