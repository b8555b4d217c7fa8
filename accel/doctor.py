"""What is here, which targets would serve, and why the others would not: `accel doctor` and `accel status`.

Everything that may be broken (torch, a driver, an upstream library) is looked at in a process of its own, so that a
library that raises, exits or crashes while it is imported is a line of the report and not its end. The report is data
(`examine()`, `accel doctor --json`) as well as text.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import site
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import accel

from . import settings
from .targets import GROUPS, TARGETS, installed

#: Seconds after which the look at one library is given up: a cold import of FLA takes 20 s on two cores.
PATIENCE = 120.0
#: Distributions whose version matters to somebody who reads the report.
DISTRIBUTIONS = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "flash-linear-attention",
    "fla-core",
    "transformers",
    "diffusers",
    "kernels",
    "causal-conv1d",
    "flash-qla",
    "accelerate",
    "peft",
    "wrapt",
    "numpy",
)
#: Variables of others that decide what is served.
FOREIGN = (
    "CUDA_VISIBLE_DEVICES",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "FLA_DISABLE_BACKEND_DISPATCH",
    "TRITON_INTERPRET",
    "USE_HUB_KERNELS",
    "DIFFUSERS_ATTN_BACKEND",
)
#: The kernel compiler: its distribution, and what is imported of it.
COMPILER = ("nvidia-cutlass-dsl", "cutlass.cute", "tvm_ffi")
T = TypeVar("T")


@dataclass(slots=True)
class Device:
    """One GPU, or the processor."""

    name: str
    arch: str  #: dispatch arch, "cpu" for the processor
    memory_gib: float | None = None


@dataclass(slots=True)
class TargetOutlook:
    """What one target would do here."""

    name: str
    library: str  #: its version, or why it cannot be patched
    patched: str  #: the state after accelerate() and the library's import, as `status()` words it
    serves: str  #: which kernels would serve, or why none would


@dataclass(slots=True)
class Examination:
    """The report. Every field is filled whatever is broken; `problems` says what was."""

    accel: str = ""
    location: str = ""
    start_up: str = ""  #: how ACCEL_TARGETS reaches a process
    python: str = ""
    system: str = ""
    driver: str = ""
    cuda: str = ""  #: of torch, and whether it works
    devices: list[Device] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)  #: library -> "ok" or the line it failed with
    variables: dict[str, str] = field(default_factory=dict)  #: ACCEL_ and foreign variables that are set
    defaults: dict[str, str] = field(default_factory=dict)  #: ACCEL_ variables that are not
    cache: str = ""
    certificates: list[str] = field(default_factory=list)
    targets: list[TargetOutlook] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def examine() -> Examination:
    """Look at everything. Takes as long as the slowest library's import; raises nothing."""
    found = Examination()
    with ThreadPoolExecutor(max_workers=2) as pool:  # an import keeps a core busy
        torch_probe = pool.submit(probe, "torch")
        compiler_probe = pool.submit(probe, "compiler") if _version(COMPILER[0]) is not None else None
        library_probes = {group: pool.submit(probe, group) for group in GROUPS if not installed(group).problem}
        for name, look in SECTIONS.items():
            _guarded(found, name, look)
        found.driver = _guard(found, "driver", _driver, "unknown")
        torch_found = torch_probe.result()
        found.imports["torch"] = torch_found.get("failed", "ok")
        found.cuda = torch_found.get("cuda", "unknown: torch cannot be imported")
        found.devices = [Device(**device) for device in torch_found.get("devices", [])]
        if compiler_probe is not None:
            found.imports[COMPILER[0]] = compiler_probe.result().get("failed", "ok")
        libraries = {group: pending.result() for group, pending in library_probes.items()}
    _guarded(found, "certificates", _certificates)
    for group, library in libraries.items():
        found.imports[group] = library.get("failed", "ok")
    found.targets = [_outlook(target.name, target.group, libraries.get(target.group, {})) for target in TARGETS]
    found.problems += [f"{name} cannot be imported: {line}" for name, line in found.imports.items() if line != "ok"]
    return found


def _outlook(name: str, group: str, library: dict[str, Any]) -> TargetOutlook:
    here = installed(group)
    if here.problem:
        return TargetOutlook(name, here.problem, "off", "nothing: the library cannot be patched")
    version = here.version or ""
    if "failed" in library:
        return TargetOutlook(name, version, "off", f"nothing: {group} cannot be imported: {library['failed']}")
    state, serves = library.get("targets", {}).get(name, ("off", "unknown"))
    return TargetOutlook(name, version, state, serves)


# --- Sections that need no other process -------------------------------------------------------------------------


def _guard(found: Examination, name: str, look: Callable[[], T], otherwise: T) -> T:
    try:
        return look()
    # Policy: a report about what is broken must not break on it.
    except Exception as error:
        found.problems.append(f"{name}: {line_of(error)}")
        return otherwise


def _guarded(found: Examination, name: str, look: Callable[[Examination], None]) -> None:
    _guard(found, name, lambda: look(found), None)


def _versions(found: Examination) -> None:
    found.accel = accel.__version__
    found.location = str(Path(accel.__file__).resolve().parent)
    found.python = f"{platform.python_version()} ({sys.executable})"
    found.system = platform.platform()
    found.versions = {name: version for name in DISTRIBUTIONS if (version := _version(name)) is not None}


def _version(distribution: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    except Exception as error:  # damaged metadata
        return f"unreadable: {line_of(error)}"


def _settings(found: Examination) -> None:
    for variable in settings.describe():
        value = os.environ.get(variable.name, "").strip()
        if not value:
            found.defaults[variable.name] = variable.default
            continue
        found.variables[variable.name] = value
        others = {name: value for name, value in os.environ.items() if not name.startswith(settings.PREFIX)}
        try:
            settings.read({**others, variable.name: value})
        except ValueError as error:
            found.problems.append(str(error))
    for name in FOREIGN:
        if name in os.environ:
            found.variables[name] = os.environ[name]
    found.problems += settings.unknown_names()
    wanted = found.variables.get("ACCEL_TARGETS")
    if wanted:
        from .targets import resolve

        try:
            resolve(wanted)
        except ValueError as error:
            found.problems.append(f"ACCEL_TARGETS={wanted!r}: {error}")


def _cache(found: Examination) -> None:
    from accel.kernels.runtime import cache

    problem = cache.problem()
    if problem is not None:
        found.cache = problem
        found.problems.append(f"kernel cache: {problem}")
        return
    entries = cache.entries()
    size = sum(entry.path.stat().st_size for entry in entries)
    found.cache = f"{cache.folder()}: {len(entries)} kernels, {size / 2**20:.1f} MiB"


def _start_up(found: Examination) -> None:
    import importlib.metadata

    doors = []
    if any(
        Path(folder, "accel_autoload.pth").is_file() for folder in (*site.getsitepackages(), site.getusersitepackages())
    ):
        doors.append("accel_autoload.pth, when Python starts")
    points = importlib.metadata.entry_points(group="torch.backends")
    if any(point.value.startswith("accel.") for point in points):
        off = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0"
        doors.append(f"torch's entry point, at the end of `import torch`{' (switched off here)' if off else ''}")
    found.start_up = "; ".join(doors) or "only `python -m accel run`: accel is not installed"


SECTIONS: dict[str, Callable[[Examination], None]] = {
    "versions": _versions,
    "settings": _settings,
    "cache": _cache,
    "start-up": _start_up,
}


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        answer = None
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not answer"
    if answer is not None:
        said = " ".join((answer.stdout if answer.returncode == 0 else answer.stdout + answer.stderr).split())
        return said or f"nvidia-smi failed with exit code {answer.returncode}"
    module = Path("/proc/driver/nvidia/version")
    return module.read_text().splitlines()[0] if module.is_file() else "no NVIDIA driver"


def _certificates(found: Examination) -> None:
    from . import certificates

    for place, folder in (("shipped", certificates.shipped_folder()), ("your own", certificates.user_folder())):
        for path in sorted(folder.glob("*.json")):
            try:
                held = certificates.read(path)
            except (OSError, ValueError) as error:
                found.problems.append(str(error))
                continue
            valid = [c for c in held if c == certificates.find(c.family, c.kernel, c.arch) and c.failure is None]
            names = ", ".join(f"{c.family}.{c.kernel}" for c in valid) or "none"
            found.certificates.append(f"{path.stem}, {place}: valid {names}; of {len(held)}")


# --- Probes: each runs in a process of its own and prints one line of JSON ------------------------------------------

#: What stands for "each of transformers' modeling modules": the ones that have what a target patches.
REPRESENTATIVE = {
    "transformers.mlp": "transformers.models.llama.modeling_llama",
    "transformers.rms_norm": "transformers.models.llama.modeling_llama",
    "transformers.rms_norm_gated": "transformers.models.qwen3_next.modeling_qwen3_next",
    "transformers.gated_delta_rule": "transformers.models.qwen3_next.modeling_qwen3_next",
    "transformers.causal_conv1d": "transformers.models.qwen3_next.modeling_qwen3_next",
    "transformers.gated_delta_net": "transformers.models.qwen3_next.modeling_qwen3_next",
    "transformers.kda": "transformers.models.kimi_linear.modeling_kimi_linear",
}
_MARK = "accel-doctor:"


def probe(name: str) -> dict[str, Any]:
    """Look at torch or at a library in a new process; {"failed": line} if that did not work."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from accel import doctor; doctor.probed({name!r})"
    environ = {k: v for k, v in os.environ.items() if k not in ("ACCEL_TARGETS", "ACCEL_STRICT")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False, env=environ
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"the import takes longer than {PATIENCE:.0f} s"}
    except OSError as error:
        return {"failed": line_of(error)}
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if answers:
        answer: dict[str, Any] = json.loads(answers[-1][len(_MARK) :])
        return answer
    if done.returncode < 0:
        return {"failed": f"the process died of signal {-done.returncode}"}
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return {"failed": f"the process ended with exit code {done.returncode}{f': {said[-1].strip()}' if said else ''}"}


def probed(name: str) -> None:
    """The other side of `probe`."""
    try:
        if name == "torch":
            answer = _probe_torch()
        elif name == "compiler":
            answer = _probe_compiler()
        else:
            answer = _probe_library(name)
    except Exception as error:
        answer = {"failed": line_of(error)}
    print(f"\n{_MARK}{json.dumps(answer)}", flush=True)


def _probe_torch() -> dict[str, Any]:
    import torch

    if torch.version.cuda is None:
        return {"cuda": "torch is built without CUDA", "devices": [_processor()]}
    try:
        torch.empty(1, device="cuda")
        devices = [_device(index) for index in range(torch.cuda.device_count())]
    except Exception as error:
        return {"cuda": f"{torch.version.cuda}, not usable: {line_of(error)}", "devices": [_processor()]}
    return {"cuda": f"{torch.version.cuda}, works", "devices": devices}


def _probe_compiler() -> dict[str, Any]:
    import importlib

    for module in COMPILER[1:]:
        importlib.import_module(module)
    return {}


def _processor() -> dict[str, Any]:
    return {"name": platform.processor() or platform.machine(), "arch": "cpu", "memory_gib": None}


def _device(index: int) -> dict[str, Any]:
    import torch

    from accel.kernels.runtime.arch import cuda_arch

    of = torch.cuda.get_device_properties(index)
    torch.empty(1, device=f"cuda:{index}")  # a context that cannot be made shows here
    return {"name": of.name, "arch": cuda_arch(index), "memory_gib": round(of.total_memory / 2**30, 1)}


def _probe_library(group: str) -> dict[str, Any]:
    import importlib

    from .activation import accelerate
    from .state import STATES

    targets = [target for target in TARGETS if target.group == group]
    for module in dict.fromkeys(module for target in targets for module in _modules(target.name, target.modules)):
        importlib.import_module(module)
    import torch

    accelerate([target.name for target in targets])
    archs = {"cpu"}
    if torch.cuda.is_available():
        from accel.kernels.runtime.arch import cuda_arch

        archs = {cuda_arch(index) for index in range(torch.cuda.device_count())}
    found = {}
    for target in targets:
        state = STATES[target.name]
        found[target.name] = (state.state, "; ".join(_serves(state, arch) for arch in sorted(archs)))
    return {"targets": found}


def _modules(name: str, modules: tuple[str, ...]) -> tuple[str, ...]:
    return (REPRESENTATIVE[name],) if name in REPRESENTATIVE else modules


def _serves(state: Any, arch: str) -> str:
    """Which kernels would serve the families that the target's adapters ask, in how many of the families' own cases."""
    from .serve import calls_of

    adapters = [call.adapter for call in calls_of(state)]
    families = sorted({family for adapter in adapters for family in getattr(adapter, "families", (adapter.family,))})
    if not families:
        return f"{arch}: nothing is patched"
    return "; ".join(f"{arch}: {_family(family, arch)}" for family in families)


def _family(family: str, arch: str) -> str:
    import importlib.util
    from collections import Counter

    from . import certificates
    from .outcome import Choice

    if importlib.util.find_spec(f"accel.kernels.{family}") is None:
        return "plain torch, for CPU tensors"
    try:
        cases = importlib.import_module(f"accel.kernels.{family}.cases").CASES
        plan = importlib.import_module(f"accel.kernels.{family}.plan").plan
    except (ImportError, AttributeError):
        return f"no {family} kernel yet"
    kernels: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    asked = [case.facts for case in cases if getattr(case, "facts", None) is not None]
    for facts in asked:
        decision = plan(facts, arch)
        refusal = certificates.check(decision, arch) if isinstance(decision, Choice) else decision
        if refusal is None:
            kernels[decision.kernel] += 1
        else:
            reasons[refusal.reason] += 1
    if kernels:
        served = ", ".join(kernel for kernel, _ in kernels.most_common())
        return f"{served}, {sum(kernels.values())}/{len(asked)} cases"
    return reasons.most_common(1)[0][0] if reasons else f"{family} names no cases"


def line_of(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


# --- The command line ----------------------------------------------------------------------------------------------


def command(*, as_json: bool = False) -> int:
    """`accel doctor`."""
    from rich.console import Console

    if as_json:
        print(json.dumps(dataclasses.asdict(examine()), indent=1))
        return 0
    console = Console()
    with console.status("looking at torch and the libraries, each in a process of its own"):
        found = examine()
    _print(found, console)
    return 0


def _print(found: Examination, console: Any) -> None:
    from rich.markup import escape
    from rich.table import Table

    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    rows = [
        ("accel", f"{found.accel} in {found.location}"),
        ("ACCEL_TARGETS reaches", found.start_up),
        ("python", found.python),
        ("system", found.system),
        ("driver", found.driver),
        ("torch's CUDA", found.cuda),
        *(("device", f"{d.name}, {d.arch}{f', {d.memory_gib} GiB' if d.memory_gib else ''}") for d in found.devices),
        ("versions", ", ".join(f"{name} {version}" for name, version in found.versions.items())),
        ("imports", ", ".join(f"{name}: {line}" for name, line in found.imports.items())),
        ("set", ", ".join(f"{name}={value}" for name, value in found.variables.items()) or "no variable"),
        ("kernel cache", found.cache),
        ("certificates", "\n".join(found.certificates) or "none"),
    ]
    for name, value in rows:
        facts.add_row(name, escape(value))
    console.print(facts)
    table = Table(box=None, pad_edge=False)
    table.add_column("target", no_wrap=True)
    table.add_column("patched", overflow="fold")
    table.add_column("would serve", overflow="fold")
    for target in found.targets:
        table.add_row(*(escape(part) for part in (target.name, target.patched, target.serves)))
    console.print()
    console.print(table)
    for problem in found.problems:
        console.print(f"[red]problem[/] {escape(problem)}", soft_wrap=True)


def command_status(*, as_json: bool = False) -> int:
    """`accel status`: the targets table, and what would be on here. Imports neither torch nor an upstream."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    wanted = os.environ.get("ACCEL_TARGETS", "").strip()
    rows = [_status_row(target.name, wanted) for target in TARGETS]
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, no_wrap=name == "target", overflow="fold")
    for row in rows:
        table.add_row(*(escape(value) for value in row.values()))
    console = Console()
    console.print(table)
    console.print(f"\nat start: in a new process, by ACCEL_TARGETS={wanted or '(not set)'}", markup=False)
    return 0


def _status_row(name: str, wanted: str) -> dict[str, str]:
    from .targets import BY_NAME, resolve

    target = BY_NAME[name]
    here = installed(target.group)
    default = "on, without a GPU" if target.without_gpu else "on"
    try:
        at_start = "on" if wanted and target in resolve(wanted) else "off"
    except ValueError:
        at_start = "off: a name is unknown"
    return {
        "target": name,
        "alias": target.alias or "",
        "library": here.problem or here.version or "",
        "default": "off" if here.problem or not target.default else default,
        "at start": "off" if here.problem else at_start,
        "replaces": target.summary.replace("`", ""),
    }
