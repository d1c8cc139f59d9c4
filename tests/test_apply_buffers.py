"""Buffers go in and out of apply as values, and are made to agree between ranks."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fshard as fs
from fshard.testing import assert_trees_close
from tests.modules import EPS, ROWS, assert_untouched, build, everything
from tests.ranks import on_ranks
from tests.trees import STRATEGIES, assert_same_bits, meshes, normal, one_axis


class Counter(nn.Module):
    """Buffers written every way there is: in place, by assignment, under a second name; one is None."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2, dtype=torch.float64)
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("assigned", torch.ones(2), persistent=False)
        self.register_buffer("constant", torch.full((1,), 5.0))
        self.register_buffer("none", None)
        self.register_buffer("also_in_place", self.in_place)

    def forward(self, x):
        self.also_in_place.add_(1)
        self.assigned = 2 * self.assigned
        return self.linear(x) * self.assigned + self.in_place + self.constant


def test_buffers_go_in_and_out():
    module = Counter()
    reference = copy.deepcopy(module)
    before = everything(module)
    model = fs.functionalize(module)
    params = model.init(fs.zero2(one_axis(), min_shard_elements=0))
    buffers = model.buffers
    assert list(buffers) == ["in_place", "assigned", "constant"]
    for _ in range(3):
        old = fs.tree_map(torch.clone, buffers)
        out, new = model.apply(params, ROWS, buffers=buffers)
        assert_same_bits(buffers, old)
        buffers = new
        torch.testing.assert_close(out, reference(ROWS).detach(), rtol=4 * EPS, atol=4 * EPS)
        assert_same_bits(buffers, dict(reference.named_buffers()))
    assert_untouched(module, before)
    assert_same_bits(model.buffers, dict(module.named_buffers()))
    # Buffers are values like others: the same ones in give the same ones out.
    assert_same_bits(*(model.apply(params, ROWS, buffers=buffers)[1] for _ in range(2)))


@on_ranks(1, 2, 3)
def test_batch_norm_trains_and_evaluates_as_under_ddp(world_size):
    """DDP gives every rank rank 0's buffers before each forward; statistics are of the rank's own batch."""
    steps, draw = 3, normal()
    batches = [[draw(4, 3) for _ in range(world_size)] for _ in range(steps)]
    start, _, _ = build("batch norm")
    start.train()

    def reference():
        module = copy.deepcopy(start)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in batches:
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            params = dict(module.named_parameters())
            outputs = [
                functional_call(module, params | {n: b.clone() for n, b in buffers.items()}, x) for x in step[1:]
            ]
            losses = [module(step[0]).square().sum(), *(out.square().sum() for out in outputs)]
            optimizer.zero_grad()
            (sum(losses) / world_size).backward()
            optimizer.step()
        return dict(module.named_parameters()), dict(module.named_buffers()), copy.deepcopy(module).eval()(ROWS)

    model, evaluated, mesh = fs.functionalize(start), fs.functionalize(copy.deepcopy(start).eval()), one_axis()
    tx = fs.from_torch(torch.optim.SGD, lr=0.1)
    state = fs.TrainState.create(model.init(fs.zero2(mesh, min_shard_elements=0)), tx, buffers=model.buffers)

    def loss_fn(params, buffers, x):
        out, buffers = model.apply(params, x, buffers=buffers)
        return out.square().sum(), buffers

    for step in batches:
        buffers = fs.sync_buffers(state.buffers, like=state.params)
        (_, buffers), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params, buffers, step[mesh.get_rank()])
        state = fs.update(tx, state._replace(buffers=buffers), grads)
    buffers = fs.sync_buffers(state.buffers, like=state.params)
    out, same = evaluated.apply(state.params, ROWS, buffers=buffers)
    assert_same_bits(same, buffers)
    # A step sums some 50 products of numbers up to 100, and so hands on that many roundings.
    atol = steps * 50 * world_size * EPS * 100
    assert_trees_close((fs.unshard(state.params), buffers, out), reference(), rtol=0.0, atol=atol)
    assert buffers["1.num_batches_tracked"].item() == steps


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sync_buffers(strategy, world_size):
    on = meshes()
    like = fs.shard({"w": torch.ones(3)}, STRATEGIES[strategy](on))
    rank = fs.comm.rank(fs.axis_of(on.line))
    buffers = {"mean": torch.tensor([rank, 2.0 * rank]), "count": torch.tensor(10 + rank), "none": None}
    before = fs.tree_map(torch.clone, buffers)
    first, mean = fs.sync_buffers(buffers, like), fs.sync_buffers(buffers, like, by="mean")
    assert_same_bits(buffers, before)
    middle = (world_size - 1) / 2
    assert_same_bits(first, {"mean": torch.zeros(2), "count": torch.tensor(10), "none": None})
    # Means of small integers over powers of two are exact.
    assert_same_bits(mean, {"mean": torch.tensor([middle, 2 * middle]), "count": torch.tensor(10), "none": None})
