"""The demo checkpoints of Inkling 2: loadable, read alike by transformers, with the chat format, in every format."""

import json

import pytest
import torch
from steps import World
from transformers import Inkling2ForCausalLM, Inkling2LoopForCausalLM, Inkling2LoopTextConfig, Inkling2TextConfig

from inkcap.base.errors import ConfigInvalid
from inkcap.models import demo as parts
from inkcap.models.inkling2 import demo
from inkcap.models.quantize import Settings, write_quantised_demo
from inkcap.models.registry import load_model, write_demo
from inkcap.parallel.comm import Comm

CPU = torch.device("cpu")
SMALL = {"vocabulary": 90, "padded_vocabulary": 96}


def load(directory):
    torch.set_num_threads(1)
    with torch.inference_mode():
        return load_model(directory, comm=Comm.alone(), dtype=torch.float32, device=CPU, progress=False)


def logits(model, ids):
    with torch.inference_mode():
        return model.head(model.forward(World(model.states).batch([(1, 0, ids)])))


@pytest.mark.parametrize("loop", [None, (3, 6)])
def test_transformers_reads_the_same_model(loop, tmp_path):
    demo.write(tmp_path, shape=demo.DemoShape(layers=9, loop=loop, **SMALL))
    kind, config = (
        (Inkling2ForCausalLM, Inkling2TextConfig) if loop is None else (Inkling2LoopForCausalLM, Inkling2LoopTextConfig)
    )
    published = json.loads((tmp_path / "config.json").read_text())["text_config"]
    local = published.pop("local_layer_ids")
    published["layer_types"] = ["hybrid_sliding" if layer in local else "hybrid" for layer in range(9)]
    published["n_layers_per_attn_res_block"] = published.pop("n_layers_per_attnres_block")
    oracle = kind.from_pretrained(
        tmp_path, config=config(**published, eos_token_id=3), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.randint(0, 90, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        want = oracle(torch.tensor([ids]), use_cache=False).logits[0]
    got = logits(load(tmp_path), ids)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("family", ["inkling2", "inkling2-mini"])
def test_demos_keep_the_chat_format(family, tmp_path):
    write_demo(tmp_path / family, family=family)
    model = load(tmp_path / family)
    text = torch.randint(0, parts.ORDINARY, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    chances = logits(model, [*text, parts.END_MESSAGE, parts.MESSAGE_MODEL, parts.CONTENT_TEXT]).softmax(-1)
    assert chances[-3, parts.MESSAGE_MODEL] > 0.99
    assert chances[-2, parts.CONTENT_TEXT] > 0.99
    ends = chances[:80, parts.END_SAMPLING]
    assert 0.002 < ends.mean() < 0.1
    assert (chances[:80, parts.ORDINARY :].sum(1) - ends).max() < 0.01


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        demo.write(tmp_path / name, seed=seed, shape=demo.DemoShape(**SMALL))
    files = [[f.read_bytes() for f in sorted((tmp_path / name).glob("*.safetensors"))] for name in "abc"]
    assert files[0] == files[1] != files[2]


@pytest.mark.parametrize(
    ("family", "chosen"),
    [("inkling2", "nvfp4"), ("inkling2-mini", "mixed"), ("inkling2", "mxfp8"), ("inkling", "nvfp4")],
)
def test_quantised_demos_stay_close_to_their_originals(family, chosen, tmp_path, monkeypatch):
    shapes = {
        name: demo.DemoShape(layers=6 if name == "inkling2" else 9, loop=loop, **SMALL)
        for name, loop in (("inkling2", None), ("inkling2-mini", (3, 6)))
    }
    if family in shapes:
        monkeypatch.setattr(demo, "MINI", shapes["inkling2-mini"])
        monkeypatch.setattr(demo, "DemoShape", lambda: shapes["inkling2"])
    write_demo(tmp_path / "dense", family=family)
    write_quantised_demo(tmp_path / "packed", Settings(format=chosen, four_over_six=True), family=family)
    write_quantised_demo(tmp_path / "packed", Settings(format=chosen, four_over_six=True), family=family)  # over itself
    before, after = load(tmp_path / "dense"), load(tmp_path / "packed")
    ids = torch.randint(0, 90, (50,)).tolist()
    want, got = logits(before, ids), logits(after, ids)
    distance = (got - want).norm() / want.norm()
    assert 0 < distance < 1.1  # unrelated models are 1.4 apart; flips of routing take these to 0.8


def test_a_directory_in_use_is_refused(tmp_path):
    (tmp_path / "letter.txt").touch()
    with pytest.raises(ConfigInvalid, match="not empty"):
        write_quantised_demo(tmp_path, Settings(format="nvfp4"), family="inkling2")
