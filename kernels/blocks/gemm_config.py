"""Launch configuration of the GEMM: frozen, and all that its compiled kernel is keyed on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """C (m, n) = A (m, k) @ B (n, k).T in 16 bits with fp32 accumulators; any m, n, k with k and n multiples of 8."""

    dtype: str = "bfloat16"
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    cluster_m: int = 2  #: CTAs below each other that share every B tile by multicast
    group: int = 8  #: cluster rows that are walked together

    def __post_init__(self) -> None:
        if self.cluster_m not in (1, 2, 4):
            raise ValueError(f"cluster_m must be 1, 2 or 4, got {self.cluster_m}")
        if self.tile_n % 64 or not 64 <= self.tile_n <= 256:
            raise ValueError(f"tile_n must be a multiple of 64 up to 256, got {self.tile_n}")
        if self.smem_bytes > 227 * 1024:
            raise ValueError(f"{self.smem_bytes} bytes of shared memory > {227 * 1024}")

    @property
    def tile_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def warpgroups(self) -> int:
        """Consumers; each has 64 rows of the tile."""
        return 2

    @property
    def stage_bytes(self) -> int:
        return 2 * (self.tile_m + self.tile_n) * self.tile_k

    @property
    def smem_bytes(self) -> int:
        """The ring, two 64 x 64 output buffers a warpgroup, and a kilobyte for barriers and alignment."""
        return self.stages * self.stage_bytes + self.warpgroups * 2 * 64 * 64 * 2 + 1024
