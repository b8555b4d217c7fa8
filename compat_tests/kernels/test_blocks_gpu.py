"""The building blocks on a GPU, by their GEMM: against fp64, at tile edges and beyond, with and without a cluster."""

from __future__ import annotations

import pytest
import torch

from accel.kernels.blocks.gemm_config import GemmConfig
from accel.kernels.runtime.compile import Kernel, function
from accel.kernels.runtime.launch import sm_count

pytestmark = pytest.mark.gpu

SHAPES = ((128, 256, 64), (1, 8, 8), (129, 264, 72), (1000, 520, 200), (2048, 2048, 4096), (64, 4096, 1024))


def gemm(a: torch.Tensor, b: torch.Tensor, config: GemmConfig) -> torch.Tensor:
    out = torch.full((a.shape[0], b.shape[0]), torch.nan, device=a.device, dtype=a.dtype)
    function(Kernel("blocks", "gemm_sm90", config), "sm_90a")(a, b, out, sm_count(a.device.index))
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("cluster", (1, 2))
def test_gemm(shape: tuple[int, int, int], cluster: int) -> None:
    m, n, k = shape
    a, b = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    got, want = gemm(a, b, GemmConfig(cluster_m=cluster)), a.double() @ b.double().T
    theirs = a @ b.T
    error, limit = ((t - want).norm() / want.norm() for t in (got.double(), theirs.double()))
    assert error <= 1.25 * limit, f"error {error:.3e} > 1.25 x {limit:.3e}"


def test_gemm_of_strided_operands() -> None:
    a, b = (torch.randn(rows, 400, device="cuda", dtype=torch.float16)[:, 8:264] for rows in (300, 504))
    got = gemm(a, b, GemmConfig(dtype="float16"))
    assert torch.equal(got, gemm(a.contiguous(), b.contiguous(), GemmConfig(dtype="float16")))
