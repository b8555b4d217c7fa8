"""transformers.gated_delta_net on a GPU: tiny hybrid models beside upstream as it is installed there.

    pytest -m gpu compat_tests/models/test_gated_delta_net_gpu.py

A prompt is served where the chunked kernel of the gated delta rule holds a certificate (or ACCEL_UNCERTIFIED is set);
new tokens are served wherever the recurrent kernel does.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import accel
from accel import certificates
from accel.outcome import Choice
from accel.serve import arch_of
from accel.state import STATES
from accel.testing import InDouble, assert_accurate

TARGET, SEED, VOCABULARY, LENGTH = "transformers.gated_delta_net", 20261201, 32, 64
STATE = STATES[TARGET]
pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Model:
    folder: str
    config: str
    cls: str
    options: dict[str, Any]

    @property
    def module(self) -> Any:
        return importlib.import_module(f"transformers.models.{self.folder}.modeling_{self.folder}")

    def build(self, device: str = "cuda") -> nn.Module:
        print("seed", SEED)
        torch.manual_seed(SEED)
        options = {
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "initializer_range": 0.1,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        }
        config = getattr(importlib.import_module("transformers"), self.config)(**options | self.options)
        return getattr(self.module, self.cls)(config).eval().to(device)


#: Every expert is used: which experts a near tie picks would be luck.
_MOE = {
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 2,
    "num_experts_per_tok": 2,
}
MODELS = {
    "qwen3_next": Model("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", _MOE),
    "qwen3_5": Model("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "olmo_hybrid": Model("olmo_hybrid", "OlmoHybridConfig", "OlmoHybridForCausalLM", {"linear_key_head_dim": 64}),
}
EACH = pytest.mark.parametrize("name", MODELS)


class TorchFunctions:
    """transformers' own torch code as the functions that a module calls, as if FLA and causal_conv1d were missing."""

    NAMES = (
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        "causal_conv1d_fn",
        "causal_conv1d_update",
    )

    def __init__(self, module: Any) -> None:
        self.module, self.before = module, {name: vars(module)[name] for name in self.NAMES}

    def __enter__(self) -> None:
        for name, held in self.before.items():
            if isinstance(held, nn.Module):  # Hugging Face's kernels make a module of the function
                forward = type(held).forward
                held = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))["func"].cell_contents
            setattr(self.module, name, held.__wrapped__)

    def __exit__(self, *error: object) -> None:
        for name, held in self.before.items():
            setattr(self.module, name, held)


def on(targets: str | None) -> None:
    accel.accelerate(targets)
    STATE.reset_counters()


def prompts_are_served() -> bool:
    choice = Choice("gated_delta_rule", "sm90_fwd")
    return certificates.check(choice, arch_of(torch.device("cuda", torch.cuda.current_device()))) is None


def assert_served(prompts: int, tokens: int) -> None:
    """So many calls with a prompt, or a part of one, and so many with a single token."""
    wanted = {"any_recurrent": tokens} | ({"sm90_fwd": prompts} if prompts_are_served() else {})
    assert dict(STATE.served) == wanted, STATE.declined
    assert sum(STATE.declined.values()) == (0 if prompts_are_served() else prompts), STATE.declined


def sequences(device: str = "cuda") -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(SEED)).to(device)


def learnt(name: str, device: str = "cuda") -> nn.Module:
    """A model that has two sequences by heart, in bf16: no rounding decides its tokens."""
    model, ids = MODELS[name].build(device), sequences(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(400):
        logits = model(ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, 8:-1].reshape(-1, VOCABULARY).float(), ids[:, 9:].reshape(-1))
        if loss < 2e-3:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05, float(loss)
    return model.requires_grad_(False).to(torch.bfloat16)


def generate(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, **options)


@EACH
@pytest.mark.parametrize("targets", [None, TARGET], ids=["all_targets", "alone"])
def test_greedy_tokens(name: str, targets: str | None) -> None:
    """A batch, a padded one, and a prompt in pieces: upstream's tokens, before, under accel, and after."""
    model, ids = learnt(name), sequences()
    prompt = ids[:, :40]
    padded, mask = prompt.clone(), torch.ones_like(prompt)
    padded[0, 11:], padded[0, :11], mask[0, :11] = prompt[0, :29], 0, 0

    def texts() -> list[torch.Tensor]:
        return [generate(model, prompt), generate(model, padded, mask), generate(model, prompt, prefill_chunk_size=15)]

    theirs = texts()
    assert torch.equal(theirs[0], ids[:, :56])
    on(targets)
    ours = texts()
    assert_served(prompts=2 * (1 + 1 + 3), tokens=2 * 3 * 15)
    accel.restore()
    for a, b, c in zip(ours, theirs, texts(), strict=True):
        assert torch.equal(a, b) and torch.equal(b, c)


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_module_is_as_close_as_upstreams(name: str, dtype: torch.dtype) -> None:
    """A prompt, more of it, and two new tokens of many sequences: outputs and states, by the accuracy rule.

    The norm's eps is large: a first token whose query and key are nearly orthogonal has an output of nearly nothing,
    and what rounding leaves of it would be blown up.
    """
    model = MODELS[name].build().requires_grad_(False).to(dtype)
    layer = next(module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet"))
    next(child for child in layer.children() if type(child).__name__.endswith("RMSNormGated")).variance_epsilon = 1e-3
    exact, generator = copy.deepcopy(layer).double(), torch.Generator().manual_seed(SEED)
    x = torch.randn(48, 102, 128, generator=generator).to("cuda", dtype)
    pieces = x.split([70, 30, 1, 1], 1)

    def run(layer: Any, pieces: Any) -> dict[str, torch.Tensor]:
        cache = DynamicCache(config=model.config)
        for other in cache.layers[1:]:  # OLMo hybrid up to transformers 5.20 asks the last layer
            if hasattr(other, "has_previous_state"):
                other.has_previous_state = cache.layers[0].has_previous_state
        outs = [layer(piece, cache) for piece in pieces]
        held = cache.layers[0]
        found = {"prompt": outs[0], "rest": torch.cat(outs[1:], 1)}
        return found | {"conv state": held.conv_states[0], "state": held.recurrent_states[0]}

    with TorchFunctions(MODELS[name].module), InDouble():
        truth = run(exact, [piece.double() for piece in pieces])
    theirs = run(layer, pieces)
    on(TARGET)
    ours = run(layer, pieces)
    assert_served(prompts=2, tokens=2)
    for output, want in theirs.items():
        assert_accurate(output, ours[output], want, truth[output])


@EACH
def test_a_token_in_a_cuda_graph(name: str) -> None:
    """Captured and replayed, a token gives what it gives eagerly, and moves the same states on."""
    model = MODELS[name].build().requires_grad_(False).to(torch.bfloat16)
    layer = next(module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet"))
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(4, 9, 128, generator=generator).to("cuda", torch.bfloat16)
    caches = []
    for _ in range(2):
        caches.append(DynamicCache(config=model.config))
        for other in caches[-1].layers[1:]:
            if hasattr(other, "has_previous_state"):
                other.has_previous_state = caches[-1].layers[0].has_previous_state
        layer(x[:, :5], caches[-1])
    on(TARGET)
    want = [layer(x[:, t : t + 1], caches[0]) for t in range(5, 9)]
    token = x[:, 5:6].clone()
    assert torch.equal(layer(token, caches[1]), want[0])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = layer(token, caches[1])
    assert_served(prompts=0, tokens=6)
    for t in range(6, 9):
        token.copy_(x[:, t : t + 1])
        graph.replay()
        assert torch.equal(out, want[t - 5])
    for kind in ("conv_states", "recurrent_states"):
        assert torch.equal(getattr(caches[1].layers[0], kind)[0], getattr(caches[0].layers[0], kind)[0])
