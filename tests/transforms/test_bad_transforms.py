"""Transforms that are refused: bad arguments, compositions of two for one axis, and masks that match no leaf."""

from operator import attrgetter

import pytest
import torch

import fshard as fs
from tests.bad_input import Row, assert_all_refused, setup
from tests.transforms.laws import SGD

MESH, GRID, ZERO2 = map(attrgetter, ("mesh", "grid", "zero2"))
BFLOAT16 = fs.cast(gather=torch.bfloat16)

ONE_AXIS = "mesh: expected one axis, got ('replicate', 'shard'); name one, as in mesh['shard']"
SMALLEST = "fully_shard: expected min_shard_elements to be 0 or more, got -1"
TWICE = "compose: two transforms use the axes {}. Remove one of them."
EARLY = (
    "compose: split_dim or own_dim over ['{0}'] comes before the transform that gathers ['{1}']. Put it after that "
    "transform."
)

NO_AXES = (
    "{}: the layout _Cast(gather_dtype=torch.bfloat16, scatter_dtype=None) uses no mesh axis, so gradients would not "
    "be summed. Compose it with fs.fully_shard, or compose it with the strategy."
)
LAYOUT = "{}: min_shard_elements has no effect with layout=. Pass it to the transform that you give as layout."
FIXED = "{0}: {1} is decided by {0} itself. Leave it out, or use fs.zero3."
COUNT = "{}: expected prefetch to be a whole number, 0 or more, or None, got -1"
STRATEGIES = {"ddp": fs.ddp, "zero1": fs.zero1, "zero2": fs.zero2, "zero3": fs.zero3, "hsdp": fs.hsdp}
STAY = (
    "compose: two of these are strategies such as zero3. Keep one, and replace the other by its layout, such as "
    "fs.fully_shard."
)
NO_LAYOUT = "compose: expected transforms to be ShardTransforms such as fs.fully_shard(mesh), got a str"
ARGUMENTS = [
    setup(
        "an axis for replicas that the mesh lacks",
        lambda mesh: fs.hsdp(mesh, replicate_axis="node"),
        "hsdp: expected replicate_axis to be one of ('replicate', 'shard'), got 'node'; name it in init_mesh",
        GRID,
    ),
    setup("hsdp of less than no elements", lambda mesh: fs.hsdp(mesh, min_shard_elements=-1), SMALLEST, GRID),
    setup("split_dim on a mesh of two axes", lambda mesh: fs.split_dim(mesh, dim=0), ONE_AXIS, GRID),
    *(
        setup(
            f"two of layout, in {name}",
            lambda m, make=STRATEGIES[name], n=elements: make(m, layout=fs.fully_shard(m), min_shard_elements=n),
            LAYOUT.format(name),
            MESH,
        )
        for name, elements in (("zero1", 3), ("zero2", 3), ("zero3", 1024))
    ),
    *(
        setup(
            f"a layout without axes, in {name}",
            lambda m, make=STRATEGIES[name]: make(m, layout=BFLOAT16),
            NO_AXES.format(name),
            MESH,
        )
        for name in ("zero1", "zero2", "zero3")
    ),
    *(
        setup(
            f"{option} of {name}",
            lambda m, make=STRATEGIES[name], o=option: make(m, **{o: None}),
            FIXED.format(name, option),
            GRID,
        )
        for name, options in {
            "ddp": ("regather", "min_shard_elements", "layout"),
            "zero1": ("regather",),
            "zero2": ("regather",),
            "hsdp": ("layout",),
        }.items()
        for option in options
    ),
    *(
        setup(f"prefetch of {name}", lambda m, make=make: make(m, prefetch=-1), COUNT.format(name), GRID)
        for name, make in STRATEGIES.items()
    ),
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
NO_LEAF = "the mask {!r} matches no leaf. The leaves are {}."
MASK = "masked: expected the mask to be a glob pattern of leaves' names, several, or a function of (name, leaf), got {}"
OPTIMIZER = "masked: otherwise is for a ShardTransform, but tx is an Optimizer. For several parts, use fs.partition."
NAMELESS = (
    "masked: this transform has no layout or gather of its own, because it depends on the name of each leaf. Use the "
    "transform in a leaf's spec (leaf.spec.transform)."
)
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


def test_an_option_that_no_strategy_has_is_refused_by_name():
    mesh = fs.init_mesh({"replicate": 1, "shard": 1}, device="cpu")
    for name, make in STRATEGIES.items():
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'merge'"):
            make(mesh, merge=3)


def test_bad_arguments_are_refused():
    composed = [setup(name, lambda g, f=f: fs.compose(*f(g)), text, GRID) for name, (f, text) in COMPOSED.items()]
    assert_all_refused([*ARGUMENTS, *composed, *LEAVES])
