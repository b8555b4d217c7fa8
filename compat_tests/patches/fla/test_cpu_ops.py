"""The table of CPU replacements: it fits upstream, agrees with its own kernels, and declines what upstream rejects."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.outcome import Decline
from accel.patches.fla import cpu_activation, cpu_conv, cpu_loss, cpu_norm
from accel.patches.fla.cpu_ops import CPU_OPS, CpuOp

ROOT = Path(__file__).resolve().parents[3]
SEED = 20


@pytest.fixture(autouse=True)
def _seeded() -> None:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)


def upstream(op: CpuOp) -> Callable[..., Any]:
    owner: Any = importlib.import_module(op.module)
    for part in op.name.split("."):
        owner = vars(owner)[part]
    return owner


@pytest.mark.parametrize("op", CPU_OPS, ids=lambda op: op.name)
def test_the_signature_is_upstreams(op: CpuOp) -> None:
    function = upstream(op)
    if op.kind == "autograd_apply":
        theirs = list(inspect.signature(function.__self__.forward).parameters.values())[1:]
    else:
        theirs = list(inspect.signature(function).parameters.values())
    ours = list(inspect.signature(op.replacement).parameters.values())
    added = ours[len(theirs) :]  # by 0.6.0: every parameter that 0.5.2 lacks comes last and has a default
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert [p.name for p in added] in ([], ["process_group"])
    assert all(p.default is None for p in added)


def test_the_newest_release_has_no_parameter_less() -> None:
    from importlib.metadata import version

    added = {
        op.name
        for op in CPU_OPS
        if op.kind == "function"
        and len(inspect.signature(op.replacement).parameters) != len(inspect.signature(upstream(op)).parameters)
    }
    assert added == (set() if version("fla-core").startswith("0.6") else {"fused_linear_cross_entropy_loss"})


@pytest.mark.parametrize("op", CPU_OPS, ids=lambda op: op.name)
def test_the_kind_fits_the_object(op: CpuOp) -> None:
    function = upstream(op)
    if op.kind == "autograd_apply":
        assert issubclass(function.__self__, torch.autograd.Function)
        assert function == function.__self__.apply
        assert function is not function.__self__.apply
    else:
        assert inspect.isfunction(function)
        assert ("." in op.name) == (op.kind == "class_attribute")


def call_of(op: CpuOp) -> tuple[Any, ...]:
    """Arguments that the replacement serves."""
    x, g, d, w = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8), torch.randn(5, 8)
    match op.name:
        case "layer_norm" | "rms_norm" | "group_norm":
            return (x, d, d)
        case "layer_norm_linear":
            return (x, d, d, w, None)
        case "layer_norm_gated" | "rms_norm_gated":
            return (x, g, d, d)
        case "layer_norm_swish_gate_linear" | "rms_norm_swish_gate_linear":
            return (x, g, d, d, w, None)
        case "l2norm":
            return (x,)
        case "causal_conv1d":
            return (x, torch.randn(8, 4))
        case "causal_conv1d_update":
            return (x[:, :1], torch.zeros(2, 8, 4), None, torch.randn(8, 4))
        case "swiglu" | "powglu":
            return (x, g)
        case "swiglu_linear" | "powglu_linear":
            return (x, g, w, None)
        case "cross_entropy_loss":
            return (x[0], torch.tensor([1, 2, 3]))
        case "FusedCrossEntropyLoss.forward":
            module = importlib.import_module(op.module).FusedCrossEntropyLoss()
            return (module, x[0], torch.tensor([1, 2, 3]))
        case "fused_linear_cross_entropy_loss":
            return (x[0], torch.tensor([1, 2, 3]), w)
        case "fused_attnres":
            return (d, [x, g], d)
    raise AssertionError(op.name)


@pytest.mark.parametrize("op", CPU_OPS, ids=lambda op: op.name)
def test_upstream_cannot_run_what_is_replaced(op: CpuOp) -> None:
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        upstream(op)(*call_of(op))
    result = op.replacement(*call_of(op))
    tensors = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
    assert all(tensor.isfinite().all() and tensor.is_contiguous() for tensor in tensors)


def test_upstreams_own_kernels_agree() -> None:
    """FLA's kernels in Triton's interpreter: outputs, their form, and every gradient, to fp32's accuracy."""
    script = Path(__file__).with_name("interpreted_upstream.py")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "ACCEL_TARGETS": ""},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    results = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [result for result in results if result["form"] is not None] == []
    assert [result for result in results if not max(result["differences"]) <= 2e-6] == []
    compared = {result["op"] for result in results}
    gated_linear = {"layer_norm_swish_gate_linear", "rms_norm_swish_gate_linear"}  # wrong in 0.5.2
    assert compared | gated_linear == {op.name for op in CPU_OPS if op.kind != "class_attribute"}


X, D8, W84 = torch.randn(2, 3, 8), torch.randn(8), torch.randn(8, 4)
DECLINED: list[tuple[str, Callable[[], Any]]] = [
    ("not divisible by num_groups=3", lambda: cpu_norm.group_norm(X, D8, None, num_groups=3)),
    ("more than 65536 bytes", lambda: cpu_norm.rms_norm(torch.randn(1, 16385), None, None)),
    ("more than 65536 bytes", lambda: cpu_norm.l2norm(torch.randn(1, 16385))),
    ("residual has shape (3, 8), x has (2, 3, 8)", lambda: cpu_norm.rms_norm(X, D8, None, X[0])),
    ("weight has shape (4,)", lambda: cpu_norm.layer_norm(X, D8[:4], None)),
    ("bias has shape (4,)", lambda: cpu_norm.layer_norm_linear(X, D8, D8[:4], W84.t(), None)),
    ("the gate has shape (3, 8)", lambda: cpu_norm.rms_norm_gated(X, X[0], D8, None)),
    ("activation='gelu'", lambda: cpu_norm.layer_norm_gated(X, X, D8, None, "gelu")),
    ("residuals is empty", lambda: cpu_norm.fused_attnres(D8, [], D8)),
    ("checkpoint_level=2", lambda: cpu_norm.fused_attnres(D8, [X], D8, checkpoint_level=2)),
    ("context parallelism", lambda: cpu_conv.causal_conv1d(X, W84, cp_context=object())),
    ("backend='cuda'", lambda: cpu_conv.causal_conv1d(X, W84, backend="cuda")),
    ("weight must be [D, W], got None", lambda: cpu_conv.causal_conv1d(X)),
    ("weight must be [D, W], got (8,)", lambda: cpu_conv.causal_conv1d(X, D8)),
    ("the weight is for 8 channels", lambda: cpu_conv.causal_conv1d(X[..., :6], W84)),
    ("the weight is for 8 channels", lambda: cpu_conv.causal_conv1d(X[0], W84)),
    ("activation='gelu'", lambda: cpu_conv.causal_conv1d(X, W84, activation="gelu")),
    ("cu_seqlens with a batch of 2", lambda: cpu_conv.causal_conv1d(X, W84, cu_seqlens=torch.tensor([0, 3]))),
    ("cu_seqlens ends at 2", lambda: cpu_conv.causal_conv1d(X[:1], W84, cu_seqlens=torch.tensor([0, 2]))),
    ("initial_state has shape (1, 8, 4)", lambda: cpu_conv.causal_conv1d(X, W84, initial_state=W84[None])),
    ("residual has shape (3, 8)", lambda: cpu_conv.causal_conv1d(X, W84, residual=X[0])),
    ("no cache", lambda: cpu_conv.causal_conv1d_update(X[:, 0], None, None, W84)),
    ("one token per sequence", lambda: cpu_conv.causal_conv1d_update(X, torch.zeros(6, 8, 4), None, W84)),
    ("cache has shape (2, 8, 3)", lambda: cpu_conv.causal_conv1d_update(X[:, 0], torch.zeros(2, 8, 3), None, W84)),
    ("residual has shape (2, 3, 8)", lambda: cpu_conv.causal_conv1d_update(X[:, 0], torch.zeros(2, 8, 4), X, W84)),
    ("x has shape (2, 3, 8), y has (3, 8)", lambda: cpu_activation.swiglu(X, X[0])),
    ("process group", lambda: cpu_loss.cross_entropy_loss(X[0], torch.zeros(3).long(), process_group=object())),
    ("not [N, V] and [N]", lambda: cpu_loss.cross_entropy_loss(X, torch.zeros(2).long())),
    (
        "process group",
        lambda: cpu_loss.fused_linear_cross_entropy_loss(X[0], torch.zeros(3).long(), X[1], process_group=object()),
    ),
    ("not [N, H], [N], [V, H]", lambda: cpu_loss.fused_linear_cross_entropy_loss(X[0], torch.zeros(2).long(), X[1])),
]


@pytest.mark.parametrize(("reason", "call"), DECLINED, ids=[reason for reason, _ in DECLINED])
def test_declined(reason: str, call: Callable[[], Any]) -> None:
    with pytest.raises(Decline) as declined:
        call()
    assert reason in declined.value.reason
    assert "\n" not in declined.value.reason
