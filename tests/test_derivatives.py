"""Derivatives that a function takes of itself, also under saved-tensor hooks of its own."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import grad, grad_and_value
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, normal, one_axis

# Gradients of gradients: a few hundred sums and products of numbers around one, in float64.
ATOL = 1e-12


def full_values():
    draw = normal()
    return {"first": draw(5, 3), "second": draw(3, 4), "third": draw(4)}


def strategies(mesh):
    keywords = {"min_shard_elements": 0}
    found = {"zero3": fs.zero3(mesh, **keywords), "ddp": fs.ddp(mesh)}
    if mesh.size() == 2:
        found |= {
            "zero3 without prefetch": fs.zero3(mesh, prefetch=0, **keywords),
            "zero3 that keeps": fs.zero3(mesh, regather=False, **keywords),
            "zero3 that keeps one": fs.zero3(mesh, regather="*second*", **keywords),
        }
    return found


def batch():
    """Another one on every rank."""
    return normal(1 + my_rank())(2, 5)


def perceptron(params, x):
    h = torch.tanh(x @ fs.gather(params["first"]))
    h = torch.tanh(h @ fs.gather(params["second"]))
    return (h * fs.gather(params["third"])).square().sum()


def on_full_tensors(f, params, *args):
    """What f's objective and gradients are by autograd alone, on full tensors."""
    full = fs.tree_map(lambda tensor: tensor.clone().requires_grad_(), fs.unshard(params))
    value = f(full, *args)
    names = list(full)
    grads = dict(zip(names, torch.autograd.grad(value, [full[name] for name in names])))
    return fs.objective(value.detach(), like=params), fs.scatter_grads(grads, like=params)


def penalty_on_weights(params, x):
    """Differentiates twice with respect to gathered weights."""
    full = [fs.gather(params[name]) for name in ("first", "second", "third")]
    h = torch.tanh(torch.tanh(x @ full[0]) @ full[1])
    value = (h * full[2]).square().sum()
    return value + sum(g.square().sum() for g in torch.autograd.grad(value, full, create_graph=True))


def penalty_on_inputs(params, x):
    """And so twice through the gathered weights."""
    x = x.clone().requires_grad_()
    value = perceptron(params, x)
    (g,) = torch.autograd.grad(value, x, create_graph=True)
    return value + g.square().sum()


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


FUNCTIONS = (
    *(penalty_on_weights, penalty_on_inputs, third_order_without_graph_and_hooks, hooks_and_a_checkpoint),
    forth_and_back,
)


@pytest.mark.rows(2)
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("f", FUNCTIONS)
def test_it_is_what_autograd_does_on_full_tensors(f):
    x = batch()
    for transform in strategies(one_axis()).values():
        params = fs.shard(full_values(), transform)
        found, expected = fs.value_and_grad(f)(params, x), on_full_tensors(f, params, x)
        assert_trees_close(found, expected, rtol=ATOL, atol=ATOL)
        assert_same_bits(fs.tree_leaves(fs.value_and_grad(f)(params, x)), fs.tree_leaves(found))


def nested(params, x):
    _, grads = fs.value_and_grad(perceptron)(params, x)
    return sum(tensor.square().sum() for tensor in fs.gather(grads).values())


def one_step_of_maml(params, x):
    """Takes a step on the shards and gathers what it leads to."""
    _, grads = fs.value_and_grad(perceptron)(params, x)
    return perceptron(fs.tree_map(lambda p, g: p - 0.1 * g, params, grads), x)


@pytest.mark.rows(2)
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("f", (nested, one_step_of_maml))
def test_value_and_grad_inside_is_torch_func_inside(f):
    """Under either of them, and by either of them."""
    x = batch()
    for transform in strategies(one_axis()).values():
        params = fs.shard(full_values(), transform)
        grads, value = grad_and_value(lambda p: fs.objective(f(p, x), like=p))(params)
        assert_trees_close(fs.value_and_grad(f)(params, x), (value, grads), rtol=ATOL, atol=ATOL)


@on_ranks(1, 2)
def test_torch_func_inside_is_refused_where_weights_are_gathered_again(world_size):
    def f(params, x):
        weight = fs.gather(params["first"])
        return perceptron(params, x) + grad(lambda w: torch.tanh(x @ w).square().sum())(weight).square().sum()

    x = batch()
    for name, transform in strategies(one_axis()).items():
        params = fs.shard(full_values(), transform)
        if world_size > 1 and name in ("zero3", "zero3 without prefetch", "zero3 that keeps one"):
            with pytest.raises(RuntimeError, match="saved tensor hooks"):
                fs.value_and_grad(f)(params, x)
        else:
            grads, value = grad_and_value(lambda p: fs.objective(f(p, x), like=p))(params)
            assert_trees_close(fs.value_and_grad(f)(params, x), (value, grads), rtol=ATOL, atol=ATOL)
