"""Every torch.func program on sharded parameters has the numbers of one process."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import fshard as fs
from fshard.testing import spmd
from tests.ranks import on_ranks
from tests.tolerance import within
from tests.trees import STRATEGIES, meshes, normal

# Rows of each rank, by world size: unequal, and one of eight ranks has none.
COUNTS = {1: (11,), 2: (7, 4), 3: (3, 6, 2), 8: (1, 2, 0, 1, 3, 1, 2, 1)}
ROWS, FEATURES, HIDDEN, CLASSES = 11, 5, 7, 3
CHOSEN = {
    **{name: STRATEGIES[name] for name in ("zero2 of every leaf", "hsdp", "last dim", "ddp", "two dims")},
    "zero3": lambda on: fs.zero3(on.line, min_shard_elements=0, bucket_bytes=0),
}
# A smaller eps of Adam would hide a gradient that is wrong by a factor.
RATE, BETAS, ADAM_EPS = 0.3, (0.9, 0.99), 0.1


def function(params, x):
    """A perceptron over a nested tree, one leaf of which has no dims."""
    first, second = params["layers"]
    hidden = torch.tanh(x @ first["weight"] + first["bias"])
    return (hidden @ second["weight"] + second["bias"]) * params["scale"]


@cache
def subject(name):
    """A model's whole parameters, itself as a function of them, and what makes it one of sharded parameters."""
    draw = normal(1)
    if name == "function":
        sizes = ((FEATURES, HIDDEN), (HIDDEN, CLASSES))
        layers = [{"weight": draw(n, m) / 2, "bias": draw(m)} for n, m in sizes]
        return {"layers": layers, "scale": draw()}, function, lambda: lambda p, x: function(fs.gather(p), x)
    module = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).double()
    params = {name: draw(*leaf.shape) / 2 for name, leaf in module.named_parameters()}
    dense = partial(functional_call, module)
    return params, lambda p, x: dense(p, (x,)), lambda: fs.functionalize(module, nn.Linear).apply


def errors(outputs, y):
    """The cross entropy of each row."""
    return outputs.logsumexp(-1) - (outputs * y).sum(-1)


class Side:
    """One process, which has all rows and whole parameters; or a rank, with some rows and sharded ones."""

    def __init__(self, name: str, strategy: str | None = None) -> None:
        params, dense, gathering = subject(name)
        self.on = meshes() if strategy else None
        self.transform = strategy and CHOSEN[strategy](self.on)
        self.predict: Callable[..., Any] = gathering() if strategy else dense
        self.full, self.params = params, self.cut(params)
        rank, counts = (self.on.line.get_rank(), COUNTS[self.on.line.size()]) if strategy else (0, (ROWS,))
        mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        labels = torch.eye(CLASSES, dtype=torch.float64)
        self.support, self.query = (
            (normal(seed)(ROWS, FEATURES)[mine], labels[normal(seed + 1)(ROWS, CLASSES).argmax(-1)][mine])
            for seed in (3, 5)
        )
        self.directions, self.members = self.drawn(7, 2), self.drawn(20, 3)

    def drawn(self, seed, count):
        """Trees like the parameters, the same on both sides."""
        return [self.cut(fs.tree_map(lambda x: normal(seed + i)(*x.shape) / 2, self.full)) for i in range(count)]  # noqa: B023

    def cut(self, tree):
        return fs.shard(tree, self.transform) if self.transform else tree

    def loss(self, params, batch=None):
        """The mean error of all rows."""
        if self.transform is None:
            x, y = batch or self.support
            return errors(self.predict(params, x), y).mean()
        return fs.objective(self.local(params, batch), like=params, reduce="weighted")

    def local(self, params, batch=None):
        x, y = batch or self.support
        return errors(self.predict(params, x), y).sum(), torch.tensor(len(x))

    def engine(self, params, batch=None):
        """A value and gradients: of value_and_grad on a rank."""
        if self.transform is None:
            return grad_and_value(self.loss)(params, batch)[::-1]
        return fs.value_and_grad(self.local, reduce="weighted")(params, batch)

    def moved(self, full):
        """The parameters plus a whole tree that every rank holds, differentiably."""
        if self.transform is None:
            return fs.tree_map(torch.add, self.params, full)
        shift = fs.scatter_grads(
            fs.pcast(full, fs.axis_of(self.on.line), to="varying"), like=self.params, reduce="mean"
        )
        return fs.tree_map(torch.add, self.params, shift)

    def stack(self, trees, dim=0):
        return fs.tree_map(lambda *leaves: torch.stack(leaves, dim), *trees)


def third(side):
    def curvature(p):
        return jvp(lambda p: jvp(side.loss, (p,), (side.directions[0],))[1], (p,), (side.directions[1],))[1]

    return grad(curvature)(side.params)


def whole_hessian(side):
    zeros = fs.tree_map(torch.zeros_like, side.full)
    f = lambda full: side.loss(side.moved(full))  # noqa: E731
    return jacfwd(jacrev(f))(zeros) if side.transform else hessian(f)(zeros)


def adam(side, params, rate):
    """Two updates of Adam: as its paper has it in one process, by fshard on ranks."""
    if side.transform:
        tx = fs.adam(rate, betas=BETAS, eps=ADAM_EPS)
        state = fs.TrainState.create(params, tx)
        for _ in range(2):
            state = fs.update(tx, state, grad(side.loss)(state.params))
        return state.params
    first, second = (fs.tree_map(torch.zeros_like, params) for _ in range(2))
    for count in (1, 2):
        grads = grad(side.loss)(params)
        first = fs.tree_map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, first, grads)
        second = fs.tree_map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g**2, second, grads)
        bias, bias_of_squares = (1 - beta**count for beta in BETAS)
        steps = fs.tree_map(lambda m, v: (m / bias) / ((v / bias_of_squares).sqrt() + ADAM_EPS), first, second)  # noqa: B023
        params = fs.tree_map(lambda w, step: w - rate * step, params, steps)
    return params


def meta_learned(side):
    """MAML: the loss of another batch after updates, by the parameters before them and by the learning rate."""
    rate = torch.tensor(RATE, dtype=torch.float64)
    return grad_and_value(lambda p, r: side.loss(adam(side, p, r), side.query), argnums=(0, 1))(side.params, rate)


def nested(side):
    """Every member along every direction, which are stacked behind."""
    along = side.stack(side.directions, dim=-1)
    products = lambda member: vmap(lambda v: jvp(grad(side.loss), (member,), (v,))[1], in_dims=-1)(along)  # noqa: E731
    stacked = vmap(products)(side.stack(side.members))
    return vmap(vmap(fs.gather))(stacked) if side.transform else stacked


def gathered(side, stacked):
    """Gather a tree of shards with a dim of stacks in front."""
    return vmap(fs.gather)(stacked) if side.transform else stacked


# Programs, and how often each goes through the model.
PROGRAMS = {
    "value_and_grad": (lambda side: side.engine(side.params), 2),
    "vjp": (lambda side: vjp(side.loss, side.params)[1](torch.ones((), dtype=torch.float64)), 2),
    "jvp": (lambda side: jvp(side.loss, (side.params,), (side.directions[0],)), 2),
    "hvp": (lambda side: jvp(grad(side.loss), (side.params,), (side.directions[0],))[1], 4),
    "jvp of value_and_grad": (lambda side: jvp(side.engine, (side.params,), (side.directions[0],)), 4),
    "third derivative": (third, 8),
    "hessian": (whole_hessian, 4),
    "vmap of value_and_grad": (lambda side: gathered(side, vmap(side.engine)(side.stack(side.members))[1]), 2),
    "vmap, nested": (nested, 4),
    "MAML": (meta_learned, 12),
}


def check(name, program, strategy, expected):
    """Assert on this rank that a program has one process's results."""
    run, sweeps = PROGRAMS[program]
    actual = fs.unshard(run(Side(name, strategy)))
    # Each time through the model sums over rows and over the units of a layer.
    bound = within(expected, ROWS + FEATURES + HIDDEN + CLASSES, steps=sweeps)["atol"]
    for leaf, expected_leaf in zip(fs.tree_leaves(actual), fs.tree_leaves(expected), strict=True):
        assert leaf.shape == expected_leaf.shape
        assert float((leaf.detach() - expected_leaf).abs().max()) <= bound, (program, name, strategy)


@pytest.mark.rows(2)
@pytest.mark.parametrize("strategy", CHOSEN)
@pytest.mark.parametrize("world_size", COUNTS)
@pytest.mark.parametrize("name", ("function", "module"))
def test_program(name, world_size, strategy):
    expected = {program: run(Side(name)) for program, (run, _) in PROGRAMS.items()}

    def check_all():
        for program, results in expected.items():
            check(name, program, strategy, results)

    spmd(check_all, world_size)


@pytest.mark.slow
@on_ranks("2 processes")
def test_linearize_is_refused_on_several_ranks():
    """It would fold collectives away; traced by threads, others could be in its place, hence processes."""
    side = Side("function", "zero3")
    text = r"torch\.func\.linearize runs collectives once .* Use torch\.func\.jvp for each tangent"
    with pytest.raises(ValueError, match=text):
        linearize(side.loss, side.params)
