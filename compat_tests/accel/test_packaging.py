"""Wheel, editable install and plain checkout, in the repository's root and elsewhere, with HF's kernels and without."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest

import accel

#: Imports what there is, patches a model library, and prints what was found.
PROBE = """
import importlib, importlib.metadata, importlib.util, json, pkgutil, sys
import accel, accel.kernels, accel.patches
found = {"accel": accel.__file__, "version": accel.__version__}
light = {"torch", "transformers"} & set(sys.modules)
assert not light, light
found["kernels"] = sorted(m.name for m in pkgutil.iter_modules(accel.kernels.__path__))
found["patches"] = sorted(m.name for m in pkgutil.iter_modules(accel.patches.__path__))
from accel.kernels.runtime import arch, cache
assert arch.compile_target("sm_90") == "sm_90a"
from accel import certificates
found["certificates"] = sorted(path.name for path in certificates.shipped_folder().glob("*.json"))
found["report"] = str(accel.accelerate("transformers"))
import transformers.models.llama.modeling_llama as llama
from transformers.utils import is_kernels_available
found["state"] = {row.name: row.state for row in accel.status()}
found["patched"] = hasattr(llama.LlamaRMSNorm.forward, "__wrapped__")
accel.restore()
found["restored"] = not hasattr(llama.LlamaRMSNorm.forward, "__wrapped__")
spec = importlib.util.find_spec("kernels")
found["hf_kernels"] = spec.origin if spec is not None else None
found["hf_available"] = is_kernels_available()
ours = {"patches", *(f"kernels.{name}" for name in found["kernels"])}
found["second_copies"] = sorted(ours & set(sys.modules))
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory, installations) -> tuple[object, Path]:
    """An editable install of a checkout of its own, and that checkout."""
    tree = tmp_path_factory.mktemp("editable") / "tree"
    shutil.copytree(checkout, tree)
    made = installations.bare(tmp_path_factory.mktemp("from_editable"))
    installations.pip("--python", made.python, "install", "--no-deps", "--no-index", "--no-build-isolation", "-e", tree)
    return made, tree


@pytest.fixture(scope="session")
def plain(installations, tmp_path_factory: pytest.TempPathFactory) -> object:
    """An environment without accel."""
    return installations.bare(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def hf_kernels(installations, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face's kernels in a folder for PYTHONPATH, its version moved to where transformers accepts it."""
    folder = tmp_path_factory.mktemp("hf_kernels")
    installations.pip("install", "--no-deps", "--no-compile", "--target", folder, "kernels==0.17.2")
    (metadata,) = folder.glob("kernels-*.dist-info/METADATA")
    text = metadata.read_text()
    assert "\nVersion: 0.17.2\n" in text
    metadata.write_text(text.replace("\nVersion: 0.17.2\n", f"\nVersion: {in_window()}\n", 1))
    return folder


def in_window() -> str:
    """What the installed transformers takes: 5.24 wants kernels 0.18.2 to 0.19, 5.17 wants 0.16 to 0.17."""
    from packaging.version import Version
    from transformers import __version__

    return "0.18.2" if Version(__version__) >= Version("5.24") else "0.16.2"


def probe(installation, cwd: Path, *path: Path) -> dict[str, object]:
    environ = {"PYTHONPATH": os.pathsep.join(map(str, path))} if path else None
    done = installation.run("-c", PROBE, cwd=cwd, environ=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("beside", ["with HF's kernels", "without"])
@pytest.mark.parametrize("how", ["wheel", "editable", "checkout"])
def test_it_imports_and_patches(
    request: pytest.FixtureRequest, checkout: Path, tmp_path: Path, how: str, beside: str
) -> None:
    """From the root of a checkout, where a folder named kernels/ lies in front of everything that is installed."""
    path = (request.getfixturevalue("hf_kernels"),) if beside == "with HF's kernels" else ()
    if how == "wheel":
        installation, cwd = request.getfixturevalue("from_wheel"), checkout
    elif how == "editable":
        installation, cwd = request.getfixturevalue("editable")
    else:
        installation, cwd = request.getfixturevalue("plain"), checkout
    found = probe(installation, cwd, *path)
    assert found["version"] == accel.__version__
    assert {"norm", "runtime", "attention"} <= set(found["kernels"])
    assert {"fla", "transformers", "diffusers", "checks"} <= set(found["patches"])
    assert found["certificates"] == sorted(path.name for path in (checkout / "kernels" / "certificates").glob("*.json"))
    assert found["patched"] and found["restored"]
    assert found["state"]["transformers.rms_norm"] == "active"
    assert found["second_copies"] == [], "kernels/ and patches/ are imported under accel only"
    if path:
        assert str(found["hf_kernels"]).startswith(str(path[0]))
        assert found["hf_available"] is True
    else:
        assert found["hf_kernels"] is None, "our folder is no package, so nobody takes it for theirs"
        assert found["hf_available"] is False


def test_elsewhere_the_installed_one_is_found(from_wheel, editable, plain, checkout: Path, tmp_path: Path) -> None:
    code = (
        "import accel, accel.kernels.runtime.cache, accel.patches.fla.package as p; print(accel.__file__, p.__file__)"
    )
    made, tree = editable
    for installation, root in ((from_wheel, from_wheel.site), (made, tree)):
        done = installation.run("-c", code, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert all(place.startswith(str(root)) for place in done.stdout.split())
    done = plain.run("-c", code, cwd=tmp_path, environ={"PYTHONPATH": str(checkout)})
    assert all(place.startswith(str(checkout)) for place in done.stdout.split()), done.stderr
    assert plain.run("-c", "import accel", cwd=tmp_path).returncode == 1


def test_the_command_is_installed_and_a_module(from_wheel, editable, plain, checkout: Path, tmp_path: Path) -> None:
    for installation in (from_wheel, editable[0]):
        script = installation.python.parent / "accel"
        assert script.is_file()
        done = installation.run(str(script), "--version", cwd=tmp_path)
        assert done.stdout.strip() == f"accel {accel.__version__}", done.stderr
    done = plain.run("-m", "accel", "status", "--json", cwd=checkout)
    assert json.loads(done.stdout)[0]["target"] == "fla.gated_delta_rule", done.stderr


def test_the_wheel_holds_what_it_should(wheel: Path, checkout: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    text = {name: zipfile.ZipFile(wheel).read(name).decode() for name in names if ".dist-info/" in name}
    metadata = next(value for name, value in text.items() if name.endswith("METADATA"))
    assert "Name: accel-plugin\n" in metadata
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ") and "extra" not in line]
    assert sorted(line.split()[1].partition(">")[0] for line in required) == ["packaging", "rich", "wrapt"]
    assert next(v for n, v in text.items() if n.endswith("top_level.txt")).split() == ["accel"]
    assert "accel_autoload.pth,sha256" in next(v for n, v in text.items() if n.endswith("RECORD"))
    points = next(v for n, v in text.items() if n.endswith("entry_points.txt"))
    assert "accel = accel.autoload:boot_from_torch" in points
    assert "accel = accel.__main__:main" in points
    expected = {"accel_autoload.pth", "accel/py.typed"}
    expected |= {path.relative_to(checkout).as_posix() for path in (checkout / "accel").glob("*.py")}
    for folder in ("kernels", "patches"):
        for path in (checkout / folder).rglob("*.py"):
            expected.add(f"accel/{path.relative_to(checkout).as_posix()}")
    expected |= {f"accel/kernels/certificates/{p.name}" for p in (checkout / "kernels" / "certificates").glob("*.json")}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "accel/kernels/__init__.py" not in names


def test_uninstalling_leaves_nothing(from_wheel, wheel: Path, installations, tmp_path: Path) -> None:
    made = installations.bare(tmp_path / "uninstalled")
    before = {path.relative_to(made.site) for path in made.site.rglob("*")}
    installations.pip("--python", made.python, "install", "--no-deps", "--no-index", "--no-compile", wheel)
    assert (made.site / "accel_autoload.pth").is_file()
    installations.pip("--python", made.python, "uninstall", "-y", "accel-plugin")
    assert {path.relative_to(made.site) for path in made.site.rglob("*")} == before
