"""clip_by_global_norm: torch's clipping, on shards."""

import math

import pytest
import torch

import fshard as fs
from fshard.optim.norms import global_norm
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import ONE_AXIS, STRATEGIES, assert_same_bits, every_bit, meshes, normal, one_axis, padded_with

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
    clipped, state = fs.clip_by_global_norm(max_norm, p).update(grads, (), None)
    assert state == ()
    return clipped


def torch_clip(full, max_norm, p=2.0):
    """torch's own clipping of full gradients, and the norm it found."""
    params = {name: torch.nn.Parameter(torch.zeros_like(grad)) for name, grad in full.items() if grad is not None}
    for name, param in params.items():
        param.grad = full[name].clone()
    # torch has no largest magnitude of no elements.
    norm = torch.nn.utils.clip_grad_norm_([param for param in params.values() if param.numel()], max_norm, p)
    return {name: param.grad for name, param in params.items()} | {"frozen": None}, norm


def rounding(dtype, p):
    """How far two norms may be apart, relatively: powers and sums of ELEMENTS terms, then a root, on either side."""
    return 0.0 if math.isinf(p) else 2 * (ELEMENTS + 4) * torch.finfo(dtype).eps


def assert_clipped_as_by_torch(clipped, full, max_norm, p):
    expected, norm = torch_clip(full, max_norm, p)
    # The norm's rounding, and those of the quotient and the product.
    rtol = rounding(norm.dtype, p) + 4 * torch.finfo(norm.dtype).eps
    assert_trees_close(clipped, expected, rtol=rtol, atol=0.0)


@pytest.mark.rows(2)
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@on_ranks(1, 2, 3, 4)
def test_every_strategy_clips_as_torch_does(dtype, p):
    full, on, results = gradients(dtype), meshes(), {}
    norm = torch_clip(full, 1.0, p)[1]
    for name, make in LAYOUTS.items():
        grads = fs.shard(full, make(on))
        torch.testing.assert_close(global_norm(grads, p), norm, rtol=rounding(dtype, p), atol=0.0)
        for max_norm in (0.0, 0.5, 1e6):
            clipped = clip(grads, max_norm, p)
            assert [leaf.spec for leaf in specs(clipped)] == [leaf.spec for leaf in specs(grads)]
            found = results[name, max_norm] = fs.unshard(clipped)
            assert_clipped_as_by_torch(found, full, max_norm, p)
            if max_norm == 0.0:
                assert all(not leaf.any() for leaf in fs.tree_leaves(found))
            if max_norm == 1e6:
                assert_same_bits(found, full)
            # The norm is taken in float64 and agrees in float32 however leaves are split.
            if dtype == torch.float32 or math.isinf(p):
                assert_same_bits(found, results["ddp", max_norm])
    return every_bit(list(results.values()))


def specs(tree):
    return [leaf for leaf in tree.values() if leaf is not None]


@on_ranks(1, 2)
def test_each_leaf_is_clipped_by_a_norm_of_its_own():
    full = gradients()
    for p in ORDERS:
        expected = dict(full)
        for name in SHAPES:
            expected[name] = torch_clip({name: full[name]}, 0.5, p)[0][name]
        for make in LAYOUTS.values():
            clipped, _ = fs.clip_by_norm(0.5, p).update(fs.shard(full, make(meshes())), (), None)
            assert_trees_close(fs.unshard(clipped), expected, rtol=rounding(torch.float64, p) + 1e-15, atol=0.0)


@pytest.mark.parametrize("p", ORDERS)
@on_ranks(4)
def test_odd_elements_count_as_with_torch(p):
    """Complex ones by their magnitudes, and those that are not finite, zeros, and none at all."""
    full, on = gradients(), meshes()
    trees = [fs.tree_map(lambda grad: torch.complex(grad, 2 * grad), full), fs.tree_map(torch.zeros_like, full)]
    for bad in (math.nan, math.inf):
        trees.append(fs.tree_map(torch.clone, full))
        trees[-1]["wide"][2, 5] = bad
    for tree in trees:
        for name in ("ddp", *ALL_SPLIT):
            assert_clipped_as_by_torch(fs.unshard(clip(fs.shard(tree, STRATEGIES[name](on)), 0.5, p)), tree, 0.5, p)
    for tree in ({}, {"frozen": None}):
        assert clip(tree, 1.0, p) == tree
        assert global_norm(tree, p).item() == 0.0


@pytest.mark.parametrize("p", ORDERS)
@on_ranks(4)
def test_padding_does_not_count(p):
    full, on = gradients(), meshes()
    for name in ALL_SPLIT:
        clean = fs.shard(full, STRATEGIES[name](on))
        for poison in (math.nan, 1e30):
            grads = {path: leaf if leaf is None else padded_with(leaf, poison) for path, leaf in clean.items()}
            assert_same_bits(fs.unshard(clip(grads, 0.5, p)), fs.unshard(clip(clean, 0.5, p)))


@on_ranks(2)
def test_half_precision_is_summed_in_more():
    """In bfloat16 itself the sum would stand still at 256."""
    ones = {"w": torch.ones(4096, dtype=torch.bfloat16)}
    for name, make in ONE_AXIS.items():
        grads = fs.shard(ones, make(meshes()))
        norm = global_norm(grads)
        assert (norm.dtype, norm.item()) == (torch.float32, 64.0), name
        clipped = fs.unshard(clip(grads, 32.0))["w"]
        assert_same_bits(clipped, torch.full((4096,), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("p", ORDERS)
@on_ranks(1, 2, 4)
def test_collectives(world_size, p):
    """One number over each axis that gradients are split over, and nothing else."""

    def one_number(axis, ranks):
        largest = ("all_gather", axis, 8 * ranks, True)
        return [] if ranks == 1 else [largest if math.isinf(p) else ("all_reduce", axis, 8, True)]

    outer, inner = (2, world_size // 2) if world_size > 1 else (1, 1)
    # All leaves are small for zero1 and zero2.
    expected = {"ddp": [], "zero1": [], "zero2": []} | {
        "zero2 of every leaf": one_number("shard", world_size),
        "last dim": one_number("shard", world_size),
        "hsdp": one_number("shard", inner),
        "one dim over two axes": one_number("shard", inner) + one_number("replicate", outer),
    }
    full, on = gradients(), meshes()
    for name in expected:
        grads = fs.shard(full, STRATEGIES[name](on))
        with fs.comm.record() as record:
            clip(grads, 0.5, p)
        sent = [(e.op, e.axis, e.bytes, e.scalar) for e in record if not e.about.is_comparison]
        assert sent == expected[name], name


@pytest.mark.rows(1)
@pytest.mark.parametrize("p, max_norm", [*((p, 0.5) for p in ORDERS), (2.0, 1e6)])
@on_ranks(1, 2, 4)
def test_derivative_is_that_of_full_gradients(world_size, p, max_norm):
    """Through gather and a loss that differs between ranks, as when a learning rate or a loss is learned."""
    full = {name: grad for name, grad in gradients().items() if grad is not None and grad.numel()}
    direction = {name: grad for name, grad in gradients(seed=1).items() if name in full}

    def local_loss(grads, share):
        return share * sum((clip_leaf * direction[name]).sin().sum() for name, clip_leaf in grads.items())

    shares = sum(range(1, world_size + 1))
    largest = max(leaf.abs().max().item() for leaf in direction.values())

    def dense(grads):
        # torch's clip, written out to be differentiable.
        flat = torch.cat([grad.reshape(-1) for grad in grads.values()])
        scale = (max_norm / (torch.linalg.vector_norm(flat, p) + 1e-6)).clamp(max=1.0)
        return local_loss({name: grad * scale for name, grad in grads.items()}, shares)

    expected = torch.func.grad(dense)(full)
    tangent = torch.func.jvp(dense, (full,), (direction,))[1]
    on = meshes()
    share = 1 + torch.distributed.get_rank()
    for make in LAYOUTS.values():
        params = fs.shard(full, make(on))

        def sharded(grads):
            return fs.objective(local_loss(fs.gather(clip(grads, max_norm, p)), share), grads, reduce="sum")

        # Both sum over the elements and the ranks, terms no larger than the shares times the largest direction.
        atol = 2 * (ELEMENTS + world_size) * torch.finfo(torch.float64).eps * shares * largest
        found = fs.unshard(torch.func.grad(sharded)(params))
        assert_trees_close(found, expected, rtol=0.0, atol=atol)
        directions = fs.shard(direction, make(on))
        found = torch.func.jvp(sharded, (params,), (directions,))[1]
        torch.testing.assert_close(found, tangent, rtol=0.0, atol=ELEMENTS * atol)


@on_ranks(1, 3)
def test_norms_of_whole_leaves_beside_their_parts(world_size):
    """Of a user's own transformation: equal to the dense one, as are derivatives through it."""
    full = {"none": None, "half": normal(3)(5, 3, dtype=torch.bfloat16), "w": normal(1)(5, 3), "v": normal(2)(7)}
    direction, share = normal(4)(5, 3), 1 + torch.distributed.get_rank()
    dense = {name: full[name] / torch.linalg.vector_norm(full[name].double()) for name in ("w", "v")}
    expected = torch.func.grad(lambda w: (w / w.norm() * direction).sin().sum())(full["w"])
    for make in LAYOUTS.values():
        grads = fs.shard(full, make(meshes()))
        norms = fs.leaf_norms(grads)
        assert norms["none"] is None
        assert [norms[name].dtype for name in ("half", "w")] == [torch.float32, torch.float64]
        found = fs.unshard(fs.tree_map(torch.div, grads, norms))
        assert found["half"].dtype == torch.bfloat16
        assert_trees_close({"w": found["w"], "v": found["v"]}, dense, rtol=1e-14, atol=0)

        def loss(grads):
            full = fs.gather(fs.tree_map(torch.div, grads, fs.leaf_norms(grads)))
            return fs.objective(share * (full["w"] * direction).sin().sum(), grads, reduce="sum")

        found = fs.unshard(torch.func.grad(loss)({"w": grads["w"]}))["w"]
        assert_trees_close(found, expected * sum(range(1, world_size + 1)), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("p", ORDERS)
@on_ranks(2)
def test_derivative_at_zero_is_finite(p):
    zeros = {name: torch.zeros_like(grad) for name, grad in gradients().items() if grad is not None}
    params = fs.shard(zeros, fs.zero2(one_axis(), min_shard_elements=0))

    def total(grads):
        return fs.objective(sum(leaf.sum() for leaf in fs.gather(clip(grads, 1.0, p)).values()), grads)

    derivative = fs.unshard(torch.func.grad(total)(params))
    assert_same_bits(derivative, fs.tree_map(torch.ones_like, zeros))


@on_ranks(1, 2, "2 processes")
def test_the_norm_may_be_kept():
    grads = fs.shard(gradients(), fs.zero2(one_axis(), min_shard_elements=0))
    norm = fs.global_norm(grads)
    torch.testing.assert_close(norm, torch_clip(gradients(), 1.0)[1], rtol=rounding(torch.float64, 2.0), atol=0.0)
    kept, plain = fs.clip_by_global_norm(1.0, keep_norm=True), fs.clip_by_global_norm(1.0)
    before = kept.init(grads)
    assert (before.norm.item(), before.norm.dtype) == (0.0, torch.float64)
    for update in (kept.update, fs.jit(kept.update)):
        clipped, after = update(grads, before, grads)
        assert_same_bits(after.norm, norm)
        assert_same_bits(fs.unshard(clipped), fs.unshard(plain.update(grads, (), grads)[0]))
    assert fs.chain(kept, fs.sgd(0.1)).init(grads)[0] == before
    # A norm is differentiable.
    assert_same_bits(
        fs.unshard(torch.func.grad(fs.global_norm)({"w": torch.tensor([3.0, 4.0])})), {"w": torch.tensor([0.6, 0.8])}
    )
