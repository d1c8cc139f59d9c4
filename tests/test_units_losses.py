"""Losses that differentiate, run models several times or compute with shards have one process's numbers."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.ranks import on_ranks
from tests.trees import normal, one_axis
from tests.unit_models import (
    BOUND,
    CHOSEN,
    HIDDEN,
    MORE_RULES,
    RULES,
    WIDTH,
    Block,
    Language,
    Perceptron,
    assert_one_process_on_ranks,
    by_strategies,
    filled,
    full,
    mean_of,
    of_module,
    one_process,
    tokens,
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
        return penalised(super().forward, x)


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


# A critic has no embedding.
CRITIC_RULES = MORE_RULES | {"a list": MORE_RULES["a list"][1:]}


@pytest.mark.rows(1)
@by_strategies("rule", ("every module",), CRITIC_RULES)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, rule, strategies):
    build, loss_of = LOSSES[name]

    def loss(apply, params, x):
        return loss_of(lambda x: apply(params, x), x)

    assert_one_process_on_ranks(filled(build()), vectors, CRITIC_RULES[rule], strategies, loss=loss)


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


RATE = 0.1


class Regression(nn.Module):
    """Blocks whose output is the loss; `checkpointed` computes each again in the backward."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, (13, HIDDEN, 11)))
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return torch.tanh(x * self.scale).square().mean()


def scaled(params, names=("",)):
    """Some parameters made anew of what they are."""
    chosen = {name: leaf for name, leaf in params.items() if any(part in name for part in names)}
    return dict(params) | fs.tree_map(lambda x: 1.5 * torch.tanh(x), chosen)


def tied(model):
    model.head.weight = model.embedding.weight


OF_SHARDS = {
    "all of them": lambda apply, p, *batch: apply(scaled(p), *batch),
    "some of them": lambda apply, p, *batch: apply(scaled(p, ["blocks.1", "scale"]), *batch),
    "one of a unit": lambda apply, p, *batch: apply(scaled(p, ["inner.weight"]), *batch),
    "and as they are": lambda apply, p, *batch: apply(scaled(p), *batch) + apply(p, *batch),
    "twice": lambda apply, p, *batch: apply(q := scaled(p), *batch) * apply(q, *batch) ** 2,
    "of what was made": lambda apply, p, *batch: apply(scaled(scaled(p)), *batch),
    "target without gradient": lambda apply, p, *batch: (
        (apply(p, *batch) - apply(fs.tree_map(lambda x: x.detach() * 0.9, p), *batch)) ** 2
    ),
    "gathered before": lambda apply, p, *batch: apply(fs.gather(p), *batch),
    "gathered after maths": lambda apply, p, *batch: apply(scaled(fs.gather(scaled(p))), *batch),
}
# functional_call puts parameters back before a checkpoint computes again, so one process goes without checkpoints.
SHARDED_MODELS = {
    "language": (Language, Language, tokens),
    "tied": (lambda: Language(tied), lambda: Language(tied), tokens),
    "regression": (Regression, Regression, vectors),
    "regression, checkpointed": (lambda: Regression(checkpointed=True), Regression, vectors),
}


@pytest.mark.rows(2)
@pytest.mark.parametrize("model", SHARDED_MODELS)
@pytest.mark.parametrize("name", OF_SHARDS)
def test_parameters_made_of_shards(name, model):
    build, plain, batches = SHARDED_MODELS[model]
    module, reference = filled(build()), filled(plain())
    options = dict(loss=OF_SHARDS[name], reference=reference)
    assert_one_process_on_ranks(module, batches, RULES["two classes"], CHOSEN, **options)


def square_of_shards(params):
    """Each rank's part of the sum of squares; padding is zero."""
    return sum(leaf.square().sum() for leaf in fs.tree_leaves(params))


def regularised(apply, params, *batch):
    """Ranks' parts add up to one regulariser, so the mean of the losses has a part of it."""
    return apply(params, *batch) + RATE * square_of_shards(params)


def regularised_once(apply, params, batches):
    return mean_of(of_module)(apply, params, batches) + RATE * square_of_shards(params) / len(batches)


def adapted_by_model_value_and_grad(apply, params, x):
    """A train step inside the loss: the inner gradients are those of the mean over ranks."""
    _, grads = fs.value_and_grad(lambda p: apply(p, x), reduce="sum")(params)
    return apply(fs.tree_map(lambda p, g: p - RATE * g, params, grads), x)


def adapted(apply, params, batches):
    inner = sum(apply(params, *batch) for batch in batches)
    grads = dict(zip(params, torch.autograd.grad(inner, list(params.values()), create_graph=True)))
    moved = {name: leaf - RATE * grads[name] for name, leaf in params.items()}
    return mean_of(of_module)(apply, moved, batches)


ADAPTED = (adapted_by_model_value_and_grad,)


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    "loss, objective, rule",
    [
        *((regularised, regularised_once, rule) for rule in RULES),
        *((loss, adapted, rule) for loss in ADAPTED for rule in ("a class", "two classes")),
    ],
)
def test_losses_on_shards(loss, objective, rule):
    """A regulariser, and MAML: the gradient goes through the inner gradient of a step inside the loss."""
    options = dict(loss=loss, objective=objective)
    assert_one_process_on_ranks(filled(Regression()), vectors, RULES[rule], CHOSEN, **options)


@pytest.mark.rows(1)
@pytest.mark.parametrize("rule", ("a class", "every module"))
@pytest.mark.parametrize("which", ("trained", "frozen", "no argument"))
def test_low_rank_adaptation(which, rule):
    """LoRA: rows of a weight and of its adapter are split alike, so each rank merges its own."""
    module = filled(Regression())
    names = [name for name, p in module.named_parameters() if p.dim() == 2]
    draw = normal(5)
    base = {name: p.detach() for name, p in module.named_parameters()}
    adapters = {name: {"a": draw(base[name].shape[0], 2), "b": draw(2, base[name].shape[1]) / 8} for name in names}

    def objective(base, adapters, batches):
        merged = base | {name: base[name] + ab["a"] @ ab["b"] for name, ab in adapters.items()}
        return sum(functional_call(module, merged, batch) for batch in batches) / len(batches)

    for world_size, strategies in CHOSEN.items():
        batches = vectors(world_size)
        expected_grads, expected = torch.func.grad_and_value(objective, argnums=(0, 1))(base, adapters, batches)
        expected_grads = (expected_grads[0] if which == "trained" else dict.fromkeys(base), expected_grads[1])

        def program(strategies=strategies, batches=batches, expected=(expected, expected_grads)):
            mesh, model = one_axis(), fs.functionalize(module, RULES[rule])
            (x,) = batches[mesh.get_rank()]

            def merge(w, a, b):
                # A frozen leaf that something trained was added to is no longer frozen.
                return replace(w, local=w.local + a.local @ b, spec=replace(w.spec, frozen=False))

            def loss(base, adapters):
                b = fs.gather({name: ab["b"] for name, ab in adapters.items()})
                merged = {name: merge(base[name], ab["a"], b[name]) for name, ab in adapters.items()}
                return model.apply(base | merged, x)

            for strategy in strategies.values():
                params = fs.shard(base, strategy(mesh), frozen=() if which == "trained" else "*")
                delta = fs.shard(adapters, strategy(mesh))
                if which == "no argument":
                    value, grads = fs.value_and_grad(lambda adapters: loss(params, adapters))(delta)  # noqa: B023
                    found = value, (dict.fromkeys(base), grads)
                else:
                    found = fs.value_and_grad(loss, argnums=(0, 1))(params, delta)
                assert_trees_close(full(found), expected, rtol=0, atol=BOUND)

        spmd(program, world_size)


@on_ranks(1, 2, 3)
def test_interpolation_of_two_arguments(world_size):
    """Both trees are parameters, and the model runs on a mixture of them."""
    module, other = filled(Regression()), filled(Regression())
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.7)
    batches = vectors(world_size)
    one, two = ({name: p.detach() for name, p in m.named_parameters()} for m in (module, other))

    def mixed(p, q, x):
        return functional_call(module, {name: p[name] * 0.3 + q[name] * 0.7 for name in p}, (x,))

    grads, value = torch.func.grad_and_value(
        lambda p, q: sum(mixed(p, q, x) for (x,) in batches) / world_size, argnums=(0, 1)
    )(one, two)
    mesh, model = one_axis(), fs.functionalize(module, Block)
    (x,) = batches[mesh.get_rank()]
    params = [fs.shard(tree, zero3()(mesh)) for tree in (one, two)]

    def loss(p, q):
        return model.apply(fs.tree_map(lambda a, b: a * 0.3 + b * 0.7, p, q), x)

    assert_trees_close(full(fs.value_and_grad(loss, argnums=(0, 1))(*params)), (value, grads), rtol=0, atol=BOUND)
