"""Dispatch arch (what the GPU is) apart from compile target (what the code is built for).

Plans speak of the dispatch arch, "sm_90" or "cpu". A kernel written for an older class runs on a newer GPU when it is
compiled for that GPU's own target, because kernel classes never branch on the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

CPU = "cpu"
KIB = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What one SM offers a kernel."""

    smem_per_cta: int  #: bytes a CTA may ask for
    smem_per_sm: int  #: bytes shared by the CTAs of an SM, of which each costs smem_reserved more than it asks for
    smem_reserved: int = KIB
    threads_per_sm: int = 2048


_LARGE = Limits(227 * KIB, 228 * KIB)
_SMALL = Limits(99 * KIB, 100 * KIB, threads_per_sm=1536)
_LIMITS = {
    "sm_80": Limits(163 * KIB, 164 * KIB),
    "sm_86": _SMALL,
    "sm_89": _SMALL,
    "sm_90": _LARGE,
    "sm_100": _LARGE,
    "sm_103": _LARGE,
    "sm_120": _SMALL,
}
_TARGETS = {"sm_90": "sm_90a", "sm_100": "sm_100a", "sm_103": "sm_103a", "sm_120": "sm_120a"}


def limits(arch: str) -> Limits | None:
    """The limits of a dispatch arch; None: no kernel of ours is built for it."""
    return _LIMITS.get(arch)


def compile_target(arch: str) -> str:
    """The compile target for a dispatch arch: with the `a` suffix where the arch has one."""
    if arch not in _LIMITS:
        raise ValueError(f"no compile target for arch {arch!r}; known: {', '.join(_LIMITS)}")
    return _TARGETS.get(arch, arch)


def known_archs() -> tuple[str, ...]:
    return tuple(_LIMITS)


def archs_of(target: str) -> tuple[str, ...]:
    """The dispatch archs whose kernels are built for a compile target."""
    return tuple(arch for arch in _LIMITS if compile_target(arch) == target)


def overlaps(arch: str) -> bool:
    """Programmatic dependent launch exists from sm_90 on."""
    return arch not in ("sm_80", "sm_86", "sm_89")


@cache
def cuda_arch(index: int) -> str:
    """The dispatch arch of a CUDA device by index, e.g. "sm_90"."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def dispatch_arch(device) -> str:
    """The dispatch arch of a torch device; anything but a CUDA device is "cpu"."""
    if device.type != "cuda":
        return CPU
    index = device.index
    if index is None:
        import torch

        index = torch.cuda.current_device()
    return cuda_arch(index)
