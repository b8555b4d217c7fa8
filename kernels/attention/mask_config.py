"""Sizes of a classified mask, and the launch configuration of the kernel that classifies it."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 128  #: queries of a block
TILE = 128  #: keys of a tile
CHUNK = 512  #: keys of one CTA: 16 bytes a lane


@dataclass(frozen=True, slots=True)
class ClassifyConfig:
    """A CTA takes BLOCK rows of CHUNK keys, each warp its share of the rows."""

    warps: int = 8

    def __post_init__(self) -> None:
        if self.warps not in (4, 8, 16):
            raise ValueError(f"warps must be 4, 8 or 16, got {self.warps}")

    @property
    def rows(self) -> int:
        """Of a warp."""
        return BLOCK // self.warps
