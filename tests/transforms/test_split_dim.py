"""split_dim and own_dim: leaves that stay split over an axis, alone, next to fully_shard, and in training."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import RankError, assert_trees_close, check_adjoint
from tests.ranks import my_rank, on_ranks
from tests.test_law_purity import unchanged
from tests.transforms.laws import grid, told
from tests.trees import WORLD_SIZES, assert_same_bits, every_bit, exotic_dtypes, normal, one_axis

# (shape, dim that stays split, dim that is gathered): alike and not, uneven in the axis gathered over, empty, exotic.
CASES = [
    *(((10, 3), 0, 0), ((5, 4), 1, 0), ((4, 5), 0, 1), ((5, 4), -1, -1), ((2, 7, 4), 2, 1)),
    *(((2,), 0, 0), ((18,), 0, -1), ((0, 4), 1, 0), ((4, 0), 0, 1), ((0,), 0, 0), ((6, 1), -2, 0)),
]


def leaf(case, dtype):
    shape, *_ = case
    return (normal()(*shape, dtype=torch.float32) * 9).to(dtype)


def piece_of(full, dim, axis):
    """This rank's piece of a dim that divides."""
    return full.chunk(axis.size, dim)[fs.comm.rank(axis)] if full.shape[dim] else full


DTYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.int32, torch.bool, torch.float8_e4m3fn)


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES)
def test_pieces_round_trips_and_adjoint(world_size):
    mesh, line = grid(world_size), fs.fully_shard(one_axis())
    shard, tp = fs.axis_of(mesh, "shard"), fs.axis_of(mesh, "tp")
    for case, split in itertools.product(CASES, (fs.split_dim, fs.own_dim)):
        shape, kept, gathered = case
        transform = fs.compose(fs.fully_shard(shard, dim=gathered), split(tp, dim=kept))
        assert transform.axes == ((shard, tp) if split is fs.own_dim else (shard,))
        for dtype in DTYPES if case in CASES[:2] else DTYPES[:1]:
            full = {"w": leaf(case, dtype)}
            params = fs.shard(full, transform)
            spec = params["w"].spec
            assert (spec.roles, spec.scattered_axes) == ({shard: "gathered", tp: "owned"}, (shard,))
            kept_dim, gathered_dim = kept % len(shape), gathered % len(shape)
            names = [None] * (max(kept_dim, gathered_dim) + 1)
            names[gathered_dim] = "shard"
            names[kept_dim] = ("tp", "shard") if kept_dim == gathered_dim else "tp"
            assert spec.partition == fs.P(*names)
            mine = piece_of(full["w"], kept_dim, tp)
            with unchanged(full, params):
                assert_same_bits(fs.gather(params), {"w": mine})
                assert spec.gathered_shape == tuple(mine.shape)
                # This rank's rows of what it gathers, padded at the end.
                size = -(-mine.shape[gathered_dim] // shard.size)
                start = min(fs.comm.rank(shard) * size, mine.shape[gathered_dim])
                rows = mine.narrow(gathered_dim, start, min(size, mine.shape[gathered_dim] - start))
                local = params["w"].local.narrow(gathered_dim, 0, rows.shape[gathered_dim])
                assert_same_bits(local, rows)
                assert_same_bits(fs.unshard(params), full)
                moved = fs.reshard(params, line)
                assert_same_bits(fs.unshard(moved), full)
                assert_same_bits(fs.reshard(moved, transform)["w"].local, params["w"].local)
        check_adjoint(transform, [shape])


@on_ranks(2)
def test_alone_it_keeps_pieces_and_communicates_nothing():
    full = {"w": normal()(4, 6), "special": exotic_dtypes()["special"][1:]}
    for split in (fs.split_dim, fs.own_dim):
        params = fs.shard(full, split(one_axis(), dim=-1))
        with fs.comm.record() as record:
            pieces = fs.gather(params)
            grads = fs.scatter_grads(pieces, like=params, reduce="sum")
        assert [entry for entry in record if split is fs.split_dim or not entry.about.is_comparison] == []
        rank = my_rank()
        assert_same_bits(pieces, {name: leaf.chunk(2, -1)[rank] for name, leaf in full.items()})
        assert_same_bits(fs.unshard(grads), full)


@on_ranks(4)
def test_a_rank_gathers_and_reduces_its_own_piece_alone():
    full = {"w": normal()(12, 10)}
    mesh = grid(4)
    tp = fs.axis_of(mesh, "tp")
    params = fs.shard(full, fs.compose(fs.fully_shard(mesh["shard"]), fs.split_dim(mesh["tp"], dim=1)))
    assert math.prod(params["w"].local.shape) == 12 * 10 // 4
    with fs.comm.record() as record:
        fs.value_and_grad(lambda p: fs.psum_invariant((fs.gather(p)["w"] ** 2).sum(), tp))(params)
    assert told(record) == [
        ("all_gather", "shard", "gather", 1, 12 * 10 * 8 // 2),
        ("reduce_scatter", "shard", "scatter", 1, 12 * 10 * 8 // 2),
    ]


WIDTH, ROWS, STEPS = 8, 24, 4


class Perceptron(nn.Module):
    """Megatron's: the first layer by columns, the second by rows; with no axis one process's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3, bias=False)
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, x, axis=None):
        hidden = self.second(torch.tanh(self.first(x)))
        return (hidden if axis is None else fs.psum_invariant(hidden, axis)) + self.bias


def perceptron():
    module, draw = Perceptron().double(), normal()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(draw(*parameter.shape) / WIDTH**0.5)
    return module


def batches():
    draw = normal(1)
    return [(draw(ROWS, 5), draw(ROWS, 3)) for _ in range(STEPS)]


def megatron(mesh, strategy):
    rows = fs.masked(fs.split_dim(mesh["tp"], dim=1), "second.weight")
    return fs.compose(strategy, fs.masked(fs.split_dim(mesh["tp"], dim=0), "first.*", otherwise=rows))


STRATEGIES = {
    "fully_shard": lambda mesh: fs.fully_shard(mesh["shard"]),
    "the other dim": lambda mesh: fs.fully_shard(mesh["shard"], dim=-1),
    "zero3": lambda mesh: fs.zero3(mesh, min_shard_elements=0, merge_bytes=0),
    "ddp": lambda mesh: fs.ddp(mesh, "shard"),
}
OPTIMIZERS = {
    "clipped SGD": (torch.optim.SGD, dict(lr=0.1, momentum=0.9), 0.05),
    "AdamW": (torch.optim.AdamW, dict(lr=0.01, eps=0.01), None),
}
# As in test_law_ddp: a gradient adds up ROWS terms below 1, an update hands on at most 2 / 0.01 * 0.01 of it, and each
# step what was there before; a norm is a sum of 75 squares, whose rounding moves gradients of norm 0.05 by less.
BOUND = ROWS * torch.finfo(torch.float64).eps * (3**STEPS - 1)


def one_process(optimizer):
    cls, hyper, max_norm = OPTIMIZERS[optimizer]
    module = perceptron()
    run = cls(module.parameters(), **hyper)
    for x, y in batches():
        run.zero_grad()
        (module(x) - y).square().mean(1).mean().backward()
        if max_norm is not None:
            assert nn.utils.clip_grad_norm_(module.parameters(), max_norm) > max_norm
        run.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def train(mesh, module, strategy, optimizer):
    """Train by both spellings of the step; their states must agree bit for bit."""
    cls, hyper, max_norm = OPTIMIZERS[optimizer]
    shard, tp = fs.axis_of(mesh, "shard"), fs.axis_of(mesh, "tp")
    model, own = fs.functionalize(module, units=nn.Linear), copy.deepcopy(module)
    tx = fs.chain(*([] if max_norm is None else [fs.clip_by_global_norm(max_norm)]), fs.from_torch(cls, **hyper))

    def loss_fn(params, x, y):
        return (model.apply(params, x, tp) - y).square().mean(1).mean()

    def in_one_call(state, x, y):
        return fs.update(tx, state, fs.value_and_grad(loss_fn)(state.params, x, y)[1])

    def full_loss(full, x, y):
        return (torch.func.functional_call(own, full, (x, tp)) - y).square().mean(1).mean()

    def with_four_verbs(state, x, y):
        grads = torch.func.grad(full_loss)(fs.gather(state.params), x, y)
        return fs.update(tx, state, fs.scatter_grads(grads, like=state.params))

    states = []
    for step in (in_one_call, with_four_verbs):
        state = fs.TrainState.create(model.init(strategy), tx)
        for batch in batches():
            state = step(state, *(tensor.chunk(shard.size)[fs.comm.rank(shard)] for tensor in batch))
        states.append(state)
    assert_same_bits(fs.tree_leaves(states[0]), fs.tree_leaves(states[1]))
    return states[0]


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tensor_parallel_training_is_that_of_one_process(optimizer, world_size):
    module, expected, mesh = perceptron(), one_process(optimizer), grid(world_size)
    for name in STRATEGIES if world_size == 4 else ("fully_shard", "zero3"):
        state = train(mesh, module, megatron(mesh, STRATEGIES[name](mesh)), optimizer)
        assert_trees_close(fs.unshard(state.params), expected, rtol=0, atol=BOUND)
        for moments in state.opt_state[-1].slots.values():
            for key, moment in moments.items():
                if fs.tree_leaves(moment)[0].shape == state.params[key].local.shape:
                    assert moment.spec == state.params[key].spec
    return every_bit(fs.unshard(state.params))


@on_ranks("2 processes")
def test_processes():
    """Two ranks that are both tensor parallel."""
    module, expected = perceptron(), one_process("clipped SGD")
    mesh = grid(2)
    state = train(mesh, module, megatron(mesh, fs.zero3(mesh, min_shard_elements=0)), "clipped SGD")
    assert state.params["first.weight"].local.shape == (WIDTH // 2, 5)
    assert_trees_close(fs.unshard(state.params), expected, rtol=0, atol=BOUND)


@pytest.mark.xfail(strict=True, raises=RankError, reason="apply asks gathered parameters for the module's full shapes")
@on_ranks(2)
def test_apply_takes_gathered_pieces_as_it_takes_shards():
    module = perceptron()
    mesh, model = grid(2), fs.functionalize(module)
    params, tp = model.init(megatron(mesh, fs.fully_shard(mesh["shard"]))), fs.axis_of(mesh, "tp")
    x, _ = batches()[0]
    assert_same_bits(model.apply(fs.gather(params), x, tp), model.apply(params, x, tp))
