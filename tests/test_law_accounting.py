"""Law 8: bytes equal the formula, scalars apart, and the collectives of a step are those stated here."""

import math
from itertools import product

import pytest
import torch

import fshard as fs
from fshard.comm.collective import EXCHANGE_BYTES
from fshard.tree import flatten
from tests.ranks import on_ranks
from tests.trees import FLOATING, ONE_AXIS, STRATEGIES, meshes, normal, one_axis

SGD = fs.from_torch(torch.optim.SGD, lr=0.1)
CLIPPED = fs.chain(fs.clip_by_global_norm(1.0), SGD)


def total(params):
    """A loss that uses every element."""
    return sum(tensor.double().sum() for tensor in fs.tree_leaves(fs.gather(params)))


def in_one_call(state, tx):
    loss, grads = fs.value_and_grad(total)(state.params)
    return fs.update(tx, state, grads), loss


def with_four_verbs(state, tx):
    full = fs.gather(state.params)
    grads = fs.scatter_grads(fs.tree_map(torch.ones_like, full), like=state.params)
    return fs.update(tx, state, grads), fs.objective(total(full), like=state.params)


def recorded(step, strategy, full, tx=SGD):
    """The collectives of one step on this rank, and the parameters it stepped."""
    state = fs.TrainState.create(fs.shard(full, strategy), tx)
    with fs.comm.record() as record:
        step(state, tx)
    return record, state.params


def told(record):
    """A record without the few numbers by which ranks agree on what comes next."""
    return [entry for entry in record if not entry.about.is_comparison]


def leaves_of(params):
    return [leaf for leaf in flatten(params).leaves if leaf is not None]


def padded_bytes(params, ranks):
    """The n of the law, for float64 leaves.

    A leaf that ranks split counts with its padding. Leaves that stay whole are summed; where they are not exchanged
    whole, because they are small together or there are two ranks, each is cut in rows and filled up for that.
    """
    leaves = leaves_of(params)
    split = [math.prod(leaf.spec.padded_shape) * 8 for leaf in leaves if leaf.spec.partition_axes()]
    whole = [leaf.local.numel() * 8 for leaf in leaves if not leaf.spec.partition_axes()]
    once = ranks == 2 or sum(whole) <= EXCHANGE_BYTES
    filled = [n if once else math.ceil(n / 8 / ranks) * 8 * ranks for n in whole]
    return sum(split) + sum(filled)


@on_ranks(2, 3, 4)
def test_a_step_moves_two_n(world_size):
    """Every strategy on one axis, gathered once or not at all and reduced once: 2n (N - 1) / N, and the objective."""
    on = meshes()
    for strategy, step, tree in product(ONE_AXIS.values(), (in_one_call, with_four_verbs), FLOATING.values()):
        record, params = recorded(step, strategy(on), tree())
        tensors, scalars = ([entry for entry in told(record) if entry.scalar is scalar] for scalar in (False, True))
        full = sum((2 if entry.op == "all_reduce" else 1) * entry.bytes for entry in tensors)
        assert full == 2 * padded_bytes(params, world_size)
        # One rounding for each collective and each sum of two.
        rounding = 2 * len(record) * torch.finfo(torch.float64).eps
        expected = pytest.approx(full * (world_size - 1) / world_size, rel=rounding)
        assert record.bytes_sent() == expected
        # One call tells with it which leaves this rank used.
        label, numbers = ("psum_invariant", 1) if step is with_four_verbs else ("objective", 1 + len(leaves_of(params)))
        assert [(entry.op, entry.label, entry.bytes) for entry in scalars] == [("all_reduce", label, 8 * numbers)]
        sent = sum(entry.sent for entry in scalars)
        assert sent == pytest.approx(16 * numbers * (world_size - 1) / world_size, rel=rounding)


def small_and_large():
    """Above `min_shard_elements`, above what travels in a buffer with others, above what is exchanged whole."""
    draw = normal()
    return {"bias": draw(5), "scale": draw(), "matrix": draw(67, 65), "alone": draw(257, 129)}


# (op, axis, label, buffers, bytes) of every collective in the order of its issue, on four ranks or two times two.
# The matrix has 67 * 65 * 8 = 34840 bytes, 68 * 65 * 8 = 35360 with its rows filled up to a multiple of four or of two;
# the one that goes alone 257 * 129 * 8 = 265224, 260 * 129 * 8 = 268320 for four and 258 * 129 * 8 = 266256 for two.
# The small leaves have 48 bytes together, 8 * 8 + 4 * 8 = 96 cut into four and 6 * 8 + 2 * 8 = 64 cut into two.
OBJECTIVE = ("all_reduce", "shard", "psum_invariant", 1, 8)
OBJECTIVES = [("all_reduce", "replicate", "psum_invariant", 1, 8), OBJECTIVE]
# In one call with a number for each of the four leaves, which says whether this rank used it.
USED = {"psum_invariant": "objective", 8: 8 + 4 * 8}
STEPS = {
    "ddp": (
        [],
        # Bias, scale and matrix in one buffer; each leaf is filled up to four pieces of whole elements.
        [
            ("reduce_scatter", "shard", "scatter", 2, 265248 + 34944),
            ("all_gather", "shard", "scatter", 2, 265248 + 34944),
        ],
        [OBJECTIVE],
    ),
    "zero2": (
        [("all_gather", "shard", "gather", 2, 268320 + 35360)],
        [("reduce_scatter", "shard", "scatter", 2, 268320 + 35360), ("all_reduce", "shard", "scatter", 1, 48)],
        [OBJECTIVE],
    ),
    "zero2 of every leaf": (
        [("all_gather", "shard", "gather", 2, 268320 + 35360 + 96)],
        [("reduce_scatter", "shard", "scatter", 2, 268320 + 35360 + 96)],
        [OBJECTIVE],
    ),
    "hsdp": (
        [("all_gather", "shard", "gather", 2, 266256 + 35360 + 64)],
        [
            ("reduce_scatter", "shard", "scatter", 2, 266256 + 35360 + 64),
            # The shards are half as large, all small enough to go together, and two ranks exchange them whole.
            ("all_reduce", "replicate", "scatter", 1, (266256 + 35360 + 64) // 2),
        ],
        OBJECTIVES,
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
        OBJECTIVES,
    ),
}


def listed(record):
    return [(entry.op, entry.axis, entry.label, entry.tensors, entry.bytes) for entry in told(record)]


@pytest.mark.parametrize("strategy", STEPS)
@on_ranks(4)
def test_the_collectives_of_a_step(strategy):
    """They are the same on every rank, and in both spellings but for the numbers that travel with the objective."""
    transform = STRATEGIES[strategy](meshes())
    gathered, reduced, objective = STEPS[strategy]
    told_used = [tuple(USED.get(part, part) for part in entry) for entry in objective]
    for step, end in ((with_four_verbs, objective), (in_one_call, told_used)):
        assert listed(recorded(step, transform, small_and_large())[0]) == gathered + reduced + end


@pytest.mark.parametrize(
    "strategy, axes",
    [("ddp", []), ("zero2 of every leaf", ["shard"]), ("one dim over two axes", ["shard", "replicate"])],
)
@on_ranks(4)
def test_update_communicates_one_number_per_axis_to_clip_and_else_nothing(strategy, axes):
    params = fs.shard(small_and_large(), STRATEGIES[strategy](meshes()))
    numbers = []
    for tx in (SGD, CLIPPED):
        state = fs.TrainState.create(params, tx)
        with fs.comm.record() as record:
            fs.update(tx, state, params)
        numbers.append([(entry.op, entry.axis, entry.scalar) for entry in record])
    assert numbers == [[], [("all_reduce", axis, True) for axis in axes]]


@on_ranks(2)
def test_bfloat16_halves_what_is_gathered():
    full = {"w": normal()(64, 32, dtype=torch.float32), "b": normal()(6, dtype=torch.float32)}
    sharded, n = fs.zero2(one_axis(), min_shard_elements=0), (64 * 32 + 6) * 4
    half, single = fs.cast(gather=torch.bfloat16), fs.cast(scatter=torch.float32)
    for strategy, sent in (
        (sharded, [n, n]),
        (fs.compose(half, sharded), [n // 2, n // 2]),
        (fs.compose(half, sharded, single), [n // 2, n]),
    ):
        record, _ = recorded(in_one_call, strategy, full)
        assert [entry.bytes for entry in record if not entry.scalar] == sent
