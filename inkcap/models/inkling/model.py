"""Inkling's text model: decoder layers over a residual stream, and the head.

Slots of the model, with the shapes of the published tensors (V padded vocabulary, H hidden, W convolution width):

    embed.weight [V, H]                   embed.norm.weight [H]
    norm.weight [H]                       head.weight [V, H]
    layers.N.attn_norm.weight [H]         layers.N.mlp_norm.weight [H]
    layers.N.attention.{q,k,v,r}.weight   layers.N.attn_out.weight
    layers.N.attention.{q_norm,k_norm}.weight [head]
    layers.N.attention.{k_sconv,v_sconv}.weight [channels, 1, W]
    layers.N.attention.rel.proj [d_rel, extent]
    layers.N.{attn_sconv,mlp_sconv}.weight [H, 1, W]
    dense:   layers.N.mlp.w13.weight [2 I, H] rows interleaved   layers.N.mlp.w2.weight [H, I]   layers.N.mlp.global_scale [1]
    experts: layers.N.mlp.router.{weight [E + S, H], bias [E], global_scale [1]}
             layers.N.mlp.experts.{w13 [E, 2 I, H], w2 [E, H, I]}    layers.N.mlp.shared.{w13 [S, 2 I, H], w2 [S, H, I]}
"""
