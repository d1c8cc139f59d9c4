"""value_and_grad is torch.func over gather and objective, law 5; and which arguments it takes and returns."""

import re
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.func import grad_and_value, jvp

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import OF_EVERY_LEAF, STRATEGIES, assert_same_bits, meshes, normal, one_axis

WIDTH = 7

# Rows of each rank's batch, by world size: unequal, and a power of two together, so that dividing by it is exact.
COUNTS = {1: (8,), 2: (5, 3), 3: (2, 5, 1), 4: (1, 4, 1, 2)}

# An element of a gradient sums products over 8 rows, and over columns of two layers and back.
near = partial(within, terms=8 + WIDTH, steps=4)

# "fixed" and "none" are not trained.
FIXED = ("fixed", "none")
SHAPES = {"w1": (5, WIDTH), "b1": (WIDTH,), "w2": (WIDTH, 3), "scale": ()}
SHAPES |= {"fixed": (5, WIDTH), "unused": (3,), "empty": (0, 3)}


def full_params():
    draw = normal()
    return {name: draw(*shape) / 2 for name, shape in SHAPES.items()} | {"none": None}


def batch():
    draw = normal(1)
    return draw(8, 5), draw(8, 3)


def errors(p, x, target):
    """Squared errors of a perceptron with full parameters, one for each row."""
    hidden = torch.tanh(x @ (p["w1"] + p["fixed"]) + p["b1"])
    return ((hidden @ p["w2"] * p["scale"] - target) ** 2).sum(1)


def gathering(p, x, target):
    return errors(fs.gather(p), x, target)


def regularised(p, x, target):
    """Each rank adds the squares of the shards that it has; padding is zero."""
    trained = [leaf for name, leaf in p.items() if name != "fixed"]
    return errors(fs.gather(p), x, target), 0.1 * sum(leaf.square().sum() for leaf in fs.tree_leaves(trained))


SPLIT = ("zero2 of every leaf", "one dim over two axes", "last dim")
# Local losses, which are of rows, or of these and a term for the whole rank; the strategies to try each with; the
# leaves that it does not use; and whether it is a function of gathered parameters. A whole leaf used without gather is
# one for each rank; only split ones are then parts of one.
LOSSES = {
    "gathering": (gathering, ("ddp", *SPLIT, "hsdp", "two dims"), ("empty", "unused"), True),
    "regularised": (regularised, SPLIT, (), False),
}


def parts(result):
    return result if isinstance(result, tuple) else (result, 0.0)


def one_process(f, reduce, world_size):
    """The objective and gradients of the whole batch in one process."""

    def objective(p):
        rows, extra = parts(f(p | frozen, *batch()))
        if reduce == "mean":
            return (sum(part.mean() for part in rows.split(COUNTS[world_size])) + extra) / world_size
        return (rows.sum() + extra) / (8 if reduce == "weighted" else 1)

    full = full_params()
    frozen = {name: full.pop(name) for name in FIXED}
    grads, value = grad_and_value(objective)(full)
    return value, grads | dict.fromkeys(frozen)


@pytest.mark.rows(4)
@on_ranks(*COUNTS)
@pytest.mark.parametrize("reduce", ("mean", "sum", "weighted"))
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_the_reference_and_one_process(name, reduce, world_size):
    f, strategies, unused, plain = LOSSES[name]
    expected = one_process(f, reduce, world_size)
    args = [whole.split(COUNTS[world_size])[my_rank()] for whole in batch()]

    def loss(p):
        rows, extra = parts(f(p, *args))
        if reduce == "weighted":
            return rows.sum() + extra, torch.tensor(len(rows))
        return (rows.mean() if reduce == "mean" else rows.sum()) + extra

    # The reference divides the loss and value_and_grad the gradients, which differs where 1 / 3 is rounded.
    exact = not (reduce == "mean" and world_size == 3)
    for strategy in strategies:
        params = fs.shard(full_params(), STRATEGIES[strategy](meshes()), frozen="fixed")
        value, grads = fs.value_and_grad(loss, reduce=reduce)(params)
        assert {path for path, grad in grads.items() if grad is None} == {*FIXED, *unused}
        # torch.func gives zeros to what a loss does not use, and differentiates with respect to tensors alone.
        grads |= {path: fs.tree_map(torch.zeros_like, params[path]) for path in unused}
        fixed = {path: params[path] for path in FIXED}
        trained = {path: leaf for path, leaf in params.items() if path not in FIXED}
        of_trained = {path: grads[path] for path in trained}
        for gather in (dict, fs.gather) if plain else (dict,):
            reference = grad_and_value(lambda p: fs.objective(loss(gather(p | fixed)), like=params, reduce=reduce))  # noqa: B023
            expected_grads, expected_value = reference(trained)
            assert_same_bits(value, expected_value)
            assert_trees_close(of_trained, expected_grads, **near(expected_grads), exact=exact)
        assert_trees_close((value, fs.unshard(grads)), expected, **near(expected))


class Aux(NamedTuple):
    bound: Any
    note: str
    more: Any


@on_ranks(1, 3)
def test_aux_is_this_rank_s_own_and_holds_no_graph():
    """Whatever its structure; gathered weights in it outlive their unit, and bound leaves the call."""
    full = {"up": normal()(5, 3), "down": normal(1)(3)}
    x = normal(3 + my_rank())(2 + my_rank(), 5)

    def local(both, *, scale):
        weight = fs.gather(both[0]["up"])
        value = (torch.tanh(x @ weight) * fs.gather(both[1]["down"])).square().mean() * scale
        return value, Aux(both, "note", {"list": [my_rank(), None, (3.5, weight)], "activation": x @ weight})

    for strategy in OF_EVERY_LEAF.values():
        both = tuple(fs.shard({name: leaf}, strategy(one_axis())) for name, leaf in full.items())
        (value, aux), grads = fs.value_and_grad(local, has_aux=True)(both, scale=2.0)
        rank, nothing, (number, weight) = aux.more["list"]
        assert (type(aux), aux.note, rank, nothing, number) == (Aux, "note", my_rank(), None, 3.5)
        for leaf in (value, *(leaf for leaf in fs.tree_leaves((aux, grads)) if isinstance(leaf, torch.Tensor))):
            assert not leaf.requires_grad
            assert not torch._C._functorch.is_functorch_wrapped_tensor(leaf)
        assert_same_bits([weight, aux.more["activation"]], [full["up"], x @ full["up"]])
        # They are the caller's own now.
        assert_same_bits([fs.unshard(aux.bound[0])["up"], fs.gather(aux.bound[1])["down"]], list(full.values()))
        plain = fs.value_and_grad(lambda *args, **keywords: local(*args, **keywords)[0])(both, scale=2.0)
        assert_same_bits([value, *fs.tree_leaves(grads)], fs.tree_leaves(plain))


@on_ranks(2)
def test_full_tensors_without_a_gradient_are_refused_in_a_loss():
    """Under every strategy, for torch.func too: no leaf would have a gradient, and nothing would say so."""
    for make in (fs.zero3, fs.ddp):
        params = fs.shard({"w": torch.ones(4)}, make(one_axis()))

        def loss(params):
            return fs.unshard(params)["w"].sum()

        for differentiate in (fs.value_and_grad, torch.func.grad):
            with pytest.raises(ValueError, match=re.escape(UNSHARDED)):
                differentiate(loss)(params)
        with pytest.raises(ValueError, match=re.escape(UNSHARDED)):
            jvp(loss, (params,), (params,))
        # Of leaves that are not differentiated it may be a part of one.
        full = torch.func.grad(lambda x, params=params: (fs.unshard(params)["w"] * x).sum())(torch.ones(4))
        assert_same_bits(full, torch.ones(4))


UNSHARDED = (
    "unshard: the result takes no gradient and no vmap\n"
    "  ['w']: is differentiated here\n"
    "To fix: use fs.gather in a loss, and fs.gather(...) and detach() for a constant. To look at values use torch.no_g"
)
