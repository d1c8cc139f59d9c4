"""Programs that differentiate through updates: MAML and learned learning rates."""

import torch
from torch.func import grad, grad_and_value, vmap

import fshard as fs
from tests.programs.sides import Program, alike

RATE, MOMENTUM, UPDATES = 0.3, 0.9, 3

# As large as gradients are, because a smaller one would hide a gradient that is wrong by a factor.
ADAM_EPS, BETAS = 1e-1, (0.9, 0.99)
RATES = (0.05, 0.1, 0.4)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def heavy_ball(gradient, params, rate, updates=UPDATES):
    """SGD with momentum as its paper has it."""
    velocity = fs.tree_map(torch.zeros_like, params)
    for _ in range(updates):
        velocity = fs.tree_map(lambda v, g: MOMENTUM * v + g, velocity, gradient(params))
        params = fs.tree_map(lambda w, v: w - rate * v, params, velocity)
    return params


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


def updated(make, gradient, params, rate, updates=UPDATES):
    """The parameters after updates of an optimizer of fshard's."""
    tx = make(rate)
    state = fs.TrainState.create(params, tx)
    for _ in range(updates):
        state = fs.update(tx, state, gradient(state.params))
    return state.params


def sgd_of(rate):
    return fs.sgd(rate, momentum=MOMENTUM)


def adam_of(rate):
    return fs.adam(rate, betas=BETAS, eps=ADAM_EPS)


def adapted_by_hand(side):
    def loss(params):
        inner = grad(side.loss)(params)
        return side.loss(fs.tree_map(lambda w, g: w - RATE * g, params, inner), side.query)

    grads, value = grad_and_value(loss)(side.params)
    return {"value": value, "grads": grads}


def adapted_by_engine(side):
    """Both the inner and the outer gradient by value_and_grad."""

    def loss(params):
        _, inner = fs.value_and_grad(side.local, reduce="weighted")(params)
        return side.local(fs.tree_map(lambda w, g: w - RATE * g, params, inner), side.query)

    value, grads = fs.value_and_grad(loss, reduce="weighted")(side.params)
    return {"value": value, "grads": grads}


def adapted(train):
    """MAML: the loss of another batch after updates, by the parameters before them."""

    def run(side):
        grads, value = grad_and_value(lambda p: side.loss(train(grad(side.loss), p, RATE), side.query))(side.params)
        return {"value": value, "grads": grads}

    return run


def learned(train):
    """The same by the learning rate too."""

    def run(side):
        def loss(params, rate):
            return side.loss(train(grad(side.loss), params, rate), side.query)

        (grads, slope), value = grad_and_value(loss, argnums=(0, 1))(side.params, number(RATE))
        return {"value": value, "grads": grads, "slope": slope}

    return run


def rates_dense(side):
    run = grad_and_value(lambda rate: side.loss(heavy_ball(grad(side.loss), side.params, rate, 2), side.query))
    slopes, values = zip(*(run(number(rate)) for rate in RATES))
    return {"values": torch.stack(values), "slopes": torch.stack(slopes)}


def rates_sharded(side):
    """Several learning rates at once."""
    run = grad_and_value(lambda rate: side.loss(updated(sgd_of, grad(side.loss), side.params, rate, 2), side.query))
    slopes, values = vmap(run)(number(RATES))
    return {"values": values, "slopes": slopes}


def with_optimizer(make):
    return lambda gradient, params, rate: updated(make, gradient, params, rate)


# Each update goes through the model forward and back, and so does the loss; their gradient as often again.
SWEEPS = 2 * 2 * (UPDATES + 1)

LEARNING = {
    "MAML by hand": alike(adapted_by_hand, 8),
    "MAML by value_and_grad": Program(adapted_by_hand, adapted_by_engine, 8),
    "MAML, fs.sgd": Program(adapted(heavy_ball), adapted(with_optimizer(sgd_of)), SWEEPS),
    "MAML, fs.adam": Program(adapted(adam), adapted(with_optimizer(adam_of)), SWEEPS),
    "learned rate, fs.sgd": Program(learned(heavy_ball), learned(with_optimizer(sgd_of)), SWEEPS),
    "learned rate, fs.adam": Program(learned(adam), learned(with_optimizer(adam_of)), SWEEPS),
    "learned rates, vmap": Program(rates_dense, rates_sharded, 2 * 2 * 3),
}
