"""A program that differentiates through updates: MAML, by the parameters and the learning rate."""

import torch
from torch.func import grad, grad_and_value

import fshard as fs
from tests.programs.sides import Program

RATE, UPDATES = 0.3, 3

# As large as gradients are, because a smaller one would hide a gradient that is wrong by a factor.
ADAM_EPS, BETAS = 1e-1, (0.9, 0.99)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def root(square):
    """The root, with a derivative of zero at zero: keys' biases have no gradient."""
    return torch.where(square == 0, 0, torch.where(square == 0, 1, square).sqrt())


def adam(gradient, params, rate, updates=UPDATES):
    """Adam as its paper has it."""
    first, second = (fs.tree_map(torch.zeros_like, params) for _ in range(2))
    for t in range(1, updates + 1):
        grads = gradient(params)
        first = fs.tree_map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, first, grads)
        second = fs.tree_map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g**2, second, grads)
        bias = [1 - beta**t for beta in BETAS]
        params = fs.tree_map(
            lambda w, m, v: w - rate * (m / bias[0]) / (root(v / bias[1]) + ADAM_EPS),  # noqa: B023
            params,
            first,
            second,
        )
    return params


def updated(gradient, params, rate, updates=UPDATES):
    """The same by fshard."""
    tx = adam_of(rate)
    state = fs.TrainState.create(params, tx)
    for _ in range(updates):
        state = fs.update(tx, state, gradient(state.params))
    return state.params


def adam_of(rate):
    return fs.adam(rate, betas=BETAS, eps=ADAM_EPS)


def learned(train):
    """The loss of another batch after updates, by the parameters before them and by the learning rate."""

    def run(side):
        def loss(params, rate):
            return side.loss(train(grad(side.loss), params, rate), side.query)

        (grads, slope), value = grad_and_value(loss, argnums=(0, 1))(side.params, number(RATE))
        return {"value": value, "grads": grads, "slope": slope}

    return run


# Each update goes through the model forward and back, and so does the loss; their gradient as often again.
SWEEPS = 2 * 2 * (UPDATES + 1)

LEARNING = {
    "learned rate, fs.adam": Program(learned(adam), learned(updated), SWEEPS),
}
