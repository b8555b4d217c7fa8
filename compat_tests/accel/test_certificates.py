"""Certificates: the source hash, who may serve with which certificate, and how they are written."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel import certificates, source_hash
from accel.certificates import Certificate
from accel.outcome import Choice, Declined
from accel.source_hash import hash_files, serialise

# --- The source hash -------------------------------------------------------------------------------------------

#: Everything whose syntax tree differs between Python 3.10 and 3.13, or that the serialiser treats on its own.
SOURCE = '''
"""Module docstring."""
from __future__ import annotations
import a.b as c
from . import d

X: int = 1_000
Y = u"text", b"bytes", 1.5e3, 2j, None, True, ..., -1, "\\u0378\\N{SNOWMAN}"

def f(a, /, b: int = 1, *args, c=None, d, **kw) -> None:  # type: ignore
    """Docstring."""
    "not a docstring"
    x = {**a, None: b, "k": [*args]}
    s = f"{a!r:>{b}}" "and" f"{b=}{c:}" "" f"{{}}{d:.3f} tail"
    for i in range(3):  # type: int
        pass
    return lambda y=1: (z := y)

class C(Base, metaclass=M):
    """Only a docstring."""

async def g():
    async with (a as b, c):
        await d
    match x:
        case {"k": None, **rest} | [1, *_]:
            return x[1:2, ::3]
        case C(a=1) if b:
            del x
    try:
        pass
    except (E, F) as e:
        raise G from e
'''
DIGEST = "7a98d372ca50a954fb9436853e6f7827837239e7d49e20984cb66df9f50f5ccd"


def digest_of(source: str) -> str:
    return serialise(ast.parse(source))


def test_the_serialised_tree_is_the_same_on_every_python() -> None:
    """The digest was made on 3.11; this interpreter and every other one on the path must agree."""
    assert hashlib.sha256(digest_of(SOURCE).encode()).hexdigest() == DIGEST
    script = (
        "import sys, ast, hashlib, runpy; module = runpy.run_path(sys.argv[1]);"
        "print(hashlib.sha256(module['serialise'](ast.parse(sys.stdin.read())).encode()).hexdigest())"
    )
    for minor in range(10, 14):
        python = shutil.which(f"python3.{minor}")
        if python is not None:
            ran = subprocess.run(
                [python, "-c", script, source_hash.__file__], input=SOURCE, capture_output=True, text=True
            )
            if (
                ran.returncode == 0 or "Error" in ran.stderr
            ):  # a version manager's stub for a missing Python says neither
                assert ran.stdout.strip() == DIGEST, (python, ran.stderr)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("x = 1  # one", "x=1"),
        ("x = (1 + 2)", "x = 1 + 2"),
        ('x = "a"', "x = 'a'"),
        ('x = "a" "b"', 'x = "ab"'),
        ('x = u"a"', 'x = "a"'),
        ("x = 1000.0", "x = 1_000.0"),
        ("x = 0x10", "x = 16"),
        ('"""Doc."""\nx = 1', "x = 1"),
        ('def f():\n    """Doc."""\n    return 1', "def f(): return 1"),
        ('class C:\n    """Doc."""\n    x = 1', "class C:\n\n\n    x = 1"),
        ("async def f():\n    'Doc.'\n    return 1", "async def f():\n    return 1"),
        ("f(a,\n  b,\n)", "f(a, b)"),
        ('x = f"{a}" "b"', 'x = f"{a}b"'),
        ('x = f"{a:}"', 'x = f"{a}"'),
    ],
)
def test_comments_formatting_and_docstrings_do_not_count(left: str, right: str) -> None:
    assert digest_of(left) == digest_of(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("x = 1", "x = 2"),
        ("x = 1", "x = 1.0"),
        ("x = 1", "x = True"),
        ("x = '1'", "x = 1"),
        ("x = 'a'", "x = b'a'"),
        ("x = None", "x = ()"),
        ("x = a + b", "x = b + a"),
        ("x = a + b", "x = a - b"),
        ("x = a < b", "x = a <= b"),
        ("x = a[i]", "x = a[i,]"),
        ("x = [a]", "x = (a,)"),
        ("x = {**a}", "x = {None: a}"),
        ("f(a, b=c)", "f(a, c)"),
        ("f(*a)", "f(a)"),
        ("def f(a): pass", "def f(a=None): pass"),
        ("def f(*, a): pass", "def f(*, a=None): pass"),
        ("def f(a, b): pass", "def f(a, /, b): pass"),
        ("def f(): pass", "@g\ndef f(): pass"),
        ("def f(): pass", "def g(): pass"),
        ("def f(): return", "def f(): return None"),
        ("def f():\n  x = 1\n  'text'", "def f():\n  x = 1\n  'other'"),
        ("for i in a: pass", "async def f():\n  async for i in a: pass"),
        ("if a: b", "while a: b"),
        ("if a:\n  b\nc", "if a:\n  b\n  c"),
        ("x = f'{a!r}'", "x = f'{a}'"),
        ("x = f'{a:3}'", "x = f'{a:4}'"),
        ("x = f'{a}b'", "x = f'b{a}'"),
        ("from a import b", "from .a import b"),
        ("x: int = 1", "x = 1"),
    ],
)
def test_code_counts(left: str, right: str) -> None:
    assert digest_of(left) != digest_of(right)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A kernels folder with a family whose device code reaches into many files."""
    files = {
        "norm/__init__.py": "from .launch import go",
        "norm/any_fwd.py": (
            "from .any_rows import row\nfrom ..blocks import ring\nfrom ..runtime.compile import function\n"
            "def late():\n    from accel.kernels.shared import names\n"
        ),
        "norm/any_bwd.py": "from .config import WIDTH",
        "norm/sm90_fwd.py": "import accel.kernels.blocks.wgmma as wgmma\nimport torch, cutlass.cute as cute\n",
        "norm/any_rows.py": "from .config import WIDTH\nrow = 1",
        "norm/config.py": "WIDTH = 8",
        "norm/launch.py": "go = 1",
        "norm/plan.py": "plan = 1",
        "norm/reference.py": "x = 1",
        "norm/anyhow.py": "x = 1",
        "blocks/__init__.py": "",
        "blocks/ring.py": "from . import barrier\nx = 1",
        "blocks/barrier.py": "x = 1",
        "blocks/wgmma.py": "x = 1",
        "blocks/unused.py": "x = 1",
        "shared/__init__.py": "names = 1",
        "runtime/compile.py": "from . import cache",
        "runtime/cache.py": "x = 1",
    }
    for name, text in files.items():
        (tmp_path / "kernels" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "kernels" / name).write_text(text)
    return tmp_path / "kernels"


@pytest.mark.parametrize(
    "name",
    [
        "norm/any_fwd.py",
        "norm/sm90_fwd.py",
        "norm/any_rows.py",
        "norm/config.py",
        "blocks/ring.py",
        "blocks/barrier.py",
        "blocks/wgmma.py",
        "shared/__init__.py",
    ],
)
def test_device_files_and_all_they_import_count(root: Path, name: str) -> None:
    before = hash_files(root, "norm")
    text = (root / name).read_text()
    (root / name).write_text(f"# comment\n\n{text}\n")
    assert hash_files(root, "norm") == before
    (root / name).write_text(f"{text}\nadded = 1\n")
    assert hash_files(root, "norm") != before
    (root / name).write_text(text)
    assert hash_files(root, "norm") == before


def test_host_files_and_the_runtime_do_not_count(root: Path) -> None:
    before = hash_files(root, "norm")
    for name in ("norm/__init__", "norm/launch", "norm/plan", "norm/reference", "norm/anyhow", "blocks/unused"):
        (root / f"{name}.py").write_text("changed = 1")
    (root / "runtime" / "compile.py").write_text("changed = 1")
    (root / "runtime" / "cache.py").write_text("changed = 1")
    assert hash_files(root, "norm") == before


def test_a_new_device_file_and_a_renamed_one_count(root: Path) -> None:
    before = hash_files(root, "norm")
    (root / "norm/sm100_fwd.py").write_text("x = 1")
    added = hash_files(root, "norm")
    (root / "norm/sm100_fwd.py").rename(root / "norm/sm120_fwd.py")
    assert len({before, added, hash_files(root, "norm")}) == 3


def test_a_kernel_depends_on_what_it_imports_alone(root: Path) -> None:
    kernels = ("any_fwd", "any_bwd", "sm90_fwd")
    before = {kernel: hash_files(root, "norm", kernel) for kernel in kernels}
    assert len({*before.values(), hash_files(root, "norm")}) == 4
    for name, stale in (
        ("norm/any_fwd.py", {"any_fwd"}),
        ("norm/any_rows.py", {"any_fwd"}),
        ("norm/config.py", {"any_fwd", "any_bwd"}),
        ("blocks/wgmma.py", {"sm90_fwd"}),
    ):
        text = (root / name).read_text()
        (root / name).write_text(f"{text}\nadded = 1\n")
        assert {kernel for kernel in kernels if hash_files(root, "norm", kernel) != before[kernel]} == stale
        (root / name).write_text(text)
    with pytest.raises(ValueError, match=r"there is no device file launch\.py"):
        hash_files(root, "norm", "launch")


def test_a_family_in_plain_torch_has_no_source_hash(root: Path) -> None:
    with pytest.raises(ValueError, match="no device files"):
        hash_files(root, "blocks")


def test_real_device_code_reformatted_has_the_same_hash(tmp_path: Path) -> None:
    """What ast.unparse writes has no comments and another layout, and is the same code."""
    from accel.certifying import families

    real = source_hash.kernels_folder()
    copy = tmp_path / "kernels"
    shutil.copytree(real, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in copy.rglob("*.py"):
        path.write_text(ast.unparse(ast.parse(path.read_text(encoding="utf-8"))), encoding="utf-8")
    assert "norm" in families()
    for family in families():
        assert hash_files(copy, family) == hash_files(real, family) == source_hash.source_hash(family)


# --- Who may serve ---------------------------------------------------------------------------------------------

CHOICE = Choice("norm", "any_fwd", backward="any_bwd")


@pytest.fixture
def world(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of shipped certificates beside `root`'s family, an empty cache folder, and CuTe DSL 4.8.1."""
    monkeypatch.setattr(source_hash, "kernels_folder", lambda: root)
    monkeypatch.setattr(certificates, "kernels_folder", lambda: root)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ACCEL_UNCERTIFIED", raising=False)
    installed(monkeypatch, "4.8.1")
    certificates.forget()
    yield root / "certificates"
    certificates.forget()


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    import importlib.metadata

    real = importlib.metadata.version

    def answer(name: str) -> str:
        if name != certificates.DSL:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", answer)
    certificates.forget()


def certificate(kernel: str, **changes: object) -> Certificate:
    made = Certificate(
        "norm",
        kernel,
        "sm_90",
        source_hash.source_hash("norm", kernel) if changes.get("family", "norm") == "norm" else "f" * 64,
        "4.8.1",
        "NVIDIA H200",
        "2.11.0",
        "2026-12-01",
        (1, 2, 3),
        ("case",),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def both(**changes: object) -> list[Certificate]:
    return [certificate("any_fwd", **changes), certificate("any_bwd", **changes)]


def reason(choice: Choice = CHOICE, arch: str = "sm_90") -> str | None:
    certificates.forget()
    declined = certificates.check(choice, arch)
    return None if declined is None else declined.reason


def test_without_a_certificate_a_kernel_declines_and_says_what_to_do(world: Path) -> None:
    assert reason(arch="sm_100") == "norm.any_fwd is not certified on sm_100: run accel certify norm"


def test_a_shipped_certificate_serves_its_architecture_only(world: Path) -> None:
    assert certificates.write(both(), folder=world) == [world / "sm90.json"]
    assert reason() is None
    assert reason(arch="sm_80") == "norm.any_fwd is not certified on sm_80: run accel certify norm"


def test_forward_and_backward_both_need_one(world: Path) -> None:
    certificates.write([certificate("any_fwd")], folder=world)
    assert reason(Choice("norm", "any_fwd")) is None
    assert reason() == "norm.any_bwd is not certified on sm_90: run accel certify norm"
    assert reason(Choice("norm", "any_fwd", backward="portable")) is None


def test_the_users_own_certificate_serves(world: Path) -> None:
    (path,) = certificates.write(both(arch="sm_100"))
    assert path == certificates.user_folder() / "sm100.json"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert reason(arch="sm_100") is None
    assert reason() is not None


def test_a_changed_source_makes_it_stale(world: Path, root: Path) -> None:
    certificates.write(both(), folder=world)
    (root / "norm" / "config.py").write_text("WIDTH = 16")
    assert reason() == (
        "norm.any_fwd is not certified on sm_90 as its source is now (it changed after the certificate): "
        "run accel certify norm"
    )
    (root / "norm" / "config.py").write_text("WIDTH = 8  # elements")
    assert reason() is None


def test_another_minor_version_of_the_dsl_counts_as_none(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.write(both(), folder=world)
    installed(monkeypatch, "4.8.7")
    assert reason() is None
    for version, shown in (("4.9.0", "4.9"), ("4.80.1", "4.80"), ("5.8.1", "5.8")):
        installed(monkeypatch, version)
        assert reason() == (
            f"norm.any_fwd is not certified on sm_90 with CuTe DSL {shown} (its certificate is for 4.8): "
            "run accel certify norm"
        )


def test_without_the_dsl_it_says_how_to_install_it(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.write(both(), folder=world)
    installed(monkeypatch, None)
    assert reason() == "norm needs nvidia-cutlass-dsl, which is not installed: pip install 'accel-plugin[cuda]'"
    assert certificates.check(CHOICE, "sm_90", uncertified=True) is not None, "nothing could be compiled"
    assert certificates.check(Choice("norm", "portable", backward="portable"), "cpu") is None


def test_portable_needs_none(world: Path) -> None:
    assert reason(Choice("norm", "portable", backward="portable"), "cpu") is None


def test_uncertified_kernels_serve_on_request(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert certificates.check(CHOICE, "sm_90", uncertified=True) is None
    monkeypatch.setenv("ACCEL_UNCERTIFIED", "1")
    assert certificates.check(CHOICE, "sm_90") is None
    assert isinstance(certificates.check(CHOICE, "sm_90", uncertified=False), Declined)


def test_a_failure_measured_here_outweighs_the_shipped_certificate(world: Path) -> None:
    certificates.write(both(), folder=world)
    certificates.write([certificate("any_fwd"), certificate("any_bwd", failure="case, seed 1: dx: error is 3 times")])
    assert reason(Choice("norm", "any_fwd")) is None
    assert reason() == (
        "norm.any_bwd is not certified on sm_90: it failed there on 2026-12-01 (case, seed 1: dx: error is 3 times)"
    )
    certificates.write(both())
    assert reason() is None


def test_a_stale_failure_does_not_outweigh_it(world: Path) -> None:
    certificates.write(both(), folder=world)
    certificates.write(both(source="0" * 64, failure="of an older version"))
    assert reason() is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 2, "certificates": []}',
        '{"format": 1}',
        '{"format": 1, "certificates": [{}]}',
        '{"format": 1, "certificates": [{"family": 1}]}',
        "\xff",
    ],
)
def test_a_file_that_is_no_certificate_is_named_and_counts_as_none(
    world: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    (path,) = certificates.write(both())
    path.write_bytes(content.encode("latin-1"))
    assert reason() == "norm.any_fwd is not certified on sm_90: run accel certify norm"
    certificates.check(CHOICE, "sm_90")
    assert len(caplog.records) == 1, "logged once"
    assert str(path) in caplog.text and "accel certify" in caplog.text
    certificates.write(both())
    assert reason() is None, "writing puts it right"


def test_a_wrong_type_in_a_certificate_is_refused(world: Path) -> None:
    (path,) = certificates.write(both(), folder=world)
    data = json.loads(path.read_text())
    data["certificates"][0]["source"] = 7
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="source=7"):
        certificates.read(path)


def test_certificates_that_others_could_have_written_are_not_trusted(
    world: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates.write(both())
    certificates.user_folder().chmod(0o777)
    assert reason() is not None
    assert "mode 0777" in caplog.text
    from accel.kernels.runtime.cache import CacheRefusedError

    with pytest.raises(CacheRefusedError):
        certificates.write(both())


def test_unreadable_source_declines(world: Path, root: Path) -> None:
    certificates.write(both(), folder=world)
    (root / "norm" / "config.py").write_text("this is no Python")
    assert "its source cannot be read" in str(reason())
    assert "there is no device file any_fwd.py" in str(reason(Choice("blocks", "any_fwd")))


def test_writing_replaces_kernels_and_keeps_the_others(world: Path, root: Path) -> None:
    (root / "other").mkdir()
    (root / "other/any_fwd.py").write_text("x = 1")
    old = [
        certificate("sm90_fwd"),
        certificate("any_fwd", family="other"),
        dataclasses.replace(certificate("any_fwd"), kernel="any_gone"),
    ]
    certificates.write([*both(), *old], folder=world)
    certificates.write([*both(date="2027-01-01"), certificate("any_fwd", arch="sm_80")], folder=world)
    assert sorted(path.name for path in world.iterdir()) == ["sm80.json", "sm90.json"]
    found = [(c.family, c.kernel, c.date) for c in certificates.read(world / "sm90.json")]
    assert found == [
        ("norm", "any_bwd", "2027-01-01"),
        ("norm", "any_fwd", "2027-01-01"),
        ("norm", "sm90_fwd", "2026-12-01"),
        ("other", "any_fwd", "2026-12-01"),
    ]


def test_what_is_written_is_read_back(world: Path) -> None:
    made = certificate("any_fwd", worst_error=1.21, worst_error_at="case: d_x", yardsticks=("transformers.norm",))
    certificates.write([made], folder=world)
    assert certificates.read(world / "sm90.json") == [made]
    assert certificates.find("norm", "any_fwd", "sm_90") == made
    assert certificates.find("norm", "any_fwd", "sm_80") is None


def test_a_verdict_is_remembered(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.write(both(), folder=world)
    assert certificates.check(CHOICE, "sm_90", uncertified=False) is None
    missing = certificates.check(CHOICE, "sm_100", uncertified=False)

    def no(*args: object, **kwargs: object) -> None:
        pytest.fail("nothing is read again")

    monkeypatch.setattr(Path, "read_bytes", no)
    monkeypatch.setattr(ast, "parse", no)
    begin = time.perf_counter()
    for _ in range(1000):
        assert certificates.check(CHOICE, "sm_90", uncertified=False) is None
        assert certificates.check(CHOICE, "sm_100", uncertified=False) == missing
    assert (time.perf_counter() - begin) / 2000 < 50e-6  # measured: 2 us, once per configuration


# --- What ships ------------------------------------------------------------------------------------------------


def test_shipped_certificates_are_for_the_source_that_ships(caplog: pytest.LogCaptureFixture) -> None:
    """A stale one fails here: certify again on that GPU, or remove it and let the kernel decline."""
    caplog.set_level(logging.WARNING)
    certificates.forget()
    for path in sorted(certificates.shipped_folder().glob("*")):
        assert path.suffix == ".json", path
        found = certificates.read(path)
        assert found, path
        for one in found:
            name = f"{path.name}: {one.family}.{one.kernel}"
            assert path.name == certificates.file_name(one.arch), name
            assert one.source == source_hash.source_hash(one.family, one.kernel), f"{name} is stale"
            assert one.failure is None and one.cases and one.worst_error <= 1.25 and one.worst_largest <= 2, name


def test_nobody_writes_shipped_certificates_by_accident(world: Path) -> None:
    certificates.write(both())
    assert not world.exists()
    assert os.listdir(certificates.user_folder()) == ["sm90.json"]
