"""`accel certify` on a made-up kernel family: what passes, and every way to fail. And the accuracy rule behind it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import accel.patches
from accel import certificates, certifying, source_hash
from accel.outcome import Choice, Declined
from accel.testing import accuracy, assert_accurate

# --- The accuracy rule -----------------------------------------------------------------------------------------

ORACLE = torch.tensor([3.0, -4.0, 0.0], dtype=torch.float64)


def off(*difference: float) -> Tensor:
    return (ORACLE + torch.tensor(difference, dtype=torch.float64)).float()


@pytest.mark.parametrize(
    ("ours", "theirs", "ok", "words"),
    [
        (off(0, 0, 0.1), off(0, 0, 0.1), True, ""),
        (off(0, 0, 0.124), off(0, 0.1, 0), True, ""),
        (off(0, 0, 0.126), off(0, 0.1, 0), False, "relative error 0.0252 is 1.26 times"),
        (off(0, 0, 0), off(0, 0, 0), True, ""),
        (off(3e-6, 0, 0), off(0, 0, 0), True, ""),  # under the floor: 1e-6 of ||oracle|| = 5, of its largest = 4
        (off(0, 0, 1e-4), off(0, 0, 0), False, "relative error"),
        # Differences of one norm, but ours all in one place.
        (off(0.15, 0, 0), off(0.07, 0.13, 0.07), True, ""),
        (off(0, 0, float("nan")), off(0, 0, 0.1), False, "1 of 3 values are NaN or Inf"),
        (off(0, float("inf"), 0), off(0, 0, 0.1), False, "NaN or Inf"),
        (off(0, 0, float("nan")), off(0, 0, float("nan")), True, ""),
        (off(0, 0, 0), off(0, 0, float("nan")), True, ""),
        (off(0, 0, 5.0), off(0, 0, float("nan")), False, "relative error"),
    ],
)
def test_accuracy(ours: Tensor, theirs: Tensor, ok: bool, words: str) -> None:
    verdict = accuracy(ours, theirs, ORACLE)
    assert verdict.ok is ok and (words in verdict.reason if words else verdict.reason == ""), verdict
    assert verdict.ok == (verdict.error_ratio <= 1.25 and verdict.largest_ratio <= 2)


def test_accuracy_watches_the_largest_single_difference() -> None:
    oracle = torch.ones(10_000, dtype=torch.float64)
    theirs = (oracle + 1e-3).float()
    ours = oracle.float()
    ours[17] += 3e-3
    verdict = accuracy(ours, theirs, oracle)
    assert not verdict.ok and verdict.reason == "largest difference 0.003 is 3 times upstream's"
    assert verdict.error_ratio < 0.1


def test_accuracy_wants_shape_and_dtype_of_upstream() -> None:
    assert (
        "shape (3,) torch.float32, upstream's (3,) torch.bfloat16"
        in accuracy(off(0, 0, 0), off(0, 0, 0).bfloat16(), ORACLE).reason
    )
    assert "shape (3,)" in accuracy(off(0, 0, 0), off(0, 0, 0)[:2], ORACLE[:2]).reason
    assert "the oracle's (1, 3)" in accuracy(off(0, 0, 0), off(0, 0, 0), ORACLE[None]).reason


def test_accuracy_of_integers_zeros_and_nothing() -> None:
    one, two = torch.tensor([1, 2]), torch.tensor([1, 3])
    assert accuracy(one, one, one).ok and "1 of 2 integers differ" in accuracy(one, two, one).reason
    zero = torch.zeros(3)
    assert accuracy(zero, zero, zero.double()).ok
    assert not accuracy(zero + 1e-12, zero, zero.double()).ok
    assert accuracy(zero + 1e-12, zero - 1e-12, zero.double()).ok
    assert accuracy(zero[:0], zero[:0], zero[:0].double()).ok
    big = torch.tensor([1.0, float("inf")]).double()
    assert accuracy(big.float(), big.float(), big).ok, "where the oracle overflows there is no error to speak of"


def test_accuracy_of_half_precision_rounding() -> None:
    seed = torch.initial_seed() % 1000
    print("seed", seed)
    oracle = torch.randn(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rounded = oracle.bfloat16()
    assert accuracy(rounded, rounded, oracle).ok
    assert not accuracy(rounded.mul(1 + 2**-7), rounded, oracle).ok
    assert accuracy(oracle.float(), rounded.float(), oracle).ok


def test_accurate_means_infinite_where_the_oracle_is_too() -> None:
    oracle = torch.tensor([1.0, -torch.inf, 2.0], dtype=torch.float64)
    good = oracle.float()
    assert_accurate("lse", good, good, oracle)
    for at, value in ((0, torch.nan), (1, torch.nan), (1, 0.0), (2, torch.inf)):
        bad = good.clone()
        bad[at] = value
        with pytest.raises(AssertionError, match="lse: NaN, or infinite"):
            assert_accurate("lse", bad, good, oracle)
    for value in (torch.nan, torch.inf):
        with pytest.raises(AssertionError, match="no yardstick"):
            assert_accurate("lse", good, torch.tensor([1.0, -torch.inf, value]), oracle)
    with pytest.raises(AssertionError, match="lse: relative error"):
        assert_accurate("lse", good + 1e-3, good, oracle)
    with pytest.raises(AssertionError, match="upstream's"):
        assert_accurate("lse", good, good[:2], oracle)


# --- A made-up family: y = x * w, with its gradients -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Facts:
    hidden: int


@dataclasses.dataclass(frozen=True)
class Case:
    name: str = "plain"
    hidden: int = 64
    ours: Callable[..., Tensor] = torch.mul
    in_place: bool = False
    deterministic: bool = True
    exact: frozenset[str] = frozenset()
    why_known: str | None = None

    @property
    def facts(self) -> Facts:
        return Facts(self.hidden)

    def known(self, inputs: dict[str, Any]) -> str | None:
        return self.why_known

    def make(self, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        def draw() -> Tensor:
            return torch.randn(8, self.hidden, generator=generator).to(device)

        return {"x": draw().requires_grad_(), "w": draw().requires_grad_(), "d_y": draw(), "note": "no tensor"}

    def run(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        return gradients(self.ours, inputs, torch.float32)

    def oracle(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        return gradients(torch.mul, inputs, torch.float64)


def gradients(function: Callable[..., Tensor], inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    x, w = (
        inputs[name] if dtype == torch.float32 else inputs[name].detach().to(dtype).requires_grad_() for name in "xw"
    )
    y = function(x, w)
    d_x, d_w = torch.autograd.grad(y, (x, w), inputs["d_y"].to(dtype))
    return {"y": y, "d_x": d_x, "d_w": d_w}


def portable(case: Case, inputs: dict[str, Any]) -> dict[str, Tensor]:
    return gradients(torch.mul, inputs, torch.float32)


def plan(facts: Facts, arch: str) -> Choice | Declined:
    if facts.hidden > 512:
        return Declined(f"hidden={facts.hidden} > 512 on {arch}")
    if facts.hidden == 1:
        return Choice("made_up", "portable", backward="portable")
    return Choice("made_up", "any_fwd", backward="any_wide_bwd" if facts.hidden > 128 else "any_bwd")


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """accel.kernels.made_up with one case; its certificates go to a cache folder of this test."""
    root = tmp_path / "kernels"
    (root / "made_up").mkdir(parents=True)
    for name in ("any_fwd", "any_bwd", "any_wide_bwd", "cases"):
        (root / "made_up" / f"{name}.py").write_text("x = 1")
    for module in (source_hash, certificates, certifying):
        monkeypatch.setattr(module, "kernels_folder", lambda: root)
    cases, planning = types.ModuleType("cases"), types.ModuleType("plan")
    cases.CASES, cases.portable, planning.plan = (Case(),), portable, plan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accel.kernels.made_up", types.ModuleType("made_up"))
    monkeypatch.setitem(sys.modules, "accel.kernels.made_up.cases", cases)
    monkeypatch.setitem(sys.modules, "accel.kernels.made_up.plan", planning)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    certificates.forget()
    yield cases
    certificates.forget()


def certify(family: types.ModuleType, *cases: Case, **options: Any) -> certifying.FamilyResult:
    family.CASES = cases or (Case(),)
    (found,) = certifying.certify(["made_up"], device="cpu", **options)
    return found


def failure(family: types.ModuleType, **case: Any) -> str:
    found = certify(family, Case(**case))
    assert {c.kernel for c in found.failed} == {"any_fwd", "any_bwd"} == {c.kernel for c in found.certificates}
    assert len(found.results) == 1, "a failed case is not tried again"
    return str(found.failed[0].failure)


def test_a_right_kernel_is_certified(family: types.ModuleType) -> None:
    seen: list[str] = []
    found = certify(
        family,
        Case(),
        Case("wide", 256),
        Case("huge", 1024),
        Case("none", 1),
        seed=5,
        progress=lambda *a: seen.append(a[0]),
    )
    assert found.arch == "cpu" and found.failed == []
    assert found.skipped == {"huge": "hidden=1024 > 512 on cpu", "none": "served by portable"}
    assert seen == ["plain"] * 3 + ["wide"] * 3 + ["huge", "none"]
    by_kernel = {c.kernel: c for c in found.certificates}
    assert {k: c.cases for k, c in by_kernel.items()} == {
        "any_fwd": ("plain", "wide"),
        "any_bwd": ("plain",),
        "any_wide_bwd": ("wide",),
    }
    one = by_kernel["any_fwd"]
    assert (one.seeds, one.source, one.yardsticks) == (
        (5, 6, 7),
        source_hash.source_hash("made_up", "any_fwd"),
        ("portable",),
    )
    assert one.failure is None and 0 <= one.worst_error <= 1.25
    assert one.dsl == (certificates.dsl_version() or "none")
    assert {(r.case, r.seed) for r in found.results} == {(c, s) for c in ("plain", "wide") for s in (5, 6, 7)}

    certificates.write(found.certificates)
    assert certificates.find("made_up", "any_bwd", "cpu") == by_kernel["any_bwd"]


def test_the_seed_is_drawn_and_recorded(family: types.ModuleType) -> None:
    first, second = certify(family).certificates[0].seeds, certify(family).certificates[0].seeds
    assert first != second and first == tuple(range(first[0], first[0] + 3))


def test_a_wrong_result_fails(family: types.ModuleType) -> None:
    wrong = failure(family, ours=lambda x, w: x * w * 1.001)
    assert wrong.startswith("plain, seed ") and "y: relative error 0.001" in wrong and "d_x: " in wrong


class Unwritten(torch.autograd.Function):
    """The gradient of x is allocated and never written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = ctx.saved_tensors
        return torch.full_like(x, torch.nan), d_y * x


def test_nan_where_upstream_has_none_fails(family: types.ModuleType) -> None:
    assert "d_x: 512 of 512 values are NaN or Inf" in failure(family, ours=Unwritten.apply)


def test_freed_memory_is_filled_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *a, **k: made.append(full(*a, **k)) or made[-1])
    certifying._poison([torch.empty(3, 5), torch.empty(7, dtype=torch.bfloat16)], torch.device("cpu"))
    sizes = [block.numel() for block in made]
    assert sizes == [60, 14, 60, 14]
    assert made[0].view(torch.float32).isnan().all() and made[1].view(torch.bfloat16).isnan().all()
    assert made[1].view(torch.float16).isnan().all()


def test_a_changed_input_fails(family: types.ModuleType) -> None:
    def spoil(x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        w.data[0, 0] += 1  # as a kernel does: autograd does not see it
        return y.detach().requires_grad_() + 0 * (x + w)

    assert "input w was changed by the call" in failure(family, ours=spoil)


def test_a_write_beside_a_view_fails(family: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """x is the left half of each row of a wider tensor, and the kernel writes one element too many."""
    make = Case.make

    def strided(self: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        made = make(self, device, generator)
        holder = torch.full((8, 2 * self.hidden), torch.nan)
        made["x"] = holder[:, : self.hidden].copy_(made["x"].detach()).requires_grad_()
        return made

    def overrun(x: Tensor, w: Tensor) -> Tensor:
        x.detach().as_strided((1,), (1,), storage_offset=x.shape[1]).zero_()
        return x * w

    monkeypatch.setattr(Case, "make", strided)
    assert certify(family, Case()).failed == []
    assert "input x was changed by the call, or memory beside it" in failure(family, ours=overrun)


def test_in_place_cases_get_fresh_inputs(family: types.ModuleType) -> None:
    def spoil(x: Tensor, w: Tensor) -> Tensor:
        y = torch.mul(x.clone(), w.clone())
        x.data.zero_()
        return y

    assert certify(family, Case(ours=spoil, in_place=True)).failed == []


def test_two_runs_must_agree_bit_for_bit(family: types.ModuleType) -> None:
    calls = []

    def vary(x: Tensor, w: Tensor) -> Tensor:
        calls.append(1)
        return x * w * (1 + 1e-7 * (len(calls) % 2))

    assert "differs between two runs" in failure(family, ours=vary)
    assert certify(family, Case(ours=vary, deterministic=False)).failed == []


def test_exact_outputs(family: types.ModuleType) -> None:
    assert certify(family, Case(exact=frozenset({"y"}))).failed == []
    assert "y: is not equal" in failure(family, ours=lambda x, w: x * w * (1 + 2**-23), exact=frozenset({"y"}))


def test_an_exception_fails_the_case_and_names_it(family: types.ModuleType) -> None:
    def refuse(x: Tensor, w: Tensor) -> Tensor:
        raise RuntimeError("CUDA error:\n  misaligned address")

    assert failure(family, ours=refuse).endswith("RuntimeError: CUDA error: misaligned address")


def test_missing_outputs_fail(family: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "run", lambda self, inputs: {"y": inputs["x"]})
    assert "outputs y; the oracle has d_w, d_x, y" in failure(family)


def test_one_failing_case_fails_its_kernels_only(family: types.ModuleType) -> None:
    found = certify(family, Case(), Case("wide", 256, ours=lambda x, w: x * w * 1.5))
    assert {c.kernel for c in found.failed} == {"any_fwd", "any_wide_bwd"}
    assert {c.kernel for c in found.certificates if c.failure is None} == {"any_bwd"}


def test_what_does_not_fit_is_skipped(family: types.ModuleType) -> None:
    def too_much(x: Tensor, w: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("too much")

    found = certify(family, Case("large", ours=too_much), Case())
    assert "does not fit" in found.skipped["large"] and found.failed == []
    assert [c.cases for c in found.certificates] == [("plain",), ("plain",)]


def test_another_architectures_kernels(family: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="not those of sm_80"):
        certify(family, Case(), arch="sm_80")
    seen = []

    def run(self: Case, inputs: dict[str, Any], arch: str | None = None) -> dict[str, Tensor]:
        seen.append(arch)
        return gradients(self.ours, inputs, torch.float32)

    monkeypatch.setattr(Case, "run", run)
    found = certify(family, Case(), arch="sm_80")
    assert set(seen) == {"sm_80"} and {c.arch for c in found.certificates} == {"sm_80"}


def test_one_kernel_of_a_family(family: types.ModuleType) -> None:
    family.CASES = (Case("plain"), Case("wide", 256), Case("huge", 1024))  # type: ignore[attr-defined]
    (found,) = certifying.certify(["made_up.any_wide_bwd"], device="cpu", rounds=1)
    assert [(c.kernel, c.cases) for c in found.certificates] == [("any_wide_bwd", ("wide",))]


def test_a_kernel_that_no_plan_chooses_has_no_certificate(family: types.ModuleType) -> None:
    family.CASES = (Case("plain"),)  # type: ignore[attr-defined]
    (found,) = certifying.certify(["made_up.any_wide_bwd"], device="cpu", rounds=1)
    assert found.certificates == [] and found.results == []


def test_unknown_families_and_kernels_and_no_gpu(family: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no kernel family 'nrom' to certify; there is made_up"):
        certifying.certify(["nrom"], device="cpu")
    with pytest.raises(ValueError, match="no kernel 'fwd' in made_up to certify; there is any_bwd, any_fwd"):
        certifying.certify(["made_up.fwd"], device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device"):
        certifying.certify()


# --- Upstream's side -------------------------------------------------------------------------------------------

ADAPTER = """
from accel.kernels.made_up import cases
CERTIFIES = "made_up"

def upstream(case):
    if case.name == "unknown to upstream":
        return None
    def compute(inputs):
        if case.name == "refused":
            raise NotImplementedError("only on  Hopper")
        outputs = cases.portable(case, inputs)
        if case.name == "forward only":
            return {"y": outputs["y"] * (1 + 1e-3)}
        return {name: value * (1 + 1e-3) for name, value in outputs.items()}
    return compute
"""


@pytest.fixture
def adapter(family: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter of the family below patches/transformers, and others that must not be imported."""
    place = tmp_path / "patches"
    for library in ("transformers", "not_installed"):
        (place / library).mkdir(parents=True)
        (place / library / "__init__.py").touch()
    (place / "transformers" / "made_up.py").write_text(ADAPTER)
    (place / "transformers" / "other.py").write_text('CERTIFIES = "made_up_too"\nraise RuntimeError("imported")')
    (place / "not_installed" / "made_up.py").write_text('CERTIFIES = "made_up"\nraise RuntimeError("imported")')
    sys.modules["accel.kernels.made_up"].cases = family  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name.startswith("accel.patches.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(accel.patches, "__path__", [str(place)])
    kept = {name: value for name, value in vars(accel.patches).items() if not name.startswith("__")}
    monkeypatch.setattr(certifying, "_LIBRARIES", ("not_installed", "transformers"))
    yield
    for name in [name for name in sys.modules if name.startswith("accel.patches.")]:
        del sys.modules[name]
    for name in [name for name in vars(accel.patches) if not name.startswith("__") and name not in kept]:
        delattr(accel.patches, name)
    vars(accel.patches).update(kept)


def test_the_adapter_of_the_family_is_the_yardstick(family: types.ModuleType, adapter: None) -> None:
    assert [name for name, _ in certifying.yardsticks("made_up")] == ["transformers.made_up"]
    assert certifying.yardsticks("made") == []
    found = certify(family, Case(ours=lambda x, w: x * w * (1 + 1.2e-3)), Case("unknown to upstream"))
    assert found.failed == []
    assert {(r.case, r.yardstick) for r in found.results} == {
        ("plain", "transformers.made_up"),
        ("unknown to upstream", "portable"),
    }
    assert found.certificates[0].worst_error == pytest.approx(1.2, abs=0.01)
    assert failure(family, ours=lambda x, w: x * w * (1 + 1.3e-3)).count("1.3 times upstream's") == 3


def test_portable_plays_the_part_that_upstream_refuses(family: types.ModuleType, adapter: None) -> None:
    found = certify(family, Case("refused"), Case(why_known="wrong since 1.2"), Case("forward only"), rounds=1)
    assert [(r.yardstick, r.note) for r in found.results] == [
        ("portable", "transformers.made_up refuses the case: NotImplementedError: only on Hopper"),
        ("portable", "wrong since 1.2"),
        ("transformers.made_up", None),
    ]
    slightly_off = Case("forward only", ours=lambda x, w: x * w * (1 + 1.2e-3))
    (result,) = certify(family, slightly_off, rounds=1).results
    assert result.outputs["y"].ok and not result.outputs["d_x"].ok, "gradients are held to the portable path's"


# --- The command -----------------------------------------------------------------------------------------------


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    certifying.add_arguments(parser)
    return certifying.command(parser.parse_args(words))


def test_the_command(
    family: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(certifying, "certify", functools.partial(certifying.certify, device="cpu"))
    family.CASES = (Case(), Case("huge", 1024))
    assert command("made_up", "--seed", "5", "--rounds", "2", "--into", str(tmp_path / "shipped")) == 0
    out = capsys.readouterr().out
    for line in (
        "seeds 5 to 6: repeat with --seed 5",
        "ok  plain: 0.0",
        "huge: hidden=1024 > 512 on cpu",
        "made_up.any_bwd on cpu: certified, 1 cases",
        f"written to {tmp_path / 'shipped' / 'cpu.json'}",
    ):
        assert line in out
    assert certificates.check(Choice("made_up", "any_fwd"), "cpu", uncertified=False) is not None, "not the user's own"

    family.CASES = (Case(ours=lambda x, w: x * w * 1.5),)
    assert command() == 1
    out = capsys.readouterr().out
    assert "FAIL plain (seed " in out and "made_up.any_fwd on cpu: failed" in out
    declined = certificates.check(Choice("made_up", "any_fwd"), "cpu", uncertified=False)
    assert declined is not None and "it failed there on" in declined.reason

    family.CASES = (Case("huge", 1024),)
    assert command() == 2
    assert "nothing was certified" in capsys.readouterr().out
    assert command("nrom") == 2
    assert "no kernel family 'nrom'" in capsys.readouterr().out


def test_the_command_without_a_gpu(
    family: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command() == 2
    assert "no CUDA device" in capsys.readouterr().out
