"""masked for transforms: each leaf by its name has the transform that is meant for it."""

from collections import OrderedDict

import pytest
import torch

import fshard as fs
from fshard.testing import check_adjoint
from tests.ranks import on_ranks
from tests.transforms.laws import SGD, told
from tests.trees import Layer, assert_same_bits, normal, one_axis


@on_ranks(2)
def test_check_adjoint_takes_each_leafs_transform():
    mesh = one_axis()
    check_adjoint(fs.masked(fs.fully_shard(mesh), "0", fs.replicate(mesh)), [(3,), (4,)])


def nested():
    draw = normal()
    layers = [Layer(draw(4, 3), draw(3)), Layer(draw(3, 4), None)]
    return OrderedDict(layers=layers, head=({"w": draw(9)},))


MASKS = {
    "a pattern": ("*.weight", ["layers.0.weight", "layers.1.weight"]),
    "patterns": (("layers.1.*", "head*"), ["layers.1.weight", "head.0.w"]),
    "a function": (lambda name, leaf: "0" in name, ["layers.0.weight", "layers.0.bias", "head.0.w"]),
    "one name": ("head.0.w", ["head.0.w"]),
    "a function of leaves": (lambda name, leaf: leaf.dim() == 2, ["layers.0.weight", "layers.1.weight"]),
    "a function of full shapes": (lambda name, leaf: leaf.shape == (4, 3), ["layers.0.weight"]),
    "everything": ("*", ["layers.0.weight", "layers.0.bias", "layers.1.weight", "head.0.w"]),
    "one letter": ("layers.[!1].?ias", ["layers.0.bias"]),
}


@pytest.mark.parametrize("mask", MASKS)
@on_ranks(2)
def test_leaves_are_meant_by_their_names(mask):
    mask, names = MASKS[mask]
    halves = fs.compose(fs.fully_shard(one_axis()), fs.masked(fs.cast(gather=torch.bfloat16), mask))
    params = fs.shard(nested(), halves)
    full = fs.gather(params)
    leaves = {
        "layers.0.weight": full["layers"][0].weight,
        "layers.0.bias": full["layers"][0].bias,
        "layers.1.weight": full["layers"][1].weight,
        "head.0.w": full["head"][0]["w"],
    }
    assert [name for name, leaf in leaves.items() if leaf.dtype == torch.bfloat16] == names
    assert full["layers"][1].bias is None
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
        assert tree["layers"][0].weight.spec.partition == fs.P("shard")
        assert tree["layers"][0].bias.spec.partition == fs.P()
        assert tree["head"][0]["w"].spec.partition == fs.P()
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


@on_ranks(2)
def test_transforms_of_equal_masks_are_equal_and_leaves_share_their_transforms():
    mesh = one_axis()
    first, second = (fs.compose(fs.masked(fs.cast(gather=torch.bfloat16), "a*"), fs.ddp(mesh)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    params = fs.shard({"a1": torch.ones(3), "a2": torch.ones(3), "b": torch.ones(3)}, first)
    assert params["a1"].spec.transform is params["a2"].spec.transform
    assert params["b"].spec.transform == fs.compose(fs.ddp(mesh))


@on_ranks(3)
def test_reshard_and_model_init_choose_by_full_shapes():
    """A shard's shape is another, and some ranks have none of a leaf's rows."""
    mesh = one_axis()
    wide = fs.masked(
        fs.fully_shard(mesh), lambda name, leaf: leaf.dim() > 1 and leaf.shape[0] == 2, otherwise=fs.replicate(mesh)
    )
    full = {"few": torch.ones(2, 5), "many": torch.ones(7, 5), "bias": torch.ones(2)}
    parts = {"few": fs.P("shard"), "many": fs.P(), "bias": fs.P()}
    moved = fs.reshard(fs.shard(full, fs.zero3(mesh, min_shard_elements=0)), wide)
    assert {name: leaf.spec.partition for name, leaf in moved.items()} == parts
    with torch.device("meta"):
        module = torch.nn.Linear(7, 2)
    params = fs.functionalize(module).init(wide, seed=0)
    assert {name: leaf.spec.partition for name, leaf in params.items()} == {"weight": fs.P("shard"), "bias": fs.P()}
