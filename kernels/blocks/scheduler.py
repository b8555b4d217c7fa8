"""From the number of a tile to its coordinates. Plain integer arithmetic: once or twice per tile."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def grouped(tile: Int32, rows: Int32, columns: Int32, group: int):
    """(row, column) of a tile of a (rows, columns) grid that is walked in groups of `group` rows, column by column.

    The tiles in flight then share few rows and columns: both operands' strips stay in the L2.
    """
    first = tile // (group * columns) * group
    inside = tile % (group * columns)
    height = cutlass.min(rows - first, group)
    return first + inside % height, inside // height


@cute.jit
def heads_in_sections(tile: Int32, blocks: Int32, group: Int32, units, sections, unit_tiles):
    """(block, head) of a tile: heads in sections, inside a section block by block.

    A unit is the `group` heads that share keys, a section as many units as have their keys and values in the L2
    together. Blocks of a causal head have the more keys the later they are, so the last section goes from its last
    block to its first, the one before it the other way, and so on: no jump from short to long tiles. `units`,
    `sections` and `unit_tiles` (group * blocks) are divisors.
    """
    section = ((tile // unit_tiles + 1) * sections.divisor - 1) // units
    first = section * units.divisor // sections
    width = ((section + 1) * units.divisor // sections - first) * group
    inside = tile - first * unit_tiles.divisor
    block = Int32(cutlass.Uint32(inside) // cutlass.Uint32(width))
    head = first * group + inside - block * width
    if (sections.divisor - 1 - section) % 2 == 0:
        block = blocks - 1 - block
    return block, head


@cute.jit
def tiles_of_cta(tiles: Int32) -> Int32:
    """How many of `tiles` this CTA takes, numbered from 0; see `back_and_forth`."""
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    rounds = tiles // ctas
    place = cta if rounds % 2 == 0 else ctas - 1 - cta
    return rounds + 1 if place < tiles % ctas else rounds


@cute.jit
def back_and_forth(number: Int32) -> Int32:
    """The tile that is this CTA's `number`th: every round hands out one a CTA, every other round in reverse order.

    Of tiles in descending order of work, each CTA then gets as much as the others.
    """
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    place = cta if number % 2 == 0 else ctas - 1 - cta
    return number * ctas + place
