"""Law 1: unshard(shard(x)) is x bitwise, and so is any reshard; laws 1, 2 and 4 of leaves that have roles on axes."""

import pytest
import torch

import fshard as fs
from fshard.testing import check_adjoint
from fshard.tree import flatten
from tests.ranks import on_ranks
from tests.test_law_purity import unchanged
from tests.trees import (
    CASTS,
    STRATEGIES,
    TREES,
    WORLD_SIZES,
    assert_same_bits,
    assorted,
    every_strategy,
    exotic_dtypes,
    meshes,
    normal,
    one_axis,
)

# A cast stores leaves as it is given them.
ALL_STRATEGIES = STRATEGIES | {"cast zero2": CASTS["cast zero2"]}
ALL_TREES = TREES | {"exotic_dtypes": exotic_dtypes}


@pytest.mark.rows(6)
@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_unshard_undoes_shard(strategy):
    for tree in ALL_TREES.values():
        full = tree()
        assert_same_bits(fs.unshard(fs.shard(full, ALL_STRATEGIES[strategy](meshes()))), full)


@on_ranks(3)
def test_views_round_trip_and_shards_own_their_storage():
    """Strides other than a new tensor's, also of a single element; conjugates and negatives, which torch puts off."""
    base = normal()(6, 8)
    full = {
        **{"t": base.T, "step": base[::2, 1::3], "one": base[2:3, ::8], "item": base[:, 0][5]},
        **{"same": base[0, 0].expand(5, 3), "conjugate": torch.complex(base, -base).conj()},
        "negative": torch.complex(base, -base).conj().imag,
    }
    needed = fs.tree_map(torch.clone, full)
    trees = [fs.shard(full, strategy) for _, strategy in every_strategy()]
    # Else a shard would change with the tensor it was cut from, or keep all of it in memory.
    base.fill_(torch.nan)
    for params in trees:
        assert_same_bits(fs.unshard(params), needed)
        assert_same_bits(fs.gather(params), needed)
        # Kernels may round otherwise on other strides, so every strategy hands a model the same ones.
        assert all(tensor.is_contiguous() for tensor in fs.gather(params).values())
        for local in fs.tree_leaves(params):
            assert local.untyped_storage().nbytes() == local.numel() * local.element_size()


@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("start", STRATEGIES)
def test_reshard_between_every_two_layouts(start):
    full = assorted()
    params = fs.shard(full, STRATEGIES[start](meshes()))
    for _, strategy in every_strategy():
        moved = fs.reshard(params, strategy)
        # A shard of the result is the shard that `shard` itself would cut, padding included.
        assert_same_bits(fs.tree_leaves(moved), fs.tree_leaves(fs.shard(full, strategy)))
        assert_same_bits(fs.unshard(moved), full)
        assert not {t.data_ptr() for t in fs.tree_leaves(moved)} & {t.data_ptr() for t in fs.tree_leaves(params)} - {0}
    frozen = fs.shard({"w": full["w"], "v": full["w"]}, fs.ddp(one_axis()), frozen="w")
    moved = fs.reshard(frozen, fs.zero2(one_axis(), min_shard_elements=0))
    assert [leaf.spec.frozen for leaf in moved.values()] == [True, False]


TX = fs.from_torch(torch.optim.AdamW, lr=0.1)


def train_step(state):
    """One step on a loss without data: every rank has its shards' gradients already."""
    return fs.update(TX, state, fs.tree_map(torch.cos, state.params))


@pytest.mark.rows(2)
@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("start", ("ddp", "zero2 of every leaf", "two dims"))
def test_reshard_of_a_whole_train_state(start):
    params = fs.shard(assorted(), STRATEGIES[start](meshes()))
    buffers, key = {"mean": normal()(3)}, torch.arange(2)
    state = train_step(fs.TrainState.create(params, TX, buffers=buffers, key=key))
    full, next_full = fs.unshard(state), fs.unshard(train_step(state))
    for _, strategy in every_strategy():
        moved = fs.reshard(state, strategy)
        assert_same_bits(fs.unshard(moved), full)
        assert_same_bits(fs.unshard(train_step(moved)), next_full)
        assert specs(moved.opt_state.slots["exp_avg"]) == specs(moved.params)
        assert {spec.transform for spec in specs(moved.params)} == {strategy}


def specs(params):
    return [leaf.spec for leaf in flatten(params).leaves if leaf is not None]


SHAPES = ((24, 8), (48, 5), (24,))
ROLES = {
    "split_dim": lambda mesh: fs.compose(fs.fully_shard(mesh["shard"]), fs.split_dim(mesh["other"], dim=0)),
    "own_dim": lambda mesh: fs.compose(fs.fully_shard(mesh["shard"]), fs.own_dim(mesh["other"])),
    "own_dim of a cast": lambda mesh: fs.zero3(
        mesh,
        layout=fs.compose(fs.cast(scatter=torch.float64), fs.fully_shard(mesh["shard"]), fs.own_dim(mesh["other"])),
    ),
    "own_dim of ddp": lambda mesh: fs.compose(fs.replicate(mesh["shard"]), fs.own_dim(mesh["other"])),
    "both data axes": lambda mesh: fs.zero3(mesh, axis=("shard", "other"), min_shard_elements=0),
}
SIZES = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 3: [(1, 3)], 4: [(2, 2)], 8: [(2, 4)]}


def loss_of(role, other):
    """A loss of pieces, which ranks that have the same batch add up."""

    def loss_fn(params, x):
        loss = sum((leaf * x).sin().sum() for leaf in fs.tree_leaves(fs.gather(params)))
        return fs.psum_invariant(loss, other) if role == "split_dim" else loss

    return loss_fn


@on_ranks(*SIZES)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.rows(3)
def test_roles_keep_the_laws(role, world_size):
    """Values round trip, scatter is gather's transpose, calls change nothing and repeat, and jit has eager's bits."""
    for shard, other in SIZES[world_size]:
        mesh = fs.init_mesh({"shard": shard, "other": other}, device="cpu")
        transform = ROLES[role](mesh)
        full = {f"leaf {i}": normal(i)(*shape) for i, shape in enumerate(SHAPES)}
        shard, other = fs.axis_of(mesh["shard"]), fs.axis_of(mesh["other"])
        params = fs.shard(full, transform)
        assert_same_bits(fs.unshard(params), full)
        for make in ROLES.values():
            moved = fs.reshard(fs.reshard(params, make(mesh)), transform)
            assert_same_bits(fs.tree_leaves(moved), fs.tree_leaves(params))
        check_adjoint(transform, SHAPES)
        place = fs.axis_index(shard) if role == "split_dim" else mesh.get_rank()
        x, step = normal(7 + place)(), fs.value_and_grad(loss_of(role, other))
        with unchanged(params):
            first = fs.tree_leaves(step(params, x))
            for again in (step, fs.jit(step)):
                assert_same_bits(fs.tree_leaves(again(params, x)), first)
