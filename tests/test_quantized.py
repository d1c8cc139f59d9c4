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

BITS = pytest.mark.parametrize("bits", (8, 4))
# The widest gap between levels is of the largest magnitude in a block; half of it is the largest error.
ERROR = {8: 0.5 / 127, 4: float((NORMAL_FLOAT[1:] - NORMAL_FLOAT[:-1]).max()) / 2}
WIDTH, INNER = 64, 192
ROUNDING = {"rtol": 0.0, "atol": 1000 * torch.finfo(torch.float64).eps}


@BITS
def test_numbers_are_off_by_half_a_step_at_most(bits):
    weight = normal()(3, 10, 2 * BLOCK, dtype=torch.float32)
    weight[0, 0, :BLOCK] = 0
    stored = quantized(weight, bits)
    assert stored.shape == (3, 10, 2, SCALE_BYTES + BLOCK * bits // 8)
    assert stored.dtype == torch.uint8
    blocks = weight.unflatten(-1, (-1, BLOCK))
    off = (dequantized(stored, bits).unflatten(-1, (-1, BLOCK)) - blocks).abs().amax(-1)
    assert bool((off <= ERROR[bits] * blocks.abs().amax(-1) * (1 + 1e-5)).all())
    # What was rounded once stays.
    assert_same_bits(quantized(dequantized(stored, bits), bits), stored)


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


@BITS
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
    transform = strategy(mesh, torch.float64, bits, merge_bytes=0)
    params = fs.shard(stored(bits), transform, frozen="*weight*")
    step = fs.value_and_grad(model.apply)
    with fs.comm.record() as record:
        loss, grads = step(params, batch(mesh.get_rank()))
    assert_trees_close((fs.unshard({name: grads[name] for name in trained}), loss), expected, **ROUNDING)
    jitted = fs.jit(step)(params, batch(mesh.get_rank()))
    assert_same_bits(fs.tree_leaves(jitted), fs.tree_leaves((loss, grads)))
    row = {n: WIDTH if n.endswith("0.weight") else INNER for n in full if n.endswith("weight")}
    sizes = SCALE_BYTES + BLOCK * bits // 8
    for name, leaf in params.items():
        if leaf.local.dtype == torch.uint8:
            # Whole rows, and so whole blocks.
            assert leaf.local.shape == (-(-len(full[name]) // world_size), row[name] // BLOCK, sizes), name
    if world_size > 1:
        gathered = sum(entry.bytes for entry in record if entry.label == "gather")
        padded = {name: world_size * -(-len(full[name]) // world_size) for name in full}
        unit = sum(padded[f"blocks.0.{n}.weight"] * row[f"blocks.0.{n}.weight"] // BLOCK * sizes for n in (0, 2))
        biases = 8 * (WIDTH + INNER)
        # Three units, of which the first is gathered again; biases of few elements are whole on each rank.
        assert gathered in (4 * unit, 4 * (unit + biases)), (gathered, unit)


@on_ranks(2)
def test_gather_gives_numbers_and_unshard_the_bytes():
    params, name = fs.shard(stored(4), strategy(one_axis(), torch.bfloat16, 4)), "blocks.1.2.weight"
    expected = stored(4)[name]
    assert_same_bits(fs.unshard(params)[name], expected)
    assert_same_bits(fs.gather(params)[name], dequantized(expected, 4).bfloat16())


def test_other_shapes_are_refused_by_the_module():
    mesh = fs.init_mesh({"shard": 1}, device="cpu")
    model = fs.functionalize(nn.Linear(2 * BLOCK, 3))
    wrong = {"weight": quantized(torch.ones(3, BLOCK), 8), "bias": torch.zeros(3)}
    with pytest.raises(RuntimeError, match="1x128 and 64x3"):
        model.apply(fs.shard(wrong, strategy(mesh, torch.float32, 8)), torch.ones(1, 2 * BLOCK))
    with pytest.raises(TypeError, match="take no gradient"):
        Dequantize(torch.float32, 8).scatter([], [])
