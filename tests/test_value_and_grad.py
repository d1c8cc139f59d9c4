"""value_and_grad is torch.func over gather and objective, law 5; and which arguments it takes and returns."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.func import grad_and_value

import fshard as fs
from fshard.testing import assert_trees_close
from tests.losses import (
    ATOL,
    COUNTS,
    LOSSES,
    REDUCTIONS,
    batch,
    full_params,
    gathering,
    local_loss,
    mine,
    one_process,
    reduced,
    shard,
    specs,
)
from tests.ranks import my_rank, on_ranks
from tests.trees import OF_EVERY_LEAF, STRATEGIES, assert_same_bits, meshes, normal, one_axis

UNUSED = dict.fromkeys(LOSSES, ("a", "b", "empty", "unused")) | {
    "regularised": (),
    "merging after gather": ("empty", "unused"),
    "merging shards": ("empty", "unused"),
}


@pytest.mark.rows(4)
@on_ranks(*COUNTS)
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_the_reference_and_one_process(name, reduce, world_size):
    f, strategies, dense, plain = LOSSES[name]
    expected = one_process(f, reduce, world_size)
    axis = fs.axis_of(one_axis())
    loss_fn, args = local_loss(f, reduce, axis), mine(batch(), world_size)
    on = meshes()
    for strategy in strategies:
        params = shard(STRATEGIES[strategy](on))
        value, grads = fs.value_and_grad(loss_fn, reduce=reduce)(params, *args)
        assert specs(grads) == specs(params) | dict.fromkeys({"fixed", *UNUSED[name]})
        # torch.func gives zeros to what a loss does not use.
        grads |= {path: fs.tree_map(torch.zeros_like, params[path]) for path in UNUSED[name]}

        # torch.func differentiates with respect to tensors alone.
        fixed = {path: params[path] for path in ("fixed", "none")}
        trained = {path: leaf for path, leaf in params.items() if path not in fixed}
        spellings = {"as it is": lambda p: loss_fn(p | fixed, *args)}  # noqa: B023
        if plain:
            spellings["of gathered"] = lambda p: loss_fn(fs.gather(p | fixed), *args)  # noqa: B023
        for loss_of in spellings.values():
            reference = grad_and_value(lambda p: fs.objective(loss_of(p), like=params, reduce=reduce))(trained)  # noqa: B023
            assert_same_bits(value, reference[1])
            # The reference divides the loss and value_and_grad the gradients, which differs where 1 / 3 is rounded;
            # and of a leaf gathered twice, one adds up the two before the sum over ranks, the other after it.
            rounded = reduce == "mean" and world_size == 3
            exact = not rounded and name != "gathering twice"
            found = fs.tree_leaves({path: leaf for path, leaf in grads.items() if path not in fixed})
            assert_trees_close(found, fs.tree_leaves(reference[0]), rtol=0.0, atol=ATOL, exact=exact)

        if dense is None or strategy in dense:
            assert_trees_close((value, fs.unshard(grads)), expected, rtol=0.0, atol=ATOL)


def test_full_parameters_need_no_mesh():
    full = full_params()
    fixed = {name: full.pop(name) for name in ("fixed", "none")}

    def loss_fn(p):
        return reduced(gathering(p | fixed, *batch(), None), "mean")

    value, grads = fs.value_and_grad(loss_fn)(full)
    expected_grads, expected = grad_and_value(loss_fn)(full)
    assert_same_bits((value, grads), (expected, expected_grads))


# A hundred products of numbers around one, summed in another order, in float64.
ROUNDING = 1e-13


def full_values():
    draw = normal()
    return {"up": draw(5, 3), "down": draw(3)}, [draw(5), draw(2, 3)]


TREE_STRATEGIES = OF_EVERY_LEAF | {"zero3 of units": partial(fs.zero3, min_shard_elements=0, merge_bytes=0)}


def own_rows():
    """As many rows as the rank's number says, and two."""
    return normal(3 + my_rank())(2 + my_rank(), 5)


def loss_of(first, x, second):
    """Of two trees of parameters around one of data."""
    weights = fs.gather(second[0])
    h = torch.tanh((x * weights) @ fs.gather(first)["up"])
    return (h * fs.gather(first["down"])).square().mean() + fs.gather(second)[1].square().sum()


def with_trees(check):
    """Give a rank's check two sharded trees and a batch between them, by one strategy after another."""
    for strategy in TREE_STRATEGIES.values():
        first, second = (fs.shard(full, strategy(one_axis())) for full in full_values())
        check(first, own_rows(), second)


@on_ranks(3)
def test_every_reduce_is_the_reference():
    """Weighted by how many rows a rank has."""

    def check(first, x, second):
        for reduce in ("mean", "sum", "weighted"):

            def local(both, x, reduce=reduce):
                value = loss_of(both[0], x, both[1])
                return (value * len(x), torch.tensor(len(x))) if reduce == "weighted" else value

            def objective(both, local=local, reduce=reduce):
                return fs.objective(local(both, x), like=both, reduce=reduce)

            grads, value = grad_and_value(objective)((first, second))
            found = fs.value_and_grad(local, reduce=reduce)((first, second), x)
            assert_trees_close(found, (value, grads), rtol=ROUNDING, atol=ROUNDING)

    with_trees(check)


class Aux(NamedTuple):
    bound: Any
    note: str
    more: Any


@on_ranks(1, 3)
def test_aux_is_this_rank_s_own_and_holds_no_graph():
    """Whatever its structure; gathered weights in it outlive their unit, and bound leaves the call."""

    def local(first, x, *, second):
        value, weight = loss_of(first, x, second), fs.gather(first["up"])
        more = {"rank": torch.tensor(my_rank()), "list": [len(x), None, (3.5, weight)], "activation": x @ weight}
        return value, Aux(first, "note", more)

    def check(first, x, second):
        (value, aux), grads = fs.value_and_grad(local, has_aux=True)(first, x, second=second)
        assert (type(aux), aux.note, int(aux.more["rank"])) == (Aux, "note", my_rank())
        size, nothing, (number, weight) = aux.more["list"]
        assert (size, nothing, number) == (len(x), None, 3.5)
        for leaf in (value, *(leaf for leaf in fs.tree_leaves((aux, grads)) if isinstance(leaf, torch.Tensor))):
            assert not leaf.requires_grad
            assert not torch._C._functorch.is_functorch_wrapped_tensor(leaf)
        full = fs.unshard(first)
        assert_same_bits([weight, aux.more["activation"]], [full["up"], x @ full["up"]])
        assert aux.bound["up"].spec == first["up"].spec
        # They are the caller's own now.
        assert_same_bits([fs.unshard(aux.bound), fs.gather(aux.bound)], [full, full])
        plain = fs.value_and_grad(lambda *args, **keywords: local(*args, **keywords)[0])(first, x, second=second)
        assert_same_bits([value, *fs.tree_leaves(grads)], fs.tree_leaves(plain))

    with_trees(check)
