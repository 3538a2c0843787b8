"""Random checkpoints of Inkling 2 for tests against transformers: a small config, and weights at which all matters."""

import torch

SLIDING, FULL = "hybrid_sliding", "hybrid"
BASE = {
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "vocab_size": 96,
    "unpadded_vocab_size": 90,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 7,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "d_rel": 4,
    "rel_extent": 9,
    "log_scaling_n_floor": 5,
    "log_scaling_alpha": 0.3,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "route_scale": 2.5,
    "n_layers_per_attn_res_block": 3,
    "qk_l2_clip_threshold": 3.0,
    "rel_l2_clip_threshold": 1.5,
    "mlp_gate_softcap": 1.5,
    "mlp_up_softcap": 2.5,
    "final_logit_softcapping": 4.0,
    "max_position_embeddings": 1024,
    "eos_token_id": 3,
}
LOOP = {"loop_layer_index_start": 3, "loop_layer_index_end": 6, "loop_num_passes": 3, "loop_gate_rank": 5}


def randomise(oracle):
    """Weights at which every part matters: spread mixtures and routing, live convolutions, clips that clip."""
    for name, tensor in oracle.state_dict().items():
        noise = torch.randn(tensor.shape)
        if "norm" in name:
            tensor.copy_(1.0 + 0.3 * noise)
        elif "query" in name:
            tensor.copy_(1.5 * noise)
        elif "conv1d" in name or "static_weight" in name or "correction_bias" in name:
            tensor.copy_(0.4 * noise)
        elif "bias.proj" in name:
            tensor.copy_(noise)
        elif "message_gate" in name:  # gates this calm still matter, and do not amplify rounding from pass to pass
            tensor.copy_(0.5 * noise / tensor.shape[-1] ** 0.5)
        else:
            tensor.copy_(1.5 * noise / tensor.shape[-1] ** 0.5)
