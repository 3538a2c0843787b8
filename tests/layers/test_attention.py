"""Heads over ranks, and attention of a rank's heads: joined, they are what one rank computes."""

import pytest
import torch
from ranks import on_ranks
from steps import World

from inkcap.base.errors import ConfigInvalid
from inkcap.cache.state import LayerState, Plane
from inkcap.layers.attention import Heads, RelBias, attend, power_for
from inkcap.ops.values import Scores
from inkcap.parallel.share import Share

CPU = torch.device("cpu")
QUERIES, KV, SIZE, STATES, EXTENT, TOKENS = 8, 2, 4, 3, 5, 7


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_heads_of_all_ranks_are_those_of_one(size, gated):
    """On four ranks each kv head is held by two."""
    torch.manual_seed(6)
    q, r = torch.randn(TOKENS, QUERIES, SIZE), torch.randn(TOKENS, QUERIES, STATES)
    k, v = torch.randn(TOKENS, KV, SIZE), torch.randn(TOKENS, KV, SIZE)
    sinks, gate, proj = torch.randn(TOKENS, QUERIES), torch.randn(TOKENS, QUERIES, SIZE), torch.randn(STATES, EXTENT)

    def work(comm):
        heads, bias = Heads.on(comm, QUERIES, KV, SIZE), RelBias(STATES, EXTENT, torch.float32, CPU)
        bias.slots()["proj"].fill(proj)
        kv, mine = heads.kv, slice(heads.query.start, heads.query.start + heads.query.count)
        state = LayerState("full", 0, tuple(Plane(name, (kv.count, SIZE), "float32") for name in "kv"), None, 8, True)
        batch = World([state], length=16).batch([(0, 0, [0] * TOKENS)]).at(0)
        view = batch.view("full")
        for plane, whole in zip(view.planes, (k, v), strict=True):
            plane[view.slots // 8, view.slots % 8] = whole[:, kv.start : kv.start + kv.count]
        extra = (sinks[:, mine], gate[:, mine].flatten(1)) if gated else (None, None)
        scores = Scores(0.5, None, bias.proj, None)
        held = (whole[:, kv.start : kv.start + kv.count] for whole in (k, v))
        return attend(q[:, mine], *held, r[:, mine].flatten(1), scores, "full", batch, *extra)

    got = torch.cat(on_ranks(size, work), 1).unflatten(1, (QUERIES, SIZE))
    for p in range(TOKENS):
        for h in range(QUERIES):
            logits = k[: p + 1, h // 4] @ q[p, h] * 0.5
            near = torch.arange(max(0, p - EXTENT + 1), p + 1)
            logits[near] += r[p, h] @ proj[:, p - near]
            weights = torch.cat([logits, sinks[p, h : h + 1]]).softmax(0)[:-1] if gated else logits.softmax(0)
            want = weights @ v[: p + 1, h // 4] * (gate[p, h].sigmoid() if gated else 1.0)
            torch.testing.assert_close(got[p, h], want, rtol=1e-4, atol=1e-5)


def test_powers_for_bounds():
    """The bound, and what rounding may add, fits; with half the power it would not."""
    bounds = torch.tensor([1e-3, 0.999, 1.0, 11.3, 22.6, 448 / 1.02, 448.0, 9e4])
    powers = power_for(bounds)
    assert ((bounds * 1.02 / powers <= 448 * (1 + 1e-6)) & (bounds * 1.02 / powers > 224)).all()
    assert torch.equal(torch.frexp(powers).mantissa, torch.full_like(powers, 0.5))


def test_shares_of_heads():
    place = [Heads.on(type("Place", (), {"rank": rank, "size": 4}), 8, 2, 16) for rank in range(4)]
    assert [heads.query for heads in place] == [Share(2 * rank, 2, 8) for rank in range(4)]
    assert [heads.kv for heads in place] == [Share(0, 1, 2), Share(0, 1, 2), Share(1, 1, 2), Share(1, 1, 2)]


@pytest.mark.parametrize(("queries", "kv", "what"), [(6, 2, "query heads is 6"), (8, 3, "kv heads is 3")])
def test_ranks_that_cannot_share_the_heads(queries, kv, what):
    with pytest.raises(ConfigInvalid, match=f"number of {what}, which 4 ranks"):
        on_ranks(4, lambda comm: Heads.on(comm, queries, kv, 16))


def test_slots_have_the_published_shape():
    (slot,) = RelBias(STATES, EXTENT, torch.bfloat16, CPU).slots().values()
    assert (slot.whole, slot.dim) == ((STATES, EXTENT), None)
