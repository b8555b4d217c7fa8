"""Launch configurations of the sm80 forward: frozen, checked on construction, all that a compiled kernel is keyed on.

Nothing here depends on a length, a batch or a number of heads: one compiled kernel serves them all. What an SM of an
arch offers (kernels/runtime/arch.py) decides how deep the copies run ahead and how many CTAs share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..runtime import arch as archs
from .config import DTYPES, padded
from .mask_config import BLOCK, TILE

#: What a query sees. "causal": keys up to a bound that moves with it, all of them where the bound is far. "window":
#: keys between two such bounds. "mask": what the lists of a classified mask say, see any_classify.py.
KINDS = ("causal", "window", "mask")
WARP = 32
TILE_M = 16  #: queries of one product
REGISTERS = 65536  #: of an SM, 32 bits each


@dataclass(frozen=True, slots=True)
class Sm80Config:
    """One CTA takes `warps` * `row_tiles` * 16 queries of a head and walks the keys from the last one to the first."""

    dtype: str
    head_dim: int  #: of q and k
    head_dim_v: int
    kind: str
    lse: bool  #: the log-sum-exp of every row is written too
    warps: int = 4
    #: Products of 16 queries that a warp has. Two read k and v from shared memory once for 32 queries: with one, the
    #: 128 bytes a clock that an SM reads take longer than its products.
    row_tiles: int = 2
    tile_n: int = 64  #: keys of one step
    slots: int = 2  #: tiles of k and v in shared memory, alternately; two are FlashAttention-2's schedule
    q_in_registers: bool = False  #: otherwise q is read from shared memory again for every step
    ctas_per_sm: int = 2

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name, size in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if size % 8 or not 8 <= size <= 256:
                raise ValueError(f"{name} must be a multiple of 8 up to 256, got {size}")
        if self.padded_v > self.padded:
            raise ValueError(f"head_dim_v={self.head_dim_v} > head_dim={self.head_dim}: the output takes q's place")
        if self.warps not in (2, 4, 8):
            raise ValueError(f"warps must be 2, 4 or 8, got {self.warps}")
        if self.row_tiles not in (1, 2):
            raise ValueError(f"row_tiles must be 1 or 2, got {self.row_tiles}")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 128:
            raise ValueError(f"tile_n must be a multiple of 16 up to 128, got {self.tile_n}")
        if self.kind == "mask" and (BLOCK % self.tile_m or self.tile_n not in (TILE // 4, TILE // 2, TILE)):
            raise ValueError(f"a mask's lists are of {BLOCK} x {TILE}, got tiles of {self.tile_m} x {self.tile_n}")
        if not 2 <= self.slots <= 6:
            raise ValueError(f"slots must be 2 to 6, got {self.slots}")
        if self.ctas_per_sm < 1:
            raise ValueError(f"ctas_per_sm must be 1 or more, got {self.ctas_per_sm}")

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def rows(self) -> int:
        """Queries of a warp."""
        return TILE_M * self.row_tiles

    @property
    def tile_m(self) -> int:
        return self.warps * self.rows

    @property
    def padded(self) -> int:
        """head_dim in shared memory: whole steps of a product, the rest is zero."""
        return padded(self.head_dim)

    @property
    def padded_v(self) -> int:
        return padded(self.head_dim_v)

    @property
    def q_bytes(self) -> int:
        return 2 * self.tile_m * self.padded

    @property
    def slot_bytes(self) -> int:
        return 2 * self.tile_n * self.padded

    @property
    def smem_bytes(self) -> int:
        """q, whose place the output takes, and the slots."""
        return self.q_bytes + self.slots * self.slot_bytes


@lru_cache(maxsize=1024)
def sm80_config(dtype: str, head_dim: int, head_dim_v: int, kind: str, lse: bool, arch: str) -> Sm80Config | None:
    """The configuration for an arch; None where no tile fits its shared memory. Kind "full" is "causal" here.

    By registers (255 a thread at most): a warp's output takes row_tiles * head_dim_v / 2 of them, its scores
    row_tiles * tile_n / 2, and q, where it stays in registers, row_tiles * head_dim / 4. So 32 queries a warp up to
    head_dim 128, two CTAs of 128 queries an SM; above, 16 queries a warp and one CTA of eight warps. 32 keys instead of
    64 where an SM has 100 KB, and where the assembler would spill: for sm_100, whose fp32 operations take pairs of
    registers, and for the bits of a mask on archs before sm_90. On an H200 64 keys are 8-10% faster than 32 at head dim
    128, and the number of slots makes less than 1%, but at head dim 256 two are 4% faster than four.
    """
    limits = archs.limits(arch)
    if limits is None:
        return None
    kind = "causal" if kind == "full" else kind
    if padded(head_dim_v) > 128 or padded(head_dim) > 192:
        shapes, depths = ((8, 1, 64, 1), (8, 1, 32, 1), (4, 1, 32, 1)), (2,)
    else:
        major = int(arch.partition("_")[2]) // 10
        tight = padded(head_dim_v) > 80 and (major >= 10 or (kind == "mask" and major < 9))
        shapes, depths = ((4, 2, 32 if tight else 64, 2), (4, 2, 32, 2), (4, 2, 32, 1)), (4, 3, 2)
    for warps, row_tiles, tile_n, ctas in shapes:
        limit = min(limits.smem_per_cta, limits.smem_per_sm // ctas - limits.smem_reserved)
        for slots in depths:
            config = Sm80Config(
                dtype, head_dim, head_dim_v, kind, lse, warps, row_tiles, tile_n, slots, padded(head_dim) <= 64, ctas
            )
            if config.smem_bytes <= limit:
                return config
    return None
