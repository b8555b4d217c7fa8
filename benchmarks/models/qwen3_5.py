"""One Qwen3.5 period as a whole model: prefill, training step and decode, upstream and accelerated interleaved.

The period is three Gated DeltaNet layers and one full-attention layer, hidden 4096, random weights, bf16. Decode never
visits a length twice: torch's default SDPA plans 40-130 ms for each length it has not seen, and whoever came second
would find the plan made.

    python benchmarks/models/qwen3_5.py --out benchmarks/results/h200/models.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.models.interleaved import Times, interleaved, main


def period() -> torch.nn.Module:
    """The text model of one period."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(num_hidden_layers=4, vocab_size=32000)
    config._attn_implementation = "sdpa"
    return Qwen3_5TextModel(config).to("cuda", torch.bfloat16)


def prefill(model: torch.nn.Module) -> Times:
    ids = torch.randint(0, 32000, (1, 8192), device="cuda")

    def step() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)

    return interleaved(step, 5)


def train(model: torch.nn.Module) -> Times:
    ids = torch.randint(0, 32000, (1, 8192), device="cuda")
    model.train()

    def step() -> None:
        model(input_ids=ids, use_cache=False).last_hidden_state.float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    return interleaved(step, 3, warmup=2)


def decode(model: torch.nn.Module, batch: int) -> Times:
    model.eval()
    ids = torch.randint(0, 32000, (batch, 1024), device="cuda")
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    token = ids[:, :1].contiguous()

    def step() -> None:  # the cache grows: every step is a new length, as in generate()
        with torch.no_grad():
            model(input_ids=token, past_key_values=cache, use_cache=True)

    return interleaved(step, 6)


CASES: dict[str, tuple[str, Callable[[torch.nn.Module], Times]]] = {
    "qwen3_5_prefill_1x8192": ("fwd", prefill),
    "qwen3_5_train_1x8192": ("fwd_bwd", train),
    "qwen3_5_decode_b1": ("decode", lambda model: decode(model, 1)),
    "qwen3_5_decode_b32": ("decode", lambda model: decode(model, 32)),
}


if __name__ == "__main__":
    main(__doc__, "models/qwen3_5.py", "transformers", period, CASES)
