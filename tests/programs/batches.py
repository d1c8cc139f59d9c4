"""Programs under vmap: ensembles, and gradients of each sample with DP-SGD."""

import torch
from torch.func import grad, grad_and_value, jvp, vmap

import fshard as fs
from tests.programs.learning import adam, adam_of
from tests.programs.sides import Program, errors
from tests.programs.subjects import ROWS

RATE = 0.3

# Some rows of every subject have longer gradients, and some shorter ones.
LONGEST, NOISE = 2.0, 0.1

# The same of the members of the function's ensemble.
NORM = 0.4


def ensemble_dense(side):
    """Each member by itself."""
    pairs = [grad_and_value(side.loss)(member) for member in side.members]
    return {"values": torch.stack([value for _, value in pairs]), "grads": side.stack([grads for grads, _ in pairs])}


def ensemble_engine(side):
    values, grads = vmap(fs.value_and_grad(side.local, reduce="weighted"))(side.stack(side.members))
    return {"values": values, "grads": side.whole(grads)}


def trained_dense(side):
    """Each member by itself, clipped as torch.nn.utils does."""
    return {"params": side.stack([adam(clipped_gradient(side.loss), member, RATE, 2) for member in side.members])}


def clipped_gradient(loss):
    def run(params):
        grads = grad(loss)(params)
        norm = torch.stack([leaf.square().sum() for leaf in fs.tree_leaves(grads)]).sum().sqrt()
        return fs.tree_map(lambda g: g * (NORM / (norm + 1e-6)).clamp(max=1), grads)

    return run


def trained_together(side):
    """Whole train steps of an ensemble: each member's gradient is clipped by its own norm."""
    tx = fs.chain(fs.clip_by_global_norm(NORM), adam_of(RATE))

    def train(member):
        state = fs.TrainState.create(member, tx)
        for _ in range(2):
            _, grads = fs.value_and_grad(side.local, reduce="weighted")(state.params)
            state = fs.update(tx, state, grads)
        return state.params

    return {"params": side.whole(vmap(train)(side.stack(side.members)))}


def nested_dense(side):
    rows = [
        side.stack([jvp(grad(side.loss), (member,), (direction,))[1] for direction in side.directions])
        for member in side.members
    ]
    return {"products": side.stack(rows)}


def nested_sharded(side):
    """Every member along every direction; one is stacked in front, the other behind."""
    directions = side.stack(side.directions, dim=-1)

    def products(member):
        return vmap(lambda v: jvp(grad(side.loss), (member,), (v,))[1], in_dims=-1)(directions)

    return {"products": side.whole(vmap(products)(side.stack(side.members)), depth=2)}


def error(side):
    return lambda params, x, y: errors(side.predict(params, x[None]), y[None])[0]


def rows_dense(side):
    """The gradient of each row, one after another."""
    return side.stack([grad(error(side))(side.params, *row) for row in zip(*side.support)])


def rows_sharded(side):
    return vmap(grad(error(side)), in_dims=(None, 0, 0))(fs.gather(side.params), *side.support)


def clipped_sum(rows):
    squares = [leaf.square().unsqueeze(-1).flatten(1).sum(1) for leaf in fs.tree_leaves(rows)]
    scales = (LONGEST / torch.stack(squares).sum(0).sqrt()).clamp(max=1)
    return fs.tree_map(lambda leaf: torch.einsum("n...,n->...", leaf, scales), rows)


def private_dense(side):
    sums, noise = clipped_sum(rows_dense(side)), side.subject.like_params(40)
    params = fs.tree_map(lambda w, g, n: w - RATE * (g + NOISE * n) / ROWS, side.params, sums, noise)
    return {"params": params}


def private_sharded(side):
    """The noise of an element is cut from a whole tensor, and so the same at every world size."""
    sums, noise = clipped_sum(rows_sharded(side)), side.cut(side.subject.like_params(40))
    sums = fs.scatter_grads(sums, like=side.params, reduce="sum")
    grads = fs.tree_map(lambda g, n: (g + NOISE * n) / ROWS, sums, noise)
    tx = fs.sgd(RATE)
    return {"params": fs.update(tx, fs.TrainState.create(side.params, tx), grads).params}


BATCHES = {
    "vmap, value_and_grad": Program(ensemble_dense, ensemble_engine, 2),
    "vmap, train steps": Program(trained_dense, trained_together, 8),
    "vmap, nested": Program(nested_dense, nested_sharded, 4),
    "DP-SGD": Program(private_dense, private_sharded, 4),
}
