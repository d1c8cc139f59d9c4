"""check_varying: a right loss passes, and each step that takes a value for what it is not is named."""

import re
from contextlib import nullcontext

import pytest
import torch

import fshard as fs
from fshard.testing import check_varying, spmd
from tests.ranks import on_ranks
from tests.trees import normal

FULL = {"norm": normal(1)(6), "up": normal(2)(8, 6), "down": normal(3)(6, 8), "head": normal(4)(6, 6)}
X = normal(5)(3, 6)


def parallel(mesh):
    """A strategy under which a layer's columns and rows stay split over the second axis."""
    tp = mesh["tp"]
    split = (fs.masked(fs.split_dim(tp, dim=0), "up"), fs.masked(fs.split_dim(tp, dim=1), "down"))
    return fs.compose(fs.zero3(mesh, min_shard_elements=7), *split)


def loss_of(params, enter, leave):
    full = fs.gather(params)
    x = enter(X * full["norm"])
    x = leave(torch.relu(x @ full["up"].T) @ full["down"].T)
    return ((x * full["norm"]) @ full["head"]).square().mean()


def test_a_model_passes_under_every_strategy():
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5)).double()
    model = fs.functionalize(module)

    def program():
        mesh = fs.init_mesh({"shard": -1}, device="cpu")
        for strategy in (fs.ddp(mesh), fs.zero2(mesh), fs.zero3(mesh, min_shard_elements=0)):
            check_varying(lambda p, x: (model.apply(p, x).square().sum(), len(x)), model.init(strategy), X)

    spmd(program, 3)


def sum_that_varies(params, shard, tp):
    full = fs.gather(params)
    return fs.psum(full["norm"].sum(), tp)  # this line


WHOLE = (
    "['norm']: expected fs.gather or fs.pvary before its use with varying values, got a leaf that is whole on all "
    "ranks of '{}'"
)
# Losses, and what is wrong with them.
LOSSES = {
    "right": (lambda p, shard, tp: loss_of(p, lambda x: fs.pvary(x, tp), lambda x: fs.psum_invariant(x, tp)), None),
    "pvary forgotten": (
        lambda p, shard, tp: loss_of(p, lambda x: x, lambda x: fs.psum_invariant(x, tp)),
        WHOLE.format("tp"),
    ),
    "psum for psum_invariant": (
        lambda p, shard, tp: loss_of(p, lambda x: fs.pvary(x, tp), lambda x: fs.psum(x, tp)),
        "expected one that agrees: fs.psum_invariant, whose sum agrees, got psum over 'tp', whose result varies",
    ),
    "partial sums": (
        lambda p, shard, tp: loss_of(p, lambda x: fs.pvary(x, tp), lambda x: x),
        "['down']: expected fs.psum_invariant before its use as an invariant value, got a leaf that is split over 'tp'",
    ),
    "a whole leaf on pieces": (
        lambda p, shard, tp: fs.psum_invariant((p["norm"].local * fs.gather(p)["up"]).sum(), tp),
        WHOLE.format("tp"),
    ),
    "all_gather of columns": (
        lambda p, shard, tp: fs.all_gather(fs.gather(p)["up"], tp).sum(),
        "expected one that agrees: fs.all_gather_invariant, whose result agrees, got all_gather over 'tp'",
    ),
    "an objective": (
        lambda p, shard, tp: fs.psum_invariant(fs.gather(p)["norm"].sum(), shard),
        "expected one that varies: fs.pvary of it first, got psum_invariant over 'shard', whose result agrees",
    ),
    "a whole leaf past gather": (lambda p, shard, tp: p["norm"].local.sum(), WHOLE.format("shard")),
    "a line that is named": (
        sum_that_varies,
        'in sum_that_varies return fs.psum(full["norm"].sum(), tp) # this line: expected one that agrees',
    ),
}


@pytest.mark.rows(5)
@pytest.mark.parametrize("name", LOSSES)
@on_ranks(4)
def test_losses(name):
    mesh = fs.init_mesh({"shard": 2, "tp": 2}, device="cpu")
    params, axes = fs.shard(FULL, parallel(mesh)), (fs.axis_of(mesh["shard"]), fs.axis_of(mesh["tp"]))
    loss, error = LOSSES[name]
    expected = nullcontext() if error is None else pytest.raises(AssertionError, match=re.escape(error))
    with expected:
        check_varying(lambda p: loss(p, *axes), params)


@on_ranks(4)
def test_columns_may_be_gathered_into_what_agrees():
    """Its transpose takes this rank's piece, where all_gather's sums as many equal cotangents as there are ranks."""
    mesh = fs.init_mesh({"shard": 2, "tp": 2}, device="cpu")
    tp, params = fs.axis_of(mesh["tp"]), fs.shard(FULL, parallel(mesh))

    def loss(params):
        return fs.all_gather_invariant(fs.gather(params)["up"], tp).square().sum()

    check_varying(loss, params)
    value, grads = fs.value_and_grad(loss)(params)
    fs.testing.assert_trees_close((value, fs.unshard(grads)["up"]), (FULL["up"].square().sum(), 2 * FULL["up"]))


@on_ranks(3)
def test_it_switches_nothing_of_the_process():
    """Ranks may be threads, and each that put a switch of the process back would leave the state of another's."""
    params = fs.shard(FULL, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    found = []

    def loss(params):
        found.append(torch.is_anomaly_enabled())
        return (X @ fs.gather(params["head"])).square().mean()

    check_varying(loss, params)
    assert [*found, torch.is_anomaly_enabled()] == [False, False]
