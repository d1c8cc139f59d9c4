"""Derivatives that a function takes of itself, also under saved-tensor hooks of its own."""

import re

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import assert_same_bits, normal, one_axis


def values_and_batch():
    """Parameters by each strategy, and this rank's batch."""
    draw, mesh = normal(), one_axis()
    full = {"first": draw(5, 3), "second": draw(3, 4), "third": draw(4)}
    ways = [{"regather": "*second*"}, {"prefetch": 0}, {}, {"regather": False}]
    strategies = [*(fs.zero3(mesh, min_shard_elements=0, **options) for options in ways), fs.ddp(mesh)]
    return [fs.shard(full, strategy) for strategy in strategies], normal(1 + my_rank())(2, 5)


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
    x, full = x.clone().requires_grad_(), [fs.gather(params[name]) for name in ("first", "second", "third")]
    value = (torch.tanh(torch.tanh(x @ full[0]) @ full[1]) * full[2]).square().sum()
    return value + sum(g.square().sum() for g in torch.autograd.grad(value, [x, *full], create_graph=True))


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


@on_ranks(1, 2)
def test_it_is_what_autograd_does_on_full_tensors():
    strategies, x = values_and_batch()
    functions = penalty_on_weights_and_inputs, third_order_without_graph_and_hooks, hooks_and_a_checkpoint
    for f in (*functions, forth_and_back):
        for params in strategies:
            found, expected = fs.value_and_grad(f)(params, x), on_full_tensors(f, params, x)
            assert_same_bits(fs.tree_leaves(found), fs.tree_leaves(expected))
            assert_same_bits(fs.tree_leaves(fs.value_and_grad(f)(params, x)), fs.tree_leaves(found))


def one_step_of_maml(params, x):
    """Takes a step on the shards and gathers what it leads to."""
    _, grads = fs.value_and_grad(perceptron)(params, x)
    squares = sum(tensor.square().sum() for tensor in fs.gather(grads).values())
    return perceptron(fs.tree_map(lambda p, g: p - 0.1 * g, params, grads), x) + squares


def func_inside(params, x):
    weight = fs.gather(params["first"])
    return perceptron(params, x) + grad(lambda w: torch.tanh(x @ w).square().sum())(weight).square().sum()


@on_ranks(1, 2)
def test_derivatives_inside_are_those_of_torch_func(world_size):
    """value_and_grad inside, and torch.func inside, which is refused where weights are gathered again."""
    strategies, x = values_and_batch()
    for number, params in enumerate(strategies):
        for f in (one_step_of_maml, func_inside):
            if f is func_inside and world_size > 1 and number < 3:
                with pytest.raises(RuntimeError, match="saved tensor hooks"):
                    fs.value_and_grad(f)(params, x)
                continue
            grads, value = grad_and_value(lambda p, f=f: fs.objective(f(p, x), like=p))(params)
            # A gradient of a gradient sums over the columns of two layers.
            near = within((value, grads), terms=9, steps=4)
            assert_trees_close(fs.value_and_grad(f)(params, x), (value, grads), **near)


def whole_hessian(full, batches):
    """The Hessian of the mean over ranks, by plain torch: blocks by name."""
    return hessian(lambda p: sum(perceptron(p, x) for x in batches) / len(batches))(full)


def refused_columns(transform, names):
    expected = "expected a leaf that is replicated, got one that is split over 'shard'"
    lines = "\n".join(f"  [{name!r}]: {expected}" for name in names)
    return re.escape(
        f"{transform}: these leaves are sharded, so each rank would differentiate by different elements and the "
        f"columns would be added together\n{lines}\n"
        "To fix: use products with a sharded basis, vmap(lambda v: jvp(gradient, (params,), (v,))[1])(basis), or "
        "gather first and differentiate with respect to full tensors."
    )


def basis_of(params):
    """The standard basis of all elements of a tree, sharded as it is, along a new first dim."""
    full = {name: torch.zeros(leaf.spec.shape, dtype=leaf.local.dtype) for name, leaf in params.items()}
    vectors = []
    for name, leaf in full.items():
        for i in range(leaf.numel()):
            one = torch.zeros(leaf.numel(), dtype=leaf.dtype)
            one[i] = 1
            vectors.append(fs.shard(full | {name: one.view(leaf.shape)}, params[name].spec.transform))
    return fs.tree_map(lambda *leaves: torch.stack(leaves), *vectors)


@on_ranks(1, 2, 3)
def test_hessians(world_size):
    """Elements of shards are others on each rank: jacrev and jacfwd of them are refused, with the form that works."""
    draw = normal()
    full = {"first": draw(3, 2), "second": draw(2, 2), "third": draw(2)}
    batches = [normal(10 + rank)(2, 3) for rank in range(world_size)]
    expected = whole_hessian(full, batches)
    strategies = {
        "ddp": (fs.ddp(one_axis()), []),
        "zero3": (fs.zero3(one_axis(), min_shard_elements=0), ["first", "second", "third"]),
        "zero3 of large leaves": (fs.zero3(one_axis(), min_shard_elements=4), ["first", "second"]),
    }
    for strategy, split in strategies.values():
        params, x = fs.shard(full, strategy), batches[my_rank()]
        gradient = grad(lambda p: fs.objective(perceptron(p, x), like=p))  # noqa: B023
        split = split if world_size > 1 else []
        ways = {"jacrev": jacrev(gradient), "jacfwd": jacfwd(gradient)}
        ways["jacrev in chunks"] = jacrev(gradient, chunk_size=1)
        ways["jacfwd of jacrev"] = hessian(lambda p: fs.objective(perceptron(p, x), like=p))  # noqa: B023
        for name, way in ways.items():
            if split:
                with pytest.raises(ValueError, match=refused_columns(name.split()[0], split)):
                    way(params)
            else:
                blocks = way(params)
                found = {row: {column: blocks[row].local[column].local for column in full} for row in full}
                assert_trees_close(found, expected, **within(expected, terms=9, steps=4))
        # Products with all vectors of a sharded basis: rows of the whole Hessian.
        rows = vmap(lambda v: jvp(gradient, (params,), (v,))[1])(basis_of(params))  # noqa: B023
        number = 0
        for name, leaf in full.items():
            for i in range(leaf.numel()):
                found = fs.unshard(fs.tree_map(lambda each: each[number], rows))  # noqa: B023
                needed = {of: block.flatten(0, leaf.dim() - 1)[i] for of, block in expected[name].items()}
                assert_trees_close(found, needed, **within(expected, terms=9, steps=4))
                number += 1


@on_ranks(2, 3)
def test_gradients_of_each_sample(world_size):
    """By gathered parameters they are this rank's own; by sharded ones sample i of all ranks is added up."""
    strategies, x = values_and_batch()
    for params in strategies:
        full = fs.gather(params)
        each = vmap(grad(lambda p, row: perceptron(p, row[None])), (None, 0))
        own = each(full, x)
        for i, row in enumerate(x):
            expected = grad(lambda p: perceptron(p, row[None]))(full)  # noqa: B023
            assert_trees_close(fs.tree_map(lambda leaf: leaf[i], own), expected, **within(expected, terms=9, steps=4))  # noqa: B023
        added = each(params, x)
        for i in range(len(x)):
            here = fs.scatter_grads(fs.tree_map(lambda leaf: leaf[i], own), like=params, reduce="sum")  # noqa: B023
            assert_trees_close(fs.tree_map(lambda leaf: leaf[i], added), here, **within(here, terms=9, steps=4))  # noqa: B023
