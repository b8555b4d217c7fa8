"""The recogniser against every modeling file of the installed transformers, and against look-alikes."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import nn
from transformers import __version__
from transformers.activations import ACT2FN

from accel.patches.transformers.recognise import GatedMlp, RmsNorm, recognise

NEWEST = Version(__version__) >= Version("5.24")

#: Classes that share names, attributes or most of their maths with a recognised form, and compute something else.
LOOK_ALIKES = {
    "FalconH1MLP",
    "BitNetMLP",
    "DoryMLP",
    "DeepseekV4MLP",
    "Glm5NextTextMLP",
    "Glm5NextVisionMLP",
    "Step3p7MLP",
    "MiniMaxM3VLDenseMLP",
    "Gemma3nTextMLP",
    "InklingMLP",
    "BeamMLP",
    "SeedOssMLP",
    "GteMLP",
    "T5GemmaMLP",
    "T5Gemma2MLP",
    "Phi4MultimodalAudioMLP",
    "Zamba2MLP",
    "DiffusionGemmaSelfConditioning",
    "Glm4vVisionPatchMerger",
    "Glm4vMoeVisionPatchMerger",
    "GlmOcrVisionPatchMerger",
    "Glm5NextVisionPatchMerger",
    "InklingSharedExperts",
    "DogeCDMoE",
    "Llama4TextExperts",
    # norms
    "CohereLayerNorm",
    "Cohere2LayerNorm",
    "DebertaLayerNorm",
    "CpmAntLayerNorm",
    "ImageGPTLayerNorm",
    "Llama4TextL2Norm",
    "NanoChatRMSNorm",
    "DoryL2Norm",
    "DeepseekV4UnweightedRMSNorm",
    "HYV4UnweightedRMSNorm",
    "Inkling2UnweightedRMSNorm",
    "MuseSparkTextCenteredRMSNorm",
    "MuseSparkTextInputScaledRMSNorm",
    "Qwen4ExpTextRMSNorm",
    "GradiumPhononTTSTimestepNorm",
    "AXK2GatedRMSNorm",
    "FalconH1RMSNormGated",
    "MambaRMSNormGated",
    "BambaRMSNormGated",
    "NemotronHRMSNormGated",
    "Zamba2RMSNormGated",
}


@functools.cache
def classes() -> list[type]:
    """Classes of every modeling file that multiply gates or take root mean squares, made without importing the file.

    A class is compiled under its file's name and line, so that its source is found as after an import.
    """
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations
    found: list[type] = []
    for path in sorted(Path(spec.submodule_search_locations[0], "models").glob("*/modeling_*.py")):
        text = path.read_text()
        for match in re.finditer(r"^class (\w+)\(.*?(?=^\S)", text + "\nend", re.M | re.S):
            body = match.group()
            if not re.search(r"rsqrt|pow\(|gate_proj|gate_up_proj|\.square\(", body) or len(body) > 6000:
                continue
            scope = {"torch": torch, "nn": nn, "F": F, "ACT2FN": ACT2FN, "__name__": f"census.{path.stem}"}
            line = text.count("\n", 0, match.start())
            future = __import__("__future__").annotations.compiler_flag
            try:
                exec(compile("\n" * line + body, str(path), "exec", flags=future, dont_inherit=True), scope)
            except NameError:  # a base class that only the file knows: none of ours
                continue
            found.append(scope[match.group(1)])  # type: ignore[arg-type]
    linecache.clearcache()
    return found


@functools.cache
def recognised() -> list[tuple[str, GatedMlp | RmsNorm]]:
    return [(cls.__name__, meaning) for cls in classes() if (meaning := recognise(cls)) is not None]


def kind(meaning: GatedMlp | RmsNorm) -> str:
    if isinstance(meaning, GatedMlp):
        return "fused mlp" if meaning.fused else "mlp"
    return ("gated " if meaning.gated else "") + meaning.form


def test_census() -> None:
    """Lower bounds: a new release may add classes."""
    counted = Counter(kind(meaning) for _, meaning in recognised())
    least = (
        {
            "mlp": 147,
            "fused mlp": 10,
            "cast_then_weight": 153,
            "weight_in_fp32": 26,
            "zero_centred": 13,
            "gated cast_then_weight": 5,
            "gated weight_in_fp32": 4,
        }
        if NEWEST
        else {
            "mlp": 124,
            "fused mlp": 9,
            "cast_then_weight": 142,
            "weight_in_fp32": 16,
            "zero_centred": 13,
            "gated cast_then_weight": 5,
            "gated weight_in_fp32": 2,
        }
    )
    print(counted)
    assert all(counted[name] >= number for name, number in least.items()), counted


def test_look_alikes_are_not_recognised() -> None:
    met = LOOK_ALIKES & {cls.__name__ for cls in classes()}
    assert len(met) >= (len(LOOK_ALIKES) - 6 if NEWEST else 20), sorted(LOOK_ALIKES - met)
    assert not met & {name for name, _ in recognised()}


class Documented(nn.Module):
    def forward(self, tokens):
        """
        A docstring, another name for the argument, and other local names.
        """
        opened = self.first(tokens)
        opened = self.curve(opened)
        lifted = self.second(tokens)
        both = opened * lifted
        return self.last(both)


class Fused(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = self.both(x)
        a, b = halves.chunk(2, dim=-1)
        return self.last(b * self.curve(a))


class FusedSwapped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, a = self.both(x).chunk(2, dim=-1)
        return self.last(b * self.curve(a))


class Helped(nn.Module):
    def _norm(self, y):
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.tiny)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.scale.float())
        return output.type_as(x)


class HelpedBySum(Helped):
    def _norm(self, y):
        return y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + self.tiny)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.scale.float())
        return output.type_as(x)


class HelpedFromAbove(Helped):
    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.scale.float())
        return output.type_as(x)


class OtherConstant(Helped):
    def _norm(self, y):
        return y * torch.rsqrt(y.pow(3).mean(-1, keepdim=True) + self.tiny)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.scale.float())
        return output.type_as(x)


class Clamped(nn.Module):
    def forward(self, x):
        gate = self.gate_proj(x).clamp(max=7.0)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class InPlace(nn.Module):
    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x))
        hidden *= self.up_proj(x)
        return self.down_proj(hidden)


class Chatty(nn.Module):
    def forward(self, x):
        print("side effect")
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class SameUp(nn.Module):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.gate_proj(x))


class OneLayerTwice(nn.Module):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.down_proj(x)) * self.up_proj(x))


class WithOption(nn.Module):
    def forward(self, x, *, scale=1.0):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ClassAttribute(nn.Module):
    def act_fn(self, x):
        return x.clamp(min=0)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Decorated(nn.Module):
    @functools.lru_cache  # noqa: B019 - any decorator would do
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def doubling(function):
    @functools.wraps(function)
    def doubled(self, x):
        return 2 * function(self, x)

    return doubled


class Wrapped(nn.Module):
    @doubling
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Inherits(Documented):
    pass


def test_names_of_attributes_and_arguments_are_free() -> None:
    assert recognise(Documented) == GatedMlp("first", "second", "last", "curve")
    assert recognise(Fused) == GatedMlp("both", None, "last", "curve")
    assert recognise(Helped) == RmsNorm("zero_centred", "scale", "tiny")


@pytest.mark.parametrize(
    "cls",
    [
        FusedSwapped,
        HelpedBySum,
        HelpedFromAbove,
        OtherConstant,
        Clamped,
        InPlace,
        Chatty,
        WithOption,
        ClassAttribute,
        Decorated,
        Wrapped,
        Inherits,
        nn.Linear,
        nn.Module,
        int,
    ],
    ids=lambda cls: cls.__name__,
)
def test_anything_else_is_not_recognised(cls: type) -> None:
    assert recognise(cls) is None


@pytest.mark.parametrize("cls", [SameUp, OneLayerTwice])
def test_one_layer_in_two_places_still_means_what_it_says(cls: type) -> None:
    """Placeholders bind per place, so a layer used twice is two roles of one layer."""
    meaning = recognise(cls)
    assert isinstance(meaning, GatedMlp)
    assert (meaning.up == meaning.gate) if cls is SameUp else (meaning.gate == meaning.down)


GATED = "def forward(self, x):\n    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\n"


def class_of(source: str, filename: str, **scope: object) -> type:
    exec(compile(source, filename, "exec"), scope)
    return type("Made", (nn.Module,), {"forward": scope["forward"]})


def test_no_source_is_not_recognised() -> None:
    assert recognise(class_of(GATED, "<string>")) is None


def test_source_that_is_not_what_runs_is_not_recognised(tmp_path: Path) -> None:
    """A file that was edited after its import."""
    file = tmp_path / "modeling_edited.py"
    file.write_text(GATED)
    assert recognise(class_of(GATED, str(file))) is not None
    clamped = GATED.replace("self.act_fn(self.gate_proj(x))", "self.act_fn(self.gate_proj(x)).clamp(max=7)")
    assert recognise(class_of(clamped, str(file))) is None


def test_a_torch_of_the_modules_own_is_not_recognised(tmp_path: Path) -> None:
    """Remote code may call its own things torch or ACT2FN."""
    file = tmp_path / "modeling_remote.py"
    source = (
        "def forward(self, x):\n"
        "    dtype = x.dtype\n"
        "    x = x.to(torch.float32)\n"
        "    variance = x.pow(2).mean(-1, keepdim=True)\n"
        "    x = x * torch.rsqrt(variance + self.eps)\n"
        "    return self.weight * x.to(dtype)\n"
    )
    file.write_text(source)
    assert recognise(class_of(source, str(file), torch=torch)) == RmsNorm("cast_then_weight", "weight", "eps")
    assert recognise(class_of(source, str(file), torch=nn)) is None
