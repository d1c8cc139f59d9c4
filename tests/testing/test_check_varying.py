"""check_varying: a right loss passes, and each step that takes a value for what it is not is named."""

import re

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


def loss_of(params, enter, leave, again=lambda norm: norm):
    full = fs.gather(params)
    x = enter(X * full["norm"])
    x = leave(torch.relu(x @ full["up"].T) @ full["down"].T)
    return ((x * again(full["norm"])) @ full["head"]).square().mean()


def checked(make, error):
    """Check a loss on four ranks, of which `make` gets the two axes and the parameters."""

    def program():
        mesh = fs.init_mesh({"shard": 2, "tp": 2}, device="cpu")
        params = fs.shard(FULL, parallel(mesh))
        f = make(fs.axis_of(mesh["shard"]), fs.axis_of(mesh["tp"]))
        if error is None:
            check_varying(f, params)
            return
        with pytest.raises(AssertionError, match=re.escape(error)):
            check_varying(f, params)

    spmd(program, 4)


def test_a_right_loss_passes():
    checked(lambda shard, tp: lambda p: loss_of(p, lambda x: fs.pvary(x, tp), lambda x: fs.psum_invariant(x, tp)), None)


def test_a_model_passes_under_every_strategy():
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5)).double()
    model = fs.functionalize(module)

    def program():
        mesh = fs.init_mesh({"shard": -1}, device="cpu")
        for strategy in (fs.ddp(mesh), fs.zero2(mesh), fs.zero3(mesh, min_shard_elements=0)):
            check_varying(lambda p, x: (model.apply(p, x).square().sum(), len(x)), model.init(strategy), X)

    spmd(program, 3)


MISTAKES = {
    "pvary forgotten": (
        lambda shard, tp: lambda p: loss_of(p, lambda x: x, lambda x: fs.psum_invariant(x, tp)),
        "['norm']: expected fs.gather or fs.pvary before its use with varying values, got a leaf that is whole on "
        "all ranks of 'tp'",
    ),
    "psum for psum_invariant": (
        lambda shard, tp: lambda p: loss_of(p, lambda x: fs.pvary(x, tp), lambda x: fs.psum(x, tp)),
        "expected one that agrees: fs.psum_invariant, whose sum agrees, got psum over 'tp', whose result varies",
    ),
    "partial sums": (
        lambda shard, tp: lambda p: loss_of(p, lambda x: fs.pvary(x, tp), lambda x: x),
        "['down']: expected fs.psum_invariant before its use as an invariant value, got a leaf that is split over 'tp'",
    ),
    "a whole leaf on pieces": (
        lambda shard, tp: lambda p: fs.psum_invariant((p["norm"].local * fs.gather(p)["up"]).sum(), tp),
        "['norm']: expected fs.gather or fs.pvary before its use with varying values, got a leaf that is whole on "
        "all ranks of 'tp'",
    ),
    "all_gather of columns": (
        lambda shard, tp: lambda p: fs.all_gather(fs.gather(p)["up"], tp).sum(),
        "expected one that agrees: fs.all_gather_invariant, whose result agrees, got all_gather over 'tp'",
    ),
    "an objective": (
        lambda shard, tp: lambda p: fs.psum_invariant(fs.gather(p)["norm"].sum(), shard),
        "expected one that varies: fs.pvary of it first, got psum_invariant over 'shard', whose result agrees",
    ),
    "a whole leaf past gather": (
        lambda shard, tp: lambda p: p["norm"].local.sum(),
        "['norm']: expected fs.gather or fs.pvary before its use with varying values, got a leaf that is whole on "
        "all ranks of 'shard'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    checked(*MISTAKES[mistake])


def test_the_line_is_named():
    def make(shard, tp):
        def loss(params):
            full = fs.gather(params)
            return fs.psum(full["norm"].sum(), tp)  # this line

        return loss

    checked(make, 'in loss return fs.psum(full["norm"].sum(), tp) # this line: expected one that agrees')


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
