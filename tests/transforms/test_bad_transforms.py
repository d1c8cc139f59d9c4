"""Transforms that are refused: bad arguments, compositions of two for one axis, and masks that match no leaf."""

from operator import attrgetter

import pytest
import torch
from torch import nn

import fshard as fs
from tests.bad_input import Row, assert_all_refused
from tests.ranks import on_ranks
from tests.test_bad_setup import setup
from tests.transforms.laws import SGD
from tests.trees import one_axis

MESH, GRID, ZERO2 = map(attrgetter, ("mesh", "grid", "zero2"))
BFLOAT16 = fs.cast(gather=torch.bfloat16)

ONE_AXIS = "mesh: expected one axis, got ('replicate', 'shard'); name one, as in mesh['shard']"
SMALLEST = "fully_shard: expected min_shard_elements to be 0 or more, got -1"
TWICE = "compose: expected one transform for each axis, got two for the axes {}; drop one of the two"
EARLY = "compose: expected split_dim and own_dim behind what gathers over ['{1}'], got ['{0}'] before it"

LACKS = "mesh: expected axis to be one of ('shard',), got {!r}; name it in init_mesh"
NO_MESH = "mesh: expected a DeviceMesh or an Axis, got a str; make one by fs.init_mesh"
PREFETCH = "zero3: expected prefetch to be a whole number, 0 or more, or None, got -1"
HYBRID = [
    setup("hybrid_shard on a mesh of one axis", fs.hybrid_shard, LACKS.format("replicate"), MESH),
    setup("hsdp on a mesh of one axis", fs.hsdp, LACKS.format("replicate"), MESH),
    setup("hybrid_shard on another axis", fs.hybrid_shard, LACKS.format("node"), MESH, "node"),
    setup("hybrid_shard with one axis for both", fs.hybrid_shard, TWICE.format(["shard"]), GRID, "shard", "shard"),
    setup("hsdp of less than no elements", lambda mesh: fs.hsdp(mesh, min_shard_elements=-1), SMALLEST, GRID),
    setup("hybrid_shard on no mesh", fs.hybrid_shard, NO_MESH, "replicate"),
    setup("hsdp with a bad option of zero3", lambda mesh: fs.hsdp(mesh, prefetch=-1), PREFETCH, GRID),
]

FIT = "\nTo fix: pass full tensors whose shapes fit the strategy."
ODD = "\n  ['a']: expected a multiple of 2, the size of 'shard', got size 5 of dim 0"
SPLIT_DIM = [
    Row(
        "split_dim of a dim that does not divide",
        lambda world: (world.full, fs.split_dim(world.mesh, dim=0)),
        fs.shard,
        f"shard: leaves cannot be sharded{ODD}{FIT}",
        ("shard",),
    ),
    Row(
        "reshard by split_dim of a dim that does not divide",
        lambda world: (world.params, fs.split_dim(world.mesh, dim=0)),
        fs.reshard,
        f"reshard: leaves do not fit{ODD}\nTo fix: choose a strategy that fits their shapes.",
    ),
    Row(
        "split_dim of no such dim",
        lambda world: ({"n": torch.ones(()), "v": torch.ones(4)}, fs.split_dim(world.mesh, dim=1)),
        fs.shard,
        "shard: leaves cannot be sharded\n"
        "  ['n']: expected a dim 1 to split over 'shard', got shape ()\n"
        f"  ['v']: expected a dim 1 to split over 'shard', got shape (4,){FIT}",
        ("shard",),
    ),
    setup(
        "split_dim before what gathers",
        lambda grid: fs.compose(fs.split_dim(grid["shard"], dim=0), fs.ddp(grid, "replicate")),
        EARLY.format("shard", "replicate"),
        GRID,
    ),
    setup(
        "own_dim before what gathers",
        lambda grid: fs.compose(fs.own_dim(grid["shard"]), fs.ddp(grid, "replicate")),
        EARLY.format("shard", "replicate"),
        GRID,
    ),
    setup(
        "split_dim in a mask before ddp",
        lambda grid: fs.compose(fs.masked(fs.split_dim(grid["replicate"], dim=0), "a"), fs.ddp(grid)),
        EARLY.format("replicate", "shard"),
        GRID,
    ),
    setup(
        "split_dim over the axis that is gathered over",
        lambda mesh: fs.compose(fs.zero3(mesh), fs.split_dim(mesh, dim=0)),
        TWICE.format(["shard"]),
        MESH,
    ),
    setup("split_dim on a mesh of two axes", lambda mesh: fs.split_dim(mesh, dim=0), ONE_AXIS, GRID),
]

STAY = "compose: expected one strategy, which has the reshard policy, got two; take the other's parts by themselves"
NO_LAYOUT = "compose: expected transforms to be ShardTransforms such as fs.fully_shard(mesh), got a str"
COMPOSE = [
    setup(
        "two strategies on one axis",
        lambda mesh: fs.compose(fs.zero3(mesh), fs.zero2(mesh, min_shard_elements=0)),
        TWICE.format(["shard"]),
        MESH,
    ),
    setup(
        "two strategies, one in a mask",
        lambda mesh: fs.compose(
            fs.masked(fs.zero3(mesh), "a", otherwise=fs.ddp(mesh)),
            fs.masked(fs.zero3(mesh), "b", otherwise=fs.ddp(mesh)),
        ),
        TWICE.format(["shard"]),
        MESH,
    ),
    setup(
        "two strategies on two axes",
        lambda grid: fs.compose(fs.ddp(grid, "replicate"), fs.zero3(grid, "shard")),
        STAY,
        GRID,
    ),
    setup("a strategy as zero3's layout", lambda mesh: fs.zero3(mesh, layout=fs.zero2(mesh)), STAY, MESH),
    setup(
        "a strategy in a mask behind one",
        lambda grid: fs.compose(
            fs.zero3(grid, "replicate"), fs.masked(fs.zero3(grid), "a", otherwise=fs.replicate(grid["shard"]))
        ),
        STAY,
        GRID,
    ),
    setup("a layout that is no transform", lambda mesh: fs.zero3(mesh, layout="zero2"), NO_LAYOUT, MESH),
]


def bfloat16_of(mask, strategy):
    return fs.compose(fs.masked(BFLOAT16, mask), strategy)


NO_LEAF = "the mask {!r} matches no leaf of a, b.0; name some of these"
MASK = "masked: expected the mask to be a glob pattern of leaves' names, several, or a function of (name, leaf), got {}"
OPTIMIZER = "masked: otherwise is for ShardTransforms, not for an Optimizer; partition has parts"
NAMELESS = "masked: fs.shard, fs.reshard and model.init choose by names; call the transform of a leaf's spec"
MASKED = [
    *(
        Row(
            f"{verb.__name__} by a mask that means nothing",
            lambda world, tree=tree: (getattr(world, tree), bfloat16_of("w*", world.zero2)),
            verb,
            f"{verb.__name__}: " + NO_LEAF.format("w*"),
        )
        for verb, tree in ((fs.shard, "full"), (fs.reshard, "params"))
    ),
    Row(
        "reshard of a state by a mask that means nothing",
        lambda world: (world.state, bfloat16_of(("c", "d.*"), world.zero2)),
        fs.reshard,
        "reshard: the mask ('c', 'd.*') matches no leaf of step, a, b.0, opt_state.1.updates, ...; name some of these",
    ),
    Row(
        "a mask within otherwise that means nothing",
        lambda world: (world.full, fs.masked(fs.cast(), "a", otherwise=fs.masked(BFLOAT16, "c"))),
        fs.shard,
        "shard: " + NO_LEAF.format("c"),
    ),
    setup("otherwise of an optimizer", fs.masked, OPTIMIZER, SGD, "a", fs.cast()),
    *(
        setup(f"a mask of {mask!r}", fs.masked, MASK.format(found), fs.cast(), mask)
        for mask, found in ((3, "an int"), ((), "a tuple"), (("a", 1), "a tuple"), (None, "None"))
    ),
    *(
        setup(
            f"{verb} without names", lambda t, verb=verb: getattr(t, verb)([], []), NAMELESS, fs.masked(fs.cast(), "a")
        )
        for verb in ("gather", "scatter")
    ),
]


def test_bad_arguments_are_refused():
    assert_all_refused([*HYBRID, *SPLIT_DIM, *COMPOSE, *MASKED])


@on_ranks(2)
def test_model_init_refuses_a_mask_that_means_nothing():
    model = fs.functionalize(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="matches no leaf") as caught:
        model.init(bfloat16_of("norm*", fs.zero2(one_axis())))
    assert str(caught.value) == "shard: the mask 'norm*' matches no leaf of bias, weight; name some of these"
