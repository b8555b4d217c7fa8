"""The kernel runtime without a GPU: archs and targets, cache keys, compiling once, loading, and what goes wrong."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accel.kernels.norm.config import FwdConfig
from accel.kernels.runtime import arch as archs
from accel.kernels.runtime import cache
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime.launch import collapse_rows
from accel.outcome import Decline

ROOT = Path(__file__).resolve().parents[2]
TARGET = "sm_90a"
CONFIG = FwdConfig("bfloat16", "bfloat16", 64, "cast_then_weight", None, False, 2, 64, False)
KERNEL = runtime.Kernel("norm", "any_fwd", CONFIG)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and a process that has loaded nothing."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(folder))
    monkeypatch.setattr(runtime, "_functions", {})
    return folder


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets compiled for, in order."""
    done: list[str] = []
    compile_once = runtime._compile

    def counted(kernel: runtime.Kernel, target: str, options: str = "") -> object:
        done.append(target)
        return compile_once(kernel, target, options)

    monkeypatch.setattr(runtime, "_compile", counted)
    return done


# --- Archs ---------------------------------------------------------------------------------------------------------


def test_targets_of_dispatch_archs() -> None:
    assert [archs.compile_target(a) for a in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100")] == [
        "sm_80",
        "sm_86",
        "sm_89",
        "sm_90a",
        "sm_100a",
    ]
    with pytest.raises(ValueError, match="'sm_75'"):
        archs.compile_target("sm_75")


def test_shared_memory_limits() -> None:
    kib = {arch: archs.limits(arch).smem_per_cta // 1024 for arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100")}
    assert kib == {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227}
    assert archs.limits("sm_75") is None


def test_dispatch_arch_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert archs.dispatch_arch(torch.device("cpu")) == archs.dispatch_arch(torch.device("meta")) == "cpu"
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: asked.append(index) or (9, 0))
    archs.cuda_arch.cache_clear()
    try:
        assert [archs.dispatch_arch(torch.device("cuda", 1)) for _ in range(3)] == ["sm_90"] * 3
        assert asked == [1]
    finally:
        archs.cuda_arch.cache_clear()


# --- Keys ----------------------------------------------------------------------------------------------------------


def test_the_key_holds_everything_an_object_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    key = runtime.cache_key(KERNEL, TARGET)
    assert key == runtime.cache_key(replace(KERNEL, config=replace(CONFIG)), TARGET)
    other = {
        runtime.cache_key(KERNEL, "sm_80"),
        runtime.cache_key(replace(KERNEL, config=replace(CONFIG, rows_per_cta=32)), TARGET),
        runtime.cache_key(replace(KERNEL, module="any_bwd"), TARGET),
    }
    monkeypatch.setattr(runtime, "_versions", lambda: ("4.8.2", "0.1.12"))
    other.add(runtime.cache_key(KERNEL, TARGET))
    monkeypatch.setattr(runtime, "source_digest", lambda family, module: "0")
    other.add(runtime.cache_key(KERNEL, TARGET))
    assert len(other) == 5 and key not in other


def test_the_source_digest_follows_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fam").mkdir()
    (tmp_path / "blocks").mkdir()
    (tmp_path / "fam" / "any_fwd.py").write_text("from .rows import f\nfrom ..blocks import ring\nimport math\n")
    (tmp_path / "fam" / "rows.py").write_text("from accel.kernels.blocks.deep import g\n")
    (tmp_path / "fam" / "launch.py").write_text("host = 1\n")
    (tmp_path / "blocks" / "ring.py").write_text("")
    (tmp_path / "blocks" / "deep.py").write_text("a = 1\n")
    monkeypatch.setattr(runtime, "_KERNELS", tmp_path)

    def digest() -> str:
        runtime.source_digest.cache_clear()
        return runtime.source_digest("fam", "any_fwd")

    try:
        first = digest()
        for name in ("fam/rows.py", "blocks/ring.py", "blocks/deep.py"):
            path = tmp_path / name
            before = path.read_text()
            path.write_text(before + "b = 2\n")
            assert digest() != first, name
            path.write_text(before)
        (tmp_path / "fam" / "launch.py").write_text("host = 2\n")
        assert digest() == first
    finally:
        runtime.source_digest.cache_clear()


# --- Compiling and loading -----------------------------------------------------------------------------------------


def test_one_compilation_whatever_the_number_of_threads(fresh: Path, compilations: list[str]) -> None:
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(runtime.function(KERNEL, TARGET))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1
    assert compilations == [TARGET] and runtime.is_loaded(KERNEL, TARGET)
    assert any((fresh / "kernels").iterdir())


def test_a_loaded_function_checks_its_arguments(fresh: Path) -> None:
    function = runtime.function(KERNEL, TARGET)
    x, weight = torch.zeros(3, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match=r"mX.*expected device_type=cuda"):
        function(x, weight, x.clone(), 1e-6)


WARM_START = """
import sys, time
import accel
from accel.kernels.norm.config import FwdConfig
from accel.kernels.runtime import compile as runtime
config = FwdConfig("bfloat16", "bfloat16", 64, "cast_then_weight", None, False, 2, 64, False)
kernel = runtime.Kernel("norm", "any_fwd", config)
assert callable(runtime.function(kernel, "sm_90a"))
assert not [name for name in sys.modules if name.split(".")[0] == "cutlass"], "the compiler was imported"
"""


def test_a_warm_start_does_not_import_the_compiler(fresh: Path) -> None:
    runtime.function(KERNEL, TARGET)
    subprocess.run([sys.executable, "-c", WARM_START], check=True, cwd=ROOT)


def test_without_a_c_compiler_the_dsl_loads_the_object(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_c_compiler", lambda: None)
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        x = torch.zeros(3, 64, dtype=torch.bfloat16)
        runtime.function(KERNEL, TARGET)(x, x[0], x, 1e-6)


def test_an_entry_that_does_not_load_is_built_again(fresh: Path, compilations: list[str]) -> None:
    kernel = replace(KERNEL, config=replace(CONFIG, hidden=72))  # of this test alone: a process maps a library once
    key = runtime.cache_key(kernel, TARGET)
    for stored in (key, runtime._linked_key(key)):
        cache.store(stored, lambda path: path.write_bytes(b"not an object file"))
    assert callable(runtime.function(kernel, TARGET))
    assert compilations == [TARGET]


def test_filling_the_cache_loads_nothing(fresh: Path, compilations: list[str]) -> None:
    for target in ("sm_80", "sm_100a", "sm_80"):
        assert cache.load(runtime.build_object(KERNEL, target)) is not None
        assert not runtime.is_loaded(KERNEL, target)
    assert compilations == ["sm_80", "sm_100a"]


# --- What goes wrong -----------------------------------------------------------------------------------------------


def test_a_kernel_that_is_not_loaded_declines_during_capture(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_is_capturing", lambda: True)
    with pytest.raises(Decline, match=r"norm\.any_fwd is not loaded during graph capture"):
        runtime.function(KERNEL, TARGET)
    monkeypatch.setattr(runtime, "_functions", {(KERNEL, TARGET): print})
    assert runtime.function(KERNEL, TARGET) is print


def test_a_failed_compilation_names_the_kernel_and_the_target(fresh: Path) -> None:
    for kernel, target in ((KERNEL, "sm_42"), (replace(KERNEL, config=None), TARGET)):
        with pytest.raises(runtime.CompileError, match=rf"norm\.any_fwd.*does not compile for {target}"):
            runtime.function(kernel, target)
        assert not runtime.is_loaded(kernel, target)


# --- Rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "rows"),
    (
        ((7, 64), [(64, 1)], (7,)),
        ((2, 3, 64), [(192, 64, 1)], (6,)),
        ((2, 3, 64), [(384, 64, 1)], (2, 3)),
        ((2, 3, 64), [(192, 64, 1), (999, 64, 1)], (2, 3)),
        ((2, 1, 3, 64), [(192, 5, 64, 1)], (6,)),
        ((2, 3, 4, 64), [(3 * 512, 512, 64, 1)], (6, 4)),
        ((2, 3, 4, 64), [(4096, 512, 64, 1)], None),
        ((1, 1, 64), [(5, 7, 1)], (1,)),
        ((64,), [(1,)], (1,)),
        ((0, 3, 64), [(192, 64, 1)], (0,)),
        ((4, 6, 64), [(0, 0, 1)], (24,)),
    ),
)
def test_collapse_rows(shape: tuple[int, ...], strides: list[tuple[int, ...]], rows: tuple[int, ...] | None) -> None:
    assert collapse_rows(shape, strides) == rows
