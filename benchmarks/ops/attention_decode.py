"""Decode attention: accel, the call as transformers makes it today, torch's flash backend, and the memory floor.

    python benchmarks/ops/attention_decode.py --out benchmarks/results/h200/attention.jsonl
    python benchmarks/ops/attention_decode.py --grid       many shapes, accel beside upstream, nothing is written
    python benchmarks/ops/attention_decode.py --sweep      splits and configurations side by side, nothing is written

`upstream` is torch's scaled_dot_product_attention, default backend, as transformers calls it: without a mask k and v
grouped by it; with one and a single q position, q packed to the kv heads (the form of 5.24, the faster one); with one
and more positions, k and v repeated to all heads. A bottom-right causal call without a mask, which transformers never
makes, goes through torch's causal_lower_right. The floor is the bytes of k, v and the mask over the bandwidth of a copy
in the same run; reading alone goes faster, up to 1.05 times. `_graph` cases replay one CUDA graph a call.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from accel.kernels.attention import decode as module
from accel.kernels.attention.decode import decode
from accel.kernels.runtime import arch as archs
from accel.kernels.runtime.compile import Kernel, function
from accel.source_hash import source_hash
from benchmarks.timing import Quantiles, Rows, clocks, copy_bandwidth, device_times, host_times, rotations

WAVES = (0.12, 0.25, 0.5, 0.97, 1.45, 1.97, 2.97, 3.97)  #: of CTAs, in the sweep
UNUSED_KEYS = 500  #: at the end of a static cache, masked


@dataclass(frozen=True)
class Shape:
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    mask: str = "none"  #: "none"; "static": the last keys of a static cache are unused; "causal": as a mask
    causal: bool = False  #: bottom-right, without a mask

    @property
    def bytes(self) -> int:
        return 2 * 2 * self.batch * self.heads_kv * self.seqlen_k * self.head_dim


CASES = {
    "decode_b8_lk4096_h32_8_d128": Shape(8, 1, 4096, 32, 8, 128),
    "decode_b8_lk32768_h32_8_d128": Shape(8, 1, 32768, 32, 8, 128),
    "decode_b1_lk4096_h32_8_d128": Shape(1, 1, 4096, 32, 8, 128),
    "decode_b1_lk32768_h8_1_d128": Shape(1, 1, 32768, 8, 1, 128),
    "decode_b1_lk8192_h16_2_d256": Shape(1, 1, 8192, 16, 2, 256),
    "decode_b1_lk32768_h16_2_d256": Shape(1, 1, 32768, 16, 2, 256),
    "decode_b32_lk2048_h16_2_d256": Shape(32, 1, 2048, 16, 2, 256),
    "decode_b64_lk1024_h32_32_d96": Shape(64, 1, 1024, 32, 32, 96),
    "decode_b16_lk8192_h16_16_d64": Shape(16, 1, 8192, 16, 16, 64),
    "decode_mask_b8_lk4096_h32_8_d128": Shape(8, 1, 4096, 32, 8, 128, "static"),
    "decode_mask_b8_lk32768_h32_8_d128": Shape(8, 1, 32768, 32, 8, 128, "static"),
    "decode_q4_b8_lk4096_h32_8_d128": Shape(8, 4, 4096, 32, 8, 128, causal=True),
    "decode_q4_b8_lk131072_h32_8_d128": Shape(8, 4, 131072, 32, 8, 128, causal=True),
    "decode_q4_mask_b8_lk4096_h32_8_d128": Shape(8, 4, 4096, 32, 8, 128, "causal"),
}
GRAPHS = ("decode_b8_lk4096_h32_8_d128", "decode_b1_lk4096_h32_8_d128", "decode_mask_b8_lk4096_h32_8_d128")


@dataclass
class Setup:
    """Inputs of one case, rotated, and what each provider does with input i."""

    shape: Shape
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    mask: torch.Tensor | None

    def accel(self, i: int, splits: int | None = None) -> torch.Tensor:
        causal = "bottom_right" if self.shape.causal else "none"
        return decode(self.q[i], self.k[i], self.v[i], mask=self.mask, causal=causal, splits=splits)[0]

    def upstream(self, i: int) -> torch.Tensor:
        q, k, v, s = self.q[i], self.k[i], self.v[i], self.shape
        if self.mask is None:
            bias = causal_lower_right(s.seqlen_q, s.seqlen_k) if s.causal else None
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
        group = s.heads_q // s.heads_kv
        if s.seqlen_q == 1:
            packed = q.view(s.batch, s.heads_kv, group, s.head_dim)
            return F.scaled_dot_product_attention(packed, k, v, attn_mask=self.mask).view(q.shape)
        k, v = (t[:, :, None].expand(-1, -1, group, -1, -1).reshape(s.batch, s.heads_q, s.seqlen_k, -1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)

    def torch_flash(self, i: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return self.upstream(i)

    def providers(self) -> dict[str, Callable[[int], torch.Tensor]]:
        found = {"accel": self.accel, "upstream": self.upstream, "torch_flash": self.torch_flash}
        for name in ("upstream", "torch_flash"):
            try:
                found[name](0)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                print(f"  {name} does not run: {str(error).splitlines()[0][:100]}", flush=True)
                del found[name]
        return found


def setup(s: Shape, turns: int = 0) -> Setup:
    torch.manual_seed(0)
    turns = turns or rotations(s.bytes)

    def draw(heads: int, length: int) -> list[torch.Tensor]:
        shape = (s.batch, heads, length, s.head_dim)
        return [torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(turns)]

    mask = None
    if s.mask == "static":
        mask = torch.ones(s.batch, 1, 1, s.seqlen_k, device="cuda", dtype=torch.bool)
        mask[..., -UNUSED_KEYS:] = False
    elif s.mask == "causal":
        mask = torch.ones(s.seqlen_q, s.seqlen_k, device="cuda", dtype=torch.bool).tril(s.seqlen_k - s.seqlen_q)
        mask = mask[None, None].expand(s.batch, 1, -1, -1)
    return Setup(s, draw(s.heads_q, s.seqlen_q), draw(s.heads_kv, s.seqlen_k), draw(s.heads_kv, s.seqlen_k), mask)


def captured(call: Callable[[int], Any], turns: int) -> Callable[[int], Any]:
    """`call` as one CUDA graph an input."""
    graphs, kept = [], []
    for i in range(turns):
        call(i)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            kept.append(call(i))

    def replay(i: int) -> Any:
        graphs[i].replay()
        return kept[i]

    return replay


def agree(case: str, s: Setup, providers: dict[str, Callable[[int], torch.Tensor]]) -> None:
    ours = s.accel(0).float()
    for name, call in providers.items():
        if name != "accel":
            theirs = call(0).float()
            difference = ((ours - theirs).norm() / theirs.norm()).item()
            if not difference < 0.02:
                print(f"{case}: accel and {name} DIFFER by {difference:.2e}", flush=True)


def measure(rows: Rows, case: str, bandwidth: float, rounds: int) -> None:
    shape = CASES[case]
    s = setup(shape)
    turns = len(s.k)
    providers = s.providers()
    agree(case, s, providers)
    timed = [(case, providers)]
    if case in GRAPHS:
        timed.append((f"{case}_graph", {name: captured(call, turns) for name, call in providers.items()}))
    read = shape.bytes * (1 if shape.mask != "static" else 1 - UNUSED_KEYS / shape.seqlen_k)
    read += s.mask.shape[0] * shape.seqlen_q * shape.seqlen_k if s.mask is not None else 0
    floor = read / bandwidth * 1e3
    for name, calls in timed:
        run = rows.run_id()
        times = device_times(calls, turns, rounds=rounds)
        times["floor"] = Quantiles(floor, floor, floor)
        for provider, q in times.items():
            rows.add(name, provider, "decode", q, run)
        a = times["accel"].p50
        parts = [f"{provider} {q.p50 * 1e3:8.1f} us" for provider, q in times.items()]
        ratio = f"{times['upstream'].p50 / a:5.2f}x" if "upstream" in times else "     -"
        print(f"{name:42} {'  '.join(parts)}  {floor / a:6.1%} of floor  {ratio}", flush=True)


def new_lengths(rows: Rows, lengths: int = 8) -> None:
    """The wall time of a call with a length that has not been seen, the device included: every token is one."""
    case, run = "new_length_decode_d128", rows.run_id()
    q = torch.randn(1, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    cache = [torch.randn(1, 8, 3000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

    def upstream(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def flash(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return upstream(k, v)

    providers = {"accel": lambda k, v: decode(q, k, v)[0], "upstream": upstream, "torch_flash": flash}
    samples: dict[str, list[float]] = {name: [] for name in providers}
    for i in range(-2, lengths):
        for name, call in providers.items():
            k, v = (t[:, :, : 1000 + i].contiguous() for t in cache)
            torch.cuda.synchronize()
            start = time.perf_counter()
            call(k, v)
            torch.cuda.synchronize()
            if i >= 0:
                samples[name].append((time.perf_counter() - start) * 1e3)
    times = {name: Quantiles.of(values) for name, values in samples.items()}
    for provider, q in times.items():
        rows.add(case, provider, "first_call", q, run)
    a = times["accel"].p50
    parts = [f"{name} {q.p50:8.3f} ms ({q.p50 / a:6.1f}x)" for name, q in times.items()]
    print(f"{case:42} {'  '.join(parts)}", flush=True)


def host_cost(rows: Rows) -> None:
    for case, shape in (
        ("decode_b1_lk64_h32_8_d128", Shape(1, 1, 64, 32, 8, 128)),
        ("decode_b1_lk1500_h32_8_d128", Shape(1, 1, 1500, 32, 8, 128)),
        ("decode_mask_b1_lk1500_h32_8_d128", Shape(1, 1, 1500, 32, 8, 128, "causal")),
    ):
        s = setup(shape, turns=1)
        run = rows.run_id()
        times = host_times({"accel": partial(s.accel, 0), "upstream": partial(s.upstream, 0)})
        for provider, q in times.items():
            rows.add(case, provider, "host_us", q, run, metric="call", unit="us")
        print(
            f"{case:42} host accel {times['accel'].p50:6.1f} us  upstream {times['upstream'].p50:6.1f} us", flush=True
        )


# --- Many shapes: where accel is not the faster one ----------------------------------------------------------------

GRID_HEADS = ((32, 8, 128), (64, 8, 128), (28, 4, 128), (8, 1, 128), (16, 2, 256), (16, 16, 64), (32, 32, 96))


def grid(rounds: int, batches: list[int]) -> None:
    """A line a shape; then the shapes that upstream is faster at. Device times: a seen length, no host in it."""
    slower, ratios = [], []
    for heads_q, heads_kv, head_dim in GRID_HEADS:
        for batch in batches:
            for seqlen_k in (60, 500, 2000, 9000, 33000):
                for mask in ("none", "static"):
                    shape = Shape(batch, 1, seqlen_k, heads_q, heads_kv, head_dim, mask)
                    if shape.bytes > 2**31 or (mask == "static" and seqlen_k not in (2000, 9000)):
                        continue
                    s = setup(shape, min(16, rotations(shape.bytes)))
                    times = device_times({"accel": s.accel, "upstream": s.upstream}, len(s.k), rounds=rounds)
                    a, u = (times[name].p50 * 1e3 for name in ("accel", "upstream"))
                    text = f"b{batch} lk{seqlen_k} h{heads_q}_{heads_kv} d{head_dim} {mask:6}"
                    text += f" accel {a:7.1f} us  upstream {u:7.1f} us  {u / a:5.2f}x"
                    ratios.append(u / a)
                    slower += [text] if u < a else []
                    print(text, flush=True)
    ratios.sort()
    print(f"{len(ratios)} shapes, median {ratios[len(ratios) // 2]:.2f}x, least {ratios[0]:.2f}x; slower:", flush=True)
    for text in slower:
        print(f"  {text}", flush=True)


# --- Launch configurations side by side ----------------------------------------------------------------------------


def sweep(cases: list[str], rounds: int) -> None:
    """Splits around the chosen ones, for the planned configuration and its neighbours."""
    index = torch.cuda.current_device()
    arch = archs.cuda_arch(index)
    for case in cases:
        shape = CASES[case]
        s = setup(shape)
        s.accel(0)
        rows = shape.heads_q // shape.heads_kv * shape.seqlen_q
        kind = "none" if s.mask is None else module.flattened(s.mask)[0]
        base = module.decode_config("bfloat16", shape.head_dim, shape.head_dim, rows, kind, False, arch)
        key = (torch.bfloat16, shape.head_dim, shape.head_dim, (rows + 15) >> 4, kind, False, index)
        planned = module._loaded[key]
        pairs = shape.batch * shape.heads_kv
        found: list[tuple[float, str]] = []
        for config in candidates(base):
            launch = function(Kernel("attention", "any_decode", config), archs.compile_target(arch))
            slots = module.slots_of(config, index)
            module._loaded[key] = (launch, config, slots)
            calls = {
                str(n): partial(s.accel, splits=n)
                for n in sorted({max(1, round(slots * w / pairs)) for w in WAVES})
                if n <= max(1, shape.seqlen_k // config.stretch)
            }
            label = f"block {config.block} slots {config.slots} CTAs {config.ctas_per_sm} warps {config.warps}"
            for n, q in device_times(calls, len(s.k), rounds=rounds).items():
                found.append((q.p50, f"{label} splits {n}"))
        module._loaded[key] = planned
        for p50, text in sorted(found)[:10]:
            print(f"{case:42} {p50 * 1e3:8.1f} us  {text}", flush=True)
        chosen = device_times({"plan": s.accel}, len(s.k), rounds=rounds)["plan"]
        print(f"{case:42} {chosen.p50 * 1e3:8.1f} us  plan", flush=True)


def candidates(base: Any) -> list[Any]:
    """The plan's configuration, smaller blocks with more slots, and one CTA an SM with twice the slots."""
    found = [base]
    for change in (
        {"block": 16, "slots": 2 * base.slots},
        {"ctas_per_sm": 1, "slots": min(16, 2 * base.slots)},
        {"ctas_per_sm": 1, "warps": 8},
    ):
        if change.get("block", 0) != base.block:
            found.append(dataclasses.replace(base, **change))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result rows are replaced in this file")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--batch", action="append", type=int, help="of the grid; default: 1, 8 and 64")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    if args.sweep:
        sweep(args.case or ["decode_b8_lk4096_h32_8_d128", "decode_b8_lk32768_h32_8_d128"], args.rounds)
        return
    if args.grid:
        with torch.no_grad():
            grid(max(5, args.rounds // 4), args.batch or [1, 8, 64])
        return
    rows = Rows(
        "benchmarks/ops/attention_decode.py", source_hash("attention", "any_decode"), f"torch {torch.__version__}"
    )
    bandwidth = copy_bandwidth()
    print(f"{rows.gpu}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s, {clocks()}", flush=True)
    with torch.no_grad():
        for case in args.case or CASES:
            long = CASES[case].bytes > 2**31
            measure(rows, case, bandwidth, max(4, args.rounds // 3) if long else args.rounds)
            torch.cuda.empty_cache()
        if not args.case:
            new_lengths(rows)
            host_cost(rows)
    print(clocks())
    if args.out:
        rows.write(args.out)


if __name__ == "__main__":
    main()
