"""Pipelines hold to a dense computation: loss and gradients, live microbatches, and what they refuse."""

from functools import cache, partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard.ext.parallel.pipeline import Op, make_ticks
from fshard.testing import assert_trees_close
from tests.ranks import BrokenError, my_rank, on_ranks
from tests.tolerance import within
from tests.trees import normal, one_axis

WIDTH, WORDS, ROWS, TIME, LAYERS = 4, 7, 8, 3, 4
SCHEDULES = ("gpipe", "1f1b")
# Sums over all tokens, in microbatches of ranks, forward and backward.
near = partial(within, terms=ROWS * TIME, steps=2)


def assert_near(actual, expected):
    assert_trees_close(actual, expected, **near(expected))


@cache
def full_params():
    drawn = normal(0)

    def draw(*shape):
        return 0.3 * drawn(*shape)

    layers = {"up": draw(LAYERS, 2 * WIDTH, WIDTH), "down": draw(LAYERS, WIDTH, 2 * WIDTH), "bias": draw(LAYERS, WIDTH)}
    return {"embed": draw(WORDS, WIDTH), "layers": layers, "head": draw(WORDS, WIDTH)}


@cache
def batch():
    tokens = torch.randint(WORDS, (ROWS, TIME + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def first(p, x):
    return p["embed"][x]


def stage(p, h):
    for up, down, bias in zip(*(p["layers"][name] for name in ("up", "down", "bias")), strict=True):
        h = h + F.linear(torch.tanh(F.linear(h, up)), down) + bias
    return h


def last(p, h, y):
    return F.cross_entropy(F.linear(h, p["head"]).flatten(0, 1), y.flatten())


def dense_loss(p, x, y, last=last):
    return last(p, stage(p, first(p, x)), y)


@cache
def dense():
    return torch.func.grad_and_value(dense_loss)(full_params(), *batch())


def sharded(full, sizes, frozen=None):
    """Parameters on a mesh, and its axes."""
    mesh = fs.init_mesh(dict(zip(("shard", "pipe"), sizes, strict=True)), device="cpu")
    shard, pipe = (fs.axis_of(mesh, name) for name in ("shard", "pipe"))
    owned = fs.compose(fs.fully_shard(shard, dim=-1), fs.split_dim(pipe, dim=0))
    layout = fs.masked(owned, "layers.*", otherwise=fs.fully_shard(shard))
    return fs.shard(full, fs.zero3(mesh, layout=layout, bucket_bytes=0), frozen=frozen), shard, pipe


def setting(sizes, schedule="1f1b", frozen=None, stage=stage, **given):
    """Sharded parameters, this rank's batch and the loss function."""
    params, shard, pipe = sharded(full_params(), sizes, frozen)
    data = tuple(t.chunk(shard.size)[fs.axis_index(shard)] for t in batch())
    return (
        params,
        data,
        fs.pipeline(stage, pipe, **dict(microbatches=4, first=first, last=last, schedule=schedule) | given),
    )


def sent_by_label(sizes, schedule):
    """Bytes that this rank sends over the axis of stages in a step."""
    shard_size, n = sizes
    stage, count = my_rank() % n, 4
    h = ROWS // shard_size // count * TIME * WIDTH * 8
    shared = sum(full_params()[name].nbytes for name in ("embed", "head"))
    # Every tick of "gpipe" but the last ends with a message, whose transpose goes back.
    moves = (count + n - 2) * (n > 1) if schedule == "gpipe" else count * (2 - (stage == n - 1) - (stage == 0))
    label = {"gpipe": "ppermute", "1f1b": "pipeline"}[schedule]
    return {label: moves * h, "pcast": 2 * shared * (n - 1) / n}


@pytest.mark.rows(2)
@pytest.mark.parametrize("world_size, sizes", [(1, (1, 1)), (4, (1, 4)), (8, (2, 4))], ids=str)
@on_ranks()
def test_equals_dense(sizes):
    """Without a gradient a schedule runs its forwards alone."""
    for schedule in SCHEDULES:
        params, data, f = setting(sizes, schedule)
        with fs.comm.record() as record:
            loss, grads = fs.value_and_grad(f)(params, *data)
        assert_near((fs.unshard(grads), loss), dense())
        with torch.no_grad(), fs.comm.record() as forward:
            alone = f(params, *data)
        assert_near(fs.objective(alone, like=params), dense()[1])
        assert "pcast" not in {entry.label for entry in forward}
        assert len(forward) <= len(record) / 2


@on_ranks(4)
def test_weighted_losses_and_tied_leaves():
    """Microbatches count by their tokens; the head is the embedding; a frozen leaf has no gradient, nor has None."""

    def tied_last(p, h, y):
        """Without the tokens 0, of which microbatches have different numbers."""
        counted = (y != 0).double()
        return (F.cross_entropy(F.linear(h, p["embed"]).mT, y, reduction="none") * counted).sum(), counted.sum()

    def mean(p):
        value, count = dense_loss(p, *batch(), last=tied_last)
        return value / count

    expected = torch.func.grad_and_value(mean)(full_params())
    for schedule in SCHEDULES:
        params, data, f = setting((2, 2), schedule, last=tied_last, reduce="weighted")
        loss, grads = fs.value_and_grad(f, reduce="weighted")(params, *data)
        assert_near((fs.unshard(grads), loss), expected)
        params, data, f = setting((2, 2), schedule, frozen=("*up", "embed"))
        _, grads = fs.value_and_grad(f)(params | {"absent": None}, *data)
        assert grads["absent"] is grads["embed"] is grads["layers"]["up"] is None
        assert_near(fs.unshard(grads["layers"]["down"]), dense()[0]["layers"]["down"])


@on_ranks(2)
def test_gradients_that_share_memory():
    """Autograd gives both terms of a sum one gradient, and the elements of a sum one number; the loss is scaled."""

    def sharing_last(p, h, y):
        pair = (p["one"] + p["other"]).square().sum() if y[0].equal(batch()[1][0]) else 0.0
        return last(p, h, y) + p["shift"].sum() + pair

    def mean(p, count):
        batches = zip(*(t.chunk(count) for t in batch()), strict=True)
        return 3 * sum(dense_loss(p, x, y, last=sharing_last) for x, y in batches) / count

    full = full_params() | {name: torch.ones(3, dtype=torch.float64) for name in ("one", "other", "shift")}
    params, _, pipe = sharded(full, (1, 2))
    for schedule, count in (("gpipe", 2), ("1f1b", 1), ("1f1b", 2)):
        f = fs.pipeline(stage, pipe, microbatches=count, schedule=schedule, first=first, last=sharing_last)
        loss, grads = fs.value_and_grad(lambda p, *data: 3 * f(p, *data))(params, *batch())  # noqa: B023
        assert_near((fs.unshard(grads), loss), torch.func.grad_and_value(mean)(full, count))


@on_ranks(2)
def test_gpipe_is_differentiable_to_any_order():
    """A product with the Hessian, and a tangent of the loss."""
    tangent = fs.tree_map(torch.ones_like, full_params())
    value, slope = torch.func.jvp(lambda p: dense_loss(p, *batch()), (full_params(),), (tangent,))
    _, product = torch.func.jvp(torch.func.grad(lambda p: dense_loss(p, *batch())), (full_params(),), (tangent,))
    params, data, f = setting((1, 2), "gpipe")
    ones = fs.tree_map(torch.ones_like, params)
    assert_near(torch.func.jvp(lambda p: f(p, *data), (params,), (ones,)), (value, slope))
    _, of_shards = torch.func.jvp(torch.func.grad(lambda p: f(p, *data)), (params,), (ones,))
    assert_near(fs.unshard(of_shards), product)


@on_ranks(2)
def test_other_derivatives_are_refused_by_name():
    params, data, f = setting((1, 2))
    with pytest.raises(
        ValueError, match=r"supports first derivatives by .* only, and was used under torch\.func.*; use schedule="
    ):
        torch.func.grad(lambda p: f(p, *data))(params)
    leaves = fs.tree_map(lambda t: t.clone().requires_grad_(), params)
    with pytest.raises(ValueError, match="supports first derivatives by value_and_grad or backward"):
        torch.autograd.grad(f(leaves, *data), [leaves["embed"].local], create_graph=True)
    with pytest.raises(ValueError, match="expected a batch that requires no gradient"):
        fs.value_and_grad(lambda p, x: f(p, x, x))(params, torch.zeros(ROWS, TIME, requires_grad=True))
    kept = torch.zeros(WIDTH, dtype=torch.float64, requires_grad=True)
    params, data, f = setting((1, 2), stage=lambda p, h: stage(p, h) + kept)
    text = outcome(fs.value_and_grad(f), params, *data)
    assert "expected stages that only compute with params and h, got a closure's tensor" in text
    params, data, f = setting((1, 2), stage=lambda p, h: torch.exp(stage(p, h)).add_(1))
    assert "has been modified by an inplace operation" in outcome(fs.value_and_grad(f), params, *data)


def outcome(f, *args):
    """What a rank hears: the class and the text of its error."""
    try:
        f(*args)
    except (ValueError, RuntimeError, BrokenError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@on_ranks(2)
def test_ranks_that_differ_hear_of_it_before_they_send():
    x, y = batch()
    params, _, f = setting((1, 2))
    _, _, other = setting((1, 2), schedule=SCHEDULES[1 - my_rank()])
    fewer_rows = (f, 8 - 4 * my_rank(), ("(2, 3, 4)", "(1, 3, 4)"))
    for call, rows, words in (fewer_rows, (other, 8, ("rank 0", "1f1b"))):
        text = outcome(call, params, x[:rows], y[:rows])
        assert text.startswith("CollectiveError: ranks differ in a collective\n  rank 0: all_to_all number")
        assert all(word in text for word in words), text
        one_axis()


@on_ranks(2)
def test_wrong_arguments_are_refused():
    params, data, f = setting((1, 2))
    made = partial(setting, (1, 2))
    everywhere = fs.shard(full_params(), fs.zero3(fs.init_mesh({"pipe": 2}, device="cpu"), axis="pipe"))
    with pytest.raises(ValueError, match="expected schedule to be one of"):
        made(schedule="interleaved")
    for call, given, text in (
        (f, fs.gather(params), "['embed']: expected a Sharded leaf, which pipeline gathers by itself, got a plain"),
        (made(last=lambda p, h, y: h)[2], params, "last to return a scalar tensor"),
        (made(stage=lambda p, h: h[:1])[2], params, "stage_fn to return a tensor of shape (2, 3, 4)"),
        (made(first=lambda p, x: x)[2], params, "first to return a floating tensor"),
        (made(microbatches=3)[2], params, "the batch cannot be cut in 3 microbatches"),
        (f, everywhere, "has a transform that reduces its gradients over 'pipe'"),
    ):
        assert text in outcome(call, given, *data)
        one_axis()


def test_tables_of_ticks():
    """Every rank does all, takes what was computed before, and holds as many microbatches as the table promises."""
    for n, m in product((1, 2, 3, 8), (1, 2, 3, 16)):
        table = make_ticks(n, m)
        assert len(table) == 2 * (m + n - 1)
        assert len(make_ticks(n, m, with_backward=False)) == m + n - 1
        when = {op: t for t, row in enumerate(table) for op in row if op is not None}
        assert set(when) == {Op(back, i, stage) for back in (False, True) for i in range(m) for stage in range(n)}
        for rank, column in enumerate(zip(*table, strict=True)):
            ops = [op for op in column if op is not None]
            assert {op.stage for op in ops} == {rank}
            held = [sum(-1 if op.is_backward else 1 for op in ops[: i + 1]) for i in range(len(ops))]
            assert max(held) == min(m, n - rank)
        for op, t in when.items():
            following = op.advance(n)
            assert following is None or when[following] > t
            assert not op.is_backward or when[op._replace(is_backward=False)] < t
