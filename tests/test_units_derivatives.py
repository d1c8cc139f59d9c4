"""Losses that differentiate, or run models several times, have one process's numbers."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import one_axis
from tests.unit_models import (
    BOUND,
    HIDDEN,
    MORE_RULES,
    WIDTH,
    Block,
    Perceptron,
    assert_one_process_on_ranks,
    by_strategies,
    filled,
    full,
    one_process,
    vectors,
    zero3,
)


class Critic(nn.Module):
    """Scores vectors; `checkpointed` computes its middle again in the backward."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, (13, HIDDEN, 11)))
        self.head = nn.Linear(WIDTH, 1)
        self.head.weight.requires_grad_(False)
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(torch.tanh(x)).square()


class Penalised(Critic):
    """Differentiates itself in its forward."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        score = super().forward(x)
        (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (grad.square().sum(-1) - 1).square().mean()


def penalised(run, x):
    """WGAN-GP: the gradient with respect to the inputs is part of the loss."""
    x = x.detach().requires_grad_()
    score = run(x)
    (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + (grad.square().sum(-1) - 1).square().mean()


def penalised_twice(run, x):
    """A gradient of a gradient, next to other uses of the same units."""
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x, create_graph=True)
    return run(x).mean() + grad.square().mean() + second.square().mean()


def first_order(run, x):
    """Adversarial inputs: a gradient that the loss is not differentiated through."""
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(run(x).sum(), x)
    return run(x + 0.1 * grad.sign()).mean()


def jacobian_vector(run, x):
    """The product of a Jacobian with a vector, by differentiating twice."""
    x, y = x.detach().requires_grad_(), torch.ones((*x.shape[:-1], 1), dtype=x.dtype, requires_grad=True)
    (pulled,) = torch.autograd.grad(run(x), x, y, create_graph=True)
    (pushed,) = torch.autograd.grad(pulled, y, torch.ones_like(pulled), create_graph=True)
    return pushed.square().mean()


def without_gradient(run, x):
    with torch.no_grad():
        return run(x).mean()


def checkpointed(function, x):
    return checkpoint(function, x.clone().requires_grad_(), use_reentrant=False).mean()


# Each with the model that it runs.
LOSSES = {
    "penalised": (Critic, penalised),
    "penalised, checkpointed": (lambda: Critic(checkpointed=True), penalised),
    "penalised inside": (Penalised, lambda run, x: run(x)),
    "penalised twice": (Critic, penalised_twice),
    "first order": (Critic, first_order),
    "first order, checkpointed": (lambda: Critic(checkpointed=True), first_order),
    "jacobian times vector": (Critic, jacobian_vector),
    "twice": (Critic, lambda run, x: run(x).mean() + run(x.flip(0) * 2).square().mean()),
    "twice, one of the other": (Critic, lambda run, x: run(x * run(x)).mean()),
    "twice, one unused": (Critic, lambda run, x: (run(x), run(2 * x))[1].mean()),
    "thrice, checkpointed": (lambda: Critic(checkpointed=True), lambda run, x: run(x * run(x * run(x))).mean()),
    "in a checkpoint": (Critic, lambda run, x: checkpointed(run, x)),
    "twice in a checkpoint": (Critic, lambda run, x: checkpointed(lambda x: run(x * run(x)), x)),
    "its own weight": (Critic, lambda run, x: (run(x).detach() * run(x)).mean()),
    "without gradient": (Critic, lambda run, x: run(x).mean() + without_gradient(run, x)),
}


def applied(loss_of):
    return lambda apply, params, x: loss_of(lambda x: apply(params, x), x)


# A critic has no embedding.
CRITIC_RULES = MORE_RULES | {"a list": MORE_RULES["a list"][1:]}


@pytest.mark.rows(1)
@by_strategies("rule", ("every module",), CRITIC_RULES)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, rule, strategies):
    build, loss_of = LOSSES[name]
    assert_one_process_on_ranks(filled(build()), vectors, CRITIC_RULES[rule], strategies, loss=applied(loss_of))


def distilled(student, teacher, x):
    """Both are trained, and a unit of one runs between units of the other."""
    return (student(x) - teacher(x)).square().mean() + student(teacher(x) * x).mean()


@pytest.mark.rows(1)
@pytest.mark.parametrize("together", (True, False))
@on_ranks(1, 2, 3)
def test_two_models_in_one_loss(world_size, together):
    """Their parameters are one tree, or two arguments."""
    modules = {"student": filled(Critic()), "teacher": filled(nn.Sequential(Block(), Perceptron()))}
    batches = vectors(world_size)

    def by_model(leaves):
        return {n: {k.removeprefix(f"{n}."): v for k, v in leaves.items() if k.startswith(n)} for n in modules}

    def objective(apply, leaves, batches):
        parts = by_model(leaves)
        runs = [lambda x, n=n: functional_call(modules[n], parts[n], (x,)) for n in modules]
        return sum(distilled(*runs, x) for (x,) in batches) / len(batches)

    value, grads = one_process(nn.ModuleDict(modules), batches, objective)
    expected = value, by_model(grads)
    mesh = one_axis()
    (x,) = batches[mesh.get_rank()]
    models = {name: fs.functionalize(module, Block) for name, module in modules.items()}

    def loss(student, teacher):
        params = {"student": student, "teacher": teacher}
        return distilled(*(lambda x, n=n: models[n].apply(params[n], x) for n in models), x)

    for prefetch in (0, 1, 2):
        params = {name: model.init(zero3(prefetch=prefetch)(mesh)) for name, model in models.items()}
        if together:
            found = full(fs.value_and_grad(lambda p: loss(**p))(params))
        else:
            found, pair = full(fs.value_and_grad(loss, argnums=(0, 1))(*params.values()))
            found = found, dict(zip(models, pair))
        assert_trees_close(found, expected, rtol=0, atol=BOUND)
