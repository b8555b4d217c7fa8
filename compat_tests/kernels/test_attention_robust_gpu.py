"""What could go wrong with the attention kernels beyond one right call: barriers that are late, rings of one stage,
other streams, threads and graphs, shapes drawn at random, memory beside the outputs.

Results are compared bit by bit with those of an undisturbed call: the kernels are deterministic.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch

from accel.kernels.attention import decode as decoding
from accel.kernels.attention import launch, masks, plan
from accel.kernels.attention.cases import FWD_CASES, LAYOUTS, Case, portable
from accel.kernels.attention.config import FwdConfig
from accel.kernels.attention.decode_cases import DECODE_CASES, MASKS, DecodeCase
from accel.kernels.attention.decode_cases import LAYOUTS as DECODE_LAYOUTS
from accel.kernels.attention.decode_config import DecodeConfig
from accel.kernels.attention.mask_cases import MASKS as FORWARD_MASKS
from accel.kernels.attention.varlen_cases import VarlenCase
from accel.kernels.runtime import compile as runtime
from accel.kernels.runtime import delays
from accel.outcome import Choice
from accel.testing import assert_accurate

pytestmark = pytest.mark.gpu

AnyCase: TypeAlias = Case | DecodeCase | VarlenCase

#: Every kernel's ring, mask code and way to combine; small, for they run often and under the sanitizer.
SMALL: tuple[AnyCase, ...] = (
    Case(2, (4, 2), (300, 300), 128, causal="top_left"),
    Case(1, (2, 2), (400, 260), 64),
    Case(1, (2, 1), (200, 300), 256, causal="bottom_right", window=(70, 0)),
    Case(2, (4, 2), (300, 450), 128, mask="blocks"),
    Case(1, (2, 1), (200, 300), 256, mask="odd", causal="top_left"),
    VarlenCase((130, 0, 70, 1), (4, 2), 128, lengths_k=(130, 40, 200, 0), causal="bottom_right"),
    DecodeCase(2, (8, 2), (1, 1500), 128),
    DecodeCase(2, (8, 2), (1, 1500), 128, mask="left", splits=3),
    DecodeCase(1, (8, 2), (16, 700), 64, mask="per_q", splits=2),
)
HOSTS = (launch, decoding, masks)  #: modules that load kernels
LONGER: tuple[AnyCase, ...] = (
    Case(2, (8, 2), (2048, 2048), 128, causal="top_left"),
    DecodeCase(1, (8, 2), (4, 40000), 128, causal="bottom_right"),
)


def make(case: AnyCase, seed: int = 0) -> dict[str, Any]:
    return case.make("cuda", torch.Generator().manual_seed(seed))


def config_of(case: AnyCase) -> FwdConfig | DecodeConfig:
    choice = plan(case.facts, "sm_90")
    assert isinstance(choice, Choice), f"{case.name}: {choice}"
    return choice.config  # type: ignore[return-value]


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: str = "") -> None:
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), f"{what} {name}: {int((got[name] != tensor).sum())} values differ"


def verify(case: AnyCase, seed: int) -> None:
    """Within the accuracy rule, -inf where the oracle has it."""
    inputs = make(case, seed)
    got, upstream, oracle = case.run(inputs), portable(case, inputs), case.oracle(inputs)
    for name, exact in oracle.items():
        # Some of torch's backends make NaN of a row that sees no key.
        theirs = torch.where(torch.isfinite(upstream[name]) | torch.isinf(exact), upstream[name], 0.0)
        assert_accurate(f"{case.name} {name}", got[name], theirs.to(got[name].dtype), exact)


# --- Warps out of step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1 << 9, 1 << 13])
@pytest.mark.parametrize("case", [*SMALL, LONGER[1]], ids=lambda case: case.name)
def test_barriers_delayed_at_random(case: AnyCase, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(case)
    want = case.run(inputs)
    for module in HOSTS:
        monkeypatch.setattr(module, "_loaded", {})
        monkeypatch.setattr(module, "function", lambda kernel, target: delays.function(kernel, target, most))
    for repetition in range(10):
        masks.forget()
        same(case.run(inputs), want, f"repetition {repetition}")


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("case", [SMALL[0], SMALL[3], LONGER[0]], ids=lambda case: case.name)
def test_rings_of_one_stage(case: Case, persistent: bool) -> None:
    inputs = make(case)
    planned = config_of(case)
    assert isinstance(planned, FwdConfig) and planned.stages > 1
    config = replace(planned, stages=1, persistent=persistent)
    q, k, v, mask = (inputs.get(name) for name in ("q", "k", "v", "mask"))
    out, lse = launch.forward(config, q, k, v, mask=mask, causal=case.causal, window=case.window)
    assert lse is not None
    same({"out": out, "lse": lse}, case.run(inputs))


def test_rings_of_two_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fewest that decode can have: one of k and one of v."""
    case = DecodeCase(1, (8, 2), (4, 5000), 128, causal="bottom_right")
    inputs = make(case)
    want = case.run(inputs)["out"].double()
    planned = config_of(case)
    assert isinstance(planned, DecodeConfig)
    monkeypatch.setattr(decoding, "_loaded", {})
    monkeypatch.setattr(decoding, "decode_config", lambda *args: replace(planned, slots=2))
    got = case.run(inputs)["out"].double()
    assert [found[1].slots for found in decoding._loaded.values()] == [2]
    assert (got - want).norm() <= 3e-3 * want.norm()


# --- Beside others -------------------------------------------------------------------------------------------------


def test_beside_the_kernels_of_other_streams() -> None:
    inputs = [make(case) for case in LONGER]
    want = [case.run(t) for case, t in zip(LONGER, inputs, strict=True)]
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in LONGER]
    torch.cuda.synchronize()
    for _ in range(10):
        got: list[list[dict[str, torch.Tensor]]] = [[] for _ in LONGER]
        for _ in range(3):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    got[i].append(LONGER[i].run(inputs[i]))
            a = torch.tanh(a @ a)
        torch.cuda.synchronize()
        for found, expected in zip(got, want, strict=True):
            for result in found:
                same(result, expected)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)`, `work(1)`, ... each in a new thread; raise what one of them raised."""
    raised: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:  # a failed assertion too
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def unload(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: no kernel is loaded, no mask known."""
    monkeypatch.setattr(runtime, "_functions", {})
    for module in HOSTS:
        monkeypatch.setattr(module, "_loaded", {})
    masks.forget()


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_thread_that_has_done_no_cuda_work(case: AnyCase, loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(case)
    want = case.run(inputs)
    torch.cuda.synchronize()
    if not loaded:
        unload(monkeypatch)
    found: list[dict[str, torch.Tensor]] = []
    in_threads(1, lambda i: found.append(case.run(inputs)))
    torch.cuda.synchronize()
    same(found[0], want)


def test_many_threads_that_load_and_launch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [make(case) for case in SMALL]
    want = [case.run(t) for case, t in zip(SMALL, inputs, strict=True)]
    torch.cuda.synchronize()
    unload(monkeypatch)

    def work(i: int) -> None:
        stream = torch.cuda.Stream() if i % 2 else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            for turn in range(20):
                at = (i + turn) % len(SMALL)
                got = SMALL[at].run(inputs[at])
                stream.synchronize()
                same(got, want[at], f"thread {i}, turn {turn}")

    in_threads(8, work)
    kernels = {config_of(case) for case in SMALL} | {masks.KERNEL}
    assert len(runtime._functions) == len(kernels), "a kernel was loaded twice"


def test_a_graph_of_all_of_them() -> None:
    inputs = [make(case) for case in SMALL]
    for case, t in zip(SMALL, inputs, strict=True):
        case.run(t)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [case.run(t) for case, t in zip(SMALL, inputs, strict=True) for _ in range(2)]
    for seed in (1, 2, 3):
        for case, t in zip(SMALL, inputs, strict=True):
            for name, fresh in make(case, seed).items():
                t[name].copy_(fresh)
        graph.replay()
        want = [case.run(t) for case, t in zip(SMALL, inputs, strict=True) for _ in range(2)]
        for got, expected in zip(captured, want, strict=True):
            same(got, expected, f"seed {seed}")


# --- Shapes and memory ---------------------------------------------------------------------------------------------


def test_a_hundred_random_shapes() -> None:
    """Shapes are drawn, not kernels: the cases have them all, and each takes seconds to compile."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    known = {config_of(case) for case in (*FWD_CASES, *DECODE_CASES)}
    done = 0
    while done < 100:
        case = draw.choice((drawn_forward, drawn_forward, drawn_decode))(draw)
        if plan(case.facts, "sm_90").__class__ is Choice and config_of(case) in known:
            done += 1
            verify(case, seed + done)


def drawn_forward(draw: random.Random) -> Case:
    heads_kv, seqlen_q = draw.choice((1, 2, 3)), draw.choice((17, 63, 64, 65, 127, 129, 191, 193, 257, 384, 509, 1021))
    return Case(
        draw.choice((1, 2, 3)),
        (heads_kv * draw.choice((1, 2, 5)), heads_kv),
        (seqlen_q, draw.choice((0, 1, 2, 79, 80, 81, 127, 128, 129, 255, 256, 257, 383, 509, 1021, seqlen_q))),
        *draw.choice(((64, 0), (72, 0), (80, 0), (96, 0), (128, 0), (192, 128), (256, 0))),
        dtype=draw.choice(("bfloat16", "float16")),
        causal=draw.choice(("none", "top_left", "bottom_right")),
        window=draw.choice((None, None, (draw.randrange(300), draw.randrange(300)), (draw.randrange(100), -1))),
        layout=draw.choice(LAYOUTS),
        magnitude=draw.choice((1.0, 1.0, 6.0)),
        mask=draw.choice(("none", draw.choice(FORWARD_MASKS))),
    )


def drawn_decode(draw: random.Random) -> DecodeCase:
    seqlen_q, heads_kv = draw.choice((1, 1, 2, 3, 4, 7, 16)), draw.choice((1, 2, 3, 8))
    group = draw.choice([g for g in (1, 2, 4, 5, 7, 8) if g * seqlen_q <= 64])
    return DecodeCase(
        draw.choice((1, 2, 3, 7)),
        (heads_kv * group, heads_kv),
        (seqlen_q, draw.choice((0, 1, 2, 16, 31, 33, 63, 65, 127, 511, 513, 997, 2047, 4096, 10007))),
        *draw.choice(((64, 0), (80, 0), (96, 0), (128, 0), (192, 128), (256, 0))),
        dtype=draw.choice(("bfloat16", "float16")),
        causal=draw.choice(("none", "bottom_right")) if seqlen_q > 1 else "none",
        mask=draw.choice(MASKS),
        layout=draw.choice(DECODE_LAYOUTS),
        magnitude=draw.choice((1.0, 1.0, 6.0)),
        splits=draw.choice((None, None, 1, 2, 5)),
    )


GUARD, SENTINEL = 4096, 0xA5  #: bytes before and after an output, and what is in them


def guarded_empty(held: list[tuple[torch.Tensor, int]]) -> Callable[..., torch.Tensor]:
    """Stands for Tensor.new_empty: a tensor lies between guard bytes; `held` gets all of it, and the bytes between."""

    def new_empty(like: torch.Tensor, *sizes: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        dtype = dtype or like.dtype
        size = math.prod(shape) * dtype.itemsize
        whole = torch.full((size + 2 * GUARD,), SENTINEL, dtype=torch.uint8, device=like.device)
        held.append((whole, size))
        return whole[GUARD : GUARD + size].view(dtype).view(shape)

    return new_empty


@pytest.mark.parametrize(
    "case",
    [
        *SMALL,
        Case(3, (3, 1), (77, 130), 128, causal="bottom_right"),
        Case(1, (5, 5), (191, 63), 80),
        Case(2, (2, 2), (129, 257), 192, 128, causal="top_left"),
        Case(1, (2, 2), (65, 0), 64),
        DecodeCase(3, (6, 2), (5, 333), 96, causal="bottom_right"),
    ],
    ids=lambda case: case.name,
)
def test_memory_beside_the_outputs_is_untouched(case: AnyCase, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(case)
    want = case.run(inputs)
    held: list[tuple[torch.Tensor, int]] = []
    scratch: list[tuple[torch.Tensor, int]] = []

    def zeroed(index: int, floats: int) -> torch.Tensor:
        """Exactly as long as it has to be."""
        made = guarded_empty(scratch)(inputs["q"], floats, dtype=torch.float32)
        made[: decoding.COUNTERS].zero_()
        return made

    masks.forget()
    monkeypatch.setattr(torch.Tensor, "new_empty", guarded_empty(held))
    # what is found out about a mask
    monkeypatch.setattr(
        torch, "empty", lambda *sizes, dtype, device: guarded_empty(held)(inputs["q"], *sizes, dtype=dtype)
    )
    monkeypatch.setattr(decoding, "_zeroed", zeroed)
    monkeypatch.setattr(decoding, "_eager", {})
    got = case.run(inputs)
    same(got, want)
    # What is found out about a mask, or the table of the blocks of packed sequences.
    beside = 1 if isinstance(case, VarlenCase) else 4 if "mask" in inputs and isinstance(case, Case) else 0
    assert len(held) == len(want) + beside
    masks.forget()
    assert scratch or getattr(case, "splits", None) is None, "splits are put together through the scratch buffer"
    for whole, size in held + scratch:
        assert (whole[:GUARD] == SENTINEL).all(), "written before an output"
        assert (whole[GUARD + size :] == SENTINEL).all(), "written after an output"


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_calls_for_the_sanitizer(case: AnyCase) -> None:
    """What `benchmarks/gpu_attention.sh sanitizer` runs under memcheck and racecheck."""
    verify(case, 0)
