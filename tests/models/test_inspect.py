"""inkcap inspect on headers alone: published sizes come out to the byte, from files whose data is a hole."""

import json
from dataclasses import replace

import pytest

from inkcap.base.errors import CheckpointUnreadable
from inkcap.base.formats import WeightFormat
from inkcap.models.inkling import demo as first
from inkcap.models.inkling2 import demo
from inkcap.models.inspect import inspect, ranges, render
from inkcap.models.quantize import Plan, Settings, shapes
from inkcap.weights.reader import INDEX
from inkcap.weights.writer import NAMES

SMALL = demo.DemoShape(
    hidden=4608, layers=48, full_every=6, block=6, heads=48, kv_heads=8, head_dim=128, window=1024, d_rel=16,
    extent=1024, floor=128000, expert_width=2304, experts=384, chosen=8, max_length=1048576,
)  # fmt: skip
MINI = replace(SMALL, hidden=2304, layers=24, heads=24, expert_width=1152, experts=128, loop=(6, 18), gate_rank=64)


def hollow(directory, shape, shards):
    """The published layout of a shape in mixed formats: headers, an index, and no data."""
    settings, tensors = Settings(format="mixed"), {}
    for name, planned in demo._tensors(shape, 0):
        if name.endswith(("w13_weight", "w2_weight")):
            chosen = settings.of_layer(int(name.split(".")[3]), shape.layers)
            stored = WeightFormat.NVFP4 if chosen == "nvfp4" else WeightFormat.MXFP8
            for suffix, part in shapes(Plan(name, stored, settings, *planned.shape)).items():
                tensors[name + suffix] = part
        else:
            tensors[name] = (planned.shape, planned.dtype)
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        file, header, end = directory / f"model-{number}.safetensors", {}, 0
        for name in names[number::shards]:
            size, dtype = tensors[name]
            count = dtype.itemsize
            for width in size:
                count *= width
            header[name] = {"dtype": NAMES[dtype], "shape": list(size), "data_offsets": [end, end := end + count]}
            weight_map[name] = file.name
        text = json.dumps(header).encode()
        with file.open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(shape.config()))


def test_the_published_small_model(tmp_path):
    hollow(tmp_path, SMALL, 100)
    report = inspect(tmp_path)
    assert report.formats == {WeightFormat.NVFP4: list(range(40)), WeightFormat.MXFP8: list(range(40, 48))}
    codes, scales, factors, eights = 244_611_809_280, 30_576_476_160, 123_200, 97_844_723_712 + 3_057_647_616
    assert report.class_bytes["routed experts"] == codes + scales + factors + eights
    assert report.class_bytes["embedding"] == report.class_bytes["head"] == 1_852_637_184
    assert report.class_bytes["convolutions"] + report.class_bytes["attention"] == (
        8_153_726_976 + 905_969_664 + 360_972_288 + 9_043_968 + 48 * 16 * 1024 * 2
    )
    assert report.token_bytes == 32_768
    assert report.sequence_bytes == 160 * 2**20 + 48 * 4 * (1024 + 1024 + 4608 + 4608) * 2
    assert [size.reason is None for size in report.sizes] == [True, True, True, True, False]
    by_tp = {size.tp: size for size in report.sizes}
    assert 98.5e9 < by_tp[4].weight_bytes < 99.5e9  # the tower not counted
    assert by_tp[8].token_bytes == 4096
    text = render(report)
    assert "nvfp4          layers 0-39" in text
    assert "4 x 141 GB" in text


def test_the_published_mini_model(tmp_path):
    hollow(tmp_path, MINI, 1)
    report = inspect(tmp_path)
    assert (report.layers, report.visits) == (24, 48)
    assert report.formats == {WeightFormat.NVFP4: list(range(20)), WeightFormat.MXFP8: list(range(20, 24))}
    assert report.class_bytes["message gates"] == 56_623_104
    assert report.dtype_bytes["F32"] == 991_392
    assert report.token_bytes == 32_768
    assert "24 layers, visited 48 times in all" in render(report)


def test_the_first_generation(tmp_path):
    first.write(tmp_path, shape=first.DemoShape(vocabulary=90, padded_vocabulary=96))
    report = inspect(tmp_path)
    assert report.family == "inkling"
    assert report.formats == {WeightFormat.DENSE: [2, 3, 4, 5, 6, 7]}
    assert report.class_bytes["dense MLPs"] == 2 * (3 * 64 * 128 + 1) * 2


def test_a_missing_shard_is_named(tmp_path):
    hollow(tmp_path, replace(MINI, layers=6, loop=None), 3)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointUnreadable, match=r"lacks model-1\.safetensors"):
        inspect(tmp_path)


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
