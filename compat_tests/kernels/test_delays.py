"""Kernels with sleeps in front of their waits and arrivals: the same instructions otherwise, and gone afterwards."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from accel.kernels.attention.decode_plan import decode_config
from accel.kernels.blocks.gemm_config import GemmConfig
from accel.kernels.runtime import delays
from accel.kernels.runtime.compile import Kernel, compile_only

KERNELS = (
    Kernel("blocks", "gemm_sm90", GemmConfig(cluster_m=1)),
    Kernel("attention", "any_decode", decode_config("bfloat16", 128, 128, 16, "keys", True, "sm_90")),
)
#: What a sleep must not add, drop or double.
COUNTED = re.compile(
    r"^\s*(?:@!?%p\d+ )?"
    r"(bar|barrier|mbarrier|cp|wgmma|mma|ldmatrix|stmatrix|st|atom|red|fence|membar|elect|setmaxnreg)\b[.\w]*",
    re.MULTILINE,
)


def counted(ptx: str) -> Counter[str]:
    return Counter(match.group(1) for match in COUNTED.finditer(ptx))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.module)
def test_sleeps_are_all_that_is_added(kernel: Kernel) -> None:
    plain = compile_only(kernel, "sm_90a").ptx
    with delays.sleeping(1 << 12):
        late = compile_only(kernel, "sm_90a").ptx
    sleeps = late.count("nanosleep.u32")
    assert sleeps == late.count("%clock") >= 10 and "nanosleep" not in plain
    # One in front of every wait and arrival of the program; some of those are two instructions or stand in a loop.
    assert sleeps >= counted(plain)["bar"] + counted(plain)["atom"]
    assert "shfl" not in late[late.index("%clock") :].split("nanosleep")[0], "lanes may be elsewhere"
    assert counted(late) == counted(plain)
    assert compile_only(kernel, "sm_90a").ptx == plain


def test_the_length_is_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="most must be a power of two, got 1000"), delays.sleeping(1000):
        pass
