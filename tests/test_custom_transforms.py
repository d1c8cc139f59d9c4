"""The examples of custom transforms keep the laws: lossy sums, half shards, weights of 8 and 4 bits, split layers."""

import sys
from math import ceil

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.rounding import tolerance
from fshard.testing import assert_trees_close, check_transform
from tests.ranks import my_rank, on_ranks
from tests.test_processes import ROOT
from tests.tolerance import within
from tests.trees import assert_same_bits, normal, one_axis

sys.path.append(str(ROOT / "examples"))

from powersgd import PowerSGD
from quantized import BLOCK, SCALE_BYTES, Dequantize, dequantized, fits, quantized
from sibling import Sibling
from topk import TopK


@on_ranks(2, 3)
def test_lossy_sums_that_keep_all_are_sums():
    check_transform(TopK(fs.fully_shard(one_axis()), 1.0))
    # Factors of full rank, whose products are sums of as many terms, forth and back.
    check_transform(PowerSGD(fs.fully_shard(one_axis()), 9), error=tolerance(torch.float64, terms=9, steps=2))


@on_ranks(2, 6)
def test_siblings_hold_half_a_shard_and_keep_the_laws(world_size):
    mesh = fs.init_mesh({"replicate": 2, "shard": -1}, device="cpu")
    transform = Sibling(fs.axis_of(mesh, "replicate"), fs.axis_of(mesh, "shard"), 0)
    assert fs.shard({"w": torch.ones(10, 6)}, transform)["w"].local.shape == (ceil(10 / world_size), 6)
    check_transform(transform)


WIDTH, INNER = 64, 128


class Net(nn.ModuleList):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH)) for _ in range(3))

    def forward(self, x):
        for block in self:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.rows(1)
@pytest.mark.parametrize("bits", (8, 4))
@on_ranks(pytest.param(2, marks=pytest.mark.slow), 3)
def test_a_frozen_base_of_bytes_trains_the_other_leaves_as_one_process_does(bits, world_size):
    """Biases here. Bytes are gathered again in the backward, and nothing else of a weight is kept or sent."""
    draw = normal()
    weights = {name: draw(*parameter.shape) / 8 for name, parameter in Net().named_parameters()}
    stored = {name: quantized(leaf, bits) if fits(leaf.shape) else leaf for name, leaf in weights.items()}
    full = {n: x if x.is_floating_point() else dequantized(x, bits).double() for n, x in stored.items()}
    biases = {name: leaf for name, leaf in full.items() if name.endswith("bias")}
    batches = [normal(5 + rank)(7, WIDTH) for rank in range(world_size)]

    def dense(biases):
        return sum(torch.func.functional_call(Net(), full | biases, (x,)) for x in batches) / world_size

    restored = fs.masked(Dequantize(torch.float64, bits), lambda name, leaf: leaf.dtype == torch.uint8)
    params = fs.shard(stored, fs.compose(fs.zero3(one_axis(), bucket_bytes=0), restored), frozen="*weight*")
    model = fs.functionalize(Net().double(), units=nn.Sequential)
    step, x = fs.value_and_grad(model.apply), batches[my_rank()]
    with fs.comm.record() as record:
        loss, grads = step(params, x)
    expected = torch.func.grad_and_value(dense)(biases)
    # Sums over all rows, forward and backward.
    near = within(expected, terms=7 * world_size, steps=2)
    assert_trees_close((fs.unshard({name: grads[name] for name in biases}), loss), expected, **near)
    assert_same_bits(fs.tree_leaves(fs.jit(step)(params, x)), fs.tree_leaves((loss, grads)))
    assert_same_bits((fs.unshard(params), fs.gather(params)), (stored, full))
    # Whole rows, and so whole blocks; three units, of which the first is gathered again.
    gathered = sum(entry.bytes for entry in record if entry.label == "gather")
    rows = ceil(INNER / world_size) * WIDTH + ceil(WIDTH / world_size) * INNER
    unit = rows * world_size // BLOCK * (SCALE_BYTES + BLOCK * bits // 8)
    assert gathered == 4 * unit
