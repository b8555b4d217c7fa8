"""A greedy `generate()` of 200 tokens with transformers' default cache: upstream and accelerated, taking turns.

    python benchmarks/models/generate.py --out benchmarks/results/h200/models.jsonl

The model has the shape of Qwen3-0.6B (28 layers, hidden 1024, 16 / 8 heads of 128, tied embeddings) and runs in bf16.
Its weights are random at first, and greedy tokens of random weights are near-ties that any rounding decides. So it
learns one sequence by heart, drawn from 50 tokens, of which no single one tells its successor: what comes next takes
attention, and the right token leads by far. Both sides have to continue the sequence with the same tokens; the least
lead of a token over the next best one is printed. Rows are not written if a token differs.

Each round has a longer prompt, so no side meets a length twice: torch's default attention plans each length for tens of
milliseconds, and the second visit would be free. `time` is the whole call, `tokens_per_s` its 200 tokens over that.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import accel
from benchmarks.timing import Quantiles, Rows, every_source

CASE, NEW_TOKENS, FIRST_PROMPT, ROUNDS = "generate_200_d128", 200, 64, 3
ALPHABET, LEARNT, STEPS = 50, 0.001, 400  #: tokens that occur; the loss at which the sequence is known; at most
SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


def built(shape: dict[str, Any], device: str) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape, attn_implementation="sdpa"))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def sequence(length: int, device: str) -> torch.Tensor:
    return torch.randint(0, ALPHABET, (1, length), device=device, generator=torch.Generator(device).manual_seed(0))


def learn(model: Any, ids: torch.Tensor, rate: float = 5e-4) -> None:
    """Have the sequence by heart, then go to bf16."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    start, loss, step = time.perf_counter(), float("inf"), 0
    while loss > LEARNT and step < STEPS:
        step += 1
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, step / 20)
        with torch.autocast(ids.device.type, torch.bfloat16):
            found = model(input_ids=ids, labels=ids, use_cache=False).loss
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        loss = found.item()
    model.to(torch.bfloat16).eval()
    print(f"learnt {ids.numel()} tokens: loss {loss:.4f} after {step} steps, {time.perf_counter() - start:.1f} s")


def leads(model: Any, ids: torch.Tensor) -> float:
    """The least difference of the two largest logits along the sequence, after the first prompt."""
    with torch.no_grad():
        best = model(input_ids=ids, use_cache=False).logits[0, FIRST_PROMPT - 1 : -1].float().topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def generated(model: Any, prompt: torch.Tensor, tokens: int) -> tuple[torch.Tensor, float]:
    """The new tokens, and the milliseconds of the call."""
    if prompt.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    found = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )
    if prompt.is_cuda:
        torch.cuda.synchronize()
    return found[0, prompt.shape[1] :], (time.perf_counter() - start) * 1e3


def compare(model: Any, ids: torch.Tensor, rounds: int, tokens: int) -> tuple[dict[str, list[float]], int]:
    """Milliseconds of each side's rounds, and in how many rounds their tokens differed. A first round only warms up."""
    times: dict[str, list[float]] = {"upstream": [], "accel": []}
    different = 0
    for round_ in range(rounds + 1):
        prompt = ids[:, : FIRST_PROMPT + round_ * tokens]
        found = {}
        for provider in ("upstream", "accel") if round_ % 2 else ("accel", "upstream"):
            if provider == "accel":
                accel.accelerate()
            found[provider], elapsed = generated(model, prompt, tokens if round_ else 8)
            accel.restore()
            if round_:
                times[provider].append(elapsed)
                right = ids[0, prompt.shape[1] : prompt.shape[1] + tokens]
                known = (found[provider] == right).float().mean().item()
                print(
                    f"  prompt {prompt.shape[1]:5d} {provider:8} {elapsed:8.1f} ms, {known:.0%} as learnt", flush=True
                )
        same = found["accel"] == found["upstream"]
        if not same.all():
            different += 1
            print(f"  prompt {prompt.shape[1]}: tokens DIFFER from the {int(same.int().argmin())}th on", flush=True)
    return times, different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result rows are replaced in this file")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    import transformers

    ids = sequence(FIRST_PROMPT + (args.rounds + 1) * NEW_TOKENS, "cuda")
    model = built(SHAPE, "cuda")
    learn(model, ids)
    print(f"least lead of a token: {leads(model, ids):.2f} in the logits", flush=True)
    times, different = compare(model, ids, args.rounds, NEW_TOKENS)
    rows = Rows("models/generate.py", every_source(), f"transformers {transformers.__version__}")
    run = rows.run_id()
    for provider, values in times.items():
        rows.add(CASE, provider, "decode", Quantiles.of(values), run)
        rate = Quantiles.of([NEW_TOKENS / value * 1e3 for value in values])
        rows.add(CASE, provider, "decode", rate, run, metric="tokens_per_s", unit="tokens/s")
        print(f"{CASE} {provider:8} {Quantiles.of(values).p50:8.1f} ms, {rate.p50:6.1f} tokens/s", flush=True)
    for status in accel.status():
        if status.served or status.declined:
            print(f"    {status.name}: served {status.kernels}, declined {status.declined}", flush=True)
    if different:
        raise SystemExit(f"tokens differed in {different} of {args.rounds + 1} rounds: no rows are written")
    print("the same tokens in every round")
    if args.out:
        rows.write(args.out)


if __name__ == "__main__":
    main()
