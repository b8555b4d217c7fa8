"""Four layers of FLA's own GatedDeltaNet: prefill, upstream and accelerated interleaved.

Hidden 2048, 16 query and key heads, 32 value heads of 128, random weights, bf16. FLA's layer makes q, k and v with a
short convolution of its own, and passes raw gates, beta logits and views of them.

    python benchmarks/models/fla_gdn.py --out benchmarks/results/h200/models.jsonl
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.models.interleaved import Times, interleaved, main


def layers() -> torch.nn.Module:
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetModel

    torch.manual_seed(0)
    config = GatedDeltaNetConfig(
        hidden_size=2048, num_heads=16, num_v_heads=32, head_dim=128, expand_v=1, num_hidden_layers=4, vocab_size=32000
    )
    return GatedDeltaNetModel(config).to("cuda", torch.bfloat16)


def prefill(model: torch.nn.Module) -> Times:
    model.eval()
    ids = torch.randint(0, 32000, (1, 8192), device="cuda")

    def step() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)

    return interleaved(step, 5)


if __name__ == "__main__":
    main(__doc__, "models/fla_gdn.py", "flash-linear-attention", layers, {"fla_gdn_prefill_1x8192": ("fwd", prefill)})
