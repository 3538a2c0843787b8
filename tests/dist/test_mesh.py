"""parallel/mesh.py: every rank finds its place, and groups agree."""

import pytest

from inkcap.base.errors import ConfigInvalid
from inkcap.parallel.mesh import AXES, Mesh


def test_ranks_of_one_tp_group_are_neighbours():
    assert Mesh(rank=5, tp=4, dp=2).group("tp") == (4, 5, 6, 7)
    assert Mesh(rank=5, tp=4, dp=2).group("dp") == (1, 5)
    assert Mesh(rank=5, tp=4, dp=2).place("tp") == 1


def test_groups_partition_the_mesh_along_every_axis():
    meshes = [Mesh(rank=rank, tp=2, ep=3, pp=2, dp=2) for rank in range(24)]
    for axis in AXES:
        groups = {mesh.group(axis) for mesh in meshes}
        assert sorted(rank for group in groups for rank in group) == list(range(24))
        for mesh in meshes:
            assert mesh.group(axis)[mesh.place(axis)] == mesh.rank
            assert all(meshes[other].group(axis) == mesh.group(axis) for other in mesh.group(axis))


def test_a_mesh_of_one_has_groups_of_one():
    assert all(Mesh().group(axis) == (0,) for axis in AXES)


def test_impossible_meshes_are_refused():
    with pytest.raises(ConfigInvalid, match=r"parallel\.tp is 0"):
        Mesh(tp=0)
    with pytest.raises(ConfigInvalid, match="rank is 4; a mesh of 4 has ranks 0 to 3"):
        Mesh(rank=4, tp=4)
