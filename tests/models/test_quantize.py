"""Quantising a checkpoint and reading it back: against transformers' own decoding, after a kill, and from bad files."""

import json
from types import SimpleNamespace

import pytest
import torch
from checkpoints import experts_of, rewrite
from oracle_inkling2 import BASE, FULL, LOOP, SLIDING, randomise
from steps import World
from transformers import Inkling2LoopForCausalLM, Inkling2LoopTextConfig

import inkcap.models.quantize as quantize_module
from inkcap.base.errors import CheckpointMismatch, ConfigInvalid, NotEnoughMemory
from inkcap.base.formats import Numerics, WeightFormat
from inkcap.base.log import logger
from inkcap.models.inkling import demo
from inkcap.models.quantize import Settings, quantize
from inkcap.models.registry import load_model
from inkcap.ops.act.ref import swiglu, swiglu_capped
from inkcap.ops.quantize import ref
from inkcap.ops.values import Caps, Normed
from inkcap.parallel.comm import Comm
from inkcap.weights.reader import Checkpoint
from inkcap.weights.stored import find_formats

CPU = torch.device("cpu")
EXPERT = "model.llm.layers.{}.mlp.experts.{}_weight"
SMALL = {
    **BASE,
    **LOOP,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "loop_num_passes": 2,
}


def load(directory, dtype=torch.float32, numerics=Numerics.W4A16):
    with torch.inference_mode():
        return load_model(directory, comm=Comm.alone(), dtype=dtype, device=CPU, progress=False, numerics=numerics)


def logits(model, ids):
    with torch.inference_mode():
        batch = World(model.states).batch([(1, 0, ids)])
        return model.head(model.forward(batch))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A looped checkpoint in several shards, as transformers saves it."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    oracle = Inkling2LoopForCausalLM(Inkling2LoopTextConfig(**SMALL)).eval()
    with torch.inference_mode():
        randomise(oracle)
    directory = tmp_path_factory.mktemp("dense")
    oracle.save_pretrained(directory, max_shard_size="150KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


@pytest.fixture(scope="module")
def mixed(dense, tmp_path_factory):
    directory = tmp_path_factory.mktemp("mixed")
    quantize(dense, directory, Settings(format="mixed", four_over_six=True), progress=False)
    return directory


def test_mixed_formats_decode_as_in_transformers(mixed):
    """Every expert weight bit for bit, and the logits."""
    names = [EXPERT.format(n, part) for n in range(6) for part in ("w13", "w2")]
    formats = find_formats(Checkpoint(mixed), names)
    assert list(formats.values()) == [WeightFormat.NVFP4] * 10 + [WeightFormat.MXFP8] * 2
    oracle = Inkling2LoopForCausalLM.from_pretrained(mixed, dtype=torch.float32, attn_implementation="eager").eval()
    model = load(mixed)
    for n, layer in enumerate(model.layers):
        theirs = oracle.model.layers[n].mlp.experts
        up = theirs.gate_up_proj.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        assert torch.equal(experts_of(layer).routed.w13(), up)
        assert torch.equal(experts_of(layer).routed.w2(), theirs.down_proj)
    ids = torch.randint(0, 90, (40,)).tolist()
    with torch.inference_mode():
        want = oracle(torch.tensor([ids]), use_cache=False).logits[0]
    got = logits(model, ids)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_bfloat16_models_round_the_exact_value_once(mixed):
    exact, rounded = load(mixed), load(mixed, torch.bfloat16)
    for a, b in zip(exact.layers, rounded.layers, strict=True):
        assert torch.equal(experts_of(a).routed.w13().bfloat16(), experts_of(b).routed.w13())


def test_reference_numerics_quantise_what_experts_see_but_not_the_router(mixed):
    """One layer of each format against the rule written out: rows of x, then rows of the activations."""
    exact, rounded = load(mixed), load(mixed, numerics=Numerics.REFERENCE)
    x = torch.randn(5, 64)
    rows = Normed(x, torch.ones(64), 1e-6)
    caps = Caps(SMALL["mlp_gate_softcap"], SMALL["mlp_up_softcap"])
    for layer in (1, 5):
        mlp = experts_of(rounded.layers[layer])
        with torch.inference_mode():
            act, route = mlp(rows)
            plain, same = experts_of(exact.layers[layer])(rows)
            assert torch.equal(route.choice, same.choice)
            assert torch.equal(route.weights, same.weights)
            for token in range(5):
                seen = rounded_row(rows.tensor()[token], layer)
                for place, expert in enumerate(route.choice[token].tolist()):
                    up = swiglu_capped(mlp.routed.w13()[expert] @ seen, caps)
                    torch.testing.assert_close(act[token, place], rounded_row(up, layer), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(act, plain, rtol=1e-3)


def rounded_row(row, layer):
    """A row as the format of the layer's experts has it: limit 256, since the fixture is Four Over Six."""
    if layer == 5:
        return ref.mxfp8_decode(*ref.mxfp8_encode(row))
    return ref.nvfp4_decode(*ref.nvfp4_encode_four_over_six(row[None], row.abs().max()[None], 256.0))[0]


def test_reference_numerics_of_the_first_generation(tmp_path):
    """One factor per layer and product, from the checkpoint; router and shared experts see exact rows."""
    demo.write(tmp_path / "dense", shape=demo.DemoShape(vocabulary=90, padded_vocabulary=96, hidden=64))
    quantize(tmp_path / "dense", tmp_path / "packed", Settings(format="nvfp4"), progress=False)
    calibrated = {EXPERT.format(4, "w13") + ".input_amax": 5.0, EXPERT.format(4, "w2") + ".input_amax": 0.75}
    packed = rewrite(
        tmp_path / "packed", tmp_path / "calibrated", lambda t: [t[n].fill_(v) for n, v in calibrated.items()]
    )
    exact, rounded = load(packed).layers, load(packed, numerics=Numerics.REFERENCE).layers
    assert type(rounded[2].mlp) is type(exact[2].mlp)  # stored dense
    rows = Normed(torch.randn(5, 64), torch.ones(64), 1e-6)

    def seen(x, amax):
        factor = torch.tensor(amax / 2688)
        return ref.nvfp4_decode(*ref.nvfp4_encode(x, factor), factor)

    with torch.inference_mode():
        plain, act = exact[4].mlp(rows), rounded[4].mlp(rows)
        assert torch.equal(act.route.choice, plain.route.choice)
        assert torch.equal(act.route.weights, plain.route.weights)
        torch.testing.assert_close(act.shared, plain.shared)
        assert not torch.allclose(act.routed, plain.routed, rtol=1e-3)
        for token, x in enumerate(seen(rows.tensor(), 5.0)):
            for place, expert in enumerate(act.route.choice[token].tolist()):
                want = seen(swiglu(rounded[4].mlp.routed.w13()[expert] @ x), 0.75)
                torch.testing.assert_close(act.routed[token, place], want, rtol=1e-5, atol=1e-6)


def test_errors_are_those_of_the_formats(dense, tmp_path):
    """Relative errors of normal weights: near 0.09 in NVFP4, less with Four Over Six, near 0.026 in MXFP8."""
    found = {}
    for name, settings in {
        "nvfp4": Settings(format="nvfp4"),
        "four": Settings(format="nvfp4", four_over_six=True),
        "mxfp8": Settings(format="mxfp8"),
    }.items():
        errors = quantize(dense, tmp_path / name, settings, progress=False)
        assert len(errors) == 12
        found[name] = sum(error.relative for error in errors) / 12
    assert 0.08 < found["nvfp4"] < 0.105
    assert found["four"] < 0.97 * found["nvfp4"]
    assert 0.02 < found["mxfp8"] < 0.03


def test_everything_else_is_copied_to_the_bit(dense, mixed):
    before, after = Checkpoint(dense), Checkpoint(mixed)
    others = [name for name in before.files if ".mlp.experts." not in name]
    for checkpoint in (before, after):
        checkpoint.open(others)
    for name in others:
        parts = []
        for checkpoint in (before, after):
            stored = checkpoint.stored(name)
            parts.append(checkpoint.files[name].read_bytes()[stored.start : stored.stop])
        assert parts[0] == parts[1], name


def test_a_killed_run_goes_on_without_redoing_shards(dense, tmp_path, monkeypatch):
    settings, write = Settings(format="nvfp4"), quantize_module.write_file
    written = []

    def dies(file, planned):
        if len(written) == 2:
            file.write_bytes(b"half a shard")
            raise KeyboardInterrupt
        written.append(file.name)
        write(file, planned)

    monkeypatch.setattr(quantize_module, "write_file", dies)
    with pytest.raises(KeyboardInterrupt):
        quantize(dense, tmp_path / "out", settings, progress=False)
    assert not (tmp_path / "out" / "config.json").exists()
    first = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.safetensors")}
    assert len(first) == 2
    monkeypatch.setattr(quantize_module, "write_file", write)
    errors = quantize(dense, tmp_path / "out", settings, progress=False)
    for name, when in first.items():
        assert (tmp_path / "out" / name).stat().st_mtime_ns == when
    whole = quantize(dense, tmp_path / "again", settings, progress=False)
    assert errors == whole
    for file in sorted((tmp_path / "again").glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
    assert not list((tmp_path / "out").glob("*.partial"))


def test_first_generation_round_trip(tmp_path):
    """Layers behind the first one with experts are quantised, in the layout with a factor per expert."""
    demo.write(tmp_path / "dense", shape=demo.DemoShape(vocabulary=90, padded_vocabulary=96, hidden=64))
    quantize(tmp_path / "dense", tmp_path / "packed", Settings(format="nvfp4"), progress=False)
    before, after = load(tmp_path / "dense"), load(tmp_path / "packed")
    assert torch.equal(before.layers[2].mlp.routed.w2(), after.layers[2].mlp.routed.w2())
    for n in range(3, 8):
        original, decoded = before.layers[n].mlp.routed.w13(), after.layers[n].mlp.routed.w13()
        factor = original.abs().amax((1, 2)) / 2688
        codes, scales = ref.nvfp4_encode(original, factor, floor=ref.E4M3_TINY)
        assert torch.equal(decoded, ref.nvfp4_decode(codes, scales, factor))
    checkpoint = Checkpoint(tmp_path / "packed")
    name = EXPERT.format(3, "w2")
    assert find_formats(checkpoint, [name]) == {name: WeightFormat.NVFP4_SCALE2}
    with pytest.raises(ConfigInvalid, match="mixed is no format of inkling checkpoints"):
        quantize(tmp_path / "dense", tmp_path / "other", Settings(format="mixed"), progress=False)


def test_settings_and_targets_that_cannot_be(dense, mixed, tmp_path, monkeypatch):
    with pytest.raises(ConfigInvalid, match="format 'int4' is unknown"):
        quantize(dense, tmp_path / "a", Settings(format="int4"), progress=False)
    with pytest.raises(ConfigInvalid, match="was begun with settings"):
        quantize(dense, mixed, Settings(format="mxfp8"), progress=False)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "letter.txt").touch()
    with pytest.raises(ConfigInvalid, match="not empty"):
        quantize(dense, tmp_path / "used", Settings(format="mxfp8"), progress=False)
    with pytest.raises(CheckpointMismatch, match="is quantised already"):
        quantize(mixed, tmp_path / "b", Settings(format="mxfp8"), progress=False)
    monkeypatch.setattr(quantize_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(NotEnoughMemory, match="GB are to be written"):
        quantize(dense, tmp_path / "c", Settings(format="mxfp8"), progress=False)


def test_declared_and_stored_formats_that_differ(mixed, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", logger="inkcap")
    same = rewrite(mixed, tmp_path / "said", lambda tensors: None)
    declared = {"quantization": {"quant_algo": "MXFP8", "config_groups": {"a": {"weight_block_size": [32, 32]}}}}
    (same / "hf_quant_config.json").write_text(json.dumps(declared))
    load(same)
    assert "declares weight_block_size [32, 32]" in caplog.text
    assert "declares mxfp8, but its tensors are mxfp8, nvfp4; the tensors are believed" in caplog.text
