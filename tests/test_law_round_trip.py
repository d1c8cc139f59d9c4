"""Law 1: unshard(shard(x)) is x bitwise, and so is any reshard."""

import re

import pytest
import torch
from torch.func import grad, jvp

import fshard as fs
from fshard.tree import flatten
from tests.ranks import on_ranks
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


def test_leaves_of_equal_shapes_and_transforms_have_one_spec():
    """Also where a mask in a composition chooses the transform of each."""
    mesh = one_axis()
    full = {"w": [torch.ones(4) for _ in range(3)], "b": [torch.ones(4) for _ in range(3)]}
    for strategy in (
        fs.zero3(mesh),
        fs.masked(fs.fully_shard(mesh), "w.*"),
        fs.compose(fs.masked(fs.cast(gather=torch.bfloat16), "w.*"), fs.fully_shard(mesh)),
        fs.Wrapped(fs.masked(fs.fully_shard(mesh), "w.*", otherwise=fs.replicate(mesh))),
    ):
        params = fs.shard(full, strategy)
        for first, *others in params.values():
            assert all(leaf.spec is first.spec for leaf in others), strategy


@on_ranks(3)
def test_views_round_trip_and_shards_own_their_storage():
    """Strides other than a new tensor's, also of a single element; conjugates and negatives, which torch puts off."""
    base = normal()(6, 8)
    full = {
        **{"t": base.T, "step": base[::2, 1::3], "one": base[2:3, ::8], "item": base[:, 0][5]},
        **{"same": base[0, 0].expand(5, 3), "conjugate": torch.complex(base, -base).conj()},
        "negative": torch.complex(base, -base).conj().imag,
    }
    copies = fs.tree_map(torch.clone, full)
    trees = [fs.shard(full, strategy) for _, strategy in every_strategy()]
    # Else a shard would change with the tensor it was cut from, or keep all of it in memory.
    base.fill_(torch.nan)
    for params in trees:
        assert_same_bits(fs.unshard(params), copies)
        assert_same_bits(fs.gather(params), copies)
        # Kernels may round otherwise on other strides, so every strategy hands a model the same ones.
        assert all(tensor.is_contiguous() for tensor in fs.gather(params).values())
        for local in fs.tree_leaves(params):
            assert local.untyped_storage().nbytes() == local.numel() * local.element_size()


def addresses(tree):
    return {tensor.data_ptr() for tensor in fs.tree_leaves(tree)}


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
        assert not (addresses(moved) & addresses(params)) - {0}
    frozen = fs.shard({"w": full["w"], "v": full["w"]}, fs.ddp(one_axis()), frozen="w")
    moved = fs.reshard(frozen, fs.zero2(one_axis(), min_shard_elements=0))
    assert [leaf.spec.frozen for leaf in moved.values()] == [True, False]


@on_ranks(2)
def test_a_layout_that_changes_in_a_loss_is_refused():
    """Its gradient would be that of the elements that stay on their rank, and its tangent zero."""
    columns = fs.fully_shard(one_axis(), dim=1)
    params = fs.shard({"w": torch.ones(4, 4)}, fs.fully_shard(one_axis()))

    def loss(params):
        return fs.gather(fs.reshard(params, columns))["w"].sum()

    def differentiate_forward(params):
        return jvp(loss, (params,), (params,))

    for differentiated in (fs.value_and_grad(loss), grad(loss), differentiate_forward):
        with pytest.raises(ValueError, match=re.escape(REFUSED)):
            differentiated(params)
    with pytest.raises(ValueError, match=re.escape(REFUSED.replace("differentiated", "mapped by torch.vmap"))):
        torch.vmap(lambda x: loss(fs.tree_map(lambda local: local * x, params)))(torch.ones(3))
    with torch.no_grad():
        assert loss(fs.tree_map(lambda local: local.clone().requires_grad_(), params)) == 16


REFUSED = (
    "reshard: the result takes no gradient and no vmap\n"
    "  ['w']: is differentiated here\n"
    "To fix: reshard outside of the loss and of vmap, or under torch.no_grad()."
)


@on_ranks(1, 3)
def test_leaves_of_a_dtype_without_a_zero():
    """Padding has ones."""
    full = {"w": torch.tensor([0.5, 1.0, 2.0, torch.nan]).to(torch.float8_e8m0fnu), "scalar": torch.tensor(4.0)}
    full["scalar"] = full["scalar"].to(torch.float8_e8m0fnu)
    for _, strategy in every_strategy():
        params = fs.shard(full, strategy)
        assert_same_bits(fs.unshard(params), full)
        assert_same_bits(fs.unshard(fs.reshard(params, fs.ddp(one_axis()))), full)


TX = fs.from_torch(torch.optim.AdamW, lr=0.1)


def train_step(state):
    """One step on a loss without data: every rank has its shards' gradients already."""
    return fs.update(TX, state, fs.tree_map(torch.cos, state.params))


@pytest.mark.rows(2)
@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("start", ("ddp", "zero2 of every leaf", "two dims"))
def test_reshard_of_a_whole_train_state(start):
    params = fs.shard(assorted(), STRATEGIES[start](meshes()))
    state = train_step(fs.TrainState.create(params, TX, buffers={"mean": normal()(3)}, key=torch.arange(2)))
    full, next_full = fs.unshard(state), fs.unshard(train_step(state))
    for _, strategy in every_strategy():
        moved = fs.reshard(state, strategy)
        assert_same_bits(fs.unshard(moved), full)
        assert_same_bits(fs.unshard(train_step(moved)), next_full)
        assert specs(moved.opt_state.slots["exp_avg"]) == specs(moved.params)
        assert specs(moved.params) == specs(fs.shard(assorted(), strategy))


def specs(params):
    return [leaf.spec for leaf in flatten(params).leaves if leaf is not None]


@on_ranks(2)
def test_a_checkpoint_is_read_into_memory_with_gaps(tmp_path):
    """A chunk holds some columns of a matrix, whose rows lie apart in the memory of the whole one."""
    full = {"w": normal()(6, 8)}
    fs.checkpoint.save(tmp_path, fs.shard(full, fs.fully_shard(one_axis(), dim=1)), 1)
    assert_same_bits(fs.checkpoint.restore(tmp_path, fs.tree_map(torch.zeros_like, full)), full)
