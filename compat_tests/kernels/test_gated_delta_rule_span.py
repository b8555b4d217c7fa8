"""A span as an affine map of its state: against the oracle, in pieces, and through its gradients."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from accel.kernels.gated_delta_rule import compose_spans, gated_delta_rule, span_summary
from accel.kernels.gated_delta_rule.reference import gated_delta_rule_reference

HEADS, HEADS_V, K, V = 2, 4, 12, 20


def drawn(tokens: int, dtype: torch.dtype = torch.float64, batch: int = 1) -> dict[str, Tensor]:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "k": draw(batch, tokens, HEADS, K),
        "v": draw(batch, tokens, HEADS_V, V),
        "g": -draw(batch, tokens, HEADS_V).abs(),
        "beta": draw(batch, tokens, HEADS_V),
    }


OPTIONS = {"use_qk_l2norm": True, "use_beta_sigmoid": True}


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 130])
def test_the_map_takes_any_state_to_the_oracles(tokens: int) -> None:
    given = drawn(tokens, batch=2)
    state = torch.randn(2, HEADS_V, K, V, dtype=torch.float64)
    m, h = span_summary(**given, **OPTIONS)
    _, after = gated_delta_rule_reference(
        given["k"], **given, initial_state=state, output_final_state=True, **OPTIONS
    )  # fmt: skip
    torch.testing.assert_close(m @ state + h, after, rtol=1e-10, atol=1e-11)
    if tokens == 0:
        assert torch.equal(m, torch.eye(K, dtype=torch.float64).expand_as(m)) and not h.any()


def test_packed_sequences_have_a_map_each() -> None:
    given = drawn(70)
    cu = torch.tensor([0, 5, 5, 70])
    m, h = span_summary(**given, **OPTIONS, cu_seqlens=cu)
    for n, (start, end) in enumerate(((0, 5), (5, 5), (5, 70))):
        alone = span_summary(**{name: x[:, start:end] for name, x in given.items()}, **OPTIONS)
        for found, expected in zip((m[n], h[n]), alone, strict=True):
            torch.testing.assert_close(found, expected[0], rtol=1e-11, atol=1e-12)


def test_neighbouring_spans_compose_to_the_whole() -> None:
    given = drawn(100)
    parts = [
        span_summary(**{name: x[:, start:end] for name, x in given.items()}, **OPTIONS)
        for start, end in ((0, 33), (33, 34), (34, 100))
    ]
    whole = span_summary(**given, **OPTIONS)
    for order in (
        compose_spans(parts[2], compose_spans(parts[1], parts[0])),
        compose_spans(compose_spans(parts[2], parts[1]), parts[0]),
    ):
        for found, expected in zip(order, whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_the_raw_gate_and_low_precision_give_the_state_of_the_rule_itself() -> None:
    given = drawn(90, torch.bfloat16)
    gate = {"use_gate": True, "A_log": torch.randn(HEADS_V), "dt_bias": torch.randn(HEADS_V)}
    state = torch.randn(1, HEADS_V, K, V)
    m, h = span_summary(**given, **OPTIONS, **gate)
    assert m.dtype == h.dtype == torch.float32
    _, after = gated_delta_rule(
        given["k"], **given, initial_state=state, output_final_state=True, **OPTIONS, **gate
    )  # fmt: skip
    torch.testing.assert_close(m @ state + h, after, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_rule_itself() -> None:
    given = {name: x.requires_grad_() for name, x in drawn(40).items()}
    state = torch.randn(1, HEADS_V, K, V, dtype=torch.float64)
    above = torch.randn(1, HEADS_V, K, V, dtype=torch.float64)
    m, h = span_summary(**given, **OPTIONS)
    _, after = gated_delta_rule(given["k"], **given, initial_state=state, output_final_state=True, **OPTIONS)
    found = torch.autograd.grad(m @ state + h, list(given.values()), above)
    expected = torch.autograd.grad(after, list(given.values()), above)
    for name, x, y in zip(given, found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
