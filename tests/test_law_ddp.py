"""Law 3: any strategy is DDP: losses and parameters after k steps equal those of one process on the whole batch."""

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.ranks import my_rank, on_ranks
from tests.trees import (
    CASTS,
    ONE_AXIS,
    STRATEGIES,
    TWO_AXES,
    WORLD_SIZES,
    Layer,
    assert_same_bits,
    meshes,
    normal,
    one_axis,
)

ROWS, STEPS, EPS = 24, 4, torch.finfo(torch.float64).eps


class Algorithm(NamedTuple):
    """An optimizer, and the most that it makes of a difference between gradients."""

    cls: type[torch.optim.Optimizer]
    hyper: dict
    gain: float


ALGORITHMS = {
    # lr / (1 - momentum): each gradient counts again in all later updates.
    "SGD": Algorithm(torch.optim.SGD, dict(lr=0.1, momentum=0.9), 1.0),
    # 2 lr / eps: the quotient m / (sqrt(v) + eps) is at most 1 / eps as steep in each of m and sqrt(v).
    "AdamW": Algorithm(torch.optim.AdamW, dict(lr=0.01, eps=0.01, weight_decay=0.1), 2.0),
}


def bound(algorithm):
    """How far parameters may be from those of one process.

    A gradient adds up at most ROWS terms below 1, in another order: it differs by ROWS eps. An update hands on at most
    `gain` times that, and the next gradient, of a loss with curvature about 1, what parameters differ by then. A norm
    to clip by is a sum of 70 squares: its rounding moves gradients of norm 0.05 by 70 * 0.05 eps, which is less.
    """
    return ROWS * EPS * ((1 + ALGORITHMS[algorithm].gain) ** STEPS - 1)


def initial():
    draw = normal()
    layers = [Layer(draw(5, 7) / 5, draw(7)), Layer(draw(7, 3) / 7, draw(3))]
    return {"layers": layers, "gain": draw(1, 3), "scale": draw(), "empty": draw(0, 3)}


def batches():
    draw = normal(1)
    return [(draw(ROWS, 5) / 5, draw(ROWS, 3)) for _ in range(STEPS)]


def row_losses(params, batch):
    x, y = batch
    first, last = params["layers"]
    predicted = torch.tanh(x @ first.weight + first.bias) @ last.weight * params["gain"] + last.bias * params["scale"]
    return (predicted - y).square().mean(1) + params["empty"].sum()


LOSSES = {
    "mean": lambda rows: rows.mean(),
    "sum": lambda rows: rows.sum() / ROWS,
    "weighted": lambda rows: (rows.sum(), torch.tensor(len(rows))),
}


def one_rank_of(batch, reduce):
    """This rank's rows; for "weighted", ranks have different numbers of them, and none at all is among these."""
    axis = fs.axis_of(one_axis())
    rank, size = fs.comm.rank(axis), axis.size
    ends = [ROWS * k // size for k in range(size + 1)]
    if reduce == "weighted":
        ends = [0, *(ROWS - ROWS // 2**k for k in range(1, size)), ROWS]
    start, end = list(pairwise(ends))[rank]
    return tuple(tensor[start:end] for tensor in batch)


class Run(NamedTuple):
    """What a training run comes to."""

    losses: torch.Tensor
    params: dict


@cache
def one_process(algorithm, max_norm=None):
    """The reference: torch's own optimizer and autograd on the concatenated batch."""
    params = fs.tree_map(lambda tensor: tensor.requires_grad_(), initial())
    leaves = fs.tree_leaves(params)
    optimizer = ALGORITHMS[algorithm].cls(leaves, **ALGORITHMS[algorithm].hyper)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = row_losses(params, batch).mean()
        loss.backward()
        if max_norm is not None:
            assert torch.nn.utils.clip_grad_norm_(leaves, max_norm) > max_norm
        optimizer.step()
        losses.append(loss.detach())
    return Run(torch.stack(losses), fs.tree_map(torch.Tensor.detach, params))


def train_steps(tx, reduce):
    """Both spellings of the train step; the same loss function serves both."""

    def loss_fn(params, batch):
        return LOSSES[reduce](row_losses(fs.gather(params), batch))

    def in_one_call(state, batch):
        loss, grads = fs.value_and_grad(loss_fn, reduce=reduce)(state.params, batch)
        return fs.update(tx, state, grads), loss

    def with_four_verbs(state, batch):
        full = fs.gather(state.params)
        if reduce == "weighted":
            grads, (total, count) = torch.func.grad_and_value(lambda p: loss_fn(p, batch), has_aux=True)(full)
            loss = (total, count)
            grads = fs.scatter_grads(grads, like=state.params, reduce=reduce, count=count)
        else:
            grads, loss = torch.func.grad_and_value(loss_fn)(full, batch)
            grads = fs.scatter_grads(grads, like=state.params, reduce=reduce)
        return fs.update(tx, state, grads), fs.objective(loss, like=state.params, reduce=reduce)

    return in_one_call, with_four_verbs


@cache
def train(algorithm, world_size, max_norm=None, reduce="mean"):
    """Train by every strategy and both spellings on simulated ranks, all of which must come to the same."""
    clip = () if max_norm is None else (fs.clip_by_global_norm(max_norm),)
    tx = fs.chain(*clip, fs.from_torch(ALGORITHMS[algorithm].cls, **ALGORITHMS[algorithm].hyper))

    def program():
        on, runs = meshes(), {}
        mine = [one_rank_of(batch, reduce) for batch in batches()]
        for name, strategy in STRATEGIES.items():
            for step in train_steps(tx, reduce):
                state, losses = fs.TrainState.create(fs.shard(initial(), strategy(on)), tx), []
                for batch in mine:
                    state, loss = step(state, batch)
                    losses.append(loss)
                runs[name, step.__name__] = Run(torch.stack(losses), fs.unshard(state.params))
        return runs

    first, *others = spmd(program, world_size)
    for other in others:
        assert_same_bits(other, first)
    return first


RUNS = [
    ("SGD", None, "sum"),
    ("SGD", None, "weighted"),
    ("AdamW", None, "mean"),
    ("SGD", 0.05, "mean"),
    ("AdamW", 0.05, "mean"),
]


@pytest.mark.rows(1)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("algorithm, max_norm, reduce", RUNS)
def test_every_strategy_is_one_process(algorithm, max_norm, reduce, world_size):
    runs = train(algorithm, world_size, max_norm, reduce)
    expected = one_process(algorithm, max_norm)
    assert len(runs) == 2 * len(STRATEGIES)
    assert_trees_close(runs, dict.fromkeys(runs, expected), rtol=0, atol=bound(algorithm))


@pytest.mark.rows(1)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("algorithm, max_norm, reduce", [run for run in RUNS if run[1] is None])
def test_strategies_and_spellings_agree_bitwise(algorithm, max_norm, reduce, world_size):
    """Without clipping, whose norm is summed otherwise. On two axes sums of four ranks and more have another order."""
    runs = train(algorithm, world_size, max_norm, reduce)
    for table in [STRATEGIES] if world_size < 4 else [ONE_AXIS, TWO_AXES]:
        first, *others = (run for (strategy, _), run in runs.items() if strategy in table)
        for other in others:
            assert_same_bits(other, first)


# What computes in bfloat16 and sums gradients there too.
HALF = {
    "half ddp": lambda on: fs.compose(fs.cast(gather=torch.bfloat16), fs.ddp(on.line)),
    "half zero2": lambda on: fs.compose(fs.cast(gather=torch.bfloat16), fs.zero2(on.line, min_shard_elements=0)),
}


@pytest.mark.rows(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("table", (CASTS, HALF))
def test_mixed_precision_strategies_agree_bitwise(table, world_size):
    """Computing in bfloat16 is one thing, sharding another; gradients arrive in float32, as parameters are stored."""

    def program():
        on, batch, runs = meshes(), one_rank_of(batches()[0], "mean"), []
        x, y = (tensor.bfloat16() for tensor in batch)

        def loss_fn(params):
            return row_losses(fs.gather(params), (x, y)).float().mean()

        for strategy in table.values():
            params = fs.shard(fs.tree_map(torch.Tensor.float, initial()), strategy(on))
            loss, grads = fs.value_and_grad(loss_fn)(params)
            local = torch.func.grad(loss_fn)(fs.gather(params))
            assert {grad.dtype for grad in fs.tree_leaves(local)} == {torch.bfloat16}
            for result in (grads, fs.scatter_grads(local, like=params)):
                assert {grad.dtype for grad in fs.tree_leaves(result)} == {torch.float32}
                runs.append(fs.unshard((loss, result)))
        return runs

    runs = [run for rank in spmd(program, world_size) for run in rank]
    for run in runs:
        assert_same_bits(run, runs[0])
    # The forward rounds about ten times, relatively by eps / 2 of bfloat16 each, terms of magnitude below 2.
    expected = row_losses(initial(), batches()[0]).mean()
    assert abs(runs[0][0] - expected) < 10 * 2 * torch.finfo(torch.bfloat16).eps / 2


@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_leaf_that_only_one_rank_uses(strategy, world_size):
    """Its gradient is the mean with zeros of the other ranks, however the program says that it is unused."""
    # Whole numbers, so that the sum of equal gradients over any number of ranks is exact.
    full = {"all": torch.arange(15.0).view(5, 3), "last": torch.arange(15.0, 30.0).view(5, 3)}
    params = fs.shard(full, STRATEGIES[strategy](meshes()))
    is_last = my_rank() == world_size - 1

    def loss_fn(params):
        full = fs.gather(params)
        return (full["all"] ** 2).sum() + ((full["last"] ** 2).sum() if is_last else 0.0)

    expected = {"all": 2 * full["all"], "last": 2 * full["last"] / world_size}
    _, grads = fs.value_and_grad(loss_fn)(params)
    local = torch.func.grad(loss_fn)(fs.gather(params))
    assert_same_bits(fs.unshard(grads), expected)
    for unused in (torch.zeros(5, 3), None):
        grads = fs.scatter_grads(local if is_last else {**local, "last": unused}, like=params)
        assert_same_bits(fs.unshard(grads), expected)
