"""Law 10: ranks that make different calls get one named error on every rank, and go on as before.

Transposes of collectives run on every rank, whatever a rank makes of their results.
"""

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
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
SGD = fs.from_torch(torch.optim.SGD, lr=0.1)


def params_of(**options):
    """The parameters on a new mesh of all ranks."""
    return fs.shard(FULL, fs.zero3(one_axis(), **{"min_shard_elements": 0, "bucket_bytes": 0, **options}))


def loss_of(model, params, *_):
    return model.apply(params, X).square().sum()


def train(params, reduce="mean", model=MODEL):
    return fs.value_and_grad(partial(loss_of, model), reduce=reduce)(params)


def train_results(params):
    return fs.tree_leaves(train(params))


def train_by_units(params, units):
    return train(params, model=fs.functionalize(MODULE, units=units))


def train_where_bias_is(params, frozen):
    bias = params["0.bias"]
    return train(params | {"0.bias": replace(bias, spec=replace(bias.spec, frozen=frozen))})


class Different(NamedTuple):
    """A call of parameters and a value, that of the last rank and of the others, and what the error must name."""

    call: Callable[[Any, Any], Any]
    last: Any
    others: Any
    parts: tuple[str, ...]


def apply_model(params):
    return MODEL.apply(params, X)


def accumulated(params, communicate):
    return fs.accumulate(partial(loss_of, MODEL), communicate=communicate)(params, [X, X])


# Calls that are also jitted.
JITTED = {
    "reduce": Different(train, "sum", "mean", ("reduce", "'sum'", "'mean'")),
    "communicate": Different(accumulated, "once", "each", ("communicate", "'once'", "'each'")),
    "verb": Different(lambda params, verb: verb(params), apply_model, train, ("verb", "got apply", "grad as on")),
}
NORM = "(psum_invariant of norm p=2.0, ['{}'])"
NAMES = "0.bias", "0.weight", (NORM.format("0.bias"), NORM.format("0.weight"))
DIFFERENT = JITTED | {
    "param_dtype": Different(
        lambda _, dtype: train(params_of(param_dtype=dtype)),
        torch.float32,
        torch.bfloat16,
        (BIAS, "float32", "bfloat16"),
    ),
    "policy of a unit": Different(
        lambda _, prefetch: train(params_of(prefetch=prefetch)), 2, None, (BIAS, "prefetch=2", "prefetch=None")
    ),
    # Functions are not compared by the call, and differ where they decide what is gathered again.
    "regather of some units": Different(
        lambda _, unit: train(params_of(regather=lambda name: name == unit, prefetch=0)),
        "0",
        "1",
        ("rank 0: all_gather", "(gather of 1) over 'shard' of", "(scatter of 1) over 'shard' of"),
    ),
    # These are sharded in the same way, and differ afterwards.
    "frozen": Different(train_where_bias_is, True, False, (BIAS, "frozen True", "frozen False")),
    "frozen in shard": Different(
        lambda _, mask: fs.shard(FULL, fs.ddp(one_axis()), frozen=mask), "0.bias", None, (BIAS, "frozen float64")
    ),
    "dtype of a leaf": Different(
        lambda params, dtype: train(fs.tree_map(lambda x: x.to(dtype), params)),
        torch.float32,
        torch.float64,
        (BIAS, "torch.float32", "torch.float64"),
    ),
    "units": Different(
        train_by_units,
        "",
        nn.Linear,
        ("rank 0: all_gather", "(gather of 0) over 'shard' of", "(gather of (root)) over 'shard' of"),
    ),
    "leaves of a norm": Different(lambda params, name: fs.global_norm({name: params[name]}), *NAMES),
    "leaves of norms": Different(lambda params, name: fs.leaf_norms({name: params[name]}), *NAMES),
    "names of operands": Different(
        lambda _, name: fs.psum({name: X}, fs.axis_of(one_axis())),
        "hits",
        "loss",
        ("(psum of ['hits'])", "(psum of ['loss'])"),
    ),
    "names of buffers": Different(
        lambda params, name: fs.sync_buffers({name: X}, params),
        "mean",
        "var",
        ("(sync_buffers of ['mean'])", "(sync_buffers of ['var'])"),
    ),
}


def lines_of(error, parts):
    """Read the lines behind an error's headline, the same on every rank; check the headline and the first of them."""
    text = str(error.value)
    headline, *lines = text.splitlines()
    if headline == "ranks differ in a collective":
        # A line for each rank, and then one for this rank.
        lines = [line for line in lines if re.match(r"  rank \d+: ", line)]
        headline = "\n".join(lines)
    else:
        assert re.match(r"\w+: (ranks make different calls|ranks hold different trees)$", headline), text
    assert all(part in f"{headline}\n{lines[0]}" for part in parts), text
    return lines


@on_ranks(2, pytest.param("2 processes", marks=pytest.mark.slow), timeout=len(DIFFERENT) * SECONDS)
def test_ranks_that_were_told_different_things_are_all_told(world_size):
    """And a good step goes on as before; jitted or not."""
    texts = []
    expected = train_results(params_of())
    for name, (call, last, others, parts) in DIFFERENT.items():
        params = params_of()
        value = last if my_rank() == world_size - 1 else others
        with pytest.raises((ValueError, fs.comm.CollectiveError)) as caught:
            call(params, value)
        texts.append(lines_of(caught, parts))
        params = params_of()
        assert_same_bits(train_results(params), expected)
        if name in JITTED:
            with pytest.raises(ValueError, match=r"^jit: ranks make different calls\n") as caught:
                fs.jit(lambda p, v=value, call=call: call(p, v))(params)
            texts.append(lines_of(caught, parts))
    assert_same_bits(fs.tree_leaves(fs.jit(train)(params)), expected)
    return texts


def updated(params, tx):
    return fs.update(tx, fs.TrainState.create(params, tx), fs.tree_map(torch.ones_like, params))


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
    params, errors = params_of(), {}
    expected = train_results(params)
    headline = r"ranks (make different calls|differ in)"
    for (name, alone), (other, call) in zip(calls.items(), cycle(TRAINING.items())):
        with pytest.raises((ValueError, fs.comm.CollectiveError), match=headline) as caught:
            alone(params) if my_rank() == 0 else call(params)
        params = params_of()
        text = str(caught.value).split("\n", 1)[1]
        errors[name, other] = text.splitlines()[:2]
        # Where both call one verb, as an optimizer's init does, it is the leaves that differ.
        assert name.split()[0] in text or other in text or "dtype" in text, text
        assert_same_bits(train_results(params), expected)
    return errors


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
def test_meshes_of_other_shapes_are_refused_before_groups_are_made(world_size):
    texts = []
    for common, other, parts in MESHES:
        with pytest.raises(ValueError, match=r"^init_mesh: expected the same mesh on every rank, ") as caught:
            fs.init_mesh(other if my_rank() == world_size - 1 else common, device="cpu")
        texts.append(str(caught.value))
        assert all(part in texts[-1] for part in parts), texts[-1]
        # What some ask for by -1 and others by a number is the same.
        mesh = fs.init_mesh({"shard": -1 if my_rank() else world_size}, device="cpu")
        assert fs.psum(torch.ones(()), fs.axis_of(mesh)) == world_size
    return texts


def zero3(mesh):
    return fs.zero3(mesh, min_shard_elements=0, bucket_bytes=0)


STRATEGIES = (fs.ddp, partial(fs.zero2, min_shard_elements=0), zero3)
COLLECTIVES = (
    fs.psum,
    lambda x, axis: fs.pcast(fs.psum_invariant(x, axis), axis, to="varying"),
    fs.all_gather,
    lambda x, axis: fs.reduce_scatter(fs.all_gather(x, axis), axis),
)
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


@on_ranks(2, pytest.param("2 processes", marks=pytest.mark.slow), timeout=4 * SECONDS)
def test_a_result_that_one_rank_does_not_use_is_reduced_all_the_same():
    """On processes such a step ended by a signal or never."""
    mesh = one_axis()
    axis = fs.axis_of(mesh)
    for number, call in enumerate(COLLECTIVES):
        for used in range(3):
            params = fs.shard(MATRICES, STRATEGIES[(number + used) % 3](mesh))
            loss = partial(loss_with_collectives, call=call, axis=axis, used=used)
            result, expected = (fs.value_and_grad(partial(loss, skip=skip))(params) for skip in (True, False))
            # Sums over the elements of a matrix and over ranks, through two collectives, forward and backward.
            near = within(expected, MATRICES["a"].numel() * axis.size, steps=4)
            assert_trees_close(result, expected, **near)


@on_ranks(2, timeout=SECONDS)
def test_an_operand_that_needs_no_gradient_on_one_rank_is_named_on_every_rank():
    mesh = one_axis()

    def loss(params):
        a = fs.gather(params["a"])
        return (a * fs.psum(a if my_rank() else a.detach(), fs.axis_of(mesh))).sum()

    # The rank that has no transpose of the collective goes on to the reduction of the leaf.
    text = (
        r"^ranks differ in a collective\n  rank 0: reduce_scatter .*\(scatter of \['a'\]\)"
        r".*\n  rank 1: all_reduce .*\(psum\)"
    )
    with pytest.raises(fs.comm.CollectiveError, match=text):
        fs.value_and_grad(loss)(fs.shard(MATRICES, zero3(mesh)))


@on_ranks(2, pytest.param("2 processes", marks=pytest.mark.slow), timeout=4 * SECONDS)
def test_ranks_whose_keys_are_in_another_order_are_told():
    """The pieces of two leaves of one shape would be put together as one."""
    full = {"a": torch.zeros(4), "b": torch.ones(4)}
    names = "ab" if my_rank() == 0 else "ba"

    def in_order(tree):
        return OrderedDict((name, tree[name]) for name in names)

    strategy = fs.fully_shard(one_axis())
    params = fs.shard(full, strategy)
    calls = {
        "shard: ranks hold different trees": lambda: fs.shard(in_order(full), strategy),
        "unshard: ranks make different calls": lambda: fs.unshard(in_order(params)),
        "gather: ranks make different calls": lambda: fs.gather(in_order(params)),
    }
    for headline, call in calls.items():
        with pytest.raises(ValueError, match="ranks ") as caught:
            call()
        line = "  (order): expected ['a'] as on the rank at shard=0, got ['b'] on the rank at shard=1"
        assert str(caught.value).split("\n")[:2] == [headline, line]
    assert_same_bits(fs.unshard(params), full)
