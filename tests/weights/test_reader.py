"""weights/reader.py: parts of tensors, and files that lie."""

import json
import os
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from inkcap.base.errors import CheckpointMismatch, CheckpointUnreadable
from inkcap.weights import reader
from inkcap.weights.headers import INDEX, ITEM_BYTES, SINGLE, parse_header
from inkcap.weights.reader import DTYPES, Checkpoint


def whole(tensor):
    return tuple(slice(0, size) for size in tensor.shape)


def read(checkpoint, name, index, like):
    checkpoint.open([name])
    target = torch.empty_like(like)
    checkpoint.read(name, index, target)
    return target


@pytest.fixture
def checkpoint(tmp_path, write_tensors, numbers):
    write_tensors(tmp_path / SINGLE, numbers)
    return Checkpoint(tmp_path)


def test_whole_tensors_at_odd_offsets(checkpoint, numbers):
    assert any(checkpoint.stored(name).start % 2 for name in numbers)
    for name, tensor in numbers.items():
        assert torch.equal(read(checkpoint, name, whole(tensor), tensor), tensor)


def test_what_the_safetensors_library_wrote(tmp_path, numbers):
    save_file(numbers, tmp_path / SINGLE, metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.files) == set(numbers)
    for name, tensor in numbers.items():
        assert torch.equal(read(checkpoint, name, whole(tensor), tensor), tensor)


def test_the_safetensors_library_reads_what_we_write(tmp_path, write_tensors, numbers):
    write_tensors(tmp_path / "x.safetensors", numbers)
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in numbers.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bounce", [reader.BOUNCE_BYTES, 64, 8])
@pytest.mark.parametrize(
    "index",
    [
        (slice(2, 5), slice(0, 5), slice(0, 4)),
        (slice(0, 6), slice(1, 3), slice(0, 4)),
        (slice(0, 6), slice(0, 5), slice(2, 4)),
        (slice(5, 6), slice(0, 5), slice(3, 4)),
        (slice(1, 5), slice(2, 5), slice(1, 3)),
        (slice(3, 3), slice(0, 5), slice(0, 4)),
    ],
)
def test_parts_along_any_dimension(checkpoint, numbers, index, dtype, bounce, monkeypatch):
    monkeypatch.setattr(reader, "BOUNCE_BYTES", bounce)
    want = numbers["half"][index].to(dtype)
    assert torch.equal(read(checkpoint, "half", index, want), want)


def test_targets_of_any_strides(checkpoint, numbers):
    for name in ("half", "full"):
        tensor = numbers[name]
        flipped = torch.empty_like(tensor).transpose(0, 1).contiguous().transpose(0, 1)
        checkpoint.read(name, whole(tensor), flipped)
        assert torch.equal(flipped, tensor)
        every_other = torch.zeros(2 * tensor.shape[0], *tensor.shape[1:], dtype=tensor.dtype)
        checkpoint.read(name, whole(tensor), every_other[1::2])
        assert torch.equal(every_other[1::2], tensor)
        assert not every_other[::2].any()
    half = numbers["half"]
    apart = torch.zeros(len(half), half.shape[1] + 1, half.shape[2], dtype=half.dtype)
    checkpoint.read("half", whole(half), apart[:, 1:])  # matrices without gaps, and gaps between them
    assert torch.equal(apart[:, 1:], half)
    assert not apart[:, 0].any()
    column = torch.zeros(9, 2, dtype=torch.float16)
    checkpoint.read("vector", (slice(0, 9),), column[:, 1])
    assert torch.equal(column[:, 1], numbers["vector"])


def test_shards_are_opened_only_when_wanted(tmp_path, write_tensors, numbers):
    write_tensors(tmp_path / "a.safetensors", {"full": numbers["full"]})
    (tmp_path / "b.safetensors").write_bytes(b"no header at all")
    weight_map = {"full": "a.safetensors", "mtp": "b.safetensors", "tower": "c.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(read(checkpoint, "full", whole(numbers["full"]), numbers["full"]), numbers["full"])
    with pytest.raises(CheckpointUnreadable, match=r"b\.safetensors is no sound"):
        checkpoint.open(["mtp"])
    with pytest.raises(CheckpointUnreadable, match=r"lacks c\.safetensors, named in .*incomplete"):
        checkpoint.open(["full", "tower"])


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "empty": (b"", "it has 0 bytes"),
    "short": (b"\x08\0\0", "it has 3 bytes"),
    "huge header": ((1 << 62).to_bytes(8, "little") + b"{}", r"its header claims 4611686018427387904 bytes; 2 are"),
    "header past the end": ((40).to_bytes(8, "little") + b"{}", "its header claims 40 bytes; 2 are possible"),
    "not JSON": ("{]", b"", "its header is not readable"),
    "not UTF-8": ((4).to_bytes(8, "little") + b"{\xff\xfe}", "its header is not readable"),
    "deep": ("[" * 100_000, b"", "its header is not readable"),
    "a list": ("[]", b"", "its header is no JSON object"),
    "twice": (f'{{"a": {json.dumps(A)}, "a": {json.dumps(A)}}}', bytes(8), "'a' appears twice"),
    "an entry that is none": ({"a": 3}, b"", "its entry for a is no JSON object"),
    "unknown dtype": ({"a": {**A, "dtype": "F3"}}, bytes(8), "a has dtype 'F3'; known are F64, F32"),
    "dtype of another kind": ({"a": {**A, "dtype": ["F32"]}}, bytes(8), "a has dtype"),
    "negative shape": ({"a": {**A, "shape": [-2]}}, bytes(8), r"a has shape \[-2\]"),
    "true as a size": ({"a": {**A, "shape": [True, 2]}}, bytes(8), "a has shape"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8), "a has shape None"),
    "offsets backwards": ({"a": {**A, "data_offsets": [8, 0]}}, bytes(8), "a has data_offsets"),
    "one offset": ({"a": {**A, "data_offsets": [8]}}, bytes(8), "a has data_offsets"),
    "negative offset": ({"a": {**A, "data_offsets": [-8, 0]}}, bytes(8), "a has data_offsets"),
    "size of another dtype": ({"a": {**A, "dtype": "BF16"}}, bytes(8), r"a is BF16 \[2\], 4 bytes, but has 8"),
    "a claim of 2^90 bytes": (
        {"a": {"dtype": "F32", "shape": [1 << 44, 1 << 44], "data_offsets": [0, 1 << 90]}},
        bytes(8),
        "it is truncated",
    ),
    "truncated": ({"a": A}, bytes(7), "it is truncated: its tensors end at byte"),
    "overlap": ({"a": A, "b": {**A, "data_offsets": [4, 12]}}, bytes(12), "b overlaps a"),
    "same place": ({"a": A, "b": A}, bytes(8), "b overlaps a"),
    "gap": ({"a": A, "b": {**A, "data_offsets": [9, 17]}}, bytes(17), "b leaves a gap after a"),
    "more data": ({"a": A}, bytes(11), "3 bytes follow its last tensor"),
}


@pytest.mark.parametrize("kind", sorted(BROKEN))
def test_a_broken_file_gives_one_clear_error(kind, tmp_path, make_raw):
    *content, message = BROKEN[kind]
    (tmp_path / SINGLE).write_bytes(content[0] if len(content) == 1 else make_raw(*content))
    with pytest.raises(CheckpointUnreadable, match=message) as caught:
        Checkpoint(tmp_path)
    assert SINGLE in str(caught.value)


def test_every_cut_of_a_sound_file_is_noticed(tmp_path, write_tensors, numbers):
    write_tensors(tmp_path / "sound", numbers)
    sound = (tmp_path / "sound").read_bytes()
    for length in range(0, len(sound), 13):
        (tmp_path / "cut").write_bytes(sound[:length])
        with pytest.raises(CheckpointUnreadable):
            parse_header(tmp_path / "cut")


def test_claims_cost_no_memory(tmp_path):
    file = tmp_path / SINGLE
    with file.open("wb") as opened:
        opened.write((90 << 20).to_bytes(8, "little"))
        opened.write(b"{}")
    tracemalloc.start()
    with pytest.raises(CheckpointUnreadable, match="its header claims"):
        Checkpoint(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not readable as JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": 3}}', "places a in 3, which is no name"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "places a in '../b.safetensors', which is no name"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "which is no name"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' appears twice"),
    ],
)
def test_a_broken_index_gives_one_clear_error(index, message, tmp_path):
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointUnreadable, match=message):
        Checkpoint(tmp_path)


def test_an_index_that_disagrees_with_its_files(tmp_path, write_tensors, numbers):
    write_tensors(tmp_path / "a.safetensors", {"full": numbers["full"], "half": numbers["half"]})
    write_tensors(tmp_path / "b.safetensors", {"half": numbers["half"]})
    (tmp_path / INDEX).write_text('{"weight_map": {"gone": "a.safetensors"}}')
    with pytest.raises(CheckpointMismatch, match=r"places gone in a\.safetensors, which has no such tensor"):
        Checkpoint(tmp_path).open(["gone"])
    (tmp_path / INDEX).write_text('{"weight_map": {"full": "a.safetensors", "half": "b.safetensors"}}')
    with pytest.raises(CheckpointMismatch, match=r"a\.safetensors holds half, which .* places in b\.safetensors"):
        Checkpoint(tmp_path).open(["full"])


def test_a_directory_without_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointUnreadable, match=r"neither model.safetensors nor model.safetensors.index.json"):
        Checkpoint(tmp_path)


def test_an_unreadable_file(tmp_path):
    (tmp_path / SINGLE).mkdir()
    with pytest.raises(CheckpointUnreadable, match="cannot be read"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_cut_short_after_its_header_was_read(tmp_path, write_tensors, dtype):
    write_tensors(tmp_path / SINGLE, {"a": torch.zeros(1 << 12), "b": torch.zeros(1 << 12)})
    checkpoint = Checkpoint(tmp_path)
    os.truncate(tmp_path / SINGLE, (tmp_path / SINGLE).stat().st_size - 100)
    checkpoint.read("a", (slice(0, 1 << 12),), torch.empty(1 << 12, dtype=dtype))
    with pytest.raises(CheckpointUnreadable, match=r"was cut short .*: b is beyond its end"):
        checkpoint.read("b", (slice(0, 1 << 12),), torch.empty(1 << 12, dtype=dtype))
    (tmp_path / SINGLE).unlink()
    with pytest.raises(CheckpointUnreadable, match=r"model\.safetensors cannot be read: .*No such file"):
        checkpoint.read("a", (slice(0, 1 << 12),), torch.empty(1 << 12, dtype=dtype))


def test_every_dtype_is_as_wide_as_the_headers_have_it():
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES
