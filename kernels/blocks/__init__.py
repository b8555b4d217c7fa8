"""Device building blocks that kernel families share, and the plain GEMM that tests those of sm_90a.

    tma.py         copies between global and shared memory by the tensor memory accelerator, single and multicast
    pipeline.py    rings of shared memory stages between one producer warp and the consumer warpgroups
    roles.py       which warp does what: register budgets, named barriers, turns between warpgroups
    wgmma.py       warpgroup products with A in shared memory or in registers, and where an accumulator's elements are
    scheduler.py   from a tile number to coordinates: grouped for a GEMM, heads in sections for attention
    softmax.py     the online softmax of accumulator rows
    warp_mma.py    warp products, ldmatrix, cp.async and the tiles that they share: every target from sm_80 on
    words.py       words to and from memory, numbers out of words and back, exponentials: every target
    dtypes.py      widths of dtypes by name, for configurations and plans
    gemm_sm90.py   C = A @ B.T: every block but the softmax in one small kernel

What the DSL ships (cutlass.pipeline, its sm90 helpers) is used as it is; these files hold what is around it.
"""
