"""The tensor memory accelerator: descriptors of strided tensors, and tile copies through them.

A tensor is described on the host, inside the compiled launch, so its shape and strides are those of the call. Elements
outside of it read as zero and are not written. The base address, and every stride but that of the contiguous first or
second mode, must be a multiple of 16 bytes.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

#: Rows of the first mode of a tensor of segments, which bound every segment.
SEGMENT = 1 << 30


def load_atom(tensor: cute.Tensor, smem_layout, tile: tuple[int, int], multicast: int = 1):
    """(atom, tensor of coordinates) to load `tile`s of a tensor's first two modes into `smem_layout` (of one stage).

    With `multicast` > 1 each of that many CTAs of a cluster loads its share of the tile into all of them.
    """
    op = cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    atom, coordinates = cpasync.make_tiled_tma_atom(op, tensor, smem_layout, tile, multicast)
    return atom, coordinates


def store_atom(tensor: cute.Tensor, smem_layout, tile: tuple[int, int]):
    """(atom, tensor of coordinates) to store `tile`s from `smem_layout` (of one stage)."""
    atom, coordinates = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, smem_layout, tile)
    return atom, coordinates


def segmented(tensor: cute.Tensor) -> cute.Tensor:
    """A (rows, columns, heads) tensor for `segment`: (SEGMENT, columns, heads, end, wrap), made before its atom is.

    Row r of the segment that ends before row `end` is the copy engine's row SEGMENT - length + r, and is out of bounds
    where r >= length. The last two modes move that to the right place: by `end` rows, and back by SEGMENT of them, as
    addresses count modulo 2 ** 64. (Triton's ragged descriptors do the same.)
    """
    row, column, head = (Int64(tensor.stride[0]), tensor.stride[1], tensor.stride[2])
    shape = (SEGMENT, tensor.shape[1], tensor.shape[2], 0x7FFF0000, 0x7FFF0000)
    stride = (row, column, head, row, Int64(1 << 34) - row)  # of 16-bit elements: 2 ** 30 times 2 ** 35 bytes is 0
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


@cute.jit
def segment(coordinates: cute.Tensor, head: Int32, end: Int32, length: Int32) -> cute.Tensor:
    """(rows, columns) of a segment of a head: the `length` rows before row `end`. Rows behind read as zero and are not
    written."""
    return cute.domain_offset((SEGMENT - length, 0), coordinates[None, None, head, end, SEGMENT])


def partition(atom, smem: cute.Tensor, gmem: cute.Tensor, cta: object = 0, cta_layout=None):
    """(shared, global) views whose first mode is one tile: of smem (rows, columns, stage), gmem (rows, columns, tile).

    `cta` and `cta_layout` say which of the CTAs that share a multicast tile this one is.
    """
    if const_expr(cta_layout is None):
        cta_layout = cute.make_layout(1)
    return cpasync.tma_partition(atom, cta, cta_layout, cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2))


def prefetch(*atoms) -> None:
    """Fetch descriptors into the cache. To be called by one warp, before anything waits."""
    for atom in atoms:
        cpasync.prefetch_descriptor(atom)
