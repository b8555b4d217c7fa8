"""The CPU replacements' values and gradients, against fp64 formulas and FLA's plain-torch references."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel.patches.fla import cpu_activation, cpu_conv, cpu_loss, cpu_norm

SEED = 20
#: The largest relative error of one rounding to nearest.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)


def error(x: Tensor, oracle: Tensor) -> float:
    """||x - oracle|| / ||oracle||."""
    x, oracle = x.detach().double(), oracle.detach().double()
    return float((x - oracle).norm()) / (float(oracle.norm()) or 1.0)


def assert_rounded_once(x: Tensor, oracle: Tensor, dtype: torch.dtype) -> None:
    """x is the fp64 oracle after fp32 arithmetic and one rounding to `dtype`: nearly always the nearest value."""
    assert x.dtype == dtype
    assert x.shape == oracle.shape
    assert error(x, oracle) <= ROUNDING[dtype] + 1e-6
    if dtype != torch.float32 and x.numel():
        assert float((x == oracle.to(dtype)).double().mean()) >= 0.97


def doubles(*values: Any) -> tuple[Any, ...]:
    return tuple(v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values)


def leaves(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


# --- norms -------------------------------------------------------------------------------------------------------


def norm_formula(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    rms: bool = False,
    groups: int = 1,
    gate: Tensor | None = None,
    activation: str = "swish",
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    rows = torch.stack(total.chunk(groups, -1), -2)
    if not rms:
        rows = rows - rows.mean(-1, keepdim=True)
    rows = rows / (rows.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    y = torch.cat(rows.unbind(-2), -1)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    if gate is not None:
        y = y * (gate.sigmoid() if activation == "sigmoid" else gate * gate.sigmoid())
    return y, total


@DTYPES
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_norm(dtype: torch.dtype, affine: bool, rms: bool) -> None:
    x = (3 * torch.randn(4, 7, 96) + 1).to(dtype)
    weight, bias = (torch.randn(96).to(dtype), torch.randn(96).to(dtype)) if affine else (None, None)
    ours = cpu_norm.rms_norm(x, weight, bias) if rms else cpu_norm.layer_norm(x, weight, bias)
    assert_rounded_once(ours, norm_formula(*doubles(x, weight, bias), rms=rms)[0], dtype)
    grouped = cpu_norm.group_norm(x, weight, bias, eps=1e-3, is_rms_norm=rms, num_groups=6)
    assert_rounded_once(grouped, norm_formula(*doubles(x, weight, bias), eps=1e-3, rms=rms, groups=6)[0], dtype)


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32])
def test_prenorm_normalises_the_unrounded_sum(residual_dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(5, 64).bfloat16(), 30 * torch.randn(5, 64), torch.randn(64)
    residual = residual.to(residual_dtype)
    y, total = cpu_norm.rms_norm(x, weight, None, residual, prenorm=True)
    oracle, exact = norm_formula(*doubles(x, weight, None, residual), rms=True)
    assert_rounded_once(y, oracle, torch.bfloat16)
    assert_rounded_once(total, exact, residual_dtype)
    assert torch.equal(cpu_norm.rms_norm(x, weight, None, residual), y)


def test_prenorm_without_a_residual() -> None:
    x, weight = torch.randn(2, 3, 8).bfloat16().transpose(0, 1), torch.randn(8)
    same = cpu_norm.layer_norm(x, weight, None, prenorm=True)[1]
    kept = cpu_norm.layer_norm(x, weight, None, prenorm=True, residual_in_fp32=True)[1]
    assert (same.dtype, kept.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(same, x)
    assert torch.equal(kept, x.float())
    assert same.is_contiguous()


@DTYPES
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_gated_norm(dtype: torch.dtype, activation: str, rms: bool) -> None:
    x, g, residual = (torch.randn(4, 6, 3, 32).to(dtype) for _ in range(3))
    weight, bias = torch.randn(32), torch.randn(32).to(dtype)
    norm = cpu_norm.rms_norm_gated if rms else cpu_norm.layer_norm_gated
    y, total = norm(x, g, weight, bias, activation, residual, prenorm=True, eps=1e-5)
    arguments = doubles(x, weight, bias, residual)
    oracle, exact = norm_formula(*arguments, rms=rms, gate=g.double(), activation=activation)
    assert_rounded_once(y, oracle, dtype)
    assert_rounded_once(total, exact, dtype)


def test_norms_fused_with_a_linear_layer() -> None:
    x, g, residual = (torch.randn(2, 5, 24) for _ in range(3))
    norm_weight, norm_bias, weight, bias = torch.randn(24), torch.randn(24), torch.randn(9, 24), torch.randn(9)
    norm, linear = (norm_weight, norm_bias), (weight, bias)
    exact = doubles(x, *norm, residual)
    layer, total = cpu_norm.layer_norm_linear(x, *norm, *linear, residual, prenorm=True, num_groups=3)
    assert error(layer, F.linear(norm_formula(*exact, groups=3)[0], *doubles(*linear))) < 1e-6
    assert error(total, x.double() + residual.double()) < 1e-6
    gated, _ = cpu_norm.rms_norm_swish_gate_linear(x, g, *norm, *linear, residual, prenorm=True, eps=1e-5)
    assert error(gated, F.linear(norm_formula(*exact, rms=True, gate=g.double())[0], *doubles(*linear))) < 1e-6
    gated = cpu_norm.layer_norm_swish_gate_linear(x, g, *norm, weight, None, residual, eps=1e-5)
    assert error(gated, F.linear(norm_formula(*exact, gate=g.double())[0], weight.double())) < 1e-6
    half = cpu_norm.layer_norm_linear(x.bfloat16(), *norm, *linear)
    assert half.dtype == torch.bfloat16


def test_norms_agree_with_flas_references() -> None:
    from fla.modules.layernorm import group_norm_ref, layer_norm_ref, rms_norm_ref

    x, residual, weight, bias = torch.randn(6, 40), torch.randn(6, 40), torch.randn(40), torch.randn(40)
    for ours, reference in ((cpu_norm.layer_norm, layer_norm_ref), (cpu_norm.rms_norm, rms_norm_ref)):
        theirs = reference(x, weight, bias, residual, prenorm=True, upcast=True)
        for mine, other in zip(ours(x, weight, bias, residual, prenorm=True), theirs, strict=True):
            assert error(mine, other) < 1e-6
    theirs = group_norm_ref(x, weight, bias, 5, residual, is_rms_norm=True, upcast=True)
    assert error(cpu_norm.group_norm(x, weight, bias, residual, is_rms_norm=True, num_groups=5), theirs) < 1e-6


@DTYPES
def test_l2norm(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 2, 48).to(dtype)
    x[0, 0] = 0
    oracle = x.double() / (x.double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    assert_rounded_once(cpu_norm.l2norm(x), oracle, dtype)
    assert_rounded_once(cpu_norm.l2norm(x, output_dtype=torch.float32), oracle, torch.float32)


def test_l2norm_of_zeros_has_a_finite_gradient() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    cpu_norm.l2norm(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 1000.0))


@DTYPES
@pytest.mark.parametrize("normed", [False, True])
def test_attnres(dtype: torch.dtype, normed: bool) -> None:
    query, weight, out_weight = (torch.randn(32).to(dtype) for _ in range(3))
    sources = [torch.randn(2, 5, 32).to(dtype).requires_grad_() for _ in range(4)]
    v = torch.stack([source.double() for source in sources])
    k = v / (v.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    p = ((k @ query.double()) * 0.7).softmax(0)
    oracle = (p[..., None] * v).sum(0)
    if normed:
        oracle = norm_formula(oracle, out_weight.double(), None, eps=1e-6, rms=True)[0]
    out, weights = cpu_norm.fused_attnres(
        query[:, None], sources, weight, out_weight if normed else None, scale=0.7, return_weights=True
    )
    assert_rounded_once(out, oracle, dtype)
    assert_rounded_once(weights, p, torch.float32)
    assert not weights.requires_grad
    assert out.requires_grad


def test_norms_of_no_rows() -> None:
    x, weight = torch.randn(2, 0, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    for y in (cpu_norm.rms_norm(x, weight, None), cpu_norm.layer_norm_gated(x, x, weight, None), cpu_norm.l2norm(x)):
        assert y.shape == x.shape
    cpu_norm.group_norm(x, weight, None, num_groups=4).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.zeros(16))


def test_norm_gradients() -> None:
    x, g, residual, weight, bias, linear = leaves((2, 4), (2, 4), (2, 4), (4,), (4,), (3, 4))
    check = torch.autograd.gradcheck
    for rms in (False, True):
        assert check(lambda *a, rms=rms: cpu_norm.layer_norm(*a, 1e-2, True, False, rms), (x, weight, bias, residual))
        assert check(
            lambda *a, rms=rms: cpu_norm.group_norm(*a, is_rms_norm=rms, num_groups=2), (x, weight, bias, residual)
        )
    assert check(lambda x, g, w: cpu_norm.rms_norm_gated(x, g, w, None, prenorm=True), (x, g, weight))
    assert check(lambda x, g, w, b: cpu_norm.layer_norm_gated(x, g, w, b, "sigmoid"), (x, g, weight, bias))
    assert check(lambda *a: cpu_norm.layer_norm_linear(*a, None), (x, weight, bias, linear))
    assert check(lambda *a: cpu_norm.rms_norm_swish_gate_linear(*a, None), (x, g, weight, bias, linear))
    assert check(cpu_norm.l2norm, (x,))
    assert check(lambda q, a, b, w, o: cpu_norm.fused_attnres(q, [a, b], w, o), (bias, x, g, weight, linear[0]))


# --- convolution -------------------------------------------------------------------------------------------------


def convolved(x: Tensor, weight: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """One sequence, token by token: x [T, D], weight [D, W], state [D, W] -> y [T, D], the state after it."""
    window = torch.zeros_like(weight) if state is None else state
    out = []
    for token in x:
        window = torch.cat([window[:, 1:], token[:, None]], dim=1)
        out.append((window * weight).sum(1))
    return torch.stack(out) if out else torch.zeros_like(x), window


def convolution_formula(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    state: Tensor | None,
    activation: str | None,
    cu_seqlens: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    x, weight, bias, residual, state = doubles(x, weight, bias, residual, state)
    parts = list(x) if cu_seqlens is None else [x[0, a:b] for a, b in itertools.pairwise(cu_seqlens)]
    done = [convolved(part, weight, None if state is None else state[n]) for n, part in enumerate(parts)]
    y = torch.stack([y for y, _ in done]) if cu_seqlens is None else torch.cat([y for y, _ in done])[None]
    y = y if bias is None else y + bias
    y = y if activation is None else y * y.sigmoid()
    return (y if residual is None else y + residual), torch.stack([window for _, window in done])


@DTYPES
@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("seqlen", [1, 2, 11])
@pytest.mark.parametrize("full", [False, True])
def test_convolution(dtype: torch.dtype, width: int, seqlen: int, full: bool) -> None:
    x, weight = torch.randn(3, seqlen, 10).to(dtype), torch.randn(10, width).to(dtype)
    bias, residual, state, activation = None, None, None, None
    if full:
        bias, residual, state = torch.randn(10), torch.randn(3, seqlen, 10).to(dtype), torch.randn(3, 10, width)
        activation = "silu"
    arguments = (x, weight, bias, residual, state)
    y, final = cpu_conv.causal_conv1d(*arguments, output_final_state=True, activation=activation)
    oracle, window = convolution_formula(*arguments, activation)
    assert_rounded_once(y, oracle, dtype)
    assert final is not None
    assert_rounded_once(final, window, dtype)
    assert final.is_contiguous()
    without, none = cpu_conv.causal_conv1d(*arguments, output_final_state=None, activation=activation)
    assert torch.equal(without, y)
    assert none is None


@DTYPES
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("full", [False, True])
def test_packed_convolution(dtype: torch.dtype, index: torch.dtype, full: bool) -> None:
    cu_seqlens = [0, 0, 1, 3, 3, 20, 23, 23]
    x, weight = torch.randn(1, 23, 6).to(dtype), torch.randn(6, 4).to(dtype)
    bias, residual, state = None, None, None
    if full:
        bias, residual, state = torch.randn(6), torch.randn(1, 23, 6).to(dtype), torch.randn(7, 6, 4).to(dtype)
    oracle, window = convolution_formula(x, weight, bias, residual, state, "swish", cu_seqlens)
    y, final = cpu_conv.causal_conv1d(
        x, weight, bias, residual, state, True, "swish", cu_seqlens=torch.tensor(cu_seqlens, dtype=index)
    )
    assert_rounded_once(y, oracle, dtype)
    assert final is not None
    assert_rounded_once(final, window, dtype)


def test_packed_convolution_equals_the_sequences_apart() -> None:
    x, weight, state = torch.randn(1, 12, 5), torch.randn(5, 4), torch.randn(2, 5, 4)
    packed, final = cpu_conv.causal_conv1d(
        x, weight, None, None, state, True, "silu", cu_seqlens=torch.tensor([0, 2, 12])
    )
    for n, part in enumerate((slice(0, 2), slice(2, 12))):
        alone, last = cpu_conv.causal_conv1d(x[:, part], weight, None, None, state[n : n + 1], True, "silu")
        assert torch.equal(packed[:, part], alone)
        assert torch.equal(final[n], last[0])


def test_no_tokens_at_all() -> None:
    state = torch.randn(2, 5, 4)
    y, final = cpu_conv.causal_conv1d(torch.randn(2, 0, 5), torch.randn(5, 4), None, None, state, True)
    assert y.shape == (2, 0, 5)
    assert torch.equal(final, state)
    packed, final = cpu_conv.causal_conv1d(
        torch.randn(1, 0, 5), torch.randn(5, 4), None, None, state, True, cu_seqlens=torch.tensor([0, 0, 0])
    )
    assert packed.shape == (1, 0, 5)
    assert torch.equal(final, state)


def test_convolution_takes_views_and_heads() -> None:
    packed, weight = torch.randn(2, 9, 30), torch.randn(10, 4)
    x = packed[..., 10:20]
    y, _ = cpu_conv.causal_conv1d(x, weight)
    assert y.is_contiguous()
    assert torch.equal(y, cpu_conv.causal_conv1d(x.contiguous(), weight)[0])
    heads, final = cpu_conv.causal_conv1d(x.unflatten(-1, (2, 5)), weight, output_final_state=True)
    assert torch.equal(heads, y.unflatten(-1, (2, 5)))
    assert final.shape == (2, 10, 4)
    assert torch.equal(cpu_conv.causal_conv1d(x, weight, seq_idx=None, chunk_indices=None)[0], y)


@DTYPES
def test_update_continues_a_convolution(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(3, 7, 6).to(dtype), torch.randn(6, 4), torch.randn(6)
    residual = torch.randn(3, 7, 6).to(dtype)
    whole, final = cpu_conv.causal_conv1d(x, weight, bias, residual, None, True, "silu")
    _, cache = cpu_conv.causal_conv1d(x[:, :5], weight, bias, None, None, True, "silu")
    assert cache is not None and final is not None
    for t in (5, 6):
        y, returned = cpu_conv.causal_conv1d_update(
            x[:, t : t + 1], cache, residual[:, t : t + 1], weight, bias, "silu"
        )
        assert returned is cache
        assert error(y, whole[:, t : t + 1]) <= 2 * ROUNDING[dtype]
    assert torch.equal(cache, final)


@pytest.mark.parametrize("shape", [(3, 6), (1, 3, 6), (3, 1, 6), (3, 1, 2, 3), (1, 3, 2, 3)])
def test_update_shapes(shape: tuple[int, ...]) -> None:
    x, cache, weight = torch.randn(shape), torch.randn(3, 6, 4), torch.randn(6, 4)
    window = torch.cat([cache[:, :, 1:], x.reshape(3, 6, 1)], -1).double()
    y, returned = cpu_conv.causal_conv1d_update(x, cache, None, weight)
    assert error(y, (window * weight.double()).sum(-1).view(shape)) < 1e-6
    assert torch.equal(returned, window.float())


def test_update_copies_a_cache_that_is_not_contiguous() -> None:
    cache = torch.randn(6, 3, 4).transpose(0, 1)
    before = cache.clone()
    _, returned = cpu_conv.causal_conv1d_update(torch.randn(3, 6), cache, None, torch.randn(6, 4))
    assert torch.equal(cache, before)
    assert not torch.equal(returned, before)


def test_update_has_no_gradient_and_writes_inference_caches() -> None:
    x, weight = torch.randn(3, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    with torch.inference_mode():
        cache = torch.zeros(3, 6, 4)
    y, _ = cpu_conv.causal_conv1d_update(x, cache, None, weight)
    assert not y.requires_grad
    assert torch.equal(cache[..., 3], x.detach())


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 0, 1, 5])], ids=["dense", "packed"])
@pytest.mark.parametrize("with_state", [False, True])
def test_convolution_gradients(cu_seqlens: Tensor | None, with_state: bool) -> None:
    sequences = 1 if cu_seqlens is None else 3
    x, weight, bias, residual, state = leaves((1, 5, 2), (2, 3), (2,), (1, 5, 2), (sequences, 2, 3))

    def function(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, state: Tensor) -> Any:
        return cpu_conv.causal_conv1d(
            x, weight, bias, residual, state if with_state else None, True, "silu", cu_seqlens=cu_seqlens
        )

    assert torch.autograd.gradcheck(function, (x, weight, bias, residual, state))


# --- activations -------------------------------------------------------------------------------------------------


def powglu_formula(x: Tensor, y: Tensor, power: float) -> Tensor:
    grown = x.clamp_min(1e-300) ** (power / (x.clamp_min(0).sqrt() + 1))
    return torch.where(x > 0, grown, x) * x.sigmoid() * y


@DTYPES
def test_gated_activations(dtype: torch.dtype) -> None:
    x, y = (6 * torch.randn(5, 4, 32)).to(dtype).transpose(0, 1), torch.randn(5, 4, 32).to(dtype).transpose(0, 1)
    x[0, 0, :3] = torch.tensor([0.0, -200.0, 200.0]).to(dtype)
    swiglu = cpu_activation.swiglu(x, y)
    assert_rounded_once(swiglu, x.double() * x.double().sigmoid() * y.double(), dtype)
    assert swiglu.is_contiguous()
    assert_rounded_once(cpu_activation.powglu(x, y), powglu_formula(x.double(), y.double(), 3.0), dtype)
    weight, bias = torch.randn(6, 32).to(dtype), torch.randn(6).to(dtype)
    assert torch.equal(cpu_activation.swiglu_linear(x, y, weight, bias), F.linear(swiglu, weight, bias))
    theirs = F.linear(cpu_activation.powglu(x, y, 2.0), weight)
    assert torch.equal(cpu_activation.powglu_linear(x, y, weight, None, 2.0), theirs)


def test_activation_gradients() -> None:
    x, y, weight, bias = leaves((2, 6), (2, 6), (3, 6), (3,))
    check = torch.autograd.gradcheck
    assert check(cpu_activation.swiglu, (x, y))
    assert check(cpu_activation.swiglu_linear, (x, y, weight, bias))
    assert check(cpu_activation.powglu, (x, y))
    assert check(lambda *a: cpu_activation.powglu_linear(*a, 1.5), (x, y, weight, bias))
    zero = torch.zeros(3, requires_grad=True)
    cpu_activation.powglu(zero, torch.ones(3)).sum().backward()
    assert torch.equal(zero.grad, torch.full((3,), 0.5))


def test_fused_activation_under_cpu_autocast() -> None:
    x, y, weight = (torch.randn(4, 16, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = cpu_activation.swiglu_linear(x, y, weight, None)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.dtype == torch.float32 for tensor in (x, y, weight))


# --- losses ------------------------------------------------------------------------------------------------------


def loss_formula(
    logits: Tensor, target: Tensor, smoothing: float, scale: float, z: float, softcap: float | None
) -> Any:
    """Per row, with targets below zero ignored: (loss, z-loss)."""
    logits = logits.double() * scale
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    loss = F.cross_entropy(logits, target, ignore_index=-100, reduction="none", label_smoothing=smoothing)
    z_loss = (z * logits.logsumexp(-1) ** 2) * (target != -100)
    return loss + z_loss, z_loss


LOSSES = pytest.mark.parametrize(
    ("smoothing", "scale", "z", "softcap"),
    [(0.0, 1.0, 0.0, None), (0.1, 0.7, 0.0, None), (0.0, -1.5, 0.02, None), (0.2, 1.3, 0.1, 2.5)],
)


@DTYPES
@LOSSES
def test_cross_entropy(dtype: torch.dtype, smoothing: float, scale: float, z: float, softcap: float | None) -> None:
    logits = (3 * torch.randn(7, 33)).to(dtype).requires_grad_()
    target = torch.tensor([0, -100, 32, 5, -100, 9, 9])
    loss, z_loss = cpu_loss.cross_entropy_loss(logits, target, smoothing, scale, z, softcap)
    exact = logits.detach().double().requires_grad_()
    oracle, z_oracle = loss_formula(exact, target, smoothing, scale, z, softcap)
    assert_rounded_once(loss, oracle, torch.float32)
    assert_rounded_once(z_loss, z_oracle, torch.float32)
    assert not z_loss.requires_grad
    cotangent = torch.randn(7)
    loss.backward(cotangent)
    oracle.backward(cotangent.double())
    assert_rounded_once(logits.grad, exact.grad, dtype)
    assert torch.equal(logits.grad[1], torch.zeros(33, dtype=dtype))


def test_targets_outside_the_vocabulary() -> None:
    logits, target = torch.randn(3, 10, requires_grad=True), torch.tensor([2, 10, -3])
    loss, _ = cpu_loss.cross_entropy_loss(logits, target, ignore_index=2)
    assert torch.equal(loss, torch.cat([torch.zeros(1), logits[1:].logsumexp(-1)]))
    loss.sum().backward()
    assert error(logits.grad[1:], logits[1:].softmax(-1)) < 1e-6


def test_the_logits_stay_as_they_are() -> None:
    logits = torch.randn(4, 10, requires_grad=True)
    before = logits.detach().clone()
    cpu_loss.cross_entropy_loss(logits, torch.tensor([1, 2, 3, 4]), inplace_backward=True)[0].sum().backward()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("return_z_loss", [False, True])
def test_loss_module(reduction: str, return_z_loss: bool) -> None:
    from fla.modules import FusedCrossEntropyLoss

    options = {"label_smoothing": 0.1, "lse_square_scale": 0.01, "logit_scale": 0.5, "logit_softcapping": 4.0}
    module = FusedCrossEntropyLoss(reduction=reduction, return_z_loss=return_z_loss, inplace_backward=True, **options)
    logits, target = torch.randn(6, 20), torch.tensor([1, 2, -100, 3, 4, 5])
    oracle = loss_formula(logits, target, 0.1, 0.5, 0.01, 4.0)
    if reduction != "none":
        oracle = tuple(part.sum() / (5 if reduction == "mean" else 1) for part in oracle)
    ours = cpu_loss.fused_cross_entropy_loss_forward(module, logits, target)
    for mine, theirs in zip(ours if return_z_loss else (ours,), oracle, strict=False):
        assert_rounded_once(mine, theirs, torch.float32)


def test_a_mean_over_nothing() -> None:
    from fla.modules import FusedCrossEntropyLoss

    logits, weight, target = torch.randn(3, 8), torch.randn(20, 8, requires_grad=True), torch.full((3,), -100)
    assert cpu_loss.fused_cross_entropy_loss_forward(FusedCrossEntropyLoss(), logits, target).isnan()
    fused = cpu_loss.fused_linear_cross_entropy_loss(logits, target, weight)
    fused.backward()
    assert fused == 0
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_fused_linear_loss(reduction: str, biased: bool, tokens: int) -> None:
    x, weight, bias = torch.randn(tokens, 8), torch.randn(50, 8), torch.randn(50) if biased else None
    target = torch.randint(0, 50, (tokens,))
    target[2::4] = -100
    inputs = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    loss = cpu_loss.fused_linear_cross_entropy_loss(
        x, target, weight, bias, label_smoothing=0.1, logit_scale=0.8, logit_softcapping=5.0, reduction=reduction
    )
    exact = [t.detach().double().requires_grad_() for t in inputs]
    oracle = loss_formula(F.linear(*exact), target, 0.1, 0.8, 0.0, 5.0)[0].sum()
    oracle = oracle / max(1, int((target != -100).sum())) if reduction == "mean" else oracle
    assert_rounded_once(loss, oracle, torch.float32)
    loss.backward(torch.tensor(1.7))
    oracle.backward(torch.tensor(1.7, dtype=torch.float64))
    for mine, theirs in zip(inputs, exact, strict=True):
        assert mine.grad.dtype == mine.dtype
        assert error(mine.grad, theirs.grad) < 1e-6


def test_fused_linear_loss_in_bf16() -> None:
    x, weight, target = torch.randn(40, 16).bfloat16(), torch.randn(60, 16).bfloat16(), torch.randint(0, 60, (40,))
    errors = {}
    for in_fp32 in (True, False):
        inputs = [t.clone().requires_grad_() for t in (x, weight)]
        loss = cpu_loss.fused_linear_cross_entropy_loss(*inputs[:1], target, inputs[1], accumulate_grad_in_fp32=in_fp32)
        loss.backward()
        exact = [t.double().requires_grad_() for t in (x, weight)]
        # the logits are rounded to bf16, as upstream's are
        rounded = F.linear(x, weight).double() + F.linear(*exact) - F.linear(*exact).detach()
        oracle = F.cross_entropy(rounded, target)
        oracle.backward()
        assert loss.dtype == torch.float32
        assert error(loss, oracle) < 1e-6
        assert [t.grad.dtype for t in inputs] == [torch.bfloat16] * 2
        errors[in_fp32] = [error(t.grad, e.grad) for t, e in zip(inputs, exact, strict=True)]
        assert max(errors[in_fp32]) < 3 * ROUNDING[torch.bfloat16]
    assert errors[True][1] <= errors[False][1]


def test_fused_linear_loss_with_l2warp() -> None:
    from fla.modules.l2warp import l2_warp

    x, weight, bias, target = torch.randn(12, 8), torch.randn(30, 8), torch.randn(30), torch.randint(0, 30, (12,))
    ours, theirs = ([t.clone().requires_grad_() for t in (x, weight, bias)] for _ in range(2))
    loss = cpu_loss.fused_linear_cross_entropy_loss(ours[0], target, *ours[1:], use_l2warp=True, l2_penalty_factor=0.3)
    logits = F.linear(*theirs)
    reference = l2_warp(F.cross_entropy(logits, target), logits[None], 0.3)
    assert error(loss, reference) < 1e-6
    loss.backward()
    reference.backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert error(mine.grad, other.grad) < 1e-6


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_fused_linear_loss_never_holds_all_logits() -> None:
    tokens, hidden, classes = 256, 8, 1024
    x, weight = torch.randn(tokens, hidden, requires_grad=True), torch.randn(classes, hidden, requires_grad=True)
    with _Largest() as largest:
        cpu_loss.fused_linear_cross_entropy_loss(x, torch.randint(0, classes, (tokens,)), weight).backward()
    assert largest.elements == tokens // 8 * classes


def test_fused_linear_loss_computes_only_the_gradients_that_are_needed() -> None:
    x, weight, target = torch.randn(6, 8, requires_grad=True), torch.randn(20, 8), torch.randint(0, 20, (6,))
    loss = cpu_loss.fused_linear_cross_entropy_loss(x, target, weight)
    assert [saved is None for saved in loss.grad_fn.saved_tensors] == [False, True, True]
    with torch.no_grad():
        assert torch.equal(cpu_loss.fused_linear_cross_entropy_loss(x, target, weight), loss.detach())
    assert not cpu_loss.fused_linear_cross_entropy_loss(x.detach(), target, weight).requires_grad


def test_loss_gradients() -> None:
    logits, x, weight, bias = leaves((4, 7), (4, 3), (7, 3), (7,))
    target = torch.tensor([0, -100, 6, 3])
    options = {"label_smoothing": 0.1, "logit_scale": 0.7, "logit_softcapping": 3.0}
    assert torch.autograd.gradcheck(
        lambda logits: cpu_loss.cross_entropy_loss(logits, target, lse_square_scale=0.1, **options)[0], (logits,)
    )
    assert torch.autograd.gradcheck(
        lambda x, weight, bias: cpu_loss.fused_linear_cross_entropy_loss(x, target, weight, bias, **options),
        (x, weight, bias),
    )
