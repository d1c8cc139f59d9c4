"""What every optimizer and every transformation must do, as one table: sharded or not, donated or not."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import optim

import fshard as fs
from fshard.testing import assert_trees_close
from fshard.tree import flatten, is_sharded
from tests.ranks import on_ranks
from tests.tolerance import within
from tests.trees import STRATEGIES, assert_same_bits, copied, meshes, normal, one_axis, padded_with, tensors

STEPS = 4

# No size is a multiple of the number of ranks, and one is smaller.
SHAPES = {"w": (5, 3), "wide": (3, 37), "tall": (37, 6), "vector.bias": (7,)}
SHAPES |= {"one": (1,), "scalar": (), "empty": (0, 3), "stack": (2, 5, 3)}
MATRICES = ("w", "wide", "tall")


class Row(NamedTuple):
    """One optimizer."""

    make: Any
    # Whether a donated update writes its parameters and state in place.
    donated: bool = False
    # Additions that each number depends on and ranks may do in another order; 0 where sharded is dense to the bit.
    rounds: int = 0
    # Whether the state has the rows and columns of a leaf, split as far as the leaf is.
    reduced: bool = False


def from_torch(cls=optim.AdamW, **hyper):
    return fs.from_torch(cls, **{"lr": 0.1, **hyper})


# Norms add up the squares of each leaf, rank by rank.
NORM = sum(torch.Size(shape).numel() for shape in SHAPES.values())
TABLE = {
    "sgd dampening": Row(lambda: fs.sgd(0.1, 0.9, dampening=0.2, weight_decay=0.1)),
    "sgd momentum": Row(lambda: fs.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1)),
    "adam": Row(lambda: fs.adam(0.1, weight_decay=0.1)),
    "adamw": Row(lambda: fs.adamw(lambda count: 0.1 / (1 + count))),
    "from_torch SGD": Row(lambda: from_torch(optim.SGD, momentum=0.9), donated=True),
    "from_torch Adagrad": Row(lambda: from_torch(optim.Adagrad, lr_decay=0.1), donated=True),
    "from_torch NAdam": Row(lambda: from_torch(optim.NAdam, weight_decay=0.1), donated=True),
    # Fused kernels round the elements behind their last full vector in another way, a few times an update.
    "from_torch AdamW fused": Row(lambda: from_torch(fused=True), donated=True, rounds=8),
    "from_torch Adam foreach": Row(lambda: from_torch(optim.Adam, foreach=True, amsgrad=True), donated=True),
    "clip_by_global_norm": Row(
        lambda: fs.chain(fs.clip_by_global_norm(0.5), from_torch(fused=True)), donated=True, rounds=NORM
    ),
    "clip_by_norm": Row(lambda: fs.chain(fs.clip_by_norm(0.5), fs.sgd(0.1)), rounds=NORM),
    "clip_by_norm of order inf": Row(lambda: fs.chain(fs.clip_by_norm(0.5, float("inf")), fs.sgd(0.1))),
    "clip_by_value": Row(lambda: fs.chain(fs.clip_by_value(0.5), fs.sgd(0.1))),
    "add_decayed_weights": Row(lambda: fs.chain(fs.add_decayed_weights(0.1, "w*"), fs.sgd(0.1))),
    "masked optimizer": Row(lambda: fs.masked(from_torch(), lambda name, leaf: name != "w"), donated=True),
    "partition": Row(lambda: fs.partition({"*bias": from_torch(optim.SGD), "*": from_torch()}), donated=True),
    "freeze": Row(lambda: fs.freeze(from_torch(), ("w", "wide")), donated=True),
    "skip_nonfinite": Row(lambda: fs.skip_nonfinite(from_torch()), donated=True),
    "ema": Row(lambda: fs.ema(from_torch(), 0.9), donated=True),
}


def tree(seed):
    draw = normal(seed)
    return {name: draw(*shape) for name, shape in SHAPES.items()} | {"fixed": draw(4, 3)}


def run(tx, params, grads):
    """The parameters after some updates."""
    state = tx.init(params)
    for grad in grads:
        params, state = tx.update(grad, state, params)
    return params


def values(place=lambda full: full):
    """The parameters and the gradients of each step, in full; one leaf is frozen."""
    return place(tree(0)), [{**place(tree(step)), "fixed": None} for step in range(1, STEPS + 1)]


def dense(row):
    params, grads = values()
    frozen = params.pop("fixed")
    out = run(row.make(), params, [{name: grad[name] for name in SHAPES} for grad in grads])
    return {**out, "fixed": frozen}


def on_shards(strategy):
    return values(lambda full: fs.shard(full, strategy, frozen="fixed"))


def every_leaf():
    return fs.zero2(one_axis(), min_shard_elements=0)


def check_sharded_is_dense(row):
    expected, on = dense(row), meshes()
    for make in STRATEGIES.values():
        params = fs.unshard(run(row.make(), *on_shards(make(on))))
        if row.rounds:
            assert_trees_close(params, expected, **within(expected, row.rounds, STEPS))
        else:
            assert_same_bits(params, expected)


@pytest.mark.rows(4)
@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", TABLE)
def test_sharded_is_dense(name):
    check_sharded_is_dense(TABLE[name])


def described(state):
    """The structure, specs, shapes and dtypes of a state."""
    flat = flatten(state)
    return flat.treedef, [
        (leaf.spec, leaf.local.shape, leaf.local.dtype) if is_sharded(leaf) else getattr(leaf, "dtype", type(leaf))
        for leaf in flat.leaves
    ]


def addresses(state):
    """Where the tensors of Sharded leaves lie."""
    return [leaf.local.data_ptr() for leaf in flatten((state.params, state.opt_state)).leaves if is_sharded(leaf)]


def check_updates_are_pure_or_in_place_and_states_are_sharded(row):
    params, grads = on_shards(every_leaf())
    tx = row.make()
    expected = fs.TrainState.create(params, tx)
    donated = copied(expected)
    places, specs = addresses(donated), {leaf.spec for leaf in flatten(params).leaves}
    leaves = flatten(expected.opt_state).leaves
    rows = [leaf.spec.partition for leaf in leaves if is_sharded(leaf) and leaf.spec not in specs]
    assert set(rows) <= ({fs.P("shard"), fs.P()} if row.reduced else set())
    assert all(is_sharded(leaf) or not isinstance(leaf, torch.Tensor) or not leaf.dim() for leaf in leaves)
    for grad in grads:
        given = tensors((grad, expected))
        before, old = copied(given), described(expected)
        expected, donated = fs.update(tx, expected, grad), fs.update(tx, donated, grad, donate=True)
        assert_same_bits(given, before)
        assert described(expected) == described(donated) == old
    assert_same_bits(fs.tree_leaves(donated), fs.tree_leaves(expected))
    assert not row.donated or addresses(donated) == places


@pytest.mark.rows(4)
@pytest.mark.parametrize("name", TABLE)
@on_ranks(2)
def test_updates_are_pure_or_in_place_and_states_are_sharded(name):
    check_updates_are_pure_or_in_place_and_states_are_sharded(TABLE[name])


def check_padding_is_never_looked_at(row, layout):
    def trained(value):
        params, grads = on_shards(STRATEGIES[layout](meshes()))
        params, *grads = (
            {path: leaf if leaf is None else padded_with(leaf, value) for path, leaf in tree.items()}
            for tree in (params, *grads)
        )
        return fs.unshard(run(row.make(), params, grads))

    expected = trained(0.0)
    for value in (3.0, float("nan")):
        assert_same_bits(trained(value), expected)


@pytest.mark.rows(1)
@pytest.mark.parametrize("layout", ("zero2 of every leaf", "last dim", "hsdp", "two dims"))
@pytest.mark.parametrize("name", TABLE)
@on_ranks(4)
def test_padding_is_never_looked_at(name, layout):
    """Its values are unspecified: nothing that optimizers make of them may reach a leaf."""
    check_padding_is_never_looked_at(TABLE[name], layout)
