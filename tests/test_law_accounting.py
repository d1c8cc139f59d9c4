"""Law 8: bytes equal the formula, scalars apart, and the collectives of steps and units are those stated here."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.comm.collective import EXCHANGE_BYTES
from fshard.testing import assert_trees_close
from fshard.tree import flatten
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import CASTS, FLOATING, ONE_AXIS, STRATEGIES, meshes, normal, one_axis
from tests.unit_models import filled

SGD = fs.from_torch(torch.optim.SGD, lr=0.1)
CLIPPED = fs.chain(fs.clip_by_global_norm(1.0), SGD)


def total(params):
    """A loss that uses every element."""
    return sum(tensor.double().sum() for tensor in fs.tree_leaves(fs.gather(params)))


in_one_call = fs.value_and_grad(total)


def with_four_verbs(params):
    full = fs.gather(params)
    grads = fs.scatter_grads(fs.tree_map(torch.ones_like, full), like=params)
    return fs.objective(total(full), like=params), grads


def of_step(run, strategy, full):
    """The collectives of one step on this rank, and the parameters it stepped."""
    state = fs.TrainState.create(fs.shard(full, strategy), SGD)
    with fs.comm.record() as record:
        fs.update(SGD, state, run(state.params)[1])
    return record, state.params


def without_comparisons(record):
    """A record without the few numbers by which ranks agree on what comes next."""
    return [entry for entry in record if not entry.about.is_comparison]


def assert_sends(record, bytes_on_all, ranks):
    """Of all bytes that are gathered or reduced each rank sends the shares of the others."""
    sent = bytes_on_all * (ranks - 1) / ranks
    assert_trees_close(sum(entry.sent for entry in record), sent, **within(sent, len(record)))


def padded_bytes(params, ranks):
    """The n of the law, for float64 leaves.

    A leaf that ranks split counts with its padding. Leaves that stay whole are summed; where they are not exchanged
    whole, because they are small together or there are two ranks, each is cut in rows and filled up for that.
    """
    leaves = [leaf for leaf in flatten(params).leaves if leaf is not None]
    split = [math.prod(leaf.spec.padded_shape) * 8 for leaf in leaves if leaf.spec.partition_axes()]
    whole = [leaf.local.numel() * 8 for leaf in leaves if not leaf.spec.partition_axes()]
    once = ranks == 2 or sum(whole) <= EXCHANGE_BYTES
    filled = [n if once else math.ceil(n / 8 / ranks) * 8 * ranks for n in whole]
    return sum(split) + sum(filled)


@pytest.mark.rows(1)
@on_ranks(2, 3, 4)
def test_a_step_moves_two_n(world_size):
    """Every strategy on one axis, gathered once or not at all and reduced once: 2n (N - 1) / N, and the objective."""
    on = meshes()
    for strategy, step, tree in product(
        ONE_AXIS.values(), (in_one_call, with_four_verbs), ("uneven", "empty", "large")
    ):
        record, params = of_step(step, strategy(on), FLOATING[tree]())
        entries = without_comparisons(record)
        tensors = [entry for entry in entries if not entry.scalar]
        scalars = [entry for entry in entries if entry.scalar]
        twice_n = sum((2 if entry.op == "all_reduce" else 1) * entry.bytes for entry in tensors)
        assert twice_n == 2 * padded_bytes(params, world_size)
        assert_sends(tensors, twice_n, world_size)
        assert record.bytes_sent() == sum(entry.sent for entry in tensors)
        label, numbers = "psum_invariant", 1
        if step is in_one_call:
            # It tells with the objective which leaves this rank used.
            label, numbers = "objective", 1 + len(fs.tree_leaves(params))
        assert [(entry.op, entry.label, entry.bytes) for entry in scalars] == [("all_reduce", label, 8 * numbers)]
        assert_sends(scalars, 2 * 8 * numbers, world_size)


def small_and_large():
    """Above `min_shard_elements`, above what travels in a buffer with others, above what is exchanged whole."""
    draw = normal()
    return {"bias": draw(5), "scale": draw(), "matrix": draw(67, 65), "alone": draw(257, 129)}


# (op, axis, label, buffers, bytes) of every collective in the order of its issue, on four ranks or two times two.
# The matrix has 67 * 65 * 8 bytes, 68 * 65 * 8 = 35360 with its rows filled up to a multiple of four or of two; the one
# that goes alone 260 * 129 * 8 = 268320 for four and 258 * 129 * 8 = 266256 for two. The small leaves have
# 8 * 8 + 4 * 8 = 96 cut into four and 6 * 8 + 2 * 8 = 64 cut into two.
OBJECTIVE = [("all_reduce", axis, "psum_invariant", 1, 8) for axis in ("replicate", "shard")]
# In one call with a number for each of the four leaves, which says whether this rank used it.
USED = {"psum_invariant": "objective", 8: 8 + 4 * 8}
STEPS = {
    "hsdp": (
        [("all_gather", "shard", "gather", 2, 266256 + 35360 + 64)],
        [
            ("reduce_scatter", "shard", "scatter", 2, 266256 + 35360 + 64),
            # The shards are half as large, all small enough to go together, and two ranks exchange them whole.
            ("all_reduce", "replicate", "scatter", 1, (266256 + 35360 + 64) // 2),
        ],
    ),
    "one dim over two axes": (
        # The axis gathered last moves what the ranks of the other have put together and cut to half of the dim.
        [
            ("all_gather", "replicate", "gather", 1, (268320 + 35360 + 96) // 2),
            ("all_gather", "shard", "gather", 2, 266256 + 35360 + 64),
        ],
        [
            ("reduce_scatter", "shard", "scatter", 2, 266256 + 35360 + 64),
            ("reduce_scatter", "replicate", "scatter", 1, (268320 + 35360 + 96) // 2),
        ],
    ),
}


@on_ranks(4)
def test_the_collectives_of_a_step():
    """They are the same on every rank, and in both spellings but for the numbers that travel with the objective."""
    objective_and_used = [tuple(USED.get(part, part) for part in entry) for entry in OBJECTIVE]
    for name, (gathered, reduced) in STEPS.items():
        for step, end in ((with_four_verbs, OBJECTIVE), (in_one_call, objective_and_used)):
            record, _ = of_step(step, STRATEGIES[name](meshes()), small_and_large())
            entries = without_comparisons(record)
            rows = [(entry.op, entry.axis, entry.label, entry.tensors, entry.bytes) for entry in entries]
            assert rows == gathered + reduced + end


@on_ranks(4)
def test_update_communicates_one_number_per_axis_to_clip_and_else_nothing():
    for strategy, axes in (("ddp", []), ("one dim over two axes", ["shard", "replicate"])):
        params = fs.shard(small_and_large(), STRATEGIES[strategy](meshes()))
        for tx, summed_axes in ((SGD, []), (CLIPPED, axes)):
            state = fs.TrainState.create(params, tx)
            with fs.comm.record() as record:
                fs.update(tx, state, params)
            assert [(e.op, e.axis, e.scalar) for e in record] == [("all_reduce", axis, True) for axis in summed_axes]


@on_ranks(2)
def test_a_cast_halves_what_is_gathered():
    full = {"w": normal()(64, 32, dtype=torch.float32), "b": normal()(6, dtype=torch.float32)}
    record, _ = of_step(in_one_call, CASTS["cast zero2"](meshes()), full)
    n = (64 * 32 + 6) * 4
    # Gradients of bfloat16 are reduced as float32.
    assert [entry.bytes for entry in record if not entry.scalar] == [n // 2, n]


# The units of `stack`, in the order of its forward.
UNITS = ("0", "1", "3", "5")


def stack():
    """An embedding and three layers, of sizes that tell them apart and that no number of ranks divides."""
    layers = nn.Embedding(7, 5), nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 3), nn.Tanh(), nn.Linear(3, 13)
    return filled(nn.Sequential(*layers))


def every_leaf(mesh, **keywords):
    """Strategies that split every leaf and gather every unit by itself."""
    return fs.zero3(mesh, **{"bucket_bytes": 0, "min_shard_elements": 0, **keywords})


def bytes_of(record, label):
    return [entry.bytes for entry in record if not entry.scalar and entry.label == label]


def unit_bytes(params):
    """The padded bytes of each unit; its first number is its name."""
    sizes = {}
    for name, leaf in params.items():
        unit = name.partition(".")[0]
        sizes[unit] = sizes.get(unit, 0) + math.prod(leaf.spec.padded_shape) * leaf.local.element_size()
    return sizes


def recorded(module, strategy, frozen=()):
    """The collectives of one call of value_and_grad on this rank, and the padded bytes of the units."""
    model = fs.functionalize(module, units=(nn.Embedding, nn.Linear))
    params = fs.shard(dict(module.named_parameters()), strategy, frozen=[f"{unit}.*" for unit in frozen])
    tokens = torch.arange(4) + my_rank()
    with fs.comm.record() as record:
        fs.value_and_grad(lambda p: model.apply(p, tokens).square().mean())(params)
    return record, unit_bytes(params)


# Which units are dropped and saved for the backward: not an embedding, whose backward needs no weight.
RULES = {
    "all": (True, "531"),
    "none": (False, ""),
    "patterns": (("1", "3", "none of them"), "31"),
    "the last one": ("5", "5"),
}


@pytest.mark.rows(1)
@on_ranks(2, 3, 4)
def test_zero3_moves_n_and_what_is_gathered_again_and_n(world_size):
    """Of those that are dropped, the last unit and as many before it as are prefetched stay for the backward."""
    records = []
    for (regather, dropped), prefetch in product(RULES.values(), (0, 1, 2, 9)):
        again = [unit for unit in dropped if unit in UNITS[: max(0, len(UNITS) - 1 - prefetch)]]
        record, sizes = recorded(stack(), every_leaf(one_axis(), regather=regather, prefetch=prefetch))
        assert bytes_of(record, "gather") == [sizes[unit] for unit in (*UNITS, *again)]
        assert bytes_of(record, "scatter") == [sizes[unit] for unit in reversed(UNITS)]
        n, regathered = sum(sizes.values()), sum(sizes[unit] for unit in again)
        assert_sends([entry for entry in record if not entry.scalar], n + regathered + n, world_size)
        records.append(record)
    return records


# Which units are frozen, and which are gathered again: those inside, as gradients pass through them, and of those
# before the first trained unit none; that unit is, though its input needs no gradient.
FROZEN = {"35": "1", "0": "1", "01": "", "0135": ""}


@on_ranks(2)
def test_frozen_units_are_gathered_and_never_reduced():
    for frozen, again in FROZEN.items():
        record, sizes = recorded(stack(), every_leaf(one_axis()), frozen=frozen)
        assert bytes_of(record, "gather") == [sizes[unit] for unit in (*UNITS, *again)]
        assert bytes_of(record, "scatter") == [sizes[unit] for unit in reversed(UNITS) if unit not in frozen]


# Three leaves large enough to be reduced by themselves where buckets are small, of sizes that tell them apart.
LARGE = {"first": (64, 512), "second": (512, 128), "third": (128, 257)}

# What is issued in the forward, and in the backward around the hooks of the activations between the leaves.
FORWARD = "gather first, gather second, gather third, "
EARLY = "scatter third, hook second, scatter second, hook first, scatter first"
# A leaf is gathered ahead while the one behind it computes, however large it is.
AHEAD = "gather second, scatter third, gather first, hook second, scatter second, hook first, scatter first"
# In its turn it takes the place of the leaf behind it, whose gradient has been reduced.
LATE = EARLY.replace("hook second", "gather second, hook second").replace("hook f", "gather first, hook f")
ORDERS = (
    (fs.zero1, FORWARD + "hook second, hook first, scatter third, scatter second, scatter first"),
    (fs.zero2, FORWARD + EARLY),
    (fs.zero3, FORWARD + AHEAD),
    (partial(fs.zero3, prefetch=0), FORWARD + LATE),
    (fs.ddp, EARLY),
)


@on_ranks(2)
def test_gradients_are_reduced_as_they_appear_except_by_zero1():
    draw = normal()
    full, x = {name: draw(*shape) / 16 for name, shape in LARGE.items()}, draw(3, 64)
    names = {math.prod(shape) * 8: name for name, shape in LARGE.items()}

    def loss(params, events):
        h = torch.tanh(x @ fs.gather(params["first"]))
        h.register_hook(lambda _: events.append("hook first"))
        h = torch.tanh(h @ fs.gather(params["second"]))
        h.register_hook(lambda _: events.append("hook second"))
        return (h @ fs.gather(params["third"])).square().sum()

    for make, order in ORDERS:
        params = fs.shard(full, make(one_axis(), bucket_bytes=16_000))
        with fs.comm.record() as record:
            fs.value_and_grad(loss)(params, record)
        entries = [entry for entry in record if isinstance(entry, str) or not entry.scalar]
        events = [entry if isinstance(entry, str) else f"{entry.label} {names[entry.bytes]}" for entry in entries]
        assert ", ".join(events) == order
