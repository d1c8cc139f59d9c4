"""Programs that differentiate: first, second and third derivatives, forward and backward."""

import torch
from torch.func import grad, grad_and_value, jvp, vjp, vmap

import fshard as fs
from tests.programs.sides import Program, alike, errors


def gradient(side):
    return {"grads": grad(side.loss)(side.params)}


def gradient_and_value(side):
    grads, value = grad_and_value(side.loss)(side.params)
    return {"value": value, "grads": grads}


def engine(side):
    value, grads = fs.value_and_grad(side.local, reduce="weighted")(side.params)
    return {"value": value, "grads": grads}


def outputs_of(side):
    return lambda p: side.predict(p, side.support[0])


def pulled(side):
    outputs, pull = vjp(outputs_of(side), side.params)
    (grads,) = pull(side.query[0].flatten(1)[:, : outputs.shape[1]])
    return {"rows": side.joined(outputs), "grads": grads}


def pushed(side):
    outputs, rows = jvp(outputs_of(side), (side.params,), (side.directions[0],))
    slope = jvp(side.loss, (side.params,), (side.directions[0],))[1]
    return {"outputs": side.joined(outputs), "rows": side.joined(rows), "slope": slope}


def pushed_gradient(side):
    return {"product": jvp(grad(side.loss), (side.params,), (side.directions[0],))[1]}


def gradient_of_push(side):
    return {"product": grad(lambda p: jvp(side.loss, (p,), (side.directions[0],))[1])(side.params)}


def pulled_gradient(side):
    return {"product": vjp(grad(side.loss), side.params)[1](side.directions[0])[0]}


def pushed_engine(side):
    def run(p):
        return fs.value_and_grad(side.local, reduce="weighted")(p)

    (value, grads), (slope, product) = jvp(run, (side.params,), (side.directions[0],))
    return {"value": value, "grads": grads, "slope": slope, "product": product}


def pushed_dense_gradient(side):
    grads, product = jvp(grad(side.loss), (side.params,), (side.directions[0],))
    value, slope = jvp(side.loss, (side.params,), (side.directions[0],))
    return {"value": value, "grads": grads, "slope": slope, "product": product}


def value_and_product(side):
    return {"value": side.loss(side.params), **pushed_gradient(side)}


def recomputed(side):
    """What a rank computes with whole parameters is computed again, instead of kept."""
    x, y = side.support
    run = fs.remat(lambda p, x, y: errors(side.predict(p, x), y).sum())

    def loss(p):
        return fs.objective((run(p, x, y), torch.tensor(side.count)), like=p, reduce="weighted")

    return {"value": side.loss(side.params), "product": jvp(grad(loss), (side.params,), (side.directions[0],))[1]}


def third(side):
    def curvature(p):
        return jvp(lambda p: jvp(side.loss, (p,), (side.directions[0],))[1], (p,), (side.directions[1],))[1]

    return {"product": grad(curvature)(side.params)}


def third_dense(side):
    """Backward three times."""

    def along(f, direction):
        def slope(p):
            pairs = zip(fs.tree_leaves(grad(f)(p)), fs.tree_leaves(direction))
            return sum((g * d).sum() for g, d in pairs)

        return slope

    return {"product": grad(along(along(side.loss, side.directions[0]), side.directions[1]))(side.params)}


def penalties(side, p):
    """The square of the gradient of each row's error by the row."""

    def error(x, y):
        return errors(side.predict(p, x[None]), y[None])[0]

    return vmap(grad(error))(*side.support).flatten(1).square().sum(1)


def penalty_dense(side):
    return {"grads": grad(lambda p: penalties(side, p).mean())(side.params)}


def penalty_sharded(side):
    def loss(p):
        full = fs.gather(p)
        return fs.objective((penalties(side, full).sum(), torch.tensor(side.count)), like=p, reduce="weighted")

    return {"grads": grad(loss)(side.params)}


DERIVATIVES = {
    "grad": alike(gradient, 2),
    "grad_and_value": alike(gradient_and_value, 2),
    "value_and_grad": Program(gradient_and_value, engine, 2),
    "vjp": alike(pulled, 2),
    "jvp": alike(pushed, 2),
    "hvp, jvp of grad": alike(pushed_gradient, 4),
    "hvp, grad of jvp": Program(pushed_gradient, gradient_of_push, 4),
    "hvp, vjp of grad": Program(pushed_gradient, pulled_gradient, 4),
    "hvp, jvp of value_and_grad": Program(pushed_dense_gradient, pushed_engine, 4),
    "hvp, jvp of grad of fs.remat": Program(value_and_product, recomputed, 4),
    "third derivative": Program(third_dense, third, 8),
    "gradient penalty": Program(penalty_dense, penalty_sharded, 4),
}
