"""Compositions of transforms: sensible ones train right in both spellings, others are refused."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.ranks import my_rank, on_ranks
from tests.test_law_ddp import ROWS, STEPS, Run, batches, bound, initial, one_process, one_rank_of, row_losses
from tests.transforms.feedback import feedback
from tests.transforms.laws import SGD
from tests.trees import assert_same_bits, every_bit, two_axes
from tests.unit_models import BOUND, Block, Language, filled, tokens

WEIGHTS, BFLOAT16, FLOAT32 = "*.weight", torch.bfloat16, torch.float32


# By a mesh of "replicate" and "shard": what gives one process's numbers, and what rounds.
EXACT = {
    "hsdp, by name": lambda on: fs.masked(
        fs.hsdp(on, min_shard_elements=0), WEIGHTS, otherwise=fs.ddp(on, ("replicate", "shard"))
    ),
    "two strategies of leaves": lambda on: fs.compose(
        fs.masked(fs.fully_shard(on["replicate"]), WEIGHTS, otherwise=fs.replicate(on["replicate"])),
        fs.zero3(on, min_shard_elements=0),
    ),
    "split one way or another": lambda on: fs.compose(
        fs.replicate(on["replicate"]),
        fs.masked(fs.fully_shard(on["shard"]), WEIGHTS, otherwise=fs.fully_shard(on["shard"], dim=-1)),
    ),
    "both dims": lambda on: fs.compose(fs.fully_shard(on["replicate"]), fs.fully_shard(on["shard"], dim=-1)),
    "wide sums": lambda on: fs.compose(fs.offload("cpu"), fs.hybrid_shard(on), fs.cast(scatter=torch.float64)),
}
LOSSY = {
    "offloaded, kept, cast": lambda on: fs.compose(
        fs.offload("cpu"), fs.zero3(on, regather=False, layout=fs.hybrid_shard(on)), fs.cast(scatter=BFLOAT16)
    ),
    "casts by name": lambda on: fs.compose(
        fs.masked(fs.cast(gather=BFLOAT16), WEIGHTS, otherwise=fs.cast(gather=FLOAT32)), fs.hybrid_shard(on)
    ),
}
# Parameters are below 4: bfloat16 moves them by 4 / 256, and blocks of int8 in extensions by 4 / 254 twice over;
# gradients below 1 too, by a quarter of it. As in test_law_ddp each update hands on what gradients differ by, and the
# next gradient what parameters do.
OFF = (1 + 1 / 4) * (2 * 4 / 254 + 4 / 256) * (2**STEPS - 1)


def loss_fn(params, batch):
    return row_losses(fs.tree_map(torch.Tensor.double, fs.gather(params)), batch).mean()


def in_one_call(state, batch):
    loss, grads, after = fs.value_and_grad(loss_fn, transform_state=state.transform_state)(state.params, batch)
    return fs.update(SGD, state, grads, transform_state=after), loss


def with_four_verbs(state, batch):
    grads, loss = torch.func.grad_and_value(loss_fn)(fs.gather(state.params), batch)
    grads, after = fs.scatter_grads(grads, like=state.params, transform_state=state.transform_state)
    return fs.update(SGD, state, grads, transform_state=after), fs.objective(loss, like=state.params)


def both_ways(transform):
    """A run by both spellings, whose states must agree bit for bit on this rank."""
    ends = []
    for step in (in_one_call, with_four_verbs):
        state, losses = fs.TrainState.create(fs.shard(initial(), transform), SGD), []
        for batch in batches():
            state, loss = step(state, one_rank_of(batch, "mean"))
            losses.append(loss)
        ends.append((state, torch.stack(losses)))
    assert_same_bits(fs.tree_leaves(ends[0]), fs.tree_leaves(ends[1]))
    return Run(losses=ends[0][1], params=fs.unshard(ends[0][0].params))


def train(world_size, compositions):
    program = lambda: {name: both_ways(make(two_axes(world_size))) for name, make in compositions.items()}  # noqa: E731
    first, *others = spmd(program, world_size)
    assert_same_bits(others, [first] * len(others))
    return first


def few(compositions, world_size, names):
    """Some of them on eight ranks, which are slow."""
    return {name: make for name, make in compositions.items() if world_size < 8 or name in names}


@pytest.mark.rows(2)
@pytest.mark.parametrize("world_size", (1, 2, 3, 4, 8))
def test_exact_compositions_are_one_process(world_size):
    found = train(world_size, few(EXACT, world_size, list(EXACT)[:2]))
    assert_trees_close(found, dict.fromkeys(found, one_process("SGD")), rtol=0, atol=bound("SGD"))


def check_lossy_compositions_are_near_one_process(world_size, compositions):
    """And no nearer than rounding allows, where there is something to send."""
    expected = one_process("SGD")
    for name, run in train(world_size, compositions).items():
        assert_trees_close(run, expected, rtol=0, atol=OFF)
        if world_size == 8:
            off = (run.losses - expected.losses).abs().max()
            assert ROWS * 1e-12 < off < 0.05, name


@pytest.mark.slow
@pytest.mark.parametrize("world_size", (1, 2, 3, 4, 8))
def test_lossy_compositions_are_near_one_process(world_size):
    check_lossy_compositions_are_near_one_process(world_size, LOSSY)


def check_a_module_with_units_by_everything_at_once(lossy, world_size):
    module, batches = filled(Language(hidden=(13, 11))), tokens(world_size)
    mesh = two_axes(world_size)
    layout = fs.compose(
        fs.replicate(mesh["replicate"]),
        fs.masked(lossy(mesh["shard"]), ("*.weight", "*scale"), otherwise=fs.fully_shard(mesh["shard"])),
    )
    model = fs.functionalize(module, (Block, nn.Linear))
    params = model.init(fs.compose(fs.offload("cpu"), fs.zero3(mesh, layout=layout, merge_bytes=3000)))
    loss = lambda p: model.apply(p, *batches[my_rank()])  # noqa: E731
    states = [fs.transform_state(params)] * 2
    _, grads, states[0] = fs.value_and_grad(loss, transform_state=states[0])(params)
    full = torch.func.grad(loss)(fs.gather(params))
    expected, states[1] = fs.scatter_grads(full, like=params, transform_state=states[1])
    # Gradients may differ in the last bits, and an element between two steps go to either: none does here.
    assert_trees_close(fs.unshard(grads), fs.unshard(expected), rtol=0, atol=BOUND)
    assert_trees_close(fs.tree_leaves(states[0]), fs.tree_leaves(states[1]), rtol=0, atol=BOUND)


@on_ranks(2, 4)
def test_a_module_with_units_by_everything_at_once(world_size):
    """The engine's gradients and states are those of the verbs."""
    check_a_module_with_units_by_everything_at_once(feedback, world_size)


def check_processes(make):
    found = both_ways(make(fs.init_mesh({"replicate": 1, "shard": -1}, device="cpu"))).params
    assert_trees_close(found, one_process("SGD").params, rtol=0, atol=OFF)
    return every_bit(found)


@on_ranks("2 processes")
def test_processes():
    return check_processes(LOSSY["casts by name"])
