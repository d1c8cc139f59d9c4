"""The examples of custom transforms keep the laws: lossy sums, half shards, weights of 8 and 4 bits, split layers."""

import re
import sys
from functools import partial
from math import ceil, prod

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close, check_adjoint, spmd
from tests.ranks import on_ranks
from tests.test_processes import ROOT, TORCHRUN, run
from tests.trees import assert_same_bits, normal, one_axis

sys.path.append(str(ROOT / "examples"))

from powersgd import PowerSGD
from quantized import BLOCK, NORMAL_FLOAT, SCALE_BYTES, Dequantize, dequantized, fits, quantized
from sibling import Sibling
from topk import TopK

SHAPES = {"w": (10, 6), "cube": (5, 3, 4), "v": (7,), "scalar": (), "empty": (0, 3)}
STEPS = 4
# Some hundred terms in each sum, of some units each, rounded once a step on each rank.
ROUNDING = {"rtol": 0.0, "atol": 1000 * STEPS * 4 * torch.finfo(torch.float64).eps}
EXACT = {"exact": True}


def lossy(transform, kept):
    return transform(fs.fully_shard(one_axis()), kept)


def siblings(replicas, min_elements=0):
    mesh = fs.init_mesh({"replicate": replicas, "shard": -1}, device="cpu")
    return Sibling(fs.axis_of(mesh, "replicate"), fs.axis_of(mesh, "shard"), min_elements)


def drawn(seed):
    draw = normal(seed)
    return {name: draw(*shape) for name, shape in SHAPES.items()}


def drawn_by_rank(ranks):
    return [[drawn(1 + step * ranks + i) for i in range(ranks)] for step in range(STEPS)]


def summed(trees):
    return fs.tree_map(lambda *leaves: sum(leaves[1:], leaves[0]), *trees)


def scattered(make, rows):
    """The sums that each step applies, and what waits on all ranks after the last."""
    params = fs.shard(drawn(0), make())
    state, applied, waiting = fs.transform_state(params), [], fs.tree_map(torch.zeros_like, drawn(0))
    for row in rows:
        grads, state = fs.scatter_grads(row[one_axis().get_rank()], like=params, reduce="sum", transform_state=state)
        applied.append(fs.unshard(grads))
    for name in [name for name, part in state.items() if part is not None]:
        part = state[name]
        # The second part of PowerSGD's is no gradient.
        waiting[name] = fs.unshard(part[0] if isinstance(part, tuple) else part).sum(0).reshape(SHAPES[name])
    return applied, waiting


def sent_by(verb, params):
    """Bytes that this rank sends in a gather or in a scatter."""
    arguments = {"like": params, "transform_state": fs.transform_state(params)} if verb is fs.scatter_grads else {}
    with fs.comm.record() as record:
        verb(drawn(0) if arguments else params, **arguments)
    assert bool(record) == any(axis.size > 1 for axis in params["w"].spec.axes)
    return record.bytes_sent()


@pytest.mark.rows(1)
@on_ranks(2, 3)
def test_nothing_is_lost_and_gradients_cost_what_is_kept_of_them(world_size):
    rows = drawn_by_rank(world_size)
    for transform, kept, rounding in ((TopK, 1.0, EXACT), (PowerSGD, 9, ROUNDING)):
        applied, _ = scattered(partial(lossy, transform, kept), rows)
        assert_trees_close(applied, [summed(row) for row in rows], **rounding)
    pieces = [ceil(shape[0] / world_size) * prod(shape[1:]) if shape else 1 for shape in SHAPES.values()]
    # float64 and int32.
    pairs = sum((8 + 4) * ceil(0.3 * size) for size in pieces)
    thin, exact = 2 * (10 + 6) + 2 * (5 + 12), ceil(7 / world_size) + 1
    for transform, kept, each in ((TopK, 0.3, pairs), (PowerSGD, 2, 8 * (2 * thin / world_size + exact))):
        applied, waiting = scattered(partial(lossy, transform, kept), rows)
        total = summed([tree for row in rows for tree in row])
        assert_trees_close(summed([*applied, waiting]), total, **ROUNDING)
        assert waiting["w"].any()
        sent = sent_by(fs.scatter_grads, fs.shard(drawn(0), lossy(transform, kept)))
        assert sent == pytest.approx((world_size - 1) * each)


@pytest.mark.rows(1)
@pytest.mark.parametrize(("replicas", "size"), [(2, 1), (1, 3), (2, 3)])
def test_siblings_hold_half_a_shard_and_keep_the_laws(replicas, size):
    shards = [(ceil(first / size), prod(rest)) for first, *rest in (shape for shape in SHAPES.values() if shape)]
    sent = sum(8 * row * ((replicas - 1) * ceil(rows / replicas) + (size - 1) * rows) for rows, row in shards)

    def program():
        transform, other = siblings(replicas), siblings(replicas, min_elements=10)
        for each in (other, transform):
            params = fs.shard(drawn(0), each)
            assert_same_bits([fs.unshard(params), fs.gather(params)], [drawn(0), drawn(0)])
            assert tuple(params["w"].local.shape) == (ceil(10 / (replicas * size)), 6)
            check_adjoint(each, list(SHAPES.values()))
        assert (sent_by(fs.gather, params), sent_by(fs.scatter_grads, params)) == pytest.approx((sent, sent))

    spmd(program, replicas * size)


# The widest gap between levels is of the largest magnitude in a block; half of it is the largest error.
ERROR = {8: 0.5 / 127, 4: float((NORMAL_FLOAT[1:] - NORMAL_FLOAT[:-1]).max()) / 2}
WIDTH, INNER = 64, 128


class Net(nn.ModuleList):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH)) for _ in range(3))

    def forward(self, x):
        for block in self:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.rows(1)
@on_ranks(2, 3)
def test_a_frozen_base_of_bytes_trains_the_other_leaves_as_one_process_does(world_size):
    """Biases here. Bytes are gathered again in the backward, and nothing else of a weight is kept or sent."""
    mesh, draw = one_axis(), normal()
    model = fs.functionalize(Net().double(), units=nn.Sequential)
    weights = {name: draw(*parameter.shape) / 8 for name, parameter in Net().named_parameters()}
    xs = [normal(5 + rank)(7, WIDTH) for rank in range(world_size)]
    for bits in (8, 4):
        stored = {name: quantized(leaf, bits) if fits(leaf.shape) else leaf for name, leaf in weights.items()}
        full = {n: x if x.is_floating_point() else dequantized(x, bits).double() for n, x in stored.items()}
        biases = {name: full[name] for name in full if name.endswith("bias")}

        def dense(biases, full=full):
            return sum(torch.func.functional_call(Net(), {**full, **biases}, (x,)) for x in xs) / world_size

        restored = fs.masked(Dequantize(torch.float64, bits), lambda name, leaf: leaf.dtype == torch.uint8)
        params = fs.shard(stored, fs.compose(fs.zero3(mesh, merge_bytes=0), restored), frozen="*weight*")
        step, x = fs.value_and_grad(model.apply), xs[mesh.get_rank()]
        with fs.comm.record() as record:
            loss, grads = step(params, x)
        found = fs.unshard({name: grads[name] for name in biases}), loss
        assert_trees_close(found, torch.func.grad_and_value(dense)(biases), **ROUNDING)
        assert_same_bits(fs.tree_leaves(fs.jit(step)(params, x)), fs.tree_leaves((loss, grads)))
        assert_same_bits((fs.unshard(params), fs.gather(params)), (stored, full))
        # Whole rows, and so whole blocks; three units, of which the first is gathered again.
        gathered = sum(entry.bytes for entry in record if entry.label == "gather")
        rows = ceil(INNER / world_size) * WIDTH + ceil(WIDTH / world_size) * INNER
        unit = rows * world_size // BLOCK * (SCALE_BYTES + BLOCK * bits // 8)
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


@pytest.mark.slow
def test_the_example_of_split_layers_ends_where_one_process_does():
    sizes = {"steps": 3, "width": 32, "layers": 1, "context": 16, "batch": 4}
    options = [part for name, size in sizes.items() for part in (f"--{name}", size)]
    out = run(*TORCHRUN, 4, ROOT / "examples/tensor_parallel.py", *options)
    gaps = re.search(r"from one process: (\S+) in a loss, (\S+) in a parameter", out).groups()
    assert max(map(float, gaps)) < 1e-12
    sent = {axis: float(megabytes) for megabytes, axis in re.findall(r"(\S+) MB over '(\w+)'", out)}
    assert sent.keys() == {"shard", "tp"}
    assert min(sent.values()) > 0
