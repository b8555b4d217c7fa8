"""What accel costs where it does not serve: a declined call, and an idle `import accel`. Runs on a CPU.

    python benchmarks/ops/serve.py --out benchmarks/results/cpu/serve.jsonl [--check]

`overhead` (pass host_us, provider accel) is a declined call through the wrapper less the same call without it, where
one small torch operation stands in for upstream's function on both sides: upstream's own time varies by more than what
is to be measured. It is in the upstream row, where a CPU can run it. All are timed in turns; each sample is the best
of several short batches, because what disturbs a batch only ever adds to it. The calls take the longest way a declined
call has: the facts are read, the plan is looked up, the reason is counted. Where the plan would serve, it is made to
decline.

`import_accel` (pass cold_start) is a whole interpreter that imports accel and ends, the floor one that does nothing,
and `import` the time that the import statement itself takes. `--check` fails if a limit is passed: 15 us, 50 ms, no
torch.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import accel
from accel import serve
from accel.outcome import Choice, Declined
from accel.state import TargetState
from benchmarks.timing import Quantiles, Rows

ROOT = Path(__file__).resolve().parents[2]
BENCH = "benchmarks/ops/serve.py"
OVERHEAD_LIMIT, IMPORT_LIMIT = 15.0, 50.0  #: us, ms
CALLS, BATCHES = 25, 24  #: calls timed together; batches of which a sample is the best
WIDTH, HEADS = 64, 4


@dataclass
class Case:
    """One declined call: the accelerated callable and its arguments."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    runs: bool = True  #: upstream runs on a CPU

    def providers(self) -> dict[str, Callable[[], Any]]:
        """The stand-in, the wrapper around it, and upstream's own function where it runs, on the same arguments."""
        call = serve.wrapped_call(self.function)
        if call is None:
            raise RuntimeError(f"{self.name}: {self.function} is not served by accel here")
        if isinstance(call.decide(self.args, self.kwargs)[0], Choice):
            call.adapter.plan = _declines
            call.plans.clear()
        decision = call.decide(self.args, self.kwargs)
        if decision[1] is None and "CPU" not in str(decision[0]):
            raise RuntimeError(f"{self.name}: {decision[0]}: the call is declined before its facts are read")
        print(f"{self.name}: {decision[0]}")
        args, kwargs = self.args, self.kwargs
        # a call of its own: the one in place keeps upstream's function
        wrapper = serve.wrap(_stand_in, call.adapter, TargetState(call.state.target))
        serve.wrapped_call(wrapper).state.on = True
        found = {"without": lambda: _stand_in(*args, **kwargs), "with": lambda: wrapper(*args, **kwargs)}
        if self.runs:
            found["upstream"] = lambda: call.original(*args, **kwargs)
        return found


_SMALL = torch.ones(8)


def _stand_in(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Stands for upstream's function: touches torch, as that would, and is always as fast."""
    return _SMALL + _SMALL


def _declines(facts: Any, arch: str) -> Declined:
    return Declined("made to decline, to be timed")


def cases() -> list[Case]:
    """One call at least for every kind of target."""
    return [*_attention(), *_classes(), *_functions()]


def _attention() -> list[Case]:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    from transformers import LlamaConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaAttention

    config = LlamaConfig(hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=2)
    layer = LlamaAttention(config, 0).eval()
    q, k = torch.randn(1, 8, HEADS, 16).transpose(1, 2), torch.randn(1, 8, 2, 16).transpose(1, 2)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    keywords = {"dropout": 0.0, "scaling": 0.25, "position_ids": None, "use_cache": True}
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    native = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
    joint = {name: torch.randn(1, 8, HEADS, 16) for name in ("query", "key", "value")}
    asked = {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False, "_parallel_config": None}
    return [
        Case("transformers_sdpa_prefill", sdpa, (layer, q, k, k, None), keywords),
        Case("transformers_sdpa_decode", sdpa, (layer, q[:, :, :1], k, k, None), keywords),
        Case("transformers_sdpa_mask", sdpa, (layer, q, k, k, mask), keywords),
        Case("diffusers_sdpa_full", native, (), {**joint, "attn_mask": None, **asked}),
        Case("diffusers_sdpa_key_mask", native, (), {**joint, "attn_mask": mask[0, 0, 7:], **asked}),
    ]


def _classes() -> list[Case]:
    from fla.modules import GatedMLP
    from transformers import LlamaConfig, Qwen3NextConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    x = torch.randn(1, 1, WIDTH)
    mlp = LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=96))
    gated = Qwen3NextRMSNormGated(WIDTH, eps=Qwen3NextConfig().rms_norm_eps)
    return [
        Case("transformers_rms_norm", LlamaRMSNorm.forward, (LlamaRMSNorm(WIDTH), x)),
        Case("transformers_rms_norm_gated", Qwen3NextRMSNormGated.forward, (gated, x, x)),
        Case("transformers_mlp", LlamaMLP.forward, (mlp, x)),
        Case("fla_gated_mlp", GatedMLP.forward, (GatedMLP(WIDTH, intermediate_size=96), x), runs=False),
    ]


def _functions() -> list[Case]:
    from fla.ops import gated_delta_rule, kda
    from transformers.models.qwen3_next import modeling_qwen3_next

    heads = (1, 8, HEADS, 16)
    q, k, v = (torch.randn(heads) for _ in range(3))
    g, beta = -torch.rand(heads[:3]), torch.rand(heads[:3])
    keywords = {"g": g, "beta": beta, "initial_state": None, "output_final_state": True}
    keywords["use_qk_l2norm_in_kernel"] = True
    by_dimension = {**keywords, "g": -torch.rand(heads)}
    rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
    return [
        Case("transformers_gated_delta_rule", rule, (q, k, v), keywords, runs=False),
        Case("fla_gated_delta_rule", gated_delta_rule.chunk_gated_delta_rule, (q, k, v), keywords, runs=False),
        Case("fla_kda", kda.chunk_kda, (q, k, v), by_dimension, runs=False),
    ]


def overheads(case: Case, samples: int) -> dict[str, Quantiles]:
    """us: what the wrapper adds ("accel"), and a call of upstream's where it runs."""
    providers = case.providers()
    times: dict[str, list[float]] = {name: [] for name in providers}
    for function in providers.values():
        _batch(function)
    for _ in range(samples):
        best = dict.fromkeys(providers, float("inf"))
        for _ in range(BATCHES):
            for name, function in providers.items():
                best[name] = min(best[name], _batch(function))
        for name, value in best.items():
            times[name].append(value)
    added = [ours - theirs for ours, theirs in zip(times["with"], times["without"], strict=True)]
    found = {"accel": Quantiles.of(added)}
    if "upstream" in times:
        found["upstream"] = Quantiles.of(times["upstream"])
    return found


def _batch(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    return (time.perf_counter() - start) / CALLS * 1e6


IMPORT = """
import sys, time
before = set(sys.modules)
start = time.perf_counter()
import accel
seconds = time.perf_counter() - start
heavy = {name.partition('.')[0] for name in set(sys.modules) - before} & {'torch', 'transformers', 'diffusers', 'fla'}
print(seconds * 1e3, *sorted(heavy))
"""


def import_times(samples: int) -> dict[str, Quantiles]:
    """ms of whole interpreters, "accel" and "floor", and of the "import" alone. Raises if torch came along."""
    found: dict[str, list[float]] = {"accel": [], "floor": [], "import": []}
    for _ in range(samples):
        for name, code in (("accel", IMPORT), ("floor", "pass")):
            start = time.perf_counter()
            done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
            found[name].append((time.perf_counter() - start) * 1e3)
            if name == "accel":
                milliseconds, *heavy = done.stdout.split()
                if heavy:
                    raise RuntimeError(f"import accel imports {', '.join(heavy)}")
                found["import"].append(float(milliseconds))
    return {name: Quantiles.of(values) for name, values in found.items()}


def source_digest() -> str:
    """Of the machinery and the adapters, which is what is timed here."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "accel").glob("*.py"), *(ROOT / "patches").rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="result rows, replaced where they are there already")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--check", action="store_true", help="fail where a limit is passed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    libraries = ", ".join(f"{name} {version(name)}" for name in ("transformers", "diffusers", "flash-linear-attention"))
    rows = Rows(BENCH, source_digest(), libraries, gpu="cpu")
    over = []
    imports = import_times(max(options.samples, 5))
    run = rows.run_id()
    rows.add("import_accel", "accel", "cold_start", imports["accel"], run)
    rows.add("import_accel", "floor", "cold_start", imports["floor"], run)
    rows.add("import_accel", "accel", "cold_start", imports["import"], run, metric="import")
    print(
        f"import accel: {imports['import'].p50:.1f} ms; {imports['accel'].p50 - imports['floor'].p50:.1f} ms of process"
    )
    if imports["import"].p50 > IMPORT_LIMIT:
        over.append(f"import accel takes {imports['import'].p50:.1f} ms, limit {IMPORT_LIMIT:.0f} ms")
    accel.accelerate([target.name for target in accel.status() if target.name != "fla.cpu"])
    with torch.no_grad():
        for case in cases():
            found, run = overheads(case, options.samples), rows.run_id()
            name = f"declined_{case.name}"
            rows.add(name, "accel", "host_us", found["accel"], run, metric="overhead", unit="us")
            beside = ""
            if "upstream" in found:
                rows.add(name, "upstream", "host_us", found["upstream"], run, unit="us")
                beside = f" to upstream's {found['upstream'].p50:.1f} us"
            print(f"  accel adds {found['accel'].p50:.1f} us{beside}")
            if found["accel"].p50 > OVERHEAD_LIMIT:
                over.append(f"{name} adds {found['accel'].p50:.1f} us, limit {OVERHEAD_LIMIT:.0f} us")
    accel.restore()
    if options.out:
        rows.write(options.out)
    if over:
        print("\n".join(over))
        sys.exit(options.check)


if __name__ == "__main__":
    main()
