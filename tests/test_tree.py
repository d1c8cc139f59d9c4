"""Leaves, specs and the trees that hold them."""

import copy
import math
import pickle
from collections import OrderedDict
from dataclasses import FrozenInstanceError, replace

import optree
import pytest
import torch
from torch.func import vmap
from torch.utils import _pytree as pytree

import fshard as fs
from fshard.tree import flatten, unflatten
from fshard.tree.checks import outline
from tests.trees import Layer, one_axis

SHARD, TENSOR = fs.Axis("shard", 3, "group 0"), fs.Axis("tensor", 2, "group 1")


def spec(shape, *splits):
    """A spec with dims split over axes one after another."""
    result = fs.Spec(shape)
    for axis, dim in splits:
        result = result.split(axis, dim)
    return result


# What splits a shape; the partition, the padded shape and the local shape that it comes to.
SPLITS = [
    ((5, 3), [], fs.P(), (5, 3), (5, 3)),
    ((5, 3), [(SHARD, 0)], fs.P("shard"), (6, 3), (2, 3)),
    ((6, 3), [(SHARD, 0)], fs.P("shard"), (6, 3), (2, 3)),
    ((5, 4), [(SHARD, 1)], fs.P(None, "shard"), (5, 6), (5, 2)),
    ((1, 4), [(SHARD, 0)], fs.P("shard"), (3, 4), (1, 4)),
    ((0, 4), [(SHARD, 0)], fs.P("shard"), (0, 4), (0, 4)),
    ((5, 4), [(SHARD, 0), (TENSOR, 1)], fs.P("shard", "tensor"), (6, 4), (2, 2)),
    ((7, 4), [(SHARD, 0), (TENSOR, 0)], fs.P(("shard", "tensor")), (12, 4), (2, 4)),
    ((7, 4), [(TENSOR, 0), (SHARD, 0)], fs.P(("tensor", "shard")), (12, 4), (2, 4)),
    ((), [], fs.P(), (), ()),
    # A split number is stored with one dim.
    ((), [(SHARD, 0)], fs.P("shard"), (3,), (1,)),
]


@pytest.mark.parametrize("shape, splits, partition, padded, local", SPLITS)
def test_shapes_of_a_spec(shape, splits, partition, padded, local):
    found = spec(shape, *splits)
    assert (found.partition, found.padded_shape, found.local_shape) == (partition, padded, local)
    assert math.prod(padded) == math.prod(local) * math.prod(axis.size for axis, _ in splits)
    assert found.axes == tuple(axis for axis, _ in splits)
    assert set(found.partition_axes()) == set(found.axes)
    assert [found.dim_of(axis) for axis, _ in splits] == [dim for _, dim in splits]


def test_split_axes_are_major_first():
    found = spec((7, 4), (SHARD, 0), (TENSOR, 0))
    assert found.split_axes(0) == (SHARD, TENSOR)
    assert found.split_axes(1) == ()
    assert found.dim_of(fs.Axis("other", 2, "group 2")) is None


def test_on_an_axis_places_without_splitting():
    found = spec((5, 3), (SHARD, 0)).on(TENSOR).on(TENSOR)
    assert found.axes == (SHARD, TENSOR)
    assert found.partition_axes() == (SHARD,)
    assert found.dim_of(TENSOR) is None


def test_partitions_read_as_they_are_written():
    partition = fs.P("shard", None, ("shard", "tensor"))
    assert repr(partition) == "P('shard', None, ('shard', 'tensor'))"
    assert [partition.names(dim) for dim in range(4)] == [("shard",), (), ("shard", "tensor"), ()]
    assert partition == fs.P("shard", None, ("shard", "tensor")) != fs.P("shard")


@pytest.mark.parametrize("value", [fs.P("shard", ("a", "b")), SHARD, spec((5, 3), (SHARD, 0), (TENSOR, 1))])
def test_descriptions_are_values(value):
    """Equal, hashed and pickled by what they say; specs are keys of caches and travel between processes."""
    again = pickle.loads(pickle.dumps(value))
    assert type(again) is type(value)
    assert again == value == copy.deepcopy(value)
    assert len({value, again}) == 1


def test_specs_differ_by_each_of_their_parts():
    base = spec((5, 3), (SHARD, 0))
    others = [
        replace(base, shape=(5, 4)),
        replace(base, partition=fs.P()),
        replace(base, axes=(replace(SHARD, size=2),)),
        replace(base, frozen=True),
        replace(base, transform=fs.cast(gather=torch.bfloat16)),
    ]
    assert len({base, *others}) == 6


LEAF = fs.Sharded(torch.arange(6.0).view(2, 3), spec((5, 3), (SHARD, 0)))


AS_A_TENSOR = {
    "float": float,
    "index": lambda leaf: [0, 1][leaf],
    "len": len,
    "iteration": list,
    "element": lambda leaf: leaf[0],
    "order": lambda leaf: leaf < 1,
    "sum": lambda leaf: leaf + 1,
    "sum with a tensor": lambda leaf: torch.ones(2) + leaf,
    "negation": lambda leaf: -leaf,
    "a function of torch": torch.relu,
    "shape": lambda leaf: leaf.shape,
}


@pytest.mark.parametrize("use", AS_A_TENSOR)
def test_sharded_is_no_tensor(use):
    """A number would be of this rank's shard alone."""
    with pytest.raises(AttributeError if use == "shape" else TypeError):
        AS_A_TENSOR[use](LEAF)


def test_sharded_is_an_unchanging_value():
    assert not hasattr(LEAF, "__array__")
    assert {LEAF: 1}[LEAF] == 1
    # An object of its own: comparing values would have to communicate, and on one rank alone it would wait.
    assert LEAF == LEAF and fs.Sharded(LEAF.local, LEAF.spec) != LEAF and None not in [LEAF]  # noqa: PT018
    with pytest.raises(FrozenInstanceError):
        LEAF.local = LEAF.local
    assert repr(LEAF) == "Sharded(float32[5, 3], P('shard'), local [2, 3])"
    assert repr(fs.Sharded("*", LEAF.spec)) == "Sharded('*', P('shard'))"


TREE = {"b": [LEAF, None], "a": Layer(torch.ones(2), (LEAF,)), "c": OrderedDict(z=torch.zeros(1), y=torch.ones(1))}


def test_maps_of_both_pytree_libraries_see_the_local_tensor_and_keep_the_spec():
    for tree_map in (fs.tree_map, optree.tree_map, pytree.tree_map_only):
        arguments = (torch.Tensor, torch.neg, TREE) if tree_map is pytree.tree_map_only else (torch.neg, TREE)
        mapped = tree_map(*arguments)
        for before, after in ((TREE["b"][0], mapped["b"][0]), (TREE["a"].bias[0], mapped["a"].bias[0])):
            assert after.local.equal(-before.local)
            assert after.spec is before.spec
        assert type(mapped["a"]) is Layer
        assert list(mapped["c"]) == ["z", "y"]
        assert mapped["b"][1] is None


def test_map_over_several_trees():
    summed = fs.tree_map(lambda a, b: a + b, TREE, fs.tree_map(torch.ones_like, TREE))
    assert summed["b"][0].local.equal(LEAF.local + 1)
    assert summed["b"][0].spec is LEAF.spec


def test_leaves_are_plain_tensors_in_the_order_of_sorted_keys():
    tensors = fs.tree_leaves(TREE)
    assert [tuple(tensor.shape) for tensor in tensors] == [(2,), (2, 3), (2, 3), (1,), (1,)]
    assert all(type(tensor) is torch.Tensor for tensor in tensors)


def test_paths_of_both_pytree_libraries():
    assert optree.tree_paths({"w": LEAF}) == [("w", "local")]
    ((path, _),), _ = pytree.tree_flatten_with_path({"w": LEAF})
    assert pytree.keystr(path) == "['w'].local"


def test_structures_differ_where_specs_do():
    """So that a tree of another layout is no match for this one, in either library."""
    other = fs.Sharded(LEAF.local, replace(LEAF.spec, frozen=True))
    assert optree.tree_structure(LEAF) != optree.tree_structure(other)
    assert pytree.tree_structure(LEAF) != pytree.tree_structure(other)


def test_functions_of_torch_func_take_and_return_sharded_leaves():
    batch = fs.Sharded(torch.stack([LEAF.local, 2 * LEAF.local]), LEAF.spec)
    # Inside vmap the leaf has its own shape again; outside, another than its spec says, which nothing minds here.
    doubled = vmap(lambda leaf: fs.tree_map(lambda t: t * 2, leaf))(batch)
    assert doubled.spec is LEAF.spec
    assert doubled.local.equal(2 * batch.local)
    gradient = torch.func.grad(lambda leaf: (leaf.local**2).sum())(LEAF)
    assert gradient.spec is LEAF.spec
    assert gradient.local.equal(2 * LEAF.local)


def test_flatten_keeps_sharded_leaves_whole_and_none_a_leaf():
    paths, leaves, treedef = flatten(TREE)
    assert paths == ["['a'].weight", "['a'].bias[0]", "['b'][0]", "['b'][1]", "['c']['z']", "['c']['y']"]
    assert leaves[1] is leaves[2] is LEAF
    assert leaves[3] is None
    again = unflatten(treedef, leaves)
    assert again["b"][0] is LEAF
    assert flatten(again).treedef == treedef


@pytest.mark.parametrize("leaf", [LEAF, LEAF.local, None, 1.5])
def test_a_leaf_is_a_tree(leaf):
    paths, leaves, treedef = flatten(leaf)
    assert paths == ["(root)"]
    assert leaves == [leaf]
    assert unflatten(treedef, leaves) is leaf


def test_a_flat_tree_lists_each_spec_and_axis_once():
    two, three = spec((4, 6), (SHARD, 0)), spec((4, 6), (TENSOR, 1), (SHARD, 0))
    leaves = [fs.Sharded(torch.zeros(each.local_shape), each) for each in (two, two, three)]
    flat = flatten({"plain": torch.ones(2), "none": None, "leaves": leaves})
    assert flat.specs == (two, three)
    assert flat.axes == (SHARD, TENSOR)
    assert flat._replace(leaves=[None] * 5).specs == ()


def test_leaves_of_one_layout_share_their_spec():
    strategy = fs.zero3(one_axis())
    full = {name: torch.zeros(shape) for name, shape in {"a": (4, 2), "b": (4, 2), "c": (2, 4)}.items()}
    model = fs.functionalize(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    for tree in (fs.shard(full, strategy), fs.reshard(fs.shard(full, fs.ddp(one_axis())), strategy)):
        assert tree["a"].spec is tree["b"].spec
        assert tree["a"].spec != tree["c"].spec
    params = model.init(strategy, seed=0)
    assert params["0.weight"].spec is params["1.weight"].spec


def test_an_empty_tree_has_no_leaves():
    for tree in ({}, [], (), {"a": [], "b": ()}):
        paths, leaves, treedef = flatten(tree)
        assert paths == leaves == []
        assert unflatten(treedef, []) == tree


def test_outline_says_node_types_alone():
    assert outline(flatten(TREE).treedef) == "dict(Layer(*, tuple(*)), list(*, *), OrderedDict(*, *))"


@pytest.mark.parametrize("verb", (copy.copy, copy.deepcopy, lambda leaf: pickle.loads(pickle.dumps(leaf))))
def test_sharded_leaves_are_copied_and_pickled(verb):
    again = verb(LEAF)
    assert again.spec == LEAF.spec
    assert again.local.equal(LEAF.local)


def test_a_map_takes_none_and_scalars_beside_leaves():
    """Such as gradients of parameters that were not used, and norms."""
    params, grads = {"w": LEAF, "v": torch.ones(2)}, {"w": None, "v": torch.ones(2)}
    kept = fs.tree_map(lambda p, g: p if g is None else p - g, params, grads)
    assert (kept["w"].spec, kept["w"].local is LEAF.local, kept["v"].tolist()) == (LEAF.spec, True, [0.0, 0.0])
    assert fs.tree_map(torch.add, {"w": None}, {"w": LEAF}) == {"w": None}
    halved = fs.tree_map(torch.div, {"w": LEAF}, {"w": torch.tensor(2.0)})["w"]
    assert (halved.spec, halved.local.tolist()) == (LEAF.spec, (LEAF.local / 2).tolist())
    with pytest.raises(
        ValueError, match=r"specs differ\n  \['w'\]: expected Spec\(.*frozen=False.*got Spec\(.*frozen=True"
    ):
        fs.tree_map(torch.add, {"w": LEAF}, {"w": fs.Sharded(LEAF.local, replace(LEAF.spec, frozen=True))})
    with pytest.raises(ValueError, match=r"trees differ in structure\n  \['v'\]: expected nothing, got a leaf"):
        fs.tree_map(torch.add, {"w": LEAF}, {"w": LEAF, "v": LEAF})
