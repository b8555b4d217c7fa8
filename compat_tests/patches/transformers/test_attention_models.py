"""transformers.sdpa on real models: the facts read off their calls, checked against what upstream makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward as upstream
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import accel
from accel.kernels.attention import AttentionFacts
from accel.patches.transformers import attention
from accel.state import STATES

STATE = STATES["transformers.sdpa"]
SEED = 20261130
TINY = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=100,
)


def entry() -> Callable[..., Any]:
    return AttentionInterface._global_mapping["sdpa"]


class Layer(nn.Module):
    """Stands for an attention layer: what upstream reads off it."""

    def __init__(self, groups: int | None = 2, is_causal: bool | None = True) -> None:
        super().__init__()
        if groups is not None:
            self.num_key_value_groups = groups
        if is_causal is not None:
            self.is_causal = is_causal


def tensors(
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    lengths: tuple[int, int] = (8, 8),
    dims: tuple[int, int] = (64, 64),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as models pass them: transposed views of (batch, seqlen, heads, head_dim)."""
    shapes = [
        (batch, lengths[0], heads[0], dims[0]),
        (batch, lengths[1], heads[1], dims[0]),
        (batch, lengths[1], heads[1], dims[1]),
    ]
    return tuple(torch.randn(shape).transpose(1, 2) for shape in shapes)


# --- What the facts say is what upstream computes -----------------------------------------------------------------


def described(
    facts: AttentionFacts,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention in fp64, made from what the facts say of the call and from nothing else."""
    q, k, v = (x.double() for x in (q, k[:, :, : facts.seqlen_k], v[:, :, : facts.seqlen_k]))
    k, v = (x.repeat_interleave(facts.group, dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(facts.seqlen_q, facts.seqlen_k, dtype=torch.bool)
    assert facts.causal in ("none", "top_left")
    if facts.causal == "top_left":
        seen = seen.tril()
    if facts.mask != "none":
        assert facts.mask.startswith("bool ")
        # a dimension that the facts call broadcast is read at its first index
        first = [slice(None) if letter != "1" else slice(1) for letter in facts.mask.split()[1]]
        seen = seen & mask[tuple(first)]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0)
    return (weights @ v).transpose(1, 2)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[AttentionFacts]:
    """The facts of every call that a model makes, each checked against what upstream returned for it."""
    adapter, seen = attention.Sdpa(), []

    def record(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        facts, device = adapter.facts(module, query, key, value, attention_mask, **kwargs)
        result = upstream(module, query, key, value, attention_mask, **kwargs)
        assert device.type == "cpu"
        assert facts.dtype == "float32" and not facts.needs_grad and facts.window is None
        torch.testing.assert_close(
            result[0].double(),
            described(facts, query, key, value, attention_mask, kwargs.get("scaling")),
            rtol=1e-4,
            atol=1e-5,
        )
        seen.append(facts)
        return result

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", record)
    print("seed", SEED)
    torch.manual_seed(SEED)
    return seen


def shapes(recorded: list[AttentionFacts]) -> list[tuple[Any, ...]]:
    """What was recorded, once each: (batch, heads, lengths, head dims, causal, mask); the record is then empty."""
    found = [
        (f.batch, (f.heads_q, f.heads_kv), (f.seqlen_q, f.seqlen_k), (f.head_dim, f.head_dim_v), f.causal, f.mask)
        for f in recorded
    ]
    recorded.clear()
    return list(dict.fromkeys(found))


def causal_models() -> dict[str, Callable[[], nn.Module]]:
    return {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY, head_dim=16)),
    }


@pytest.mark.parametrize("name", causal_models())
@torch.no_grad()
def test_facts_of_causal_models(name: str, recorded: list[AttentionFacts]) -> None:
    model = causal_models()[name]().eval()
    tokens = torch.randint(1, 100, (2, 8))
    heads, dims = (4, 2), (16, 16)

    model(tokens, use_cache=False)
    assert shapes(recorded) == [(2, heads, (8, 8), dims, "top_left", "none")]
    model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    assert shapes(recorded) == [(2, heads, (8, 8), dims, "top_left", "none")]

    cache = model(tokens, use_cache=True).past_key_values
    assert shapes(recorded) == [(2, heads, (8, 8), dims, "top_left", "none")]
    model(tokens[:, :1], past_key_values=cache)
    assert shapes(recorded) == [(2, heads, (1, 9), dims, "none", "none")]
    model(tokens[:, :4], past_key_values=cache)  # the second chunk of a chunked prefill
    assert shapes(recorded) == [(2, heads, (4, 13), dims, "none", "bool 11qk")]

    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    model(tokens, past_key_values=cache)
    assert shapes(recorded) == [(2, heads, (8, 8), dims, "top_left", "none")], "the unused slots of the cache count"
    model(tokens[:, :1], past_key_values=cache)
    assert shapes(recorded) == [(2, heads, (1, 16), dims, "none", "bool 111k")]

    padded = torch.ones_like(tokens)
    padded[0, :3] = 0
    cache = model(tokens, attention_mask=padded).past_key_values
    assert shapes(recorded) == [(2, heads, (8, 8), dims, "none", "bool b1qk")]
    model(tokens[:, :1], attention_mask=torch.cat([padded, padded[:, -1:]], 1), past_key_values=cache)
    assert shapes(recorded) == [(2, heads, (1, 9), dims, "none", "bool b11k")]

    model(tokens[:1], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), use_cache=False)  # packed
    assert shapes(recorded) == [(1, heads, (8, 8), dims, "none", "bool 11qk")]


@torch.no_grad()
def test_facts_of_a_sliding_window(recorded: list[AttentionFacts]) -> None:
    config = transformers.Gemma3TextConfig(
        **TINY,
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=25,
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    tokens = torch.randint(1, 100, (2, 8))
    cache = model(tokens).past_key_values
    assert shapes(recorded) == [
        (2, (4, 2), (8, 8), (16, 16), "none", "bool 11qk"),
        (2, (4, 2), (8, 8), (16, 16), "top_left", "none"),
    ]
    model(tokens[:, :1], past_key_values=cache)
    assert shapes(recorded) == [
        (2, (4, 2), (1, 4), (16, 16), "none", "bool 111k"),
        (2, (4, 2), (1, 9), (16, 16), "none", "none"),
    ]
    model(tokens[:, :3], use_cache=False)  # shorter than the window: plain causal
    assert shapes(recorded) == [(2, (4, 2), (3, 3), (16, 16), "top_left", "none")]


@torch.no_grad()
def test_facts_of_encoders_and_of_latent_attention(recorded: list[AttentionFacts]) -> None:
    vision = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=8
    )
    pixels = torch.randn(2, 3, 16, 16)
    transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**vision)).eval()(pixels)
    assert shapes(recorded) == [(2, (4, 4), (4, 4), (16, 16), "none", "none")]
    transformers.ViTModel(transformers.ViTConfig(**vision)).eval()(pixels)
    assert shapes(recorded) == [(2, (4, 4), (5, 5), (16, 16), "none", "none")]
    deepseek = transformers.DeepseekV3Config(
        **{**TINY, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
    )
    transformers.DeepseekV3ForCausalLM(deepseek).eval()(torch.randint(1, 100, (2, 8)))
    assert shapes(recorded) == [(2, (4, 4), (8, 8), (24, 16), "top_left", "none")]


@torch.no_grad()
def test_facts_of_every_rule_of_upstreams(recorded: list[AttentionFacts]) -> None:
    call = entry()
    q, k, v = tensors(lengths=(8, 5))
    call(Layer(), q, k, v, None)
    assert shapes(recorded)[0][2:] == ((8, 5), (64, 64), "top_left", "none")
    call(Layer(), q, k, v, None, is_causal=False)
    assert shapes(recorded)[0][4] == "none"
    call(Layer(is_causal=False), q, k, v, None)
    assert shapes(recorded)[0][4] == "none"
    call(Layer(is_causal=False), q, k, v, None, is_causal=True)
    assert shapes(recorded)[0][4] == "top_left"
    call(Layer(is_causal=None), q, k, v, None)
    assert shapes(recorded)[0][4] == "top_left"
    call(Layer(), q[:, :, :1], k, v, None, is_causal=True)
    assert shapes(recorded)[0][4] == "none"
    call(Layer(), q, k, v, torch.ones(1, 1, 8, 5, dtype=torch.bool), is_causal=True)
    assert shapes(recorded)[0][4:] == ("none", "bool 11qk")
    q, k, v = tensors(heads=(4, 4), lengths=(8, 8), dims=(64, 32))
    call(Layer(groups=None), q, k, v, None, scaling=0.3)
    assert shapes(recorded) == [(2, (4, 4), (8, 8), (64, 32), "top_left", "none")]
    seen = torch.rand(2, 4, 8, 8) > 0.4
    for mask, pattern in (
        (seen, "bool bhqk"),
        (seen[:, :1], "bool b1qk"),
        (seen[:1], "bool 1hqk"),
        (seen[:1, :1].expand(2, 4, 8, 8), "bool 11qk"),  # stride 0
        (seen[:, :1, :1], "bool b11k"),
    ):
        call(Layer(groups=1), q, k, v, mask)
        assert shapes(recorded)[0][4:] == ("none", pattern)


def test_layouts() -> None:
    adapter = attention.Sdpa()

    def layouts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[str, ...]:
        facts = adapter.facts(Layer(), q, k, v, mask)[0]
        return facts.q_layout, facts.k_layout, facts.v_layout, facts.mask_layout

    q, k, v = (x.bfloat16() for x in tensors())
    assert layouts(q, k, v) == ("aligned", "aligned", "aligned", "none")
    packed = torch.randn(2, 8, 3 * 4 * 64).bfloat16().unflatten(-1, (3, 4, 64))
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    assert layouts(q, k[:, :2], v[:, :2]) == ("aligned", "aligned", "aligned", "none")
    odd = torch.randn(2, 4, 8, 65).bfloat16()  # rows of 130 bytes
    assert layouts(odd[..., :64], k[:, :2], odd[:, :2, :, 1:]) == ("rows", "aligned", "rows", "none")
    assert layouts(q, k[:, :2], torch.randn(2, 2, 64, 8).bfloat16().mT) == ("aligned", "aligned", "strided", "none")
    shifted = torch.randn(2 * 4 * 8 * 64 + 4).bfloat16()[4:].view(2, 4, 8, 64)  # 8 bytes into the storage
    assert layouts(shifted, k[:, :2], v[:, :2])[0] == "rows"
    single = torch.randn(2, 4, 65).bfloat16()[..., :64].unsqueeze(2)[:1]  # only the heads' stride counts
    assert layouts(single, k[:1, :2], v[:1, :2])[0] == "rows"
    one = torch.empty_strided((1, 4, 1, 64), (3, 64, 5, 1), dtype=torch.bfloat16)  # strides of size 1 mean nothing
    assert layouts(one, k[:1, :2], v[:1, :2])[0] == "aligned"
    for mask, layout in (
        (torch.ones(2, 1, 8, 16, dtype=torch.bool)[..., :8], "aligned"),
        (torch.ones(2, 1, 8, 8, dtype=torch.bool), "rows"),
        (torch.ones(2, 1, 8, 8, dtype=torch.bool).mT, "strided"),
        (torch.ones(2, 1, 1, 8, dtype=torch.bool).expand(2, 4, 8, 8), "rows"),
    ):
        q, k, v = (x.bfloat16() for x in tensors())
        assert layouts(q, k, v, mask)[3] == layout


# --- Models -------------------------------------------------------------------------------------------------------


def outputs(model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits and all gradients of one training step."""
    model.zero_grad()
    result = model(tokens, labels=tokens)
    result.loss.backward()
    return [result.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_a_model_is_the_same_before_under_and_after() -> None:
    print("seed", SEED)
    torch.manual_seed(SEED)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    tokens = torch.randint(1, 100, (2, 8))
    generate = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)

    def run() -> list[torch.Tensor]:
        found = outputs(model, tokens)
        model.eval()
        return [*found, model.generate(tokens, **generate)]

    before = run()
    with accel.accelerated("transformers.sdpa"):
        under = run()
        # 2 layers: one training step, then a prefill and five single tokens
        assert STATE.declined == {"upstream's own code serves a CPU": 2 + 2 * 6}
        assert not STATE.served
    after = run()
    for got in (under, after):
        assert len(got) == len(before) and all(map(torch.equal, got, before))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    print("seed", SEED)
    torch.manual_seed(SEED)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).train()
    tokens = torch.randint(1, 100, (2, 8))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    before = outputs(model, tokens)
    with accel.accelerated("transformers.sdpa"):
        under = outputs(model, tokens)
        assert sum(STATE.declined.values()) == 4  # 2 layers, forward and recomputation
    assert all(map(torch.equal, under, before))


def test_eager_models_are_untouched() -> None:
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(**TINY)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = torch.randint(1, 100, (2, 8))
    before = outputs(model, tokens)
    with accel.accelerated("transformers.sdpa"):
        assert all(map(torch.equal, outputs(model, tokens), before))
        assert not STATE.declined and not STATE.served


@torch.no_grad()
def test_interfaces_of_their_own_and_direct_look_ups_are_reached() -> None:
    from transformers.models.doge import modeling_doge
    from transformers.models.sam2 import modeling_sam2

    accel.accelerate("transformers.sdpa")
    assert modeling_doge.ALL_ATTENTION_FUNCTIONS is not ALL_ATTENTION_FUNCTIONS
    assert modeling_doge.ALL_ATTENTION_FUNCTIONS["sdpa"] is entry()
    assert modeling_doge.ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None) is entry()
    assert modeling_sam2.ALL_ATTENTION_FUNCTIONS["sdpa"] is entry()
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**TINY, attn_implementation="sdpa")).eval()
    model(torch.randint(1, 100, (2, 8)))
    assert sum(STATE.declined.values()) == 2


@torch.no_grad()
def test_compiled_models_see_on_and_off() -> None:
    torch.manual_seed(SEED)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).eval()
    tokens = torch.randint(1, 100, (2, 8))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    before = compiled(tokens, use_cache=False).logits
    with accel.accelerated("transformers.sdpa"):
        assert torch.equal(compiled(tokens, use_cache=False).logits, before)
        assert not STATE.declined, "a compiled call is not counted"
    assert torch.equal(compiled(tokens, use_cache=False).logits, before)
