"""Four axes at once, of the example: ZeRO-3, long sequences, a pipeline and tensor parallelism, against one process."""

import math
import sys
from argparse import Namespace
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from fshard.tree import leaves_of
from tests.ranks import world_of

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import four_dimensions as example

SIZES = Namespace(
    width=32, layers=4, context=16, batch=8, microbatches=2, steps=3, seed=0, lr=1e-2, jit=False, plan=None
)
FLOAT64 = 8
# Sums over ranks, tiles and microbatches in another order, handed on through AdamW's roots for a few steps.
ROUNDING = {"rtol": 0.0, "atol": 1e-10}


def dense_loss(params, x, y):
    """The model as one reads it, without an axis."""
    embedding, layers, head = params["embedding"], params["layers"], params["head"]
    h = embedding["tokens"][x] + embedding["positions"]
    for i in range(len(layers["qkv"])):
        p = {name: leaf[i] for name, leaf in layers.items()}
        normed = F.rms_norm(h, h.shape[-1:]) * p["norm1"]
        q, k, v = F.linear(normed, p["qkv"]).unflatten(-1, (-1, 3, example.HEAD_WIDTH)).permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + F.linear(attended.transpose(1, 2).flatten(2), p["out"])
        normed = F.rms_norm(h, h.shape[-1:]) * p["norm2"]
        h = h + F.linear(F.gelu(F.linear(normed, p["up"])), p["down"])
    logits = F.linear(F.rms_norm(h, h.shape[-1:]) * head["norm"], head["weight"])
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def dense():
    """Losses and parameters of one process."""
    tx = fs.chain(fs.clip_by_global_norm(0.5), fs.adamw(SIZES.lr, weight_decay=0.1))
    params = example.initial(SIZES.width, SIZES.layers, SIZES.context, SIZES.seed)
    state, losses, text = fs.TrainState.create(params, tx), [], example.standard_library()[0]
    for step in range(SIZES.steps):
        x, y = example.batch(text, SIZES.batch, SIZES.context, seed=step)
        grads, loss = torch.func.grad_and_value(dense_loss)(state.params, x, y)
        state = fs.update(tx, state, grads)
        losses.append(loss.item())
    return losses, state.params


def laid_out(sizes):
    """The parameters on a mesh of (pipe, shard, cp, tp), and its axes."""
    mesh = fs.init_mesh(dict(zip(example.AXES, sizes, strict=True)), device="cpu")
    full = example.initial(SIZES.width, SIZES.layers, SIZES.context, SIZES.seed)
    return fs.shard(full, example.strategy(mesh, axes := {name: fs.axis_of(mesh, name) for name in example.AXES})), axes


def program(sizes, schedule):
    """Train, and count the bytes of a step by axis and verb."""
    params, axes = laid_out(sizes)
    args = Namespace(**vars(SIZES) | {"schedule": schedule})
    with fs.comm.record() as record:
        losses, trained = example.train(params, axes, args)
    sent = Counter()
    for entry in (entry for entry in record if not entry.scalar):
        sent[entry.axis, entry.label] += entry.sent
    sent = Counter({key: count / SIZES.steps for key, count in sent.items()})
    gathered = sum(math.prod(leaf.spec.gathered_shape) * FLOAT64 for leaf in leaves_of(params))
    return losses, fs.unshard(trained), sent, gathered


@pytest.mark.parametrize(
    ("sizes", "schedule", "world"),
    [
        ((2, 1, 1, 2), "1f1b", 4),
        ((1, 2, 2, 1), "gpipe", 4),
        pytest.param((2, 2, 2, 2), "1f1b", 16, marks=pytest.mark.slow),
        pytest.param((2, 1, 1, 2), "1f1b", "4 processes", marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.timeout(500)
def test_training_is_that_of_one_process(sizes, schedule, world, workers):
    """Clipped AdamW steps on a mesh of (pipe, shard, cp, tp)."""
    pipe, shard, cp, tp = sizes
    losses, params = dense()
    ranks = spmd(partial(program, sizes, schedule), world_of(world, workers), timeout=400)
    for found_losses, found, sent, gathered in ranks:
        assert found_losses == pytest.approx(losses, rel=0.0, abs=ROUNDING["atol"])
        assert_trees_close(found, params, **ROUNDING)
        # A microbatch of hidden values, on all ranks of "tp" together.
        hidden = SIZES.batch // shard // SIZES.microbatches * SIZES.context // cp * SIZES.width * FLOAT64
        if pipe == 2 and schedule == "1f1b":
            # A stage sends activations to the next one, or gradients to the one before.
            assert sent["pipe", "pipeline"] == SIZES.microbatches * hidden / tp
            # Two gathers and two scatters for each layer, their transposes, and those of the embedding or the head;
            # the first stage's values are computed once more for their shape.
            calls = (4 * SIZES.layers // pipe + 1) * SIZES.microbatches
            assert sent["tp", "all_gather"] == calls * hidden * (tp - 1) / tp
            assert sent["tp", "reduce_scatter"] == (calls + 1) * hidden * (tp - 1) / tp
        for verb in ("gather", "scatter"):
            over_both = sum(sent[axis, verb] for axis in ("shard", "cp"))
            assert over_both == gathered * (1 - 1 / (shard * cp))


@pytest.mark.slow
def test_the_plan_is_the_recorded_step():
    """A plan made on one rank has the bytes that ranks of the mesh send, the first and the last one."""
    sizes, args = (2, 2, 1, 1), Namespace(**vars(SIZES) | {"schedule": "1f1b"})
    planned = []
    for rank in (0, 3):
        params, axes = laid_out((1, 1, 1, 1))
        state = fs.TrainState.create(params, example.optimizer(args))
        x = torch.zeros(SIZES.batch // sizes[1], SIZES.context, dtype=torch.int64)
        step = partial(example.train_step, args=args)
        mesh = dict(zip(example.AXES, sizes, strict=True))
        plan = fs.plan(step, state, axes, x, x, mesh=mesh, rank=rank, backend="gloo")
        planned.append({axis: sent.bytes for axis, sent in plan.by_axis().items() if sent.bytes})
    found = [Counter() for _ in range(4)]
    for rank, (_, _, sent, _) in enumerate(spmd(partial(program, sizes, "1f1b"), 4, timeout=100)):
        for (axis, _), nbytes in sent.items():
            found[rank][axis] += nbytes
    assert planned == [found[0], found[3]]
