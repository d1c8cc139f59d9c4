"""Ring attention against dense attention in one process: values, derivatives, bytes and blocks."""

import math
import re
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

import fshard as fs
from fshard.ext.parallel.attention import ROWS, attend, attend_backward
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import normal

BATCH, HEADS, HEAD = 2, 8, 4
ORDERS = ("contiguous", "zigzag")


def cp_mesh():
    return fs.init_mesh({"cp": -1}, device="cpu")


def whole(time, seed=0, v_dim=HEAD, dtype=torch.float64):
    """q, k, v and a cotangent of the result, for the whole sequence."""
    draw = normal(seed)
    return [draw(BATCH, HEADS, time, dim, dtype=dtype) for dim in (HEAD, HEAD, v_dim, v_dim)]


def dense(q, k, v, causal=True, scale=None):
    """Attention written out."""
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    future = torch.ones(scores.shape[-2:]).triu(1).bool()
    return (scores.masked_fill(future, -math.inf) if causal else scores).softmax(-1) @ v


def differentiated(f, tensors, cotangent):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = f(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def assert_near(actual, expected, time, steps=2):
    """Scores are sums over a head, and what they weigh is one over time; a derivative has as many sums again."""
    assert_trees_close(list(actual), list(expected), **within(list(expected), time + HEAD, steps))


def at_places(tensors, places):
    """The places in time that a rank holds."""
    return [tensor[:, :, places] for tensor in tensors]


# The time, whether attention is causal, the scale and the head dim of v.
CASES = ((48, True, None, HEAD), (48, False, 0.7, HEAD), (48, True, 0.7, 3))


@on_ranks(1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (8, "2 processes")))
def test_ring_is_dense_attention(world_size):
    """Where the head dim of v is another there is no fused kernel; a rank may hold a single place in time."""
    axis = fs.axis_of(cp_mesh())
    one_place = ((world_size, True, None, HEAD), "contiguous")
    for case, order in (*product(CASES, ORDERS), one_place):
        time, causal, scale, v_dim = case
        places = fs.ring_positions(axis, time, order)
        *tensors, cotangent = whole(time, v_dim=v_dim)
        expected = differentiated(partial(dense, causal=causal, scale=scale), tensors, cotangent)
        ring = partial(fs.ring_attention, axis=axis, is_causal=causal, order=order, scale=scale)
        results = differentiated(ring, at_places(tensors, places), cotangent[:, :, places])
        assert_near(results, at_places(expected, places), time)


@on_ranks(2)
def test_other_derivatives():
    """By torch.func, to the second order."""
    axis, time = fs.axis_of(cp_mesh()), 12
    *tensors, tangent = whole(time)
    tensors = [x[:1, :2] for x in tensors]
    tangents = [tangent[:1, :2] + i for i in range(3)]
    gradients = grad(lambda *qkv: dense(*qkv).sin().sum(), (0, 1, 2))
    first, second = jvp(gradients, tuple(tensors), tuple(tangents))
    for order in ORDERS:
        places = fs.ring_positions(axis, time, order)
        local = at_places(tensors, places)
        ring = partial(fs.ring_attention, axis=axis, is_causal=True, order=order)
        ring_gradients = grad(lambda *qkv: ring(*qkv).sin().sum(), (0, 1, 2))  # noqa: B023
        results = jvp(ring_gradients, tuple(local), tuple(at_places(tangents, places)))
        assert_near(results[0], at_places(first, places), time)
        assert_near(results[1], at_places(second, places), time, steps=4)
        rows, *_ = vmap(ring_gradients)(*(torch.stack([x, x]) for x in local))
        assert_near(rows, at_places(first[:1], places) * 2, time)


def test_tiles_are_the_fused_kernel():
    """More queries than one tile has; a head dim of v of its own has no fused kernel."""
    draw = normal()
    q, k, v, cotangent = (draw(1, 2, ROWS + 9, 4) for _ in range(4))
    for causal in (True, False):
        fused, (out, logs) = (attend(q, k, x, causal, 0.3) for x in (v, torch.cat([v, v], -1)))
        assert_near((out[..., :4], logs), fused, len(k[0, 0]))
        doubled = torch.cat([cotangent, 0 * cotangent], -1)
        tiled = attend_backward(doubled, q, k, torch.cat([v, v], -1), out, logs, causal, 0.3)
        expected = attend_backward(cotangent, q, k, v, *fused, causal, 0.3)
        assert_near((*tiled[:2], tiled[2][..., :4]), expected, len(k[0, 0]))


@on_ranks(2)
def test_positions():
    expected = {"contiguous": ([0, 1, 2, 3], [4, 5, 6, 7]), "zigzag": ([0, 1, 6, 7], [2, 3, 4, 5])}
    for order, places in expected.items():
        assert fs.ring_positions(fs.axis_of(cp_mesh()), 8, order).tolist() == places[my_rank()]


TIME, WIDTH, WORDS, LAYERS = 16, 8, 11, 2


def gpt():
    draw = normal(3)
    shapes = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (2 * WIDTH, WIDTH), "down": (WIDTH, 2 * WIDTH)}
    blocks = [{name: draw(*shape) / 3 for name, shape in shapes.items()} for _ in range(LAYERS)]
    return {"tokens": draw(WORDS, WIDTH), "positions": draw(TIME, WIDTH), "blocks": blocks}


def tokens():
    drawn = torch.randint(WORDS, (4, TIME + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


def loss_fn(params, x, y, at, attention):
    ends = fs.gather({name: params[name] for name in ("tokens", "positions")})
    h = ends["tokens"][x] + ends["positions"][at]
    for block in params["blocks"]:
        p = fs.gather(block)
        q, k, v = F.linear(h, p["qkv"]).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        h = h + F.linear(attention(q, k, v).transpose(1, 2).flatten(2), p["out"])
        h = h + F.linear(F.gelu(F.linear(h, p["up"])), p["down"])
    return F.cross_entropy(F.linear(h, ends["tokens"]).flatten(0, 1), y.flatten())


@on_ranks(2)
def test_sums_of_narrow_gradients_travel_wide():
    """Keys and values in bfloat16, the sums of their gradients in float32, as one rank would add them up."""
    axis = fs.axis_of(cp_mesh())
    leaves = [x[:, :, :4].requires_grad_() for x in whole(8, dtype=torch.bfloat16)[:3]]
    out = fs.ring_attention(*leaves, axis, is_causal=True)
    with fs.comm.record() as record:
        torch.autograd.grad(out.sum(), leaves)
    elements = leaves[1].numel()
    assert [entry.bytes for entry in record] == [2 * 2 * elements, 4 * elements, 4 * elements]


@on_ranks(2)
def test_autocast_narrows_no_scores():
    """Where the kernel is fused, and where it is not."""
    ring = partial(fs.ring_attention, axis=fs.axis_of(cp_mesh()), is_causal=True)

    def ring_in_autocast(*qkv):
        with torch.autocast("cpu", torch.bfloat16):
            return ring(*qkv)

    for v_dim in (HEAD, 3):
        *qkv, cotangent = at_places(whole(8, v_dim=v_dim, dtype=torch.float32), slice(4))
        expected = differentiated(ring, qkv, cotangent)
        assert_trees_close(differentiated(ring_in_autocast, qkv, cotangent), expected, exact=True)


@on_ranks(2)
def test_ranks_are_told_the_same():
    """Another order on another rank would go unnoticed: the same is sent."""
    axis, q = fs.axis_of(cp_mesh()), whole(4)[0]
    order = ORDERS[fs.axis_index(axis)]
    text = (
        rf"rank {my_rank()}: .*ring_attention\(is_causal=True, order='{order}', scale=0\.5\) of torch\.float64 \(2, 8,"
    )
    with pytest.raises(fs.comm.CollectiveError, match=text):
        fs.ring_attention(q, q, q, axis, is_causal=True, order=order)


@on_ranks(2)
def test_ranks_with_other_shapes_are_told():
    """Of as many elements: messages have the same size."""
    axis, q = fs.axis_of(cp_mesh()), whole(4)[0]
    shape = (HEADS, BATCH, 4, HEAD) if my_rank() else (BATCH, HEADS, 4, HEAD)
    with pytest.raises(
        fs.comm.CollectiveError, match=rf"rank {my_rank()}: .* of {re.escape(f'torch.float64 {shape}')}"
    ):
        fs.ring_attention(*[q.reshape(shape)] * 3, axis)


@on_ranks(2)
def test_bad_arguments():
    axis = fs.axis_of(cp_mesh())
    q, k, v, _ = whole(3)
    ring = partial(fs.ring_attention, q, k, v, axis)
    fits = "k to be of shape (2, 8, 3, 4) and dtype torch.float64, as q is, got a float64 Tensor of shape (2, 4, 3, 4)"
    for call, text in (
        (partial(fs.ring_attention, q[0], k, v, axis), "q to be a floating tensor (batch, heads, time, head dim), got"),
        (partial(fs.ring_attention, q, k[:, :4], v, axis), f"ring_attention: expected {fits}; repeat heads that"),
        # A kernel would divide by the number of heads, and end the process.
        (
            partial(fs.ring_attention, *[q[:, :0]] * 3, axis),
            "sizes of heads, time and head dim of 1 or more on every rank, got (2, 0, 3, 4)",
        ),
        (partial(fs.ring_attention, *[q[..., :0]] * 3, axis), "of 1 or more on every rank, got (2, 8, 3, 0)"),
        (
            partial(ring, order="zigzag"),
            "an even size of dim 2, the time, whose halves are the chunks in 'zigzag' order",
        ),
        # Torch's fused kernels return NaN for them where they mask.
        (partial(ring, scale=0.0), "ring_attention: expected scale to be a finite number above 0, got 0.0"),
        (partial(fs.ring_positions, axis, 6, "zigzag"), "the chunks in 'zigzag' order of 2 ranks, got 6"),
        (
            partial(fs.ulysses(dense, axis), q, k[:, :3], v),
            "ulysses: expected heads, dim 1 of q, k and v, to be multiples of 2, the ranks of 'cp', got [8, 3, 8]",
        ),
        # Its other dims would be split between the ranks.
        (
            partial(fs.ulysses(lambda *qkv: dense(*qkv).flatten(0, 1), axis), q, k, v),
            "ulysses: expected the result of attention to be a floating tensor (batch, heads, time, head dim), got",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            call()
