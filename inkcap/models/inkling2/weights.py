"""Names of Inkling 2's tensors in checkpoints. transformers saves the published names too, with or without a loop."""

from inkcap.weights.rules import Table, same

LLM = "model.llm."
LAYER = "model.llm.layers.{n}."
ATTENTION = "layers.{n}.attention."

PUBLISHED = Table(
    "published",
    (
        same("embed.weight", LLM + "embed.weight"),
        same("embed.norm.weight", LLM + "embed_norm.weight"),
        same("mix.query", LLM + "attn_res.output_query"),
        same("norm.weight", LLM + "norm.weight"),
        same("head.weight", LLM + "unembed.weight"),
        # layer 0 reads the embedding itself, so these are counted from layer 1
        same("layers.{n}.attn_mix.query", LLM + "attn_res.attn_queries.{n}", shift=-1),
        same("layers.{n}.mlp_mix.query", LLM + "attn_res.mlp_queries.{n}"),
        same("layers.{n}.attn_norm.weight", LAYER + "attn_norm.weight"),
        *(same(f"layers.{{n}}.{part}_norm.weight", LAYER + f"{part}_input_norm.weight") for part in "qkv"),
        same("layers.{n}.mlp_norm.weight", LAYER + "mlp_norm.weight"),
        same(ATTENTION + "q.weight", LAYER + "attn.wq_du.weight"),
        same(ATTENTION + "k.weight", LAYER + "attn.wk_dv.weight"),
        same(ATTENTION + "v.weight", LAYER + "attn.wv_dv.weight"),
        same(ATTENTION + "r.weight", LAYER + "attn.wr_du.weight"),
        same(ATTENTION + "gate.weight", LAYER + "attn.gate_attn.weight"),
        same(ATTENTION + "sink.weight", LAYER + "attn.attn_sink_proj.weight"),
        same(ATTENTION + "q_clip.scale", LAYER + "attn.q_l2_clip.scale"),
        same(ATTENTION + "r_clip.scale", LAYER + "attn.rel_l2_clip.scale"),
        same(ATTENTION + "rel.proj", LAYER + "attn.rel_logits_proj.proj"),
        *(same(ATTENTION + f"{part}_sconv.weight", LAYER + f"attn.{part}_sconv.weight") for part in "kv"),
        *(same(ATTENTION + f"{part}_sconv.static", LAYER + f"attn.{part}_sconv.static_w") for part in "kv"),
        *(same(ATTENTION + f"{part}_sconv.dynamic", LAYER + f"attn.{part}_sconv.weight_proj") for part in "kv"),
        same("layers.{n}.attn_out.weight", LAYER + "attn.wo_ud.weight"),
        same("layers.{n}.attn_sconv.weight", LAYER + "attn_sconv.weight"),
        same("layers.{n}.mlp_sconv.weight", LAYER + "mlp_sconv.weight"),
        same("layers.{n}.mlp.router.weight", LAYER + "mlp.gate.weight"),
        same("layers.{n}.mlp.router.bias", LAYER + "mlp.gate.bias"),
        *(
            same(f"layers.{{n}}.mlp.experts.{part}{slot}", LAYER + f"mlp.experts.{part}_weight{source}")
            for part in ("w13", "w2")
            for slot, source in (
                ("", ""),
                (".codes", ""),
                (".scales", "_scale"),
                (".amax", "_amax"),
                (".denominator", "_outer_scale_denominator"),
            )
        ),
        *(
            same(f"layers.{{n}}.gates.{role}.{part}", LAYER + f"controllers.{theirs}.{part}_weight")
            for role, theirs in (("q", "attn"), ("k", "k"), ("v", "v"), ("mlp", "mlp"))
            for part in ("down", "forget", "gain")
        ),
        same("messenger.outer", LLM + "middle_cycle_cross_pass_queries"),
        same("messenger.inner", LLM + "middle_cycle_cross_pass_kv_queries"),
    ),
    skipped=("model.mtp.", "mtp.", "model.visual."),
)

TABLES = (PUBLISHED,)
