"""Runs a kernel's PTX on the CPU, so that index arithmetic, masks, barriers and races can be tested without a GPU.

A slow model of the machine on purpose: lanes of a warp in lockstep with a program counter each, warps interleaved at
random, CTAs one after the other in any order. Asynchronous copies land as late as the program allows (`late=True`: when
it waits for them) or at once (`late=False`: what is overwritten too early shows). Every access is checked against the
arrays that were passed in and the shared memory that was asked for; shared memory starts as NaN. What is not modelled:
time, caches, memory order between CTAs, textures, TMA, wgmma, and most of PTX: an unknown instruction raises.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .emulated import EmulationError, Memory, from_bf16, shift, to_bf16, trunc

LANES = 32
_SHARED_BASE = 0x400  #: shared addresses start here, so that 0 is none of them
_TYPES: dict[str, Any] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "f16": np.float16, "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64, "pred": np.bool_,
}  # fmt: skip
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


class _Warp:
    def __init__(self, cta: _Cta, number: int) -> None:
        self.cta, self.number = cta, number
        self.registers: dict[str, np.ndarray] = {}
        self.pc = np.zeros(LANES, np.int64)
        self.live = np.ones(LANES, bool)
        self.copies: list[list[tuple[int, int, int]]] = [[]]  # committed groups, the last one open
        self.tid = np.arange(number * LANES, (number + 1) * LANES, dtype=np.uint32)


class _Cta:
    def __init__(self, machine: Machine, index: int, warps: int) -> None:
        self.machine, self.index = machine, index
        self.shared = np.full(machine.smem, 0xFF, np.uint8)
        self.warps = [_Warp(self, w) for w in range(warps)]

    def shared_span(self, address: int, size: int) -> np.ndarray:
        start = address - _SHARED_BASE
        if start < 0 or start + size > len(self.shared):
            raise EmulationError(f"shared access of {size} bytes at offset {start}, {len(self.shared)} were asked for")
        return self.shared[start : start + size]


@dataclass
class _Statement:
    text: str
    run: Callable[[_Warp, np.ndarray], Any]
    sync: bool = False


class Machine:
    """One kernel, its parameters packed as the DSL does, and where it keeps its arrays."""

    def __init__(self, ptx: str, smem: int, memory: Memory, parameters: Sequence[bytes], late: bool = True) -> None:
        self.smem, self.memory, self.late = smem, memory, late
        self.parameters = parameters
        self.bank_conflicts = 0
        self.threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])  # type: ignore[index]
        self.statements: list[_Statement] = []
        self.labels: dict[str, int] = {}
        self._parse(ptx)

    # --- Running ---------------------------------------------------------------------------------------------------

    def run(self, grid: int, seed: int = 0, order: Sequence[int] | None = None) -> None:
        """All CTAs of a one-dimensional grid, in `order`; `seed` interleaves the warps."""
        self.grid = grid
        chosen = random.Random(seed)
        for index in order if order is not None else range(grid):
            self._run_cta(_Cta(self, index, self.threads // LANES), chosen)

    def _run_cta(self, cta: _Cta, chosen: random.Random) -> None:
        running = {w: self._steps(w, chosen) for w in cta.warps}
        waiting: dict[int, list[_Warp]] = {}
        blocked: set[_Warp] = set()
        while running:
            ready = [w for w in running if w not in blocked]
            if not ready:
                raise EmulationError(f"deadlock: warps wait at barriers {sorted(waiting)}")
            warp = chosen.choice(ready)
            try:
                barrier = next(running[warp])
            except StopIteration:
                del running[warp]
                continue
            if barrier is None:
                continue
            name, count = barrier
            arrived = waiting.setdefault(name, [])
            arrived.append(warp)
            blocked.add(warp)
            if len(arrived) * LANES == (count or self.threads):
                blocked -= set(arrived)
                del waiting[name]

    def _steps(self, warp: _Warp, chosen: random.Random) -> Iterator[tuple[int, int] | None]:
        """Runs a warp; yields at barriers (number, threads) and, now and then, None."""
        until = chosen.randrange(20, 400)
        parked = np.zeros(LANES, bool)
        while warp.live.any():
            until -= 1
            if until == 0:
                until = chosen.randrange(20, 400)
                yield None
            able = warp.live & ~parked
            if not able.any():
                raise EmulationError("lanes wait for each other at different instructions")
            pc = int(warp.pc[able].min())
            active = able & (warp.pc == pc)
            statement = self.statements[pc]
            if statement.sync:
                all_here = (warp.pc[warp.live] == pc).all()
                if not all_here:
                    parked |= active
                    continue
                active = warp.live.copy()
                parked[:] = False
            warp.pc[active] = pc + 1
            try:
                barrier = statement.run(warp, active)
            except EmulationError as error:
                raise EmulationError(
                    f"{error}; CTA {warp.cta.index}, warp {warp.number}, at: {statement.text}"
                ) from None
            if isinstance(barrier, tuple):
                yield barrier

    # --- Parsing ---------------------------------------------------------------------------------------------------

    def _parse(self, ptx: str) -> None:
        body = ptx[ptx.index(".entry") :]
        body = re.sub(r"//[^\n]*", "", body[body.index("{") + 1 : body.rindex("}")])
        body = re.sub(r"\.pragma\s+\"[^\"]*\"\s*;", "", body)
        for piece in self._split(body):
            while (label := re.match(r"\s*(\$?\w+):(?!:)", piece)) is not None:
                self.labels[label[1]] = len(self.statements)
                piece = piece[label.end() :]
            text = " ".join(piece.split())
            if text and not text.startswith(".reg"):
                self.statements.append(self._statement(text))

    @staticmethod
    def _split(body: str) -> Iterator[str]:
        """Statements; a brace that begins one, after labels, opens a scope and means nothing; others are vectors."""
        at, depth = "", 0
        for char in body:
            if (char == "{" and at.strip()[-1:] in ("", ":")) or (char == "}" and depth == 0):
                continue
            depth += (char == "{") - (char == "}")
            if char == ";":
                yield at
                at = ""
            else:
                at += char

    def _statement(self, text: str) -> _Statement:
        match = re.fullmatch(r"(?:@(!?)(%?\w+) )?([\w.:]+)(?: (.*))?", text)
        if match is None:
            raise EmulationError(f"not understood: {text}")
        negated, guard, opcode, rest = match[1], match[2], match[3], match[4] or ""
        operands = [o.strip() for o in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", rest)]
        name, *parts = opcode.split(".")
        handler = getattr(self, f"_op_{name}", None)
        if handler is None:
            raise EmulationError(f"unknown instruction: {text}")
        inner = handler(parts, operands)
        run = inner
        if guard is not None:

            def run(warp: _Warp, active: np.ndarray) -> Any:
                on = warp.registers[guard] != bool(negated)
                active = active & on
                return inner(warp, active) if active.any() else None

        sync = (name in ("shfl", "vote", "ldmatrix", "mma", "bar", "barrier")) and guard is None
        return _Statement(text, run, sync)

    def _read(self, operand: str, kind: str) -> Callable[[_Warp], np.ndarray]:
        dtype = _TYPES[kind]
        negate = operand.startswith("!")
        operand = operand.lstrip("!")
        if operand == "%tid.x":
            return lambda warp: warp.tid.astype(dtype)
        if operand == "%ctaid.x":
            return lambda warp: np.full(LANES, warp.cta.index, dtype)
        if operand in ("%nctaid.x", "%ntid.x"):
            return lambda warp: np.full(LANES, self.grid if operand[2] == "c" else self.threads, dtype)
        if operand.startswith("__dynamic_shmem__"):
            return lambda warp: np.full(LANES, _SHARED_BASE, dtype)
        if operand.startswith("%") or operand in ("p", "h"):

            def register(warp: _Warp) -> np.ndarray:
                found = warp.registers.get(operand)
                if found is None:
                    raise EmulationError(f"{operand} is read before it is written")
                if dtype is np.bool_:
                    return found != negate
                return found.view(dtype) if found.dtype.itemsize == dtype().itemsize else found.astype(dtype)

            return register
        if operand.startswith("0f"):
            constant = np.full(LANES, int(operand[2:], 16), np.uint32).view(np.float32)
            constant = constant.view(dtype) if dtype().itemsize == 4 else constant.astype(dtype)
        elif operand.startswith("0d"):
            constant = np.full(LANES, int(operand[2:], 16), np.uint64).view(dtype)
        elif dtype is np.float32:
            constant = np.full(LANES, float(operand), np.float32)
        else:
            bits = 8 * dtype().itemsize
            unsigned = np.dtype(f"u{dtype().itemsize}").type
            constant = np.full(LANES, int(operand, 0) & ((1 << bits) - 1), unsigned).view(dtype)
        return lambda warp: constant

    @staticmethod
    def _write(warp: _Warp, active: np.ndarray, name: str, values: np.ndarray) -> None:
        if values.dtype == np.bool_:
            stored = values
        elif name.startswith("%rd"):
            stored = values.astype(np.int64).view(np.uint64) if values.dtype.kind == "i" else values.view(np.uint64)
        elif name.startswith("%rs") or name == "h":
            stored = values.astype(np.uint16) if values.dtype.itemsize == 1 else values.view(np.uint16)
        elif values.dtype.itemsize < 4:
            stored = values.astype(np.int32 if values.dtype.kind == "i" else np.uint32).view(np.uint32)
        elif values.dtype.itemsize == 8:
            stored = values.astype(np.uint32)
        else:
            stored = values.view(np.uint32)
        if active.all():
            warp.registers[name] = stored.copy()
        else:
            old = warp.registers.get(name)
            old = np.zeros(LANES, stored.dtype) if old is None else old.copy()
            old[active] = stored[active]
            warp.registers[name] = old

    def _compute(self, target: str, kinds: Sequence[str], sources: Sequence[str], function: Callable[..., np.ndarray]):  # type: ignore[no-untyped-def]
        read = [self._read(o, k) for o, k in zip(sources, kinds, strict=True)]

        def run(warp: _Warp, active: np.ndarray) -> None:
            with np.errstate(all="ignore"):
                self._write(warp, active, target, function(*(r(warp) for r in read)))

        return run

    # --- Arithmetic ------------------------------------------------------------------------------------------------

    def _binary(self, parts, operands, function):  # type: ignore[no-untyped-def]
        return self._compute(operands[0], (parts[-1],) * 2, operands[1:], function)

    def _op_add(self, parts, o):  # type: ignore[no-untyped-def]
        return self._binary(parts, o, np.add)

    def _op_sub(self, parts, o):  # type: ignore[no-untyped-def]
        return self._binary(parts, o, np.subtract)

    def _op_mul(self, parts, o):  # type: ignore[no-untyped-def]
        if parts[0] == "wide":
            wide = np.int64 if parts[1][0] == "s" else np.uint64
            return self._binary(parts, o, lambda a, b: a.astype(wide) * b.astype(wide))
        if parts[0] == "hi":
            wide = np.int64 if parts[1][0] == "s" else np.uint64
            bits = wide(int(parts[1][1:]))
            return self._binary(parts, o, lambda a, b: ((a.astype(wide) * b.astype(wide)) >> bits).astype(a.dtype))
        return self._binary(parts, o, np.multiply)

    def _op_mad(self, parts, o):  # type: ignore[no-untyped-def]
        kind = parts[-1]
        if parts[0] == "wide":
            wide, name = (np.int64, "s64") if kind == "s32" else (np.uint64, "u64")
            return self._compute(o[0], (kind, kind, name), o[1:], lambda a, b, c: a.astype(wide) * b.astype(wide) + c)
        return self._compute(o[0], (kind,) * 3, o[1:], lambda a, b, c: a * b + c)

    def _op_fma(self, parts, o):  # type: ignore[no-untyped-def]
        return self._compute(
            o[0], ("f32",) * 3, o[1:],
            lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
        )  # fmt: skip

    def _op_div(self, parts, o):  # type: ignore[no-untyped-def]
        if parts[-1] == "f32":
            return self._binary(parts, o, np.divide)
        return self._binary(parts, o, trunc)

    def _op_rem(self, parts, o):  # type: ignore[no-untyped-def]
        return self._binary(parts, o, lambda a, b: (a - trunc(a, b) * b).astype(a.dtype))

    def _op_min(self, parts, o):  # type: ignore[no-untyped-def]
        return self._binary(parts, o, np.fmin)

    def _op_max(self, parts, o):  # type: ignore[no-untyped-def]
        return self._binary(parts, o, np.fmax)

    def _op_neg(self, parts, o):  # type: ignore[no-untyped-def]
        return self._compute(o[0], parts[-1:], o[1:], np.negative)

    def _op_abs(self, parts, o):  # type: ignore[no-untyped-def]
        return self._compute(o[0], parts[-1:], o[1:], np.abs)

    def _op_not(self, parts, o):  # type: ignore[no-untyped-def]
        return self._compute(o[0], parts[-1:], o[1:], np.logical_not if parts[-1] == "pred" else np.invert)

    def _op_and(self, parts, o):  # type: ignore[no-untyped-def]
        return self._binary(parts, o, np.logical_and if parts[-1] == "pred" else np.bitwise_and)

    def _op_or(self, parts, o):  # type: ignore[no-untyped-def]
        return self._binary(parts, o, np.logical_or if parts[-1] == "pred" else np.bitwise_or)

    def _op_xor(self, parts, o):  # type: ignore[no-untyped-def]
        return self._binary(parts, o, np.logical_xor if parts[-1] == "pred" else np.bitwise_xor)

    def _op_shl(self, parts, o):  # type: ignore[no-untyped-def]
        return self._compute(o[0], (parts[-1], "u32"), o[1:], lambda a, n: shift(a, n, np.left_shift))

    def _op_shr(self, parts, o):  # type: ignore[no-untyped-def]
        return self._compute(o[0], (parts[-1], "u32"), o[1:], lambda a, n: shift(a, n, np.right_shift))

    def _op_shf(self, parts, o):  # type: ignore[no-untyped-def]
        if parts[0] not in ("l", "r") or parts[1] != "wrap":
            raise EmulationError(f"shf.{'.'.join(parts)} is not modelled")
        wide = np.uint64

        def funnel(low: np.ndarray, high: np.ndarray, n: np.ndarray) -> np.ndarray:
            pair, by = low.astype(wide) | high.astype(wide) << wide(32), (n & np.uint32(31)).astype(wide)
            return (pair >> by if parts[0] == "r" else pair << by >> wide(32)).astype(np.uint32)

        return self._compute(o[0], ("u32",) * 3, o[1:], funnel)

    def _op_popc(self, parts, o):  # type: ignore[no-untyped-def]
        return self._compute(o[0], ("u32",), o[1:], lambda a: np.array([int(v).bit_count() for v in a], np.uint32))

    def _op_selp(self, parts, o):  # type: ignore[no-untyped-def]
        return self._compute(o[0], (parts[-1], parts[-1], "pred"), o[1:], lambda a, b, p: np.where(p, a, b))

    def _op_setp(self, parts, o):  # type: ignore[no-untyped-def]
        how, kind = parts[0], parts[-1]
        if how in ("neu", "equ"):
            return self._compute(
                o[0], (kind,) * 2, o[1:],
                lambda a, b: np.isnan(a) | np.isnan(b) | ((a != b) if how == "neu" else (a == b)),
            )  # fmt: skip
        if how == "ne" and kind == "f32":
            return self._compute(o[0], (kind,) * 2, o[1:], lambda a, b: ~np.isnan(a) & ~np.isnan(b) & (a != b))
        return self._compute(o[0], (kind,) * 2, o[1:], _COMPARE[how])

    def _op_mov(self, parts, o):  # type: ignore[no-untyped-def]
        kind = parts[-1]
        return self._compute(o[0], (kind,), o[1:], lambda a: a)

    def _op_cvt(self, parts, o):  # type: ignore[no-untyped-def]
        if parts[1] in ("bf16x2", "f16x2"):
            convert = to_bf16 if parts[1] == "bf16x2" else lambda x: x.astype(np.float16).view(np.uint16)
            return self._compute(
                o[0], ("f32", "f32"), o[1:],
                lambda high, low: convert(high).astype(np.uint32) << np.uint32(16) | convert(low).astype(np.uint32),
            )  # fmt: skip
        target, source = parts[-2], parts[-1]
        return self._compute(o[0], (source,), o[1:], lambda a: a.astype(_TYPES[target]))

    def _op_ex2(self, parts, o):  # type: ignore[no-untyped-def]
        return self._compute(o[0], ("f32",), o[1:], np.exp2)

    def _op_lg2(self, parts, o):  # type: ignore[no-untyped-def]
        return self._compute(o[0], ("f32",), o[1:], np.log2)

    def _op_rcp(self, parts, o):  # type: ignore[no-untyped-def]
        return self._compute(o[0], ("f32",), o[1:], lambda a: np.float32(1) / a)

    def _op_rsqrt(self, parts, o):  # type: ignore[no-untyped-def]
        return self._compute(o[0], ("f32",), o[1:], lambda a: np.float32(1) / np.sqrt(a))

    def _op_createpolicy(self, parts, o):  # type: ignore[no-untyped-def]
        return lambda warp, active: self._write(warp, active, o[0], np.zeros(LANES, np.uint64))

    # --- Control ---------------------------------------------------------------------------------------------------

    def _op_bra(self, parts, o):  # type: ignore[no-untyped-def]
        def run(warp: _Warp, active: np.ndarray) -> None:
            warp.pc[active] = self.labels[o[0]]

        return run

    def _op_ret(self, parts, o):  # type: ignore[no-untyped-def]
        def run(warp: _Warp, active: np.ndarray) -> None:
            warp.live[active] = False

        return run

    def _op_fence(self, parts, o):  # type: ignore[no-untyped-def]
        return lambda warp, active: None

    _op_membar = _op_griddepcontrol = _op_fence

    def _op_bar(self, parts, o):  # type: ignore[no-untyped-def]
        if parts[0] == "warp":
            return lambda warp, active: None
        name = self._read(o[0], "u32")
        count = self._read(o[1], "u32") if len(o) > 1 else None
        return lambda warp, active: (int(name(warp)[0]), int(count(warp)[0]) if count is not None else 0)

    _op_barrier = _op_bar

    def _op_shfl(self, parts, o):  # type: ignore[no-untyped-def]
        kind, by = parts[1], self._read(o[2], "u32")
        lanes = np.arange(LANES)
        source = self._read(o[1], "b32")

        def run(warp: _Warp, active: np.ndarray) -> None:
            n = by(warp).astype(np.int64)
            index = lanes ^ n if kind == "bfly" else n if kind == "idx" else lanes + (n if kind == "down" else -n)
            index = np.where((index < 0) | (index >= LANES), lanes, index)
            self._write(warp, active, o[0].split("|")[0], source(warp)[index])

        return run

    def _op_vote(self, parts, o):  # type: ignore[no-untyped-def]
        predicate, kind = self._read(o[1], "pred"), parts[1]

        def run(warp: _Warp, active: np.ndarray) -> None:
            p = predicate(warp) & active
            if kind == "ballot":
                word = sum(1 << i for i in range(LANES) if p[i])
                self._write(warp, active, o[0], np.full(LANES, word, np.uint32))
            else:
                self._write(warp, active, o[0], np.full(LANES, p.any() if kind == "any" else p[active].all()))

        return run

    # --- Memory ----------------------------------------------------------------------------------------------------

    def _address(self, operand: str) -> Callable[[_Warp], np.ndarray]:
        base, _, offset = operand.strip("[]").partition("+")
        shared = not base.startswith("%rd") and "__dynamic_shmem__" not in base
        read = self._read(base, "u32" if shared or "shmem" in base else "u64")
        add = int(offset or 0)
        return lambda warp: read(warp).astype(np.int64) + add

    def _span(self, warp: _Warp, space: str, address: int, size: int) -> np.ndarray:
        if address % size:
            raise EmulationError(f"misaligned access of {size} bytes at {address:#x}")
        return warp.cta.shared_span(address, size) if space == "shared" else self.memory.span(address, size)

    def _op_ld(self, parts, o):  # type: ignore[no-untyped-def]
        dtype = _TYPES[parts[-1]]
        names = [n.strip() for n in o[0].strip("{}").split(",")]
        if parts[0] == "param":
            match = re.fullmatch(r"\[\w+_param_(\d+)(?:\+(\d+))?\]", o[1])
            data = self.parameters[int(match[1])][int(match[2] or 0) :]  # type: ignore[index]
            values = np.frombuffer(data, dtype, len(names))

            def parameter(warp: _Warp, active: np.ndarray) -> None:
                for name, value in zip(names, values, strict=True):
                    self._write(warp, active, name, np.full(LANES, value, dtype))

            return parameter
        space = "shared" if "shared" in parts else "global"
        address, size = self._address(o[1]), dtype().itemsize * len(names)

        def run(warp: _Warp, active: np.ndarray) -> None:
            values = np.zeros((LANES, len(names)), dtype)
            at = address(warp)
            for lane in np.flatnonzero(active):
                values[lane] = self._span(warp, space, int(at[lane]), size).view(dtype)
            for i, name in enumerate(names):
                self._write(warp, active, name, values[:, i].copy())

        return run

    def _op_st(self, parts, o):  # type: ignore[no-untyped-def]
        kind, dtype = parts[-1], _TYPES[parts[-1]]
        read = [self._read(n.strip(), kind) for n in o[1].strip("{}").split(",")]
        space = "shared" if "shared" in parts else "global"
        address, size = self._address(o[0]), dtype().itemsize * len(read)

        def run(warp: _Warp, active: np.ndarray) -> None:
            values = np.stack([r(warp) for r in read], 1)
            at = address(warp)
            for lane in np.flatnonzero(active):
                self._span(warp, space, int(at[lane]), size).view(dtype)[:] = values[lane]

        return run

    def _op_atom(self, parts, o):  # type: ignore[no-untyped-def]
        if "add" not in parts:
            raise EmulationError("only atomic additions are modelled")
        address, value = self._address(o[1]), self._read(o[2], parts[-1])
        dtype = _TYPES[parts[-1]]

        def run(warp: _Warp, active: np.ndarray) -> None:
            old = np.zeros(LANES, dtype)
            at, add = address(warp), value(warp)
            for lane in np.flatnonzero(active):
                place = self._span(warp, "global", int(at[lane]), dtype().itemsize).view(dtype)
                old[lane] = place[0]
                place[0] += add[lane]
            self._write(warp, active, o[0], old)

        return run

    def _op_cp(self, parts, o):  # type: ignore[no-untyped-def]
        if parts[1] == "commit_group":
            return lambda warp, active: warp.copies.append([])
        if parts[1] in ("wait_group", "wait_all"):
            pending = int(o[0]) if parts[1] == "wait_group" else 0

            def wait(warp: _Warp, active: np.ndarray) -> None:
                while len(warp.copies) - 1 > pending:
                    self._land(warp, warp.copies.pop(0))

            return wait
        target, source = self._address(o[0]), self._address(o[1])
        size, bytes_read = int(o[2]), self._read(o[3], "u32")

        def run(warp: _Warp, active: np.ndarray) -> None:
            to, at, n = target(warp), source(warp), bytes_read(warp)
            copies = []
            for lane in np.flatnonzero(active):
                self._span(warp, "shared", int(to[lane]), size)
                if n[lane]:
                    self._span(warp, "global", int(at[lane]), size)
                copies.append((int(to[lane]), int(at[lane]), int(n[lane])))
            if self.late:
                warp.copies[-1].extend(copies)
            else:
                self._land(warp, copies)

        return run

    def _land(self, warp: _Warp, copies: Sequence[tuple[int, int, int]]) -> None:
        for to, at, n in copies:
            place = warp.cta.shared_span(to, 16)
            place[n:] = 0
            if n:
                place[:n] = self.memory.span(at, n)

    # --- Matrices --------------------------------------------------------------------------------------------------

    def _op_ldmatrix(self, parts, o):  # type: ignore[no-untyped-def]
        names = [n.strip() for n in o[0].strip("{}").split(",")]
        address, transposed = self._address(o[1]), "trans" in parts
        lanes = np.arange(LANES)

        def run(warp: _Warp, active: np.ndarray) -> None:
            at = address(warp)
            rows = np.stack([self._span(warp, "shared", int(a), 16).view(np.uint16) for a in at])
            for i, name in enumerate(names):
                matrix = rows[8 * i : 8 * i + 8]
                self.bank_conflicts += 8 - len(set((at[8 * i : 8 * i + 8] // 16 % 8).tolist()))
                matrix = matrix.T if transposed else matrix
                low, high = matrix[lanes // 4, lanes % 4 * 2], matrix[lanes // 4, lanes % 4 * 2 + 1]
                self._write(warp, active, name, low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16))

        return run

    def _op_mma(self, parts, o):  # type: ignore[no-untyped-def]
        if "m16n8k16" not in parts:
            raise EmulationError("only m16n8k16 is modelled")
        widen = from_bf16 if "bf16" in parts else lambda x: x.view(np.float16).astype(np.float32)
        d = [n.strip() for n in o[0].strip("{}").split(",")]
        a, b = ([self._read(n.strip(), "b32") for n in x.strip("{}").split(",")] for x in o[1:3])
        c = [self._read(n.strip(), "f32") for n in o[3].strip("{}").split(",")]
        row, column = np.arange(LANES) // 4, np.arange(LANES) % 4 * 2

        def halves(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return widen((word & np.uint32(0xFFFF)).astype(np.uint16)), widen((word >> np.uint32(16)).astype(np.uint16))

        def run(warp: _Warp, active: np.ndarray) -> None:
            A, B = np.zeros((16, 16)), np.zeros((16, 8))
            for i, read in enumerate(a):
                r, k = row + i % 2 * 8, column + i // 2 * 8
                A[r, k], A[r, k + 1] = halves(read(warp))
            for i, read in enumerate(b):
                B[column + i * 8, row], B[column + i * 8 + 1, row] = halves(read(warp))
            with np.errstate(all="ignore"):
                product = A @ B
                for i, name in enumerate(d):
                    value = product[row + i // 2 * 8, column + i % 2] + c[i](warp)
                    self._write(warp, active, name, value.astype(np.float32))

        return run


def pack_tensor(address: int, sizes: Sequence[int], strides: Sequence[int]) -> bytes:
    """A tensor parameter as the DSL lays it out: address, symbolic sizes (32-bit), symbolic strides (64-bit)."""
    packed = np.array([address], np.uint64).tobytes() + np.array(sizes, np.int32).tobytes()
    packed += b"\0" * (-len(packed) % 8 if strides else 0)
    return packed + np.array(strides, np.int64).tobytes()
