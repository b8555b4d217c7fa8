"""The demo: small models with random weights, run before, under and after `accelerate()`.

Three models: a Qwen3.5-style one from transformers (Gated DeltaNet and attention layers), a GatedDeltaNet model from
flash-linear-attention, and a Llama-style one. On a machine without a GPU the first two cannot run upstream at all once
FLA is installed: that error is what "before" and "after" show, and the values compared with are the same model in a
process without FLA, and the same model in fp64 with the token-by-token recurrence.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import accel

from .state import STATES
from .targets import installed
from .testing import snapshot

SEED = 0
VOCABULARY = 512
PROMPT = 96
NEW_TOKENS = 16


@dataclass(frozen=True)
class Subject:
    """One model of the demo."""

    name: str
    library: str
    build: Callable[[bool], nn.Module]  #: argument: sized for a GPU
    reference: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None  #: logits where upstream cannot run


@dataclass
class Result:
    """What a run of one model gave; an error line stands for logits that upstream cannot compute here."""

    logits: torch.Tensor | None = None
    error: str | None = None
    ms: dict[str, float] = field(default_factory=dict)
    refused: str | None = None  #: why upstream does not train here


def qwen(gpu: bool) -> nn.Module:
    """A Qwen3.5-style causal language model: three Gated DeltaNet layers and one attention layer."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    size = 2048 if gpu else 128
    head = 128 if gpu else 32
    heads = size // head
    config = Qwen3_5TextConfig(
        num_hidden_layers=4,
        hidden_size=size,
        intermediate_size=3 * size,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=head,
        linear_key_head_dim=head,
        linear_value_head_dim=head,
        linear_num_key_heads=heads // 2,
        linear_num_value_heads=heads,
        vocab_size=VOCABULARY,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: nn.Module = Qwen3_5ForCausalLM(config)
    return model


def gated_delta_net(gpu: bool) -> nn.Module:
    """flash-linear-attention's GatedDeltaNet language model."""
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    size = 1024 if gpu else 128
    config = GatedDeltaNetConfig(
        hidden_size=size,
        num_heads=size // 64,
        head_dim=64,
        expand_v=1,
        num_hidden_layers=3,
        vocab_size=VOCABULARY,
        eos_token_id=None,
        pad_token_id=0,
        fuse_cross_entropy=False,
    )
    model: nn.Module = GatedDeltaNetForCausalLM(config)
    return model


def llama(gpu: bool) -> nn.Module:
    """A Llama-style model: its norms have a GPU kernel, and a CPU serves nothing of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = 2048 if gpu else 128
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=size,
        intermediate_size=3 * size,
        num_attention_heads=size // 64,
        num_key_value_heads=size // 128,
        vocab_size=VOCABULARY,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def without_fla(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the Qwen3.5-style model from a process in which FLA cannot be imported."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "qwen.pt")
        torch.save({"weights": model.state_dict(), "ids": ids}, path)
        code = f"import sys; sys.modules['fla'] = None; from accel.demo import _child; _child({str(path)!r})"
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=240)
        logits: torch.Tensor = torch.load(path)["logits"]
        return logits


def _child(path: str) -> None:
    saved = torch.load(path)
    model = make(SUBJECTS[0], torch.device("cpu"))
    model.load_state_dict(saved["weights"])
    torch.save({"logits": logits_of(model, saved["ids"])}, path)


def in_fp64(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the FLA model in fp64, its rule computed token by token by the oracle."""
    import copy

    from fla.layers import gated_deltanet

    from accel.kernels.gated_delta_rule.reference import gated_delta_rule_reference

    def oracle(**kwargs: Any) -> Any:
        for name in ("qk_l2norm", "gate", "beta_sigmoid"):
            kwargs[f"use_{name}"] = kwargs.pop(f"use_{name}_in_kernel", False)
        return gated_delta_rule_reference(**kwargs)

    held = gated_deltanet.chunk_gated_delta_rule, gated_deltanet.fused_recurrent_gated_delta_rule
    gated_deltanet.chunk_gated_delta_rule = gated_deltanet.fused_recurrent_gated_delta_rule = oracle
    try:
        with accel.accelerated("fla.cpu"):
            return logits_of(copy.deepcopy(model).double(), ids)
    finally:
        gated_deltanet.chunk_gated_delta_rule, gated_deltanet.fused_recurrent_gated_delta_rule = held


SUBJECTS = (
    Subject("Qwen3.5-style", "transformers", qwen, without_fla),
    Subject("GatedDeltaNet", "fla", gated_delta_net, in_fp64),
    Subject("Llama-style", "transformers", llama, None),
)


def make(subject: Subject, device: torch.device) -> nn.Module:
    """The model on `device`, the same weights every time."""
    torch.manual_seed(SEED)
    gpu = device.type == "cuda"
    model = subject.build(gpu).eval()
    return model.to(device, torch.bfloat16) if gpu else model.to(device)


@torch.no_grad()
def logits_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a forward pass without a cache."""
    result: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return result


def run(model: nn.Module, ids: torch.Tensor, gpu: bool) -> Result:
    """Forward, generation and a training step; the error line if upstream cannot run here."""
    try:
        result = Result(logits_of(model, ids))
    except RuntimeError as error:
        if "active drivers" not in str(error):
            raise
        return Result(error=str(error).splitlines()[0])
    repeats = 10 if gpu else 1
    result.ms["forward"] = milliseconds(lambda: logits_of(model, ids), repeats, gpu)
    result.ms["token"] = milliseconds(lambda: generate(model, ids), 1, gpu) / NEW_TOKENS
    try:
        result.ms["training step"] = milliseconds(lambda: training_step(model, ids), repeats, gpu)
    except RuntimeError as error:  # FLA refuses to train the gated delta rule on Hopper with Triton 3.4 to 3.7.0
        if "upgrade Triton" not in str(error):
            raise
        result.refused = str(error).splitlines()[0]
        model.zero_grad(set_to_none=True)
        model.eval()
    return result


def generate(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Greedy tokens."""
    with torch.no_grad():
        tokens: torch.Tensor = model.generate(  # type: ignore[operator]
            ids[:1], max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, use_cache=cached(model)
        )
    return tokens


def cached(model: nn.Module) -> bool:
    """Whether generate() may use a cache: with transformers after 5.17, FLA 0.6.0's models ignore the one they get."""
    from packaging.version import Version
    from transformers import __version__

    return not type(model).__module__.startswith("fla.") or Version(__version__) < Version("5.18")


def training_step(model: nn.Module, ids: torch.Tensor) -> None:
    """Loss and gradients."""
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)
    model.eval()


def milliseconds(step: Callable[[], object], repeats: int, gpu: bool) -> float:
    """Wall time of a step, the median of `repeats` after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        step()
        if gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times[1:])[repeats // 2]


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """The largest difference of two logits tensors, beside the largest logit."""
    ours, theirs = ours.double(), theirs.double()
    if torch.equal(ours, theirs):
        return "none, bit for bit"
    return f"{float((ours - theirs).abs().max()):.1e} (largest logit {float(theirs.abs().max()):.1f})"


def show(subject: Subject, console: Console) -> bool:
    """Run one model through the three stages; False if something that must hold does not."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.type == "cuda"
    with console.status(f"{subject.name}: building") as progress:
        model = make(subject, device)
        ids = torch.randint(1, VOCABULARY, (2, 2048 if gpu else PROMPT), generator=torch.Generator().manual_seed(SEED))
        ids = ids.to(device)
        found = snapshot()
        progress.update(f"{subject.name}: before, upstream's own code")
        before = run(model, ids, gpu)
        progress.update(f"{subject.name}: accelerated")
        for state in STATES.values():
            state.reset_counters()
        accel.accelerate()
        under = run(model, ids, gpu)
        statuses = [status for status in accel.status() if status.served or status.declined]
        progress.update(f"{subject.name}: restored")
        accel.restore()
        after = run(model, ids, gpu)
        changed = found.changed(snapshot())
        progress.update(f"{subject.name}: comparing")
        expected, source = before.logits, "upstream"
        if expected is None and subject.reference is not None:
            expected = subject.reference(model, ids)
            source = "the same model without FLA" if subject.reference is without_fla else "the fp64 oracle"
    assert under.logits is not None
    same_after = (
        before.error == after.error
        if before.logits is None or after.logits is None
        else torch.equal(before.logits, after.logits)
    )
    console.rule(f"{subject.name} ({subject.library})")
    print_times(before, under, console)
    for status in statuses:
        served = ", ".join(f"{kernel} {count}x" for kernel, count in status.kernels.items()) or "nothing"
        console.print(f"  {status.name}: served {served}")
        for reason, count in status.declined.items():
            console.print(f"    declined {count}x: {reason}", highlight=False)
    if expected is not None:
        console.print(f"  largest difference from {source}: {difference(under.logits, expected)}")
    objects = f"[red]changed: {', '.join(changed[:5])}[/red]" if changed else "identical objects"
    behaviour = "the same error as before" if after.error else "bit-identical output"
    console.print(f"  after restore: {objects}, {behaviour if same_after else '[red]other behaviour[/red]'}")
    return not changed and same_after


def print_times(before: Result, under: Result, console: Console) -> None:
    table = Table("", "upstream", "accel", show_edge=False, pad_edge=False)
    for name in under.ms:
        sides = (before.ms.get(name), under.ms[name])
        unit = "{:.0f} tokens/s" if name == "token" else "{:.2f} ms"
        shown = [unit.format(1e3 / ms if name == "token" else ms) if ms else "cannot run here" for ms in sides]
        table.add_row("generate" if name == "token" else name, *shown)
    if before.error:
        console.print(f"  upstream before: [yellow]{before.error}[/yellow]", highlight=False)
    console.print(table)
    if before.refused:
        console.print(f"  upstream refuses to train here: [yellow]{before.refused}[/yellow]", highlight=False)


def main() -> int:
    """Run the demo; the exit code is 0 if everything that must hold did."""
    console = Console()
    start = time.perf_counter()
    # The libraries' own advice (deprecations, missing optional packages) would bury the tables.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: linear attention in plain torch"
    console.print(f"accel demo on torch {torch.__version__}, {where}")
    good = [show(subject, console) for subject in SUBJECTS if not left_out(subject.library, console)]
    console.rule(f"{time.perf_counter() - start:.0f} s")
    return 0 if good and all(good) else 1


def left_out(library: str, console: Console) -> str | None:
    """Why a library's model is left out, printed; None where it is installed in a supported version."""
    problem = installed(library).problem
    if problem:
        console.print(f"left out: {problem}")
    return problem


if __name__ == "__main__":
    sys.exit(main())
