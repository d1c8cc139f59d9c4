"""value_and_grad: law 5, that it is torch.func over gather and objective; and what composes with it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.func import grad, grad_and_value, jvp, vmap

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal, one_axis

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
    return fs.shard(full or full_params(), transform, frozen=lambda path: "fixed" in path)


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


def merging_after_gather(p, x, target, total):
    full = fs.gather(p)
    return errors(full | {"w1": full["w1"] + full["a"] @ full["b"]}, x, target)


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
    "regularised": Loss(regularised, strategies=("ddp", *SPLIT), dense=SPLIT, plain=False),
    "merging after gather": Loss(merging_after_gather),
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


@pytest.mark.parametrize("world_size", COUNTS)
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_the_reference_and_one_process(name, reduce, world_size):
    f, strategies, dense, plain = LOSSES[name]
    expected = one_process(f, reduce, world_size)

    def program():
        axis = fs.axis_of(one_axis())
        loss_fn, args = local_loss(f, reduce, axis), mine(batch(), world_size)
        on = meshes()
        for strategy in strategies:
            params = shard(STRATEGIES[strategy](on))
            value, grads = fs.value_and_grad(loss_fn, reduce=reduce)(params, *args)
            assert specs(grads) == specs(params) | {"fixed": None}

            # torch.func differentiates with respect to tensors alone.
            fixed = {path: params[path] for path in ("fixed", "none")}
            trained = {path: leaf for path, leaf in params.items() if path not in fixed}
            spellings = {"as it is": lambda p: loss_fn(p | fixed, *args)}  # noqa: B023
            if plain:
                spellings["of gathered"] = lambda p: loss_fn(fs.gather(p | fixed), *args)  # noqa: B023
            for spelling, loss_of in spellings.items():
                reference = grad_and_value(lambda p: fs.objective(loss_of(p), like=params, reduce=reduce))(trained)  # noqa: B023
                assert_same_bits(value, reference[1])
                # The reference divides the loss and value_and_grad the gradients, which differs where 1 / 3 is rounded;
                # and of a leaf gathered twice, one adds up the two before the sum over ranks, the other after it.
                rounded = reduce == "mean" and world_size == 3
                exact = not rounded and (spelling, name) != ("of gathered", "gathering twice")
                found = fs.tree_leaves({path: leaf for path, leaf in grads.items() if path not in fixed})
                assert_trees_close(found, fs.tree_leaves(reference[0]), rtol=0.0, atol=ATOL, exact=exact)

            if dense is None or strategy in dense:
                assert_trees_close((value, fs.unshard(grads)), expected, rtol=0.0, atol=ATOL)

    spmd(program, world_size)


def specs(tree):
    return {name: getattr(leaf, "spec", None) for name, leaf in tree.items()}


class Aux(NamedTuple):
    rows: torch.Tensor
    note: str
    more: Any


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_aux_is_any_tree_and_stays_the_rank_s_own(world_size, reduce):
    def program():
        params, (x, target) = shard(STRATEGIES["zero2 of every leaf"](meshes())), mine(batch(), world_size)

        def loss_fn(params, x, *, target):
            rows = gathering(params, x, target, None)
            whole = fs.gather({"w2": params["w2"]})["w2"]
            more = {"count": len(rows), "none": None, "list": [whole, (3.5, params["w1"])], "int": torch.tensor(3)}
            return reduced(rows, reduce), Aux(rows, "note", more)

        run = fs.value_and_grad(loss_fn, reduce=reduce, has_aux=True)
        (value, aux), grads = run(params, x, target=target)
        without = fs.value_and_grad(lambda *args, **kwargs: loss_fn(*args, **kwargs)[0], reduce=reduce)
        assert_same_bits(
            (value, fs.unshard(grads)), (lambda v, g: (v, fs.unshard(g)))(*without(params, x, target=target))
        )
        full = fs.unshard(params)
        assert type(aux) is Aux
        assert aux.note == "note"
        assert (aux.more["count"], aux.more["none"], aux.more["list"][1][0]) == (len(x), None, 3.5)
        assert_same_bits(aux.rows, errors(full, x, target))
        assert_same_bits(aux.more["int"], torch.tensor(3))
        assert_same_bits(aux.more["list"][0], full["w2"])
        assert aux.more["list"][1][1].spec == params["w1"].spec
        assert_same_bits(aux.more["list"][1][1].local, params["w1"].local)
        for leaf in (value, *(leaf for leaf in fs.tree_leaves((aux, grads)) if isinstance(leaf, torch.Tensor))):
            assert not leaf.requires_grad
            assert not torch._C._functorch.is_functorch_wrapped_tensor(leaf)

    spmd(program, world_size)


def test_full_parameters_need_no_mesh():
    full = full_params()
    fixed = {name: full.pop(name) for name in ("fixed", "none")}

    def loss_fn(p):
        return reduced(gathering(p | fixed, *batch(), None), "mean")

    value, grads = fs.value_and_grad(loss_fn)(full)
    expected_grads, expected = grad_and_value(loss_fn)(full)
    assert_same_bits((value, grads), (expected, expected_grads))


@pytest.mark.parametrize("world_size", (1, 3))
def test_nothing_to_train(world_size):
    def program():
        params = fs.shard({"w": torch.ones(5)}, fs.ddp(one_axis()), frozen=lambda path: True)
        value, grads = fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())(params)
        assert_same_bits(value, torch.tensor(5.0))
        assert grads == {"w": None}

    spmd(program, world_size)


def test_gradients_have_their_leaf_s_dtype():
    full = {"half": torch.ones(5, 3, dtype=torch.bfloat16), "single": torch.ones(3), "double": torch.ones(3).double()}

    def program():
        params = fs.shard(full, fs.zero2(one_axis(), min_shard_elements=0))
        loss = fs.value_and_grad(lambda p: sum(leaf.double().sum() for leaf in fs.gather(p).values()))
        assert_same_bits(fs.unshard(loss(params)[1]), fs.tree_map(torch.ones_like, full))

    spmd(program, 2)


TRANSFORMED = ("ddp", "zero2 of every leaf", "last dim", "hsdp", "two dims")
INNER_RATE = 0.05


def trained_only(full):
    return {name: full[name] for name in ("w1", "b1", "w2", "scale")}


def dense_loss(p, x, target):
    return errors(p | {"fixed": FIXED}, x, target)


def sharded_loss(p, x, target):
    return dense_loss(fs.gather(p), x, target)


def mean_of_ranks(rows, world_size):
    return sum(part.mean() for part in rows.split(COUNTS[world_size])) / world_size


@pytest.mark.parametrize("world_size", COUNTS)
@pytest.mark.parametrize("strategy", TRANSFORMED)
def test_gradient_through_an_inner_step(strategy, world_size):
    """MAML: the loss after one step of SGD on another batch, differentiated by the parameters before it."""
    full = trained_only(full_params())
    support, query = batch(), tuple(tensor.flip(0) for tensor in batch())

    def dense(p):
        inner = grad(lambda p: mean_of_ranks(dense_loss(p, *support), world_size))(p)
        adapted = fs.tree_map(lambda w, g: w - INNER_RATE * g, p, inner)
        return mean_of_ranks(dense_loss(adapted, *query), world_size)

    expected_grads, expected = grad_and_value(dense)(full)

    def program():
        params = shard(STRATEGIES[strategy](meshes()), full)
        mine_support, mine_query = mine(support, world_size), mine(query, world_size)

        def by_value_and_grad(p):
            _, inner = fs.value_and_grad(lambda p: sharded_loss(p, *mine_support).mean())(p)
            adapted = fs.tree_map(lambda w, g: w - INNER_RATE * g, p, inner)
            return sharded_loss(adapted, *mine_query).mean()

        def by_torch(p):
            inner = grad(lambda p: fs.objective(sharded_loss(p, *mine_support).mean(), like=p))(p)
            adapted = fs.tree_map(lambda w, g: w - INNER_RATE * g, p, inner)
            return sharded_loss(adapted, *mine_query).mean()

        for loss_fn in (by_value_and_grad, by_torch):
            value, grads = fs.value_and_grad(loss_fn)(params)
            assert_trees_close((value, fs.unshard(grads)), (expected, expected_grads), rtol=0.0, atol=4 * ATOL)
            grads, value = grad_and_value(lambda p: fs.objective(loss_fn(p), like=p))(params)  # noqa: B023
            assert_trees_close((value, fs.unshard(grads)), (expected, expected_grads), rtol=0.0, atol=4 * ATOL)

    spmd(program, world_size)


@pytest.mark.parametrize("world_size", COUNTS)
@pytest.mark.parametrize("strategy", TRANSFORMED)
def test_vmap_over_an_ensemble(strategy, world_size):
    """Members are stacked in front of every shard; each is trained as it would be alone."""
    draws = [normal(seed) for seed in range(3)]
    members = [fs.tree_map(lambda leaf: draw(*leaf.shape) / 2, trained_only(full_params())) for draw in draws]  # noqa: B023

    def program():
        args, transform = mine(batch(), world_size), STRATEGIES[strategy](meshes())
        sharded = [shard(transform, member) for member in members]
        stacked = fs.tree_map(lambda *locals: torch.stack(locals), *sharded)
        run = fs.value_and_grad(lambda p, *args: sharded_loss(p, *args).mean())
        values, grads = vmap(run, in_dims=(0, None, None))(stacked, *args)
        for i, member in enumerate(sharded):
            value, alone = run(member, *args)
            torch.testing.assert_close(values[i], value, rtol=0.0, atol=ATOL)
            assert specs(grads) == specs(alone)
            one = fs.tree_map(lambda leaf: leaf[i], grads)  # noqa: B023
            assert_trees_close(fs.unshard(one), fs.unshard(alone), rtol=0.0, atol=ATOL)

    spmd(program, world_size)


@pytest.mark.parametrize("world_size", COUNTS)
@pytest.mark.parametrize("strategy", TRANSFORMED)
def test_hessian_vector_products(strategy, world_size):
    full, draw = trained_only(full_params()), normal(3)
    vector = fs.tree_map(lambda leaf: draw(*leaf.shape), full)

    def dense(p):
        return mean_of_ranks(dense_loss(p, *batch()), world_size)

    expected_grads, expected = jvp(grad(dense), (full,), (vector,))

    def program():
        args, transform = mine(batch(), world_size), STRATEGIES[strategy](meshes())
        params, tangents = shard(transform, full), shard(transform, vector)

        def loss_fn(p):
            return sharded_loss(p, *args).mean()

        def inner_product(grads):
            """Each element counts once: those of gathered leaves on the rank that adds them up."""
            products = fs.tree_map(torch.mul, fs.gather(grads), vector)
            return sum(leaf.sum() for leaf in products.values())

        def engine(p):
            return fs.value_and_grad(loss_fn)(p)[1]

        for gradient in (engine, grad(lambda p: fs.objective(loss_fn(p), like=p))):
            grads, product = jvp(gradient, (params,), (tangents,))
            assert_trees_close(fs.unshard(grads), expected_grads, rtol=0.0, atol=ATOL)
            assert_trees_close(fs.unshard(product), expected, rtol=0.0, atol=4 * ATOL)
            again = grad(lambda p: fs.objective(inner_product(gradient(p)), like=p))(params)  # noqa: B023
            assert_trees_close(fs.unshard(again), expected, rtol=0.0, atol=4 * ATOL)
        _, again = fs.value_and_grad(lambda p: inner_product(engine(p)))(params)
        assert_trees_close(fs.unshard(again), expected, rtol=0.0, atol=4 * ATOL)

    spmd(program, world_size)


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
@pytest.mark.parametrize("strategy", TRANSFORMED)
def test_gradients_of_each_sample(strategy, world_size):
    """Of full parameters they are the rank's own; through gather those of equal places in the ranks' batches add up."""
    full, samples, draw = trained_only(full_params()), 3, normal(1)
    batches = [(draw(samples, 5), draw(samples, 3)) for _ in range(world_size)]

    def one(loss):
        return lambda p, x, target: loss(p, x[None], target[None])[0]

    dense = [vmap(grad(one(dense_loss)), in_dims=(None, 0, 0))(full, *args) for args in batches]
    expected = fs.tree_map(lambda *leaves: sum(leaves), *dense)

    def program():
        params, rank = shard(STRATEGIES[strategy](meshes()), full), torch.distributed.get_rank()
        own = vmap(grad(one(dense_loss)), in_dims=(None, 0, 0))(fs.gather(params), *batches[rank])
        assert_trees_close(own, dense[rank], rtol=0.0, atol=ATOL)
        summed = vmap(grad(one(sharded_loss)), in_dims=(None, 0, 0))(params, *batches[rank])
        assert specs(summed) == specs(params)
        for sample in range(samples):
            found = fs.unshard(fs.tree_map(lambda leaf: leaf[sample], summed))  # noqa: B023
            assert_trees_close(found, fs.tree_map(lambda leaf: leaf[sample], expected), rtol=0.0, atol=ATOL)  # noqa: B023

    spmd(program, world_size)
