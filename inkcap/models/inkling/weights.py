"""Names of Inkling's tensors in checkpoints: as published, and as transformers names its modules.

transformers' multimodal class saves the published names, its text-only class saves module names.
"""

from inkcap.weights.rules import Table, halves, pair, same

LLM = "model.llm."
LAYER = "model.llm.layers.{n}."

PUBLISHED = Table(
    "published",
    (
        same("embed.weight", LLM + "embed.weight"),
        same("embed.norm.weight", LLM + "embed_norm.weight"),
        same("norm.weight", LLM + "norm.weight"),
        same("head.weight", LLM + "unembed.weight"),
        same("layers.{n}.attn_norm.weight", LAYER + "attn_norm.weight"),
        same("layers.{n}.mlp_norm.weight", LAYER + "mlp_norm.weight"),
        same("layers.{n}.attention.q.weight", LAYER + "attn.wq_du.weight"),
        same("layers.{n}.attention.k.weight", LAYER + "attn.wk_dv.weight"),
        same("layers.{n}.attention.v.weight", LAYER + "attn.wv_dv.weight"),
        same("layers.{n}.attention.r.weight", LAYER + "attn.wr_du.weight"),
        same("layers.{n}.attn_out.weight", LAYER + "attn.wo_ud.weight"),
        same("layers.{n}.attention.q_norm.weight", LAYER + "attn.q_norm.weight"),
        same("layers.{n}.attention.k_norm.weight", LAYER + "attn.k_norm.weight"),
        same("layers.{n}.attention.k_sconv.weight", LAYER + "attn.k_sconv.weight"),
        same("layers.{n}.attention.v_sconv.weight", LAYER + "attn.v_sconv.weight"),
        same("layers.{n}.attention.rel.proj", LAYER + "attn.rel_logits_proj.proj"),
        same("layers.{n}.attn_sconv.weight", LAYER + "attn_sconv.weight"),
        same("layers.{n}.mlp_sconv.weight", LAYER + "mlp_sconv.weight"),
        same("layers.{n}.mlp.w13.weight", LAYER + "mlp.w13_dn.weight"),
        same("layers.{n}.mlp.w2.weight", LAYER + "mlp.w2_md.weight"),
        same("layers.{n}.mlp.global_scale", LAYER + "mlp.global_scale"),
        *(
            same(f"layers.{{n}}.mlp.experts.{part}{slot}", LAYER + f"mlp.experts.{part}_weight{source}")
            for part in ("w13", "w2")
            for slot, source in (
                ("", ""),
                (".codes", ""),
                (".scales", ".scale"),
                (".scale2", ".scale2"),
                (".input_amax", ".input_amax"),
                (".original_shape", ".original_shape"),
            )
        ),
        same("layers.{n}.mlp.router.weight", LAYER + "mlp.gate.weight"),
        same("layers.{n}.mlp.router.bias", LAYER + "mlp.gate.bias"),
        same("layers.{n}.mlp.router.global_scale", LAYER + "mlp.gate.global_scale"),
        same("layers.{n}.mlp.shared.w13", LAYER + "mlp.shared_experts.shared_w13_weight"),
        same("layers.{n}.mlp.shared.w2", LAYER + "mlp.shared_experts.shared_w2_weight"),
    ),
    skipped=("model.mtp.", "model.visual.", "model.audio."),
)

MODULE = "model.layers.{n}."

TEXT_MODULES = Table(
    "transformers text",
    (
        same("embed.weight", "model.embed_tokens.weight"),
        same("embed.norm.weight", "model.embed_tokens.embed_norm.weight"),
        same("norm.weight", "model.norm.weight"),
        same("head.weight", "lm_head.weight"),
        same("layers.{n}.attn_norm.weight", MODULE + "input_layernorm.weight"),
        same("layers.{n}.mlp_norm.weight", MODULE + "post_attention_layernorm.weight"),
        same("layers.{n}.attention.q.weight", MODULE + "self_attn.q_proj.weight"),
        same("layers.{n}.attention.k.weight", MODULE + "self_attn.k_proj.weight"),
        same("layers.{n}.attention.v.weight", MODULE + "self_attn.v_proj.weight"),
        same("layers.{n}.attention.r.weight", MODULE + "self_attn.r_proj.weight"),
        same("layers.{n}.attn_out.weight", MODULE + "self_attn.o_proj.weight"),
        same("layers.{n}.attention.q_norm.weight", MODULE + "self_attn.q_norm.weight"),
        same("layers.{n}.attention.k_norm.weight", MODULE + "self_attn.k_norm.weight"),
        same("layers.{n}.attention.k_sconv.weight", MODULE + "self_attn.k_sconv.conv1d.weight"),
        same("layers.{n}.attention.v_sconv.weight", MODULE + "self_attn.v_sconv.conv1d.weight"),
        same("layers.{n}.attention.rel.proj", MODULE + "self_attn.rel_logits_proj.proj"),
        same("layers.{n}.attn_sconv.weight", MODULE + "attn_sconv.conv1d.weight"),
        same("layers.{n}.mlp_sconv.weight", MODULE + "mlp_sconv.conv1d.weight"),
        pair("layers.{n}.mlp.w13.weight", MODULE + "mlp.gate_proj.weight", MODULE + "mlp.up_proj.weight"),
        same("layers.{n}.mlp.w2.weight", MODULE + "mlp.down_proj.weight"),
        same("layers.{n}.mlp.global_scale", MODULE + "mlp.global_scale"),
        halves("layers.{n}.mlp.experts.w13", MODULE + "mlp.experts.gate_up_proj", dim=1),
        same("layers.{n}.mlp.experts.w2", MODULE + "mlp.experts.down_proj"),
        same("layers.{n}.mlp.router.weight", MODULE + "mlp.gate.weight"),
        same("layers.{n}.mlp.router.bias", MODULE + "mlp.gate.e_score_correction_bias"),
        same("layers.{n}.mlp.router.global_scale", MODULE + "mlp.gate.global_scale"),
        pair(
            "layers.{n}.mlp.shared.w13",
            MODULE + "mlp.shared_experts.gate_proj",
            MODULE + "mlp.shared_experts.up_proj",
            dim=1,
        ),
        same("layers.{n}.mlp.shared.w2", MODULE + "mlp.shared_experts.down_proj"),
    ),
    skipped=("model.mtp.",),
)

# What transformers' multimodal class holds in memory, for checkpoints merged or converted by other tools.
MULTIMODAL_MODULES = TEXT_MODULES.renamed(
    "transformers multimodal",
    "model.",
    "model.language_model.",
    skipped=("model.mtp.", "model.vision_tower.", "model.audio_tower."),
)

TABLES = (PUBLISHED, TEXT_MODULES, MULTIMODAL_MODULES)
