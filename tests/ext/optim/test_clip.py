"""clip_by_global_norm, clip_by_norm and global_norm: torch's clipping, on shards."""

import itertools
import math
from functools import partial

import pytest
import torch

import fshard as fs
from fshard.rounding import tolerance
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import STRATEGIES, assert_same_bits, every_bit, meshes, normal, one_axis, padded_with

ORDERS = (1.0, 2.0, 3.0, math.inf)
SHAPES = {"w": (5, 3), "wide": (3, 70), "vector": (7,), "one": (1,), "scalar": (), "empty": (0, 3)}
ELEMENTS = 15 + 210 + 7 + 1 + 1
ALL_SPLIT = ("zero2 of every leaf", "last dim", "one dim over two axes")
# "zero1" and "zero2" keep leaves as small as these whole, as "ddp" does.
LAYOUTS = {name: make for name, make in STRATEGIES.items() if name not in ("zero1", "zero2")}


def gradients(dtype=torch.float64, seed=0):
    draw = normal(seed)
    return {name: draw(*shape, dtype=dtype) for name, shape in SHAPES.items()} | {"frozen": None}


def clip(grads, max_norm, p=2.0):
    return fs.clip_by_global_norm(max_norm, p).update(grads, (), None)[0]


def torch_clip(full, max_norm, p=2.0):
    """torch's own clipping of full gradients, and the norm that it took."""
    params = {name: torch.nn.Parameter(torch.zeros_like(grad)) for name, grad in full.items() if grad is not None}
    for name, param in params.items():
        param.grad = full[name].clone()
    # torch has no largest magnitude of no elements.
    norm = torch.nn.utils.clip_grad_norm_([param for param in params.values() if param.numel()], max_norm, p)
    return {name: param.grad for name, param in params.items()} | {"frozen": None}, norm


def of_norms(dtype, p):
    """How far two norms may be apart, relatively: sums of ELEMENTS powers."""
    return {"rtol": 0.0 if math.isinf(p) else tolerance(dtype, ELEMENTS), "atol": 0.0}


def of_clipped(dtype, p):
    """The same of what is divided by a norm and multiplied."""
    return {"rtol": of_norms(dtype, p)["rtol"] + tolerance(dtype, terms=1), "atol": 0.0}


def assert_clipped_as_by_torch(clipped, full, max_norm, p):
    expected, norm = torch_clip(full, max_norm, p)
    assert_trees_close(clipped, expected, **of_clipped(norm.dtype, p))


@pytest.mark.rows(2)
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@on_ranks(1, 3, 4)
def test_every_strategy_clips_as_torch_does(dtype, p):
    """All leaves together, and each by a norm of its own."""
    full, on = gradients(dtype), meshes()
    _, norm = torch_clip(full, 1.0, p)
    each = {name: torch_clip({name: full[name]}, 0.5, p)[0][name] for name in SHAPES} | {"frozen": None}
    results = {}
    for name, make in LAYOUTS.items():
        grads = fs.shard(full, make(on))
        assert_trees_close(fs.global_norm(grads, p), norm, **of_norms(dtype, p))
        alone, _ = fs.clip_by_norm(0.5, p).update(grads, (), None)
        assert_trees_close(fs.unshard(alone), each, **of_clipped(dtype, p))
        for max_norm in (0.0, 0.5, 1e6):
            clipped = results[name, max_norm] = fs.unshard(clip(grads, max_norm, p))
            assert_clipped_as_by_torch(clipped, full, max_norm, p)
            if max_norm == 1e6:
                assert_same_bits(clipped, full)
            # The norm is taken in float64 and agrees in float32 however leaves are split.
            if dtype == torch.float32 or math.isinf(p):
                assert_same_bits(clipped, results["ddp", max_norm])
    return every_bit(list(results.values()))


@pytest.mark.rows(1)
@pytest.mark.parametrize("p", ORDERS)
@on_ranks(4)
def test_odd_elements_count_as_with_torch(p):
    """Complex ones by their magnitudes, and those that are not finite, zeros, and none at all."""
    full, on = gradients(), meshes()
    trees = [fs.tree_map(lambda grad: torch.complex(grad, 2 * grad), full), fs.tree_map(torch.zeros_like, full)]
    trees += [full | {"one": torch.tensor([bad], dtype=torch.float64)} for bad in (math.nan, math.inf)]
    # In bfloat16 itself the sum would stand still at 256.
    ones = {"w": torch.ones(4096, dtype=torch.bfloat16)}
    for strategy in (STRATEGIES[name](on) for name in ("ddp", *ALL_SPLIT)):
        for tree in trees:
            assert_clipped_as_by_torch(fs.unshard(clip(fs.shard(tree, strategy), 0.5, p)), tree, 0.5, p)
        norm = fs.global_norm(fs.shard(ones, strategy))
        assert (norm.dtype, norm.item()) == (torch.float32, 64.0)
    for tree in ({}, {"frozen": None}):
        assert (clip(tree, 1.0, p), fs.global_norm(tree, p).item()) == (tree, 0.0)


@on_ranks(4)
def test_padding_does_not_count():
    clean = {name: grad for name, grad in gradients().items() if grad is not None}
    for name in ALL_SPLIT:
        grads = fs.shard(clean, STRATEGIES[name](meshes()))
        for poison, p in itertools.product((math.nan, 1e30), ORDERS):
            padded = {path: padded_with(leaf, poison) for path, leaf in grads.items()}
            assert_same_bits(fs.unshard(clip(padded, 0.5, p)), fs.unshard(clip(grads, 0.5, p)))


@pytest.mark.rows(1)
@pytest.mark.parametrize("p, max_norm", [*((p, 0.5) for p in ORDERS), (2.0, 1e6)])
@on_ranks(4)
def test_derivative_is_that_of_full_gradients(world_size, p, max_norm):
    """Through gather and a loss that differs between ranks, as when a learning rate or a loss is learned."""
    full = {name: grad for name, grad in gradients().items() if grad is not None and grad.numel()}
    direction = {name: grad for name, grad in gradients(seed=1).items() if name in full}

    def loss(clipped, share):
        return share * sum((leaf * direction[name]).sin().sum() for name, leaf in clipped.items())

    def dense(grads):
        # torch's clip, written out to be differentiable.
        flat = torch.cat([grad.reshape(-1) for grad in grads.values()])
        scale = (max_norm / (torch.linalg.vector_norm(flat, p) + 1e-6)).clamp(max=1.0)
        return loss({name: grad * scale for name, grad in grads.items()}, sum(range(1, world_size + 1)))

    def sharded(grads):
        return fs.objective(loss(fs.gather(clip(grads, max_norm, p)), 1 + my_rank()), grads, reduce="sum")

    expected = torch.func.grad(dense)(full)
    _, expected_tangent = torch.func.jvp(dense, (full,), (direction,))
    # Both sum over the elements and the ranks.
    near = partial(within, terms=ELEMENTS + world_size)
    for make in LAYOUTS.values():
        grads, directions = (fs.shard(tree, make(meshes())) for tree in (full, direction))
        assert_trees_close(fs.unshard(torch.func.grad(sharded)(grads)), expected, **near(expected))
        _, tangent = torch.func.jvp(sharded, (grads,), (directions,))
        assert_trees_close(tangent, expected_tangent, **near(expected_tangent))


@pytest.mark.rows(1)
@pytest.mark.parametrize("p", ORDERS)
@on_ranks(2)
def test_derivative_at_zero_is_finite(p):
    zeros = {name: torch.zeros_like(grad) for name, grad in gradients().items() if grad is not None}

    def total(grads):
        return fs.objective(sum(leaf.sum() for leaf in fs.gather(clip(grads, 1.0, p)).values()), grads)

    derivative = torch.func.grad(total)(fs.shard(zeros, fs.zero2(one_axis(), min_shard_elements=0)))
    assert_same_bits(fs.unshard(derivative), fs.tree_map(torch.ones_like, zeros))


@on_ranks(2)
def test_ranks_with_norms_of_other_orders_are_refused():
    """Their powers would be added up, and each would take a root of its own."""
    grads = fs.shard({"a": torch.ones(4)}, fs.zero2(one_axis(), min_shard_elements=0))
    for norm in (fs.global_norm, fs.leaf_norms):
        with pytest.raises(RuntimeError, match=r"ranks differ in a collective\n.*of norm p=1.0(.|\n)*of norm p=2.0"):
            norm(grads, 1.0 + my_rank())
