"""Leaves sharded over two axes: a tensor-parallel transformer under ZeRO-3 is the transformer of one process."""

import math
import re
from collections import Counter
from functools import cache

import pytest
import torch
from torch.func import grad, grad_and_value, jvp

import fshard as fs
from fshard.testing import assert_trees_close
from fshard.tree import flatten
from tests.parallel_transformer import (
    LAYERS,
    ROWS,
    TIME,
    WIDTH,
    batch,
    dense_loss,
    full_params,
    loss_fn,
    mesh_of,
    mine,
    strategy,
)
from tests.ranks import my_rank, on_ranks
from tests.test_processes import ROOT, TORCHRUN, run
from tests.trees import normal

MESHES = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (2, 4))  # sizes of "shard" and "tp"
EVERY_MESH = pytest.mark.parametrize("world_size, sizes", [(math.prod(sizes), sizes) for sizes in MESHES], ids=str)
STEPS, MAX_NORM = 3, 0.1
ADAMW = dict(lr=0.01, eps=0.01, weight_decay=0.1)

# A gradient adds up a term below 1 for each token, in another order than one process does. AdamW hands on 2 lr / eps of
# that, and the next gradient, of a loss with curvature about 1, what parameters differ by then.
FIRST = sum(ROWS[1]) * TIME * torch.finfo(torch.float64).eps
LAST = FIRST * ((1 + 2 * ADAMW["lr"] / ADAMW["eps"]) ** STEPS - 1)

# Whether every leaf is split over "shard" too, or biases and norms are not.
EVERY, LARGE = (dict(merge_bytes=0, min_shard_elements=n) for n in (0, 50))
STRATEGIES = {
    "every leaf": lambda mesh: strategy(mesh, **EVERY),
    "large leaves": lambda mesh: strategy(mesh, **LARGE),
    "zero2": lambda mesh: strategy(mesh, fs.zero2, min_shard_elements=50),
}


@cache
def one_process(tp):
    """Losses, the first gradients, and parameters after some steps, by torch alone."""
    params = fs.tree_map(lambda tensor: tensor.clone().requires_grad_(), full_params(tp))
    leaves, losses, first = fs.tree_leaves(params), [], None
    optimizer = torch.optim.AdamW(leaves, **ADAMW)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = dense_loss(params, *batch(step))
        loss.backward()
        first = first or fs.tree_map(lambda tensor: tensor.grad.clone(), params)
        assert torch.nn.utils.clip_grad_norm_(leaves, MAX_NORM) > MAX_NORM
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), first, fs.tree_map(torch.Tensor.detach, params)


def by_value_and_grad(params, x, y, tp):
    return fs.value_and_grad(loss_fn, reduce="weighted")(params, x, y, tp)


def by_four_verbs(params, x, y, tp):
    grads, (value, count) = grad_and_value(lambda p: loss_fn(p, x, y, tp), has_aux=True)(fs.gather(params))
    grads = fs.scatter_grads(grads, like=params, reduce="weighted", count=count)
    return fs.objective((value, count), like=params, reduce="weighted"), grads


def train_and_compare(sizes, transform, gradients=by_value_and_grad):
    """Run the steps on this rank and hold them against one process."""
    mesh = mesh_of(sizes)
    tx = fs.chain(fs.clip_by_global_norm(MAX_NORM), fs.adamw(**ADAMW))
    state, losses, first = fs.TrainState.create(fs.shard(full_params(sizes[1]), transform(mesh)), tx), [], None
    for step in range(STEPS):
        loss, grads = gradients(state.params, *mine(mesh, step), fs.axis_of(mesh, "tp"))
        assert flatten(grads).treedef == flatten(state.params).treedef
        first = first or grads
        state = fs.update(tx, state, grads)
        losses.append(loss)
    found = torch.stack(losses), fs.unshard(first), fs.unshard(state.params)
    for part, needed, atol in zip(found, one_process(sizes[1]), (LAST, FIRST, LAST)):
        assert_trees_close(part, needed, rtol=0.0, atol=atol)


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    "name, gradients",
    [*((name, by_value_and_grad) for name in STRATEGIES), ("large leaves", by_four_verbs)],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
@EVERY_MESH
@on_ranks()
def test_training_is_that_of_one_process(name, gradients, sizes):
    """Losses, gradients, and parameters after steps of AdamW that are clipped by the norm of all gradients."""
    train_and_compare(sizes, STRATEGIES[name], gradients)


@on_ranks("2 processes")
def test_processes_train_alike():
    train_and_compare((1, 2), STRATEGIES["every leaf"])


@on_ranks(6)
def test_specs_say_both_axes():
    params = fs.shard(full_params(2), STRATEGIES["large leaves"](mesh_of((3, 2))))
    block = params["blocks"][0]
    for leaf, partition, gathered, local in (
        (block["attention"]["q"], fs.P(("tp", "shard")), (6, 7), (2, 7)),
        (block["attention"]["out"], fs.P("shard", "tp"), (7, 6), (3, 6)),
        (block["up"]["weight"], fs.P(("tp", "shard")), (10, 7), (4, 7)),
        (block["up"]["bias"], fs.P("tp"), (10,), (10,)),
        (block["norm"]["bias"], fs.P(), (7,), (7,)),
        (params["positions"], fs.P(), (4, 7), (4, 7)),
    ):
        assert (leaf.spec.partition, leaf.spec.gathered_shape, leaf.local.shape) == (partition, gathered, local)


@pytest.mark.rows(2)
@EVERY_MESH
@on_ranks()
def test_unshard_gives_back_the_matrices(sizes):
    full, mesh = full_params(sizes[1]), mesh_of(sizes)
    params = fs.shard(full, STRATEGIES["every leaf"](mesh))
    assert_trees_close(fs.unshard(params), full, exact=True)
    whole = fs.reshard(params, fs.ddp(mesh))
    assert_trees_close(fs.gather(whole), full, exact=True)
    assert_trees_close(fs.reshard(whole, STRATEGIES["large leaves"](mesh)), params, exact=True)


@pytest.mark.slow
@EVERY_MESH
@on_ranks()
def test_derivatives_are_those_of_one_process(sizes):
    full, draw = full_params(sizes[1]), normal(7)
    tangent = fs.tree_map(lambda leaf: draw(*leaf.shape), full)
    # A product with the direction adds up a term for each parameter.
    tolerance = dict(rtol=0.0, atol=sum(leaf.numel() for leaf in fs.tree_leaves(full)) * FIRST)

    def dense(p):
        return dense_loss(p, *batch())

    slope = jvp(dense, (full,), (tangent,))[1]
    expected, product = jvp(grad(dense), (full,), (tangent,))
    mesh = mesh_of(sizes)
    transform, own, tp = STRATEGIES["every leaf"](mesh), mine(mesh), fs.axis_of(mesh, "tp")
    params, direction = fs.shard(full, transform), fs.shard(tangent, transform)

    def sharded(p):
        return fs.objective(loss_fn(p, *own, tp), like=p, reduce="weighted")

    assert_trees_close(jvp(sharded, (params,), (direction,))[1], slope, **tolerance)
    found = jvp(grad(sharded), (params,), (direction,))
    for part, needed in zip(found, (expected, product)):
        assert_trees_close(fs.unshard(part), needed, **tolerance)


@pytest.mark.rows(2)
@EVERY_MESH
@on_ranks()
def test_each_axis_carries_its_own(sizes):
    """Over "shard" this rank's share of the parameters, over "tp" activations alone."""
    mesh = mesh_of(sizes)
    params = fs.shard(full_params(sizes[1]), STRATEGIES["every leaf"](mesh))
    with fs.comm.record() as record:
        by_value_and_grad(params, *mine(mesh), fs.axis_of(mesh, "tp"))
    moved, expected = Counter(), Counter()
    for entry in record:
        moved[entry.axis, entry.label] += 0 if entry.scalar else entry.bytes
    if sizes[0] > 1:
        nbytes = {name: sum(leaf.nbytes for leaf in fs.tree_leaves(params[name])) * sizes[0] for name in params}
        # All that the schedule names twice, and the table at its last use, which is kept till the backward.
        expected["shard", "gather"] = 2 * sum(nbytes.values()) + nbytes["tokens"]
        expected["shard", "scatter"] = sum(nbytes.values())
    if sizes[1] > 1:
        numbers = ROWS[sizes[0]][my_rank() // sizes[1]] * TIME * 8
        # Twice a block: what goes in and what comes out; the embedding and logits; two numbers of each loss.
        expected["tp", "psum_invariant"] = (2 * LAYERS + 1) * WIDTH * numbers + 2 * numbers
        expected["tp", "pvary"] = (2 * LAYERS + 1) * WIDTH * numbers
    assert +moved == expected


@pytest.mark.slow
def test_the_example_ends_where_one_process_does():
    sizes = {"steps": 3, "width": 32, "layers": 1, "context": 16, "batch": 4}
    options = [part for name, size in sizes.items() for part in (f"--{name}", size)]
    out = run(*TORCHRUN, 4, ROOT / "examples/tensor_parallel.py", *options)
    assert "Sharded(float64[32, 32], P('shard', 'tp'), local [16, 16])" in out
    gaps = re.search(r"from one process: (\S+) in a loss, (\S+) in a parameter", out).groups()
    assert max(map(float, gaps)) < 1e-12
    sent = {axis: float(megabytes) for megabytes, axis in re.findall(r"(\S+) MB over '(\w+)'", out)}
    assert sent.keys() == {"shard", "tp"}
    assert min(sent.values()) > 0
