"""Launch configurations of the attention kernels: frozen, checked on construction, all that a kernel is keyed on.

Nothing here depends on a length, a batch or a number of heads: one compiled kernel serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.arch import KIB
from .mask_config import BLOCK, TILE

DTYPES = ("bfloat16", "float16")
#: What a query sees. "full": every key. "causal": keys up to its diagonal. "window": keys around its diagonal. "mask":
#: what the lists of a classified mask say, see any_classify.py.
KINDS = ("full", "causal", "window", "mask")
ROWS = 64  #: queries of one warpgroup
SMEM = 227 * KIB


@dataclass(frozen=True, slots=True)
class FwdConfig:
    """One CTA takes `warpgroups` * 64 queries of one head and walks the keys from the last one seen to the first."""

    dtype: str
    head_dim: int  #: of q and k
    head_dim_v: int
    kind: str
    lse: bool  #: the log-sum-exp of every row is written too
    warpgroups: int = 2  #: consumers, 64 queries each
    tile_n: int = 128  #: keys of one step
    stages: int = 2  #: of the ring of k and of the ring of v
    turns: bool = True  #: warpgroups issue their products in turn, so that one's softmax runs under another's products
    #: The output is rescaled under the next q @ k.T instead of after p @ v: fewer registers are alive at a time.
    early_rescale: bool = False
    persistent: bool = True  #: a CTA an SM takes tile after tile; otherwise a CTA for every tile
    own_out: bool = True  #: the output has its own place in shared memory; otherwise q's, and q of the next tile waits
    #: q has two places, and the first product of a CTA's next tile is issued with the last one of this tile.
    ahead: bool = False
    varlen: bool = False  #: sequences are packed behind each other, and their lengths are on the device

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name, size in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if size % 8 or not 8 <= size <= 256:
                raise ValueError(f"{name} must be a multiple of 8 up to 256, got {size}")
        if self.warpgroups not in (1, 2, 3):
            raise ValueError(f"warpgroups must be 1, 2 or 3, got {self.warpgroups}")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ValueError(f"tile_n must be a multiple of 16 up to 256, got {self.tile_n}")
        if self.kind == "mask" and (self.tile_m != BLOCK or self.tile_n not in (TILE // 2, TILE)):
            raise ValueError(f"a mask's lists are of {BLOCK} x {TILE}, got tiles of {self.tile_m} x {self.tile_n}")
        if self.kind == "mask" and self.varlen:
            raise ValueError("packed sequences have no mask")
        if self.ahead and not self.own_out:
            raise ValueError("ahead needs own_out: q of the next tile arrives before the output leaves")
        if self.turns and self.warpgroups == 1:
            raise ValueError("turns need two warpgroups or more")
        if self.smem_bytes > SMEM:
            raise ValueError(f"{self.smem_bytes} bytes of shared memory > {SMEM}")

    @property
    def tile_m(self) -> int:
        return ROWS * self.warpgroups

    @property
    def padded(self) -> int:
        """head_dim in shared memory: whole steps of a product, the rest is zero."""
        return padded(self.head_dim)

    @property
    def padded_v(self) -> int:
        return padded(self.head_dim_v)

    @property
    def smem_bytes(self) -> int:
        """q, the output, the two rings, and a kilobyte for barriers and alignment."""
        columns = self.q_stages * self.padded + self.padded_v if self.own_out else max(self.padded, self.padded_v)
        rings = self.stages * self.tile_n * (self.padded + self.padded_v)
        return 2 * (self.tile_m * columns + rings) + KIB

    @property
    def q_stages(self) -> int:
        return 2 if self.ahead else 1


def padded(size: int) -> int:
    return -(-size // 16) * 16
