"""Masks of transforms that are refused: what matches no leaf, and what sums over other axes."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from tests.bad_input import Row, assert_all_refused
from tests.test_bad_setup import setup
from tests.transforms.laws import SGD
from tests.trees import one_axis


def bfloat16_of(mask):
    return lambda world: fs.compose(fs.masked(fs.cast(gather=torch.bfloat16), mask), world.zero2)


NO_LEAF = "the mask {!r} matches no leaf of a, b.0; name some of these"
AXES = (
    "masked: expected other leaves to be reduced over the axes {}, got {}; give otherwise= a transform over these, "
    "such as fs.replicate"
)
MASK = (
    "masked: expected the mask to be a glob pattern of leaves' names, several, a function of the name or of (name, "
    "leaf), or a tree of bools, got {}"
)
NAMELESS = (
    "masked: leaves are meant by their names, which only fs.shard, fs.reshard and model.init know; each leaf's spec "
    "has its own transform"
)
BAD = [
    *(
        Row(
            f"{verb.__name__} by a mask that means nothing",
            lambda world, tree=tree: (getattr(world, tree), bfloat16_of("w*")(world)),
            verb,
            f"{verb.__name__}: " + NO_LEAF.format("w*"),
        )
        for verb, tree in ((fs.shard, "full"), (fs.reshard, "params"))
    ),
    Row(
        "reshard of a state by a mask that means nothing",
        lambda world: (world.state, bfloat16_of(("c", "d.*"))(world)),
        fs.reshard,
        "reshard: the mask ('c', 'd.*') matches no leaf of step, a, b.0, opt_state.1.updates, ...; name some of these",
    ),
    Row(
        "a mask within otherwise that means nothing",
        lambda world: (world.full, fs.masked(fs.cast(), "a", otherwise=fs.masked(fs.cast(gather=torch.bfloat16), "c"))),
        fs.shard,
        "shard: " + NO_LEAF.format("c"),
    ),
    setup("others reduced over nothing", fs.masked, AXES.format(["shard"], []), lambda world: world.zero2, "a"),
    setup(
        "others reduced over another axis",
        fs.masked,
        AXES.format(["shard"], ["data"]),
        lambda world: world.zero2,
        "a",
        lambda world: fs.ddp(world.other, "data"),
    ),
    setup(
        "otherwise of no transform",
        fs.masked,
        "masked: expected otherwise to be a ShardTransform, got a str",
        fs.cast(),
        "a",
        "b",
    ),
    setup(
        "otherwise of an optimizer",
        fs.masked,
        "masked: otherwise is for ShardTransforms, not for an Optimizer; partition has parts",
        SGD,
        "a",
        fs.cast(),
    ),
    *(
        setup(f"a mask of {mask!r}", fs.masked, MASK.format(found), fs.cast(), mask)
        for mask, found in ((3, "an int"), ((), "a tuple"), (("a", 1), "a tuple"), (None, "None"))
    ),
    *(
        Row(name, lambda world: (fs.masked(fs.cast(), "a"),), lambda t, verb=verb: getattr(t, verb)([], []), NAMELESS)
        for name, verb in (("gather without names", "gather"), ("scatter without names", "scatter"))
    ),
    setup(
        "two strategies, one in a mask",
        lambda mesh: fs.compose(
            fs.masked(fs.zero3(mesh), "a", otherwise=fs.ddp(mesh)),
            fs.masked(fs.zero3(mesh), "b", otherwise=fs.ddp(mesh)),
        ),
        "compose: expected one transform for each axis, got two for the axes ['shard']; drop one of the two",
        lambda world: world.mesh,
    ),
]


def test_bad_arguments_are_refused():
    assert_all_refused(BAD)


def test_model_init_refuses_a_mask_that_means_nothing():
    def program():
        model = fs.functionalize(nn.Linear(3, 2))
        with pytest.raises(ValueError, match="matches no leaf") as caught:
            model.init(bfloat16_of("norm*")(type("World", (), {"zero2": fs.zero2(one_axis())})))
        return str(caught.value)

    texts = spmd(program, 2)
    assert texts == [texts[0]] * 2
    assert texts[0] == "shard: the mask 'norm*' matches no leaf of bias, weight; name some of these"
