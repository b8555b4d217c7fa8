"""One Qwen3.5 period as a whole model: prefill, training step and decode, upstream and accelerated interleaved.

The period is three Gated DeltaNet layers and one full-attention layer, hidden 4096, random weights, bf16. Each round
switches accel on, measures, switches it off and measures again, so both sides see the same drift of a shared card.
Decode never visits a length twice: torch's default SDPA plans 40-130 ms for each length it has not seen, and whoever
came second would find the plan made.

    python benchmarks/models/qwen3_5.py --out benchmarks/results/h200/models.jsonl
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import accel
from benchmarks.timing import Quantiles, Rows, every_source

ROUNDS = 7


def period() -> torch.nn.Module:
    """The text model of one period."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(num_hidden_layers=4, vocab_size=32000)
    config._attn_implementation = "sdpa"
    return Qwen3_5TextModel(config).to("cuda", torch.bfloat16)


def interleaved(step: Callable[[], object], steps: int, warmup: int = 3) -> dict[str, list[float]]:
    """Wall milliseconds per step of either side, `ROUNDS` medians-to-be each."""
    times: dict[str, list[float]] = {"upstream": [], "accel": []}
    for round_ in range(ROUNDS):
        for provider in ("upstream", "accel") if round_ % 2 == 0 else ("accel", "upstream"):
            if provider == "accel":
                accel.accelerate()
            for _ in range(warmup if round_ == 0 else 1):
                step()
            torch.cuda.synchronize()
            for _ in range(steps):
                start = time.perf_counter()
                step()
                torch.cuda.synchronize()
                times[provider].append((time.perf_counter() - start) * 1e3)
            accel.restore()
    return times


def prefill(model: torch.nn.Module) -> dict[str, list[float]]:
    ids = torch.randint(0, 32000, (1, 8192), device="cuda")

    def step() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)

    return interleaved(step, 5)


def train(model: torch.nn.Module) -> dict[str, list[float]]:
    ids = torch.randint(0, 32000, (1, 8192), device="cuda")
    model.train()

    def step() -> None:
        model(input_ids=ids, use_cache=False).last_hidden_state.float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    return interleaved(step, 3, warmup=2)


def decode(model: torch.nn.Module, batch: int) -> dict[str, list[float]]:
    model.eval()
    ids = torch.randint(0, 32000, (batch, 1024), device="cuda")
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    token = ids[:, :1].contiguous()

    def step() -> None:  # the cache grows: every step is a new length, as in generate()
        with torch.no_grad():
            model(input_ids=token, past_key_values=cache, use_cache=True)

    return interleaved(step, 6)


CASES: dict[str, tuple[str, Callable[[torch.nn.Module], dict[str, list[float]]]]] = {
    "qwen3_5_prefill_1x8192": ("fwd", prefill),
    "qwen3_5_train_1x8192": ("fwd_bwd", train),
    "qwen3_5_decode_b1": ("decode", lambda model: decode(model, 1)),
    "qwen3_5_decode_b32": ("decode", lambda model: decode(model, 32)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    import transformers

    model = period()
    rows = Rows("models/qwen3_5.py", every_source(), f"transformers {transformers.__version__}")
    for case in options.cases:
        passed, measure = CASES[case]
        run = rows.run_id()
        times = {provider: Quantiles.of(values) for provider, values in measure(model).items()}
        for provider, quantiles in times.items():
            rows.add(case, provider, passed, quantiles, run)
        ours, theirs = times["accel"].p50, times["upstream"].p50
        print(f"{case:24s} upstream {theirs:8.2f} ms  accel {ours:8.2f} ms  {theirs / ours:.2f}x", flush=True)
    for status in accel.status():
        if status.served or status.declined:
            print(f"    {status.name}: served {status.kernels}, declined {status.declined}", flush=True)
    rows.write(options.out)


if __name__ == "__main__":
    main()
