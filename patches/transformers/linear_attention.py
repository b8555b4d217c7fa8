"""transformers.gated_delta_rule and transformers.kda: what hybrid models call, as globals of their module.

transformers decorates a plain torch function when a modeling module is imported: FLA's function is frozen in its
closure if FLA is installed, and every keyword that FLA's signature lacks is dropped. The global is replaced by name,
because that works before and after a model is built; the call is read by the rules of whichever function is in the
closure.

Served on a CPU, where FLA itself cannot run, and on GPUs the gated delta rule: token by token (decoding), and on Hopper
in chunks too (prefill). Not reached: functions under other names; remote code whose function is FLA's neither by name
nor in its closure, since nothing says what it computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from accel import serve
from accel.kernels.gated_delta_rule import chunk, gated_delta_rule, launch, recurrent_gated_delta_rule
from accel.kernels.gated_delta_rule.facts import GatedDeltaRuleFacts
from accel.kernels.gated_delta_rule.plan import CHUNKED, RECURRENT
from accel.kernels.gated_delta_rule.plan import plan as gated_delta_rule_plan
from accel.kernels.kda import kda, recurrent_kda
from accel.kernels.kda.facts import KdaFacts
from accel.kernels.kda.plan import plan as kda_plan
from accel.kernels.runtime.interned import interned
from accel.outcome import Choice, Decline, Declined
from accel.rebind import Rebinding
from accel.state import TargetState

from .. import checks
from ..fla import delta_rule as rule
from ..fla.gated_delta_rule import ChunkGatedDeltaRule, FusedRecurrentGatedDeltaRule
from ..fla.kda import ChunkKda, FusedRecurrentKda
from ..portable import CPU, PortableAdapter

Tensors = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Operation:
    """One of the four functions: what computes it, and the adapter of FLA's function for it."""

    family: str
    mode: str  #: chunk | recurrent
    compute: Callable[..., Tensors]
    facts: Callable[[], Callable[..., Any]]  #: the constructor, as `interned` gives it
    plan: Callable[[Any, str], Choice | Declined]
    fla: type[ChunkGatedDeltaRule | FusedRecurrentGatedDeltaRule | ChunkKda | FusedRecurrentKda]


_GDN = ("gated_delta_rule", interned(GatedDeltaRuleFacts), gated_delta_rule_plan)
_KDA = ("kda", interned(KdaFacts), kda_plan)
#: By target, then by the name of the module global.
OPERATIONS: dict[str, dict[str, Operation]] = {
    "transformers.gated_delta_rule": {
        "torch_chunk_gated_delta_rule": Operation(_GDN[0], "chunk", gated_delta_rule, *_GDN[1:], ChunkGatedDeltaRule),
        "torch_recurrent_gated_delta_rule": Operation(
            _GDN[0], "recurrent", recurrent_gated_delta_rule, *_GDN[1:], FusedRecurrentGatedDeltaRule
        ),
    },
    "transformers.kda": {
        "chunk_kimi_delta_attention": Operation(_KDA[0], "chunk", kda, *_KDA[1:], ChunkKda),
        "recurrent_kimi_delta_attention": Operation(_KDA[0], "recurrent", recurrent_kda, *_KDA[1:], FusedRecurrentKda),
    },
}

#: What launches a kernel of the plan's; plain torch is the operation's own.
KERNELS: dict[str, Callable[..., Tensors]] = {RECURRENT: launch.recurrent, CHUNKED: chunk.chunk}


@dataclass(frozen=True, slots=True)
class Upstream:
    """What transformers' decorator made: the function that computes, and the keywords that reach it."""

    implementation: Callable[..., Any]
    keywords: tuple[str, ...]
    is_reference: bool  #: transformers' own torch code; FLA is not installed, or could not be imported
    kernelized: nn.Module | None  #: Hugging Face's kernels have made a module of the function

    @classmethod
    def of(cls, held: Any) -> Upstream | None:
        """Read from the closures of what a module global holds; None where it is not the decorator's."""
        function, module = held, None
        if isinstance(held, nn.Module):
            module, function = held, _cells(type(held).forward).get("func")
        cells = _cells(function)
        implementation, keywords = cells.get("implementation"), cells.get("applicable_params")
        if not callable(implementation) or not isinstance(keywords, tuple):
            return None
        return cls(implementation, keywords, implementation is cells.get("torch_function"), module)

    @property
    def is_fla(self) -> bool:
        return getattr(self.implementation, "__module__", "").startswith("fla.")


class DeltaRule(PortableAdapter):
    """One of the four functions as one modeling module holds it."""

    def __init__(self, operation: Operation, upstream: Upstream) -> None:
        self.operation, self.upstream, self.family = operation, upstream, operation.family
        #: None: transformers' own torch code computes, in its own words.
        self.fla = None if upstream.is_reference else operation.fla(upstream.implementation)
        self.upstream_cannot_run_on: tuple[str, ...] = () if upstream.is_reference else (CPU,)
        parameters = inspect.signature(upstream.implementation).parameters.values()
        self.positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        self.names = {*self.positional, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)}
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.required = tuple(name for name in self.names if name not in self.defaults)
        self.keywords = frozenset(upstream.keywords)

    def facts(self, *args: Any, **kwargs: Any) -> tuple[Any, torch.device]:
        """The facts of the call that upstream's decorator would make of this one."""
        chosen = self.upstream.kernelized
        if chosen is not None and ("forward" in chosen.__dict__ or chosen._forward_hooks or chosen._forward_pre_hooks):
            raise Decline("a hub kernel was chosen for this function")
        if self.fla is not None:
            kept = self._kept(kwargs)
            try:
                return self.fla.facts(*args, **kept)
            except TypeError:
                self._check_fit(args, kept)
                raise
        for name in ("cu_seqlens", "seq_idx"):
            if kwargs.get(name) is not None:
                raise Decline(f"{name}: without flash-linear-attention, transformers refuses packed sequences")
        return self._reference_facts(**self._by_name(args, kwargs))

    def plan(self, facts: Any, arch: str) -> Choice | Declined:
        """The family's plan."""
        return self.operation.plan(facts, arch)

    def run(self, choice: Choice, *args: Any, **kwargs: Any) -> Tensors:
        """(o [B, T, HV, V] in the query's dtype, fp32 state [B, HV, K, V] or None)."""
        if self.fla is not None:
            return self.fla.run(choice, *args, **self._kept(kwargs))
        call = self._by_name(args, kwargs)
        query = call["query"]
        compute = KERNELS.get(choice.kernel, self.operation.compute)
        out, state = compute(
            query,
            call["key"],
            call["value"],
            call["g"],
            beta=call["beta"],
            initial_state=call["initial_state"],
            output_final_state=bool(call["output_final_state"]),
            use_qk_l2norm=bool(call["use_qk_l2norm_in_kernel"]),
        )
        return out.to(query.dtype), rule.fp32(state)

    def _kept(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords that upstream's decorator hands on."""
        keywords = self.keywords
        if keywords.issuperset(kwargs):
            return kwargs
        return {name: value for name, value in kwargs.items() if name in keywords}

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every argument that reaches upstream's function, defaults filled in. Raises Decline where it does not fit."""
        kept = self._kept(kwargs)
        self._check_fit(args, kept)
        return {**self.defaults, **dict(zip(self.positional, args, strict=False)), **kept}

    def _check_fit(self, args: tuple[Any, ...], kept: dict[str, Any]) -> None:
        """Decline what upstream's function would not take: an argument too many, twice, unknown or missing."""
        given = self.positional[: len(args)]
        fits = len(given) == len(args)
        for name in kept:
            if name in given or name not in self.names:
                fits = False
        for name in self.required:
            if name not in kept and name not in given:
                fits = False
        if not fits:
            raise Decline("the arguments do not fit the signature")

    def _reference_facts(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        chunk_size: int = 64,
    ) -> tuple[Any, torch.device]:
        """Upstream computes in fp32 whatever it is given, in chunks of any size."""
        operation = self.operation
        if type(chunk_size) is not int or chunk_size < 1:
            raise Decline(f"chunk_size={chunk_size!r} is not a positive number")
        device = rule.check_tensors(5, query=query, key=key, value=value, g=g, beta=beta, initial_state=initial_state)
        batch, seqlen, n_heads, n_value_heads, head_dim, head_dim_v = rule.check_qkv(query, key, value)
        rule.check_recurrent(query, key, value)
        if seqlen == 0:
            raise Decline("an empty sequence")
        heads = (batch, seqlen, n_value_heads)
        if operation.family == "kda":
            if n_heads != n_value_heads:
                raise Decline(f"{n_value_heads} value heads, {n_heads} heads: transformers' own code has one each")
            rule.check_shape("g", g, (*heads, head_dim))
        else:
            rule.check_shape("g", g, heads)
        rule.check_shape("beta", beta, heads)
        rule.check_state(initial_state, query, value, None, False)
        facts = operation.facts()(
            mode=operation.mode,
            dtype=checks.dtype_name(query.dtype),
            v_dtype=checks.dtype_name(value.dtype),
            n_heads=n_heads,
            n_value_heads=n_value_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            has_initial_state=initial_state is not None,
            output_final_state=bool(output_final_state),
            use_qk_l2norm=bool(use_qk_l2norm_in_kernel),
            needs_grad=checks.needs_grad(query, key, value, g, beta, initial_state),
            device_type="cpu" if query.is_cpu else "cuda",
        )
        return facts, device


def patch(module: ModuleType, state: TargetState) -> Iterable[Rebinding]:
    """The rebindings of the target's functions that `module` holds."""
    for name, operation in OPERATIONS[state.name].items():
        held = vars(module).get(name)
        call = serve.wrapped_call(held, state)
        upstream = Upstream.of(held if call is None else call.original)
        if upstream is None or not _understood(module, upstream):
            continue
        yield from serve.attribute(module, name, DeltaRule(operation, upstream), state)


def _understood(module: ModuleType, upstream: Upstream) -> bool:
    """Whether it is known what upstream's function computes: FLA's, or the torch code that transformers ships."""
    return upstream.is_fla or (upstream.is_reference and module.__name__.startswith("transformers.models."))


def _cells(function: Any) -> dict[str, Any]:
    """What a function's closure holds, by name."""
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return {}
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # an empty cell
            continue
    return found
