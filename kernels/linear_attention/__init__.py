"""What the gated delta rule and KDA share, in plain torch for any device.

`inputs` prepares a caller's tensors, `layout` places tokens in chunks, `pairs` forms decayed products of tokens,
`chunked` and `recurrent` are the two cores with their gradients, `ops` offers both to eager and compiled code.

The two families differ only in their gate: one log decay per token and head (gated delta rule), or one per token, head
and key channel (KDA). Both are the recurrence

    S_t = a_t S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - (a_t S_{t-1})^T k_t),   o_t = scale S_t^T q_t,   a_t = exp(g_t)

Sources: DeltaNet (arXiv 2406.06484), Gated DeltaNet (arXiv 2412.06464), Kimi Linear (arXiv 2510.26692).
"""
