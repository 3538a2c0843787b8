"""The block stream: what reads see, where blocks end, when sums are rounded, and going back to a place."""

import torch

from inkcap.layers.blockstream import BlockMix, BlockStream, RunningSum, build_norms

CPU = torch.device("cpu")


class Adds:
    """Stands in for a sublayer's end: adds its rows to the sum, or begins one, and remembers what it was given."""

    def __init__(self):
        self.calls = []

    def settle(self, rows, residual, conv, batch, *, dtype):
        self.calls.append((None if residual is None else residual.dtype, conv, batch))
        return (rows if residual is None else residual.float() + rows).to(dtype), None


class Sees:
    """A read that hands out all sources."""

    def __call__(self, sources, late):
        return tuple(sources)


def ones(value=1.0, dtype=torch.float32):
    return torch.full((2, 3), value, dtype=dtype)


def test_reads_see_finished_blocks_and_then_the_sum():
    stream, out = BlockStream(ones(1)), Adds()
    stream.close_block()
    stream.write(ones(2), out, "conv", "batch")
    assert out.calls == []  # left undone until something reads
    first, sum_ = stream.read(Sees())
    assert torch.equal(first, ones(1))
    assert torch.equal(sum_, ones(2))
    stream.write(ones(3), out, "conv", "batch", ends_layer=True)
    stream.write(ones(4), out, "conv", "batch")
    assert [source[0, 0].item() for source in stream.read(Sees())] == [1, 9]
    stream.close_block()
    stream.write(ones(5), out, "conv", "batch")
    assert [source[0, 0].item() for source in stream.read(Sees())] == [1, 9, 5]
    assert [dtype for dtype, _, _ in out.calls] == [None, torch.float32, torch.float32, None]


class Counts:
    """A read that hands out how many sources are of this layer."""

    def __call__(self, sources, late):
        return late


def test_only_the_sum_is_of_this_layer_unless_a_block_was_closed_in_it():
    stream, out = BlockStream(ones(1)), Adds()
    seen = []
    for opens in (True, False, True):
        seen.append(stream.read(Counts()))
        if opens:
            stream.close_block()
        stream.write(ones(2), out, "conv", "batch")
        seen.append(stream.read(Counts()))
        stream.write(ones(3), out, "conv", "batch", ends_layer=True)
    assert seen == [1, 2, 1, 1, 1, 2]
    place = stream.place()
    stream.close_block()
    stream.resume(place)
    assert stream.read(Counts()) == 1


def test_the_sum_is_rounded_once_a_layer():
    """1 + 2^-8 needs fp32: bf16 has eight bits, and would round it back to 1, twice."""
    stream, out, small = BlockStream(ones(1, torch.bfloat16)), Adds(), ones(2**-8)
    stream.write(small, out, "conv", "batch")
    (sum_,) = stream.read(Sees())
    assert sum_.dtype == torch.float32
    assert torch.equal(sum_, ones(1 + 2**-8))
    stream.write(small, out, "conv", "batch", ends_layer=True)
    (sum_,) = stream.read(Sees())
    assert sum_.dtype == torch.bfloat16
    assert torch.equal(sum_, ones(1 + 2**-7, torch.bfloat16))


def test_a_write_is_settled_in_its_own_batch():
    stream, out = BlockStream(ones()), Adds()
    stream.write(ones(), out, "conv a", "visit a")
    stream.write(ones(), out, "conv b", "visit b")
    stream.current()
    assert [call[1:] for call in out.calls] == [("conv a", "visit a"), ("conv b", "visit b")]


def test_resume_forgets_sums_but_settles_what_was_left_undone():
    stream, out = BlockStream(ones(1)), Adds()
    stream.close_block()
    stream.write(ones(2), out, "conv", "batch", ends_layer=True)
    place = stream.place()
    stream.close_block()
    stream.write(ones(3), out, "conv", "batch")
    stream.resume(place)
    assert len(out.calls) == 2  # the state of the undone convolution is written all the same
    assert [source[0, 0].item() for source in stream.read(Sees())] == [1, 2]
    assert [tensor[0, 0].item() for tensor in stream.tensors()] == [2, 1]
    assert len(place.blocks) == 1


NAMES = ("q_norm", "k_norm", "v_norm")


def norms(*names):
    made = build_norms(names, 8, 1e-6, torch.bfloat16, CPU)
    made.weight.copy_(torch.arange(1, 1 + len(names))[:, None].expand(-1, 8))
    return made


def test_mixtures_have_one_result_a_query_and_published_shapes():
    one = BlockMix("attn_mix", 1, NAMES[:1], norms("q_norm"), 1e-6)
    three = BlockMix("attn_mix", 3, NAMES, norms(*NAMES), 1e-6)
    assert {name: slot.whole for name, slot in one.slots().items()} == {
        "attn_mix.query": (8,),
        "q_norm.weight": (8,),
    }
    assert three.slots()["attn_mix.query"].whole == (3, 8)
    assert list(three.slots()) == ["attn_mix.query", *(f"{name}.weight" for name in NAMES)]
    three.slots()["attn_mix.query"].fill(torch.randn(3, 8))
    sources = [torch.randn(4, 8), torch.randn(4, 8)]
    results = three(sources, 1)
    assert len(results) == 3
    for n, result in enumerate(results):
        one.slots()["attn_mix.query"].fill(three.queries[n])
        one.slots()["q_norm.weight"].fill(torch.full((8,), n + 1.0))
        assert result.tensor().dtype == torch.bfloat16
        torch.testing.assert_close(one(sources, 1)[0].tensor(), result.tensor())


def test_a_layer_without_mixture_reads_the_sum_under_its_norms():
    reads = RunningSum(NAMES, norms(*NAMES))
    inputs = reads([ones(1, torch.bfloat16), torch.full((2, 8), 2.0).bfloat16()], 1)
    assert [x.tensor()[0, 0].item() for x in inputs] == [1, 2, 3]
    assert list(reads.slots()) == [f"{name}.weight" for name in NAMES]
