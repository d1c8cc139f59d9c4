"""Transforms that are refused: bad arguments, compositions of two for one axis, and masks that match no leaf."""

from operator import attrgetter

import torch

import fshard as fs
from tests.bad_input import Row, assert_all_refused, setup
from tests.transforms.laws import SGD

MESH, GRID, ZERO2 = map(attrgetter, ("mesh", "grid", "zero2"))
BFLOAT16 = fs.cast(gather=torch.bfloat16)

ONE_AXIS = "mesh: expected one axis, got ('replicate', 'shard'); name one, as in mesh['shard']"
SMALLEST = "fully_shard: expected min_shard_elements to be 0 or more, got -1"
TWICE = "compose: expected one transform for each axis, got two for the axes {}; drop one of the two"
EARLY = "compose: expected split_dim and own_dim behind what gathers over ['{1}'], got ['{0}'] before it"

NO_AXES = (
    "zero3: expected a layout with mesh axes, got _Cast(gather_dtype=torch.bfloat16, scatter_dtype=None), under which "
    "gradients would stay unsummed; compose it with fs.fully_shard, or with the strategy itself"
)
LAYOUT = "zero3: expected min_shard_elements or layout, got both; give it to the layout"
STAY = "compose: expected one strategy, which has the reshard policy, got two; take the other's parts by themselves"
NO_LAYOUT = "compose: expected transforms to be ShardTransforms such as fs.fully_shard(mesh), got a str"
ARGUMENTS = [
    setup("hsdp of less than no elements", lambda mesh: fs.hsdp(mesh, min_shard_elements=-1), SMALLEST, GRID),
    setup("split_dim on a mesh of two axes", lambda mesh: fs.split_dim(mesh, dim=0), ONE_AXIS, GRID),
    setup("two of layout", lambda m: fs.zero3(m, layout=fs.fully_shard(m), min_shard_elements=3), LAYOUT, MESH),
    setup("a layout without axes", lambda m: fs.zero3(m, layout=BFLOAT16), NO_AXES, MESH),
    setup("a layout that is no transform", lambda mesh: fs.zero3(mesh, layout="zero2"), NO_LAYOUT, MESH),
    setup("a strategy as zero3's layout", lambda mesh: fs.zero3(mesh, layout=fs.zero2(mesh)), STAY, MESH),
]

# What is composed of a mesh of two axes, and the error.
COMPOSED = {
    "split_dim in a mask before ddp": (
        lambda grid: (fs.masked(fs.split_dim(grid["replicate"], dim=0), "a"), fs.ddp(grid)),
        EARLY.format("replicate", "shard"),
    ),
    "split_dim over the axis that is gathered over": (
        lambda grid: (fs.zero3(grid), fs.split_dim(grid["shard"], dim=0)),
        TWICE.format(["shard"]),
    ),
    "a strategy in a mask behind one": (
        lambda grid: (
            fs.zero3(grid, "replicate"),
            fs.masked(fs.zero3(grid), "a", otherwise=fs.replicate(grid["shard"])),
        ),
        STAY,
    ),
}


def bfloat16_of(mask, strategy):
    return fs.compose(fs.masked(BFLOAT16, mask), strategy)


ODD = "\n  ['a']: expected a multiple of 2, the size of 'shard', got size 5 of dim 0"
NO_LEAF = "the mask {!r} matches no leaf of {}; name some of these"
MASK = "masked: expected the mask to be a glob pattern of leaves' names, several, or a function of (name, leaf), got {}"
OPTIMIZER = "masked: otherwise is for ShardTransforms, not for an Optimizer; partition has parts"
NAMELESS = "masked: fs.shard and model.init choose by names; call the transform of a leaf's spec"
LEAVES = [
    Row(
        "split_dim of a dim that does not divide, and of none",
        lambda world: ({**world.full, "n": torch.ones(())}, fs.split_dim(world.mesh, dim=0)),
        fs.shard,
        f"shard: leaves cannot be sharded{ODD}\n  ['n']: expected a dim 0 to split over 'shard', got shape ()"
        "\nTo fix: pass full tensors whose shapes fit the strategy.",
        ("shard",),
    ),
    Row(
        "reshard by split_dim of a dim that does not divide",
        lambda world: (world.params, fs.split_dim(world.mesh, dim=0)),
        fs.reshard,
        f"reshard: leaves do not fit{ODD}\nTo fix: choose a strategy that fits their shapes.",
    ),
    Row(
        "reshard of a state by a mask that matches nothing",
        lambda world: (world.state, bfloat16_of(("c", "d.*"), world.zero2)),
        fs.reshard,
        "reshard: " + NO_LEAF.format(("c", "d.*"), "step, a, b.0, opt_state.1.updates, ..."),
    ),
    setup("otherwise of an optimizer", fs.masked, OPTIMIZER, SGD, "a", fs.cast()),
    *(
        setup(f"a mask of {mask!r}", fs.masked, MASK.format(found), fs.cast(), mask)
        for mask, found in ((3, "an int"), ((), "a tuple"), (("a", 1), "a tuple"))
    ),
    setup("gather without names", lambda t: t.gather([], []), NAMELESS, fs.masked(fs.cast(), "a")),
]


def test_bad_arguments_are_refused():
    composed = [setup(name, lambda g, f=f: fs.compose(*f(g)), text, GRID) for name, (f, text) in COMPOSED.items()]
    assert_all_refused([*ARGUMENTS, *composed, *LEAVES])
