"""Transforms that are refused: bad arguments, compositions of two for one axis, and masks that match no leaf."""

import re
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter

import pytest
import torch

import fshard as fs
from tests.bad_input import Row, assert_all_refused, setup
from tests.transforms.laws import SGD


class Padded(fs.Wrapped):
    def layout(self, spec):
        if not spec.shape:
            return None
        return self.inner.layout(replace(spec, shape=(8, *spec.shape[1:])))


@dataclass(frozen=True)
class Named(fs.Wrapped):
    ranks: dict[str, int] = field(default_factory=dict)


def of_whole(cls):
    """A transform around that of a strategy, as the arguments of shard after a tree."""
    return lambda world: cls(fs.fully_shard(world.mesh))


TREE = {"a": torch.ones(5, 3), "n": torch.ones(())}
UNFIT = (
    "shard: leaves cannot be sharded\n"
    "  ['a']: expected Padded.layout to return a Spec of shape (5, 3), got one of shape (8, 3)\n"
    "  ['n']: expected Padded.layout to return a Spec of shape (), got one of shape None\n"
    "To fix: pass full tensors whose shapes fit the strategy."
)
UNHASHABLE = (
    "shard: transform cannot be hashed (unhashable type: 'dict'). Keep tuples instead of lists and dicts in its fields."
)
MESH, GRID = map(attrgetter, ("mesh", "grid"))
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
STRATEGIES = (fs.ddp, fs.zero1, fs.zero2, fs.zero3, fs.hsdp)
STAY = (
    "compose: two of these are strategies such as zero3. Keep one, and replace the other by its layout, such as "
    "fs.fully_shard."
)
A_TRANSFORM = "to be a ShardTransform such as fs.zero2(mesh), got"


def option(make, mesh, text, **options):
    """The row of a function of a mesh whose options are wrong; they are values, or functions of the mesh."""

    def call(on):
        return make(on, **{name: value(on) if callable(value) else value for name, value in options.items()})

    return setup(f"{make.__name__} of {options}", call, text.format(make.__name__, *options), mesh)


DECIDED = (
    *((fs.ddp, name) for name in ("regather", "min_shard_elements", "layout")),
    *((fs.zero1, "regather"), (fs.zero2, "regather"), (fs.hsdp, "layout")),
)
NO_AXIS = "mesh: expected axis to be one of ('replicate', 'shard'), got 'node'; name it in init_mesh or pass another"
ARGUMENTS = [
    option(fs.hsdp, GRID, NO_AXIS, replicate_axis="node"),
    option(fs.hsdp, GRID, SMALLEST, min_shard_elements=-1),
    option(fs.split_dim, GRID, ONE_AXIS, dim=0),
    option(fs.zero1, MESH, LAYOUT, layout=fs.fully_shard, min_shard_elements=3),
    option(fs.zero2, MESH, LAYOUT, layout=fs.fully_shard, min_shard_elements=3),
    option(fs.zero3, MESH, LAYOUT, layout=fs.fully_shard, min_shard_elements=1024),
    *(option(make, MESH, NO_AXES, layout=BFLOAT16) for make in (fs.zero1, fs.zero2, fs.zero3)),
    *(option(make, GRID, FIXED, **{name: None}) for make, name in DECIDED),
    *(option(make, GRID, COUNT, prefetch=-1) for make in STRATEGIES),
    option(fs.zero3, MESH, f"zero3: expected layout {A_TRANSFORM} a str", layout=lambda mesh: "zero2"),
    option(fs.zero3, MESH, f"zero3: expected layout {A_TRANSFORM} the class Padded", layout=lambda mesh: Padded),
    option(fs.zero3, MESH, STAY, layout=fs.zero2),
]


def composed(text, make):
    """The row of what is composed of a mesh of two axes."""
    return setup(text, lambda grid: fs.compose(*make(grid)), text, GRID)


COMPOSED = [
    composed(
        EARLY.format("replicate", "shard"),
        lambda grid: (fs.masked(fs.split_dim(grid["replicate"], dim=0), "a"), fs.ddp(grid)),
    ),
    composed(TWICE.format(["shard"]), lambda grid: (fs.zero3(grid), fs.split_dim(grid["shard"], dim=0))),
    composed(
        STAY,
        lambda grid: (
            fs.zero3(grid, "replicate"),
            fs.masked(fs.zero3(grid), "a", otherwise=fs.replicate(grid["shard"])),
        ),
    ),
]


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
        lambda world: (world.state, bfloat16_of(("a", "d.*"), world.zero2)),
        fs.reshard,
        "reshard: "
        + NO_LEAF.format("d.*", "step, a, b.0, opt_state.1.updates, ...")
        + " Leave it out, or pass a function of (name, leaf) as the mask of several models.",
    ),
    setup(
        "otherwise of a class",
        fs.masked,
        f"masked: expected otherwise {A_TRANSFORM} the class Padded",
        fs.cast(),
        "a",
        lambda world: Padded,
    ),
    setup("otherwise of an optimizer", fs.masked, OPTIMIZER, SGD, "a", fs.cast()),
    *(
        setup(f"a mask of {mask!r}", fs.masked, MASK.format(kind), fs.cast(), mask)
        for mask, kind in ((3, "an int"), ((), "a tuple"), (("a", 1), "a tuple"))
    ),
    Row("a layout of another shape", lambda world: (TREE, of_whole(Padded)(world)), fs.shard, UNFIT, ("shard",)),
    Row(
        "a layout of another shape in a strategy",
        lambda world: (TREE, fs.zero3(world.mesh, layout=of_whole(Padded)(world))),
        fs.shard,
        UNFIT,
        ("shard",),
    ),
    setup("gather without names", lambda t: t.gather([], []), NAMELESS, fs.masked(fs.cast(), "a")),
]


@pytest.mark.rows(5)
@pytest.mark.parametrize("make", STRATEGIES)
def test_an_option_that_no_strategy_has_is_refused_by_name(make):
    mesh = fs.init_mesh({"replicate": 1, "shard": 1}, device="cpu")
    with pytest.raises(TypeError, match=rf"^{make.__name__}\(\) got an unexpected keyword argument 'merge'"):
        make(mesh, merge=3)


def test_a_transform_that_cannot_be_hashed_is_refused():
    transform = Named(fs.fully_shard(fs.init_mesh({"shard": 1}, device="cpu")), {"a": 2})
    with pytest.raises(TypeError, match=f"^{re.escape(UNHASHABLE)}$"):
        fs.shard(TREE, transform)


class Attributes(fs.Wrapped):
    """Two with other factors would be equal, and a jitted step would take one for the other."""

    def __init__(self, inner, factor):
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "factor", factor)


@dataclass(frozen=True)
class Scaled(fs.Wrapped):
    scale: torch.Tensor


@dataclass(frozen=True)
class Rotated(fs.Wrapped):
    size: int

    @cached_property
    def matrix(self):
        return torch.eye(self.size)


class AxesByCall(fs.Wrapped):
    def axes(self):
        return self.inner.axes


@dataclass(frozen=True)
class AxesByName(fs.Wrapped):
    axes: tuple[str, ...] = ("shard",)


FROZEN = "expected a frozen dataclass, whose fields are numbers, names and tuples of these, got "
AXES = "expected axes to be a property, a tuple of Axis, got a "
MEMBERS = {
    f"Attributes: {FROZEN}['factor']": lambda plain: Attributes(plain, 2.0),
    f"Scaled: {FROZEN}['scale']": lambda plain: Scaled(plain, torch.ones(2)),
    f"AxesByCall: {AXES}method": AxesByCall,
    f"AxesByName: {AXES}tuple": AxesByName,
    f"Padded: expected inner {A_TRANSFORM} None": lambda plain: Padded(None),
    f"Padded: expected inner {A_TRANSFORM} the class Wrapped": lambda plain: Padded(fs.Wrapped),
}


def test_members_that_are_not_what_the_package_asks_of_them_are_refused():
    mesh = fs.init_mesh({"shard": 1}, device="cpu")
    for text, make in MEMBERS.items():
        for use in (partial(fs.shard, TREE), partial(fs.compose, fs.cast()), lambda t: fs.zero3(mesh, layout=t)):
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                use(make(fs.fully_shard(mesh)))
    # What is computed once from the fields may stay with them.
    around = Rotated(fs.fully_shard(mesh), 2)
    assert len(around.matrix) == 2
    fs.shard(TREE, around)


def test_bad_arguments_are_refused():
    assert_all_refused([*ARGUMENTS, *COMPOSED, *LEAVES])
