"""init_mesh, and the axes of its meshes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard as fs
from fshard.testing import spmd
from tests.ranks import on_ranks


@pytest.mark.parametrize(
    "shape, ranks, sizes",
    [
        ({"shard": -1}, 1, (1,)),
        ({"shard": -1}, 6, (6,)),
        ({"shard": 6}, 6, (6,)),
        ({"replicate": 2, "shard": -1}, 6, (2, 3)),
        ({"replicate": -1, "shard": 2}, 6, (3, 2)),
        ({"a": 1, "b": 2, "c": -1}, 4, (1, 2, 2)),
        ({"a": 6, "b": -1}, 6, (6, 1)),
    ],
)
def test_sizes(shape, ranks, sizes):
    def program():
        mesh = fs.init_mesh(shape, device="cpu")
        assert isinstance(mesh, DeviceMesh)
        assert mesh.mesh_dim_names == tuple(shape)
        assert [fs.axis_of(mesh, name).size for name in shape] == list(sizes)
        return tuple(mesh.shape)

    assert spmd(program, ranks) == [sizes] * ranks


def test_axes_group_the_ranks_of_a_row():
    """The outermost axis first: ranks 0, 1, 2 share the inner axis and 0, 3 the outer one."""

    def program():
        mesh = fs.init_mesh({"outer": 2, "inner": 3}, device="cpu")
        rank = torch.tensor([dist.get_rank()])
        rows = (fs.comm.all_gather([rank], fs.axis_of(mesh, name), "test")[0] for name in ("outer", "inner"))
        return tuple(row.flatten().tolist() for row in rows)

    assert spmd(program, 6) == [([r % 3, r % 3 + 3], [r // 3 * 3 + k for k in range(3)]) for r in range(6)]


@on_ranks(4)
def test_axis_of_a_whole_mesh_of_a_part_and_of_an_axis():
    line, grid = fs.init_mesh({"shard": -1}, device="cpu"), fs.init_mesh({"a": 2, "b": 2}, device="cpu")
    axis = fs.axis_of(line)
    assert (axis.name, axis.size) == ("shard", 4)
    assert fs.axis_of(line, "shard") == axis == fs.axis_of(axis)
    assert fs.axis_of(grid["b"]) == fs.axis_of(grid, "b")
    assert len({axis, fs.axis_of(grid, "a"), fs.axis_of(grid, "b")}) == 3


def test_axes_agree_between_ranks_and_with_torchs_own_meshes(workers):
    """An axis holds no rank: specs made of it are equal on all ranks that share it."""

    def program():
        ours, theirs = (
            fs.init_mesh({"shard": -1}, device="cpu"),
            init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)),
        )
        return fs.axis_of(ours), fs.axis_of(theirs)

    for world in (2, workers(2)):
        first, second = spmd(program, world)
        assert first == second
        assert [axis.size for axis in first] == [2, 2]


@pytest.mark.parametrize(
    "shape, ranks, message",
    [
        ({"shard": 4}, 2, r"init_mesh: expected the number of ranks to be 4 for \{'shard': 4\}, got 2"),
        (
            {"a": 3, "b": -1},
            4,
            r"init_mesh: expected the number of ranks to be a multiple of 3 for \{'a': 3, 'b': -1\}, got 4",
        ),
        ({"a": -1, "b": -1}, 2, "expected shape to be positive whole sizes, one of which may be -1"),
        ({"a": 0}, 2, "expected shape to be positive whole sizes"),
        ({}, 2, "expected shape to be positive whole sizes"),
    ],
)
def test_shapes_that_do_not_hold_the_ranks(shape, ranks, message):
    def program():
        with pytest.raises(ValueError, match=message):
            fs.init_mesh(shape, device="cpu")
        # Nothing is left half made.
        fs.init_mesh({"shard": -1}, device="cpu")

    spmd(program, ranks)
