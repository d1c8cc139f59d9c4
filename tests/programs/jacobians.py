"""Programs that make whole matrices: Jacobians and Hessians."""

import torch
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import fshard as fs
from tests.programs.program import Program


def outputs_of(side):
    return lambda p: side.predict(p, side.support[0])


def jacobian_dense(side):
    return {"jacobian": jacrev(outputs_of(side))(side.params)}


def jacobian_forward(side):
    """By a whole tree that every rank holds: torch's basis then moves all ranks along the same parameter."""
    zeros = fs.tree_map(torch.zeros_like, side.subject.params)
    return {"jacobian": jacfwd(lambda full: side.joined(side.predict(side.moved(full), side.support[0])))(zeros)}


def jacobian_backward(side):
    """By the shards themselves."""
    stacked = jacrev(lambda p: side.joined(outputs_of(side)(p)), chunk_size=5)(side.params)
    return {"jacobian": side.whole(stacked, depth=2)}


def hessian_dense(side):
    return {"hessian": matrix(torch.func.hessian(side.loss)(side.params), side.params)}


def hessian_forward(side):
    zeros = fs.tree_map(torch.zeros_like, side.subject.params)
    return {"hessian": matrix(jacfwd(jacrev(lambda full: side.loss(side.moved(full))))(zeros), zeros)}


def hessian_backward(side):
    zeros = fs.tree_map(torch.zeros_like, side.subject.params)
    return {"hessian": matrix(jacrev(jacfwd(lambda full: side.loss(side.moved(full))))(zeros), zeros)}


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
    "jacrev": Program(jacobian_dense, jacobian_backward, 2),
    "hessian, jacfwd of jacrev": Program(hessian_dense, hessian_forward, 4),
    "hessian, jacrev of jacfwd": Program(hessian_dense, hessian_backward, 4),
    "hessian, vmap of hvp": Program(hessian_dense, hessian_by_columns, 4),
}
