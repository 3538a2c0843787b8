"""parallel/comm.py over gloo: two processes, and a group of one."""

import pytest
import torch

from inkcap.parallel.comm import Comm

X = torch.arange(8).view(4, 2)  # what rank 0 holds; rank 1 holds twice that


@pytest.fixture(scope="module")
def two(run_ranks):
    """What each of two ranks got from every verb."""
    return run_ranks("rank_comm.py", 2)


def test_two_ranks_over_gloo(two):
    zero, one = two
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x0 = X.to(dtype)
        x1 = 2 * x0
        for rank, got in enumerate((zero[str(dtype)], one[str(dtype)])):
            assert got["all_reduce"] == (x0 + x1).tolist()
            assert got["in_place"]
            assert got["all_max"] == x1.tolist()
            assert got["reduce_scatter"] == [(x0 + x1).chunk(2, dim)[rank].tolist() for dim in (0, 1)]
            assert got["all_gather"] == [torch.cat([x0, x1], dim).tolist() for dim in (0, 1)]
            assert got["all_gather_strided"] == torch.cat([x0.t(), x1.t()]).tolist()
        assert zero[str(dtype)]["all_to_all"] == torch.cat([x0[:1], x1[:2]]).tolist()
        assert one[str(dtype)]["all_to_all"] == torch.cat([x0[1:], x1[2:]]).tolist()
    assert one["received"] == [[1.0], [2.0]]


def test_sums_are_the_same_bits_on_every_rank_and_every_time(two):
    assert all(result["same_bits_again"] and result["slab_is_part_of_sum"] for result in two)
    assert two[0]["sum_bits"] == two[1]["sum_bits"]
    assert two[0]["ordered"]
    assert two[1]["ordered"]


def test_ordered_sums_go_from_rank_to_rank(monkeypatch):
    held = torch.randn(3, 1000) * torch.tensor([1e4, 1.0, 1e2])[:, None]
    monkeypatch.setattr(Comm, "all_gather", lambda self, x: held)
    x, comm = held[1].clone(), Comm(rank=1, size=3, group=object(), ordered=True)
    assert comm.all_reduce(x) is x
    assert torch.equal(x, (held[0] + held[1]) + held[2])
    assert not torch.equal(x, (held[1] + held[2]) + held[0])


def test_there_is_no_global_group(two):
    assert not any(result["global_group"] for result in two)


def test_a_group_of_one_hands_back_what_it_got():
    comm = Comm.alone()
    x = X.clone()
    assert comm.all_reduce(x) is x
    assert comm.all_max(x) is x
    assert comm.reduce_scatter(x) is x
    assert comm.all_gather(x, 1) is x
    assert comm.all_to_all(x, [4], [4]) is x
    comm.close()
    with pytest.raises(AssertionError, match="nobody"):
        comm.send(x, to=0)


def test_a_group_and_its_size_go_together():
    with pytest.raises(AssertionError, match="process group"):
        Comm(rank=0, size=2)
