"""Programs that differentiate: first, second and third derivatives, forward and backward."""

from torch.func import grad, grad_and_value, jvp, vjp

import fshard as fs
from tests.programs.sides import Program, alike


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


def pushed_engine(side):
    def run(p):
        return fs.value_and_grad(side.local, reduce="weighted")(p)

    (value, grads), (slope, product) = jvp(run, (side.params,), (side.directions[0],))
    return {"value": value, "grads": grads, "slope": slope, "product": product}


def pushed_dense_gradient(side):
    grads, product = jvp(grad(side.loss), (side.params,), (side.directions[0],))
    value, slope = jvp(side.loss, (side.params,), (side.directions[0],))
    return {"value": value, "grads": grads, "slope": slope, "product": product}


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


DERIVATIVES = {
    "grad_and_value": alike(gradient_and_value, 2),
    "value_and_grad": Program(gradient_and_value, engine, 2),
    "vjp": alike(pulled, 2),
    "jvp": alike(pushed, 2),
    "hvp, jvp of grad": alike(pushed_gradient, 4),
    "hvp, jvp of value_and_grad": Program(pushed_dense_gradient, pushed_engine, 4),
    "third derivative": Program(third_dense, third, 8),
}
