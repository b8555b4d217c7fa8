"""Every target: one switch a user can name, what it replaces, and which upstream module brings it in.

The table is plain data: reading it imports neither torch nor an upstream. The adapter of a target is imported when one
of its modules is.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """One switch. `modules` are the exact upstream modules after whose import the adapter patches."""

    name: str  #: "<group>.<op>"; the group is the upstream library's import name
    alias: str | None  #: names every target of one op across the libraries
    summary: str  #: what is replaced, for the targets table
    adapter: str  #: module under accel.patches with `patch(module, target)` and `adapters()`
    modules: tuple[str, ...] = ()
    every_model: bool = False  #: also each of transformers' modeling modules, and remote code
    default: bool = True
    without_gpu: bool = False  #: by default only on a machine without a GPU

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]


# FLA 0.5.2 fills its backend registries when the `backends` modules are imported, at the first dispatched call.
_CHUNK_GDN = ("fla.ops.gated_delta_rule.chunk", "fla.ops.gated_delta_rule.backends")
_CHUNK_KDA = ("fla.ops.kda.chunk", "fla.ops.kda.backends")

TARGETS: tuple[Target, ...] = (
    Target("fla.gated_delta_rule", "gdn", "`chunk_gated_delta_rule`", "fla.gated_delta_rule", _CHUNK_GDN),
    Target(
        "fla.fused_recurrent_gated_delta_rule",
        "gdn",
        "`fused_recurrent_gated_delta_rule`",
        "fla.gated_delta_rule",
        ("fla.ops.gated_delta_rule.fused_recurrent",),
    ),
    Target("fla.kda", "kda", "`chunk_kda`", "fla.kda", _CHUNK_KDA),
    Target("fla.fused_recurrent_kda", "kda", "`fused_recurrent_kda`", "fla.kda", ("fla.ops.kda.fused_recurrent",)),
    Target("fla.gated_mlp", "mlp", "`GatedMLP.forward`", "fla.gated_mlp", ("fla.modules.mlp",)),
    Target(
        "fla.cpu",
        None,
        "FLA's other Triton ops, in plain torch, for CPU tensors",
        "fla.cpu",
        ("fla.modules", "fla.ops.attnres"),
        without_gpu=True,
    ),
    Target(
        "transformers.sdpa",
        "sdpa",
        'the `"sdpa"` entry of `AttentionInterface`',
        "transformers.attention",
        ("transformers.modeling_utils",),
    ),
    Target(
        "transformers.mlp",
        "mlp",
        "every class whose forward is the plain gated MLP",
        "transformers.mlp",
        every_model=True,
    ),
    Target(
        "transformers.rms_norm",
        "norm",
        "the RMSNorm classes, canonical forms",
        "transformers.norm",
        every_model=True,
    ),
    Target(
        "transformers.rms_norm_gated",
        "norm",
        "the gated RMSNorm classes, canonical forms",
        "transformers.norm",
        every_model=True,
    ),
    Target(
        "transformers.gated_delta_rule",
        "gdn",
        "`torch_chunk_gated_delta_rule`, `torch_recurrent_gated_delta_rule`",
        "transformers.linear_attention",
        every_model=True,
    ),
    Target(
        "transformers.kda",
        "kda",
        "`chunk_kimi_delta_attention`, `recurrent_kimi_delta_attention`",
        "transformers.linear_attention",
        every_model=True,
    ),
    Target(
        "transformers.causal_conv1d",
        "conv",
        "`causal_conv1d_fn`, `causal_conv1d_update`, where they are transformers' own torch code",
        "transformers.conv",
        every_model=True,
    ),
    Target(
        "transformers.gated_delta_net",
        "gdn",
        "the whole GatedDeltaNet module of Qwen3-Next, Qwen3.5 and OLMo hybrid",
        "transformers.gated_delta_net",
        every_model=True,
    ),
    Target(
        "diffusers.sdpa",
        "sdpa",
        "the `native` entry of the attention registry",
        "diffusers.attention",
        ("diffusers.models.attention_dispatch",),
    ),
)

BY_NAME = {target.name: target for target in TARGETS}
GROUPS = tuple(dict.fromkeys(target.group for target in TARGETS))
ALIASES = tuple(dict.fromkeys(target.alias for target in TARGETS if target.alias))


def names_of(names: str | Iterable[str]) -> list[str]:
    """The names in a request: one string with commas, or an iterable of them.

    Raises TypeError for anything but strings, and ValueError for a request that names nothing.
    """
    if isinstance(names, str):
        names = names.split(",")
    found = []
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a target is named by a string, got {name!r}")
        found += [part.strip() for part in name.split(",") if part.strip()]
    if not found:
        raise ValueError("no target named; leave `targets` out for every default, or call restore() to switch off")
    return found


def members(name: str) -> list[Target]:
    """The targets that a name, group, alias or "all" stands for, in table order. Raises ValueError if it is unknown."""
    found = [t for t in TARGETS if name in (t.name, t.alias) or (t.default and name in (t.group, "all"))]
    if not found:
        raise ValueError(
            f"unknown target {name!r}. Targets: {', '.join(BY_NAME)}; "
            f"groups: {', '.join(GROUPS)}, all; aliases: {', '.join(ALIASES)}"
        )
    return found


def resolve(names: str | Iterable[str]) -> list[Target]:
    """Targets named by `names`: target names, groups, aliases, or "all" (every default), in table order.

    Raises TypeError for anything but strings and ValueError for an unknown or empty request, listing what is known.
    """
    wanted = {target.name for name in names_of(names) for target in members(name)}
    return [target for target in TARGETS if target.name in wanted]


@dataclass(frozen=True, slots=True)
class Installed:
    """An upstream library as found: its version, or why it cannot be patched."""

    version: str | None
    problem: str | None


def installed(group: str) -> Installed:
    """Whether the library of `group` is installed in a supported version, as sys.path is now. Imports nothing of it."""
    import importlib.metadata  # imports the email package: 15 ms

    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    package = importlib.import_module(f"accel.patches.{group}.package")
    try:
        spec = importlib.util.find_spec(package.IMPORT_NAME)
    except (ImportError, ValueError) as error:
        return Installed(None, f"{package.IMPORT_NAME} cannot be looked up: {error}")
    if spec is None:
        return Installed(None, f"{package.IMPORT_NAME} is not installed")
    for distribution in package.DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(distribution)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    else:
        return Installed(None, f"{package.IMPORT_NAME} carries no version (no metadata of {package.DISTRIBUTIONS[0]})")
    try:
        supported = SpecifierSet(package.SUPPORTED).contains(Version(version), prereleases=True)
    except InvalidVersion:
        supported = False
    if not supported:
        return Installed(version, f"{distribution} {version} is outside the supported range {package.SUPPORTED}")
    return Installed(version, None)


def modules_of(target: Target) -> tuple[str, ...]:
    """The exact names of the modules after whose import `target` patches. Lists folders, imports nothing."""
    return target.modules + (_modeling_modules() if target.every_model else ())


def _modeling_modules() -> tuple[str, ...]:
    """transformers' modeling modules, read off the installed folder."""
    try:
        spec = importlib.util.find_spec("transformers")
    except (ImportError, ValueError):
        return ()
    if spec is None or not spec.submodule_search_locations:
        return ()
    return _modeling_modules_in(next(iter(spec.submodule_search_locations)))


@cache
def _modeling_modules_in(folder: str) -> tuple[str, ...]:
    return tuple(
        f"transformers.models.{path.parent.name}.{path.stem}"
        for path in sorted(Path(folder, "models").glob("*/modeling_*.py"))
    )
