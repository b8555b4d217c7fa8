"""Which kernels may serve: those measured on this architecture, with this source and this DSL.

A certificate says that a kernel's cases met the accuracy rule (accel.testing) on a GPU of one dispatch architecture. It
holds for the source hash it was made with and for the same minor version of the CuTe DSL. Certificates ship in
kernels/certificates/<arch>.json; `accel certify` (accel.certifying) writes the user's own to the cache folder, and
where both are for today's source the user's own decides, also when it records a failure.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from . import settings
from .outcome import Choice, Declined
from .source_hash import device_files, kernels_folder, source_hash

DSL = "nvidia-cutlass-dsl"
FORMAT = 1
UNCERTIFIED = frozenset({"portable"})  #: plain torch; needs no certificate

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was measured for one kernel on one dispatch architecture."""

    family: str
    kernel: str
    arch: str  #: dispatch architecture, e.g. "sm_90"
    source: str  #: source hash of the kernel
    dsl: str  #: version of nvidia-cutlass-dsl
    device: str
    torch: str
    date: str  #: ISO day
    seeds: tuple[int, ...]
    cases: tuple[str, ...]
    yardsticks: tuple[str, ...] = ()  #: what the cases were compared with, e.g. "transformers.norm", "portable"
    worst_error: float = 0.0  #: largest ratio of ours to upstream's relative error; at most 1.25
    worst_error_at: str = ""  #: "case: output"
    worst_largest: float = 0.0  #: largest ratio of ours to upstream's largest single difference; at most 2
    worst_largest_at: str = ""
    failure: str | None = None  #: the kernel did not pass: why


def check(choice: Choice, arch: str, *, uncertified: bool | None = None) -> Declined | None:
    """None if both kernels of `choice` may serve on dispatch architecture `arch`, else why not.

    `uncertified` (default: ACCEL_UNCERTIFIED) lets kernels without a valid certificate serve. Verdicts are remembered
    until `write` or `forget`.
    """
    kernels = [k for k in (choice.kernel, choice.backward) if k is not None and k not in UNCERTIFIED]
    if not kernels:
        return None
    if dsl_version() is None:
        return Declined(f"{choice.family} needs {DSL}, which is not installed: pip install 'accel-plugin[cuda]'")
    if uncertified is None:
        uncertified = settings.read().uncertified
    if uncertified:
        return None
    for kernel in kernels:
        reason = _verdict(choice.family, kernel, arch)
        if reason is not None:
            return Declined(reason)
    return None


def find(family: str, kernel: str, arch: str) -> Certificate | None:
    """The certificate that decides for this kernel as it is now: the user's own, else the shipped one; else None."""
    valid = [c for c in _known(family, kernel, arch) if _outdated(c) is None]
    return valid[0] if valid else None


def read(path: Path) -> list[Certificate]:
    """The certificates in a file, none if it does not exist. Raises ValueError naming the file if it is not one."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"{path} is no certificate file ({error}): delete it and run accel certify") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{path} is no certificate file of format {FORMAT}: delete it and run accel certify")
    try:
        return [_from_json(item) for item in data["certificates"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no certificate file ({error!r}): delete it and run accel certify") from None


def write(certificates: Iterable[Certificate], *, folder: Path | None = None) -> list[Path]:
    """Write certificates, replacing those that the files hold of the same kernels, and of kernels that are no more.

    Returns the files.
    `folder` defaults to the user's own. Raises OSError, or accel.kernels.runtime.cache.CacheRefusedError (others can
    write the user's folder).
    """
    if folder is None:
        from accel.kernels.runtime import cache as kernel_cache

        folder = user_folder()
        kernel_cache.prepare_folder(folder)
    new = list(certificates)
    written = []
    for arch in sorted({c.arch for c in new}):
        path = folder / file_name(arch)
        replaced = {(c.family, c.kernel) for c in new if c.arch == arch}
        try:
            kept = [c for c in read(path) if (c.family, c.kernel) not in replaced and _exists(c)]
        except ValueError as error:
            _log.warning("%s: its content is replaced", error)
            kept = []
        ordered = sorted([*kept, *(c for c in new if c.arch == arch)], key=lambda c: (c.family, c.kernel))
        data = {"format": FORMAT, "arch": arch, "certificates": [dataclasses.asdict(c) for c in ordered]}
        _replace(path, json.dumps(data, indent=1) + "\n")
        written.append(path)
    forget()
    return written


def shipped_folder() -> Path:
    return kernels_folder() / "certificates"


def user_folder() -> Path:
    return settings.read().cache_dir / "certificates"


def file_name(arch: str) -> str:
    """File of a dispatch architecture: "sm_90" -> "sm90.json"."""
    return f"{arch.replace('_', '')}.json"


@cache
def dsl_version() -> str | None:
    """Version of the installed CuTe DSL; None without one."""
    try:
        return importlib.metadata.version(DSL)
    except importlib.metadata.PackageNotFoundError:
        return None


def forget() -> None:
    """Read certificates, sources and versions anew at the next check."""
    for remembered in (_verdict, _file, dsl_version, source_hash):
        remembered.cache_clear()


@cache
def _verdict(family: str, kernel: str, arch: str) -> str | None:
    """Why the kernel may not serve on `arch`; None if it may."""
    name = f"{family}.{kernel} is not certified on {arch}"
    try:
        source_hash(family, kernel)
    except (OSError, ValueError, SyntaxError) as error:
        return f"{name}: its source cannot be read ({error})"
    known = _known(family, kernel, arch)
    outdated = [reason for reason in map(_outdated, known) if reason is not None]
    current = find(family, kernel, arch)
    if current is not None and current.failure is None:
        return None
    if current is not None:
        return f"{name}: it failed there on {current.date} ({current.failure})"
    return f"{name}{f' {outdated[0]}' if outdated else ''}: run accel certify {family}"


def _known(family: str, kernel: str, arch: str) -> list[Certificate]:
    """Every certificate of this kernel, the user's own first."""
    both = (*_file(arch, True), *_file(arch, False))
    return [c for c in both if (c.family, c.kernel, c.arch) == (family, kernel, arch)]


def _outdated(certificate: Certificate) -> str | None:
    """Why the certificate does not hold for what is installed, to follow "is not certified on sm_90"."""
    installed = dsl_version() or "none"
    if minor(certificate.dsl) != minor(installed):
        return f"with CuTe DSL {minor(installed)} (its certificate is for {minor(certificate.dsl)})"
    if certificate.source != source_hash(certificate.family, certificate.kernel):
        return "as its source is now (it changed after the certificate)"
    return None


def _exists(certificate: Certificate) -> bool:
    return certificate.kernel in {path.stem for path in device_files(kernels_folder(), certificate.family)}


def minor(version: str) -> str:
    """ "4.8.1" -> "4.8"."""
    return ".".join(version.split(".")[:2])


@cache
def _file(arch: str, own: bool) -> tuple[Certificate, ...]:
    """Content of the user's own file or of the shipped one; what cannot be trusted or read is logged and is none."""
    try:
        folder = user_folder() if own else shipped_folder()
        if own:
            from accel.kernels.runtime import cache as kernel_cache

            if not kernel_cache.check_folder(folder):
                return ()
        return tuple(read(folder / file_name(arch)))
    except Exception as error:  # CacheRefusedError, OSError, ValueError: the kernel then declines, and says so
        _log.warning("certificates are not used: %s", error)
        return ()


def _from_json(item: dict[str, Any]) -> Certificate:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in item.items()}
    certificate = Certificate(**values)
    for field in ("family", "kernel", "arch", "source", "dsl", "date"):
        if not isinstance(getattr(certificate, field), str):
            raise TypeError(f"{field}={getattr(certificate, field)!r}")
    return certificate


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
