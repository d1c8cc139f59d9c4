"""moe: experts over an axis against a dense mixture in one process, ragged and by capacity, and the bytes they send."""

import itertools
import math
import re
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import fshard as fs
from fshard.extend import fake_axes
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.tolerance import within
from tests.trees import normal, one_axis

WIDTH, HIDDEN, EXPERTS, TOKENS, CHOICES, LAYERS = 6, 5, 8, 48, 2, 2
# All choose the first expert, and nobody the last.
OPTIONS = ({}, {"bias": (0, 40.0)}, {"bias": (EXPERTS - 1, -40.0)})


def initial():
    draw = normal(7)

    def layer():
        experts = {"up": draw(EXPERTS, WIDTH, HIDDEN) / 2, "down": draw(EXPERTS, HIDDEN, WIDTH) / 2}
        return {"router": draw(EXPERTS, WIDTH) / 2, "experts": experts, "shared": draw(WIDTH, WIDTH) / 2}

    return {"layers": [layer() for _ in range(LAYERS)], "head": draw(WIDTH, WIDTH)}


def data():
    draw = normal(8)
    return draw(TOKENS, WIDTH), draw(TOKENS, WIDTH)


def expert(up, down, rows):
    return torch.tanh(rows @ up) @ down


def logits_of(p, x, bias):
    logits = x @ p["router"].T
    if bias:
        number, size = bias
        logits = logits + size * F.one_hot(torch.tensor(number), EXPERTS).to(logits)
    return logits


def dense(p, x, bias=None, capacity=None, groups=1):
    """Every expert on every token; of each group a choice counts while its expert has room."""
    logits = logits_of(p, x, bias)
    probs = logits.softmax(-1)
    chosen = probs.topk(CHOICES).indices
    weights = probs.gather(1, chosen) / probs.gather(1, chosen).sum(1, keepdim=True)
    weights = weights * kept(chosen, capacity, groups)
    out = sum(
        (weights * (chosen == e)).sum(1, keepdim=True) * expert(p["experts"]["up"][e], p["experts"]["down"][e], x)
        for e in range(EXPERTS)
    )
    fractions = torch.stack([(chosen == e).double().mean() for e in range(EXPERTS)])
    aux = EXPERTS * (fractions * probs.mean(0)).sum() + 0.1 * torch.logsumexp(logits, 1).pow(2).mean()
    return torch.tanh(x @ p["shared"]) + out, aux


def kept(chosen, capacity, groups):
    """1 where a choice finds room: by choice, then by token, in its group."""
    mask = torch.ones(chosen.shape, dtype=torch.float64)
    for rows, marks in zip(chosen.chunk(groups), mask.chunk(groups), strict=True):
        taken = [0] * EXPERTS
        for choice in range(CHOICES):
            for token, e in enumerate(rows[:, choice].tolist()):
                marks[token, choice] = capacity is None or taken[e] < capacity
                taken[e] += 1
    return mask


def parallel(p, x, axis, axes, bias=None, capacity=None):
    logits = logits_of(p, x, bias)
    routing = fs.moe.route(logits, CHOICES)
    rows, sent = fs.moe.dispatch(x, routing, axis, capacity=capacity)
    if capacity is None:
        rows = [expert(*one) for one in zip(p["experts"]["up"], p["experts"]["down"], rows, strict=True)]
    else:
        rows = expert(p["experts"]["up"], p["experts"]["down"], rows)
    aux = fs.moe.load_balance(routing, axes) + 0.1 * fs.moe.z_loss(logits)
    return torch.tanh(x @ p["shared"]) + fs.moe.combine(rows, sent), aux


def loss_fn(params, x, y, mixture, **options):
    """The sum over tokens and their number."""
    auxes = 0.0
    for layer in params["layers"]:
        out, aux = mixture(fs.gather(layer), x, **options)
        x, auxes = x + out, auxes + aux
    return ((x @ fs.gather(params["head"]) - y) ** 2).sum() + 0.01 * len(x) * auxes, torch.tensor(len(x))


def one_process(**options):
    def mean(params):
        total, count = loss_fn(params, *data(), dense, **options)
        return total / count

    return torch.func.grad_and_value(mean)(initial())


def inside(mesh):
    """ZeRO-3 of all leaves; those of experts are split over "shard" within what a rank of "expert" owns."""
    experts = fs.compose(fs.fully_shard(mesh["shard"], dim=1), fs.own_dim(mesh["expert"]))
    rest = fs.hybrid_shard(mesh, axis="shard", replicate_axis="expert")
    return fs.zero3(mesh, layout=fs.masked(experts, "*experts*", rest), bucket_bytes=0)


def setting(sizes, tokens=None):
    """Parameters, this rank's tokens, and options of a mixture."""
    mesh = fs.init_mesh(dict(zip(("shard", "expert"), sizes, strict=True)), device="cpu")
    axes = [fs.axis_of(mesh, name) for name in ("shard", "expert")]
    place, ranks = fs.comm.rank(axes[0]) * sizes[1] + fs.comm.rank(axes[1]), sizes[0] * sizes[1]
    tokens = tokens or [TOKENS // ranks] * ranks
    batch = [tensor.split(tokens)[place] for tensor in data()]
    return fs.shard(initial(), inside(mesh)), batch, {"axis": axes[1], "axes": axes}


# Sums over all tokens, in parts of ranks and experts, forward and backward.
near = partial(within, terms=TOKENS, steps=2)


def assert_is_dense(sizes, expected, tokens=None, **options):
    params, batch, axes = setting(sizes, tokens)
    run = fs.value_and_grad(lambda p, x, y: loss_fn(p, x, y, parallel, **axes, **options), reduce="weighted")
    value, grads = run(params, *batch)
    assert_trees_close((fs.unshard(grads), value), expected, **near(expected))


@on_ranks(
    4,
    *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 8)),
    pytest.param("2 processes", marks=pytest.mark.slow),
)
def test_it_is_the_dense_mixture(world_size):
    """Also where all choose one expert, where a rank has no tokens, and by capacity."""
    sizes = {2: (1, 2), 4: (2, 2), 8: (2, 4)}[world_size]
    uneven = [20, 0, 27, 1] if world_size == 4 else [TOKENS, *[0] * (world_size - 1)]
    for case in OPTIONS:
        expected = one_process(**case)
        assert_is_dense(sizes, expected, **case)
    assert_is_dense(sizes, expected, uneven, **case)
    for capacity in (1, 5):
        assert_is_dense(sizes, one_process(capacity=capacity, groups=world_size), capacity=capacity)


def test_one_process_needs_no_axis():
    p, (x, _) = initial()["layers"][0], data()
    for capacity in (None, 3):
        expected = dense(p, x, capacity=capacity)
        assert_trees_close(parallel(p, x, None, (), capacity=capacity), expected, **near(expected))
    # As low as can be, where each expert is chosen as often as another.
    assert_trees_close(fs.moe.load_balance(fs.moe.route(torch.eye(4).double())), 1.0, **within(1.0, terms=4))
    one = fs.moe.route(torch.tensor([[1.0, 3.0, 2.0]]))
    assert one.experts.tolist() == [[1]]
    assert_trees_close(one.weights, one.probs[:, 1:2], exact=True)
    assert fs.moe.route(torch.randn(5, 3), 2, normalize=False).weights.sum(1).max() < 1


def test_bad_arguments_are_refused():
    logits, x = torch.randn(4, 6), torch.ones(4, 2)
    routing = fs.moe.route(logits)
    with fake_axes("test", {"expert": 4}, {"expert": 0}, "gloo") as axes:
        for call, text in (
            (lambda: fs.moe.route(logits, 7), "route: expected k to be from 1 to 6, got 7"),
            (lambda: fs.moe.dispatch(x[:3], routing), "dispatch: expected tokens of shape (4, width), as routed, got"),
            (lambda: fs.moe.dispatch(x, routing, capacity=0), "expected capacity to be a whole number from 1, got 0"),
            (lambda: fs.moe.dispatch(x, routing, axes["expert"]), "dispatch: expected a multiple of 4 experts, one"),
        ):
            with pytest.raises(ValueError, match=re.escape(text)):
                call()


@pytest.mark.parametrize("capacity", [None, 2])
def test_outputs_are_one_for_each_row(capacity):
    """In one tensor or several. Others would reach other tokens, or none."""
    rows, sent = fs.moe.dispatch(data()[0][:4], fs.moe.route(torch.eye(4).double()), capacity=capacity)
    join = torch.cat if capacity is None else torch.stack
    expected = fs.moe.combine(list(rows), sent)
    assert_trees_close(fs.moe.combine(join(list(rows)), sent), expected, exact=True)
    shape = (4,) if capacity is None else (4, 2)
    for wrong in ([*rows, rows[0]], [row[:1] for row in rows[:3]], [row.flatten() for row in rows]):
        with pytest.raises(ValueError, match=re.escape(f"moe.combine: expected outputs of shape {shape} and a width")):
            fs.moe.combine(wrong, sent)


def test_a_checkpoint_that_saves_topk_keeps_the_choice_of_experts():
    """Two experts are as good, but for a last bit that is another when the layer is computed again."""
    draw, times = normal(9), itertools.count()
    full = {"router": torch.zeros(2, WIDTH).double(), "up": draw(2, WIDTH, 3), "down": draw(2, 3, WIDTH)}

    def layer(p, x):
        last_bit = torch.tensor([0.0, math.ulp(1.0)], dtype=x.dtype) * (-1) ** next(times)
        rows, sent = fs.moe.dispatch(x, fs.moe.route(x @ p["router"].T + last_bit), capacity=len(x))
        return fs.moe.combine(expert(p["up"], p["down"], rows), sent)

    def grads(layer):
        run = fs.value_and_grad(lambda p: layer(fs.gather(p), data()[0]).square().sum())
        return fs.unshard(run(fs.shard(full, fs.zero3(one_axis())))[1])

    saved = grads(fs.remat(layer, save=("aten.topk",)))
    lost = grads(fs.remat(layer))
    expected = grads(layer)
    assert_trees_close(saved, expected, **near(expected))
    # The first expert has a gradient where its choice was computed again.
    assert (lost["up"][0] != 0).any()


def test_losses_of_no_tokens_are_0():
    logits = torch.zeros(0, 4)
    assert fs.moe.load_balance(fs.moe.route(logits)) == 0
    assert fs.moe.z_loss(logits) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_of_many_tokens_in_half_precision_are_those_in_float32(dtype):
    """The largest float16 is 65,504, fewer than these tokens."""
    logits = (torch.arange(2 * 70_000).sin().unflatten(0, (-1, 2)) * 4).to(dtype)
    routing, wide = fs.moe.route(logits), logits.float()
    expected = fs.moe.load_balance(routing._replace(probs=routing.probs.float())), fs.moe.z_loss(wide)
    assert_trees_close((fs.moe.load_balance(routing), fs.moe.z_loss(logits)), expected, exact=True)
    assert expected[0] >= 0.99
