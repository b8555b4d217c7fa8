"""The causal convolution without a GPU: portable ops, user errors, plan, machine code, and the PTX run on the CPU."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch

from accel.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update, launch
from accel.kernels.causal_conv1d.cases import BF16, CASES, FP16, FP32, Case, Inputs, Outputs, portable
from accel.kernels.causal_conv1d.config import RUN, ConvConfig, UpdateConfig
from accel.kernels.causal_conv1d.facts import ConvFacts
from accel.kernels.causal_conv1d.plan import COPY_NOTE, plan
from accel.kernels.runtime import arch as archs
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime import emulate, sass
from accel.outcome import Choice, Declined
from accel.testing import accuracy

INTS = {torch.int32: "int32", torch.int64: "int64"}


def generator() -> tuple[int, torch.Generator]:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    return seed, torch.Generator().manual_seed(seed)


# --- Plain torch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if c.channels < 2000], ids=lambda case: case.name)
def test_portable_cases(case: Case) -> None:
    inputs = case.make("cpu", generator()[1])
    want, theirs = case.oracle(inputs), portable(case, inputs)
    got = case.run(inputs)
    assert set(got) == set(want) == set(theirs)
    for name, x in got.items():
        verdict = accuracy(x, theirs[name], want[name])
        assert verdict.ok, f"{name}: {verdict.reason}"


def test_a_sequence_in_two_calls_equals_one() -> None:
    case = Case((20, 20), 8, FP32, bias=True)
    inputs = case.make("cpu", generator()[1])
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    whole, end = causal_conv1d(x, weight, bias, activation="silu", output_final_state=True)
    first, state = causal_conv1d(x[:, :11], weight, bias, activation="silu", output_final_state=True)
    assert state is not None and end is not None
    second = causal_conv1d(x[:, 11:], weight, bias, activation="silu", initial_state=state)[0]
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    steps = [causal_conv1d_update(x[:, t : t + 1], state, weight, bias, activation="silu") for t in range(11, 20)]
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 11:])
    assert torch.equal(state, end)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.randn(2, 8)}, "x .B, T, C. and weight"),
        ({"weight": torch.randn(7, 4)}, "x .B, T, C. and weight"),
        ({"bias": torch.randn(4)}, "bias must be .8."),
        ({"activation": "gelu"}, "activation must be None or 'silu', got 'gelu'"),
        ({"initial_state": torch.randn(2, 8, 2)}, "initial_state must be"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "needs a batch of 1"),
    ],
)
def test_user_errors(changed: dict[str, Any], message: str) -> None:
    given = {"x": torch.randn(2, 5, 8), "weight": torch.randn(8, 4)} | changed
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**given)


# --- The plan ------------------------------------------------------------------------------------------------------

FACTS = ConvFacts("forward", BF16, BF16, 8192, 4, "silu")


@pytest.mark.parametrize("arch", archs.known_archs())
def test_served(arch: str) -> None:
    assert plan(FACTS, arch) == Choice("causal_conv1d", "any_fwd")
    assert plan(dataclasses.replace(FACTS, channels_last=False), arch).notes == (COPY_NOTE,)
    new = dataclasses.replace(FACTS, mode="update", state_dtype=BF16, state_len=4, n_channels=33)
    assert plan(new, arch) == Choice("causal_conv1d", "any_update")
    assert plan(FACTS, "cpu") == Choice("causal_conv1d", "portable")


@pytest.mark.parametrize(
    ("changed", "arch", "reason"),
    [
        ({"mode": "both"}, "sm_90", "mode=both is neither forward nor update"),
        ({"needs_grad": True}, "sm_90", "a gradient is needed: the kernels have none"),
        ({"dtype": "float64"}, "sm_90", "dtype=float64 is none of bfloat16, float16, float32"),
        ({"weight_dtype": FP32}, "sm_90", "weight dtype=float32 is not x's bfloat16"),
        ({"state_dtype": FP32, "state_len": 4}, "sm_90", "state dtype=float32 is not x's bfloat16"),
        ({"width": 5}, "sm_90", "width=5 is none of 2, 3, 4"),
        ({"activation": "gelu"}, "sm_90", "activation=gelu is neither None nor silu"),
        ({"state_dtype": BF16, "state_len": 2}, "sm_90", "state_len=2 < width - 1 = 3"),
        ({"mode": "update", "state_dtype": BF16, "state_len": 9}, "sm_90", "state_len=9 > 8"),
        ({"n_channels": 12}, "sm_90", "n_channels=12 is not a multiple of 8 (bfloat16)"),
        ({}, "sm_75", f"no causal_conv1d kernel for sm_75: it needs one of {', '.join(archs.known_archs())}"),
    ],
)
def test_decline_reasons(changed: dict[str, Any], arch: str, reason: str) -> None:
    assert plan(dataclasses.replace(FACTS, **changed), arch) == Declined(reason)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConvConfig("float64", 4, False, None, False, False, None, True), "dtype"),
        (lambda: ConvConfig(BF16, 5, False, None, False, False, None, True), "width"),
        (lambda: ConvConfig(BF16, 4, False, "gelu", False, False, None, True), "activation"),
        (lambda: ConvConfig(BF16, 4, False, None, False, False, "int8", True), "packed"),
        (lambda: ConvConfig(BF16, 4, False, None, False, False, None, True, threads=48), "threads"),
        (lambda: UpdateConfig(BF16, 4, False, None, 2, True), "state_len"),
    ],
)
def test_configurations_refuse_what_no_kernel_is_made_for(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- The compiled kernels ------------------------------------------------------------------------------------------


def config_of(case: Case, inputs: Inputs, arch: str) -> ConvConfig | UpdateConfig:
    overlap = arch not in ("sm_80", "sm_86", "sm_89")
    common = (case.dtype, case.width, case.bias, case.activation)
    if case.mode == "update":
        return UpdateConfig(*common, case.initial, overlap)
    packed = INTS[inputs["cu_seqlens"].dtype] if case.packed else None
    return ConvConfig(*common, case.initial > 0, case.final, packed, overlap, threads=32)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_machine_code(arch: str) -> None:
    overlap = arch != "sm_80"
    for config in (
        ConvConfig(BF16, 4, False, "silu", False, False, None, overlap),
        ConvConfig(FP32, 3, True, "silu", True, True, "int64", overlap),
    ):
        compiled = runtime.compile_only(runtime.Kernel("causal_conv1d", "any_fwd", config), archs.compile_target(arch))
        (code,) = sass.disassemble(compiled.cubin)
        assert code.spills == 0
        assert code.count("STG", "128") == config.ahead and code.count("LDG", "128") >= config.ahead
        registers = -(-code.registers // 8) * 8
        in_flight = 65536 // (registers * config.threads) * config.threads * 16 * config.ahead
        assert in_flight >= 48 * 1024, "bytes that an SM needs under way to saturate the memory"
    assert all("any_" in name for name, _ in launch.builds(archs.compile_target(arch)))


#: (arch, case): runs that end inside and at the end of RUN, both modes, every width, dtype and option.
EMULATED = (
    ("sm_90", Case((70,) * 2, 264)),
    ("sm_80", Case((RUN,), 16, FP16, width=2, bias=True, activation=None, layout="split")),
    ("sm_90", Case((3,) * 2, 8, initial=4, final=True)),
    ("sm_90", Case((40,), 8, FP32, width=3, bias=True, initial=2, final=True)),
    ("sm_90", Case((1, 2, 0, 31, 40, 0, 1), 16, packed=True, initial=4, final=True)),
    ("sm_90", Case((0, 33, 1, 30), 8, FP16, packed=True, final=True, bias=True)),
    ("sm_90", Case((1,) * 2, 40, mode="update", initial=4)),
    ("sm_80", Case((3,), 33, FP16, mode="update", initial=3, bias=True, layout="time", width=3)),
    ("sm_90", Case((2,), 8, FP32, mode="update", initial=1, width=2, activation=None)),
)


def run_on_cpu(case: Case, inputs: Inputs, config: Any, ptx: str, seed: int) -> Outputs:
    """What the kernel writes into memory that was NaN, its CTAs in any order."""
    memory = emulate.Memory()
    kept: dict[str, tuple[torch.Tensor, np.ndarray]] = {}

    def tensor(name: str, t: torch.Tensor, sizes: int, strides: int) -> bytes:
        raw = np.frombuffer(bytearray(bytes(t.untyped_storage())), np.uint8)
        kept[name] = (t, raw)
        address = memory.place(raw) + t.storage_offset() * t.element_size()
        return emulate.pack_tensor(address, t.shape[:sizes], t.stride()[:strides])

    x = inputs["x"]
    batch, tokens, channels = x.shape
    out = torch.full((batch, tokens, channels), torch.nan, dtype=x.dtype)
    state = inputs.get("state")
    if case.mode == "update":
        parameters = [
            tensor("x", x.mT, 3, 3),
            tensor("state", state, 2, 3),
            tensor("weight", inputs["weight"], 1, 0),
            tensor("bias", inputs["bias"], 1, 0) if case.bias else tensor("bias", out, 3, 2),
            tensor("y", out, 3, 2),
            np.int32(batch * channels).tobytes(),
        ]
        grid = -(-batch * channels // config.threads)
    else:
        final = launch._start(x, case.width, state, inputs.get("cu_seqlens"))
        groups, runs = -(-channels // (config.channels * config.threads)), -(-tokens // RUN)
        parameters = [
            tensor("x", x, 3, 2),
            tensor("weight", inputs["weight"], 1, 0),
            tensor("bias", inputs["bias"], 1, 0) if case.bias else tensor("bias", out, 3, 2),
            tensor("initial", state, 3, 3) if case.initial else tensor("initial", out, 3, 2),
            tensor("final_state", final, 3, 3) if case.final else tensor("final_state", out, 3, 2),
            tensor("cu_seqlens", inputs["cu_seqlens"], 1, 0) if case.packed else tensor("cu_seqlens", out, 3, 2),
            tensor("y", out, 3, 2),
            np.int32(groups).tobytes(),
            np.int32(runs).tobytes(),
        ]
        grid = groups * runs * batch
    machine = emulate.Machine(ptx, 0, memory, parameters)
    order = list(range(grid))
    random.Random(seed).shuffle(order)
    machine.run(grid, seed, order)

    def read(name: str) -> torch.Tensor:
        like, raw = kept[name]
        return torch.from_numpy(raw).view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())

    found = {"y": read("y")}
    if case.mode == "update":
        found["state"] = read("state")
    elif case.final:
        found["final_state"] = read("final_state")
    return found


@pytest.mark.parametrize(("arch", "case"), EMULATED, ids=lambda x: getattr(x, "name", x))
def test_emulated(arch: str, case: Case) -> None:
    seed, draw = generator()
    inputs = case.make("cpu", draw)
    config = config_of(case, inputs, arch)
    kernel = runtime.Kernel("causal_conv1d", "any_update" if case.mode == "update" else "any_fwd", config)
    ptx = runtime.compile_only(kernel, archs.compile_target(arch)).ptx
    got = run_on_cpu(case, inputs, config, ptx, seed)
    want, theirs = case.oracle(inputs), portable(case, inputs)
    assert set(got) == set(want)
    for name, x in got.items():
        if name in case.exact:
            assert torch.equal(x.double(), want[name]), name
        verdict = accuracy(x, theirs[name], want[name])
        assert verdict.ok, f"{name}: {verdict.reason}"


def test_tokens_of_no_sequence_get_zeros() -> None:
    case = Case((5, 3), 8, FP32, packed=True)
    seed, draw = generator()
    inputs = case.make("cpu", draw)
    whole = {**inputs, "x": torch.cat([inputs["x"][:, :2] + 1, inputs["x"], inputs["x"][:, :3]], 1)}
    whole["cu_seqlens"] = inputs["cu_seqlens"] + 2
    config = config_of(case, inputs, "sm_90")
    ptx = runtime.compile_only(runtime.Kernel("causal_conv1d", "any_fwd", config), "sm_90a").ptx
    got = run_on_cpu(case, whole, config, ptx, seed)["y"]
    assert torch.equal(got[:, :2], torch.zeros(1, 2, 8)) and torch.equal(got[:, 10:], torch.zeros(1, 3, 8))
    torch.testing.assert_close(got[:, 2:10], portable(case, inputs)["y"])
