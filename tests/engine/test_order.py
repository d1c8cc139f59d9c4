"""Ranks vote on the order of a call's collectives when it is new, and follow it afterwards."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, none_as_zeros, normal, one_axis

LAYERS = 6
FULL = {f"{i}": normal(i)(4, 4) / 2 for i in range(LAYERS)}


def params_of(full=FULL, **options):
    return fs.shard(full, fs.zero3(one_axis(), min_shard_elements=0, merge_bytes=0, **options))


def x_of():
    return normal(100 + dist.get_rank())(3, 4)


def run_layers(params, names, gather=fs.gather):
    h = x_of()
    for name in names:
        h = torch.tanh(h @ gather(params[name]))
    return h.square().sum()


def reference(f, params):
    """By law 5, with nothing gathered just in time."""
    grads, value = torch.func.grad_and_value(lambda p: fs.objective(f(fs.gather(p)), like=p))(params)
    return value, grads


def assert_same(found, expected, params):
    value, grads = found
    assert_trees_close((value, none_as_zeros(grads, params)), expected, rtol=1e-12, atol=1e-12)


def votes(record):
    return sum(entry.about.is_comparison for entry in record)


MODEL = fs.functionalize(nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS))).double(), units=nn.Linear)
MODEL_FULL = {name: normal(i)(*leaf.shape) for i, (name, leaf) in enumerate(MODEL._module.named_parameters())}


def steps_of_a_model():
    params = params_of(MODEL_FULL)
    return lambda: fs.value_and_grad(lambda p: MODEL.apply(p, x_of()).square().sum())(params)


def steps_of_a_loop():
    params = params_of()
    return lambda: fs.value_and_grad(lambda p: run_layers(p, FULL))(params)


def evaluations():
    params = params_of(MODEL_FULL)
    return lambda: MODEL.apply(params, x_of())


# How many messages a call has once its order is known, and how many gathers and objectives: the first unit's weight is
# not saved, and the last one's stays; a model's last two do, whose gathers were known ahead.
STEADY = {
    "a model": (steps_of_a_model, 1, LAYERS + (LAYERS - 3) + 1),
    "a plain loop": (steps_of_a_loop, 1, LAYERS + (LAYERS - 2) + 1),
    "an evaluation": (evaluations, 1, LAYERS),
}


@pytest.mark.rows(4)
@pytest.mark.parametrize("name", STEADY)
@on_ranks(2, 3)
def test_a_known_order_costs_one_message(name):
    make, messages, others = STEADY[name]
    step, records, results = make(), [], []
    for _ in range(3):
        with fs.comm.record() as record:
            results.append(step())
        records.append([entry.label for entry in record])
    for result in results[1:]:
        assert_same_bits(fs.tree_leaves(result), fs.tree_leaves(results[0]))
    assert records[1] == records[2]
    assert records[2].count("start") + records[2].count("agree") == messages
    assert len([label for label in records[2] if label in ("gather", "objective")]) == others
    return records


@on_ranks("2 processes")
def test_ranks_that_depart_alike_vote_again():
    """As where layers are dropped at random: the step runs again from the same random numbers."""
    orders = ["012345", "01345", "012345", "0345", "12"]
    params, counts = params_of(), []
    for names in orders:

        def loss(params, names=names):
            return run_layers(params, names) * torch.rand((), dtype=torch.float64)

        torch.manual_seed(7)
        with fs.comm.record() as record:
            found = fs.value_and_grad(loss)(params)
        after = torch.get_rng_state()
        counts.append(votes(record))
        torch.manual_seed(7)
        assert_same(found, reference(loss, params), params)
        assert torch.equal(after, torch.get_rng_state())
    assert counts == [8, 1 + 7, 1 + 8, 6, 4]


@on_ranks(2, 3)
def test_a_rank_that_departs_alone_is_named_on_every_rank():
    params, step = params_of(), fs.value_and_grad(run_layers)
    expected = step(params, "012")
    with pytest.raises(fs.comm.CollectiveError, match="ranks differ in a collective\n") as caught:
        step(params, "012" if dist.get_rank() else "01")
    one_axis()
    assert_same_bits(fs.tree_leaves(step(params, "012")), fs.tree_leaves(expected))
    assert re.search(r"rank 0: .*\(start of value_and_grad begins\)", str(caught.value))
    assert re.search(r"rank 1: .*\(gather of \['2'\]\)", str(caught.value))


@on_ranks(2)
def test_a_rank_may_save_tensors_that_the_order_does_not_regather():
    """It keeps them, and tells the others, so that ranks vote in the next step."""
    params, counts = params_of(), []

    def loss(params, detached):
        h = x_of()
        for i in range(3):
            full = fs.gather(params[f"{i}"])
            # A product saves its weight for the gradient of the other operand alone.
            h = (h.detach() if detached and i == 1 else h) @ full
        return h.square().sum()

    for detached in (True, True, dist.get_rank() == 0, False, False):
        with fs.comm.record() as record:
            found = fs.value_and_grad(loss)(params, detached)
        assert_same(found, reference(partial(loss, detached=detached), params), params)
        counts.append(votes(record))
    assert [count == 1 for count in counts] == [False, True, True, False, True]
    return counts


class Twice(nn.Module):
    """Enters a unit a second time where it is told to."""

    def __init__(self):
        super().__init__()
        self.early, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, twice):
        x = self.shared(self.early(x))
        return self.shared(self.early(x) if twice else x)


@on_ranks(2)
def test_a_unit_that_one_rank_enters_twice_is_named_on_every_rank():
    model = fs.functionalize(Twice().double(), units=nn.Linear)
    params = model.init(fs.zero3(one_axis(), min_shard_elements=0, merge_bytes=0), seed=0)

    def loss(params, twice):
        return model.apply(params, x_of(), twice).square().sum()

    with pytest.raises(ValueError, match=r"value_and_grad: collective mismatch between ranks\n") as caught:
        fs.value_and_grad(loss)(params, dist.get_rank() == 0)
    for twice in (True, False, True, True):
        found = fs.value_and_grad(loss)(params, twice)
        assert_same(found, reference(partial(loss, twice=twice), params), params)
    return str(caught.value)


class Exchange(nn.Module):
    """Sends rows to the next rank, or not."""

    def __init__(self, axis, sends):
        super().__init__()
        self.axis, self.sends = axis, sends

    def forward(self, x):
        return fs.ragged_all_to_all(x, self.axis, [1, 1], [1, 1]) if self.sends else x


def test_gathers_of_a_departing_call_end_with_it():
    """Units behind the place where ranks depart are gathered ahead, and nobody asks for them."""

    def program():
        mesh = one_axis()
        for sends in (False, True, False):
            layers = (nn.Linear(4, 4), Exchange(fs.axis_of(mesh), sends), nn.Linear(4, 4), nn.Linear(4, 4))
            model = fs.functionalize(nn.Sequential(*layers), units=nn.Linear)
            params = model.init(fs.zero3(mesh, min_shard_elements=0, merge_bytes=0), seed=0)
            fs.value_and_grad(lambda p: model.apply(p, torch.ones(2, 4)).sum())(params)  # noqa: B023

    before = torch._C._distributed_c10d._get_work_registry_size()
    spmd(program, 2)
    assert torch._C._distributed_c10d._get_work_registry_size() == before
