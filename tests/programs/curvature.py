"""Programs of whole matrices and of second order: Jacobians, Hessians, conjugate gradients."""

from functools import cache

import torch
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import fshard as fs
from tests.programs.derivatives import outputs_of
from tests.programs.sides import Dense, Program
from tests.programs.subjects import subject


def jacobian_dense(side):
    return {"jacobian": jacrev(outputs_of(side))(side.params)}


def jacobian_forward(side):
    """By a whole tree that every rank holds: torch's basis then moves all ranks along the same parameter."""
    zeros = fs.tree_map(torch.zeros_like, side.subject.params)
    return {"jacobian": jacfwd(lambda full: side.joined(side.predict(side.moved(full), side.support[0])))(zeros)}


def hessian_dense(side):
    return {"hessian": matrix(torch.func.hessian(side.loss)(side.params), side.params)}


def hessian_forward(side):
    zeros = fs.tree_map(torch.zeros_like, side.subject.params)
    return {"hessian": matrix(jacfwd(jacrev(lambda full: side.loss(side.moved(full))))(zeros), zeros)}


def hessian_by_columns(side):
    """By products with the shards of every direction, all at once."""
    full = side.subject.basis()
    cut = [side.cut(fs.tree_map(lambda leaf: leaf[i], full)) for i in range(side.subject.size)]  # noqa: B023
    columns = vmap(lambda v: jvp(grad(side.loss), (side.params,), (v,))[1])(side.stack(cut))
    whole = side.whole(columns)
    return {"hessian": torch.cat([leaf.unsqueeze(-1).flatten(1) for leaf in fs.tree_leaves(whole)], 1)}


def matrix(hessian, params):
    """A tree of trees as one matrix."""
    sizes = [leaf.numel() for leaf in fs.tree_leaves(params)]
    blocks = fs.tree_leaves(hessian)
    rows = [blocks[i * len(sizes) : (i + 1) * len(sizes)] for i in range(len(sizes))]
    return torch.cat(
        [torch.cat([block.reshape(n, m) for block, m in zip(row, sizes)], 1) for row, n in zip(rows, sizes)]
    )


JACOBIANS = {
    "jacfwd": Program(jacobian_dense, jacobian_forward, 2),
    "hessian, jacfwd of jacrev": Program(hessian_dense, hessian_forward, 4),
    "hessian, vmap of hvp": Program(hessian_dense, hessian_by_columns, 4),
}


# Added to the Hessian, in multiples of its norm: all eigenvalues then lie between 3 and 5 norms. An iteration shrinks
# the error by (sqrt(5 / 3) - 1) / (sqrt(5 / 3) + 1), and so these many shrink it to less than a rounding.
DAMPING, CONDITION, ITERATIONS = 4.0, 5 / 3, 18


def vector(tree):
    return torch.cat([leaf.flatten() for leaf in fs.tree_leaves(tree)])


def like(tree, flat):
    pieces = iter(flat.split([leaf.numel() for leaf in fs.tree_leaves(tree)]))
    return fs.tree_map(lambda leaf: next(pieces).reshape(leaf.shape), tree)


@cache
def norm_of(name):
    """The largest magnitude of the Hessian's eigenvalues, which both sides are given."""
    hessian = hessian_dense(Dense(subject(name)))["hessian"]
    return torch.linalg.matrix_norm(hessian, 2).item()


def solved_dense(side):
    hessian = hessian_dense(side)["hessian"]
    damped = hessian + DAMPING * norm_of(side.subject.name) * torch.eye(side.subject.size, dtype=hessian.dtype)
    return {"solution": like(side.params, torch.linalg.solve(damped, vector(side.directions[0])))}


def solved_sharded(side):
    """Conjugate gradients, as Hestenes and Stiefel have them; the Hessian is never made."""
    damping = DAMPING * norm_of(side.subject.name)

    def damped(v):
        product = jvp(grad(side.loss), (side.params,), (v,))[1]
        return fs.tree_map(lambda h, v: h + damping * v, product, v)

    residual = direction = side.directions[0]
    solution, square = fs.tree_map(torch.zeros_like, residual), side.dot(residual, residual)
    for _ in range(ITERATIONS):
        product = damped(direction)
        step = square / side.dot(direction, product)
        solution = fs.tree_map(lambda s, d: s + step * d, solution, direction)  # noqa: B023
        residual = fs.tree_map(lambda r, h: r - step * h, residual, product)  # noqa: B023
        before, square = square, side.dot(residual, residual)
        direction = fs.tree_map(lambda r, d: r + square / before * d, residual, direction)  # noqa: B023
    return {"solution": solution}


CURVATURE = {
    "conjugate gradients": Program(solved_dense, solved_sharded, CONDITION * 4 * ITERATIONS),
}
