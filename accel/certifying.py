"""`accel certify [family]`: run a family's cases on the GPU at hand and write what they showed as certificates.

The two sides meet here. kernels/<family>/cases.py offers `CASES` (each with `name`, `kernels`, `facts`, `make`, `run`,
`oracle`, and `choice(arch)` where the plan alone does not decide) and `portable(case, inputs)`; an adapter below
patches/ that states `CERTIFIES = "<family>"` offers `upstream(case)`, a function that computes the same outputs by
upstream's own code, or None. Where no upstream has the case, refuses it or is known to be wrong (`case.known(inputs)`
says why), the fp32 portable path is the yardstick.

Every case runs on fresh random inputs of several seeds. A kernel passes if on all of them every output and gradient
meets the accuracy rule (accel.testing.accuracy), is the same bit for bit in a second run, and no input was changed;
memory that the outputs are likely to get is filled with NaN beforehand.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import importlib.util
import inspect
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import certificates
from .certificates import Certificate
from .outcome import Declined
from .source_hash import device_files, kernels_folder, source_hash
from .testing import Accuracy, accuracy

ROUNDS = 3  #: seeds per case
_LIBRARIES = ("fla", "transformers", "diffusers")
_POOLS = (1 << 16, 1 << 20, 1 << 26)  #: bytes; torch's CUDA allocator splits requests off blocks of about these sizes

Outputs = dict[str, Tensor]
Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case on one seed."""

    case: str
    seed: int
    kernels: tuple[str, ...]  #: what was exercised
    yardstick: str  #: "transformers.norm", or "portable"
    outputs: Mapping[str, Accuracy] = field(default_factory=dict)
    failure: str | None = None
    note: str | None = None  #: why portable played upstream's part, where an upstream exists


@dataclass(slots=True)
class FamilyResult:
    """What `certify` found for one family on one dispatch architecture."""

    family: str
    arch: str
    results: list[CaseResult] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  #: case -> why it was not run here
    certificates: list[Certificate] = field(default_factory=list)  #: one per kernel, failed ones included

    @property
    def failed(self) -> list[Certificate]:
        return [c for c in self.certificates if c.failure is not None]


def families() -> tuple[str, ...]:
    """The kernel families that need certificates: those with device code and cases."""
    root = kernels_folder()
    found = (path.parent.name for path in root.glob("*/cases.py"))
    return tuple(sorted(name for name in found if device_files(root, name)))


def certify(
    names: Iterable[str] | None = None,
    *,
    device: torch.device | str | None = None,
    arch: str | None = None,
    seed: int | None = None,
    rounds: int = ROUNDS,
    progress: Callable[[str, CaseResult | str], None] | None = None,
) -> list[FamilyResult]:
    """Measure families, or single kernels ("family.kernel"), on `device` (default: the current CUDA device).

    Nothing is written. Without `names`: every family.

    `arch`: the dispatch architecture whose kernels are meant, where it is not the device's own: an older class, which
    then runs compiled for this device. `seed` starts the seeds; without it every run draws its own. `progress` is
    called with (case name, its result or why it was skipped). A device file that no plan chooses has no certificate of
    its own: it counts as the source of those that import it. Raises ValueError for an unknown family or kernel and
    RuntimeError without a GPU.
    """
    chosen = [name.partition(".") for name in (families() if names is None else names)]
    unknown = [family for family, _, _ in chosen if family not in families()]
    if unknown:
        raise ValueError(f"no kernel family {', '.join(map(repr, unknown))} to certify; there is {_listed(families())}")
    for family, _, kernel in chosen:
        known = [path.stem for path in device_files(kernels_folder(), family)]
        if kernel and kernel not in known:
            raise ValueError(f"no kernel {kernel!r} in {family} to certify; there is {_listed(known)}")
    if device is None:
        if not torch.cuda.is_available():
            raise RuntimeError("certificates are made on the GPU they are for, and torch finds no CUDA device here")
        device = torch.device("cuda", torch.cuda.current_device())
    device = torch.device(device)
    own = arch_of(device)
    first = secrets.randbelow(1 << 31) if seed is None else seed
    found = []
    for family, _, kernel in chosen:
        seeds = range(first, first + rounds)
        found.append(_certify_family(family, kernel or None, arch or own, own, device, seeds, progress))
    return found


def arch_of(device: torch.device) -> str:
    """Dispatch architecture of a device."""
    from accel.kernels.runtime.arch import dispatch_arch

    return str(dispatch_arch(device))


def _certify_family(
    family: str,
    only: str | None,
    arch: str,
    own_arch: str,
    device: torch.device,
    seeds: range,
    progress: Callable[[str, CaseResult | str], None] | None,
) -> FamilyResult:
    found = FamilyResult(family, arch)
    module = importlib.import_module(f"accel.kernels.{family}.cases")
    plan = importlib.import_module(f"accel.kernels.{family}.plan").plan
    sides = yardsticks(family)
    for case in module.CASES:
        choice = case.choice(arch) if hasattr(case, "choice") else plan(case.facts, arch)
        kernels = () if isinstance(choice, Declined) else (choice.kernel, choice.backward)
        kernels = tuple(dict.fromkeys(k for k in kernels if k is not None and k not in certificates.UNCERTIFIED))
        if not kernels:
            reason = choice.reason if isinstance(choice, Declined) else f"served by {choice.kernel}"
            found.skipped[case.name] = reason
            if progress:
                progress(case.name, reason)
            continue
        if only not in (None, *kernels):
            continue
        run = case.run if arch == own_arch else _for_arch(case.run, arch)
        for seed in seeds:
            try:
                result = run_case(case, kernels, run, sides, module.portable, device, seed)
            except torch.OutOfMemoryError:
                found.skipped[case.name] = reason = f"does not fit this device's memory (seed {seed})"
                if progress:
                    progress(case.name, reason)
                _release(device)
                break
            found.results.append(result)
            if progress:
                progress(case.name, result)
            if result.failure is not None:
                break
        _release(device)
    found.certificates = [c for c in _certificates(found, device, seeds) if only in (None, c.kernel)]
    return found


def run_case(
    case: Any,
    kernels: tuple[str, ...],
    run: Callable[[Inputs], Outputs],
    sides: Iterable[tuple[str, Callable[[Any], Callable[[Inputs], Outputs] | None]]],
    portable: Callable[[Any, Inputs], Outputs],
    device: torch.device,
    seed: int,
) -> CaseResult:
    """One case on one seed. Out of memory is raised, everything else that goes wrong on our side is a failure."""

    def make() -> Inputs:
        made: Inputs = case.make(device, torch.Generator().manual_seed(seed))
        return made

    in_place = getattr(case, "in_place", False)
    inputs = make()
    oracle = case.oracle(inputs)
    name, theirs, note = _yardstick(case, make if in_place else lambda: inputs, sides, portable, set(oracle))

    def failed(reason: str) -> CaseResult:
        return CaseResult(case.name, seed, kernels, name, failure=reason, note=note)

    copies = {} if in_place else {key: _memory(t).clone() for key, t in inputs.items() if isinstance(t, Tensor)}
    runs: list[Outputs] = []
    for _ in range(2 if getattr(case, "deterministic", True) else 1):
        given = make() if in_place else inputs
        _poison(theirs.values(), device)
        try:
            runs.append(run(given))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return failed(f"{type(error).__name__}: {' '.join(str(error).split())}")
    ours = runs[0]
    if set(ours) != set(oracle) or set(theirs) != set(oracle):
        return failed(f"outputs {_listed(ours)}; the oracle has {_listed(oracle)}, the yardstick {_listed(theirs)}")
    changed = [key for key, memory in copies.items() if not torch.equal(memory, _memory(inputs[key]))]
    if changed:
        return failed(f"input {_listed(changed)} was changed by the call, or memory beside it")
    varying = [key for key in ours if not torch.equal(_bits(ours[key]), _bits(runs[-1][key]))]
    if varying:
        return failed(f"{_listed(varying)} differs between two runs on the same input")
    exact: frozenset[str] = getattr(case, "exact", frozenset())
    outputs = {}
    for key, value in ours.items():
        if key in exact and not torch.equal(_bits(value), _bits(oracle[key].to(value.device, value.dtype))):
            return failed(f"{key}: is not equal to the oracle, bit for bit")
        outputs[key] = accuracy(value, theirs[key], oracle[key])
    wrong = "; ".join(f"{key}: {verdict.reason}" for key, verdict in outputs.items() if not verdict.ok)
    return CaseResult(case.name, seed, kernels, name, outputs, wrong or None, note)


def yardsticks(family: str) -> list[tuple[str, Callable[[Any], Callable[[Inputs], Outputs] | None]]]:
    """(name, `upstream`) of each adapter for the family whose library is installed, in the order of preference.

    The adapters' text is read first, so that only the modules in question are imported.
    """
    root = Path(next(iter(importlib.import_module("accel.patches").__path__)))
    stated = re.compile(rf"^CERTIFIES\s*(?::[^=]+)?=\s*['\"]{re.escape(family)}['\"]", re.MULTILINE)
    found = []
    for library in _LIBRARIES:
        for path in sorted((root / library).glob("*.py")):
            if stated.search(path.read_text(encoding="utf-8")) and importlib.util.find_spec(library):
                module = importlib.import_module(f"accel.patches.{library}.{path.stem}")
                found.append((f"{library}.{path.stem}", module.upstream))
    return found


def _yardstick(
    case: Any,
    make: Callable[[], Inputs],
    sides: Iterable[tuple[str, Callable[[Any], Callable[[Inputs], Outputs] | None]]],
    portable: Callable[[Any, Inputs], Outputs],
    wanted: set[str],
) -> tuple[str, Outputs, str | None]:
    """(name, outputs, note): the first upstream that computes the case, else the portable path."""
    known = getattr(case, "known", None)
    note = known(make()) if known is not None else None
    for name, upstream in () if note else sides:
        function = upstream(case)
        if function is None:
            continue
        try:
            theirs = function(make())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            note = f"{name} refuses the case: {type(error).__name__}: {' '.join(str(error).split())}"
            continue
        if set(theirs) != wanted:
            theirs = {**portable(case, make()), **theirs}
        return name, theirs, None
    return "portable", portable(case, make()), note


def _certificates(found: FamilyResult, device: torch.device, seeds: range) -> list[Certificate]:
    """One certificate per kernel that a case exercised; a kernel fails with any of its cases."""
    cuda = device.type == "cuda"
    made = []
    for kernel in sorted({kernel for result in found.results for kernel in result.kernels}):
        mine = [result for result in found.results if kernel in result.kernels]
        failures = [f"{r.case}, seed {r.seed}: {r.failure}" for r in mine if r.failure is not None]
        verdicts = [(f"{r.case}: {name}", a) for r in mine for name, a in r.outputs.items()]
        error_at, error = max(verdicts, key=lambda v: v[1].error_ratio, default=("", None))
        largest_at, largest = max(verdicts, key=lambda v: v[1].largest_ratio, default=("", None))
        made.append(
            Certificate(
                family=found.family,
                kernel=kernel,
                arch=found.arch,
                source=source_hash(found.family, kernel),
                dsl=certificates.dsl_version() or "none",
                device=torch.cuda.get_device_name(device) if cuda else "cpu",
                torch=torch.__version__,
                date=datetime.date.today().isoformat(),
                seeds=tuple(seeds),
                cases=tuple(dict.fromkeys(r.case for r in mine)),
                yardsticks=tuple(sorted({r.yardstick for r in mine})),
                worst_error=_finite(error.error_ratio) if error else 0.0,
                worst_error_at=error_at,
                worst_largest=_finite(largest.largest_ratio) if largest else 0.0,
                worst_largest_at=largest_at,
                failure=failures[0] if failures else None,
            )
        )
    return made


def _for_arch(run: Callable[..., Outputs], arch: str) -> Callable[[Inputs], Outputs]:
    if "arch" not in inspect.signature(run).parameters:
        raise ValueError(f"these cases run the kernels of the device at hand only, not those of {arch}")
    return lambda inputs: run(inputs, arch=arch)


def _poison(like: Iterable[Tensor], device: torch.device) -> None:
    """Fill and free memory of the outputs' sizes, so that what a kernel forgets to write shows up as NaN."""
    sizes = [t.numel() * t.element_size() for t in like]
    pools = _POOLS if device.type == "cuda" else ()
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in (*sizes, *sizes, *pools)]
    del blocks


def _bits(value: Tensor) -> Tensor:
    """A copy of a tensor's content as bytes: equal for equal NaNs, different for 0 and -0."""
    flat = value.detach().reshape(-1)
    return (flat if flat.data_ptr() != value.data_ptr() else flat.clone()).view(torch.uint8)


def _memory(value: Tensor) -> Tensor:
    """All bytes of the memory a tensor lies in, those between and around the elements of a view too."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _finite(value: float) -> float:
    """JSON knows no infinity."""
    return round(min(value, 1e9), 4)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


# --- The command line ------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "family", nargs="*", help="kernel families, or single kernels as family.kernel; all families by default"
    )
    parser.add_argument("--seed", type=int, help="first of the seeds; drawn and printed by default")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"seeds per case (default {ROUNDS})")
    parser.add_argument("--arch", help="certify the kernels of another architecture, compiled for this GPU")
    parser.add_argument(
        "--into", type=Path, help="folder to write to (default: your cache folder; shipped ones: kernels/certificates)"
    )


def command(arguments: argparse.Namespace) -> int:
    """Certify and write; 0 if every kernel passed, 1 if one failed, 2 if nothing could be measured."""
    from rich.console import Console
    from rich.markup import escape

    import accel

    console = Console()
    accel.restore()  # upstream's own code is the yardstick
    first = secrets.randbelow(1 << 31) if arguments.seed is None else arguments.seed
    console.print(f"seeds {first} to {first + arguments.rounds - 1}: repeat with --seed {first}", highlight=False)
    with console.status("certifying") as status:

        def progress(case: str, result: CaseResult | str) -> None:
            status.update(f"certifying: {case}")
            if isinstance(result, str):
                console.print(f"[dim]  -   {escape(case)}: {escape(result)}")
            elif result.failure is not None:
                console.print(f"[red] FAIL [/]{escape(case)} (seed {result.seed}): {escape(result.failure)}")
            else:
                worst = max((a.error_ratio for a in result.outputs.values()), default=0.0)
                beside = f" [dim]({escape(result.note)})[/]" if result.note else ""
                console.print(f"[green]  ok  [/]{escape(case)}: {worst:.2f}x the error of {result.yardstick}{beside}")

        try:
            found = certify(
                arguments.family or None,
                arch=arguments.arch,
                seed=first,
                rounds=arguments.rounds,
                progress=progress,
            )
        except (RuntimeError, ValueError) as error:
            console.print(f"[red]{escape(str(error))}")
            return 2
    made = [certificate for family in found for certificate in family.certificates]
    if not made:
        console.print("no case's plan chose such a kernel here, so nothing was certified")
        return 2
    for certificate in made:
        verdict = "[green]certified[/]" if certificate.failure is None else "[red]failed[/]"
        worst = f"{certificate.worst_error:.2f}x ({escape(certificate.worst_error_at)})"
        console.print(
            f"{certificate.family}.{certificate.kernel} on {certificate.arch}: {verdict}, "
            f"{len(certificate.cases)} cases, worst {worst}"
        )
    for path in certificates.write(made, folder=arguments.into):
        console.print(f"written to {escape(str(path))}", soft_wrap=True)
    return 1 if any(certificate.failure for certificate in made) else 0
