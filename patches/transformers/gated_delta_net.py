"""transformers.gated_delta_net: the whole GatedDeltaNet module of Qwen3-Next, Qwen3.5 (dense, MoE) and OLMo hybrid.

`cls.forward` is replaced where it is one of the sources in gated_delta_layouts.py (transformers 5.17 to 5.24; Qwen4 Exp
and Lara Mini have Qwen3.5's). The padding mask and the projections stay upstream's own calls, so hooks, LoRA and
quantised layers on them keep working; between them are three launches. The convolution returns tokens whose channels
lie next to each other, of which queries, keys and values are views; gates, beta and the l2 norm are part of the delta
rule, which reads grouped heads as they are; the gated norm reads its gate where the projection left it. A new token
moves both states of the cache on in place.

The module asks the plans of all three families, and for each kernel's certificate; if one declines, upstream's own
forward runs, in which the targets of its functions and of its norm still serve. So it is on a CPU: the functions are
served there, the module declines. Forward only. In compiled code upstream's own forward is traced.

Not reached: remote code, other layouts and look-alikes, which are not recognised; modules whose instance `forward`
somebody set (kernelize); subclasses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from accel import certificates, serve
from accel.kernels.causal_conv1d import launch as conv
from accel.kernels.causal_conv1d.facts import ConvFacts
from accel.kernels.causal_conv1d.plan import plan as conv_plan
from accel.kernels.gated_delta_rule import chunk
from accel.kernels.gated_delta_rule import launch as rule
from accel.kernels.gated_delta_rule.facts import GatedDeltaRuleFacts
from accel.kernels.gated_delta_rule.plan import plan as rule_plan
from accel.kernels.norm import rms_norm_gated
from accel.kernels.norm.facts import NormFacts
from accel.kernels.norm.plan import plan as norm_plan
from accel.kernels.runtime.interned import interned
from accel.outcome import Choice, Decline, Declined
from accel.rebind import Rebinding
from accel.state import TargetState, policy

from .. import checks, modules
from . import recognise
from .conv import ACTIVATIONS
from .gated_delta_layouts import Layout, Projected, recognised
from .linear_attention import Upstream
from .norm import RmsNorm

#: What upstream's forward calls, as globals of its module.
FUNCTIONS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)
#: Keywords of packed sequences; upstream takes the first out, and no function is handed the second as None.
_PACKED = ("cu_seq_lens_q", "seq_idx")


@dataclass(frozen=True, slots=True)
class NetFacts:
    """One call of the module: what the three families are asked with."""

    update: bool  #: one token each, the convolution's state moved on in place
    single: bool  #: one token each
    cached: bool  #: there is a cache: both states are kept
    dtype: str  #: of hidden_states
    conv_dtype: str  #: of the convolution's weight
    conv_width: int
    conv_bias: bool
    activation: str | None
    conv_state: tuple[str, int] | None  #: dtype and tokens; None: there is none before the first token
    n_heads: int
    n_value_heads: int
    head_dim: int
    head_dim_v: int
    has_state: bool
    neg_eigval: bool
    gate_dtypes: tuple[str, str]  #: of A_log and dt_bias
    norm_form: str
    norm_activation: str
    norm_dtype: str  #: of the norm's weight
    needs_grad: bool
    device_type: str

    @property
    def conv(self) -> ConvFacts:
        dtype, size = (None, 0) if self.conv_state is None else self.conv_state
        return ConvFacts(
            mode="update" if self.update else "forward",
            dtype=self.dtype,
            weight_dtype=self.conv_dtype,
            n_channels=2 * self.n_heads * self.head_dim + self.n_value_heads * self.head_dim_v,
            width=self.conv_width,
            activation=self.activation,
            has_bias=self.conv_bias,
            state_dtype=dtype,
            state_len=size,
            needs_grad=self.needs_grad,
            device_type=self.device_type,
        )

    @property
    def rule(self) -> GatedDeltaRuleFacts:
        return GatedDeltaRuleFacts(
            mode="recurrent" if self.single else "chunk",
            dtype=self.dtype,
            n_heads=self.n_heads,
            n_value_heads=self.n_value_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            has_initial_state=self.has_state,
            output_final_state=self.cached,
            use_qk_l2norm=True,
            use_gate=True,
            use_beta_sigmoid=True,
            allow_neg_eigval=self.neg_eigval,
            needs_grad=self.needs_grad,
            device_type=self.device_type,
        )

    @property
    def norm(self) -> NormFacts:
        return NormFacts(
            n_rows=1,  # only 2**31 of them would matter
            hidden=self.head_dim_v,
            dtype=self.dtype,
            weight_dtype=self.norm_dtype,
            form=self.norm_form,
            activation=self.norm_activation,
            gate_dtype=self.dtype,
            needs_grad=self.needs_grad,
            device_type=self.device_type,
            row_levels=2,
        )


_facts = interned(NetFacts)


def plan(facts: NetFacts, arch: str) -> Choice | Declined:
    """The rule's Choice, whose config is the facts, if all three families serve; else the first reason."""
    chosen = []
    for decision in (conv_plan(facts.conv, arch), rule_plan(facts.rule, arch), norm_plan(facts.norm, arch)):
        if isinstance(decision, Choice):
            decision = certificates.check(decision, arch, uncertified=policy.uncertified) or decision
        if isinstance(decision, Declined):
            return decision
        chosen.append(decision)
    convolution, delta_rule, norm = chosen
    return Choice(
        delta_rule.family,
        delta_rule.kernel,
        facts,
        notes=(f"with {convolution.family}.{convolution.kernel} and {norm.family}.{norm.kernel}",),
    )


class GatedDeltaNet:
    """The forward of one recognised class."""

    family = "gated_delta_net"  #: of its own: where it declines, the families below may still serve the parts
    families = ("causal_conv1d", "gated_delta_rule", "norm")
    in_place = True

    def __init__(self, cls: type, layout: Layout, forward: FunctionType) -> None:
        self.cls: Any = cls
        self.layout, self.globals = layout, forward.__globals__
        self.names = forward.__code__.co_varnames[1:4]  #: hidden_states, the cache, attention_mask
        self._held: tuple[tuple[Any, ...], frozenset[str], tuple[nn.Module, ...]] = ((), frozenset(), ())
        self._norms: dict[type, tuple[Any, RmsNorm]] = {}
        self._loaded: set[tuple[Any, ...]] = set()  #: configurations whose kernels a new token has met

    def concerns(self, *args: Any) -> bool:
        """Whether a call's module is of this class or a subclass of it; the target has an adapter for each class."""
        return bool(args) and isinstance(args[0], self.cls)

    def facts(self, *args: Any, **kwargs: Any) -> tuple[NetFacts, torch.device]:
        """The facts of a call of `forward(self, hidden_states, cache, attention_mask, **kwargs)`."""
        module, x, cache, _ = self._arguments(args, kwargs)
        self._call(kwargs)
        if type(module) is not self.cls:
            raise Decline(f"{type(module).__name__} is a subclass of {self.cls.__name__}")
        modules.no_global_hooks()
        weight, bias, a_log, dt_bias = _weights(module)
        norm_weight, form, norm_activation = self._norm(module)
        conv_state, state, recording = (None, None, False) if cache is None else states(cache, module.layer_idx)
        device = checks.plain(
            hidden_states=x, conv_weight=weight, conv_bias=bias, A_log=a_log, dt_bias=dt_bias, norm_weight=norm_weight,
            conv_state=conv_state, recurrent_state=state,
        )  # fmt: skip
        _not_on_cpu(device)
        heads, heads_v, head_dim, head_dim_v = dims = (
            module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
        )  # fmt: skip
        _check_shapes(dims, x, weight, bias, a_log, dt_bias)
        single, held = x.shape[1] == 1, None
        if conv_state is not None or state is not None:
            held = _check_states(dims, x, conv_state, state)
        if self.layout.whole_cache and cache is not None and cache.has_previous_state() != (held is not None):
            raise Decline("the cache's last layer has not seen the tokens that this one has, or the other way round")
        update = single and held is not None and not recording
        if recording and held is not None:  # the tokens that it keeps are no configuration
            held = held[0], min(held[1], weight.shape[2])
        cast = checks.autocast_dtype(device)
        if cast is not None and cast != x.dtype:
            raise Decline(f"autocast casts {checks.dtype_name(x.dtype)} to {checks.dtype_name(cast)}")
        name = checks.dtype_name
        facts = _facts()(
            update, single, cache is not None, name(x.dtype), name(weight.dtype), weight.shape[2], bias is not None,
            _activation(module.activation), held, heads, heads_v, head_dim, head_dim_v, state is not None,
            self.layout.neg_eigval and bool(module.allow_neg_eigval), (name(a_log.dtype), name(dt_bias.dtype)), form,
            norm_activation, name(norm_weight.dtype),
            checks.needs_grad(x, conv_state, state, *(module.parameters() if torch.is_grad_enabled() else ())),
            "cpu" if x.is_cpu else "cuda",
        )  # fmt: skip
        return facts, device

    def plan(self, facts: NetFacts, arch: str) -> Choice | Declined:
        """All three families' plans, and their certificates."""
        return plan(facts, arch)

    def run(self, choice: Choice, *args: Any, **kwargs: Any) -> Tensor:
        """What upstream's forward returns; the cache as that leaves it. Raises Decline before the cache is touched."""
        facts: NetFacts = choice.config  # type: ignore[assignment]
        module, x, cache, mask = self._arguments(args, kwargs)
        if mask is not None:
            shape = x.shape
            x = self.globals["apply_mask_to_padding_states"](x, mask)
            if type(x) not in checks.PLAIN or x.shape != shape:
                raise Decline(f"the mask makes hidden_states a {type(x).__name__} {list(x.shape)}")
        projected = self.layout.project(module, x)
        if projected.qkv.dtype != x.dtype or projected.z.dtype != x.dtype:
            raise Decline(f"projections of {x.dtype} return {projected.qkv.dtype} and {projected.z.dtype}")
        if checks.needs_grad(projected.qkv, projected.z, projected.beta, projected.g):
            raise Decline("a gradient is needed of what a projection returned")
        if facts.update:
            y = self._update(facts, module, projected, cache.layers[module.layer_idx])
        else:
            y = self._prefill(facts, module, projected, cache)
        batch, tokens, _ = x.shape
        return getattr(module, self.layout.out)(y.view(batch, tokens, -1))  # type: ignore[no-any-return]

    def compiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Upstream's own forward, which Dynamo traces."""
        return original(*args, **kwargs)

    def _update(self, facts: NetFacts, module: Any, projected: Projected, layer: Any) -> Tensor:
        """One new token of each sequence: both states move on where they lie."""
        conv_state, state = layer.conv_states[0], layer.recurrent_states[0]
        key = (
            facts, conv_state.shape[0], projected.g.dtype, projected.beta.dtype, conv_state.get_device()
        )  # fmt: skip
        if loaded := key in self._loaded:
            new_conv, new = conv_state, state
        else:  # a kernel that cannot be loaded must leave the cache as it is
            new_conv, new = conv_state.clone(), state.clone()
        weight, bias, a_log, dt_bias = _weights(module)
        y = conv.update(projected.qkv.mT, new_conv, weight.squeeze(1), bias, facts.activation)
        out, _ = _rule(facts, projected, y, new, a_log, dt_bias, rule.recurrent, in_place=True)
        out = self._normed(facts, module, out, projected.z)
        if not loaded:
            conv_state.copy_(new_conv)
            state.copy_(new)
            self._loaded.add(key)
        return out

    def _prefill(self, facts: NetFacts, module: Any, projected: Projected, cache: Any) -> Tensor:
        """Whole sequences, or what comes after the tokens that the cache has seen."""
        index = module.layer_idx
        weight, bias, a_log, dt_bias = _weights(module)
        conv_state, state, recording = (None, None, False) if cache is None else states(cache, index)
        y, _ = conv.forward(projected.qkv, weight.squeeze(1), bias, facts.activation, conv_state)
        compute = rule.recurrent if facts.single else chunk.chunk
        keep = cache is not None
        out, final = _rule(facts, projected, y, state, a_log, dt_bias, compute, output_final_state=keep)
        out = self._normed(facts, module, out, projected.z)
        if cache is not None:
            size = module.conv_kernel_size
            seen = projected.qkv if recording else projected.qkv[:, -size:]  # all that is kept of them
            cache.update_conv_state(seen.mT, index, conv_kernel_size=size)
            cache.update_recurrent_state(final, index)
        return out

    def _normed(self, facts: NetFacts, module: Any, out: Tensor, z: Tensor) -> Tensor:
        norm = module._modules[self.layout.norm]
        meaning = self._norms[type(norm)][1].norm
        return rms_norm_gated(
            out.view(z.shape),
            z,
            norm._parameters[meaning.weight],
            eps=getattr(norm, meaning.eps),
            activation=facts.norm_activation,
            form=facts.norm_form,
        )

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
        """(module, hidden_states, cache, attention_mask), taken out of `kwargs`, which is a dict of our own."""
        names = self.names
        if len(args) > 1:
            given = dict(zip(names, args[1:], strict=False))
            if len(args) > 4 or not given.keys().isdisjoint(kwargs):
                raise Decline("the arguments do not fit the signature")
            kwargs.update(given)
        if not args or (x := kwargs.pop(names[0], None)) is None:
            raise Decline(f"{names[0]} is None")
        return args[0], x, kwargs.pop(names[1], None), kwargs.pop(names[2], None)

    def _call(self, kwargs: dict[str, Any]) -> None:
        """Decline unless the functions are upstream's, and further keywords are such as no function takes."""
        held = tuple([self.globals.get(name) for name in FUNCTIONS])
        if held != self._held[0]:
            self._held = (held, *self._upstreams(held))
        _, keywords, kernelized = self._held
        for module in kernelized:
            if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:
                raise Decline("a hub kernel was chosen for one of the module's functions")
        if keywords.isdisjoint(kwargs):
            return
        for name in _PACKED:
            if kwargs.pop(name, None) is not None:
                raise Decline(f"{name}: packed sequences")
        if taken := sorted(keywords.intersection(kwargs)):
            raise Decline(f"{', '.join(taken)}: upstream hands it on")

    def _upstreams(self, held: tuple[Any, ...]) -> tuple[frozenset[str], tuple[nn.Module, ...]]:
        """Keywords with a meaning, and the functions of which Hugging Face's kernels made modules."""
        keywords, kernelized = {*_PACKED, "cu_seqlens", "cache_params"}, []
        for name, function in zip(FUNCTIONS, held, strict=True):
            call = serve.wrapped_call(function)
            if call is not None and call.wrapper is not function:
                raise Decline(f"{name} was replaced")  # by a wrapper around ours
            found = Upstream.of(function if call is None else call.original)
            package = getattr(found.implementation, "__module__", None) or "" if found is not None else ""
            if found is None or not (found.is_reference or package.partition(".")[0] in ("fla", "causal_conv1d")):
                raise Decline(f"{name} was replaced")
            keywords.update(found.keywords)
            if found.kernelized is not None:
                kernelized.append(found.kernelized)
        return frozenset(keywords), tuple(kernelized)

    def _norm(self, module: nn.Module) -> tuple[Tensor, str, str]:
        """(weight, form, activation) of the gated norm."""
        name = self.layout.norm
        norm = module._modules.get(name)
        cls: type = type(norm)
        forward = cls.__dict__.get("forward")
        known = self._norms.get(cls)
        if known is None or known[0] is not forward:
            meaning = recognise.recognise(cls)
            call = serve.wrapped_call(forward)
            foreign = call is not None and call.wrapper is not forward
            if foreign or not isinstance(meaning, recognise.RmsNorm) or not meaning.gated:
                raise Decline(f"{name} is a {cls.__name__}, no gated norm of a canonical form")
            known = self._norms[cls] = forward, RmsNorm(cls, meaning)
        assert norm is not None
        modules.untouched(name, norm)
        weight, _, activation = known[1].read(norm)
        assert activation is not None
        return weight, known[1].norm.form, activation


def _weights(module: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(conv1d.weight, conv1d.bias, A_log, dt_bias), as upstream reads them; nn.Module's getattr is slow."""
    convolution, parameters = module._modules.get("conv1d"), module._parameters
    if convolution is None or "_hf_hook" in convolution.__dict__:
        raise Decline("conv1d is moved about by accelerate" if convolution is not None else "conv1d is no module")
    own = convolution._parameters
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None:  # an adapter's or a parametrization's
        weight, bias = convolution.weight, convolution.bias
    a_log, dt_bias = parameters.get("A_log"), parameters.get("dt_bias")
    if a_log is None or dt_bias is None:
        raise Decline(f"{'A_log' if a_log is None else 'dt_bias'} is no parameter of the module's own")
    return weight, bias, a_log, dt_bias


def _check_shapes(
    dims: tuple[int, int, int, int], x: Tensor, weight: Tensor, bias: Tensor | None, a_log: Tensor, dt_bias: Tensor
) -> None:
    """Decline what does not belong together, such as a module split over devices."""
    heads, heads_v, head_dim, head_dim_v = dims
    shape = x.shape
    if len(shape) != 3 or not shape[0] or not shape[1]:
        raise Decline(f"hidden_states is {list(shape)}")
    channels, shape = 2 * heads * head_dim + heads_v * head_dim_v, weight.shape
    if len(shape) != 3 or shape[0] != channels or shape[1] != 1:
        raise Decline(f"conv1d.weight is {list(shape)}, not [{channels}, 1, W]")
    if bias is not None and (bias.dtype != weight.dtype or list(bias.shape) != [channels]):
        raise Decline(f"conv1d.bias is {list(bias.shape)} {bias.dtype}, the weight {weight.dtype}")
    wanted = (heads_v,)
    if a_log.shape != wanted or dt_bias.shape != wanted:
        raise Decline(f"A_log is {list(a_log.shape)}, dt_bias {list(dt_bias.shape)}, of {heads_v} value heads")


def _check_states(
    dims: tuple[int, int, int, int], x: Tensor, conv_state: Tensor | None, state: Tensor | None
) -> tuple[str, int]:
    """(dtype, tokens) of the conv state. Raises Decline for states that are not this module's, or not writable."""
    heads, heads_v, head_dim, head_dim_v = dims
    if conv_state is None or state is None:
        raise Decline("the cache has one of the two states")
    batch, shape = x.shape[0], conv_state.shape
    if len(shape) != 3 or shape[0] != batch or shape[1] != 2 * heads * head_dim + heads_v * head_dim_v:
        raise Decline(f"the conv state is {list(shape)}, hidden_states {list(x.shape)}")
    if state.shape != (batch, heads_v, head_dim, head_dim_v) or not state.is_contiguous():
        raise Decline(f"the recurrent state is {list(state.shape)} with strides {state.stride()}")
    if state.dtype != torch.float32:
        raise Decline(f"the recurrent state is {state.dtype}, not torch.float32")
    if state.is_inference() and not torch.is_inference_mode_enabled():
        raise Decline("the cache was made in inference mode, outside of which it cannot be written to")
    return checks.dtype_name(conv_state.dtype), shape[2]


def _rule(
    facts: NetFacts,
    projected: Projected,
    y: Tensor,
    state: Tensor | None,
    a_log: Tensor,
    dt_bias: Tensor,
    compute: Callable[..., tuple[Tensor, Tensor | None]],
    **more: bool,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule of the convolution's result [B, T, C], whose queries, keys and values are views."""
    heads, heads_v, head_dim, head_dim_v = facts.n_heads, facts.n_value_heads, facts.head_dim, facts.head_dim_v
    batch, tokens, channels = y.shape
    first, key_dim, row = y.storage_offset(), heads * head_dim, tokens * channels
    shape, strides = (batch, tokens, heads, head_dim), (row, channels, head_dim, 1)
    return compute(
        y.as_strided(shape, strides, first),
        y.as_strided(shape, strides, first + key_dim),
        y.as_strided((batch, tokens, heads_v, head_dim_v), (row, channels, head_dim_v, 1), first + 2 * key_dim),
        projected.g,
        beta=projected.beta,
        initial_state=state,
        use_qk_l2norm=True,
        use_gate=True,
        A_log=a_log,
        dt_bias=dt_bias,
        use_beta_sigmoid=True,
        allow_neg_eigval=facts.neg_eigval,
        **more,
    )


def states(cache: Any, index: int) -> tuple[Tensor | None, Tensor | None, bool]:
    """(conv state, recurrent state, whether past states are kept) of a layer, None for what it has not seen yet.

    Raises Decline where the cache is not one of transformers' own, or has no such layer.
    """
    if not _own(type(cache), "Cache", _CACHE_METHODS):
        raise Decline(f"{type(cache).__name__} keeps states in a way of its own")
    layers = cache.layers
    if (
        type(index) is not int
        or index >= len(layers)
        or not _own(type(layers[index]), "LinearAttentionLayer", _LAYER_METHODS)
    ):
        raise Decline(f"layer {index} of the cache has no states of linear attention")
    layer = layers[index]
    if not layer.has_previous_state[0]:
        return None, None, layer.record_past
    return layer.conv_states[0], layer.recurrent_states[0], layer.record_past


_LAYER_METHODS = ("update_conv_state", "update_recurrent_state")
_CACHE_METHODS = (*_LAYER_METHODS, "get_conv_state", "get_recurrent_state", "has_previous_state", "is_recording_past")
_known: dict[type, bool] = {}


def _own(cls: type, name: str, methods: tuple[str, ...]) -> bool:
    """Whether `cls` is a subclass of transformers' class of that name with its methods as they are there."""
    known = _known.get(cls)
    if known is None:
        base = getattr(sys.modules["transformers.cache_utils"], name)
        known = issubclass(cls, base) and all(getattr(cls, m, None) is getattr(base, m, None) for m in methods)
        _known[cls] = known
    return known


def _activation(name: Any) -> str | None:
    activation = ACTIVATIONS.get(name) if name is None or isinstance(name, str) else name
    if activation is None and name is not None:
        raise Decline(f"activation={name!r}")
    return activation


def _not_on_cpu(device: torch.device) -> None:
    if device.type == "cpu":
        raise Decline("CPU tensors: the module's functions are served one by one")


def patch(module: ModuleType, state: TargetState) -> Iterable[Rebinding]:
    """The rebindings of `forward` for the classes that `module` defines and that are recognised."""
    names = vars(module)
    if not module.__name__.startswith("transformers.models.") or not names.keys() >= set(FUNCTIONS):
        return
    for cls in list(names.values()):
        if isinstance(cls, type) and cls.__module__ == module.__name__ and "forward" in vars(cls):
            found = recognised(cls)
            if found is not None:
                yield from serve.attribute(cls, "forward", GatedDeltaNet(cls, *found), state)
