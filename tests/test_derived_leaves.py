"""Leaves that a loss computes from shards and gathers: every strategy gives the gradients of one process."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.func import grad, grad_and_value, jvp, vjp, vmap

import fshard as fs
from fshard.testing import assert_trees_close
from tests.checks import find_problems
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
    **{"weight norm": weight_norm, "norms of each leaf": norms_of_each_leaf, "LoRA": lora},
    **{"derived of derived": derived_of_derived, "used twice": used_twice, "after a step": after_a_step},
}


def params_by_strategy(program, full):
    """Full parameters by each strategy that a program takes."""
    for name, make in STRATEGIES.items():
        # LoRA computes with rows of "w" and "a", which a rank has both of where they are split alike.
        if program != "LoRA" or "large" not in name:
            yield name, fs.shard(full, make(meshes()))


def in_one_process(f, world_size):
    """The mean over ranks of a loss of full tensors."""
    return lambda p: sum(f(p, batch_of(rank)) for rank in range(world_size)) / world_size


def reference(f, params, x):
    grads, value = grad_and_value(lambda p: fs.objective(f(p, x), like=p))(params)
    return value, grads


def by_autograd(f, params, x):
    tracked = fs.tree_map(lambda leaf: leaf.clone().requires_grad_(), params)
    value = fs.objective(f(tracked, x), like=params)
    value.backward()
    zero = torch.zeros_like
    return value.detach(), fs.tree_map(lambda leaf: zero(leaf) if leaf.grad is None else leaf.grad, tracked)


def batched(f, params, x):
    """One of two sets of parameters, by vmap."""
    both = fs.tree_map(lambda leaf: torch.stack([leaf + 1, leaf]), params)
    values_and_grads = vmap(lambda params: reference(f, params, x))(both)
    return fs.tree_map(lambda leaf: leaf[1], values_and_grads)


MODES = {
    "eager": lambda f, params, x: fs.value_and_grad(f)(params, x),
    "jitted": lambda f, params, x: fs.jit(fs.value_and_grad(f))(params, x),
    "accumulated": lambda f, params, x: fs.accumulate(f)(params, [x, x]),
    **{mode.__name__: mode for mode in (reference, by_autograd, batched)},
}
# A trace takes a second.
JITTED = ("ddp", "zero3 of large leaves", "hsdp")


@on_ranks(2)
def test_second_derivatives(world_size):
    """Products of the Hessian with a vector, by reverse mode over reverse mode and by forward mode over it."""
    f, x = weight_norm, batch_of(my_rank())
    full, draw = full_params(), normal(9)
    direction = {name: draw(*leaf.shape) for name, leaf in full.items()}
    _, expected = jvp(grad(in_one_process(f, world_size)), (full,), (direction,))
    for _, params in params_by_strategy("weight norm", full):
        tangent = fs.shard(direction, params["v"].spec.transform)
        gradient = grad(lambda p: fs.objective(f(p, x), like=p))
        _, forward = jvp(gradient, (params,), (tangent,))
        (reverse,) = vjp(gradient, params)[1](tangent)
        for product in (forward, reverse):
            assert_trees_close(fs.unshard(product), expected, **rounding(expected))


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
LOST = (
    "value_and_grad: the loss depends on ['w'], by which the call around this one differentiates, and that gradient "
    "would be lost. Pass both trees, as in value_and_grad(f)((params, others)), or use full.detach() for a constant."
)


@pytest.mark.parametrize("compute", WRONG)
@on_ranks(2)
def test_wrong_mixtures_are_named(compute):
    """By the engine, by the reference under torch.func, and by fs.check."""
    params = fs.shard(full_params(), STRATEGIES["zero3 of large leaves"](meshes()))
    axis = fs.axis_of(meshes().line)

    def f(p):
        return fs.gather(compute(p, axis)).square().sum()

    engine, func = f"value_and_grad: {HEADLINE}", f"objective: {HEADLINE}"
    for run, headline, text in (
        (fs.value_and_grad(f), engine, WRONG[compute]),
        (grad(lambda p: fs.objective(f(p), like=p)), func, WRONG[compute]),
        (grad(lambda p: fs.value_and_grad(f)(p)[0]), engine, ""),
    ):
        with pytest.raises(ValueError, match=re.escape(headline)) as caught:
            run(params)
        assert text in str(caught.value)
    problems = find_problems(lambda p, axis: fs.gather(compute(p, axis)).square().sum(), params, axis)
    assert problems == ["missing sum" if compute is split_in_whole else "missing cast"]
    # The mesh is good afterwards.
    fs.value_and_grad(weight_norm)(params, batch_of(my_rank()))


@pytest.mark.parametrize("name", ("ddp", "zero3"))
@on_ranks(2)
def test_an_objective_with_regard_to_computed_leaves(name):
    """Of leaves that the caller names by `like`, too, it checks what they are computed from."""
    full = {name: tensor for name, tensor in full_params().items() if name in "vw"}
    params = fs.shard(full, STRATEGIES[name](meshes()))
    axis, x = fs.axis_of(meshes().line), batch_of(my_rank())

    def after_step(p, rate):
        moved = fs.tree_map(lambda a, b: a - rate * b, p["v"], p["w"])
        return fs.objective(head(fs.gather(moved), x), like=moved)

    def of_cast(rate):
        return after_step(params, fs.pcast(rate, axis, to="varying"))

    def in_one_process(rate):
        moved = full["v"] - rate * full["w"]
        return (head(moved, batch_of(0)) + head(moved, batch_of(1))) / 2

    rate = torch.tensor(0.1, dtype=x.dtype)
    expected = grad(in_one_process)(rate)
    assert_trees_close(grad(of_cast)(rate), expected, **rounding(expected))
    if name == "zero3":
        with pytest.raises(ValueError, match=re.escape(f"objective: {HEADLINE}")) as caught:
            grad(lambda p: after_step(p, fs.global_norm(p)))(params)
        assert "got psum_invariant over 'shard', whose result agrees" in str(caught.value)


def gathered_inside(theirs):
    return lambda: fs.gather(theirs)


def gathered_before(theirs):
    full = fs.gather(theirs)
    return lambda: full


def computed_before(theirs):
    doubled = fs.tree_map(lambda w: w * 2, theirs)
    return lambda: fs.gather(doubled)


@pytest.mark.parametrize("name", ("ddp", "zero3"))
@on_ranks(2)
def test_a_call_inside_another_names_gradients_that_would_be_lost(name):
    """The gradient of a loss inside another is a constant to leaves that only the outer call differentiates by."""
    full, x = full_params(), batch_of(my_rank())
    params = fs.shard({"v": full["v"]}, STRATEGIES[name](meshes()))
    others = fs.shard({"w": full["w"]}, STRATEGIES[name](meshes()))

    def after_step(inner, theirs):
        grads = inner(theirs)
        moved = fs.tree_map(lambda v, g: v - 0.1 * g, params, grads)
        return head(fs.gather(moved)["v"], x) + fs.gather(theirs)["w"].square().sum()

    def loss_of(p, w):
        return (torch.tanh(x @ p["v"]) * (x @ w["w"])).square().sum()

    for make in (gathered_inside, gathered_before, computed_before):

        def by_closure(theirs, make=make):
            gather_theirs = make(theirs)
            return fs.value_and_grad(lambda p: loss_of(fs.gather(p), gather_theirs()))(params)[1]

        with pytest.raises(ValueError, match=re.escape(LOST)):
            fs.value_and_grad(partial(after_step, by_closure))(others)

    def by_both(theirs):
        return fs.value_and_grad(lambda both: loss_of(*fs.gather(both)))((params, theirs))[1][0]

    def by_constant(theirs):
        return fs.value_and_grad(lambda p: loss_of(fs.gather(p), {"w": fs.gather(theirs)["w"].detach()}))(params)[1]

    def in_one_process(w, detach):
        def inner(v):
            return sum(loss_of_rank(v, w.detach() if detach else w, batch_of(rank)) for rank in range(2)) / 2

        moved = full["v"] - 0.1 * grad(inner)(full["v"])
        return sum(head(moved, batch_of(rank)) for rank in range(2)) / 2 + w.square().sum()

    def loss_of_rank(v, w, x):
        return (torch.tanh(x @ v) * (x @ w)).square().sum()

    for inner, detach in ((by_both, False), (by_constant, True)):
        _, grads = fs.value_and_grad(partial(after_step, inner))(others)
        expected = grad(partial(in_one_process, detach=detach))(full["w"])
        assert_trees_close(fs.unshard(grads)["w"], expected, **rounding(expected))


@pytest.mark.rows(6)
@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_strategy_is_one_process(program, mode, world_size):
    f = PROGRAMS[program]
    grads, value = grad_and_value(in_one_process(f, world_size))(full_params())
    expected = value, grads
    for name, params in params_by_strategy(program, full_params()):
        if mode == "jitted" and name not in JITTED:
            continue
        value, grads = MODES[mode](f, params, batch_of(my_rank()))
        unused = [path for path, grad in grads.items() if grad is None]
        grads |= {path: fs.tree_map(torch.zeros_like, params[path]) for path in unused}
        try:
            assert_trees_close((value, fs.unshard(grads)), expected, **rounding(expected))
        except AssertionError as error:
            error.add_note(name)
            raise
