"""Leaves that a loss computes from shards and gathers: every strategy gives the gradients of one process."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.func import grad, grad_and_value, jvp, vjp, vmap

import fshard as fs
from fshard.testing import assert_trees_close, check_varying
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import meshes, normal

SHAPES = {"v": (6, 3), "w": (6, 3), "a": (6, 2), "b": (2, 3), "scale": (5,)}

# Rows of x of each rank.
ROWS = 2
# Sums of some hundred products, whose differences a quotient, its derivative and the derivative of that hand on.
TERMS, STEPS = 300, 4

STRATEGIES: dict[str, Callable[[Any], fs.ShardTransform]] = {
    "ddp": lambda on: fs.ddp(on.line),
    "zero1": lambda on: fs.zero1(on.line, min_shard_elements=0),
    "zero2 of whole leaves": lambda on: fs.zero2(on.line),
    "zero2": lambda on: fs.zero2(on.line, min_shard_elements=0),
    "zero3": lambda on: fs.zero3(on.line, min_shard_elements=0, bucket_bytes=0, prefetch=0),
    # Of the leaves "a", "b" and "scale" are whole.
    "zero3 of large leaves": lambda on: fs.zero3(on.line, min_shard_elements=16, bucket_bytes=0, prefetch=0),
    "hsdp": lambda on: fs.hsdp(on.grid, min_shard_elements=0),
    "hsdp of large leaves": lambda on: fs.hsdp(on.grid, min_shard_elements=16),
}
# Where "w" and "a" are split alike, so that a rank has the same rows of both.
ALIKE = tuple(name for name in STRATEGIES if "large" not in name)


rounding = partial(within, terms=TERMS, steps=STEPS)


def full_params():
    draw = normal()
    return {name: draw(*shape) / 2 + 1 for name, shape in SHAPES.items()}


def batch_of(rank):
    return normal(rank + 1)(ROWS, 6)


def computed(f, like, *leaves):
    """A leaf stored as another, computed by f of local tensors; a plain tensor of plain ones."""
    local = f(*[leaf.local if isinstance(leaf, fs.Sharded) else leaf for leaf in leaves])
    return fs.Sharded(local, like.spec) if isinstance(like, fs.Sharded) else local


def head(weight, x):
    return torch.tanh(x @ weight).square().sum()


def weight_norm(p, x):
    norm = fs.gather(p)["v"].norm()
    return head(fs.gather(fs.tree_map(lambda v: v / norm, p))["v"], x)


def norms_of_each_leaf(p, x):
    """A model of leaves that are each divided by their norms, some of them whole."""
    norms = {name: leaf.norm() for name, leaf in fs.gather(p).items()}
    full = fs.gather({name: computed(lambda v, n=norms[name]: v / n, leaf, leaf) for name, leaf in p.items()})
    return head(full["v"] + full["w"] + full["a"] @ full["b"], x) * full["scale"].sum()


def scale_of_another_leaf(p, x):
    scale = fs.gather(p["scale"]).square().sum().sqrt()
    full = fs.gather(fs.tree_map(lambda leaf: leaf * scale, {"v": p["v"], "w": p["w"]}))
    return head(full["v"], x) + head(full["w"], x) * scale


def lora(p, x):
    b = fs.gather(p["b"])
    merged = computed(lambda w, a: w + a @ b, p["w"], p["w"], p["a"])
    return head(fs.gather(merged), x) + head(fs.gather(p)["v"], x)


def derived_of_derived(p, x):
    norm = fs.gather(p["v"]).norm()
    first = fs.tree_map(lambda v: v / norm, p["v"])
    peak = fs.gather(first).square().mean()
    second = computed(lambda d, w: d * peak + w, first, first, p["w"])
    return head(fs.gather(second), x) + 0.1 * head(fs.gather(first), x)


def used_twice(p, x):
    norm = fs.gather(p["w"]).norm()
    merged = fs.tree_map(lambda v: v / norm, p["v"])
    once = torch.tanh(x @ fs.gather(merged))
    between = fs.gather(p["b"]).sum() * norm
    return (once.sum() + between) * head(fs.gather({"again": merged})["again"], x) + head(fs.gather(p["w"]), x)


def after_a_step(p, x):
    """One step of MAML, whose sums over ranks agree where leaves are whole, divided by what varies."""
    two = {"v": p["v"], "w": p["w"]}
    _, grads = fs.value_and_grad(lambda q: head(fs.gather(q)["v"] + fs.gather(q)["w"], x.new_ones(1, 6) / 6))(two)
    norm = fs.gather(p["v"]).norm()
    full = fs.gather(fs.tree_map(lambda leaf, grad: (leaf - 0.1 * grad) / norm, two, grads))
    return head(full["v"] * full["w"], x) * norm


PROGRAMS = {
    "weight norm": (weight_norm, tuple(STRATEGIES)),
    "norms of each leaf": (norms_of_each_leaf, tuple(STRATEGIES)),
    "scale of another leaf": (scale_of_another_leaf, tuple(STRATEGIES)),
    "LoRA": (lora, ALIKE),
    "derived of derived": (derived_of_derived, tuple(STRATEGIES)),
    "used twice": (used_twice, tuple(STRATEGIES)),
    "after a step": (after_a_step, tuple(STRATEGIES)),
}


def in_one_process(f, world_size):
    """The mean over ranks of a loss of full tensors."""
    return lambda p: sum(f(p, batch_of(rank)) for rank in range(world_size)) / world_size


def eager(f, params, x):
    return fs.value_and_grad(f)(params, x)


def jitted(f, params, x):
    return fs.jit(fs.value_and_grad(f))(params, x)


def accumulated(f, params, x):
    return fs.accumulate(f)(params, [x, x])


def reference(f, params, x):
    grads, value = grad_and_value(lambda p: fs.objective(f(p, x), like=p))(params)
    return value, grads


def by_autograd(f, params, x):
    tracked = fs.tree_map(lambda leaf: leaf.clone().requires_grad_(), params)
    value = fs.objective(f(tracked, x), like=params)
    value.backward()
    zero = torch.zeros_like
    return value.detach(), fs.tree_map(lambda leaf: zero(leaf) if leaf.grad is None else leaf.grad, tracked)


MODES = {f.__name__: f for f in (eager, jitted, accumulated, reference, by_autograd)}
# A trace takes a second.
JITTED = ("ddp", "zero3 of large leaves", "hsdp")


@pytest.mark.parametrize("program", ("weight norm", "derived of derived", "after a step"))
@on_ranks(2, 3)
def test_second_derivatives(program, world_size):
    """Products of the Hessian with a vector, by reverse mode over reverse mode and by forward mode over it."""
    f, names = PROGRAMS[program]
    full, draw = full_params(), normal(9)
    direction = {name: draw(*leaf.shape) for name, leaf in full.items()}
    _, expected = jvp(grad(in_one_process(f, world_size)), (full,), (direction,))
    for name in names:
        params, tangent = (fs.shard(tree, STRATEGIES[name](meshes())) for tree in (full, direction))
        x = batch_of(my_rank())
        gradient = grad(lambda p: fs.objective(f(p, x), like=p))  # noqa: B023
        assert_trees_close(fs.unshard(jvp(gradient, (params,), (tangent,))[1]), expected, **rounding(expected))
        assert_trees_close(fs.unshard(vjp(gradient, params)[1](tangent)[0]), expected, **rounding(expected))


@on_ranks(2)
def test_a_batch_of_programs_is_a_loop():
    f, x = weight_norm, batch_of(my_rank())
    stacked = {name: torch.stack([leaf, leaf + 1]) for name, leaf in full_params().items()}
    for _name, make in STRATEGIES.items():
        each = [fs.shard({path: leaf[i] for path, leaf in stacked.items()}, make(meshes())) for i in range(2)]
        both = fs.tree_map(lambda a, b: torch.stack([a, b]), *each)
        gradient = grad(lambda p: fs.objective(f(p, x), like=p))
        batched = vmap(gradient)(both)
        for i, params in enumerate(each):
            found = fs.tree_map(lambda leaf, i=i: leaf[i], batched)
            assert_trees_close(found, gradient(params), **rounding(found))


def of_a_sum(p, x, axis):
    """A norm that `psum` adds up over ranks varies, as gathered tensors do."""
    norm = fs.gather(p["v"]).norm()
    total = fs.psum(norm, axis) if axis else norm * x
    return fs.tree_map(lambda v: v / total, p["v"]), norm


def of_an_agreeing_sum(p, x, axis):
    """`psum_invariant` makes it agree; where leaves are split, `pcast` hands it to the pieces of each rank."""
    norm = fs.gather(p["v"]).norm()
    if not axis:
        return p["v"] / (norm * x) + norm * x, norm
    total = fs.psum_invariant(norm, axis)
    if p["v"].spec.partition:
        total = fs.pcast(total, axis, to="varying")
    return fs.tree_map(lambda v: v / total + total, p["v"]), norm


def of_both(p, x, axis):
    """A value that varies beside the sum of the same."""
    norm = fs.gather(p["v"]).norm()
    if not axis:
        return p["v"] * norm + norm * x, norm
    total = fs.psum_invariant(norm, axis)
    if p["v"].spec.partition:
        total = fs.pcast(total, axis, to="varying")
    return fs.tree_map(lambda v: v * norm + total, p["v"]), norm


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("compute", (of_a_sum, of_an_agreeing_sum, of_both))
def test_collectives_in_what_leaves_are_computed_from(compute, world_size):
    def f(p, x, axis):
        derived, norm = compute(p, world_size, axis)
        return head(fs.gather(derived), x) * norm

    def whole(p):
        return sum(f(p, batch_of(rank), None) for rank in range(world_size)) / world_size

    full = {"v": full_params()["v"]}
    expected, value = grad_and_value(whole)(full)
    for name in ("ddp", "zero2", "zero3"):
        params = fs.shard(full, STRATEGIES[name](meshes()))
        axis = fs.axis_of(meshes().line)
        for mode in (eager, jitted, reference, by_autograd):
            objective, grads = mode(partial(f, axis=axis), params, batch_of(my_rank()))
            assert_trees_close((objective, fs.unshard(grads)), (value, expected), **rounding((value, expected)))
        check_varying(partial(f, axis=axis), params, batch_of(my_rank()))


@on_ranks(2, 4)
def test_check_varying_finds_nothing_where_gradients_are_right():
    for f, names in PROGRAMS.values():
        for name in names:
            check_varying(f, fs.shard(full_params(), STRATEGIES[name](meshes())), batch_of(my_rank()))


def whole_in_split(p, axis):
    scale = p["b"].local.sum()
    return fs.tree_map(lambda w: w * scale, p["w"])


def agreeing_in_split(p, axis):
    total = fs.psum_invariant(p["w"].local.square().sum(), axis)
    return fs.tree_map(lambda w: w / total, p["w"])


def split_in_whole(p, axis):
    part = p["w"].local.sum()
    return fs.tree_map(lambda b: b * part, p["b"])


def sum_of_whole(p, axis):
    total = fs.psum_invariant(p["b"].local.sum(), axis)
    return fs.tree_map(lambda b: b / total, p["b"])


# Programs whose gradients would be wrong under "zero3 of large leaves", where "w" is split and "b" is whole; the part
# of the error that names the fault.
PCAST = "varies between ranks (apply fs.gather or fs.pcast first), got a leaf that is replicated over 'shard'"
WRONG = {
    whole_in_split: f"['b']: expected a value that {PCAST}",
    agreeing_in_split: "varies between ranks (apply fs.pcast first), got psum_invariant over 'shard', whose result",
    split_in_whole: "agrees between ranks (apply fs.psum_invariant), got a leaf that is split over 'shard'",
    sum_of_whole: f"['b']: expected a value that {PCAST}",
}
HEADLINE = "gradients of leaves that the function computes would be wrong\n"


@pytest.mark.parametrize("compute", WRONG)
@on_ranks(2)
def test_wrong_mixtures_are_named(compute):
    """By the engine, by the reference under torch.func, and by check_varying."""
    params = fs.shard(full_params(), STRATEGIES["zero3 of large leaves"](meshes()))
    axis = fs.axis_of(meshes().line)

    def f(p):
        return fs.gather(compute(p, axis)).square().sum()

    with pytest.raises(ValueError, match=re.escape(f"value_and_grad: {HEADLINE}")) as caught:
        fs.value_and_grad(f)(params)
    assert WRONG[compute] in str(caught.value)
    with pytest.raises(ValueError, match=re.escape(f"objective: {HEADLINE}")) as caught:
        grad(lambda p: fs.objective(f(p), like=p))(params)
    assert WRONG[compute] in str(caught.value)
    with pytest.raises(ValueError, match=re.escape(f"value_and_grad: {HEADLINE}")) as caught:
        grad(lambda p: fs.value_and_grad(f)(p)[0])(params)
    with pytest.raises(AssertionError, match="varying and invariant values are mixed") as caught:
        check_varying(f, params)
    assert WRONG[compute] in str(caught.value)
    # The mesh is good afterwards.
    fs.value_and_grad(lambda p: weight_norm(p, batch_of(my_rank())))(params)


@pytest.mark.rows(5)
@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_strategy_is_one_process(program, mode, world_size):
    f, names = PROGRAMS[program]
    expected, value = grad_and_value(in_one_process(f, world_size))(full_params())
    for name in names:
        if mode == "jitted" and name not in JITTED:
            continue
        params = fs.shard(full_params(), STRATEGIES[name](meshes()))
        objective, grads = MODES[mode](f, params, batch_of(my_rank()))
        for path, leaf in params.items():
            if grads[path] is None:
                grads[path] = fs.tree_map(torch.zeros_like, leaf)
        try:
            assert_trees_close((objective, fs.unshard(grads)), (value, expected), **rounding((value, expected)))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
