"""transformers.sdpa: the function behind the `"sdpa"` key of transformers' `AttentionInterface`.

Every attention layer looks the key up in every forward, so replacing the entry reaches models built before and after,
and those with an interface of their own. The key keeps its name (masks are chosen by it), and masks are not touched.

Not reached: models that call `torch.nn.functional.scaled_dot_product_attention` themselves (SAM, Falcon, AIMv2, ...).
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

#: Keywords that ask for other maths or for a warning. Upstream's function, 5.17 to 5.24, reads `softcap` (raises) and
#: `output_attentions` (warns), and drops the learned sinks in silence; what it makes of them stays its business.
DECLINED_KEYWORDS = frozenset(("softcap", "s_aux", "sinks", "output_attentions"))
#: Keywords that models pass and upstream's function takes and ignores: the window and the packing are in the mask,
#: everything else is meant for other implementations. So it does with any keyword not named here, and so do we.
IGNORED_KEYWORDS = (
    "sliding_window",
    "position_ids",
    "use_cache",
    "cache",
    "past_key_values",
    "cache_position",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "indices",
    "block_indices",
    "deterministic",
)


class Sdpa:
    """Reads what `sdpa_attention_forward` is asked for, by its own rules."""

    family = "attention"
    in_place = False

    def facts(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[AttentionFacts, torch.device]:
        """The facts of the one `scaled_dot_product_attention` that upstream would call.

        q, k and v are (batch, heads, seqlen, head_dim); k and v carry the kv heads, which upstream repeats.
        """
        for name in kwargs:
            if name in DECLINED_KEYWORDS and kwargs[name] is not None and kwargs[name] is not False:
                raise Decline(f"{name} is given")
        if position_bias is not None:
            raise Decline("position_bias is given: an additive mask")
        if is_causal is not None and type(is_causal) is not bool:
            raise Decline(f"is_causal is a {type(is_causal).__name__}, not a bool")
        sdpa.call(dropout, scaling)
        group = getattr(module, "num_key_value_groups", 1)
        if type(group) is not int:
            raise Decline(f"num_key_value_groups is a {type(group).__name__}, not an int")
        device = sdpa.device_of(query, key, value, "attention_mask", attention_mask)
        sdpa.ambient(query)
        causal = _causal(module, query, attention_mask, is_causal)
        needs_grad = checks.needs_grad(query, key, value, attention_mask)
        # Of an empty static cache, upstream cuts off the keys that no query sees.
        only_seen = causal == "top_left"
        facts = read(query, key, value, attention_mask, causal=causal, needs_grad=needs_grad, only_seen_keys=only_seen)
        if facts.group != max(group, 1):
            raise Decline(f"q has {facts.heads_q} heads, k {facts.heads_kv}, the module groups them by {group}")
        return facts, device

    def plan(self, facts: AttentionFacts, arch: str) -> Choice | Declined:
        """The attention family's plan."""
        return plan(facts, arch)

    def run(
        self,
        choice: Choice,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """(batch, seqlen, heads, head_dim), contiguous, and no attention weights: what upstream returns."""
        causal = _causal(module, query, attention_mask, is_causal)
        if causal == "top_left" and key.size(2) > query.size(2):
            key, value = key[:, :, : query.size(2)], value[:, :, : query.size(2)]
        config: Any = choice.config
        out, _ = launch.run(config, query, key, value, mask=attention_mask, causal=causal, scale=scaling, seqlen_dim=1)
        return out, None

    def compiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Upstream's own code, which Dynamo traces."""
        return original(*args, **kwargs)


def _causal(module: Any, query: torch.Tensor, mask: torch.Tensor | None, is_causal: bool | None) -> str:
    """Upstream's rule: a mask says it all, one query sees every key, and the module decides where the call does not."""
    if mask is not None or query.dim() != 4 or query.size(2) <= 1:
        return "none"
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return "top_left" if is_causal else "none"


def patch(module: ModuleType, state: TargetState) -> Iterable[Rebinding]:
    """The rebinding of the `"sdpa"` entry, `module` being `transformers.modeling_utils`.

    Raises LookupError where the entry is missing, or is not transformers' own function: somebody chose another one.
    """
    interface = vars(module).get("AttentionInterface")
    entries = getattr(interface, "_global_mapping", {})
    if interface is None or "sdpa" not in entries:
        raise LookupError(f"{module.__name__} has no AttentionInterface with an 'sdpa' entry")

    def write(function: Callable[..., Any]) -> None:
        interface.register("sdpa", function)

    return serve.entry(
        "AttentionInterface['sdpa']",
        lambda: entries["sdpa"],
        write,
        Sdpa(),
        state,
        own=vars(module).get("sdpa_attention_forward"),
    )
