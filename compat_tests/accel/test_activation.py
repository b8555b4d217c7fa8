"""accelerate, restore, accelerated, is_accelerated on a made-up library: imports, errors, threads, other patchers."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import logging
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import accel
from accel import activation, targets
from accel.state import STATES, policy
from accel.targets import BY_NAME, Installed, Target

WAIT = 60.0


def test_before_the_import(upstream) -> None:
    report = upstream.on()
    assert report.pending == (f"{upstream.name}.scale", f"{upstream.name}.double")
    assert report.active == ()
    assert not upstream.loaded("ops"), "nothing is imported to be patched"
    ops = upstream.module("ops")
    assert upstream.state("scale").state == "active"
    assert upstream.state("double").state == "pending import"
    assert torch.equal(ops.scale(torch.ones(2)), torch.full((2,), 2.0))
    assert upstream.adapters["scale"].ran


def test_after_the_import_and_after_instances_exist(upstream) -> None:
    layers, ops = upstream.module("layers"), upstream.module("ops")
    before = (ops.scale, ops.also_scale, layers.renamed, vars(layers.Double)["forward"])
    instance = layers.Double()
    report = upstream.on()
    assert report.active == (f"{upstream.name}.scale", f"{upstream.name}.double")
    x = torch.ones(3)
    instance(x)
    layers.Held().call(x)
    ops.also_scale(x)
    assert len(upstream.adapters["double"].ran) == 1
    assert len(upstream.adapters["scale"].ran) == 2, "under every name it is held"
    accel.restore()
    after = (ops.scale, ops.also_scale, layers.renamed, vars(layers.Double)["forward"])
    assert all(a is b for a, b in zip(after, before, strict=True))
    instance(x)
    assert len(upstream.adapters["double"].ran) == 1


def test_on_off_on_off(upstream) -> None:
    ops = upstream.module("ops")
    original = ops.scale
    wrappers = set()
    for _ in range(3):
        upstream.on()
        assert ops.scale is not original
        wrappers.add(ops.scale)
        accel.restore()
        assert ops.scale is original
    assert len(wrappers) == 1, "one wrapper per original"


def test_calling_it_again_changes_nothing_and_finds_what_is_new(upstream) -> None:
    ops = upstream.module("ops")
    upstream.on()
    wrapper = ops.scale
    records = list(upstream.state("scale").rebindings)
    assert upstream.on().active == (f"{upstream.name}.scale",)
    assert ops.scale is wrapper
    assert upstream.state("scale").rebindings == records
    original = wrapper.__wrapped__
    upstream.module("layers").kept = original
    upstream.on()
    assert upstream.module("layers").kept is wrapper


def test_reimported_modules_are_patched_again(upstream) -> None:
    upstream.on()
    first = upstream.module("ops").scale
    del sys.modules[f"{upstream.name}.ops"]
    importlib.import_module(upstream.name)
    upstream.on()
    second = upstream.module("ops").scale
    assert first is not second
    assert accel.state.STATES[f"{upstream.name}.scale"].wrappers[id(second.__wrapped__)] is second


def test_restore_of_some_leaves_the_others(upstream) -> None:
    layers, ops = upstream.module("layers"), upstream.module("ops")
    original, forward = ops.scale, vars(layers.Double)["forward"]
    upstream.on()
    accel.restore(f"{upstream.name}.scale")
    assert ops.scale is original
    assert vars(layers.Double)["forward"] is not forward
    assert accel.is_accelerated(f"{upstream.name}.double")
    assert not accel.is_accelerated(f"{upstream.name}.scale")
    assert not accel.is_accelerated(upstream.name), "a group needs all its members"
    assert accel.is_accelerated()


def test_another_patcher_on_top_survives_and_is_named(upstream, caplog: pytest.LogCaptureFixture) -> None:
    layers, ops = upstream.module("layers"), upstream.module("ops")
    upstream.on()
    ours = vars(layers.Double)["forward"]

    @functools.wraps(ours)
    def theirs(self: object, x: torch.Tensor) -> torch.Tensor:
        return ours(self, x) + 100

    layers.Double.forward = theirs
    x = torch.ones(2)
    module = layers.Double()
    assert torch.equal(module(x), torch.full((2,), 102.0))
    assert len(upstream.adapters["double"].ran) == 1, "ours serves inside theirs"
    upstream.on()
    assert vars(layers.Double)["forward"] is theirs, "calling it again does not go over their head"
    with caplog.at_level(logging.WARNING, "accel"):
        accel.restore()
    assert vars(layers.Double)["forward"] is theirs
    assert torch.equal(module(x), torch.full((2,), 102.0))
    assert len(upstream.adapters["double"].ran) == 1, "ours stepped aside"
    (left,) = next(s.left for s in accel.status() if s.name == f"{upstream.name}.double")
    assert left.startswith(f"{upstream.name}.layers.Double.forward is now ")
    assert "wrapped by" in left and "test_activation.py" in left
    assert caplog.text.count("left to its new owner") == 1
    assert ops.scale.__module__ == f"{upstream.name}.ops"
    upstream.on()
    assert torch.equal(module(x), torch.full((2,), 102.0))
    assert len(upstream.adapters["double"].ran) == 2, "on again, inside theirs"
    assert len(upstream.state("double").rebindings) == 1
    upstream.on()
    assert len(upstream.state("double").rebindings) == 1, "noted once, however often it is asked"


def test_a_patcher_that_does_not_tell_what_it_wraps(upstream) -> None:
    layers = upstream.module("layers")
    upstream.on("double")
    ours = vars(layers.Double)["forward"]
    layers.Double.forward = lambda self, x: ours(self, x) + 100
    accel.restore()
    upstream.on("double")
    assert torch.equal(layers.Double()(torch.ones(1)), torch.full((1,), 102.0)), "their patch is not bypassed"
    assert len(upstream.adapters["double"].ran) == 1


def test_a_patched_over_function_is_served_at_its_other_holders(upstream) -> None:
    layers, ops = upstream.module("layers"), upstream.module("ops")
    original = ops.scale
    upstream.on("scale")
    ours = ops.scale
    ops.scale = lambda x: ours(x) + 100
    accel.restore()
    assert layers.renamed is ops.also_scale is original
    upstream.on("scale")
    assert layers.renamed is ops.also_scale is ours
    assert torch.equal(ops.scale(torch.ones(1)), torch.full((1,), 102.0))
    assert len(upstream.adapters["scale"].ran) == 1
    accel.restore()
    assert layers.renamed is ops.also_scale is original


def test_a_patcher_that_goes_away_leaves_no_trace_of_ours(upstream) -> None:
    layers = upstream.module("layers")
    original = vars(layers.Double)["forward"]
    upstream.on("double")
    ours = vars(layers.Double)["forward"]
    layers.Double.forward = lambda self, x: ours(self, x) + 100
    accel.restore()
    layers.Double.forward = ours  # they put back what they found
    assert torch.equal(layers.Double()(torch.ones(1)), torch.full((1,), 2.0))
    assert upstream.adapters["double"].ran == []
    assert upstream.on("double").active == (f"{upstream.name}.double",)
    accel.restore()
    assert vars(layers.Double)["forward"] is original


def test_a_holder_that_cannot_be_put_back_does_not_keep_the_rest(upstream, caplog: pytest.LogCaptureFixture) -> None:
    ops = upstream.module("ops")
    original = ops.scale
    upstream.on()

    class Broken:
        def apply(self) -> bool:
            return False

        def undo(self) -> list[str]:
            raise KeyError("the registry changed")

    upstream.state("scale").rebindings.append(Broken())
    with caplog.at_level(logging.WARNING, "accel"):
        accel.restore()
    assert ops.scale is original
    assert "could not be put back: KeyError: 'the registry changed'" in caplog.text


def test_nested_blocks_restore_the_set_before(upstream) -> None:
    ops, layers = upstream.module("ops"), upstream.module("layers")
    originals = ops.scale, vars(layers.Double)["forward"]
    with accel.accelerated(f"{upstream.name}.scale") as outer:
        assert outer.active == (f"{upstream.name}.scale",)
        with accel.accelerated(f"{upstream.name}.double", strict=True) as inner:
            assert inner.active == (f"{upstream.name}.double",)
            assert policy.strict
            assert accel.is_accelerated(upstream.name)
            accel.restore(f"{upstream.name}.scale")
        assert not policy.strict
        assert not accel.is_accelerated(f"{upstream.name}.double")
        assert accel.is_accelerated(f"{upstream.name}.scale"), "on when the inner block began, so on after it"
        assert ops.scale is not originals[0]
    assert not accel.is_accelerated()
    assert (ops.scale, vars(layers.Double)["forward"]) == originals


def test_a_block_that_raises_is_left_in_order(upstream) -> None:
    ops = upstream.module("ops")
    original = ops.scale
    with pytest.raises(ZeroDivisionError), accel.accelerated(f"{upstream.name}.scale"):
        raise ZeroDivisionError
    assert ops.scale is original
    with pytest.raises(ValueError, match="unknown target"), accel.accelerated("nonsense"):
        pass
    assert not accel.is_accelerated()


# --- What cannot be had ----------------------------------------------------------------------------------------------


def test_an_unknown_target_applies_nothing(upstream) -> None:
    with pytest.raises(ValueError, match=f"unknown target 'nonsense'.*{upstream.name}.scale.*groups: .*aliases: "):
        accel.accelerate([f"{upstream.name}.scale", "nonsense"])
    assert not accel.is_accelerated()
    for call in (accel.restore, accel.is_accelerated):
        with pytest.raises(ValueError, match="unknown target 'nonsense'"):
            call("nonsense")
    with pytest.raises(ValueError, match="unknown target 'nonsense'"):
        accel.explain("nonsense", 1)


@pytest.mark.parametrize("empty", ["", " , ", []])
def test_a_request_that_names_nothing(empty: object) -> None:
    with pytest.raises(ValueError, match="no target named"):
        accel.accelerate(empty)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [3, [3], [None]])
def test_a_request_of_the_wrong_type(wrong: object) -> None:
    with pytest.raises(TypeError):
        accel.accelerate(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["out of range", "no metadata", "not installed", "not a version"])
def test_a_named_target_whose_library_cannot_be_patched(upstream, tmp_path: Path, how: str) -> None:
    metadata = tmp_path / f"{upstream.name}-1.2.dist-info" / "METADATA"
    if how == "not installed":
        for path in upstream.folder.iterdir():
            path.unlink()
        upstream.folder.rmdir()
    elif how == "no metadata":
        metadata.unlink()
        metadata.parent.rmdir()
    else:
        version = "7.0" if how == "out of range" else "unknowable"
        metadata.write_text(f"Metadata-Version: 2.1\nName: {upstream.name}\nVersion: {version}\n")
    importlib.invalidate_caches()
    said = {
        "out of range": f"{upstream.name} 7.0 is outside the supported range >=1,<2",
        "no metadata": f"{upstream.name} carries no version",
        "not installed": f"{upstream.name} is not installed",
        "not a version": f"{upstream.name} unknowable is outside the supported range >=1,<2",
    }[how]
    for named in (f"{upstream.name}.scale", upstream.name, "scaling", ["norm", f"{upstream.name}.double"]):
        with pytest.raises(ImportError, match="applied nothing") as raised:
            accel.accelerate(named)
        assert said in str(raised.value)
        assert not accel.is_accelerated(), "nothing is applied, also not what could be had"
    report = accel.accelerate()
    assert report.refused.get(f"{upstream.name}.scale") == (said if "outside" in said else None) or how == "no metadata"
    state = next(s.state for s in accel.status() if s.name == f"{upstream.name}.scale")
    assert state.startswith("refused: ") and said in state


def test_an_alias_asks_for_the_libraries_that_are_there(
    upstream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = Target("absent_library.scale", "scaling", "", "absent.adapter", ("absent_library.ops",))
    table = (*activation.TARGETS, other)
    for module in (targets, activation):
        monkeypatch.setattr(module, "TARGETS", table)
    monkeypatch.setitem(BY_NAME, other.name, other)
    monkeypatch.setitem(STATES, other.name, type(upstream.state("scale"))(other))
    found = {"absent_library": Installed(None, "absent_library is not installed")}
    real = targets.installed
    monkeypatch.setattr(activation, "installed", lambda group: found.get(group) or real(group))
    report = accel.accelerate("scaling")
    assert report.pending == (f"{upstream.name}.scale",)
    assert report.refused == {"absent_library.scale": "absent_library is not installed"}
    accel.restore()
    found["absent_library"] = Installed("9", "absent_library 9 is outside the supported range <9")
    assert accel.accelerate("scaling").refused == {"absent_library.scale": found["absent_library"].problem}
    accel.restore()
    with pytest.raises(ImportError, match="absent_library 9 is outside"):
        accel.accelerate("scaling", strict=True)
    assert accel.accelerate("all").refused["absent_library.scale"] == found["absent_library"].problem


def test_one_broken_adapter_stops_nobody(upstream, caplog: pytest.LogCaptureFixture) -> None:
    real = upstream.patch

    def patch(module: object, state: object) -> list[object]:
        if state.name.endswith(".double"):  # type: ignore[attr-defined]
            raise AttributeError("module has no attribute 'Double'")
        return real(module, state)

    sys.modules[f"accel.patches.{upstream.name}.adapter"].patch = patch  # type: ignore[attr-defined]
    upstream.module("layers")
    upstream.module("ops")
    with caplog.at_level(logging.ERROR, "accel"):
        report = upstream.on()
    assert report.active == (f"{upstream.name}.scale",)
    reason = f"patching {upstream.name}.layers failed: AttributeError: module has no attribute 'Double'"
    assert report.refused == {f"{upstream.name}.double": reason}
    assert caplog.text.count("upstream's own code runs") == 1
    row = next(s for s in accel.status() if s.name == f"{upstream.name}.double")
    assert row.state == f"refused: {reason}"
    assert row.failures == (reason,)
    assert reason in accel.report.text()
    accel.restore()
    original = upstream.module("ops").scale
    with pytest.raises(RuntimeError, match="has no attribute 'Double'"):
        upstream.on(strict=True)
    assert not accel.is_accelerated(), "strict: nothing is applied"
    assert upstream.module("ops").scale is original
    sys.modules[f"accel.patches.{upstream.name}.adapter"].patch = real  # type: ignore[attr-defined]
    assert upstream.on().refused == {}


def test_unknown_variables_warn_and_bad_values_raise(
    upstream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCEL_TARGET", "all")
    with caplog.at_level(logging.WARNING, "accel"):
        upstream.on()
    assert "ACCEL_TARGET is no setting of accel" in caplog.text
    accel.restore()
    monkeypatch.setenv("ACCEL_VERIFY", "often")
    with pytest.raises(ValueError, match="ACCEL_VERIFY='often'"):
        upstream.on()
    assert not accel.is_accelerated()


def test_the_level_of_the_log(upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("accel")
    was, handlers = logger.level, list(logger.handlers)
    try:
        logger.setLevel(logging.INFO)
        upstream.on()
        assert logger.level == logging.INFO, "the application's choice stays"
        monkeypatch.setenv("ACCEL_LOG", "off")
        upstream.on()
        assert not logger.isEnabledFor(logging.CRITICAL)
        monkeypatch.setenv("ACCEL_LOG", "debug")
        upstream.on()
        assert logger.isEnabledFor(logging.DEBUG)
    finally:
        logger.setLevel(was)
        logger.handlers[:] = handlers


# --- A machine with a GPU --------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_target(upstream, monkeypatch: pytest.MonkeyPatch):
    """`<library>.scale` is only for machines without a GPU, and there is one."""
    object.__setattr__(upstream.state("scale").target, "without_gpu", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return f"{upstream.name}.scale"


def test_a_target_for_machines_without_a_gpu(upstream, gpu_target: str) -> None:
    upstream.module("ops")
    report = accel.accelerate(upstream.name)
    assert report.refused == {gpu_target: activation.GPU_REASON}
    assert not STATES[gpu_target].on
    upstream.module("layers")
    assert accel.is_accelerated(upstream.name), "it does not count against its group here"
    assert not accel.is_accelerated(gpu_target)
    assert accel.accelerate(gpu_target).active == (gpu_target,), "unless it is named"
    assert gpu_target in accel.accelerate(upstream.name).active, "and it stays"


def test_a_target_for_machines_without_a_gpu_named_before_the_import(upstream, gpu_target: str) -> None:
    assert accel.accelerate(gpu_target).pending == (gpu_target,)
    upstream.module("ops")
    assert STATES[gpu_target].state == "active"
    with accel.accelerated(upstream.name):
        assert STATES[gpu_target].on
    assert STATES[gpu_target].insisted


def test_a_target_for_machines_without_a_gpu_when_torch_comes_late(upstream, gpu_target: str) -> None:
    torch_module = sys.modules.pop("torch")
    try:
        assert gpu_target in accel.accelerate(upstream.name).pending
    finally:
        sys.modules["torch"] = torch_module
    upstream.module("ops")
    assert STATES[gpu_target].state == f"refused: {activation.GPU_REASON}"


# --- What users do with a patched model ------------------------------------------------------------------------------


def test_patched_modules_copy_and_pickle(upstream) -> None:
    layers = upstream.module("layers")
    module = layers.Double()
    keys = list(module.state_dict())
    upstream.on()
    copied = copy.deepcopy(module)
    assert torch.equal(copied(torch.ones(1)), torch.full((1,), 2.0))
    loaded = pickle.loads(pickle.dumps(module))
    assert torch.equal(loaded(torch.ones(1)), torch.full((1,), 2.0))
    assert len(upstream.adapters["double"].ran) == 2
    assert pickle.loads(pickle.dumps(upstream.module("ops").scale)) is upstream.module("ops").scale
    buffer = io.BytesIO()
    torch.save(module, buffer)
    accel.restore()
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert type(again) is layers.Double
    assert list(again.state_dict()) == keys
    again(torch.ones(1))
    assert len(upstream.adapters["double"].ran) == 2, "saved while on, loaded while off: upstream's own class"


def test_a_captured_wrapper_steps_aside_after_restore(upstream) -> None:
    upstream.on()
    captured = functools.partial(upstream.module("ops").scale, factor=3.0)
    accel.restore()
    assert torch.equal(captured(torch.ones(1)), torch.full((1,), 3.0))
    assert upstream.adapters["scale"].ran == []
    upstream.on()
    captured(torch.ones(1))
    assert len(upstream.adapters["scale"].ran) == 1


def test_threads_that_call_and_threads_that_switch(upstream) -> None:
    ops, layers = upstream.module("ops"), upstream.module("layers")
    originals = ops.scale, ops.also_scale, layers.renamed, vars(layers.Double)["forward"]
    module = layers.Double()
    stop = threading.Event()
    errors: list[BaseException] = []

    def guarded(work) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            stop.set()

    def calls() -> None:
        x = torch.ones(2)
        while not stop.is_set():
            assert torch.equal(ops.scale(x), x * 2)
            assert torch.equal(module(x), x * 2)
            accel.status()

    def switches() -> None:
        for round_ in range(9):
            if round_ % 3:
                upstream.on()
                accel.restore()
            else:
                with accel.accelerated(f"{upstream.name}.scale"):
                    accel.explain(f"{upstream.name}.scale", torch.ones(2))

    callers = [threading.Thread(target=guarded, args=(calls,), daemon=True) for _ in range(2)]
    switchers = [threading.Thread(target=guarded, args=(switches,), daemon=True) for _ in range(3)]
    for thread in callers + switchers:
        thread.start()
    for thread in switchers:
        thread.join(WAIT)
    stop.set()
    for thread in callers:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in callers + switchers)
    assert errors == []
    accel.restore()
    assert (ops.scale, ops.also_scale, layers.renamed, vars(layers.Double)["forward"]) == originals
    upstream.on()
    assert len(upstream.state("scale").rebindings) == 1
    assert len(upstream.state("scale").wrappers) == 1


def test_a_child_forked_while_a_lock_is_held_is_not_stuck(upstream) -> None:
    upstream.module("ops")
    upstream.on()
    held = threading.Event()
    release = threading.Event()

    def hold() -> None:
        with activation._lock, upstream.state("scale").lock:
            held.set()
            release.wait(WAIT)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(WAIT)
    child = os.fork()
    if child == 0:
        try:
            accel.restore()
            upstream.on()
            upstream.module("ops").scale(torch.ones(1))
            os._exit(0)
        finally:
            os._exit(1)
    watch = threading.Timer(WAIT, os.kill, (child, 9))
    watch.start()
    _, status = os.waitpid(child, 0)
    watch.cancel()
    release.set()
    thread.join(WAIT)
    assert os.waitstatus_to_exitcode(status) == 0


def test_dynamo_is_reset_where_it_is_loaded_and_not_inside_an_import(upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    resets: list[int] = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(1))
    upstream.on("double")
    upstream.module("layers")
    assert resets == [], "what is defined by this import was compiled by nobody"
    accel.restore()
    assert resets == [1]
    upstream.on("double")
    assert resets == [1, 1]
    upstream.on("double")
    assert resets == [1, 1], "nothing was replaced, so nothing is thrown away"


def test_every_target_of_the_table_can_be_resolved() -> None:
    for target in targets.TARGETS:
        assert target.group in ("fla", "transformers", "diffusers", "torch")
        assert targets.resolve(target.name) == [target]
        assert target in targets.resolve(target.group) or not target.default
        assert target.modules or target.every_model
    assert targets.resolve("all") == [t for t in targets.TARGETS if t.default]
    assert targets.resolve(["kda", "fla.kda", "gdn,kda"]) == targets.resolve("kda,gdn")


def test_resolving_all_targets_imports_no_upstream() -> None:
    code = (
        "import sys, accel; accel.accelerate(); accel.status(); accel.restore()\n"
        "print(sorted({'torch', 'transformers', 'fla', 'diffusers'} & set(sys.modules)))"
    )
    root = str(Path(accel.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": root}
    )
    assert done.stdout.strip() == "[]"
