"""Weights that are stored as blocks of 8 or 4 bits, by the example's transform: numbers, bytes, memory, gradients."""

import sys

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.test_processes import ROOT
from tests.trees import assert_same_bits, normal, one_axis

sys.path.append(str(ROOT / "examples"))

from quantized import BLOCK, NORMAL_FLOAT, SCALE_BYTES, Dequantize, dequantized, fits, quantized

# The widest gap between levels is of the largest magnitude in a block; half of it is the largest error.
ERROR = {8: 0.5 / 127, 4: float((NORMAL_FLOAT[1:] - NORMAL_FLOAT[:-1]).max()) / 2}
WIDTH, INNER = 64, 192
ROUNDING = {"rtol": 0.0, "atol": 1000 * torch.finfo(torch.float64).eps}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def weights():
    draw = normal()
    return {name: draw(*parameter.shape) / 8 for name, parameter in Net().named_parameters()}


def stored(bits):
    return {name: quantized(leaf, bits) if fits(leaf.shape) else leaf for name, leaf in weights().items()}


def strategy(mesh, dtype, bits, **options):
    is_bytes = lambda name, leaf: leaf.dtype == torch.uint8  # noqa: E731
    return fs.compose(fs.zero3(mesh, **options), fs.masked(Dequantize(dtype, bits), is_bytes))


def batch(rank):
    return normal(5 + rank)(7, WIDTH)


@pytest.mark.parametrize("bits", (8, 4))
@on_ranks(1, 2, 3)
def test_a_frozen_base_of_bytes_trains_the_other_leaves_as_one_process_does(bits, world_size):
    """Biases here. Bytes are gathered again in the backward, and nothing else of a weight is kept or sent."""
    full = {
        n: dequantized(leaf, bits).double() if leaf.dtype == torch.uint8 else leaf for n, leaf in stored(bits).items()
    }
    trained = [name for name in full if name.endswith("bias")]

    def dense(biases):
        losses = [torch.func.functional_call(Net(), {**full, **biases}, (batch(rank),)) for rank in range(world_size)]
        return torch.stack(losses).mean()

    expected = torch.func.grad_and_value(dense)({name: full[name] for name in trained})
    mesh = one_axis()
    model = fs.functionalize(Net().double(), units=nn.Sequential)
    params = fs.shard(stored(bits), strategy(mesh, torch.float64, bits, merge_bytes=0), frozen="*weight*")
    step = fs.value_and_grad(model.apply)
    with fs.comm.record() as record:
        loss, grads = step(params, batch(mesh.get_rank()))
    assert_trees_close((fs.unshard({name: grads[name] for name in trained}), loss), expected, **ROUNDING)
    jitted = fs.jit(step)(params, batch(mesh.get_rank()))
    assert_same_bits(fs.tree_leaves(jitted), fs.tree_leaves((loss, grads)))
    name = "blocks.1.2.weight"
    assert_same_bits(fs.unshard(params)[name], stored(bits)[name])
    assert_same_bits(fs.gather(params)[name], full[name])
    # Whole rows, and so whole blocks.
    rows, size = (
        {n: -(-len(full[f"blocks.0.{n}.weight"]) // world_size) for n in (0, 2)},
        SCALE_BYTES + BLOCK * bits // 8,
    )
    blocks = {0: WIDTH // BLOCK, 2: INNER // BLOCK}
    for n in (0, 2):
        assert params[f"blocks.0.{n}.weight"].local.shape == (rows[n], blocks[n], size)
    if world_size > 1:
        gathered = sum(entry.bytes for entry in record if entry.label == "gather")
        unit = sum(world_size * rows[n] * blocks[n] * size for n in (0, 2))
        # Three units, of which the first is gathered again; biases of few elements are whole on each rank.
        assert gathered == 4 * unit


def test_numbers_are_off_by_half_a_step_at_most():
    for bits, error in ERROR.items():
        weight = normal()(3, 10, 2 * BLOCK, dtype=torch.float32)
        weight[0, 0, :BLOCK] = 0
        found = quantized(weight, bits)
        assert (found.shape, found.dtype) == ((3, 10, 2, SCALE_BYTES + BLOCK * bits // 8), torch.uint8)
        blocks = weight.unflatten(-1, (-1, BLOCK))
        off = (dequantized(found, bits).unflatten(-1, (-1, BLOCK)) - blocks).abs().amax(-1)
        assert bool((off <= error * blocks.abs().amax(-1) * (1 + 1e-5)).all())
        # What was rounded once stays.
        assert_same_bits(quantized(dequantized(found, bits), bits), found)
    with pytest.raises(TypeError, match="take no gradient"):
        Dequantize(torch.float32, 8).scatter([], [])
