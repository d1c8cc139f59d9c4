"""masked for transforms: each leaf by its name has the transform that is meant for it."""

from collections import OrderedDict

import torch

import fshard as fs
from fshard.testing import check_adjoint
from tests.ranks import on_ranks
from tests.transforms.laws import SGD, told
from tests.trees import Layer, assert_same_bits, normal, one_axis


def nested():
    draw = normal()
    layers = [Layer(draw(4, 3), draw(3)), Layer(draw(3, 4), None)]
    return OrderedDict(layers=layers, head=({"w": draw(9)},))


MASKS = [
    ("*.weight", ["layers.0.weight", "layers.1.weight"]),
    (("layers.1.*", "head*"), ["layers.1.weight", "head.0.w"]),
    (["layers.[!1].?ias"], ["layers.0.bias"]),
    (lambda name, leaf: "0" in name, ["layers.0.weight", "layers.0.bias", "head.0.w"]),
    (lambda name, leaf: leaf.shape == (4, 3), ["layers.0.weight"]),
]


@on_ranks(2)
def test_leaves_are_chosen_by_their_names():
    for mask, names in MASKS:
        halves = fs.compose(fs.fully_shard(one_axis()), fs.masked(fs.cast(gather=torch.bfloat16), mask))
        params = fs.shard(nested(), halves)
        full = fs.gather(params)
        first, second = full["layers"]
        leaves = dict(zip(("layers.0.weight", "layers.0.bias", "layers.1.weight"), (*first, second.weight)))
        leaves["head.0.w"] = full["head"][0]["w"]
        assert [name for name, leaf in leaves.items() if leaf.dtype == torch.bfloat16] == names
        assert second.bias is None
        assert_same_bits(fs.unshard(params), nested())


@on_ranks(2)
def test_a_train_state_is_resharded_by_the_names_of_its_parameters():
    mesh = one_axis()
    by_name = fs.masked(fs.fully_shard(mesh), "*.weight", otherwise=fs.replicate(mesh))
    state = fs.TrainState.create(fs.shard(nested(), fs.ddp(mesh)), SGD)
    _, grads = fs.value_and_grad(lambda p: sum((x**2).sum() for x in fs.tree_leaves(fs.gather(p))))(state.params)
    state = fs.update(SGD, state, grads)
    moved = fs.reshard(state, by_name)
    for tree in (moved.params, moved.opt_state.slots["momentum_buffer"]):
        leaves = *tree["layers"][0], tree["head"][0]["w"]
        assert [leaf.spec.partition for leaf in leaves] == [fs.P("shard"), fs.P(), fs.P()]
    assert_same_bits(fs.unshard(moved), fs.unshard(state))


@on_ranks(2)
def test_bytes_are_those_of_each_leafs_transform():
    """Of 8 * 8 * 8 bytes of a matrix that is split, and 8 * 8 of a vector that is whole."""
    full = {"weight": torch.ones(8, 8, dtype=torch.float64), "bias": torch.ones(8, dtype=torch.float64)}
    transform = fs.masked(fs.fully_shard(one_axis()), "weight", otherwise=fs.replicate(one_axis()))
    params = fs.shard(full, transform)
    with fs.comm.record() as record:
        fs.gather(params)
        fs.scatter_grads(full, like=params)
    assert sorted(told(record)) == [
        ("all_gather", "shard", "gather", 1, 512),
        ("all_reduce", "shard", "scatter", 1, 64),
        ("reduce_scatter", "shard", "scatter", 1, 512),
    ]
    check_adjoint(fs.masked(fs.fully_shard(one_axis()), "0", fs.replicate(one_axis())), [(3,), (4,)])


@on_ranks(3)
def test_leaves_of_equal_masks_share_a_transform_that_is_chosen_by_full_shapes():
    """A shard's shape is another, and some ranks have none of a leaf's rows."""
    mesh = one_axis()
    first, second = (fs.compose(fs.masked(fs.cast(gather=torch.bfloat16), "a*"), fs.ddp(mesh)) for _ in range(2))
    assert (first, hash(first)) == (second, hash(second))
    params = fs.shard({"a1": torch.ones(3), "a2": torch.ones(3), "b": torch.ones(3)}, first)
    assert params["a1"].spec.transform == params["a2"].spec.transform
    assert params["b"].spec.transform == fs.compose(fs.ddp(mesh))
    wide = fs.masked(fs.fully_shard(mesh), lambda _, leaf: leaf.shape[:1] == (2,), otherwise=fs.replicate(mesh))
    full = fs.shard({"few": torch.ones(2, 5), "many": torch.ones(7, 5)}, fs.zero3(mesh, min_shard_elements=0))
    drawn = fs.functionalize(torch.nn.Linear(7, 2, bias=False, device="meta")).init(wide, seed=0)
    moved = fs.reshard(full, wide) | drawn
    assert {name: leaf.spec.partition for name, leaf in moved.items()} == {
        **{"few": fs.P("shard"), "many": fs.P(), "weight": fs.P("shard")}
    }
