"""Derivatives that a function takes of itself, also under saved-tensor hooks of its own."""

import re
from functools import partial
from itertools import product

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import assert_same_bits, normal, one_axis

REGATHERED = (
    partial(fs.zero3, min_shard_elements=0),
    partial(fs.zero3, min_shard_elements=0, prefetch=0),
    partial(fs.zero3, min_shard_elements=0, regather="*second*"),
)
KEPT = (partial(fs.zero3, min_shard_elements=0, regather=False), fs.ddp)


def params_by(strategies):
    """The same parameters by each strategy."""
    draw = normal()
    full = {"first": draw(5, 3), "second": draw(3, 4), "third": draw(4)}
    return [fs.shard(full, strategy(one_axis())) for strategy in strategies]


def batch():
    return normal(1 + my_rank())(2, 5)


def perceptron(params, x):
    h = torch.tanh(x @ fs.gather(params["first"]))
    h = torch.tanh(h @ fs.gather(params["second"]))
    return (h * fs.gather(params["third"])).square().sum()


def on_full_tensors(f, params, *args):
    """What f's objective and gradients are by autograd alone, on full tensors."""
    full = fs.tree_map(lambda tensor: tensor.clone().requires_grad_(), fs.unshard(params))
    value = f(full, *args)
    grads = dict(zip(full, torch.autograd.grad(value, list(full.values()))))
    return fs.objective(value.detach(), like=params), fs.scatter_grads(grads, like=params)


def penalty_on_weights_and_inputs(params, x):
    """Differentiates twice with respect to gathered weights, and twice through them."""
    x = x.clone().requires_grad_()
    first, second, third = weights = [fs.gather(params[name]) for name in ("first", "second", "third")]
    value = (torch.tanh(torch.tanh(x @ first) @ second) * third).square().sum()
    return value + sum(g.square().sum() for g in torch.autograd.grad(value, [x, *weights], create_graph=True))


def third_order_without_graph_and_hooks(params, x):
    """As an adversarial example is made, before the loss proper, with hooks entered and left between two gathers."""
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(perceptron(params, x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    with save_on_cpu():
        h = torch.tanh((x.detach() + 0.1 * second) @ fs.gather(params["first"]))
    h = torch.tanh(h @ fs.gather(params["second"]))
    with saved_tensors_hooks(lambda tensor: [tensor.clone()], lambda box: box[0]):
        return (h * fs.gather(params["third"])).square().sum()


def hooks_and_a_checkpoint(params, x):
    with save_on_cpu():
        return checkpoint(perceptron, params, x, use_reentrant=False)


def forth_and_back(params, x):
    """Gathers again what it has gathered before, in another order, and on one rank more of it."""
    for name in ("first", "second"):
        x = torch.tanh(x @ fs.gather(params[name]))
    for name in ("second", "first"):
        x = torch.tanh(x @ fs.gather(params[name]).T)
    return x.square().sum() + fs.gather(params["third"]).sum() * (my_rank() == 0)


@on_ranks(2)
def test_it_is_what_autograd_does_on_full_tensors():
    x = batch()
    functions = penalty_on_weights_and_inputs, third_order_without_graph_and_hooks, hooks_and_a_checkpoint
    for f, params in product((*functions, forth_and_back), params_by(REGATHERED + KEPT)):
        step = fs.value_and_grad(f)
        result, expected = step(params, x), on_full_tensors(f, params, x)
        assert_same_bits(fs.tree_leaves(result), fs.tree_leaves(expected))
        assert_same_bits(fs.tree_leaves(step(params, x)), fs.tree_leaves(result))


def func_inside(params, x):
    weight = fs.gather(params["first"])
    return perceptron(params, x) + grad(lambda w: torch.tanh(x @ w).square().sum())(weight).square().sum()


@on_ranks(2)
def test_torch_func_inside_is_refused_where_weights_are_gathered_again():
    x = batch()
    for params in params_by(REGATHERED):
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            fs.value_and_grad(func_inside)(params, x)
    for params in params_by(KEPT):
        grads, value = grad_and_value(lambda p: fs.objective(func_inside(p, x), like=p))(params)
        # A gradient of a gradient sums over the columns of two layers.
        near = within((value, grads), terms=9, steps=4)
        assert_trees_close(fs.value_and_grad(func_inside)(params, x), (value, grads), **near)


def refused_columns(transform, names):
    expected = "expected a leaf that is replicated, got one that is split over 'shard'"
    lines = "\n".join(f"  [{name!r}]: {expected}" for name in names)
    return re.escape(
        f"{transform}: these leaves are sharded, so each rank would differentiate by different elements and the "
        f"columns would be added together\n{lines}\n"
        "To fix: use products with a sharded basis, vmap(lambda v: jvp(gradient, (params,), (v,))[1])(basis), or "
        "gather first and differentiate with respect to full tensors."
    )


# Strategies, and the leaves that each splits.
SPLIT = (
    (fs.ddp, []),
    (partial(fs.zero3, min_shard_elements=0), ["first", "second", "third"]),
    (partial(fs.zero3, min_shard_elements=13), ["first"]),
)


@on_ranks(2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3)))
def test_hessians(world_size):
    """Elements of shards are others on each rank: jacrev and jacfwd of them are refused, with the form that works."""
    x = batch()
    batches = [normal(1 + rank)(2, 5) for rank in range(world_size)]
    (full,) = params_by([fs.ddp])
    expected = hessian(lambda p: sum(perceptron(p, x) for x in batches) / world_size)(fs.gather(full))
    for strategy, names in SPLIT:
        (params,) = params_by([strategy])
        objective = lambda p: fs.objective(perceptron(p, x), like=p)  # noqa: E731
        gradient = grad(objective)
        chunked = jacrev(gradient, chunk_size=1)
        ways = [("jacrev", jacrev(gradient)), ("jacfwd", jacfwd(gradient)), ("jacrev", chunked)]
        for name, way in [*ways, ("jacfwd", hessian(objective))]:
            if names and world_size > 1:
                with pytest.raises(ValueError, match=refused_columns(name, names)):
                    way(params)
            else:
                blocks = way(params)
                dense = {row: {column: blocks[row].local[column].local for column in params} for row in params}
                assert_trees_close(dense, expected, **within(expected, terms=9, steps=4))
