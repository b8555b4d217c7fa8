"""The recurrent kernel's PTX of every class of targets, run on the CPU, against the fp64 recurrence."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from accel.kernels.gated_delta_rule.config import COLUMNS, RecurrentConfig
from accel.kernels.gated_delta_rule.recurrent_cases import RecurrentCase, portable
from accel.kernels.linear_attention.case import Inputs, Outputs
from accel.kernels.runtime import arch as archs
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime import emulate
from accel.testing import accuracy

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
INTS = {torch.int32: "int32", torch.int64: "int64"}


def config_of(case: RecurrentCase, inputs: Inputs, arch: str, warps: int) -> RecurrentConfig:
    def name(key: str) -> str | None:
        return {**NAMES, **INTS}[inputs[key].dtype] if key in inputs else None

    final = None if case.state == "initial" else case.state_dtype if case.in_place else "float32"
    sigmoid = "twice_sigmoid" if case.allow_neg_eigval else "sigmoid"
    return RecurrentConfig(
        head_dim=case.dims[0],
        dtype=case.dtype,
        v_dtype=case.v_dtype or case.dtype,
        g_dtype=name("g"),
        beta_dtype=name("beta"),
        a_dtype=name("A_log"),
        bias_dtype=name("dt_bias"),
        initial=name("initial_state"),
        final=final,
        v_first=case.state_v_first,
        l2norm=case.use_qk_l2norm,
        beta=sigmoid if case.use_beta_sigmoid else "plain",
        index=name("indices"),
        packed=name("cu_seqlens"),
        single=not case.packed and case.lengths[0] == 1,
        warps=warps,
        overlap=arch not in ("sm_80", "sm_86", "sm_89"),
    )


def run_on_cpu(case: RecurrentCase, inputs: Inputs, config: RecurrentConfig, ptx: str, seed: int) -> Outputs:
    """What the kernel writes into memory that was NaN, its CTAs in any order."""
    memory = emulate.Memory()
    kept: dict[str, tuple[torch.Tensor, np.ndarray]] = {}

    def tensor(name: str, t: torch.Tensor, dims: int) -> bytes:
        raw = np.frombuffer(bytearray(bytes(t.untyped_storage())), np.uint8)
        kept[name] = (t, raw)
        address = memory.place(raw) + t.storage_offset() * t.element_size()
        constant = 1 if t.dim() == 4 else 0  # the last stride of a rank-4 tensor is 1, and unknown to the kernel
        sizes = list(t.shape)
        if name in ("q", "k"):
            sizes = sizes[:3]
        if name in ("initial_state", "final_state"):
            sizes.pop(3 if config.v_first else 2)
        return emulate.pack_tensor(address, sizes, t.stride()[: t.dim() - constant] if t.dim() > 1 else ())

    q, v = inputs["q"], inputs["v"]
    out = torch.full(v.shape, torch.nan, dtype=v.dtype)
    sequences = len(case.lengths)
    inner = case.dims[::-1] if case.state_v_first else case.dims
    final = torch.full((sequences, v.shape[2], *inner), torch.nan)
    parameters = []
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"):
        parameters.append(tensor(name, inputs.get(name, out), 4))
    if case.in_place:
        parameters.append(parameters[-1])
    else:
        parameters.append(tensor("final_state", final if config.final else out, 4))
    for name in ("indices", "cu_seqlens"):
        parameters.append(tensor(name, inputs.get(name, out), 1))
    parameters.append(tensor("o", out, 4))
    warps = sequences * v.shape[2] * (v.shape[3] // COLUMNS)
    parameters += [np.float32(q.shape[3] ** -0.5).tobytes(), np.int32(warps).tobytes()]
    machine = emulate.Machine(ptx, 0, memory, parameters)
    order = list(range(-(-warps // config.warps)))
    random.Random(seed).shuffle(order)
    machine.run(len(order), seed, order)

    def read(name: str) -> torch.Tensor:
        like, raw = kept[name]
        flat = torch.from_numpy(raw).view(like.dtype)
        return flat.as_strided(like.shape, like.stride(), like.storage_offset())

    found = {"o": read("o")}
    if config.final is not None:
        found["final_state"] = read("initial_state" if case.in_place else "final_state")
    return found


#: (arch, warps of a CTA, case): both layouts and every head dim, dtype, gate, state option and arch class.
EMULATED = (
    ("sm_90", 1, RecurrentCase((1, 1), (1, 2), (128, 32), "bfloat16")),
    ("sm_90", 4, RecurrentCase((1,), (1, 2), (64, 48), "float32", state_v_first=True, gate="softplus",
                               use_beta_sigmoid=True)),
    ("sm_80", 1, RecurrentCase((5,), (1, 2), (64, 16), "bfloat16", gate="softplus", use_beta_sigmoid=True,
                               allow_neg_eigval=True, scalar_dtype="float16", layout="split")),
    ("sm_90", 4, RecurrentCase((3, 3), (1, 1), (256, 32), "float16", state="final", state_v_first=True)),
    ("sm_90", 1, RecurrentCase((2, 0, 3), (1, 1), (64, 32), "float32", packed=True, gate="resets", state="padded")),
    ("sm_90", 1, RecurrentCase((1, 0, 2, 1), (1, 1), (64, 16), "bfloat16", packed=True, state="pool",
                               state_dtype="bfloat16")),
    ("sm_90", 1, RecurrentCase((1,) * 3, (1, 1), (128, 16), "bfloat16", state="pool", state_v_first=True,
                               state_dtype="float16", scalar_dtype="bfloat16")),
    ("sm_90", 1, RecurrentCase((2,), (1, 1), (256, 16), "bfloat16", state="initial", bare=True, v_dtype="float32")),
    ("sm_100", 1, RecurrentCase((2,), (1, 1), (128, 16), "float32", state="in_place", gate="strong")),
)  # fmt: skip


@pytest.mark.parametrize(("arch", "warps", "case"), EMULATED, ids=lambda x: getattr(x, "name", None))
def test_emulated(arch: str, warps: int, case: RecurrentCase) -> None:
    """Index arithmetic, bounds of every access, gates and both layouts, by the accuracy rule."""
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    inputs = case.make("cpu", torch.Generator().manual_seed(seed))
    config = config_of(case, inputs, arch, warps)
    kernel = runtime.Kernel("gated_delta_rule", "any_recurrent", config)
    ptx = runtime.compile_only(kernel, archs.compile_target(arch)).ptx
    got = run_on_cpu(case, inputs, config, ptx, seed)
    want, theirs = case.oracle(inputs), portable(case, inputs)
    assert set(got) == set(want)
    for name, x in got.items():
        verdict = accuracy(x, theirs[name], want[name])
        assert verdict.ok, f"{name}: {verdict.reason}"


def test_tokens_of_no_sequence_get_zeros() -> None:
    case = RecurrentCase((2, 1), (1, 1), (64, 16), "float32", packed=True)
    inputs = case.make("cpu", torch.Generator().manual_seed(1))
    for name in ("q", "k", "v", "g", "beta"):
        x = inputs[name]
        inputs[name] = torch.cat([x[:, :1], x, x[:, :2]], 1)
    inputs["cu_seqlens"] = inputs["cu_seqlens"] + 1
    config = config_of(case, inputs, "sm_90", 1)
    ptx = runtime.compile_only(runtime.Kernel("gated_delta_rule", "any_recurrent", config), "sm_90a").ptx
    got = run_on_cpu(case, inputs, config, ptx, 0)["o"]
    assert torch.equal(got[:, :1], torch.zeros(1, 1, 1, 16)) and torch.equal(got[:, 4:], torch.zeros(1, 2, 1, 16))
    assert got[:, 1:4].abs().sum((0, 2, 3)).all()
