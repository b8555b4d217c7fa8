"""The norm family without a GPU: plain torch against the oracle, the plan, how tensors are handed to the kernels."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from accel.kernels.norm import launch, portable, rms_norm, rms_norm_gated
from accel.kernels.norm.cases import CASES, LEVELS, Case
from accel.kernels.norm.config import FORMS, BwdConfig, FwdConfig
from accel.kernels.norm.facts import NormFacts
from accel.kernels.norm.plan import COPY_NOTE, NormConfigs, plan
from accel.kernels.runtime import arch as archs
from accel.kernels.runtime.launch import collapse_rows
from accel.outcome import Choice, Decline, Declined

#: rounding of y and of each gradient, in units of the dtype's epsilon: three roundings in the worst form
ULPS = 3.0


def make(case: Case, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    return case.make(device, torch.Generator().manual_seed(seed))


def facts(**changes: object) -> NormFacts:
    fields = {"n_rows": 10, "hidden": 4096, "dtype": "bfloat16", "weight_dtype": "bfloat16", "form": FORMS[0]}
    return NormFacts(**{**fields, **changes})


# --- Plain torch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if c.facts.n_rows * c.hidden < 2**20], ids=lambda case: case.name)
def test_portable_matches_the_oracle(case: Case) -> None:
    inputs = make(case)
    got, oracle = case.run(inputs), case.oracle(inputs)
    assert got.keys() == oracle.keys()
    bound = ULPS * torch.finfo(getattr(torch, case.dtype)).eps
    for name, ref in oracle.items():
        assert torch.isfinite(got[name]).all(), name
        assert (got[name].double() - ref).norm() <= bound * ref.norm(), name


def test_cases_are_named_apart_and_served() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(isinstance(plan(case.facts, "sm_90"), Choice) for case in CASES)
    for case in CASES:
        inputs = make(case, "meta") if case.facts.n_rows * case.hidden > 2**20 else make(case)
        seen = launch.facts_of(inputs["x"], inputs["weight"], inputs.get("gate"), case.form, case.activation, grad=True)
        served = {field: getattr(seen, field) for field in ("n_rows", "hidden", "dtype", "weight_dtype", "gate_dtype")}
        assert served == {field: getattr(case.facts, field) for field in served}
        assert seen.row_levels <= case.facts.row_levels


def test_an_fp32_weight_promotes_only_where_torch_does() -> None:
    x, weight = torch.randn(3, 64, dtype=torch.bfloat16), torch.ones(64)
    dtypes = [rms_norm(x, weight, eps=1e-6, form=form).dtype for form in FORMS]
    assert dtypes == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert all(rms_norm_gated(x, x, weight, eps=1e-6, form=form).dtype == torch.bfloat16 for form in FORMS[:2])


def test_no_rows() -> None:
    x = torch.empty(0, 4, 64, requires_grad=True)
    weight = torch.ones(64, requires_grad=True)
    rms_norm(x, weight, eps=1e-6).sum().backward()
    assert not weight.grad.any()


def test_user_errors_name_the_value() -> None:
    x, weight = torch.randn(3, 64), torch.ones(64)
    with pytest.raises(ValueError, match="'nope'"):
        rms_norm(x, weight, eps=1e-6, form="nope")
    with pytest.raises(ValueError, match="'zero_centred'"):
        rms_norm_gated(x, x, weight, eps=1e-6, form="zero_centred")
    with pytest.raises(ValueError, match="'gelu'"):
        rms_norm_gated(x, x, weight, eps=1e-6, activation="gelu")
    with pytest.raises(ValueError, match="got 'nope'"):
        portable.rms_norm(x, weight, 1e-6, "nope")


# --- The plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("activation", (None, "silu", "sigmoid"))
def test_sm90_serves_every_hidden_size(dtype: str, activation: str | None) -> None:
    step = 4 if dtype == "float32" else 8
    for hidden in range(64, 16385, step):
        for weight_dtype in {dtype, "float32"}:
            choice = plan(
                facts(hidden=hidden, dtype=dtype, weight_dtype=weight_dtype, activation=activation, needs_grad=True),
                "sm_90",
            )
            assert isinstance(choice, Choice), choice
            forward, backward = choice.config.forward, choice.config.backward
            assert forward.vectors_per_thread <= 8 and backward.vectors_per_thread <= 8
            assert backward.smem_bytes <= 227 * 1024
            assert backward.ctas_per_sm * (backward.smem_bytes + 1024) <= 228 * 1024
            # Registers a thread may use, against the fp32 sums of dweight and the weight it holds.
            assert 65536 // (backward.threads * backward.ctas_per_sm) >= 2 * 4 * backward.vectors_per_thread


@pytest.mark.parametrize("arch", ("sm_80", "sm_86", "sm_89", "sm_100"))
def test_shared_memory_stays_within_the_arch(arch: str) -> None:
    limit = archs.limits(arch)
    for hidden in (64, 128, 1536, 4096, 8192, 12288, 16384):
        for dtype in ("bfloat16", "float32"):
            for activation in (None, "silu"):
                choice = plan(
                    facts(hidden=hidden, dtype=dtype, weight_dtype=dtype, activation=activation, needs_grad=True), arch
                )
                if isinstance(choice, Declined):
                    assert "shared memory" in choice.reason and hidden >= 12288 and arch != "sm_100"
                    continue
                backward = choice.config.backward
                assert backward.smem_bytes <= limit.smem_per_cta
                used = backward.ctas_per_sm * (backward.smem_bytes + limit.smem_reserved)
                assert used <= limit.smem_per_sm or backward.ctas_per_sm == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    (
        ({"hidden": 32}, "hidden=32 is outside 64..16384"),
        ({"hidden": 16392}, "hidden=16392 is outside 64..16384"),
        ({"hidden": 100}, "hidden=100 is not a multiple of 8 (bfloat16)"),
        ({"dtype": "float64"}, "dtype=float64 is none of bfloat16, float16, float32"),
        ({"weight_dtype": "float16"}, "weight dtype=float16 is neither x's bfloat16 nor float32"),
        ({"form": "other"}, "form=other is none of cast_then_weight, weight_in_fp32, zero_centred"),
        ({"activation": "gelu"}, "activation=gelu is none of silu, sigmoid"),
        ({"activation": "silu", "form": "zero_centred"}, "form=zero_centred has no gated kernel"),
        ({"activation": "silu", "gate_dtype": "float32"}, "gate dtype=float32 is not x's bfloat16"),
        ({"weight_shape": (1, 4096)}, "weight shape=(1, 4096) is not (4096,)"),
        ({"device_type": "mps"}, "device=mps is neither cuda nor cpu"),
        ({"n_rows": 2**31}, "n_rows=2147483648 >= 2**31"),
    ),
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_decline_names_the_fact_and_the_limit(changes: dict[str, object], reason: str) -> None:
    assert plan(facts(**changes), "sm_90") == Declined(reason)


def test_declines_of_the_arch() -> None:
    assert "no norm kernel for sm_75" in plan(facts(), "sm_75").reason
    large = facts(hidden=16384, dtype="float32", weight_dtype="float32", needs_grad=True)
    assert plan(large, "sm_89") == Declined(
        "hidden=16384 float32: the backward of a row needs more than 99 KB of shared memory on sm_89"
    )


def test_a_forward_alone_needs_no_backward() -> None:
    choice = plan(facts(), "sm_90")
    assert (choice.kernel, choice.backward, choice.config.backward) == ("any_fwd", None, None)
    assert plan(facts(needs_grad=True), "sm_90").backward == "any_bwd"
    assert plan(facts(device_type="cpu", hidden=33), "cpu") == Choice("norm", "portable")


def test_configurations_ignore_the_number_of_rows() -> None:
    assert len({plan(facts(n_rows=n, needs_grad=True), "sm_90") for n in (0, 1, 7, 10**6)}) == 1


def test_a_copy_is_announced() -> None:
    assert plan(facts(row_levels=3), "sm_90").notes == (COPY_NOTE,)


def test_configs_check_themselves() -> None:
    good = dict(
        dtype="bfloat16",
        weight_dtype="bfloat16",
        hidden=4096,
        form=FORMS[0],
        activation=None,
        two_level=False,
        threads_per_row=128,
        rows_per_cta=1,
        overlap=False,
    )
    FwdConfig(**good)
    for field, value in (
        ("dtype", "float64"),
        ("weight_dtype", "float16"),
        ("hidden", 4097),
        ("form", "x"),
        ("activation", "gelu"),
        ("threads_per_row", 48),
        ("rows_per_cta", 16),
    ):
        with pytest.raises(ValueError, match=r"got "):
            FwdConfig(**{**good, field: value})
    with pytest.raises(ValueError, match="gated"):
        FwdConfig(**{**good, "form": "zero_centred", "activation": "silu"})
    with pytest.raises(ValueError, match="stages"):
        BwdConfig(**good, stages=0)


# --- From tensors to kernels ---------------------------------------------------------------------------------------


def loaded_with(config: NormConfigs, case: Case, out_dtype: torch.dtype, seen: list[torch.Tensor]) -> launch.Loaded:
    """Stands in for compiled kernels: checks what a kernel would refuse, and computes in plain torch."""

    def accept(*tensors: torch.Tensor) -> None:
        for t in tensors:
            assert t.data_ptr() % 16 == 0 and t.stride(-1) == 1
            assert all(s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
            assert t.dim() == (3 if config.forward.two_level else 2)
        seen.extend(tensors)

    def run_forward(*args: object) -> None:
        *inputs, out, eps = args
        x, weight = inputs[0], inputs[-1]
        accept(x, *inputs[1:-1], out)
        gate = inputs[1] if len(inputs) == 3 else None
        out.copy_(_formula(case, x, weight, gate, eps))

    def run_backward(*args: object) -> None:
        eps, gated = args[-1], case.activation is not None
        x, *rest = args[:-1]
        gate = rest.pop(0) if gated else None
        weight, dy, dx = rest[:3]
        dgate = rest[3] if gated else None
        partial, dweight = rest[-2:]
        accept(x, dy, dx, *((gate, dgate) if gated else ()))
        assert partial.shape[0] >= 1 and partial.dtype == torch.float32
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (x, weight, *((gate,) if gated else ()))]
            y = _formula(case, inputs[0], inputs[1], inputs[2] if gated else None, eps)
            found = torch.autograd.grad(y, inputs, dy)
        for target, value in zip((dx, dweight, dgate), found, strict=False):
            target.copy_(value)

    return launch.Loaded(run_forward, run_backward, out_dtype, config.backward)


def _formula(case: Case, x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None, eps: float) -> torch.Tensor:
    if gate is None:
        return portable.rms_norm(x, weight, eps, case.form)
    return portable.rms_norm_gated(x, gate, weight, eps, case.activation, case.form)


@pytest.mark.parametrize("layout", LEVELS)
@pytest.mark.parametrize("rows", ((1,), (5,), (2, 3), (2, 3, 4), (1, 3, 1), (2, 1, 4), (0, 3)), ids=str)
@pytest.mark.parametrize("activation", (None, "silu"))
def test_rows_reach_the_kernel(
    layout: str, rows: tuple[int, ...], activation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "sm_count", lambda index: 132)
    if layout == "heads" and len(rows) == 1:
        rows = (1, *rows)
    case = Case(rows, 64, "bfloat16", "bfloat16", FORMS[0], activation, layout)
    inputs = {name: t.detach() for name, t in make(case).items()}
    x, weight, gate, dy = inputs["x"], inputs["weight"], inputs.get("gate"), inputs["d_y"]
    levels = launch.row_levels(x, gate)
    assert levels <= LEVELS[layout]
    config = plan(facts(hidden=64, activation=activation, needs_grad=True, row_levels=levels), "sm_90").config
    loaded = loaded_with(config, case, torch.bfloat16, [])
    y = launch.forward(loaded, levels, x, weight, gate, 1e-6)
    assert torch.equal(y, _formula(case, x, weight, gate, 1e-6)) and y.is_contiguous()
    got = launch.backward(loaded, levels, x, weight, gate, dy, 1e-6)
    leaves = [v.detach().requires_grad_() for v in (x, weight, *(() if gate is None else (gate,)))]
    found = torch.autograd.grad(
        _formula(case, leaves[0], leaves[1], leaves[2] if gate is not None else None, 1e-6), leaves, dy
    )
    for a, b in zip(got, found, strict=False):
        assert torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-2)


def test_layouts_are_not_copied_without_need() -> None:
    seen: list[torch.Tensor] = []
    for layout, copies in (("contiguous", False), ("rows", False), ("heads", False), ("misaligned", True)):
        case = Case((2, 3, 4), 64, "bfloat16", "bfloat16", FORMS[0], None, layout)
        x = make(case)["x"].detach()
        levels = launch.row_levels(x, None)
        config = plan(facts(hidden=64, row_levels=levels), "sm_90").config
        launch.forward(
            loaded_with(config, case, torch.bfloat16, seen), levels, x, torch.ones(64).bfloat16(), None, 1e-6
        )
        shared = seen[-2].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert shared != copies, layout


def test_transposed_heads_need_two_levels() -> None:
    x = torch.randn(2, 5, 3, 64).bfloat16().transpose(1, 2)
    assert launch.row_levels(x, None) == 3
    assert launch.row_levels(x[:1], None) == 2
    assert launch.row_levels(x[..., ::2], None) == 3


def test_a_gradient_that_fits_is_not_copied() -> None:
    x = torch.randn(4, 6, 64).bfloat16()
    wide = torch.randn(4, 6, 128).bfloat16()
    assert launch.fitting(wide[..., :64], x, None, 1) is not None
    strided = wide[..., :64]
    assert launch.fitting(strided, x, None, 1) is strided
    heads = torch.randn(4, 12, 64).bfloat16()[:, :6]
    assert launch.fitting(heads, x, None, 1).is_contiguous() and launch.fitting(heads, x, None, 2) is heads
    assert launch.fitting(torch.ones(()).bfloat16().expand(4, 6, 64), x, None, 1).is_contiguous()


def test_collapse_rows_against_addresses() -> None:
    """Whatever is merged reaches the same elements."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(300):
        shape = [draw.choice((1, 2, 3)) for _ in range(draw.randrange(1, 5))] + [8]
        holder = torch.arange(4**6 * 8).as_strided([4] * len(shape[:-1]) + [8], _strides(draw, len(shape)))
        x = holder[tuple(slice(0, n) for n in shape)]
        merged = collapse_rows(x.shape, [x.stride()])
        if merged is None:
            continue
        assert torch.tensor(merged).prod() == x.numel() // 8
        flat = launch._views(len(merged), x)[0]
        assert torch.equal(flat.reshape(-1), x.reshape(-1))


def _strides(draw: random.Random, dims: int) -> list[int]:
    order = list(range(dims - 1))
    draw.shuffle(order)
    strides = [0] * (dims - 1) + [1]
    for place, d in enumerate(order):
        strides[d] = 8 * 4**place
    return strides


def test_mismatched_calls_decline() -> None:
    x, weight = torch.randn(2, 64), torch.ones(64)
    with pytest.raises(Decline, match=r"gate shape=\(1, 64\) is not x's \(2, 64\)"):
        launch.lookup(x, weight, x[:1], FORMS[0], "silu", False)
    with FakeTensorMode():
        elsewhere = torch.ones(64, device="cuda:0")
    with pytest.raises(Decline, match="x is on cpu, the weight on cuda:0"):
        launch.lookup(x, elsewhere, None, FORMS[0], None, False)


def test_builds_are_named_and_planned() -> None:
    names = [name for name, _ in launch.builds("sm_90a")]
    assert len(names) == len(set(names)) > 50
    assert {name for name, _ in launch.builds("sm_80")} == set(names)
    assert not list(launch.builds("sm_70"))
