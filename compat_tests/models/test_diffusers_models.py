"""A tiny Qwen-Image transformer before, under and after accel: outputs, gradients, counts and the registry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import nn

import accel
from accel import testing
from accel.state import STATES

STATE = STATES["diffusers.sdpa"]
SEED = 20261130
LAYERS = 2
HEADS, HEAD_DIM, TEXT = 4, 32, 48


def model() -> QwenImageTransformer2DModel:
    print("seed", SEED)
    torch.manual_seed(SEED)
    return QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=LAYERS,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT,
        axes_dims_rope=(8, 12, 12),
    )


def inputs(mask: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Any]:
    """Two images of 4 x 6 patches with texts of 5 tokens. `mask`: "none", "ones", or "padded" in the second text."""
    generator = torch.Generator().manual_seed(SEED)
    text_mask = torch.ones(2, 5, dtype=torch.bool)
    text_mask[1, 3:] = mask != "padded"
    return {
        "hidden_states": torch.randn(2, 24, 16, generator=generator).to(device, dtype),
        "encoder_hidden_states": torch.randn(2, 5, TEXT, generator=generator).to(device, dtype),
        "encoder_hidden_states_mask": None if mask == "none" else text_mask.to(device),
        "timestep": torch.tensor([0.3, 0.8]).to(device, dtype),
        "img_shapes": [[(1, 4, 6)]] * 2,
    }


def outputs(transformer: nn.Module, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The sample and the gradients of all parameters and of both inputs."""
    leaves = {name: call[name].clone().requires_grad_() for name in ("hidden_states", "encoder_hidden_states")}
    sample = transformer(**{**call, **leaves}).sample
    leaves.update(transformer.named_parameters())
    weight = torch.linspace(-1, 1, sample.numel(), device=sample.device).view(sample.shape)
    # the text stream of the last block ends there: its last weights have no gradient
    grads = torch.autograd.grad((sample * weight).sum(), list(leaves.values()), allow_unused=True)
    found = {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    return {"sample": sample.detach(), **found}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("mask", ["none", "ones", "padded"])
def test_qwen_image_is_the_same_before_under_and_after(mask: str) -> None:
    transformer, call = model(), inputs(mask)
    objects = testing.snapshot(("diffusers",))
    before = outputs(transformer, call)
    assert len(before) > 50 and all(bool(tensor.isfinite().all()) for tensor in before.values())
    with accel.accelerated("diffusers"):
        under = outputs(transformer, call)
        assert STATE.declined == {"upstream's own code serves a CPU": LAYERS} and not STATE.served
        built_under = outputs(model(), call)
    assert equal(under, before) and equal(built_under, before)
    assert equal(outputs(transformer, call), before)
    assert sum(STATE.declined.values()) == 2 * LAYERS, "a call after restore was counted"
    assert objects.changed(testing.snapshot(("diffusers",))) == []


def test_a_padding_mask_is_not_lost() -> None:
    transformer = model()
    with torch.no_grad(), accel.accelerated("diffusers"):
        samples = {mask: transformer(**inputs(mask)).sample for mask in ("none", "ones", "padded")}
    torch.testing.assert_close(samples["none"], samples["ones"])
    assert not torch.allclose(samples["padded"][1], samples["ones"][1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_take_the_same_route_again(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    transformer, call = model(), inputs("padded")
    before = outputs(transformer, call)
    transformer.enable_gradient_checkpointing(lambda block, *args: checkpoint(block, *args, use_reentrant=reentrant))
    with accel.accelerated("diffusers"):
        # reentrant checkpoints forbid autograd.grad
        call = {**call, "hidden_states": call["hidden_states"].clone().requires_grad_()}
        sample = transformer(**call).sample
        weight = torch.linspace(-1, 1, sample.numel()).view(sample.shape)
        (sample * weight).sum().backward()
        assert sum(STATE.declined.values()) == 2 * LAYERS
    assert torch.equal(sample.detach(), before["sample"])
    assert torch.equal(call["hidden_states"].grad, before["d_hidden_states"])


def test_a_model_pinned_to_another_backend_is_untouched() -> None:
    transformer, call = model(), inputs("none")
    active = _AttentionBackendRegistry._active_backend
    try:
        transformer.set_attention_backend("_native_math")
        with torch.no_grad():
            before = transformer(**call).sample
            with accel.accelerated("diffusers"):
                assert torch.equal(transformer(**call).sample, before)
                assert not STATE.declined and not STATE.served
                # upstream sets the backend of the whole process along with the model's
                assert _AttentionBackendRegistry._active_backend is AttentionBackendName._NATIVE_MATH
    finally:
        _AttentionBackendRegistry._active_backend = active


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["none", "ones", "padded"])
def test_qwen_image_on_a_gpu(mask: str) -> None:
    """Under accel the accuracy rule holds against the same model in fp32; after restore the sample is bit-identical."""
    transformer = model().cuda()
    oracle = outputs(transformer, inputs(mask, torch.float32, "cuda"))
    transformer.bfloat16()
    call = inputs(mask, torch.bfloat16, "cuda")
    before = outputs(transformer, call)
    with accel.accelerated("diffusers"):
        under = outputs(transformer, call)
        assert sum(STATE.served.values()) + sum(STATE.declined.values()) == LAYERS
        print(STATE.served, STATE.declined)
    assert under.keys() == before.keys()
    for name, tensor in under.items():
        verdict = testing.accuracy(tensor, before[name], oracle[name])
        assert verdict.ok, f"{name}: {verdict.reason}"
    assert torch.equal(outputs(transformer, call)["sample"], before["sample"])
