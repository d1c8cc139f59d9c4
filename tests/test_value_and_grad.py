"""value_and_grad is torch.func over gather and objective, law 5; and which arguments it takes and returns."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.func import grad_and_value

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.trees import OF_EVERY_LEAF, STRATEGIES, assert_same_bits, meshes, normal, one_axis

EPS = torch.finfo(torch.float64).eps
WIDTH = 7

# Rows of each rank's batch, by world size: unequal, and a power of two together, so that dividing by it is exact.
COUNTS = {1: (8,), 2: (5, 3), 3: (2, 5, 1), 4: (1, 4, 1, 2)}

# An element of a gradient sums products over 8 rows, WIDTH columns and up to two layers more, all of numbers below 10;
# sums over ranks and what is divided by come on top. The two sides differ in the order of it all.
ATOL = 8 * WIDTH * 4 * EPS * 10

SPLIT = ("zero2 of every leaf", "last dim", "one dim over two axes")
BY_ROWS = ("zero2 of every leaf", "one dim over two axes")


def full_params():
    draw = normal()
    return {
        "w1": draw(5, WIDTH) / 2,
        "b1": draw(WIDTH),
        "w2": draw(WIDTH, 3) / 2,
        "scale": draw(),
        "a": draw(5, 2) / 2,
        "b": draw(2, WIDTH) / 2,
        "fixed": draw(5, WIDTH) / 2,
        "unused": draw(3),
        "empty": draw(0, 3),
        "none": None,
    }


FIXED = full_params()["fixed"]


def shard(transform, full=None):
    full = full or full_params()
    return fs.shard(full, transform, frozen="fixed" if "fixed" in full else ())


def batch():
    draw = normal(1)
    return draw(8, 5), draw(8, 3)


def mine(whole, world_size):
    """This rank's rows."""
    return tuple(tensor.split(COUNTS[world_size])[torch.distributed.get_rank()] for tensor in whole)


def errors(p, x, target):
    """Squared errors of a perceptron with full parameters, one for each row."""
    hidden = torch.tanh(x @ (p["w1"] + p["fixed"]) + p["b1"])
    return ((hidden @ p["w2"] * p["scale"] - target) ** 2).sum(1)


def gathering(p, x, target, total):
    return errors(fs.gather(p), x, target)


def gathering_twice(p, x, target, total):
    first, second = fs.gather(p), fs.gather({"w2": p["w2"], "scale": [p["scale"]]})
    mixed = first | {"w2": first["w2"] + second["w2"] ** 2, "scale": first["scale"] * second["scale"][0]}
    return errors(mixed, x, target)


def regularised(p, x, target, total):
    """Each rank adds the squares of the shards that it has; padding is zero."""
    trained = [leaf for name, leaf in p.items() if name != "fixed"]
    return errors(fs.gather(p), x, target), 0.1 * sum(leaf.square().sum() for leaf in fs.tree_leaves(trained))


def merging_shards(p, x, target, total):
    """LoRA: rows of w1 and a are split alike, so that a rank merges its rows of w1 + a @ b and gathers the result."""
    b = fs.gather({"b": p["b"]})["b"]
    w, a = p["w1"], p["a"]
    merged = fs.Sharded(w.local + a.local @ b, w.spec) if isinstance(w, fs.Sharded) else w + a @ b
    return errors(fs.gather(p | {"w1": merged}), x, target)


def synchronised(p, x, target, total):
    """Batch normalisation by the statistics of all ranks' rows."""
    full = fs.gather(p)
    hidden = x @ full["w1"] + full["b1"]
    mean = total(hidden.sum(0)) / 8
    variance = total(((hidden - mean) ** 2).sum(0)) / 8
    return errors(full, x, target) * ((hidden - mean) / (variance + 1.0).sqrt() @ full["w2"]).sum(1)


class Loss(NamedTuple):
    """A local loss: errors of rows, or the pair of these and a term for the whole rank.

    Attributes:
        f: Called with (params, x, target, total), where total sums over the ranks.
        strategies: To try it with.
        dense: Those of them whose gradients are those of one process; None for all.
        plain: Whether it is a function of gathered parameters.
    """

    f: Callable[..., Any]
    strategies: tuple[str, ...] = ("ddp", *BY_ROWS)
    dense: tuple[str, ...] | None = None
    plain: bool = True


# A whole leaf used without gather is one for each rank; only split ones are then parts of one.
LOSSES = {
    "gathering": Loss(gathering, strategies=("ddp", *SPLIT, "hsdp", "two dims")),
    "gathering twice": Loss(gathering_twice),
    "regularised": Loss(regularised, strategies=SPLIT, plain=False),
    "merging shards": Loss(merging_shards, strategies=BY_ROWS, plain=False),
    "synchronised": Loss(synchronised),
}
REDUCTIONS = ("mean", "sum", "weighted")


def reduced(result, reduce):
    rows, extra = result if isinstance(result, tuple) else (result, 0.0)
    if reduce == "weighted":
        return rows.sum() + extra, torch.tensor(len(rows))
    return (rows.mean() if reduce == "mean" else rows.sum()) + extra


def local_loss(f, reduce, axis=None):
    """What value_and_grad differentiates: this rank's loss of its rows."""

    def loss(params, x, target):
        return reduced(f(params, x, target, lambda value: fs.psum(value, axis)), reduce)

    return loss


def one_process(f, reduce, world_size):
    """The objective and gradients of the whole batch in one process."""

    def objective(p):
        result = f(p | frozen, *batch(), lambda value: value)
        rows, extra = result if isinstance(result, tuple) else (result, 0.0)
        if reduce == "mean":
            return (sum(part.mean() for part in rows.split(COUNTS[world_size])) + extra) / world_size
        return (rows.sum() + extra) / (8 if reduce == "weighted" else 1)

    full = full_params()
    frozen = {name: full.pop(name) for name in ("fixed", "none")}
    grads, value = grad_and_value(objective)(full)
    return value, grads | dict.fromkeys(frozen)


def specs(tree):
    return {name: getattr(leaf, "spec", None) for name, leaf in tree.items()}


UNUSED = dict.fromkeys(LOSSES, ("a", "b", "empty", "unused")) | {
    "regularised": (),
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
        more = {"rank": torch.tensor(my_rank()), "list": [len(x), None, (3.5, weight)], "activation": x @ weight}
        return value, Aux(both, "note", more)

    for strategy in OF_EVERY_LEAF.values():
        both = tuple(fs.shard({name: leaf}, strategy(one_axis())) for name, leaf in full.items())
        (value, aux), grads = fs.value_and_grad(local, has_aux=True)(both, scale=2.0)
        assert (type(aux), aux.note, int(aux.more["rank"])) == (Aux, "note", my_rank())
        size, nothing, (number, weight) = aux.more["list"]
        assert (size, nothing, number) == (len(x), None, 3.5)
        for leaf in (value, *(leaf for leaf in fs.tree_leaves((aux, grads)) if isinstance(leaf, torch.Tensor))):
            assert not leaf.requires_grad
            assert not torch._C._functorch.is_functorch_wrapped_tensor(leaf)
        assert_same_bits([weight, aux.more["activation"]], [full["up"], x @ full["up"]])
        assert aux.bound[0]["up"].spec == both[0]["up"].spec
        # They are the caller's own now.
        assert_same_bits(
            [fs.unshard(aux.bound[0]), fs.gather(aux.bound[1])], [{"up": full["up"]}, {"down": full["down"]}]
        )
        plain = fs.value_and_grad(lambda *args, **keywords: local(*args, **keywords)[0])(both, scale=2.0)
        assert_same_bits([value, *fs.tree_leaves(grads)], fs.tree_leaves(plain))
