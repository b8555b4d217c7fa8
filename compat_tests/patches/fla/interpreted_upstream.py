"""Compares the CPU replacements with FLA's own kernels, which Triton's interpreter runs on a CPU. A script.

The interpreter has to be on before Triton is imported, hence a process of its own. Prints one JSON line per case: its
name, whether the outputs have upstream's types, shapes, dtypes and contiguity, and the relative differences of every
output and gradient. fp32 only: the interpreter truncates to bf16 where a GPU rounds.

Left out, for what the releases themselves get wrong: in 0.5.2 the gradient of a final state of fewer tokens than the
kernel is wide, the linear layer after a gated norm, and softcapped losses whose vocabulary is not a power of two; in
both, the gradient that reaches the oldest token of a final state is dropped.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402

SEED = 11
OLD = not version("fla-core").startswith("0.6")


class Driver:
    """What Triton asks of a driver before it interprets a kernel."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda *args, **kwargs: [0.0, 0.0, 0.0]

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args, **kwargs: 0


def make_interpretable() -> None:
    """Import FLA, then lend Triton a driver and the interpreter what it lacks."""
    for name in ("fla.modules", "fla.ops.attnres"):
        importlib.import_module(name)
    triton.runtime.driver.set_active(Driver())
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            if "get_multiprocessor_count" in vars(module):
                module.get_multiprocessor_count = lambda *args: 4
            if "fused" in name and "tanh" in vars(module):  # libdevice's needs a GPU
                module.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
    run, load = Autotuner.run, interpreter.InterpreterBuilder.create_masked_load

    def run_first(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **kwargs)

    def load_by_bool(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(np.bool_)  # a mask made from a Python bool arrives as an integer
        return load(self, pointers, mask, *rest)

    Autotuner.run = run_first
    interpreter.InterpreterBuilder.create_masked_load = load_by_bool


Case = tuple[str, str, str, tuple[Any, ...], dict[str, Any]]


def norm_cases() -> Iterator[Case]:
    r = torch.randn
    layer, gated = "fla.modules.layernorm", "fla.modules.fused_norm_gate"
    x, g, w, b, residual, linear, linear_bias = r(3, 5, 24), r(3, 5, 24), r(24), r(24), r(3, 5, 24), r(7, 24), r(7)
    for name in ("layer_norm", "rms_norm"):
        yield name, layer, name, (x, w, b), {}
        yield f"{name} plain, strided", layer, name, (x.transpose(0, 1), None, None), {}
        yield f"{name} prenorm", layer, name, (x, w, None, residual), {"prenorm": True, "eps": 0.1}
        yield f"{name} prenorm alone", layer, name, (x, w, b), {"prenorm": True, "residual_in_fp32": True}
    yield "group", layer, "group_norm", (x, w, b, residual), {"num_groups": 4, "prenorm": True}
    rms_groups = {"num_groups": 2, "is_rms_norm": True}
    yield "group rms", layer, "group_norm", (x, w, b), rms_groups
    yield "linear", layer, "layer_norm_linear", (x, w, b, linear, linear_bias, residual), {"prenorm": True}
    yield "linear rms", layer, "layer_norm_linear", (x, w, None, linear, None), rms_groups
    for name in ("layer_norm_gated", "rms_norm_gated"):
        yield name, gated, name, (x, g, w, b), {}
        yield f"{name} sigmoid", gated, name, (x, g, w, None, "sigmoid", residual), {"prenorm": True}
    for name in () if OLD else ("layer_norm_swish_gate_linear", "rms_norm_swish_gate_linear"):
        yield name, gated, name, (x, g, w, None, linear, linear_bias, residual), {"prenorm": True}
    yield "l2norm", "fla.modules.l2norm", "l2norm", (x,), {}
    sources, query = [r(3, 5, 24) for _ in range(3)], r(24)
    yield "attnres", "fla.ops.attnres", "naive_attnres", (query, sources, w), {}
    kwargs = {"output_rms_weight": b, "rms_eps": 0.01, "scale": 0.5}
    yield "attnres normed", "fla.ops.attnres", "naive_attnres", (query, sources, w), kwargs
    x, g, w, b = r(3, 520), r(3, 520), r(520), r(520)  # beyond 512 upstream has another kernel
    yield "layer_norm, wide", layer, "layer_norm", (x, w, b), {"prenorm": True, "residual_in_fp32": True}
    yield "rms_norm_gated, wide", gated, "rms_norm_gated", (x, g, w, b), {}
    yield "l2norm, wide", "fla.modules.l2norm", "l2norm", (x,), {}


def convolution_cases() -> Iterator[Case]:
    r, module, name = torch.randn, "fla.modules.convolution", "causal_conv1d"
    for width in (3, 4):
        w, b, x, residual, state = r(16, width), r(16), r(2, 9, 16), r(2, 9, 16), r(2, 16, width)
        yield f"conv {width}", module, name, (x, w, b, residual, state, True, "silu"), {}
        step = (r(3, 1, 2, 8), r(3, 16, width), r(3, 1, 2, 8), w, b, "silu")
        yield f"update {width}", module, "causal_conv1d_update", step, {}
    for shape in ((3, 16), (1, 3, 16)):
        yield f"update {shape}", module, "causal_conv1d_update", (r(*shape), r(3, 16, 4), None, w), {}
    yield "conv", module, name, (x, w), {}
    view = r(2, 9, 48).as_strided((2, 9, 16), (432, 48, 1), 16)
    yield "conv of a view", module, name, (view, w, None, None, None, True), {}
    yield "conv, one token", module, name, (x[:, :1], w, b, None, state, False, "swish"), {}
    x, state, cu_seqlens = r(1, 80, 16), r(4, 16, 4), torch.tensor([0, 1, 1, 69, 80])
    yield "conv, packed", module, name, (x, w, b, r(1, 80, 16)), {"cu_seqlens": cu_seqlens.int(), "activation": "silu"}
    yield "conv, packed, state", module, name, (x, w, None, None, state), {"cu_seqlens": cu_seqlens}
    packed = {"cu_seqlens": torch.tensor([0, 67, 80]), "output_final_state": True}
    yield "conv, packed, final", module, name, (x, w, b, None, state[:2]), packed


def activation_and_loss_cases() -> Iterator[Case]:
    r, module = torch.randn, "fla.modules.activations"
    x, y, w, b = 3 * r(3, 5, 24), r(3, 5, 24), r(7, 24) * 0.2, r(7)
    yield "swiglu", module, "swiglu", (x, y), {}
    yield "swiglu strided", module, "swiglu", (x.transpose(0, 1), y.transpose(0, 1)), {}
    yield "swiglu_linear", module, "swiglu_linear", (x, y, w, None), {}
    yield "powglu", module, "powglu", (x, y), {}
    yield "powglu_linear", module, "powglu_linear", (x, y, w, b, 2.0), {}

    module, name = "fla.modules.fused_cross_entropy", "cross_entropy_loss"
    logits, target = r(6, 64), torch.tensor([1, -100, 3, 63, 0, 7])
    yield "loss", module, name, (logits, target), {}
    yield "loss ignoring 3", module, name, (logits, target.clamp(0)), {"ignore_index": 3, "label_smoothing": 0.1}
    yield "loss with z", module, name, (logits, target), {"lse_square_scale": 0.01, "logit_scale": 0.5}
    softcapped = {"logit_softcapping": 2.0, "label_smoothing": 0.2, "lse_square_scale": 0.1}
    yield "loss softcapped", module, name, (logits, target), softcapped

    module, name = "fla.modules.fused_linear_cross_entropy", "fused_linear_cross_entropy_loss"
    x, w, b, target = r(13, 16), r(64, 16) * 0.3, r(64), torch.randint(0, 64, (13,))
    target[::4] = -100
    yield "fused loss", module, name, (x, target, w, b), {}
    yield "fused loss summed", module, name, (x, target, w), {"reduction": "sum", "label_smoothing": 0.1}
    yield "fused loss l2warp", module, name, (x, target, w, b), {"use_l2warp": True, "l2_penalty_factor": 0.1}
    yield "fused loss softcapped", module, name, (x, target, w, b), {"logit_scale": 0.7, "logit_softcapping": 3.0}
    yield "fused loss, all ignored", module, name, (x, torch.full((13,), -100), w), {"num_chunks": 2}


def outcome(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any, str]:
    """(outputs and gradients, None where there is none; those of the outputs' properties that must agree)."""

    def leaf(value: Any) -> Any:
        if isinstance(value, list):
            return [leaf(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)
        return copy.requires_grad_(value.is_floating_point())

    args, kwargs = tuple(leaf(value) for value in args), {name: leaf(value) for name, value in kwargs.items()}
    with torch.set_grad_enabled(not function.__name__.endswith("update")):
        result = function(*args, **kwargs)
    outputs = list(result) if isinstance(result, tuple) else [result]
    generator = torch.Generator().manual_seed(SEED + 1)
    total = torch.zeros(())
    for index, output in enumerate(outputs):
        if output is not None and output.requires_grad:
            cotangent = torch.randn(output.shape, generator=generator)
            if function.__name__ == "causal_conv1d" and index == 1:
                cotangent[..., 0] = 0.0
            total = total + (output * cotangent).sum()
    leaves = [x for value in [*args, *kwargs.values()] for x in (value if isinstance(value, list) else [value])]
    leaves = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    gradients = list(torch.autograd.grad(total, leaves, allow_unused=True)) if total.requires_grad else []
    form = [None if o is None else f"{list(o.shape)} {o.dtype} {o.is_contiguous()}" for o in outputs]
    return outputs + gradients, form, type(result).__name__


def difference(theirs: Any, ours: Any) -> float:
    if theirs is None or ours is None:
        return 0.0 if theirs is ours else float("inf")
    scale = float(theirs.detach().norm()) or 1.0
    return float((theirs.detach() - ours.detach()).norm()) / scale


def main() -> None:
    make_interpretable()
    import accel  # noqa: F401 - binds accel.patches in a source checkout
    from accel.patches.fla.cpu_ops import CPU_OPS

    replacements = {op.name: op.replacement for op in CPU_OPS}
    torch.manual_seed(SEED)
    for case, module, name, args, kwargs in [*norm_cases(), *convolution_cases(), *activation_and_loss_cases()]:
        upstream = getattr(importlib.import_module(module), name)
        values, form, kind = outcome(upstream, args, kwargs)
        ours, our_form, our_kind = outcome(replacements[name.replace("naive", "fused")], args, kwargs)
        line = {
            "case": case,
            "op": name.replace("naive", "fused"),
            "form": None if (form, kind) == (our_form, our_kind) else [form, kind, our_form, our_kind],
            "differences": [difference(*pair) for pair in zip(values, ours, strict=True)],
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
