"""Arguments of value_and_grad: which ones are parameters, aux, reduce and schedules of several trees."""

from typing import Any, NamedTuple

import pytest
import torch
from torch.func import grad_and_value

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, normal, one_axis

# A hundred products of numbers around one, summed in another order, in float64.
ATOL = 1e-13


def full_values():
    draw = normal()
    return {"up": draw(5, 3), "down": draw(3)}, [draw(5), draw(2, 3)]


def strategies(mesh):
    every = {"min_shard_elements": 0}
    return {
        "zero3": fs.zero3(mesh, **every),
        "zero3 of units": fs.zero3(mesh, merge_bytes=0, **every),
        "zero3 that keeps": fs.zero3(mesh, regather=False, **every),
        "zero2": fs.zero2(mesh, **every),
        "ddp": fs.ddp(mesh),
    }


def batch():
    """As many rows as the rank's number says, and two."""
    return normal(3 + my_rank())(2 + my_rank(), 5)


def loss(first, x, second):
    """Of two trees of parameters around one of data."""
    weights = fs.gather(second[0])
    h = torch.tanh((x * weights) @ fs.gather(first)["up"])
    return (h * fs.gather(first["down"])).square().mean() + fs.gather(second)[1].square().sum()


def programs(test, world_size):
    """Run a test of two sharded trees and a batch with every strategy."""

    def program():
        for name, transform in strategies(one_axis()).items():
            first, second = (fs.shard(full, transform) for full in full_values())
            test(name, first, batch(), second)

    spmd(program, world_size)


ARGNUMS = (0, 2, -1, -3, (0,), (2, 0), (0, 2), (0, -1), [2])


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("argnums", ARGNUMS, ids=str)
def test_argnums_are_those_of_torch_func(argnums, world_size):
    """Other arguments may be sharded too; they are gathered and take no gradient."""

    def test(name, first, x, second):
        places = (argnums,) if isinstance(argnums, int) else tuple(argnums)

        def objective(*args):
            return fs.objective(loss(*args), like=first)

        grads, value = grad_and_value(objective, argnums=places)(first, x, second)
        found = fs.value_and_grad(loss, argnums=argnums)(first, x, second)
        expected = (value, grads[0] if isinstance(argnums, int) else grads)
        assert_trees_close(found, expected, rtol=ATOL, atol=ATOL)
        assert isinstance(found[1], tuple) is not isinstance(argnums, int)

    programs(test, world_size)


def test_keywords_are_passed_on():
    def test(name, first, x, second):
        found = fs.value_and_grad(loss)(first, second=second, x=x)
        assert_same_bits(fs.tree_leaves(found), fs.tree_leaves(fs.value_and_grad(loss)(first, x, second)))

    programs(test, 2)


@pytest.mark.rows(2)
@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("reduce", ("mean", "sum", "weighted"))
def test_every_reduce_is_the_reference(reduce, world_size):
    """Weighted by how many rows a rank has."""

    def test(name, first, x, second):
        def local(first, x, second):
            value = loss(first, x, second)
            return (value * len(x), torch.tensor(len(x))) if reduce == "weighted" else value

        def objective(first, second):
            return fs.objective(local(first, x, second), like=first, reduce=reduce)

        grads, value = grad_and_value(objective, argnums=(0, 1))(first, second)
        found = fs.value_and_grad(local, argnums=(0, 2), reduce=reduce)(first, x, second)
        assert_trees_close(found, (value, grads), rtol=ATOL, atol=ATOL)

    programs(test, world_size)


class Aux(NamedTuple):
    bound: Any
    note: str
    more: Any


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("reduce", ("mean", "sum", "weighted"))
def test_aux_is_this_rank_s_own_and_holds_no_graph(reduce, world_size):
    """Whatever its structure; gathered weights in it outlive their unit, and bound leaves the call."""

    def test(name, first, x, second):
        def local(first, x, *, second):
            value, weight = loss(first, x, second), fs.gather(first["up"])
            more = {"rank": torch.tensor(my_rank()), "list": [len(x), None, (3.5, weight)], "activation": x @ weight}
            aux = Aux(first, "note", more)
            return ((value, torch.tensor(len(x))) if reduce == "weighted" else value), aux

        run = fs.value_and_grad(local, has_aux=True, reduce=reduce)
        plain, _ = run(first, x, second=second)
        (value, aux), grads = run(first, x, second=second)
        assert_same_bits(value, plain[0])
        assert (type(aux), aux.note, int(aux.more["rank"])) == (Aux, "note", my_rank())
        size, nothing, (number, weight) = aux.more["list"]
        assert (size, nothing, number) == (len(x), None, 3.5)
        for leaf in (value, *(leaf for leaf in fs.tree_leaves((aux, grads)) if isinstance(leaf, torch.Tensor))):
            assert not leaf.requires_grad
            assert not torch._C._functorch.is_functorch_wrapped_tensor(leaf)
        full = fs.unshard(first)
        assert_same_bits([weight, aux.more["activation"]], [full["up"], x @ full["up"]])
        assert aux.bound["up"].spec == first["up"].spec
        assert_same_bits(fs.unshard(aux.bound), full)
        # They are the caller's own now.
        assert_same_bits(fs.gather(aux.bound), full)
        without = fs.value_and_grad(lambda *args, **keywords: local(*args, **keywords)[0], reduce=reduce)
        assert_same_bits([value, *fs.tree_leaves(grads)], fs.tree_leaves(without(first, x, second=second)))

    programs(test, world_size)


@pytest.mark.rows(1)
@pytest.mark.parametrize("world_size", (2, 3))
def test_a_schedule_gets_what_argnums_select(world_size):
    """One tree, or a tuple of several."""

    def test(name, first, x, second):
        one = fs.value_and_grad(loss, schedule=lambda p: [p["up"], p["down"]])(first, x, second)
        assert_same_bits(fs.tree_leaves(one), fs.tree_leaves(fs.value_and_grad(loss)(first, x, second)))
        both = fs.value_and_grad(loss, argnums=(0, 2), schedule=lambda p: [p[1][0], p[0], p[1][1]])(first, x, second)
        expected = fs.value_and_grad(loss, argnums=(0, 2))(first, x, second)
        assert_trees_close(both, expected, rtol=ATOL, atol=ATOL)

    programs(test, world_size)


@on_ranks(2)
def test_frozen_and_integer_leaves_have_no_gradient_and_others_theirs():
    full = {"w": normal()(5, 3), "fixed": normal(1)(5, 3), "count": torch.arange(4)}
    for transform in strategies(one_axis()).values():
        params = fs.shard(full, transform, frozen=lambda path: "w" not in path)

        def f(params):
            full = fs.gather(params)
            return (full["w"] * full["fixed"]).sum() * full["count"].sum()

        _, grads = fs.value_and_grad(f)(params)
        assert (grads["fixed"], grads["count"]) == (None, None)
        assert_trees_close(fs.unshard(grads["w"]), 6 * full["fixed"], rtol=ATOL, atol=ATOL)
