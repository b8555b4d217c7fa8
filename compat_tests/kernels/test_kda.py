"""KDA: its gate's options, user errors, and the plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from accel.kernels.gated_delta_rule import gated_delta_rule
from accel.kernels.kda import kda, recurrent_kda
from accel.kernels.kda.cases import CASES
from accel.kernels.kda.facts import KdaFacts
from accel.kernels.kda.plan import plan
from accel.kernels.kda.reference import kda_reference
from accel.outcome import Choice, Declined


def arguments(**changed: Any) -> dict[str, Any]:
    x = torch.randn(1, 4, 2, 8)
    return {"q": x, "k": x, "v": x, "g": -torch.rand(1, 4, 2, 8), "beta": torch.rand(1, 4, 2), **changed}


def test_one_decay_for_all_channels_is_the_gated_delta_rule() -> None:
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, 70, 2, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    g, beta = (torch.rand(2, 70, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    ours = kda(q, k, v, -g[..., None].expand(-1, -1, -1, 8), beta, use_qk_l2norm=True, output_final_state=True)
    theirs = gated_delta_rule(q, k, v, -g, beta, use_qk_l2norm=True, output_final_state=True)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("function", [kda, recurrent_kda], ids=lambda f: f.__name__)
@pytest.mark.parametrize("with_rate", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5])
def test_gates(function: Any, with_rate: bool, with_bias: bool, lower_bound: float | None) -> None:
    if lower_bound is None and not with_rate:
        with pytest.raises(ValueError, match="use_gate=True without lower_bound needs A_log, got None"):
            function(**arguments(use_gate=True))
        return
    generator = torch.Generator().manual_seed(11)
    given = {name: x.double() for name, x in arguments(g=3 * torch.randn(1, 4, 2, 8, generator=generator)).items()}
    given["A_log"] = torch.randn(2, generator=generator, dtype=torch.float64) if with_rate else None
    given["dt_bias"] = torch.randn(2, 8, generator=generator, dtype=torch.float64) if with_bias else None
    names = [name for name, x in given.items() if x is not None]

    def results(function: Any) -> list[torch.Tensor]:
        tensors = {name: None if x is None else x.clone().requires_grad_() for name, x in given.items()}
        out = function(**tensors, use_gate=True, lower_bound=lower_bound)[0]
        return [out, *torch.autograd.grad(out.sin().sum(), [tensors[name] for name in names])]

    for name, x, y in zip(("o", *names), results(function), results(kda_reference), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_parameters_may_have_any_shape_and_are_ignored_without_the_gate() -> None:
    rate, bias = torch.randn(2), torch.randn(16)
    given = arguments(A_log=rate, dt_bias=bias)
    gated = kda(**given, use_gate=True)[0]
    reshaped = {"A_log": rate.view(1, 1, 2, 1), "dt_bias": bias.view(2, 8)}
    assert torch.equal(gated, kda(**{**given, **reshaped}, use_gate=True)[0])
    plain = kda(**{**given, "A_log": None, "dt_bias": None})[0]
    assert torch.equal(plain, kda(**given, lower_bound=-5.0)[0]) and not torch.equal(plain, gated)


def test_beta_per_value_channel_and_none() -> None:
    given = {name: x.double() for name, x in arguments(beta=torch.rand(1, 4, 2, 8)).items()}
    torch.testing.assert_close(recurrent_kda(**given)[0], kda_reference(**given)[0], rtol=1e-12, atol=1e-13)
    given["beta"] = None
    torch.testing.assert_close(recurrent_kda(**given)[0], kda_reference(**given)[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("lower_bound", [None, 0.0, -5.1])
def test_safe_gate_needs_a_lower_bound_that_keeps_the_promise(lower_bound: float | None) -> None:
    given = arguments(A_log=torch.zeros(2))
    message = "needs lower_bound" + (", got None" if lower_bound is None else rf" in \[-5, 0\), got {lower_bound}")
    with pytest.raises(ValueError, match=message):
        kda(**given, use_gate=True, safe_gate=True, lower_bound=lower_bound)


def test_safe_gate_changes_nothing() -> None:
    given = arguments(A_log=torch.zeros(2))
    for options in ({}, {"use_gate": True, "lower_bound": -5.0}):
        assert torch.equal(kda(**given, **options)[0], kda(**given, **options, safe_gate=True)[0])


@pytest.mark.parametrize("function", [kda, recurrent_kda], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "changed, message",
    [
        # one decay per head where one per channel is meant: the layout of an older interface
        ({"g": torch.zeros(1, 4, 2)}, r"g must be \[1, 4, 2, 8\], got \[1, 4, 2\]"),
        ({"beta": torch.zeros(1, 4, 1)}, r"beta must be \[1, 4, 2\], got \[1, 4, 1\]"),
        ({"use_gate": True, "A_log": torch.zeros(3)}, r"A_log must have 2 values, got \[3\]"),
        ({"use_gate": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}, r"dt_bias must have 16 values, got"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval=True needs use_beta_sigmoid=True"),
        ({"v": torch.zeros(1, 4, 3, 8)}, "multiple of the 2 query/key heads, got 3"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens must stay within 0 and T=4, got 0 to 9"),
    ],
)
def test_user_errors_name_the_value(function: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(**arguments(**changed))


# --- the plan ---------------------------------------------------------------------------------------------------------

FACTS = KdaFacts("chunk", "bfloat16", 2, 4, 64, 64)


def test_a_cpu_is_served_by_the_portable_path() -> None:
    assert plan(FACTS, "cpu") == Choice("kda", "portable")
    training = dataclasses.replace(FACTS, needs_grad=True)
    assert plan(training, "cpu") == Choice("kda", "portable", backward="portable")
    for case in CASES:
        assert isinstance(plan(case.facts, "cpu"), Choice)


@pytest.mark.parametrize(
    "changed, arch, reason",
    [
        ({}, "sm_90", "no kda kernel for sm_90 yet: upstream's own runs"),
        ({"mode": "parallel"}, "cpu", "mode=parallel is none of chunk, recurrent"),
        ({"dtype": "int8"}, "cpu", "dtype=int8 is none of bfloat16, float16, float32, float64"),
        ({"v_dtype": "int8"}, "cpu", "v dtype=int8 is none of bfloat16, float16, float32, float64"),
        ({"n_value_heads": 3}, "cpu", "value heads=3 is not a multiple of heads=2"),
        ({"beta_per_channel": True}, "cpu", "beta is [B, T, HV, V]: the chunked rule takes [B, T, HV]"),
        ({"allow_neg_eigval": True}, "cpu", "allow_neg_eigval=True without use_beta_sigmoid=True"),
    ],
)
def test_decline_reasons(changed: dict[str, Any], arch: str, reason: str) -> None:
    assert plan(dataclasses.replace(FACTS, **changed), arch) == Declined(reason)
