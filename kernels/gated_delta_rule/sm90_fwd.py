"""The gated delta rule in chunks of 64 tokens, forward, for sm_90a: one host function, three kernels.

`chunk_table` finds the chunks, `sm90_prep` works out what of each chunk and value head needs no state, and `sm90_scan`
walks every chain of chunks: a value head of a sequence, a slice of its columns. With b the sum of the log decays in the
chunk up to a token, itself included, D_ti = exp(b_t - b_i) for i <= t, and k and q normalised where asked for,

    T = (I + L)^-1,  L_ti = beta_t D_ti (k_t . k_i) for i < t
    W = T diag(beta exp(b)) K,  U0 = T diag(beta) V,  P_ti = scale D_ti (q_t . k_i) for i <= t
    U = U0 - W S,  O = scale diag(exp(b)) Q S + P U,  S <- exp(b_64) S + (diag(exp(b_64 - b)) K)^T U

(Yang et al., arXiv 2412.06464, with the gate inside the inverse.) Only differences of b are ever exponentiated, and
they are <= 0. Products have operands of q's dtype and accumulate in fp32; S stays in fp32.

A dense batch is seen as rows behind each other, as packed sequences are. What lies between the kernels is one piece of
memory, cut here: W, U, P, vectors, tables.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr

from ..blocks.dtypes import WIDTH
from ..blocks.words import ELEMENT
from . import chunk_table
from .chunk_config import CHUNK, TABLE_COLUMNS, VECTORS, ChunkConfig
from .sm90_prep import Prep
from .sm90_scan import Scan

ALIGNMENT = 128  #: bytes; every part of the workspace begins at a multiple of it


class ChunkForward:
    """Traceable host function for one configuration. What the configuration does without is given any tensor.

    q, k (B, T, H, K), v, o (B, T, HV, V) and g, beta (B, T, HV), whose batches lie T rows apart; A_log, dt_bias (HV);
    states (N, HV, K, V), or (N, HV, V, K) with v_first; cu_seqlens (N + 1); `sequences` is N; the workspace has
    `chunk_config.workspace_bytes` bytes.
    """

    def __init__(self, config: ChunkConfig) -> None:
        self.config = config

    @cute.jit
    def launch(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mA: cute.Tensor,
        mBias: cute.Tensor,
        mInitial: cute.Tensor,
        mFinal: cute.Tensor,
        mCu: cute.Tensor,
        mWork: cute.Tensor,
        mO: cute.Tensor,
        sequences: Int32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        c = self.config
        mQ, mK, mV, mG, mBeta, mO = [packed_rows(t) for t in (mQ, mK, mV, mG, mBeta, mO)]
        total, heads_v = mQ.shape[0], mV.shape[1]
        slots = total // CHUNK + sequences
        if const_expr(c.packed is None):
            slots = sequences * chunk_table.chunks_of(total // sequences)
        dtype = ELEMENT[c.dtype]
        place = mWork.iterator.toint()
        mW, place = part(place, dtype, slots * heads_v, CHUNK, c.head_dim)
        mU, place = part(place, dtype, slots * heads_v, CHUNK, c.head_dim_v)
        mP, place = part(place, dtype, slots * heads_v, CHUNK, CHUNK)
        mVec, place = part(place, Float32, slots * heads_v, VECTORS, CHUNK)
        mTable, place = part(place, Int32, cute.round_up(slots, ALIGNMENT // 16), TABLE_COLUMNS)
        mSequences, place = part(place, Int32, sequences, TABLE_COLUMNS)
        mTable = cute.make_tensor(mTable.iterator, cute.make_layout((slots, TABLE_COLUMNS), stride=(TABLE_COLUMNS, 1)))

        chunk_table.ChunkTable(c).launch(mCu, mTable, mSequences, mO, stream)
        Prep(c).launch(mQ, mK, mV, mG, mBeta, mA, mBias, mTable, mW, mU, mP, mVec, scale, stream)
        Scan(c).launch(mQ, mK, mW, mU, mP, mVec, mInitial, mFinal, mSequences, mO, stream)


def packed_rows(t):
    """(B, T, heads, ..) as (B * T, heads, ..): its batches lie T rows apart."""
    shape, stride = t.layout.shape, t.layout.stride
    return cute.make_tensor(
        t.iterator, cute.make_layout((shape[0] * shape[1], *shape[2:]), stride=(stride[1], *stride[2:]))
    )


def part(place, dtype, entries, *inner: int):
    """(tensor of `entries` pieces of a static shape at an address, the address behind it)."""
    count = 1
    stride = []
    for extent in reversed(inner):
        stride.insert(0, count)
        count *= extent
    layout = cute.make_layout((entries, *inner), stride=(count, *stride))
    pointer = cute.make_ptr(dtype, place, cute.AddressSpace.gmem, assumed_align=ALIGNMENT)
    return cute.make_tensor(pointer, layout), place + Int64(entries) * (count * dtype.width // 8)


def build(config: ChunkConfig):
    """(host function, stand-in arguments) for the compiler."""
    c = config

    def tensor(dtype: str, *shape, divisibility: int = 1, align: int = 16):
        stride = tuple(cute.sym_int64(divisibility=divisibility) for _ in shape[1:])
        return cute.runtime.make_fake_tensor(ELEMENT[dtype], shape, stride=(*stride, 1), assumed_align=align)

    batch, tokens, heads, heads_v = (cute.sym_int32() for _ in range(4))

    def any_tensor():
        return tensor(c.dtype, *(cute.sym_int32() for _ in range(4)))

    def per_head(dtype: str):
        stride = tuple(cute.sym_int64() for _ in range(3))
        shape = (batch, tokens, heads_v)
        return cute.runtime.make_fake_tensor(ELEMENT[dtype], shape, stride=stride, assumed_align=WIDTH[dtype])

    def parameter(dtype: str | None):
        return any_tensor() if dtype is None else tensor(dtype, heads_v, align=WIDTH[dtype])

    def state(dtype: str | None):
        if dtype is None:
            return any_tensor()
        inner = (c.head_dim_v, c.head_dim) if c.v_first else (c.head_dim, c.head_dim_v)
        return tensor(dtype, cute.sym_int32(), heads_v, *inner, divisibility=4)

    qk = [tensor(c.dtype, batch, tokens, heads, c.head_dim, divisibility=8) for _ in range(2)]
    v, o = [tensor(c.dtype, batch, tokens, heads_v, c.head_dim_v, divisibility=8) for _ in range(2)]
    cu = any_tensor() if c.packed is None else chunk_table.stand_ins(c)[0]
    work = cute.runtime.make_fake_tensor(Uint8, (cute.sym_int64(),), stride=(1,), assumed_align=ALIGNMENT)
    tensors = (
        *qk, v, per_head(c.g_dtype), per_head(c.beta_dtype), parameter(c.a_dtype), parameter(c.bias_dtype),
        state(c.initial), state(c.final), cu, work, o,
    )  # fmt: skip
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return ChunkForward(c).launch, (*tensors, Int32(1), Float32(1.0), stream)
