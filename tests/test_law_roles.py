"""Laws 1, 2 and 4 of leaves that have roles on several axes: gathered, summed, owned, independent; and jit's bits."""

import pytest
import torch

import fshard as fs
from fshard.testing import check_adjoint
from tests.ranks import on_ranks
from tests.trees import as_bytes, assert_same_bits, normal

SHAPES = ((24, 8), (48, 5), (24,))
ROLES = {
    "split_dim": lambda mesh: fs.compose(fs.fully_shard(mesh["shard"]), fs.split_dim(mesh["other"], dim=0)),
    "own_dim": lambda mesh: fs.compose(fs.fully_shard(mesh["shard"]), fs.own_dim(mesh["other"])),
    "own_dim of a cast": lambda mesh: fs.zero3(
        mesh,
        layout=fs.compose(fs.cast(scatter=torch.float64), fs.fully_shard(mesh["shard"]), fs.own_dim(mesh["other"])),
    ),
    "own_dim of ddp": lambda mesh: fs.compose(fs.replicate(mesh["shard"]), fs.own_dim(mesh["other"])),
    "independent": lambda mesh: fs.compose(fs.zero3(mesh, min_shard_elements=0), fs.independent(mesh["other"])),
    "independent of ddp": lambda mesh: fs.compose(fs.ddp(mesh), fs.independent(mesh["other"])),
    "both data axes": lambda mesh: fs.zero3(mesh, axis=("shard", "other"), min_shard_elements=0),
}
SIZES = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 3: [(1, 3)], 4: [(2, 2)], 8: [(2, 4)]}


def grids(world_size):
    for shard, other in SIZES[world_size if isinstance(world_size, int) else 2]:
        yield fs.init_mesh({"shard": shard, "other": other}, device="cpu")


def initial():
    return {f"leaf {i}": normal(i)(*shape) for i, shape in enumerate(SHAPES)}


def loss_of(role, other):
    """A loss of pieces, which ranks that have the same batch add up."""

    def loss_fn(params, x):
        loss = sum((leaf * x).sin().sum() for leaf in fs.tree_leaves(fs.gather(params)))
        return fs.psum_invariant(loss, other) if role == "split_dim" else loss

    return loss_fn


@on_ranks(*SIZES, "2 processes")
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.rows(4)
def test_roles_keep_the_laws(role, world_size):
    """Values round trip, scatter is gather's transpose, calls change nothing and repeat, and jit has eager's bits."""
    for mesh in grids(world_size):
        transform, full = ROLES[role](mesh), initial()
        shard, other = fs.axis_of(mesh["shard"]), fs.axis_of(mesh["other"])
        params = fs.shard(full, transform)
        if "independent" in role:
            stacks = fs.tree_map(lambda x: x.expand(other.size, *x.shape), full)  # noqa: B023
            assert_same_bits(fs.unshard(params, stack=True), stacks)
        else:
            assert_same_bits(fs.unshard(params), full)
            for make in ROLES.values():
                if other not in fs.shard(full, make(mesh))["leaf 0"].spec.independent:
                    moved = fs.reshard(fs.reshard(params, make(mesh)), transform)
                    assert_same_bits(fs.tree_leaves(moved), fs.tree_leaves(params))
            check_adjoint(transform, SHAPES)
        before = [as_bytes(leaf) for leaf in fs.tree_leaves(params)]
        place = fs.axis_index(shard) if role == "split_dim" else mesh.get_rank()
        x, step = normal(7 + place)(), fs.value_and_grad(loss_of(role, other))
        first = fs.tree_leaves(step(params, x))
        for again in (step, fs.jit(step)):
            assert_same_bits(fs.tree_leaves(again(params, x)), first)
        assert all(map(torch.equal, map(as_bytes, fs.tree_leaves(params)), before))
