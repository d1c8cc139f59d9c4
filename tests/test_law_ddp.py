"""Law 3: any strategy is DDP: losses and parameters after k steps are those of one process, and of torch's own DDP."""

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import fshard as fs
from fshard.testing import assert_matches_ddp, assert_trees_close, spmd
from tests.trees import (
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


SEQUENCES, LENGTH, VOCABULARY, WIDTH = 24, 4, 11, 6
LEARNING_RATE, MOMENTUM = 0.1, 0.9

# A gradient adds up at most SEQUENCES * LENGTH terms below 1, in another order than one process does; momentum
# hands on lr / (1 - momentum) = 1 times that, and the next gradient, of a loss with curvature about 1, what parameters
# differ by then. DDP at three ranks divides each rank's gradient before it sums, which is one rounding more of each.
BOUND = SEQUENCES * LENGTH * torch.finfo(torch.float64).eps * (2**STEPS - 1)


class Network(nn.Module):
    """A language model without attention: embedding and head are tied, positions frozen."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.empty(LENGTH, WIDTH), requires_grad=False)
        self.hidden = nn.Linear(WIDTH, 7)
        self.back = nn.Linear(7, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions
        return self.head(self.norm(x + self.back(gelu(self.hidden(x)))))


def network(dtype):
    module, generator = Network(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return module.to(dtype)


def token_batches():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (STEPS, SEQUENCES, LENGTH + 1), generator=generator)
    return [(step[:, :-1], step[:, 1:]) for step in tokens]


def mine(batch):
    """This rank's sequences."""
    axis = fs.axis_of(one_axis())
    return tuple(tensor.tensor_split(axis.size)[fs.comm.rank(axis)] for tensor in batch)


def loss_of(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def module_steps(model, tx):
    """Both spellings of the train step."""

    def loss_fn(params, batch):
        return loss_of(model.apply(params, batch[0]), batch[1])

    def in_one_call(state, batch):
        loss, grads = fs.value_and_grad(loss_fn)(state.params, batch)
        return fs.update(tx, state, grads), loss

    def with_four_verbs(state, batch):
        grads, loss = torch.func.grad_and_value(loss_fn)(fs.gather(state.params), batch)
        grads = fs.scatter_grads(grads, like=state.params)
        return fs.update(tx, state, grads), fs.objective(loss, like=state.params)

    return in_one_call, with_four_verbs


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, dict(lr=LEARNING_RATE, momentum=MOMENTUM)),
    "AdamW": (torch.optim.AdamW, dict(lr=0.01, weight_decay=0.1)),
}


def matches_ddp(pool, strategies, optimizer, dtype=torch.float64, max_norm=None, **closeness):
    """Train by strategies and both spellings next to DDP, in processes."""
    cls, hyper = OPTIMIZERS[optimizer]
    module = network(dtype=dtype)
    tx = fs.chain(*([] if max_norm is None else [fs.clip_by_global_norm(max_norm)]), fs.from_torch(cls, **hyper))

    def optimizer_of(parameters):
        parameters = list(parameters)
        optimizer = cls(parameters, **hyper)

        def clip(*_):
            assert nn.utils.clip_grad_norm_(parameters, max_norm) > max_norm

        if max_norm is not None:
            optimizer.register_step_pre_hook(clip)
        return optimizer

    def program():
        on, model = meshes(), fs.functionalize(module)
        for name in strategies:
            for step in module_steps(model, tx):
                assert_matches_ddp(
                    step,
                    fs.TrainState.create(model.init(STRATEGIES[name](on)), tx),
                    [mine(batch) for batch in token_batches()],
                    module=module,
                    loss_fn=lambda module, batch: loss_of(module(batch[0]), batch[1]),
                    optimizer=optimizer_of,
                    **closeness,
                )

    spmd(program, pool)


@pytest.mark.rows(1)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_processes_are_ddp_bitwise(workers, optimizer, dtype):
    """DDP halves each gradient before it sums them, which changes no bit of the sum's half."""
    matches_ddp(workers(2), STRATEGIES, optimizer, dtype, exact=True)


def test_two_processes_that_clip_are_ddp_within_the_bound(workers):
    """The norm adds leaves in the order of their names and split ones by rank, torch's in the order of the module."""
    matches_ddp(workers(2), STRATEGIES, "SGD", max_norm=0.1, rtol=0, atol=BOUND)
