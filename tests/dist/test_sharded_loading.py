"""Two ranks load one checkpoint: each reads its own part only, and together they compute what one rank does."""

import pytest
import torch
from transformers import InklingConfig, InklingForConditionalGeneration

from inkcap.models.inkling import demo

SHAPE = demo.DemoShape(vocabulary=1000, padded_vocabulary=1024, kv_heads=1, shards=2)


NAMES = ("published", "modules")


@pytest.fixture(scope="module")
def results(run_ranks, tmp_path_factory):
    """Per rank and checkpoint: the demo as we write it, and under the module names of transformers."""
    published, modules = (tmp_path_factory.mktemp(name) for name in NAMES)
    demo.write(published, shape=SHAPE)
    towers = {
        "vision_config": {"patch_size": 4, "num_hidden_layers": 2, "temporal_patch_size": 2},
        "audio_config": {"mel_vocab_size": 16, "n_mel_bins": 4},
    }
    config = InklingConfig(**SHAPE.config(), **towers)
    model = InklingForConditionalGeneration.from_pretrained(published, config=config, dtype=torch.bfloat16)
    model.save_pretrained(modules, save_original_format=False)
    return [dict(zip(NAMES, rank, strict=True)) for rank in run_ranks("rank_load.py", 2, published, modules)]


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_loads_its_slice_of_the_whole(results, name):
    assert [rank[name]["different"] for rank in results] == [[], []]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_compute_what_one_does(results, name):
    assert all(rank[name]["error"] < 1e-5 for rank in results)


def test_a_rank_reads_its_part_only(results):
    for rank in results:
        assert rank["published"]["bytes"] == rank["published"]["wanted_bytes"]
        for name in NAMES:
            assert rank[name]["bytes"]["part"] < 0.8 * rank[name]["bytes"]["whole"]


@pytest.mark.parametrize("name", NAMES)
def test_heads_widths_and_words_are_divided(results, name):
    zero, one = (rank[name]["split"] for rank in results)
    for kind in (
        "0.mlp.w13.weight",
        "2.mlp.experts.w13",
        "2.mlp.experts.w2",
        "2.mlp.shared.w13",
        "0.attention.q.weight",
    ):
        assert zero[f"layers.{kind}"][0] == 0
        assert zero[f"layers.{kind}"][1] == one[f"layers.{kind}"][0]
    # the single key head of a global layer is held by both
    assert zero["layers.3.attention.k.weight"] == one["layers.3.attention.k.weight"] == [0, 16]
    assert zero["layers.0.attention.k.weight"] == [0, 32]
    assert one["layers.0.attention.k.weight"] == [32, 64]
    assert one["head.weight"] == [512, 1024]
