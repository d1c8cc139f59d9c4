"""Leaves sharded over two axes: a tensor-parallel transformer under ZeRO-3 is the transformer of one process."""

import re
from collections import Counter
from functools import cache

import pytest
import torch
from torch.func import grad_and_value

import fshard as fs
from fshard.testing import assert_trees_close
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

STEPS, MAX_NORM = 3, 0.1
ADAMW = dict(lr=0.01, eps=0.01, weight_decay=0.1)

# A gradient adds up a term below 1 for each token, in another order than one process does. AdamW hands on 2 lr / eps of
# that, and the next gradient, of a loss with curvature about 1, what parameters differ by then.
FIRST = sum(ROWS[1]) * TIME * torch.finfo(torch.float64).eps
LAST = FIRST * ((1 + 2 * ADAMW["lr"] / ADAMW["eps"]) ** STEPS - 1)


STRATEGIES = {
    "every leaf": lambda mesh: strategy(mesh, merge_bytes=0, min_shard_elements=0),
    "large leaves": lambda mesh: strategy(mesh, merge_bytes=0, min_shard_elements=50),
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


MESHES = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 4: [(2, 2)], 6: [(3, 2), (2, 3)], 8: [(2, 4)]}  # of "shard" and "tp"


@pytest.mark.rows(2)
@on_ranks(*MESHES, "2 processes")
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_is_that_of_one_process(name, world_size):
    """Losses, gradients, and parameters after steps of AdamW that are clipped by the norm of all gradients."""
    tx = fs.chain(fs.clip_by_global_norm(MAX_NORM), fs.adamw(**ADAMW))
    for sizes in MESHES[world_size]:
        mesh, gradients = mesh_of(sizes), by_four_verbs if name == "large leaves" else by_value_and_grad
        params, losses, first = fs.shard(full_params(sizes[1]), STRATEGIES[name](mesh)), [], None
        state = fs.TrainState.create(params, tx)
        for step in range(STEPS):
            loss, grads = gradients(state.params, *mine(mesh, step), fs.axis_of(mesh, "tp"))
            first = first or grads
            state = fs.update(tx, state, grads)
            losses.append(loss)
        found = torch.stack(losses), fs.unshard(first), fs.unshard(state.params)
        for part, needed, atol in zip(found, one_process(sizes[1]), (LAST, FIRST, LAST)):
            assert_trees_close(part, needed, rtol=0.0, atol=atol)
        assert_trees_close(fs.reshard(fs.reshard(params, fs.ddp(mesh)), STRATEGIES[name](mesh)), params, exact=True)


@on_ranks(4, 6)
def test_each_axis_carries_its_own(world_size):
    """Over "shard" this rank's share of the parameters, over "tp" activations alone."""
    sizes = MESHES[world_size][0]
    mesh = mesh_of(sizes)
    params = fs.shard(full_params(sizes[1]), STRATEGIES["every leaf"](mesh))
    with fs.comm.record() as record:
        by_value_and_grad(params, *mine(mesh), fs.axis_of(mesh, "tp"))
    moved, expected = Counter(), Counter()
    for entry in record:
        moved[entry.axis, entry.label] += 0 if entry.scalar else entry.bytes
    nbytes = {name: sum(leaf.nbytes for leaf in fs.tree_leaves(params[name])) * sizes[0] for name in params}
    # All that the schedule names twice, and the table at its last use, which is kept till the backward.
    expected["shard", "gather"] = 2 * sum(nbytes.values()) + nbytes["tokens"]
    expected["shard", "scatter"] = sum(nbytes.values())
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
