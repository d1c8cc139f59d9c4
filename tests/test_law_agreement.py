"""Law 10: ranks that make different calls get one named error on every rank, and go on as before.

Transposes of collectives run on every rank, whatever a rank makes of their results.
"""

import re
import time
from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import assert_same_bits, normal, one_axis

# A call that some rank never comes to would wait for the timeout of the process group, which is minutes.
SECONDS = 20.0

MODULE = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
MODEL = fs.functionalize(MODULE, units=nn.Linear)
# The same in every process.
FULL = {name: normal()(*parameter.shape) for name, parameter in MODULE.named_parameters()}
X = normal()(2, 4)
BIAS = "['0.bias']"


def zero3(mesh, **options):
    return fs.zero3(mesh, **{"min_shard_elements": 0, **options})


def params_of(strategy, **keywords):
    return fs.shard(FULL, strategy, **keywords)


def loss_of(model, params, *_):
    return model.apply(params, X).square().sum()


def train(params, reduce="mean", units=None):
    model = MODEL if units is None else fs.functionalize(MODULE, units=units)
    return fs.value_and_grad(partial(loss_of, model), reduce=reduce)(params)


def accumulate(params, microbatches=1, **options):
    return fs.accumulate(partial(loss_of, MODEL), **options)(params, [X] * microbatches)


# Calls, also jitted: the arguments of the last rank, those of the others, and what the error must name.
CALLS = {
    "reduce": (train, "sum", "mean", ["reduce", "'sum'", "'mean'"]),
    "communicate": (lambda p, c: accumulate(p, 2, communicate=c), "once", "each", ["communicate", "'once'", "'each'"]),
    "verb": (
        lambda params, verb: verb(params),
        lambda params: MODEL.apply(params, X),
        train,
        ["verb", "got apply", "grad as on"],
    ),
}


def option(name, **others):
    return lambda mesh, value: train(params_of(zero3(mesh, **{name: value}, **others)))


def frozen_afterwards(mesh, frozen):
    params = params_of(zero3(mesh))
    params["0.bias"] = replace(params["0.bias"], spec=replace(params["0.bias"].spec, frozen=frozen))
    return train(params)


# The same of calls of the mesh.
TOLD = {
    **{
        name: (lambda mesh, told, call=call: call(params_of(zero3(mesh)), told), *rest)
        for name, (call, *rest) in CALLS.items()
    },
    "param_dtype": (option("param_dtype"), torch.float32, torch.bfloat16, [BIAS, "float32", "bfloat16"]),
    # Functions are not compared by the call, and differ where they decide what is gathered again.
    "regather of some units": (
        option("regather", bucket_bytes=0, prefetch=0),
        lambda n: n == "0",
        lambda n: n == "1",
        ["rank 0: all_gather", "(gather of 1) over 'shard' of", "(scatter of 1) over 'shard' of"],
    ),
    # These are sharded in the same way, and differ afterwards.
    "frozen afterwards": (frozen_afterwards, True, False, [BIAS, "frozen True", "frozen False"]),
    "dtype of a leaf": (
        lambda mesh, d: train(fs.tree_map(lambda x: x.to(d), params_of(zero3(mesh)))),
        torch.float32,
        torch.float64,
        [BIAS, "torch.float32", "torch.float64"],
    ),
    "microbatches": (
        lambda mesh, n: accumulate(params_of(zero3(mesh)), n),
        3,
        2,
        ["accumulate: ranks make different calls\n  microbatches: expected 2 as on", "got 3 on"],
    ),
    "units": (
        lambda mesh, units: train(params_of(zero3(mesh, bucket_bytes=0)), units=units),
        "",
        nn.Linear,
        ["rank 0: all_gather", "(gather of 0) over 'shard' of", "(gather of (root)) over 'shard' of"],
    ),
}


def lines_of(text, parts):
    """Read the lines behind an error's headline, the same on every rank; check the headline and the first of them."""
    headline, *lines = text.splitlines()
    if headline == "ranks differ in a collective":
        # A line for each rank, and then one for this rank.
        lines = [line for line in lines if re.match(r"  rank \d+: ", line)]
        headline = "\n".join(lines)
    else:
        assert re.match(r"\w+: (ranks make different calls|ranks hold different trees)$", headline), text
    assert all(part in f"{headline}\n{lines[0]}" for part in parts), text
    return lines


@on_ranks(2, pytest.param("2 processes", marks=pytest.mark.slow), timeout=len(TOLD) * SECONDS)
def test_ranks_that_were_told_different_things_are_all_told():
    """Within seconds, and a good step goes on as before; jitted or not."""
    mesh, found = one_axis(), []
    for name, (call, other, common, parts) in TOLD.items():
        params, last = params_of(zero3(mesh)), my_rank() == mesh.size() - 1
        expected, started = train(params), time.monotonic()
        with pytest.raises((ValueError, fs.comm.CollectiveError)) as caught:
            call(mesh, other if last else common)
        found.append(lines_of(str(caught.value), parts))
        mesh = one_axis()
        assert time.monotonic() - started < SECONDS, name
        params = params_of(zero3(mesh))
        assert_same_bits(fs.tree_leaves(train(params)), fs.tree_leaves(expected))
        if name in CALLS:
            call, *_ = CALLS[name]
            same, differ = (fs.jit(lambda p, f=call, told=t: f(p, told)) for t in (common, other if last else common))
            expected = same(params)
            with pytest.raises(ValueError, match=r"^jit: ranks make different calls\n") as caught:
                differ(params)
            found.append(lines_of(str(caught.value), parts))
            assert_same_bits(fs.tree_leaves(same(params)), fs.tree_leaves(expected))
    return found


def updated(params, tx):
    return fs.update(tx, fs.TrainState.create(params, tx), fs.tree_map(torch.ones_like, params))


SGD = fs.from_torch(torch.optim.SGD, lr=0.1)
# What the first rank does alone, while the others train.
ALONE = {
    "gather": lambda params: fs.gather(params),
    "scatter_grads": lambda params: fs.scatter_grads(FULL, like=params),
    "apply": lambda params: MODEL.apply(params, X),
    "update that clips": lambda params: updated(params, fs.chain(fs.clip_by_global_norm(1.0), SGD)),
    "jit": lambda params: fs.jit(lambda p: fs.tree_map(torch.square, p))(params),
    "gather under torch.func": lambda params: torch.func.grad(lambda p: fs.gather(p)["0.weight"].sum())(params),
}
TRAINING = {"value_and_grad": train, "unshard": fs.unshard, "gather": lambda params: fs.gather({"all": params})}


def errors_of_one_alone(calls):
    """Return the error of each rank where the first one alone makes a call; it must be the same on all."""
    params, found = params_of(zero3(one_axis())), {}
    expected = train(params)
    for (name, alone), (other, call) in zip(calls.items(), cycle(TRAINING.items())):
        with pytest.raises(
            (ValueError, fs.comm.CollectiveError), match=r"ranks (make different calls|differ in)"
        ) as caught:
            alone(params) if my_rank() == 0 else call(params)
        params = params_of(zero3(one_axis()))
        text = str(caught.value).split("\n", 1)[1]
        found[name, other] = text.splitlines()[:2]
        # Where both call one verb, as an optimizer's init does, it is the leaves that differ.
        assert name.split()[0] in text or other in text or "dtype" in text, text
        assert_same_bits(fs.tree_leaves(train(params)), fs.tree_leaves(expected))
    return found


@on_ranks(3, pytest.param("2 processes", marks=pytest.mark.slow), timeout=6 * SECONDS)
def test_a_verb_that_one_rank_calls_alone_is_named_on_every_rank():
    """Where gloo would end by a signal, or return what it was not sent."""
    return errors_of_one_alone(ALONE)


# The meshes that ranks ask for, the last rank its own, and what each error must name.
MESHES = [
    ({"a": 2, "b": -1}, {"a": 1, "b": -1}, ["'a': 2", "'a': 1"]),
    ({"a": -1, "b": 1}, {"b": 1, "a": -1}, ["'a'", "'b'"]),
    ({"shard": -1}, {"data": 3}, ["'shard': 4", "'data': 3"]),
]


@on_ranks(4, timeout=4 * SECONDS)
def test_meshes_of_other_shapes_are_refused_before_groups_are_made():
    rank, size, found = my_rank(), dist.get_world_size(), []
    for common, other, parts in MESHES:
        with pytest.raises(ValueError, match=r"^init_mesh: expected the same mesh on every rank, ") as caught:
            fs.init_mesh(other if rank == size - 1 else common, device="cpu")
        found.append(str(caught.value))
        assert all(part in found[-1] for part in parts), found[-1]
        # What some ask for by -1 and others by a number is the same.
        mesh = fs.init_mesh({"shard": -1 if rank else size}, device="cpu")
        assert fs.comm.all_gather([torch.ones(1)], fs.axis_of(mesh), "test")[0].sum() == size
    return found


WAYS = {"ddp": fs.ddp, "zero2": partial(fs.zero2, min_shard_elements=0), "zero3": partial(zero3, bucket_bytes=0)}
COLLECTIVES = {
    "psum": fs.psum,
    "psum_invariant": lambda x, axis: fs.pcast(fs.psum_invariant(x, axis), axis, to="varying"),
    "all_gather": fs.all_gather,
    "reduce_scatter": lambda x, axis: fs.reduce_scatter(fs.all_gather(x, axis), axis),
}


MATRICES = {name: normal(i)(6, 3) for i, name in enumerate("abc", 1)}


def loss_with_collectives(params, call, axis, used, skip):
    """Two collectives between three units; a rank that does not use a result drops it, or multiplies it by zero."""
    last = fs.comm.rank(axis) == axis.size - 1
    x = torch.tanh(fs.gather(params["a"]) * (1 + fs.comm.rank(axis)))
    first = call(x, axis)
    y = torch.tanh(x * fs.gather(params["b"]))
    second = call(y, axis)
    # Nor does it use the last unit.
    terms = first.square().sum(), (second.sum() * y).square().sum(), fs.gather(params["c"]).square().sum()
    if last and skip:
        return sum(terms[:used], y.sum())
    return sum(term * (n < used or not last) for n, term in enumerate(terms)) + last * y.sum()


@on_ranks(2, "2 processes", timeout=4 * SECONDS)
def test_a_result_that_one_rank_does_not_use_is_reduced_all_the_same():
    """On processes such a step ended by a signal or never."""
    mesh = one_axis()
    axis = fs.axis_of(mesh)
    for number, call in enumerate(COLLECTIVES.values()):
        for used in range(3):
            params = fs.shard(MATRICES, list(WAYS.values())[(number + used) % 3](mesh))
            loss = partial(loss_with_collectives, call=call, axis=axis, used=used)
            found, expected = (fs.value_and_grad(partial(loss, skip=skip))(params) for skip in (True, False))
            # Sums over the elements of a matrix and over ranks, through two collectives, forward and backward.
            near = within(expected, MATRICES["a"].numel() * axis.size, steps=4)
            assert_trees_close(found, expected, **near)


@on_ranks(2, timeout=SECONDS)
def test_an_operand_that_needs_no_gradient_on_one_rank_is_named_on_every_rank():
    mesh = one_axis()
    axis, params = fs.axis_of(mesh), fs.shard(MATRICES, WAYS["zero3"](mesh))

    def f(p):
        a = fs.gather(p["a"])
        return (a * fs.psum(a.detach() if mesh.get_rank() else a, axis)).sum()

    # The rank that has no transpose of the collective goes on to the reduction of the leaf.
    named = r"  rank 0: all_reduce .*\(psum\).*\n  rank 1: reduce_scatter .*\(scatter of \['a'\]\)"
    with pytest.raises(fs.comm.CollectiveError, match=rf"^ranks differ in a collective\n{named}"):
        fs.value_and_grad(f)(params)


# Collectives of torch's own in a loss, which no transpose follows.
FOREIGN = {
    "c10d.allreduce_": lambda x: (dist.all_reduce(x), x)[1],
    "_c10d_functional.all_reduce": lambda x: funcol.all_reduce(x, "sum", dist.group.WORLD),
}


@on_ranks("2 processes", timeout=2 * SECONDS)
def test_collectives_of_torch_are_refused_in_a_trace():
    params = fs.shard(MATRICES, WAYS["zero3"](one_axis()))
    for name, call in FOREIGN.items():

        def f(p, call=call):
            value = fs.gather(p)["a"].sum()
            return call(value.detach()) * value

        with pytest.raises(
            ValueError, match=f"^jit: the function calls torch.distributed's .*{name}.*, which cannot be part"
        ):
            fs.jit(fs.value_and_grad(f))(params)
