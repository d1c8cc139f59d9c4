"""Four axes at once, of the example: ZeRO-3, long sequences, a pipeline and tensor parallelism, against one rank."""

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.ranks import world_of
from tests.tolerance import within

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import four_dimensions as example

SIZES = Namespace(
    width=32, layers=4, context=16, batch=8, microbatches=2, steps=3, seed=0, lr=1e-2, jit=False, plan=None
)


def program(sizes, schedule):
    """Train with clipped AdamW on a mesh of (pipe, shard, cp, tp)."""
    mesh = fs.init_mesh(dict(zip(example.AXES, sizes, strict=True)), device="cpu")
    full = example.initial(SIZES.width, SIZES.layers, SIZES.context, SIZES.seed)
    params = fs.shard(full, example.strategy(mesh, axes := {name: fs.axis_of(mesh, name) for name in example.AXES}))
    losses, trained = example.train(params, axes, Namespace(**vars(SIZES) | {"schedule": schedule}))
    return losses, fs.unshard(trained)


@pytest.mark.parametrize(
    ("sizes", "schedule", "world"),
    [
        ((2, 1, 1, 2), "1f1b", 4),
        pytest.param((1, 2, 2, 1), "gpipe", 4, marks=pytest.mark.slow),
        pytest.param((2, 2, 2, 2), "1f1b", 16, marks=pytest.mark.slow),
        pytest.param((2, 1, 1, 2), "1f1b", "4 processes", marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.timeout(500)
def test_training_is_that_of_one_process(sizes, schedule, world, workers):
    ((losses, params),) = spmd(partial(program, (1, 1, 1, 1), "gpipe"), 1)
    for results in spmd(partial(program, sizes, schedule), world_of(world, workers), timeout=400):
        # Sums over all tokens, in parts of ranks, which layers hand on, forward and backward, and so do steps.
        near = within((losses, params), terms=SIZES.batch * SIZES.context, steps=2 * SIZES.layers * SIZES.steps)
        assert_trees_close(results, (losses, params), **near)
