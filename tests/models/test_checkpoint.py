"""Checkpoints through models/registry.py: what transformers saves, and what we write, as both engines read it."""

import json

import pytest
import torch
from steps import World
from transformers import InklingConfig, InklingForCausalLM, InklingForConditionalGeneration, InklingTextConfig

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.base.errors import CheckpointMismatch, ConfigInvalid
from inkcap.models import demo as parts
from inkcap.models.families import REGISTRY, supported
from inkcap.models.inkling import demo
from inkcap.models.registry import load_model, write_demo
from inkcap.ops.dispatch import bind
from inkcap.parallel.comm import Comm
from inkcap.weights.reader import Checkpoint

CPU = torch.device("cpu")
PROMPT = torch.randint(0, 90, (60,), generator=torch.Generator().manual_seed(3)).tolist()
TEXT = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "vocab_size": 96,
    "unpadded_vocab_size": 90,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "sliding_window_size": 8,
    "local_layer_ids": [0, 1, 3],
    "d_rel": 6,
    "rel_extent": 20,
    "log_scaling_n_floor": 11,
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    "intermediate_size": 40,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "logits_mup_width_multiplier": 3.0,
}
TOWERS = {
    "vision_config": {"patch_size": 4, "num_hidden_layers": 2, "temporal_patch_size": 2},
    "audio_config": {"mel_vocab_size": 16, "n_mel_bins": 4},
}
SMALL = demo.DemoShape(vocabulary=90, padded_vocabulary=96, shards=2)


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices; and the operations' references."""
    torch.set_num_threads(1)
    bind(CPU, {})


def randomised(oracle):
    """Weights at which every part matters and no two tensors are alike."""
    generator = torch.Generator().manual_seed(7)
    for name, tensor in oracle.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            one = "norm" in name or "global_scale" in name
            tensor.copy_(1 + 0.3 * noise if one else noise if tensor.dim() == 1 else noise * tensor.shape[-1] ** -0.5)
    return oracle.eval()


def text_oracle():
    return randomised(InklingForCausalLM(InklingTextConfig(**TEXT)))


def multimodal_oracle():
    return randomised(InklingForConditionalGeneration(InklingConfig(text_config=dict(TEXT), **TOWERS)))


def expected(oracle):
    with torch.no_grad():
        return oracle(torch.tensor([PROMPT]), use_cache=False).logits[0].float()


def computed(directory):
    """Logits of the prompt from the checkpoint in `directory`, in fp32."""
    model = load_model(directory, comm=Comm.alone(), dtype=torch.float32, device=CPU)
    return model.head(model.forward(World(model.states).batch([(0, 0, PROMPT)])))


def assert_same_logits(ours, theirs):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("make", [text_oracle, multimodal_oracle])
@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
def test_what_transformers_saves_is_what_it_computes(make, shard_size, tmp_path):
    oracle = make()
    oracle.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size != "5GB")
    names = Checkpoint(tmp_path).files
    assert ("model.llm.embed.weight" in names) == (make is multimodal_oracle)
    assert_same_logits(computed(tmp_path), expected(oracle))


def test_bfloat16_weights_are_taken_exactly(tmp_path):
    oracle = text_oracle().bfloat16()
    oracle.save_pretrained(tmp_path)
    assert_same_logits(computed(tmp_path), expected(oracle.float()))


def test_module_names_of_the_multimodal_class(tmp_path):
    oracle = multimodal_oracle()
    oracle.save_pretrained(tmp_path, save_original_format=False)
    assert "model.language_model.layers.0.mlp.gate_proj.weight" in Checkpoint(tmp_path).files
    assert_same_logits(computed(tmp_path), expected(oracle))


def test_transformers_reads_the_demo_as_we_do(tmp_path):
    demo.write(tmp_path, seed=5, shape=SMALL)
    config = InklingConfig(**json.loads((tmp_path / "config.json").read_text()), **TOWERS)
    oracle, report = InklingForConditionalGeneration.from_pretrained(
        tmp_path, config=config, dtype=torch.float32, output_loading_info=True
    )
    assert all("tower" in name for name in report["missing_keys"])
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert_same_logits(computed(tmp_path), expected(oracle.eval()))


def test_what_nothing_wants_need_not_be_there(tmp_path):
    """Prediction depths and towers are in the index; their files are not opened, nor missed."""
    demo.write(tmp_path, shape=SMALL)
    before = computed(tmp_path)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    for name in ("mtp.layers.0.hidden_norm", "visual.final_norm", "audio.encoder"):
        index["weight_map"][f"model.{name}.weight"] = "mtp.safetensors"
    file.write_text(json.dumps(index))
    assert torch.equal(computed(tmp_path), before)


def test_the_demo_has_the_published_dtypes_and_layout(tmp_path):
    demo.write(tmp_path, shape=SMALL)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.open(checkpoint.files)
    assert len({file.name for file in checkpoint.files.values()}) == 2
    floats = {name for name in checkpoint.files if checkpoint.stored(name).dtype == "F32"}
    assert floats == {f"model.llm.layers.{n}.mlp.gate.{kind}" for n in range(2, 8) for kind in ("bias", "global_scale")}
    assert {checkpoint.stored(name).dtype for name in checkpoint.files if name not in floats} == {"BF16"}


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        demo.write(tmp_path / name, seed=seed, shape=SMALL)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    contents = {name: [path.read_bytes() for path in sorted((tmp_path / name).iterdir())] for name in ("a", "b", "c")}
    assert contents["a"] == contents["b"]
    assert contents["a"][files.index("model-00001-of-00002.safetensors")] != contents["c"][2]


def test_the_demo_is_small_and_has_a_tokenizer(tmp_path):
    write_demo(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 80e6
    ranks = (tmp_path / "tiktoken" / "tokenizer.model").read_bytes().splitlines()
    assert len(ranks) == 199998
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["unpadded_vocab_size"] == 200058
    write_demo(tmp_path, seed=1)  # over another demo


def test_the_demo_speaks_the_chat_format(tmp_path):
    write_demo(tmp_path)
    model = load_model(tmp_path, comm=Comm.alone(), dtype=torch.float32, device=CPU)
    text = torch.randint(0, parts.ORDINARY, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = World(model.states).batch([(0, 0, [*text, parts.END_MESSAGE, parts.MESSAGE_MODEL, parts.CONTENT_TEXT])])
    chances = model.head(model.forward(batch)[20:]).softmax(-1)
    assert chances[-3, parts.MESSAGE_MODEL] > 0.99
    assert chances[-2, parts.CONTENT_TEXT] > 0.99
    ends = chances[:-3, parts.END_SAMPLING]
    assert 0.001 < ends.median() < 0.02  # answers of tens to hundreds of tokens
    control = chances[:-2, parts.ORDINARY :].sum(-1)[:-1] - ends
    assert control.max() < 0.01
    likely = chances[:-3].max(-1).values
    assert 0.01 < likely.median() < 0.9  # neither uniform nor certain


def test_the_demo_refuses_a_directory_in_use(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigInvalid, match="not empty and holds no demo"):
        write_demo(tmp_path)
    with pytest.raises(ConfigInvalid, match="no demo of family 'mamba'; there are inkling"):
        write_demo(tmp_path, family="mamba")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "names architectures .*Llama.*supported are InklingForCond.*, Ink"),
        ({"architectures": None, "model_type": "llama"}, "model_type 'llama'"),
        ({"quantization_config": {"quant_algo": "AWQ"}}, "declares quant_algo 'AWQ'; known are NVFP4, MXFP8"),
        ({"text_config": {}}, r"config\.json: text_config has no"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(change, message, tmp_path):
    demo.write(tmp_path, shape=SMALL)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointMismatch, match=message):
        load_model(tmp_path, comm=Comm.alone(), dtype=torch.float32, device=CPU)


def test_unknown_quantisation_is_refused(tmp_path):
    demo.write(tmp_path, shape=SMALL)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8_PB"}}')
    with pytest.raises(CheckpointMismatch, match="declares quant_algo 'FP8_PB'"):
        load_model(tmp_path, comm=Comm.alone(), dtype=torch.float32, device=CPU)


def test_one_report_of_everything_that_does_not_fit(tmp_path):
    demo.write(tmp_path, shape=SMALL)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= {"num_hidden_layers": 9, "dense_mlp_idx": 1, "rel_extent": 50}
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointMismatch) as caught:
        load_model(tmp_path, comm=Comm.alone(), dtype=torch.float32, device=CPU)
    message = str(caught.value)
    assert "missing" in message
    assert "layers.1.mlp.experts.w13_weight" in message
    assert "spare" in message
    assert "layers.1.mlp.w13_dn.weight" in message
    assert "of another shape" in message
    assert "layers.3.attn.rel_logits_proj.proj is [8, 48], wanted [8, 50]" in message


def test_the_table_of_models():
    assert [row[:3] for row in supported()] == [(e.architecture, e.model_type, e.family) for e in REGISTRY]
    assert "InklingForConditionalGeneration" in supported()[0]
