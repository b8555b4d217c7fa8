"""Attention forward: accel, the call as model code makes it today, torch's flash backend and FlashAttention-4.

    python benchmarks/ops/attention.py --out benchmarks/results/h200/attention.jsonl
    python benchmarks/ops/attention.py --sweep        launch configurations side by side, nothing is written

`upstream` is torch's scaled_dot_product_attention with its default backend, k and v repeated to all heads or grouped by
torch as transformers does; inputs are the transposed (batch, seqlen, heads, head_dim) views that models pass.
`new_length_prefill_d128` is the wall time of a call with a length that was not seen before, the device included. Calls
with masks are in attention_masks.py, decode in attention_decode.py, the first call of a process in attention_cold.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from accel.kernels.attention import attention, launch
from accel.kernels.attention.config import FwdConfig
from accel.outcome import Decline
from accel.source_hash import source_hash
from benchmarks.timing import Quantiles, Rows, clocks, device_times, host_times, rotations


@dataclass(frozen=True)
class Shape:
    batch: int
    seqlen: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool

    @property
    def flops(self) -> float:
        full = 2.0 * self.batch * self.heads_q * self.seqlen**2 * (self.head_dim + self.head_dim_v)
        return full / 2 if self.causal else full

    @property
    def bytes(self) -> int:
        per_token = self.heads_q * (self.head_dim + self.head_dim_v) + self.heads_kv * (self.head_dim + self.head_dim_v)
        return 2 * self.batch * self.seqlen * per_token


CASES = {
    "b4_l4096_h32_8_d128_causal": Shape(4, 4096, 32, 8, 128, 128, True),
    "b1_l16384_h32_8_d128_causal": Shape(1, 16384, 32, 8, 128, 128, True),
    "b1_l4352_h24_24_d128_full": Shape(1, 4352, 24, 24, 128, 128, False),
    "b8_l2048_h16_16_d64_causal": Shape(8, 2048, 16, 16, 64, 64, True),
    "b16_l577_h16_16_d64_full": Shape(16, 577, 16, 16, 64, 64, False),
    "b2_l4096_h16_2_d256_causal": Shape(2, 4096, 16, 2, 256, 256, True),
    "b2_l4096_h32_32_d96_causal": Shape(2, 4096, 32, 32, 96, 96, True),
    "b4_l4096_h16_16_d80_full": Shape(4, 4096, 16, 16, 80, 80, False),
    "mla_b1_l8192_h16_d192_128_causal": Shape(1, 8192, 16, 16, 192, 128, True),
}


def draw(batch: int, seqlen: int, heads: int, size: int) -> torch.Tensor:
    """(batch, heads, seqlen, size), in memory (batch, seqlen, heads, size)."""
    return torch.randn(batch, seqlen, heads, size, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


def inputs(shape: Shape, turns: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    s = shape
    return [
        (
            draw(s.batch, s.seqlen, s.heads_q, s.head_dim),
            draw(s.batch, s.seqlen, s.heads_kv, s.head_dim),
            draw(s.batch, s.seqlen, s.heads_kv, s.head_dim_v),
        )
        for _ in range(turns)
    ]


@functools.cache
def flash_attention_4() -> Callable[..., Any] | None:
    try:
        from flash_attn.cute.interface import flash_attn_func
    except Exception as error:
        print(f"flash_attn_4 is left out: {type(error).__name__}: {error}", flush=True)
        return None
    return flash_attn_func


def providers(shape: Shape, made: list[Any]) -> dict[str, Callable[[int], Any]]:
    """Those that can serve the shape here."""
    grouped = shape.heads_q != shape.heads_kv

    def upstream(i: int) -> Any:
        q, k, v = made[i]
        return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=grouped)

    def torch_flash(i: int) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return upstream(i)

    def accel(i: int) -> Any:
        return attention(*made[i], causal=shape.causal)

    found: dict[str, Callable[[int], Any]] = {"accel": accel, "upstream": upstream, "torch_flash": torch_flash}
    flash_attn_func = flash_attention_4()
    if flash_attn_func is not None:
        found["flash_attn_4"] = lambda i: flash_attn_func(*[t.transpose(1, 2) for t in made[i]], causal=shape.causal)
    return runnable(found)


def runnable(found: dict[str, Callable[[int], Any]]) -> dict[str, Callable[[int], Any]]:
    """Those that take the call; of the others, why not."""
    for name, call in list(found.items()):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says at length why a backend does not take a call
                call(0)
                torch.cuda.synchronize()
        except Decline as declined:
            print(f"{name} is left out: {declined}", flush=True)
            del found[name]
        except Exception as error:
            if name in ("accel", "upstream"):
                raise
            print(f"{name} is left out: {type(error).__name__}: {str(error)[:200]}", flush=True)
            del found[name]
    return found


def measure(rows: Rows, case: str, rounds: int) -> None:
    shape = CASES[case]
    turns = min(rotations(shape.bytes), 8)
    made = inputs(shape, turns)
    with torch.no_grad():
        times = device_times(providers(shape, made), turns, batch=max(2, min(turns, 4)), rounds=rounds)
    run = rows.run_id()
    for name, q in times.items():
        rows.add(case, name, "fwd", q, run)
    theirs = times["upstream"].p50
    text = "  ".join(
        f"{name} {q.p50:7.4f} ms {shape.flops / q.p50 / 1e9:5.0f} TF {theirs / q.p50:4.2f}x"
        for name, q in times.items()
    )
    print(f"{case:34} {text}", flush=True)


def new_lengths(rows: Rows, lengths: int = 8) -> None:
    """A causal prefill of 1000, 1007, ... tokens: torch's default plans each length for tens of milliseconds."""
    case, run = "new_length_prefill_d128", rows.run_id()

    def upstream(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def torch_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return upstream(q, k, v)

    calls = {"accel": functools.partial(attention, causal=True), "upstream": upstream, "torch_flash": torch_flash}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(-2, lengths):  # the first two load what there is to load
        for name, call in calls.items():
            made = inputs(Shape(1, 1000 + 7 * i, 32, 8, 128, 128, True), 1)[0]
            torch.cuda.synchronize()
            start = time.perf_counter()
            call(*made)
            torch.cuda.synchronize()
            if i >= 0:
                samples[name].append((time.perf_counter() - start) * 1e3)
    times = {name: Quantiles.of(values) for name, values in samples.items()}
    for name, q in times.items():
        rows.add(case, name, "first_call", q, run)
    text = "  ".join(f"{name} {q.p50:8.3f} ms ({q.p50 / times['accel'].p50:6.1f}x)" for name, q in times.items())
    print(f"{case:34} {text}", flush=True)


def host(rows: Rows) -> None:
    """Python and launch time of one call, on tensors too small to matter: of the op, and as transformers makes it."""
    q, k, v = inputs(Shape(1, 64, 8, 2, 128, 128, True), 1)[0]
    forward = {
        "accel": lambda: attention(q, k, v, causal=True),
        "upstream": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    }
    timed = [("b1_l64_h8_2_d128_causal", "forward", forward)]
    try:
        functions = served()
    except ImportError as error:
        print(f"the served call is left out: {error}", flush=True)
    else:
        layer, keywords = types.SimpleNamespace(num_key_value_groups=4), {"dropout": 0.0, "scaling": 128**-0.5}
        for case, length in (("b1_l64_h8_2_d128_causal", 64), ("decode_b1_lk64_h8_2_d128", 1)):
            calls = {
                name: functools.partial(function, layer, q[:, :, :length], k, v, None, **keywords)
                for name, function in functions.items()
            }
            timed.append((case, "served_call", calls))
    for case, metric, calls in timed:
        with torch.no_grad():
            times = host_times(calls)
        run = rows.run_id()
        for name, quantiles in times.items():
            rows.add(case, name, "host_us", quantiles, run, metric=metric, unit="us")
        text = "  ".join(f"{name} {q.p50:.1f} us" for name, q in times.items())
        print(f"host {metric} {case:30} {text}", flush=True)
        if metric == "served_call" and calls["accel"].func.__accel__.state.declined:
            print(f"  DECLINED: {calls['accel'].func.__accel__.state.declined}", flush=True)


def served() -> dict[str, Callable[..., Any]]:
    """transformers' function, and what stands for it while accel serves it, certified or not."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from accel import serve
    from accel.patches.transformers.attention import Sdpa
    from accel.state import STATES, TargetState, policy

    policy.uncertified = True
    state = TargetState(STATES["transformers.sdpa"].target)
    state.on = True
    return {"accel": serve.wrap(sdpa_attention_forward, Sdpa(), state), "upstream": sdpa_attention_forward}


# --- Launch configurations side by side ----------------------------------------------------------------------------


def sweep(cases: Iterable[str], rounds: int) -> None:
    for case in cases:
        shape = CASES[case]
        turns = min(rotations(shape.bytes), 4)
        made = inputs(shape, turns)
        causal = "top_left" if shape.causal else "none"
        chosen = launch.config_of(launch.facts_of(*made[0], causal, None, False, False), made[0][0].device)
        calls = {}
        for config in candidates(chosen):
            calls[label(config)] = functools.partial(_candidate, config, made, causal)
        times = device_times(calls, turns, batch=max(2, turns), rounds=rounds)
        for name, q in sorted(times.items(), key=lambda item: item[1].p50):
            mark = "  <- plan" if name == label(chosen) else ""
            print(f"{case:34} {q.p50:8.4f} ms {shape.flops / q.p50 / 1e9:5.0f} TF  {name}{mark}", flush=True)


def _candidate(config: FwdConfig, made: list[Any], causal: str, i: int) -> Any:
    return launch.forward(config, *made[i], causal=causal)


def label(config: FwdConfig) -> str:
    parts = [f"{config.tile_m}x{config.tile_n}", f"{config.stages} stages"]
    parts += [name for name in ("turns", "early_rescale", "persistent", "own_out", "ahead") if getattr(config, name)]
    return ", ".join(parts)


def candidates(config: FwdConfig) -> list[FwdConfig]:
    """Each choice of the plan the other way round, then other tiles, within shared memory and registers."""
    found = [config]

    def add(**changes: Any) -> None:
        try:
            made = dataclasses.replace(config, **changes)
        except ValueError:
            return
        registers = made.tile_n // 2 + made.padded_v // 2 + made.tile_n // 4
        if registers <= {1: 200, 2: 200, 3: 132}[made.warpgroups]:
            found.append(made)

    # As measured first, then what is expected to be faster: see benchmarks/notes/attention.md.
    for persistent, own_out, ahead in itertools.product((False, True), repeat=3):
        if persistent or not ahead:
            add(persistent=persistent, own_out=own_out, ahead=ahead)
    for name in ("turns", "early_rescale"):
        add(**{name: not getattr(config, name)})
    for warpgroups, tile_n in (
        (2, 64),
        (2, 96),
        (2, 112),
        (2, 128),
        (2, 144),
        (2, 160),
        (2, 176),
        (2, 192),
        (2, 208),
        (3, 96),
        (3, 128),
    ):
        add(warpgroups=warpgroups, tile_n=tile_n)
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result rows are replaced in this file")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    if args.sweep:
        sweep(args.case or CASES, args.rounds)
        return
    rows = Rows("benchmarks/ops/attention.py", source_hash("attention", "sm90_fwd"), f"torch {torch.__version__}")
    print(f"{rows.gpu}, torch {torch.__version__}, {clocks()}", flush=True)
    for case in args.case or CASES:
        measure(rows, case, args.rounds)
    if not args.case:
        with torch.no_grad():
            new_lengths(rows)
    host(rows)
    print(clocks())
    if args.out:
        rows.write(args.out)


if __name__ == "__main__":
    main()
