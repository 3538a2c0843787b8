"""Boxes for letters: empty at first, one for each owner."""

import torch

from inkcap.ops.letters import box_of


def test_owners_have_boxes_of_their_own():
    one, other = torch.zeros(4), torch.zeros(4)
    box = box_of(one, 6, torch.int64, -7)
    assert box.tolist() == [-7] * 6
    assert box_of(one, 6, torch.int64, -7) is box
    for another in (
        box_of(other, 6, torch.int64, -7),
        box_of(one, 8, torch.int64, -7),
        box_of(one, 6, torch.int32, -7),
    ):
        assert another.data_ptr() != box.data_ptr()
