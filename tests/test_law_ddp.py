"""Law 3: any strategy is DDP: losses and parameters after k steps are those of one process, and of torch's own DDP."""

from functools import cache, partial
from itertools import pairwise, product
from typing import NamedTuple

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.rounding import tolerance
from fshard.testing import assert_matches_ddp, assert_trees_close, spmd
from tests.ranks import on_ranks
from tests.trees import ONE_AXIS, STRATEGIES, TWO_AXES, WORLD_SIZES, Layer, assert_same_bits, meshes, normal, one_axis
from tests.unit_models import VOCABULARY, Language, filled, tie_head

ROWS, STEPS = 24, 2


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
    return tolerance(torch.float64, ROWS, steps=(1 + ALGORITHMS[algorithm].gain) ** STEPS - 1)


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


def spellings(loss_fn, reduce="mean"):
    """Loss and gradients in one call, and by the verbs; the same loss function serves both."""

    def in_one_call(params, *batch):
        return fs.value_and_grad(loss_fn, reduce=reduce)(params, *batch)

    def with_four_verbs(params, *batch):
        weighted = reduce == "weighted"
        differentiate = torch.func.grad_and_value(lambda p: loss_fn(p, *batch), has_aux=weighted)
        grads, loss = differentiate(fs.gather(params))
        count = loss[1] if weighted else None
        grads = fs.scatter_grads(grads, like=params, reduce=reduce, count=count)
        return fs.objective(loss, like=params, reduce=reduce), grads

    return in_one_call, with_four_verbs


def step_of(tx, run):
    """A train step of a spelling."""

    def step(state, batch):
        loss, grads = run(state.params, batch)
        return fs.update(tx, state, grads), loss

    return step


def train_steps(tx, reduce):
    """Both spellings of the train step."""

    def loss_fn(params, batch):
        return LOSSES[reduce](row_losses(fs.tree_map(torch.Tensor.double, fs.gather(params)), batch))

    return [step_of(tx, run) for run in spellings(loss_fn, reduce)]


RUNS = [("SGD", None, "sum"), ("SGD", None, "weighted"), ("AdamW", 0.05, "mean")]


@pytest.mark.rows(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("algorithm, max_norm, reduce", RUNS)
def test_every_strategy_is_one_process(algorithm, max_norm, reduce, world_size):
    """In both spellings, the same on all ranks; without clipping, whose norm is summed otherwise, the same bits."""
    clip = () if max_norm is None else (fs.clip_by_global_norm(max_norm),)
    tx = fs.chain(*clip, fs.from_torch(ALGORITHMS[algorithm].cls, **ALGORITHMS[algorithm].hyper))

    def program():
        on, runs = meshes(), {}
        for (name, strategy), (number, step) in product(STRATEGIES.items(), enumerate(train_steps(tx, reduce))):
            state, losses = fs.TrainState.create(fs.shard(initial(), strategy(on)), tx), []
            for batch in batches():
                state, loss = step(state, one_rank_of(batch, reduce))
                losses.append(loss)
            runs[name, number] = Run(torch.stack(losses), fs.unshard(state.params))
        return runs

    runs, *others = spmd(program, world_size)
    assert_same_bits(others, [runs] * len(others))
    expected = one_process(algorithm, max_norm)
    assert_trees_close(runs, dict.fromkeys(runs, expected), rtol=0, atol=bound(algorithm))
    if max_norm is not None:
        return
    # On two axes sums of four ranks and more have another order.
    for table in [STRATEGIES] if world_size < 4 else [ONE_AXIS, TWO_AXES]:
        first, *alike = (run for (strategy, _), run in runs.items() if strategy in table)
        assert_same_bits(alike, [first] * len(alike))


MAX_NORM, LEAVES = 0.1, len(list(Language(tie_head, hidden=(7,)).parameters()))
# The dtype, the norm to clip by, and how close a run must be: a norm adds leaves in the order of their names and split
# ones by rank, torch's in the order of the module, so that clipped gradients differ by what two such sums do.
CLIPPED = {"rtol": 0.0, "atol": tolerance(torch.float64, 2 * LEAVES, MAX_NORM, steps=2**STEPS - 1)}
OF_DDP = (
    ("SGD", torch.float32, None, {"exact": True}),
    ("AdamW", torch.float64, None, {"exact": True}),
    ("SGD", torch.float64, MAX_NORM, CLIPPED),
)


@pytest.mark.parametrize("shift", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@on_ranks("2 processes")
def test_two_processes_are_ddp_bitwise(shift):
    """DDP halves each gradient before it sums them, which changes no bit of the sum's half."""
    on, generator = meshes(), torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    batches = [torch.randint(VOCABULARY, (2, 4), generator=generator) for _ in range(STEPS)]
    for row, (name, dtype, max_norm, closeness) in enumerate(OF_DDP):
        cls, hyper, _ = ALGORITHMS[name]
        module = filled(Language(tie_head, hidden=(7,)), dtype)
        module.blocks[0].norm.requires_grad_(False)
        model = fs.functionalize(module)
        clip = [] if max_norm is None else [fs.clip_by_global_norm(max_norm)]
        tx = fs.chain(*clip, fs.from_torch(cls, **hyper))
        runs = spellings(model.apply)
        # Each strategy by one row, and by another one with another shift.
        numbered = list(enumerate(STRATEGIES.values()))
        for number, strategy in numbered[(row + shift) % len(OF_DDP) :: len(OF_DDP)]:
            assert_matches_ddp(
                step_of(tx, runs[number % 2]),
                fs.TrainState.create(model.init(strategy(on)), tx),
                batches,
                module=module,
                loss_fn=lambda module, batch: module(batch),
                optimizer=partial(clipping, cls, hyper, max_norm),
                **closeness,
            )


def clipping(cls, hyper, max_norm, parameters):
    """Make an optimizer of torch that clips gradients before it steps."""
    parameters = list(parameters)
    optimizer = cls(parameters, **hyper)
    if max_norm is not None:

        def clip(*_):
            assert nn.utils.clip_grad_norm_(parameters, max_norm) > max_norm

        optimizer.register_step_pre_hook(clip)
    return optimizer
