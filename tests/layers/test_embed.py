"""The head: scaled logits of the words that exist, whole on every rank."""

import pytest
import torch
from ranks import on_ranks

from inkcap.base.errors import ConfigInvalid
from inkcap.layers.embed import Head, NormedEmbedding

CPU = torch.device("cpu")


@pytest.mark.parametrize("existing", [12, 9, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_of_existing_words(existing, size):
    torch.manual_seed(0)
    whole, hidden = torch.randn(12, 5), torch.randn(3, 5)

    def work(comm):
        head = Head(12, existing, 5, 0.25, comm, torch.float32, CPU)
        head.slots()["weight"].fill(whole)
        return head(hidden)

    for got in on_ranks(size, work):
        assert got.shape == (3, existing)
        torch.testing.assert_close(got, 0.25 * hidden @ whole[:existing].t())


def test_ranks_that_cannot_share_the_words():
    with pytest.raises(ConfigInvalid, match="vocabulary is 10, which 4 ranks"):
        on_ranks(4, lambda comm: Head(10, 10, 2, 1.0, comm, torch.float32, CPU))


def test_embedding_slots_have_the_published_shapes():
    embed = NormedEmbedding(7, 3, 1e-6, torch.bfloat16, CPU)
    slots = embed.slots()
    assert {name: slot.whole for name, slot in slots.items()} == {"weight": (7, 3), "norm.weight": (3,)}
    for slot in slots.values():
        slot.fill(torch.ones(slot.whole))
    got = embed(torch.tensor([0, 6]))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.ones(2, 3).bfloat16())
