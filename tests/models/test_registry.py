"""Loading a model from files that are wrong: one clear error each, before anything large is allocated."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from checkpoints import experts_of, rewrite

from inkcap.base.errors import CheckpointMismatch, CheckpointUnreadable
from inkcap.layers import formats
from inkcap.models.inkling import demo as first
from inkcap.models.inkling2 import demo as second
from inkcap.models.quantize import Settings, quantize
from inkcap.models.registry import load_model, open_model
from inkcap.parallel.comm import Comm
from inkcap.runner.trial import batch_of
from inkcap.weights import scales
from inkcap.weights.headers import INDEX

CPU = torch.device("cpu")
WORDS = {"vocabulary": 90, "padded_vocabulary": 96}
EXPERT = "model.llm.layers.{}.mlp.experts.{}_weight"
NV, MX, ONE = EXPERT.format(1, "w2"), EXPERT.format(5, "w13"), EXPERT.format(4, "w2")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Quantised checkpoints in several shards: the second generation in mixed formats, the first in NVFP4."""
    root = tmp_path_factory.mktemp("packed")
    first.write(root / "dense1", shape=first.DemoShape(**WORDS))
    second.write(root / "dense2", shape=second.DemoShape(**WORDS))
    quantize(root / "dense1", root / "1", Settings(format="nvfp4"), progress=False)
    quantize(root / "dense2", root / "2", Settings(format="mixed"), progress=False)
    return root


def load(directory):
    with torch.inference_mode():
        return load_model(directory, comm=Comm.alone(), dtype=torch.float32, device=CPU, progress=False)


@pytest.fixture
def refuse(monkeypatch):
    """`refuse(directory, error, message)`: loading fails so, without more memory than a check of scales may take."""

    def small_only(*args, **kwargs):
        made = empty(*args, **kwargs)
        assert made.is_meta or made.numel() <= 64 * 8, f"allocated {tuple(made.shape)} before the checks"
        return made

    def refused(directory, error, message):
        monkeypatch.setattr(scales, "CHECKED_BYTES", 64 * 8)
        monkeypatch.setattr(torch, "empty", small_only)
        with pytest.raises(error, match=message):
            load(directory)

    empty = torch.empty
    return refused


def byte(name, value):
    def change(tensors):
        tensors[name].view(torch.uint8)[1, 2, 1] = value

    return change


def value(name, at, number):
    def change(tensors):
        tensors[name].view(-1)[at] = number

    return change


def shape(name, cut):
    def change(tensors):
        tensors[name] = cut(tensors[name])

    return change


def without(*names):
    def change(tensors):
        for name in names:
            del tensors[name]

    return change


SECOND = {
    "missing scale": (without(NV + "_scale"), rf"{NV} is U8, so nvfp4, but {NV}_scale is missing"),
    "missing amax": (without(NV + "_amax"), "_amax is missing"),
    "missing denominator": (without(NV + "_outer_scale_denominator"), "_outer_scale_denominator is missing"),
    "no scales": (without(NV + "_scale", NV + "_amax", NV + "_outer_scale_denominator"), "without any scale"),
    "missing mxfp8 scale": (without(MX + "_scale"), rf"{MX} is F8_E4M3, so mxfp8, but {MX}_scale is missing"),
    "missing codes": (without(NV), rf"(?s)missing:.*{NV}"),
    "shape": (shape(NV + "_scale", lambda t: t[:, :-1]), r"w2_weight_scale is \[8, 63, 2\], wanted \[8, 64, 2\]"),
    "flat": (shape(NV + "_scale", lambda t: t.flatten()), r"w2_weight_scale is \[1024\], wanted \[8, 64, 2\]"),
    "shape mxfp8": (shape(MX + "_scale", lambda t: t[..., :1]), r"is \[8, 64, 1\], wanted \[8, 64, 2\]"),
    "shape of codes": (shape(NV, lambda t: t[..., :8]), r"w2_weight is \[8, 64, 8\], wanted \[8, 64, 16\]"),
    "one amax for all": (shape(NV + "_amax", lambda t: t[:1]), r"w2_weight_amax is \[1\], wanted \[8\]"),
    "scales of another dtype": (shape(NV + "_scale", lambda t: t.float()), "w2_weight_scale is F32"),
    "negative": (byte(NV + "_scale", 0x81), r"_scale\[1, 2, 1\] is byte 129, negative"),
    "nan": (byte(NV + "_scale", 0x7F), r"_scale\[1, 2, 1\] is byte 127, NaN"),
    "byte 255": (byte(NV + "_scale", 255), r"_scale\[1, 2, 1\] is byte 255, NaN"),
    "byte 255 mxfp8": (byte(MX + "_scale", 255), r"w13_weight_scale\[1, 2, 1\] is byte 255, NaN"),
    "zero amax": (value(NV + "_amax", 2, 0.0), "expert 2 has scales other than 0"),
    "negative amax": (value(NV + "_amax", 1, -1.0), r"_amax\[1\] is -1.0"),
    "infinite amax": (value(NV + "_amax", 0, float("inf")), r"_amax\[0\] is inf"),
    "nan amax": (value(NV + "_amax", 0, float("nan")), r"_amax\[0\] is nan"),
    "zero denominator": (
        value(NV + "_outer_scale_denominator", 0, 0.0),
        "denominator is 0.0; it must be finite and ab",
    ),
    "negative denominator": (value(NV + "_outer_scale_denominator", 0, -1536.0), "denominator is -1536.0"),
    "dense beside scales": (shape(NV, lambda t: torch.zeros(8, 64, 32)), "is F32 with .*_scale.* no known format"),
    "integers": (shape(NV, lambda t: t.to(torch.int8)), "is I8 with"),
}
FIRST = {
    "missing scale": (without(ONE + ".scale"), rf"{ONE} is U8, so nvfp4-scale2, but {ONE}.scale is missing"),
    "missing factor": (without(ONE + ".scale2"), ".scale2 is missing"),
    "missing input amax": (without(ONE + ".input_amax"), ".input_amax is missing"),
    "shape": (shape(ONE + ".scale", lambda t: t[..., :1]), r"\.scale is \[8, 64, 1\], wanted \[8, 64, 2\]"),
    "negative": (byte(ONE + ".scale", 0x90), r"\.scale\[1, 2, 1\] is byte 144, negative"),
    "nan": (byte(ONE + ".scale", 0xFF), r"\.scale\[1, 2, 1\] is byte 255, NaN"),
    "zero factor": (value(ONE + ".scale2", 2, 0.0), "expert 2 has scales other than 0"),
    "negative factor": (value(ONE + ".scale2", 3, -0.1), r"\.scale2\[3\] is -0.1"),
    "zero input amax": (value(ONE + ".input_amax", 0, 0.0), r"\.input_amax\[0\] is 0.0; it must be finite and above 0"),
    "nan input amax": (value(ONE + ".input_amax", 0, float("nan")), r"\.input_amax\[0\] is nan"),
    "large input amax": (
        shape(ONE + ".input_amax", lambda t: t.expand(5000)),
        r"\.input_amax is \[5000\], wanted \[1\]",
    ),
    "other original shape": (value(ONE + ".original_shape", 2, 64), r"original_shape is \[8, 64, 64\], but the tensor"),
}


@pytest.mark.parametrize(
    ("generation", "fault"), [*(("2", fault) for fault in SECOND), *(("1", fault) for fault in FIRST)]
)
def test_bad_scales_are_one_clear_error(generation, fault, packed, tmp_path, refuse):
    change, message = (FIRST if generation == "1" else SECOND)[fault]
    refuse(rewrite(packed / generation, tmp_path / "bad", change), CheckpointMismatch, message)


def test_an_expert_of_zeros_is_no_error(packed, tmp_path):
    def change(tensors):
        tensors[NV + "_amax"][2] = 0
        tensors[NV + "_scale"][2].view(torch.uint8).zero_()

    model = load(rewrite(packed / "2", tmp_path / "zero", change))
    assert not experts_of(model.layers[1]).routed.w2()[2].any()


@pytest.mark.parametrize("generation", ["1", "2"])
def test_codes_that_stay_are_what_steps_multiply_before_they_are_read(generation, packed, monkeypatch):
    def weights(model):
        parts = [experts_of(layer).routed for layer in model.layers[1:] if hasattr(experts_of(layer), "routed")]
        return [matrices.weights for part in parts for matrices in (part.up, part.down)]

    decoded = weights(load(packed / generation))
    monkeypatch.setattr(formats, "keeps_codes", lambda device: True)  # as on a GPU, where steps are captured meanwhile
    model, read = open_model(packed / generation, comm=Comm.alone(), dtype=torch.float32, device=CPU, progress=False)
    built = weights(model)
    read()
    model.unpack()
    for now, then, whole in zip(weights(model), built, decoded, strict=True):
        assert now is then
        assert all(torch.equal(now[expert], whole[expert]) for expert in range(len(whole)))


@pytest.fixture
def copy(packed, tmp_path):
    """The second generation's files, to be spoiled."""
    return shutil.copytree(packed / "2", tmp_path / "copy")


def test_shards_that_were_swapped(copy, refuse):
    one, two = sorted(copy.glob("*.safetensors"))[:2]
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)
    refuse(
        copy, CheckpointMismatch, rf"{INDEX} places .* in model-0000\d-of-00003\.safetensors, which has no such tensor"
    )


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_index_that_names_a_file_that_is_not_there(copy, refuse, number):
    (copy / f"model-0000{number}-of-00003.safetensors").unlink()
    refuse(copy, CheckpointUnreadable, rf"lacks model-0000{number}-of-00003\.safetensors, named in {INDEX}")


def test_an_index_that_forgets_a_tensor(copy, refuse):
    index = json.loads((copy / INDEX).read_text())
    del index["weight_map"]["model.llm.norm.weight"]
    (copy / INDEX).write_text(json.dumps(index))
    refuse(copy, CheckpointMismatch, r"(?s)1 missing:.*model\.llm\.norm\.weight")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_header_that_claims_more_than_the_file_has(copy, refuse, number):
    file = copy / f"model-0000{number}-of-00003.safetensors"
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])
    refuse(copy, CheckpointUnreadable, rf"{file.name} is no sound .*: its header claims 1099511627776 bytes")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_file_that_was_cut_short(copy, refuse, number):
    file = copy / f"model-0000{number}-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refuse(copy, CheckpointUnreadable, rf"{file.name} is no sound safetensors file: it is truncated")


@pytest.mark.parametrize(
    ("write", "shape"),
    [
        (first.write, first.DemoShape(**WORDS)),
        (second.write, second.DemoShape(**WORDS)),
        (second.write, replace(second.MINI, **WORDS)),
    ],
    ids=["first", "second", "looped"],
)
def test_a_step_before_weights_are_read_leaves_nothing_behind(tmp_path, write, shape):
    """On a GPU steps are tried and captured while weights are read: nothing may be kept that was made of their room."""
    write(tmp_path / "demo", shape=shape)
    with torch.inference_mode():
        model, read = open_model(tmp_path / "demo", comm=Comm.alone(), dtype=torch.float32, device=CPU, progress=False)
        for slot in model.slots().values():
            slot.target.fill_(0.25)
        model.forward(batch_of(model, ((0, 9, 0, 0),), 1, CPU))
        read()
        model.unpack()
        found, expected = (
            own.forward(replace(batch_of(own, ((0, 9, 0, 0),), 1, CPU), ids=torch.arange(9)))
            for own in (model, load(tmp_path / "demo"))
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
