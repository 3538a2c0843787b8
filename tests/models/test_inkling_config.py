"""models/inkling/config.py: both dialects, and every way a config can be wrong."""

import copy

import pytest

from inkcap.base.errors import CheckpointMismatch
from inkcap.models.inkling.config import InklingConfig

# The published text_config of Inkling-Small.
SMALL = {
    "model_max_length": 1048576,
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 42,
    "vocab_size": 201024,
    "unpadded_vocab_size": 200058,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "swa_num_attention_heads": 32,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 128,
    "sliding_window_size": 512,
    "local_layer_ids": [i for i in range(42) if i % 6 != 5],
    "d_rel": 16,
    "rel_extent": 1024,
    "log_scaling_n_floor": 128000,
    "log_scaling_alpha": 0.1,
    "q_bias": False,
    "o_bias": False,
    "rms_norm_eps": 1e-6,
    "use_embed_norm": True,
    "use_sconv": True,
    "sconv_kernel_size": 4,
    "dense_mlp_idx": 2,
    "dense_intermediate_size": 16384,
    "intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "shared_expert_sink": True,
    "gate_activation": "sigmoid",
    "norm_after_topk": True,
    "use_gate_bias": True,
    "use_global_scale": True,
    "route_scale": 8.0,
    "logits_mup_width_multiplier": 16.0,
    "final_logit_softcapping": None,
}


def published(**changes):
    """config.json in the published dialect; a change to `...` leaves the field out."""
    text = {name: value for name, value in {**SMALL, **changes}.items() if value is not ...}
    return {"model_type": "inkling_mm_model", "eos_token_id": 200006, "text_config": text}


def rewritten(**changes):
    """The same in transformers' dialect, as a text-only model."""
    text = copy.deepcopy(SMALL)
    for name in ("local_layer_ids", "dense_mlp_idx", "dense_intermediate_size", "sconv_kernel_size"):
        del text[name]
    text |= {
        "intermediate_size": 16384,
        "moe_intermediate_size": 2048,
        "conv_kernel_size": 4,
        "max_position_embeddings": text.pop("model_max_length"),
        "layer_types": ["hybrid" if i % 6 == 5 else "hybrid_sliding" for i in range(42)],
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 40,
        "local_layer_ids": None,
    }
    return {name: value for name, value in {**text, **changes}.items() if value is not ...}


def test_the_published_dialect():
    config = InklingConfig.from_json(published())
    assert (config.dense_intermediate_size, config.expert_intermediate_size) == (16384, 2048)
    assert [i for i in range(42) if not config.local(i)] == [5, 11, 17, 23, 29, 35, 41]
    assert [i for i in range(42) if config.dense(i)] == [0, 1]
    assert (config.vocab_size, config.unpadded_vocab_size, config.max_length) == (201024, 200058, 1048576)
    assert (config.log_scaling_n_floor, config.log_scaling_alpha) == (128000, 0.1)


def test_both_dialects_say_the_same():
    assert InklingConfig.from_json(rewritten()) == InklingConfig.from_json(published())
    assert InklingConfig.from_json({"text_config": rewritten()}) == InklingConfig.from_json(published())


def test_numbers_may_be_written_as_floats_or_integers():
    config = InklingConfig.from_json(published(hidden_size=4096.0, route_scale=8, log_scaling_n_floor=128000.0))
    assert config == InklingConfig.from_json(published())


def test_null_switches_off_what_can_be_off():
    config = InklingConfig.from_json(rewritten(log_scaling_n_floor=None, unpadded_vocab_size=None))
    assert config.log_scaling_n_floor is None
    assert config.unpadded_vocab_size == 201024


@pytest.mark.parametrize("name", sorted(set(SMALL) - {"torch_dtype", "unpadded_vocab_size", "log_scaling_n_floor"}))
def test_a_field_left_out_is_an_error_or_one_value(name):
    optional = {
        "q_bias",
        "o_bias",
        "use_embed_norm",
        "use_sconv",
        "gate_activation",
        "norm_after_topk",
        "use_gate_bias",
    }
    optional |= {"use_global_scale", "shared_expert_sink", "final_logit_softcapping"}
    if name in optional:
        assert InklingConfig.from_json(published(**{name: ...})) == InklingConfig.from_json(published())
    else:
        with pytest.raises(CheckpointMismatch, match=name):
            InklingConfig.from_json(published(**{name: ...}))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q_bias", True, r"text_config\.q_bias is True; this engine implements False only"),
        ("use_sconv", False, "use_sconv is False; this engine implements True only"),
        ("use_sconv", 1, "use_sconv is 1"),
        ("gate_activation", "softmax", "gate_activation is 'softmax'; this engine implements 'sigmoid' only"),
        ("final_logit_softcapping", 30.0, r"final_logit_softcapping is 30\.0; this engine implements None only"),
        ("shared_expert_sink", False, "shared_expert_sink is False"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'; this engine implements 'silu' only"),
        ("hidden_size", "4096", "hidden_size is '4096'; allowed: an integer of 1 or more"),
        ("hidden_size", True, "hidden_size is True"),
        ("hidden_size", 0, "hidden_size is 0"),
        ("num_hidden_layers", -1, "num_hidden_layers is -1"),
        ("num_key_value_heads", 5, "num_key_value_heads is 5; allowed: a divisor of num_attention_heads, 32"),
        ("swa_num_key_value_heads", 64, "a divisor of swa_num_attention_heads, 32"),
        ("unpadded_vocab_size", 201025, "an integer from 1 to 201024"),
        ("local_layer_ids", [0, 42], "local_layer_ids is .*; allowed: a list of integers from 0 to 41"),
        ("local_layer_ids", [0, 0], "a list without repetitions"),
        ("local_layer_ids", "all", "local_layer_ids is 'all'"),
        ("dense_mlp_idx", 43, "an integer from 0 to 42"),
        ("sconv_kernel_size", 3, "sconv_kernel_size is 3; allowed: 2, 4, 8"),
        ("num_experts_per_tok", 257, "at most n_routed_experts, 256"),
        ("rms_norm_eps", 0, "rms_norm_eps is 0; allowed: a number greater than 0"),
        ("route_scale", float("inf"), "route_scale is inf"),
        ("moe_intermediate_size", 1024, "moe_intermediate_size is 1024; allowed: 2048, the value of intermediate_size"),
        ("layer_types", ["hybrid"] * 42, "local_layer_ids is .*which is what layer_types calls hybrid_sliding"),
        ("mlp_layer_types", ["sparse"] * 42, "dense_mlp_idx is 2; allowed: 0, as mlp_layer_types has it"),
    ],
)
def test_a_wrong_value_is_named(name, value, message):
    with pytest.raises(CheckpointMismatch, match=message):
        InklingConfig.from_json(published(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layer_types", ["full_attention"] * 42, "each 'hybrid_sliding' or 'hybrid'"),
        ("layer_types", ["hybrid"] * 41, "a list of 42 strings"),
        ("layer_types", ..., "neither local_layer_ids nor layer_types"),
        ("mlp_layer_types", None, "neither dense_mlp_idx nor mlp_layer_types"),
        ("moe_intermediate_size", ..., "neither dense_intermediate_size .* nor moe_intermediate_size"),
        ("sconv_kernel_size", 8, "conv_kernel_size is 4; allowed: 8, the value of sconv_kernel_size"),
    ],
)
def test_a_wrong_value_in_the_other_dialect_is_named(name, value, message):
    with pytest.raises(CheckpointMismatch, match=message):
        InklingConfig.from_json(rewritten(**{name: value}))


def test_a_text_config_that_is_no_object():
    with pytest.raises(CheckpointMismatch, match=r"config\.json: text_config is 3|config\.json\.text_config is 3"):
        InklingConfig.from_json({"text_config": 3})
