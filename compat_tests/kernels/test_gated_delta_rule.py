"""Gated delta rule: the recurrent op's own options, user errors, and the plan."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.kernels.gated_delta_rule import gated_delta_rule, recurrent_gated_delta_rule
from accel.kernels.gated_delta_rule.cases import CASES
from accel.kernels.gated_delta_rule.facts import GatedDeltaRuleFacts
from accel.kernels.gated_delta_rule.plan import plan
from accel.kernels.gated_delta_rule.reference import gated_delta_rule_reference
from accel.kernels.runtime import arch as archs
from accel.outcome import Choice, Declined


@pytest.mark.parametrize("with_g, with_gk, with_gv", [*itertools.product([False, True], repeat=3)])
@pytest.mark.parametrize("beta_form", ["none", "head", "channel"])
def test_recurrent_decays_and_betas_equal_the_oracle(
    with_g: bool, with_gk: bool, with_gv: bool, beta_form: str
) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given: dict[str, Tensor | None] = {"q": draw(1, 12, 2, 5), "k": draw(1, 12, 2, 5), "v": draw(1, 12, 4, 6)}
    given["g"] = -draw(1, 12, 4).abs() if with_g else None
    given["gk"] = -draw(1, 12, 4, 5).abs() if with_gk else None
    given["gv"] = -draw(1, 12, 4, 6).abs() if with_gv else None
    given["beta"] = {"none": None, "head": draw(1, 12, 4), "channel": draw(1, 12, 4, 6)}[beta_form]
    given["initial_state"] = draw(3, 4, 5, 6)
    names = [name for name, x in given.items() if x is not None]
    options = {"cu_seqlens": torch.tensor([0, 3, 3, 12]), "output_final_state": True, "use_qk_l2norm": True}
    options["use_beta_sigmoid"] = beta_form != "none"
    above = (draw(1, 12, 4, 6), draw(3, 4, 5, 6))

    def results(function: Any) -> list[Tensor]:
        tensors = {name: None if x is None else x.clone().requires_grad_() for name, x in given.items()}
        found = function(**tensors, **options)
        return [*found, *torch.autograd.grad(found, [tensors[name] for name in names], above)]

    ours, oracle = results(recurrent_gated_delta_rule), results(gated_delta_rule_reference)
    for name, x, y in zip(("o", "final_state", *names), ours, oracle, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    with torch.no_grad():
        assert torch.equal(recurrent_gated_delta_rule(**given, **options)[0], ours[0])


def test_recurrent_gate_in_kernel_adds_to_the_channel_decays() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 6, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    g, a_log, dt_bias = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((2, 6, 2), (2,), (2,)))
    given: dict[str, Any] = {"g": g, "gk": -q.abs(), "use_gate": True, "A_log": a_log, "dt_bias": dt_bias}
    ours = recurrent_gated_delta_rule(q, k, v, **given)[0]
    torch.testing.assert_close(ours, gated_delta_rule_reference(q, k, v, **given)[0], rtol=1e-12, atol=1e-13)


def test_parameters_may_have_any_shape_and_are_ignored_without_the_gate() -> None:
    q = torch.randn(1, 5, 2, 4)
    g, beta, a_log = torch.randn(1, 5, 2), torch.rand(1, 5, 2), torch.randn(2)
    gated = gated_delta_rule(q, q, q, g, beta, use_gate=True, A_log=a_log, dt_bias=a_log)[0]
    reshaped = a_log.view(1, 1, 2, 1)
    assert torch.equal(gated, gated_delta_rule(q, q, q, g, beta, use_gate=True, A_log=reshaped, dt_bias=reshaped)[0])
    assert torch.equal(
        gated_delta_rule(q, q, q, -beta, beta)[0], gated_delta_rule(q, q, q, -beta, beta, A_log=a_log, dt_bias=g)[0]
    )


def test_scale() -> None:
    q = torch.randn(1, 5, 2, 4, dtype=torch.float64)
    g, beta = -torch.rand(1, 5, 2, dtype=torch.float64), torch.rand(1, 5, 2, dtype=torch.float64)
    torch.testing.assert_close(
        gated_delta_rule(q, q, q, g, beta, scale=3.0)[0], gated_delta_rule(q, q, q, g, beta)[0] * 6.0
    )


def arguments(**changed: Any) -> dict[str, Any]:
    x = torch.randn(1, 4, 2, 8)
    return {"q": x, "k": x, "v": x, "g": -torch.rand(1, 4, 2), "beta": torch.rand(1, 4, 2), **changed}


ERRORS = {
    "q and k must have the same shape, got": {"k": torch.randn(1, 4, 3, 8)},
    r"q, k, v must be \[B, T, heads, dim\], got q \[4, 2, 8\]": {"q": torch.randn(4, 2, 8)},
    r"v must have q's batch and length \[1, 4\], got \[1, 5, 2, 8\]": {"v": torch.randn(1, 5, 2, 8)},
    "multiple of the 2 query/key heads, got 3": {"v": torch.randn(1, 4, 3, 8)},
    r"g must be \[1, 4, 2\], got \[1, 4, 2, 8\]": {"g": torch.randn(1, 4, 2, 8)},
    r"beta must be \[1, 4, 2\], got \[1, 4\]": {"beta": torch.rand(1, 4)},
    r"cu_seqlens must be \[N \+ 1\], got \[0\]": {"cu_seqlens": torch.zeros(0, dtype=torch.int32)},
    r"cu_seqlens must not decrease, got \[0, 3, 2, 4\]": {"cu_seqlens": torch.tensor([0, 3, 2, 4])},
    "cu_seqlens must stay within 0 and T=4, got 0 to 5": {"cu_seqlens": torch.tensor([0, 5])},
    "cu_seqlens must stay within 0 and T=4, got -1 to 4": {"cu_seqlens": torch.tensor([-1, 4])},
    r"initial_state must be \[1, 2, 8, 8\], got \[2, 2, 8, 8\]": {"initial_state": torch.zeros(2, 2, 8, 8)},
    "use_gate=True needs A_log, got None": {"use_gate": True},
    r"A_log must have 2 values, got \[3\]": {"use_gate": True, "A_log": torch.zeros(3)},
    r"dt_bias must have 2 values, got \[8\]": {"use_gate": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(8)},
    "allow_neg_eigval=True needs use_beta_sigmoid=True": {"allow_neg_eigval": True},
}
TYPE_ERRORS = {
    "v must be a floating-point tensor, got torch.int64": {"v": torch.ones(1, 4, 2, 8, dtype=torch.int64)},
    "g must be a floating-point tensor, got torch.int64": {"g": torch.ones(1, 4, 2, dtype=torch.int64)},
    "cu_seqlens must be int32 or int64, got torch.float32": {"cu_seqlens": torch.tensor([0.0, 4.0])},
    "initial_state must be a floating-point tensor": {"initial_state": torch.zeros(1, 2, 8, 8, dtype=torch.int32)},
    "A_log must be a floating-point tensor": {"use_gate": True, "A_log": torch.zeros(2, dtype=torch.int32)},
}


@pytest.mark.parametrize("function", [gated_delta_rule, recurrent_gated_delta_rule], ids=lambda f: f.__name__)
@pytest.mark.parametrize("message", [*ERRORS, *TYPE_ERRORS])
def test_user_errors_name_the_value(function: Any, message: str) -> None:
    error = ValueError if message in ERRORS else TypeError
    with pytest.raises(error, match=message):
        function(**arguments(**{**ERRORS, **TYPE_ERRORS}[message]))


def test_a_batch_with_cu_seqlens_is_refused() -> None:
    x, gate = torch.randn(2, 4, 1, 8), torch.rand(2, 4, 1)
    with pytest.raises(ValueError, match="with cu_seqlens the batch must be 1, got 2"):
        gated_delta_rule(x, x, x, -gate, gate, cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"gk": torch.zeros(1, 4, 2, 7)}, r"gk must be \[1, 4, 2, 8\], got \[1, 4, 2, 7\]"),
        ({"gv": torch.zeros(1, 4, 2)}, r"gv must be \[1, 4, 2, 8\], got \[1, 4, 2\]"),
        ({"beta": torch.zeros(1, 4, 2, 3)}, r"beta must be \[1, 4, 2, 8\], got \[1, 4, 2, 3\]"),
        ({"g": None, "use_gate": True, "A_log": torch.zeros(2)}, "use_gate=True needs g, got None"),
    ],
)
def test_user_errors_of_the_recurrent_op(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recurrent_gated_delta_rule(**arguments(**changed))


# --- the plan ---------------------------------------------------------------------------------------------------------

FACTS = GatedDeltaRuleFacts("chunk", "bfloat16", 2, 4, 64, 64)
RECURRENT = {"mode": "recurrent"}


def test_a_cpu_is_served_by_the_portable_path() -> None:
    assert plan(FACTS, "cpu") == Choice("gated_delta_rule", "portable")
    training = dataclasses.replace(FACTS, needs_grad=True)
    assert plan(training, "cpu") == Choice("gated_delta_rule", "portable", backward="portable")
    for case in CASES:
        assert isinstance(plan(case.facts, "cpu"), Choice)


@pytest.mark.parametrize(
    "changed, arch, reason",
    [
        ({}, "sm_80", "no chunked gated_delta_rule kernel for sm_80 yet: upstream's own runs"),
        ({}, "sm_100", "no chunked gated_delta_rule kernel for sm_100 yet: upstream's own runs"),
        ({}, "sm_75", "no gated_delta_rule kernel for sm_75: it needs one of " + ", ".join(archs.known_archs())),
        ({"needs_grad": True}, "sm_90", "a gradient is needed: the chunked kernel has none yet"),
        ({"dtype": "float32"}, "sm_90", "dtype=float32: the chunked kernel takes bfloat16, float16"),
        ({"v_dtype": "float32"}, "sm_90", "v dtype=float32: the chunked kernel takes q's, bfloat16"),
        ({"head_dim": 100}, "sm_90", "head_dim=100: the chunked kernel has 64, 128, 256"),
        ({"head_dim_v": 96}, "sm_90", "head_dim_v=96 is not a multiple of 64 up to 512"),
        ({"head_dim_v": 576}, "sm_90", "head_dim_v=576 is not a multiple of 64 up to 512"),
        ({"head_dim_v": 0}, "sm_90", "head_dim_v=0 is not a multiple of 64 up to 512"),
        (RECURRENT, "sm_75", "no gated_delta_rule kernel for sm_75: it needs one of " + ", ".join(archs.known_archs())),
        ({**RECURRENT, "needs_grad": True}, "sm_90", "a gradient is needed: the recurrent kernel has none"),
        (
            {**RECURRENT, "dtype": "float64"},
            "sm_90",
            "dtype=float64: the recurrent kernel takes bfloat16, float16, float32",
        ),
        (
            {**RECURRENT, "v_dtype": "float64"},
            "sm_90",
            "v dtype=float64: the recurrent kernel takes bfloat16, float16, float32",
        ),
        ({**RECURRENT, "head_dim": 100}, "sm_90", "head_dim=100: the recurrent kernel has 64, 128, 256"),
        ({**RECURRENT, "head_dim_v": 100}, "sm_90", "head_dim_v=100 is not a multiple of 16"),
        ({**RECURRENT, "has_gk": True}, "sm_90", "gk: the recurrent kernel has one decay per head"),
        ({**RECURRENT, "has_gv": True}, "sm_90", "gv: the recurrent kernel has one decay per head"),
        (
            {**RECURRENT, "beta_per_channel": True},
            "sm_90",
            "beta is [B, T, HV, V]: the recurrent kernel takes [B, T, HV]",
        ),
        ({**RECURRENT, "use_gate": True, "has_g": False}, "sm_90", "a gate without g"),
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


@pytest.mark.parametrize("arch", archs.known_archs())
def test_a_gpu_is_served_token_by_token(arch: str) -> None:
    assert plan(dataclasses.replace(FACTS, mode="recurrent"), arch) == Choice("gated_delta_rule", "any_recurrent")
