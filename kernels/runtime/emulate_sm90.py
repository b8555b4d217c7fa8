"""What Hopper adds to the PTX model of `emulate.py`: mbarriers, TMA tiles, wgmma, stmatrix and barrier arrivals.

With `late=True` a load arrives at a random later time, a store reads shared memory when it is waited for, and a product
runs when its group is waited for; with `late=False` all of them at once. Between them they show a stage that is
released too early and one that is read too late. A barrier that never completes is reported with what every warp waits
for. Clusters are of one CTA.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .emulate import _SHARED_BASE, LANES, Machine, _Cta, _Statement, _Warp
from .emulated import EmulationError, Memory, from_bf16

_PARAMETERS = 0x7000000000  #: made-up address of parameter 0; the next ones follow one by one
_PATIENCE = 6000  #: failed waits in a row, without any barrier completing, after which nothing will
_CONVERGED = re.compile(r"(wgmma|elect|stmatrix|setmaxnreg)\b")
_LANE = np.arange(LANES)


@dataclass(slots=True)
class TensorMap:
    """A TMA descriptor of 16-bit elements; dimensions from the contiguous one outwards."""

    array: np.ndarray  #: the elements as flat uint16
    sizes: Sequence[int]
    strides: Sequence[int]  #: in elements
    box: Sequence[int]
    swizzle: int  #: bytes: 32, 64 or 128
    offset: int = 0  #: of the first element


def segments_map(array: np.ndarray, t: Any, columns: int = 64, rows: int = 64) -> TensorMap:
    """Of a (total, heads, size) tensor with any row and head strides, as `blocks.tma.segmented` describes it."""
    sizes = (t.shape[2], 2**30, t.shape[1], 0x7FFF0000, 0x7FFF0000)
    strides = (1, t.stride(0), t.stride(1), t.stride(0), 2**34 - t.stride(0))
    return TensorMap(array, sizes, strides, (columns, rows, 1, 1, 1), 2 * columns, t.storage_offset())


def tiles_map(array: np.ndarray, rows: int, columns: int, entries: int, box_rows: int) -> TensorMap:
    """Of contiguous (entries, rows, columns), in boxes of 64 columns."""
    return TensorMap(array, (columns, rows, entries), (1, columns, rows * columns), (64, box_rows, 1), 128)


def swizzled(address: np.ndarray, width: int) -> np.ndarray:
    """Where a byte of a tile lies whose rows are `width` bytes: 16-byte columns are exchanged by the row."""
    return address ^ (address >> 3 & (width - 16))


def divisor(d: int) -> bytes:
    """The parameter that stands for division by d (Granlund and Montgomery 1994), as the DSL packs it."""
    bits = (d - 1).bit_length()
    factor = (2**32 * (2**bits - d)) // d + 1
    return np.array([d, factor & 0xFFFFFFFF], np.uint32).tobytes() + bytes([min(bits, 1), max(bits - 1, 0), 0, 0])


@dataclass(slots=True)
class _Barrier:
    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def settle(self, cta: _Cta) -> None:
        if self.pending < 0:
            raise EmulationError("more arrivals at an mbarrier than it was made for")
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            cta.completed += 1  # type: ignore[attr-defined]


class HopperMachine(Machine):
    """`tensor_maps`: by the number of the parameter that holds the descriptor."""

    def __init__(
        self,
        ptx: str,
        smem: int,
        memory: Memory,
        parameters: Sequence[bytes],
        tensor_maps: dict[int, TensorMap],
        late: bool = True,
    ) -> None:
        self.tensor_maps = tensor_maps
        self.products = 0
        pieces = re.split(r"(// begin inline asm.*?// end inline asm)", ptx, flags=re.S)
        # Labels of inline assembly are local to its braces.
        named = [re.sub(r"\b(LAB_WAIT|DONE)\b", rf"\g<1>_{i}", p) if i % 2 else p for i, p in enumerate(pieces)]
        super().__init__("".join(named), smem, memory, parameters, late)

    # --- Running ---------------------------------------------------------------------------------------------------

    def _run_cta(self, cta: Any, chosen: random.Random) -> None:
        cta.barriers, cta.flight, cta.completed = {}, [], 0
        for warp in cta.warps:
            warp.groups, warp.stores = [[]], []  # type: ignore[attr-defined]
        running = {w: self._steps(w, chosen) for w in cta.warps}
        named: dict[int, tuple[int, list[_Warp]]] = {}
        blocked: dict[_Warp, int] = {}
        failed, completed = 0, 0
        while running:
            ready = [w for w in running if w not in blocked]
            stuck = not ready or failed > _PATIENCE
            if cta.flight and (stuck or chosen.random() < 0.2):
                self._land_tile(cta, *cta.flight.pop(chosen.randrange(len(cta.flight))))
                failed = 0
                continue
            if stuck:
                raise EmulationError(f"deadlock: {self._waiting(cta, running, blocked)}")
            warp = chosen.choice(ready)
            try:
                got = next(running[warp])
            except StopIteration:
                del running[warp]
                continue
            if got is None:
                continue
            if cta.completed != completed:
                failed, completed = 0, cta.completed
            if got == "failed":
                failed += 1
                continue
            kind, name, count = got  # type: ignore[misc]
            arrived, sleeping = named.get(name, (0, []))
            if kind == "sync":
                sleeping = [*sleeping, warp]
                blocked[warp] = name
            if arrived + LANES > (count or self.threads):
                raise EmulationError(f"more threads at barrier {name} than the {count} it is for")
            named[name] = (arrived + LANES, sleeping)
            if arrived + LANES == (count or self.threads):
                for sleeper in sleeping:
                    del blocked[sleeper]
                del named[name]
        if cta.flight:
            raise EmulationError("a CTA ends while TMA loads are under way")

    def _waiting(self, cta: Any, running: Any, blocked: dict[_Warp, int]) -> str:
        at = {w.number: self.statements[int(w.pc[w.live].min())].text for w in running if w not in blocked}
        named = {w.number: n for w, n in blocked.items()}
        states = {hex(a): (b.pending, b.bytes, b.phase) for a, b in cta.barriers.items()}
        return f"warps at {at}, at barriers {named}; mbarriers (pending, bytes, phase) {states}"

    def _steps(self, warp: _Warp, chosen: random.Random) -> Iterator[Any]:
        """As the base, and yields "failed" where a wait has failed."""
        until, parked = chosen.randrange(20, 400), np.zeros(LANES, bool)
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
                if not (warp.pc[warp.live] == pc).all():
                    parked |= active
                    continue
                active = warp.live.copy()
                parked[:] = False
            warp.pc[active] = pc + 1
            try:
                got = statement.run(warp, active)
            except EmulationError as error:
                where = f"CTA {warp.cta.index}, warp {warp.number}, at: {statement.text[:200]}"
                raise EmulationError(f"{error}; {where}") from None
            if got is not None:
                yield got

    def _statement(self, text: str) -> _Statement:
        statement = super()._statement(text)
        statement.sync = statement.sync or _CONVERGED.match(text) is not None
        return statement

    # --- Small instructions ----------------------------------------------------------------------------------------

    def _op_setmaxnreg(self, parts, o):  # type: ignore[no-untyped-def]
        return lambda warp, active: None

    _op_prefetch = _op_setmaxnreg

    def _op_cvta(self, parts, o):  # type: ignore[no-untyped-def]
        return self._compute(o[0], ("b64",), o[1:], lambda a: a)

    def _op_elect(self, parts, o):  # type: ignore[no-untyped-def]
        register, predicate = o[0].split("|")

        def run(warp: _Warp, active: np.ndarray) -> None:
            first = int(np.flatnonzero(active)[0])
            self._write(warp, active, register, np.full(LANES, first, np.uint32))
            self._write(warp, active, predicate, first == _LANE)

        return run

    def _op_mov(self, parts, o):  # type: ignore[no-untyped-def]
        if o[0].startswith("{"):
            low, high = (n.strip() for n in o[0].strip("{}").split(","))
            source = self._read(o[1], "b64")

            def unpack(warp: _Warp, active: np.ndarray) -> None:
                self._write(warp, active, low, source(warp).astype(np.uint32))
                self._write(warp, active, high, (source(warp) >> np.uint64(32)).astype(np.uint32))

            return unpack
        if o[1].startswith("{"):
            words = [self._read(n.strip(), "b32") for n in o[1].strip("{}").split(",")]
            return lambda warp, active: self._write(
                warp, active, o[0], words[0](warp).astype(np.uint64) | words[1](warp).astype(np.uint64) << np.uint64(32)
            )
        known = {"%laneid": _LANE, "%cluster_ctarank": 0 * _LANE, "%cluster_ctaid.x": 0 * _LANE}
        if o[1] in known:
            return lambda warp, active: self._write(warp, active, o[0], known[o[1]].astype(np.uint32))
        parameter = re.fullmatch(r"\w+_param_(\d+)", o[1])
        if parameter is not None:
            address = np.full(LANES, _PARAMETERS + int(parameter[1]), np.uint64)
            return lambda warp, active: self._write(warp, active, o[0], address)
        return super()._op_mov(parts, o)

    def _op_bar(self, parts, o):  # type: ignore[no-untyped-def]
        if parts[0] == "warp":
            return lambda warp, active: None
        name, kind = self._read(o[0], "u32"), "arrive" if parts[0] == "arrive" else "sync"
        count = self._read(o[1], "u32") if len(o) > 1 else None
        return lambda warp, active: (kind, int(name(warp)[0]), int(count(warp)[0]) if count is not None else 0)

    _op_barrier = _op_bar

    def _op_stmatrix(self, parts, o):  # type: ignore[no-untyped-def]
        address, transposed = self._address(o[0]), "trans" in parts
        registers = [self._read(n.strip(), "b32") for n in o[1].strip("{}").split(",")]

        def run(warp: _Warp, active: np.ndarray) -> None:
            at = address(warp)
            for i, register in enumerate(registers):
                rows = [self._span(warp, "shared", int(a), 16).view(np.uint16) for a in at[8 * i : 8 * i + 8]]
                words = register(warp).view(np.uint16).reshape(8, 8)
                words = words.T if transposed else words
                for row, values in zip(rows, words, strict=True):
                    row[:] = values

        return run

    # --- mbarriers -------------------------------------------------------------------------------------------------

    def _op_mbarrier(self, parts, o):  # type: ignore[no-untyped-def]
        if parts[0] == "init":
            address, count = self._address(o[0]), self._read(o[1], "u32")

            def init(warp: Any, active: np.ndarray) -> None:
                lane = int(np.flatnonzero(active)[0])
                n = int(count(warp)[lane])
                warp.cta.barriers[int(address(warp)[lane])] = _Barrier(n, n)

            return init
        if parts[0] == "try_wait":
            address, parity = self._address(o[1]), self._read(o[2], "u32")

            def wait(warp: Any, active: np.ndarray) -> str | None:
                lane = int(np.flatnonzero(active)[0])
                barrier = warp.cta.barriers[int(address(warp)[lane])]
                done = barrier.phase != (int(parity(warp)[lane]) & 1)
                self._write(warp, active, o[0], np.full(LANES, done))
                return None if done else "failed"

            return wait
        if parts[0] != "arrive" or "shared::cluster" in parts:
            raise EmulationError(f"mbarrier.{'.'.join(parts)} is not modelled")
        address, number, expects = self._address(o[1]), self._read(o[2], "u32"), "expect_tx" in parts

        def arrive(warp: Any, active: np.ndarray) -> None:
            for lane in np.flatnonzero(active):
                barrier, n = warp.cta.barriers[int(address(warp)[lane])], int(number(warp)[lane])
                barrier.bytes += n if expects else 0
                barrier.pending -= 1 if expects else n
                barrier.settle(warp.cta)

        return arrive

    # --- TMA -------------------------------------------------------------------------------------------------------

    def _op_cp(self, parts, o):  # type: ignore[no-untyped-def]
        if parts[:2] != ["async", "bulk"]:
            return super()._op_cp(parts, o)
        if parts[2] == "commit_group":
            return lambda warp, active: None
        if parts[2] == "wait_group":

            def wait(warp: Any, active: np.ndarray) -> None:
                for store in warp.stores:
                    store()
                warp.stores.clear()

            return wait
        brackets = re.findall(r"\[[^\]]*\]", ", ".join(o))
        loads = next(p for p in parts if p.startswith(("shared", "global"))).startswith("shared")
        tile = re.fullmatch(r"\[(%\w+), \{([^}]*)\}\]", brackets[1 if loads else 0])
        handle = self._read(tile[1], "u64")  # type: ignore[index]
        coordinates = [self._read(c.strip(), "s32") for c in tile[2].split(",")]  # type: ignore[index]
        place = self._address(brackets[0 if loads else 1])
        full = self._address(brackets[2]) if loads else None

        def run(warp: Any, active: np.ndarray) -> None:
            for lane in np.flatnonzero(active):
                tensor = self.tensor_maps[int(handle(warp)[lane]) - _PARAMETERS]
                job = (tensor, [int(c(warp)[lane]) for c in coordinates], int(place(warp)[lane]))
                if full is not None:
                    warp.cta.flight.append((*job, int(full(warp)[lane])))
                    if not self.late:
                        self._land_tile(warp.cta, *warp.cta.flight.pop())
                elif self.late:
                    warp.stores.append(lambda job=job: self._store_tile(warp.cta, *job))
                else:
                    self._store_tile(warp.cta, *job)

        return run

    @staticmethod
    def _tile(tensor: TensorMap, coordinates: Sequence[int], smem: int) -> tuple[np.ndarray, np.ndarray]:
        """(index into the array or -1, index into shared memory) of every element of a box."""
        if smem % 128 or 2 * tensor.box[0] > tensor.swizzle:
            raise EmulationError(f"a TMA tile at {smem:#x} of {tensor.box[0]} columns, {tensor.swizzle}-byte swizzle")
        axes = np.meshgrid(*(np.arange(n) for n in reversed(tensor.box)), indexing="ij")[::-1]
        linear, element = np.zeros_like(axes[0]), np.full_like(axes[0], tensor.offset)
        inside, step = np.ones(axes[0].shape, bool), 1
        for axis, first, size, stride, extent in zip(
            axes, coordinates, tensor.sizes, tensor.strides, tensor.box, strict=True
        ):
            linear += axis * step
            step *= extent
            inside &= (axis + first >= 0) & (axis + first < size)
            element += (axis + first) * stride
        return np.where(inside, element, -1), (swizzled(smem + 2 * linear, tensor.swizzle) - _SHARED_BASE) // 2

    def _land_tile(self, cta: Any, tensor: TensorMap, coordinates: Sequence[int], smem: int, full: int) -> None:
        element, place = self._tile(tensor, coordinates, smem)
        cta.shared.view(np.uint16)[place] = np.where(element >= 0, tensor.array[np.maximum(element, 0)], 0)
        barrier = cta.barriers[full]
        barrier.bytes -= 2 * element.size
        barrier.settle(cta)

    def _store_tile(self, cta: _Cta, tensor: TensorMap, coordinates: Sequence[int], smem: int) -> None:
        element, place = self._tile(tensor, coordinates, smem)
        values = cta.shared.view(np.uint16)[place]
        tensor.array[element[element >= 0]] = values[element >= 0]

    # --- wgmma -----------------------------------------------------------------------------------------------------

    def _op_wgmma(self, parts, o):  # type: ignore[no-untyped-def]
        if parts[0] == "fence":
            return lambda warp, active: None
        if parts[0] == "commit_group":
            return lambda warp, active: warp.groups.append([])  # type: ignore[attr-defined]
        if parts[0] == "wait_group":

            def wait(warp: Any, active: np.ndarray) -> None:
                while len(warp.groups) - 1 > int(o[0]):
                    for product in warp.groups.pop(0):
                        product()

            return wait
        shape = next(m for m in map(re.compile(r"m64n(\d+)k16").fullmatch, parts) if m)
        return self._product(int(shape[1]), "bf16" in parts, o)

    def _product(self, n: int, bf16: bool, o: Sequence[str]) -> Callable[[Any, np.ndarray], None]:
        widen = from_bf16 if bf16 else lambda x: x.view(np.float16).astype(np.float32)
        names = [x.strip() for x in o[0].strip("{}").split(",")]
        from_registers = o[1].startswith("{")
        sources = [self._read(x.strip(), "b32" if from_registers else "b64") for x in o[1].strip("{}").split(",")]
        descriptor, accumulates = self._read(o[2], "b64"), self._read(o[3], "pred")
        if list(o[4:6]) != ["1", "1"] or (not from_registers and o[6] != "0"):
            raise EmulationError("a product with a negated or a transposed A is not modelled")
        transposed = o[-1] == "1"

        def product(warp: Any, b: int, a: int, on: bool) -> None:
            row, column = _LANE // 4, _LANE % 4 * 2
            if from_registers:
                left = np.zeros((16, 16), np.float32)
                for i, source in enumerate(sources):
                    pair = widen(source(warp).copy().view(np.uint16)).reshape(LANES, 2)
                    left[row + i % 2 * 8, column + i // 2 * 8] = pair[:, 0]
                    left[row + i % 2 * 8, column + i // 2 * 8 + 1] = pair[:, 1]
            else:
                left = widen(self._operand(warp.cta, a, np.arange(16) + 16 * (warp.number % 4), False))
            right = widen(self._operand(warp.cta, b, np.arange(n), transposed))
            with np.errstate(all="ignore"):
                result = (left.astype(np.float64) @ right.T.astype(np.float64)).astype(np.float32)
                for i, name in enumerate(names):
                    value = result[row + i // 2 % 2 * 8, i // 4 * 8 + column + i % 2]
                    if on:
                        value = value + warp.registers[name].view(np.float32)
                    warp.registers[name] = value.astype(np.float32).view(np.uint32).copy()

        def run(warp: Any, active: np.ndarray) -> None:
            self.products += 1
            b, on = int(descriptor(warp)[0]), bool(accumulates(warp)[0])
            a = 0 if from_registers else int(sources[0](warp)[0])
            if not self.late:
                product(warp, b, a, on)
                return
            for name in names:
                warp.registers.setdefault(name, np.full(LANES, 0x7FC00000, np.uint32))
            warp.groups[-1].append(lambda: product(warp, b, a, on))

        return run

    @staticmethod
    def _operand(cta: _Cta, descriptor: int, rows: np.ndarray, rows_contiguous: bool) -> np.ndarray:
        """(rows, 16) of a matrix descriptor: its start, two strides and swizzle, as the PTX manual lays them out."""
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        width = {1: 128, 2: 64, 3: 32}[descriptor >> 62]
        row, k = np.meshgrid(rows, np.arange(16), indexing="ij")
        if rows_contiguous:
            per = width // 2
            offset = row % per * 2 + row // per * leading + k % 8 * width + k // 8 * stride
        else:
            offset = row // 8 * stride + row % 8 * width + k * 2
        return cta.shared.view(np.uint16)[(swizzled(start + offset, width) - _SHARED_BASE) // 2]
