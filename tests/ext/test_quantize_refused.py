"""Arguments and compositions of quantize that are refused."""

import torch

import fshard as fs
from tests.bad_input import assert_all_refused, text_of
from tests.ranks import on_ranks
from tests.test_bad_setup import setup
from tests.transforms.test_bad_transforms import EARLY, GRID, MESH, ONE_AXIS, SMALLEST, TWICE
from tests.trees import one_axis

BLOCK = "quantize: expected block to be a number of elements, 1 or more, got {!r}"
NEITHER = "quantize: expected gather or scatter to be rounded, got neither; pass one of them, or use fully_shard"
QUANTIZE = [
    *(
        setup(
            f"quantize in blocks of {size!r}",
            lambda mesh, size=size: fs.quantize(mesh, block=size),
            BLOCK.format(size),
            MESH,
        )
        for size in (0, -3, True, 2.0, "256")
    ),
    setup("quantize that rounds nothing", lambda mesh: fs.quantize(mesh, gather=False), NEITHER, MESH),
    setup("quantize on a mesh of two axes", fs.quantize, ONE_AXIS, GRID),
    setup("quantize of less than no elements", lambda mesh: fs.quantize(mesh, min_shard_elements=-1), SMALLEST, MESH),
    setup(
        "split_dim before quantize",
        lambda grid: fs.compose(fs.split_dim(grid["replicate"], dim=0), fs.quantize(grid["shard"])),
        EARLY.format("replicate", "shard"),
        GRID,
    ),
    setup(
        "quantize and fully_shard",
        lambda mesh: fs.compose(fs.zero2(mesh, min_shard_elements=0), fs.quantize(mesh)),
        TWICE.format(["shard"]),
        MESH,
    ),
    setup(
        "hsdp of quantize over both axes",
        lambda grid: fs.compose(fs.hybrid_shard(grid), fs.quantize(grid["shard"]), fs.ddp(grid, "replicate")),
        TWICE.format(["replicate", "shard"]),
        GRID,
    ),
]


def test_bad_arguments_are_refused():
    assert_all_refused(QUANTIZE)


@on_ranks(2)
def test_sums_of_one_tree_are_refused():
    params = fs.shard({"w": torch.ones(4)}, fs.zero3(one_axis(), layout=fs.quantize(one_axis())))
    run = fs.accumulate(lambda p, x: fs.gather(p)["w"].sum(), sums="tree")
    assert text_of(lambda: run(params, [0, 1])) == (
        'sums="tree": expected fully_shard, replicate, split_dim, casts and offload, got Quantize; take a strategy '
        'without it, or leave out sums="tree"'
    )
