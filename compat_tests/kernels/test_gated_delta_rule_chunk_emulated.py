"""The three kernels of the chunked forward one after the other, as one compiled function holds them: their PTX on the
CPU, from the public op's arguments to its results, by the accuracy rule."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from accel.kernels.gated_delta_rule import chunk_config
from accel.kernels.gated_delta_rule.chunk_cases import BF16, FP16, ChunkCase, portable
from accel.kernels.gated_delta_rule.chunk_config import CHUNK, SMEM, VECTORS, ChunkConfig
from accel.kernels.linear_attention.case import Inputs, Outputs
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime.emulate import pack_tensor
from accel.kernels.runtime.emulate_sm90 import HopperMachine, Memory, TensorMap, segments_map, tiles_map
from accel.testing import assert_accurate

NAMES = {
    torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.int32: "int32",
    torch.int64: "int64",
}  # fmt: skip


def config_of(case: ChunkCase, inputs: Inputs, warpgroups: int) -> ChunkConfig:
    def name(key: str) -> str | None:
        return NAMES[inputs[key].dtype] if key in inputs else None

    sigmoid = "twice_sigmoid" if case.allow_neg_eigval else "sigmoid"
    return ChunkConfig(
        *case.dims, case.dtype, str(name("g")), str(name("beta")), name("A_log"), name("dt_bias"),
        name("initial_state"), "float32" if case.forward_options()["output_final_state"] else None,
        case.state_v_first, case.use_qk_l2norm, sigmoid if case.use_beta_sigmoid else "plain", name("cu_seqlens"),
        warpgroups, chunk_config.stages(case.dims[0], warpgroups),
    )  # fmt: skip


@cache
def entries(c: ChunkConfig) -> list[str]:
    """The PTX of the tables' kernel, of prep and of scan."""
    ptx = runtime.compile_only(runtime.Kernel("gated_delta_rule", "sm90_fwd", c), "sm_90a").ptx
    found = re.split(r"(?=\.visible \.entry)", ptx)[1:]
    return [next(p for p in found if name in p.splitlines()[0]) for name in ("chunk_table", "sm90_prep", "sm90_scan")]


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


class Call:
    """The memory of one call, whose outputs and workspace are NaN before it."""

    def __init__(self, c: ChunkConfig, case: ChunkCase, inputs: Inputs) -> None:
        self.config, self.inputs, self.memory = c, inputs, Memory()
        q, v = inputs["q"], inputs["v"]
        self.total, self.heads, self.heads_v = q.shape[0] * q.shape[1], q.shape[2], v.shape[2]
        self.sequences = len(case.lengths)
        self.slots = chunk_config.slots(self.total, self.sequences, case.packed)
        self.entries = self.slots * self.heads_v
        self.out = torch.full(v.shape, torch.nan, dtype=v.dtype)
        inner = (c.head_dim_v, c.head_dim) if c.v_first else (c.head_dim, c.head_dim_v)
        self.final = torch.full((self.sequences, self.heads_v, *inner), torch.nan)
        self.scale = c.head_dim**-0.5
        self.work = {
            name: torch.full((self.entries, CHUNK, size), torch.nan, dtype=v.dtype)
            for name, size in (("W", c.head_dim), ("U", c.head_dim_v), ("P", CHUNK))
        }
        self.vectors = torch.full((self.entries, 3, CHUNK), torch.nan)
        self.of_chunks, self.of_sequences = (
            torch.full((n, 4), -1, dtype=torch.int32) for n in (self.slots, self.sequences)
        )
        self.placed: dict[int, tuple[np.ndarray, int]] = {}

    def raw(self, t: Tensor) -> tuple[np.ndarray, int]:
        """(bytes of a tensor's storage, their address), the same for every view of it."""
        key = t.untyped_storage().data_ptr()
        if key not in self.placed:
            raw = np.frombuffer(bytearray(bytes(t.untyped_storage())), np.uint8)
            self.placed[key] = raw, self.memory.place(raw)
        return self.placed[key]

    def packed(self, t: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
        return pack_tensor(self.raw(t)[1] + t.storage_offset() * t.element_size(), sizes, strides)

    def per_head(self, t: Tensor) -> bytes:
        return self.packed(t, (self.total, t.shape[2]), (t.stride(1), t.stride(2)))

    def segments(self, t: Tensor) -> TensorMap:
        """Of (B, T, heads, size), whose batches lie T rows apart."""
        return segments_map(self.raw(t)[0].view(np.uint16), t[0])

    def tiles(self, t: Tensor) -> TensorMap:
        return tiles_map(self.raw(t)[0].view(np.uint16), CHUNK, t.shape[2], t.shape[0], CHUNK)

    def read(self, t: Tensor) -> Tensor:
        return torch.from_numpy(self.raw(t)[0]).view(t.dtype)[: t.numel()].view(t.shape).clone()

    # --- The kernels' parameters, in the order in which the host function passes them --------------------------------

    def table(self) -> list[bytes]:
        row = (self.out.stride(1),)
        o = self.packed(self.out, (self.total, self.heads_v), row)
        cu = o
        if self.config.packed is not None:
            cu = self.packed(self.inputs["cu_seqlens"], (self.sequences + 1,), ())
        return [cu, *(self.packed(t, t.shape[:1], ()) for t in (self.of_chunks, self.of_sequences)), o]

    def prep(self) -> tuple[list[bytes], dict[int, TensorMap]]:
        loaded = [self.inputs[name] for name in ("q", "k", "v")]
        maps = {2 * i: self.segments(t) for i, t in enumerate(loaded)}
        maps |= {2 * i + 6: self.tiles(t) for i, t in enumerate(self.work.values())}
        parameters = [p for t in loaded for p in (b"", ints(t.shape[2]))]
        parameters += [p for _ in self.work for p in (b"", ints(self.entries))]
        parameters += [self.per_head(self.inputs[name]) for name in ("g", "beta")]
        for name in ("A_log", "dt_bias"):
            t = self.inputs.get(name)
            parameters.append(b"\0" * 64 if t is None else self.packed(t, (self.heads_v,), ()))
        parameters.append(self.packed(self.of_chunks, (self.slots,), ()))
        parameters.append(self.packed(self.vectors, (self.entries,), ()))
        parameters += [np.float32(self.scale).tobytes(), ints(self.heads), ints(self.heads_v // self.heads)]
        return parameters, maps

    def scan(self) -> tuple[list[bytes], dict[int, TensorMap]]:
        loaded = [self.inputs["q"], self.inputs["k"]]
        maps = {2 * i: self.segments(t) for i, t in enumerate(loaded)}
        maps |= {2 * i + 4: self.tiles(t) for i, t in enumerate(self.work.values())}
        vectors = self.raw(self.vectors)[0].view(np.uint16)
        maps[10] = tiles_map(vectors, 2 * VECTORS, 64, self.entries, 8)
        maps[12] = self.segments(self.out)
        parameters = [p for t in loaded for p in (b"", ints(t.shape[2]))]
        parameters += [p for _ in self.work for p in (b"", ints(self.entries))]
        parameters += [b"", ints(self.entries), b"", ints(self.heads_v)]
        for t in (self.inputs.get("initial_state"), self.final if self.config.final else None):
            if t is None:
                parameters.append(b"\0" * 64)
                continue
            sizes = list(t.shape)
            sizes.pop(3 if self.config.v_first else 2)
            sizes.pop(2)
            parameters.append(self.packed(t, tuple(sizes), t.stride()[:3]))
        parameters.append(self.packed(self.of_sequences, (self.sequences,), ()))
        return [*parameters, ints(self.heads_v), ints(self.heads_v // self.heads)], maps


def run_on_cpu(case: ChunkCase, inputs: Inputs, warpgroups: int, seed: int, late: bool = True) -> Outputs:
    """What the kernels write, the CTAs of each in any order."""
    c = config_of(case, inputs, warpgroups)
    call, chosen = Call(c, case, inputs), random.Random(seed)
    table, prep, scan = entries(c)

    def run(ptx: str, parameters: list[bytes], maps: dict[int, TensorMap], ctas: int) -> None:
        order = list(range(ctas))
        chosen.shuffle(order)
        HopperMachine(ptx, SMEM, call.memory, parameters, maps, late).run(ctas, seed, order)

    run(table, call.table(), {}, -(-max(call.slots, call.sequences) // 128))
    run(prep, *call.prep(), call.slots * call.heads)
    run(scan, *call.scan(), call.sequences * call.heads_v * c.slices)
    found = {"o": call.read(call.out)}
    if c.final is not None:
        found["final_state"] = call.read(call.final)
    return found


SOFTPLUS: dict[str, Any] = {"gate": "softplus", "use_beta_sigmoid": True}
#: (case, warpgroups of the scan)
EMULATED = (
    (ChunkCase((130,), (1, 1), (128, 128), BF16), 1),
    (ChunkCase((65, 65), (1, 2), (64, 64), FP16, state_v_first=True, layout="split", **SOFTPLUS), 1),
    (ChunkCase((1, 0, 64, 70, 3), (1, 2), (64, 64), BF16, packed=True, gate="resets"), 1),
)


@pytest.mark.parametrize(("case", "warpgroups"), EMULATED, ids=lambda x: getattr(x, "name", str(x)))
def test_whole_op(case: ChunkCase, warpgroups: int) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    inputs = case.make("cpu", torch.Generator().manual_seed(seed))
    got = run_on_cpu(case, inputs, warpgroups, seed)
    want, theirs = case.oracle(inputs), portable(case, inputs)
    assert set(got) == set(want)
    for name, x in got.items():
        assert_accurate(f"{case.name} {name}", x, theirs[name], want[name])
