"""Inkling 2's config.json: both dialects give the same numbers, and what is wrong is named."""

import pytest
from transformers import Inkling2LoopTextConfig, Inkling2TextConfig

from inkcap.base.errors import CheckpointMismatch
from inkcap.models.inkling2.config import Inkling2Config, Loop
from inkcap.models.inkling2.demo import MINI, DemoShape

PUBLISHED = MINI.config()


def published(**changes):
    text = {**PUBLISHED["text_config"], **changes}
    return {**PUBLISHED, "text_config": {name: value for name, value in text.items() if value is not ...}}


def loop(start, stop, passes):
    return {"loop_config": {"core_start": start, "core_end": stop, "num_passes": passes, "gate_rank": 4}}


def test_the_published_dialect():
    read = Inkling2Config.from_json(PUBLISHED)
    assert read.sliding == (True, True, False) * 3
    assert read.loop == Loop(start=3, stop=6, passes=3, gate_rank=4)
    assert read.n_layers_per_attn_res_block == 3
    assert read.route_scale == 2.0
    assert read.moe_intermediate_size == 32
    assert [read.opens_block(layer) for layer in range(4)] == [True, False, False, True]
    assert Inkling2Config.from_json(DemoShape().config()).loop is None


def test_visits_come_in_the_order_they_run():
    read = Inkling2Config.from_json(PUBLISHED)
    layers = [0, 1, 2, *[3, 4, 5] * 3, 6, 7, 8]
    passes = [0, 0, 0, *[0] * 3, *[1] * 3, *[2] * 3, 0, 0, 0]
    assert list(read.visits()) == list(zip(layers, passes, strict=True))
    assert Inkling2Config.from_json(DemoShape(layers=4).config()).visits() == tuple((n, 0) for n in range(4))


@pytest.mark.parametrize("kind", [Inkling2TextConfig, Inkling2LoopTextConfig])
def test_the_dialect_of_transformers(kind):
    """Its defaults are the published models, and its own files spell every field."""
    read = Inkling2Config.from_json(kind().to_dict())
    assert (read.hidden_size, read.num_hidden_layers) in ((4608, 48), (2304, 24))
    assert [layer for layer, slides in enumerate(read.sliding) if not slides][:2] == [5, 11]
    assert read.max_length == 1048576
    looped = kind is Inkling2LoopTextConfig
    assert read.loop == (Loop(start=6, stop=18, passes=3, gate_rank=64) if looped else None)
    assert read.log_scaling_n_floor == (8192 if looped else 128000)
    assert len(read.visits()) == 48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "text_config has no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"use_value_norm_no_gamma": False}, "use_value_norm_no_gamma is False"),
        ({"local_layer_ids": ...}, "neither local_layer_ids nor layer_types"),
        ({"layer_types": ["hybrid"] * 9}, "local_layer_ids is .* layer_types calls hybrid_sliding"),
        ({"sconv_kernel_size": 3}, "sconv_kernel_size is 3; allowed: 2, 4, 8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; allowed: a divisor of num_attention_heads, 4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; allowed: at most n_routed_experts, 8"),
        (
            {"loop_config": {"core_start": 2, "core_end": 6, "num_passes": 3, "gate_rank": 4}},
            "layers 2 to 6.*multiples",
        ),
        (
            {"loop_config": {"core_start": 6, "core_end": 6, "num_passes": 3, "gate_rank": 4}},
            "core_end is 6; allowed.*7",
        ),
        (loop(0, 6, 3), "core_start is 0"),
        (loop(3, 6, 0), "num_passes is 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"unpadded_vocab_size": 300000}, "unpadded_vocab_size is 300000; allowed: an integer from 1 to 201024"),
        ({"n_layers_per_attn_res_block": 4}, "n_layers_per_attnres_block is 3; allowed: 4"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(CheckpointMismatch, match=message):
        Inkling2Config.from_json(published(**changes))
