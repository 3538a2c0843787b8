"""Shares of a whole, and slots that take a rank's part of a checkpoint's tensor."""

import pytest
import torch

from inkcap.base.errors import ConfigInvalid
from inkcap.parallel.share import Share, split, split_or_repeat
from inkcap.parallel.slot import Slot


class Place:
    """As much of a Comm as a share needs."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def shares(function, whole, size):
    return [function(whole, Place(rank, size), "number of heads") for rank in range(size)]


def test_even_shares_cover_the_whole_once():
    assert shares(split, 12, 3) == [Share(0, 4, 12), Share(4, 4, 12), Share(8, 4, 12)]
    assert shares(split_or_repeat, 12, 3) == shares(split, 12, 3)


def test_units_are_repeated_on_neighbouring_ranks():
    assert [share.start for share in shares(split_or_repeat, 2, 8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {share.count for share in shares(split_or_repeat, 2, 8)} == {1}


@pytest.mark.parametrize(
    ("function", "whole", "size"), [(split, 10, 4), (split_or_repeat, 6, 4), (split_or_repeat, 3, 4)]
)
def test_uneven_shares_are_refused_with_both_numbers(function, whole, size):
    with pytest.raises(ConfigInvalid, match=f"number of heads is {whole}, which {size} ranks"):
        shares(function, whole, size)


def test_a_share_counts_parts_of_its_units():
    assert Share(2, 3, 8).times(16) == Share(32, 48, 128)


def test_a_slot_takes_its_part_and_converts_it():
    target = torch.empty(3, 2, dtype=torch.bfloat16)
    slot = Slot(target.t(), (2, 9), dim=1, start=3)
    whole = torch.arange(18.0).view(2, 9)
    slot.fill(whole)
    assert (slot.start, slot.stop) == (3, 6)
    assert torch.equal(target.float(), whole[:, 3:6].t())
    with pytest.raises(AssertionError, match=r"slot for \(2, 9\) got \(9, 2\)"):
        slot.fill(whole.t())
