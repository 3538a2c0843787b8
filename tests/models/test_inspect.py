"""inkcap inspect on headers alone: published sizes come out to the byte, from files whose data is a hole."""

import json
from dataclasses import replace
from math import prod

import pytest
import torch

from inkcap.base.checkpoint import read_config
from inkcap.base.errors import CheckpointUnreadable, ConfigInvalid
from inkcap.base.formats import WeightFormat
from inkcap.models.families import find_entry
from inkcap.models.inkling import demo as first
from inkcap.models.inkling.config import InklingConfig
from inkcap.models.inkling.model import Inkling
from inkcap.models.inkling.weights import TABLES
from inkcap.models.inkling2 import demo
from inkcap.models.inspect import inspect, ranges, render
from inkcap.models.quantize import Plan, Settings, quantize, shapes
from inkcap.models.registry import MODELS, build, find_stored
from inkcap.parallel.comm import Comm
from inkcap.weights.headers import INDEX, ITEM_BYTES
from inkcap.weights.load import check
from inkcap.weights.reader import Checkpoint
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
    write_headers(directory, {name: (size, NAMES[dtype]) for name, (size, dtype) in tensors.items()}, shards)
    (directory / "config.json").write_text(json.dumps(shape.config()))


def write_headers(directory, tensors, shards=1):
    """Files whose headers hold these tensors: name -> shape and dtype. Their data is a hole."""
    names, weight_map = list(tensors), {}
    for number in range(shards):
        file, header, end = directory / f"model-{number}.safetensors", {}, 0
        for name in names[number::shards]:
            size, dtype = tensors[name]
            offsets = [end, end := end + prod(size) * ITEM_BYTES[dtype]]
            header[name] = {"dtype": dtype, "shape": list(size), "data_offsets": offsets}
            weight_map[name] = file.name
        text = json.dumps(header).encode()
        with file.open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


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
    assert inspect(tmp_path, "float8_e4m3fn").token_bytes == 16_384
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
    assert inspect(tmp_path, "float8_e4m3fn").token_bytes == 16_384
    assert "24 layers, visited 48 times in all" in render(report)


def test_the_first_generation(tmp_path):
    first.write(tmp_path, shape=first.DemoShape(vocabulary=90, padded_vocabulary=96))
    report = inspect(tmp_path)
    assert report.family == "inkling"
    assert report.formats == {WeightFormat.DENSE: [2, 3, 4, 5, 6, 7]}
    assert report.class_bytes["dense MLPs"] == 2 * (3 * 64 * 128 + 1) * 2


WIDE = {"vocabulary": 90, "padded_vocabulary": 96, "expert_width": 128, "heads": 8}


@pytest.mark.parametrize(
    ("write", "settings"),
    [
        (lambda place: first.write(place, shape=first.DemoShape(**WIDE, kv_heads=2, local_kv_heads=4)), None),
        (lambda place: first.write(place, shape=first.DemoShape(**WIDE)), Settings(format="nvfp4")),
        (lambda place: demo.write(place, shape=demo.DemoShape(**WIDE)), Settings(format="mixed")),
        (lambda place: demo.write(place, shape=replace(demo.MINI, **WIDE)), None),
    ],
)
def test_sizes_are_those_of_the_ranks_of_a_built_model(write, settings, tmp_path):
    """Stored bytes of every slot, the state of every visit, and the same refusals."""
    write(tmp_path / "dense")
    if settings is not None:
        quantize(tmp_path / "dense", tmp_path / "packed", settings, progress=False)
    compare_with_model(tmp_path / ("dense" if settings is None else "packed"))


def test_sizes_of_the_dialects_of_transformers(tmp_path):
    shape = first.DemoShape(**WIDE, kv_heads=2)
    model = Inkling(InklingConfig.from_json(shape.config()), Comm.alone(), torch.bfloat16, torch.device("meta"))
    for table in TABLES[1:]:
        directory = tmp_path / table.name
        directory.mkdir()
        pieces = [piece for found in table.pieces(model.slots()).values() for piece in found]
        write_headers(directory, {piece.source: (piece.shape, "BF16") for piece in pieces})
        (directory / "config.json").write_text(json.dumps(shape.config()))
        compare_with_model(directory)


def compare_with_model(directory):
    declared = read_config(directory)
    entry, checkpoint = find_entry(declared), Checkpoint(directory)
    checkpoint.open(checkpoint.files)
    config = entry.generation.read(declared)
    stored = find_stored(checkpoint, declared, config.num_hidden_layers)
    possible = 0
    for size in inspect(directory).sizes:
        comm = Comm.outline(size.tp)
        if size.reason is not None:
            with pytest.raises(ConfigInvalid):
                build(entry, config, comm, torch.bfloat16, torch.device("meta"), stored)
            continue
        model = build(entry, config, comm, torch.bfloat16, torch.device("meta"), stored)
        possible += 1
        pieces = check(checkpoint, model.slots(), MODELS[entry.family][1])
        held = sum(piece.target.numel() * ITEM_BYTES[checkpoint.stored(piece.source).dtype] for piece in pieces)
        assert (size.reason, size.weight_bytes) == (None, held), f"on {size.tp} ranks"
        grows = sum(prod(p.shape) * 2 for state in model.states if state.window is None for p in state.planes)
        assert size.token_bytes == grows
    assert 2 <= possible < 5


def test_a_missing_shard_is_named(tmp_path):
    hollow(tmp_path, replace(MINI, layers=6, loop=None), 3)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointUnreadable, match=r"lacks model-1\.safetensors"):
        inspect(tmp_path)


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
