"""What the gated delta rule and KDA share: preparing inputs, chunk layout, decayed pair products, the chunked and the token-by-token core.

Plain torch, any device. The two families differ only in their gate: a scalar per token and head (gated delta rule) or one
per token, head and key channel (KDA). Both are the recurrence

    S_t = a_t S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - (a_t S_{t-1})^T k_t),   o_t = scale S_t^T q_t,   a_t = exp(g_t)

Sources: DeltaNet (arXiv 2406.06484), Gated DeltaNet (arXiv 2412.06464), Kimi Linear (arXiv 2510.26692).
"""
