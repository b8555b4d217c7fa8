"""FLA's backend registry: what rebinding cannot reach is served, counted once, and upstream's after restore."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import fla.ops
import pytest
import torch

import accel
from accel import serve
from accel.patches.fla import dispatch
from accel.state import STATES
from accel.testing import snapshot

SEED = 20261130
OLD = version("fla-core").startswith("0.5")
TARGETS = {"chunk_gated_delta_rule": "fla.gated_delta_rule", "chunk_kda": "fla.kda"}


@pytest.fixture(autouse=True)
def _seed() -> None:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _first_call() -> None:
    """FLA 0.5.2 fills its registries at the first dispatched call, which on a CPU ends in its kernels."""
    for name in TARGETS:
        failure(getattr(fla.ops, name), name)


def arguments(name: str, **changes: Any) -> dict[str, Any]:
    g = -torch.rand(1, 5, 2, 8) if name == "chunk_kda" else -torch.rand(1, 5, 2)
    qkv = {x: torch.randn(1, 5, 2, 8) for x in "qkv"}
    return {**qkv, "g": g, "beta": torch.rand(1, 5, 2), **changes}


def failure(function: Callable[..., Any], name: str, **changes: Any) -> tuple[type[BaseException], str]:
    with pytest.raises(Exception) as caught:
        function(**arguments(name, **changes))
    return caught.type, str(caught.value)


def registry(name: str) -> Any:
    return dispatch._registry(getattr(fla.ops, name), {"chunk_kda": "kda"}.get(name, "gated_delta_rule"))


class Model:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


def holders(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The same function, held where no scan of modules finds it."""
    return {
        "variable": function,
        "partial": functools.partial(function),
        "instance": Model(function).function,
        "container": {"op": [function]}["op"][0],
        "closure": lambda **kwargs: function(**kwargs),
    }


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("holder", holders(print))
def test_kept_references_are_served_and_counted_once(name: str, holder: str) -> None:
    original = getattr(fla.ops, name)
    kept = holders(original)[holder]
    before = failure(kept, name)
    accel.accelerate(TARGETS[name])
    given = arguments(name)
    expected = getattr(fla.ops, name)(**given)
    assert getattr(fla.ops, name) is not original
    result = kept(**given)
    assert torch.equal(result[0], expected[0])
    assert STATES[TARGETS[name]].served == {"portable": 2}
    accel.restore()
    assert failure(kept, name) == before


@pytest.mark.parametrize("name", TARGETS)
def test_a_declined_call_is_counted_once_by_either_way(name: str) -> None:
    kept = getattr(fla.ops, name)
    expected = failure(kept, name, chunk_size=7)
    accel.accelerate(TARGETS[name])
    for times, function in enumerate((kept, getattr(fla.ops, name)), 1):
        assert failure(function, name, chunk_size=7) == expected
        declined = STATES[TARGETS[name]].declined
        assert sum(declined.values()) == times and len(declined) == 1
    assert not STATES[TARGETS[name]].served


@pytest.mark.parametrize("name", TARGETS)
def test_the_entry_comes_and_goes_with_the_target(name: str) -> None:
    backends = registry(name)._backends
    others = dict(backends)
    active = getattr(registry(name), "_active", None)
    before = snapshot()
    for _ in range(2):
        accel.accelerate(TARGETS[name])
        entry = backends[dispatch.BACKEND_TYPE]
        assert {key: value for key, value in backends.items() if key != dispatch.BACKEND_TYPE} == others
        order = [backend.backend_type for backend in registry(name)._get_sorted_backends()]
        assert order.index("accel") < min(order.index(key) for key in ("flash_qla", "flash_kda") if key in order)
        accel.accelerate(TARGETS[name])
        assert backends[dispatch.BACKEND_TYPE] is entry  # not registered anew
        accel.restore()
        assert list(backends.items()) == list(others.items())
        assert getattr(registry(name), "_active", None) is active
        assert before.changed(snapshot()) == []


def test_the_verifier_steps_aside_for_decided_calls_and_switched_off_targets() -> None:
    accel.accelerate("fla.gated_delta_rule")
    backend = registry("chunk_gated_delta_rule")._backends[dispatch.BACKEND_TYPE]
    call = serve.wrapped_call(fla.ops.chunk_gated_delta_rule)
    given = arguments("chunk_gated_delta_rule")

    def verdict(**changes: Any) -> Any:
        return backend.verify("chunk_gated_delta_rule", **{**given, **changes})

    assert verdict() == (True, None)
    assert verdict(chunk_size=7) == (False, "chunk_size=7 is not 16, 32 or 64")
    inside = serve.ServedCall(lambda: verdict(), call.adapter, call.state)
    assert inside.upstream((), {}) == (False, "the call was declined before")
    STATES["fla.gated_delta_rule"].on = False
    assert verdict() == (False, "the target is off")


def test_an_entry_of_somebody_elses_under_our_name_is_left_alone() -> None:
    accel.accelerate("fla.kda")
    backends = registry("chunk_kda")._backends
    theirs = type("Theirs", (), {"backend_type": "accel"})()
    ours, backends["accel"] = backends["accel"], theirs
    accel.restore()
    assert backends.pop("accel") is theirs and ours is not theirs
    assert any("accel" in line and "kda" in line for line in STATES["fla.kda"].left)


def test_dispatch_switched_off_leaves_nothing_to_register_with(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["fla.ops.backends" if OLD else "fla.backends"]
    monkeypatch.setattr(module, "_DISPATCH_DISABLED", True)
    accel.accelerate("fla.kda")
    monkeypatch.undo()
    assert dispatch.BACKEND_TYPE not in registry("chunk_kda")._backends
    fla.ops.chunk_kda(**arguments("chunk_kda"))
    assert STATES["fla.kda"].served == {"portable": 1}


@pytest.mark.parametrize("private", ["_DISPATCH_DISABLED", "registries"])
def test_a_release_without_the_private_names_is_rebound_all_the_same(
    private: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["fla.ops.backends" if OLD else "fla.backends"]
    if private == "registries":
        monkeypatch.setattr(*((module.BackendRegistry, "_registries") if OLD else (module, "_function_registries")), {})
    else:
        monkeypatch.delattr(module, private)
    assert accel.accelerate("fla.kda").active == ("fla.kda",)
    monkeypatch.undo()
    assert dispatch.BACKEND_TYPE not in registry("chunk_kda")._backends
    fla.ops.chunk_kda(**arguments("chunk_kda"))
    assert STATES["fla.kda"].served == {"portable": 1}


def test_threads_are_served_while_the_target_goes_on_and_off() -> None:
    kept, given, wrong = fla.ops.chunk_kda, arguments("chunk_kda"), []
    accel.accelerate("fla.kda")
    expected = kept(**given)[0]
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                if not torch.equal(kept(**given)[0], expected):
                    wrong.append("another result")
            except RuntimeError as error:  # upstream's own, while the target is off
                if "0 active drivers" not in str(error):
                    wrong.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        accel.restore("fla.kda")
        accel.accelerate("fla.kda")
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


SCRIPT = """
import json, sys
import torch
import accel
report = accel.accelerate("fla")
assert "fla" not in sys.modules and not report.active
import fla.ops, fla.models
from accel.testing import snapshot, _is_ours
torch.manual_seed(0)
g, kda_g = -torch.rand(1, 5, 2), -torch.rand(1, 5, 2, 8)
q, k, v, beta = *(torch.randn(1, 5, 2, 8) for _ in "qkv"), torch.rand(1, 5, 2)
fla.ops.chunk_gdn(q, k, v, g, beta)
fla.ops.fused_recurrent_gdn(q, k, v, g, beta=beta)
fla.ops.chunk_kda(q, k, v, kda_g, beta)
fla.ops.fused_recurrent_kda(q, k, v, kda_g, beta)
fla.modules.GatedMLP(8, intermediate_size=16)(torch.randn(3, 8))
fla.modules.RMSNorm(8)(torch.randn(3, 8))
served = {s.name: s.served for s in accel.status() if s.name.startswith("fla.")}
accel.restore()
ours = [path for path, value in snapshot(("fla",)).objects.items() if _is_ours(value)]
json.dump({"served": served, "ours": ours, "states": [s.state for s in accel.status()]}, sys.stdout)
"""


@pytest.mark.parametrize("disabled", ["0", "1"])
def test_accelerating_before_fla_is_imported(disabled: str) -> None:
    environment = {**os.environ, "FLA_DISABLE_BACKEND_DISPATCH": disabled}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert all(served == 1 for served in result["served"].values()), result["served"]
    assert result["ours"] == [] and set(result["states"]) == {"off"}
