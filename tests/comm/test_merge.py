"""Values of all ranks are merged: in few messages, in any size, on any number of ranks."""

import pytest

import fshard as fs
from fshard import comm
from fshard.testing import spmd
from tests.messages import counted_messages
from tests.ranks import my_rank, on_ranks
from tests.trees import one_axis, two_axes


def union(some, others):
    return sorted({*some, *others})


@on_ranks(1, 2, 3, 4, 5, 6, 7, 8, 9, "4 processes")
def test_every_rank_gets_the_merged_value(world_size):
    axis = fs.axis_of(one_axis())
    assert comm.merge_objects([my_rank()], union, [axis], "test") == list(range(world_size))
    assert comm.merge_objects({"rank": (my_rank(), None)}, min_of_ranks, [axis], "test") == {"rank": [0, None]}


def min_of_ranks(some, others):
    return min(some, others, key=lambda value: value["rank"][0])


@on_ranks(2, 5, "4 processes")
def test_values_of_any_size(world_size):
    """Each rank has one of another size, up to more than a connection takes at once."""
    axis = fs.axis_of(one_axis())
    for size in (0, 500, 2_000_000):
        texts = [rank * "é" + (size + rank) * "x" for rank in range(world_size)]
        assert comm.merge_objects([texts[my_rank()]], union, [axis], "test") == sorted(texts)


@on_ranks(4, 6)
def test_each_row_of_a_mesh_merges_its_own(world_size):
    mesh = two_axes(world_size)
    for name, axis in ((name, fs.axis_of(mesh, name)) for name in mesh.mesh_dim_names):
        ranks = comm.merge_objects([my_rank()], union, [axis], "test")
        assert ranks == comm.all_gather_object(my_rank(), [axis], "test"), name


@pytest.mark.parametrize("ranks", (2, 3, 4, 8))
def test_messages_of_a_rank_grow_with_the_logarithm(ranks):
    with counted_messages() as messages:
        spmd(lambda: comm.merge_objects([my_rank()], union, [fs.axis_of(one_axis())], "test"), ranks)
    assert len(messages) == ranks * (ranks - 1).bit_length()
