"""Vocabulary-parallel embedding and cross entropy equal those of full rows, which no rank ever holds."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, grad_and_value, vmap

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.tolerance import within
from tests.trees import assert_same_bits, normal

VOCABULARY, WIDTH, ROWS, TIME = 24, 6, 8, 4
TARGETS = torch.randint(VOCABULARY, (ROWS, TIME), generator=torch.Generator().manual_seed(3))
IGNORED = TARGETS.masked_fill(TARGETS % 5 == 0, -100)
FULL = {"tokens": normal(1)(VOCABULARY, WIDTH), "head": 3 * normal(2)(VOCABULARY, WIDTH)}
OPTIONS = ({}, {"reduction": "sum"}, {"ignore_index": 7})
# Sums of VOCABULARY exponentials and of all tokens, one after the other and back.
near = partial(within, terms=ROWS * TIME + VOCABULARY, steps=2)


def dense_loss(params, x, y, options):
    h = torch.tanh(F.embedding(x, params["tokens"]))
    return F.cross_entropy(F.linear(h, params["head"]).flatten(0, 1), y.flatten(), **options)


def loss_fn(params, x, y, axis, options, scatter_dim=None):
    """Time may be in pieces between embedding and head, as sequence parallelism has it."""
    full = fs.gather(params)
    h = torch.tanh(fs.vocab_parallel_embedding(x, full["tokens"], axis, scatter_dim=scatter_dim))
    h = fs.pcast(h, axis, to="varying") if scatter_dim is None else fs.all_gather(h, axis, dim=scatter_dim)
    return fs.vocab_parallel_cross_entropy(h, full["head"], y, axis, **options)


def sharded(world_size, tp):
    mesh = fs.init_mesh({"shard": world_size // tp, "tp": tp}, device="cpu")
    axis = fs.axis_of(mesh, "tp")
    layout = fs.compose(fs.fully_shard(mesh["shard"], dim=-1, min_shard_elements=0), fs.split_dim(axis, dim=0))
    return fs.shard(FULL, fs.zero3(mesh, layout=layout)), axis, fs.axis_of(mesh, "shard")


@on_ranks(4)
def test_losses_and_gradients_are_those_of_full_rows():
    for tp in (2, 4, 1):
        params, axis, shard = sharded(4, tp)
        x, y = (ids.chunk(shard.size)[fs.axis_index(shard)] for ids in (TARGETS.flip(1), IGNORED))
        # The mean over ranks of means is that of all where each has as many targets that count.
        options = {"reduction": "sum"}
        expected, loss = grad_and_value(dense_loss)(FULL, TARGETS.flip(1), IGNORED, options)
        for scatter_dim in (None, 1):
            found = fs.value_and_grad(loss_fn, reduce="sum")(params, x, y, axis, options, scatter_dim)
            assert_trees_close((found[0], fs.unshard(found[1])), (loss, expected), **near((loss, expected)))


@on_ranks(2)
def test_options_are_those_of_torch():
    params, axis, _ = sharded(2, 2)
    x = TARGETS.flip(1)
    for options in OPTIONS:
        for targets in (TARGETS, IGNORED) if "ignore_index" not in options else (TARGETS,):
            expected, loss = grad_and_value(dense_loss)(FULL, x, targets, options)
            found = fs.value_and_grad(loss_fn)(params, x, targets, axis, options)
            assert_trees_close((found[0], fs.unshard(found[1])), (loss, expected), **near((loss, expected)))
    full = fs.gather(params)
    h = normal(4)(ROWS, TIME, WIDTH)
    each = fs.vocab_parallel_cross_entropy(h, full["head"], IGNORED, axis, reduction="none")
    logits = F.linear(h, FULL["head"]).flatten(0, 1)
    expected = F.cross_entropy(logits, IGNORED.flatten(), reduction="none").view(ROWS, TIME)
    assert_trees_close(each, expected, **near(expected))
    of_logits = fs.vocab_parallel_cross_entropy(F.linear(h, full["head"]), None, IGNORED, axis, reduction="none")
    assert_same_bits(of_logits, each)
    half = fs.vocab_parallel_cross_entropy(1e4 * h.bfloat16(), full["head"].bfloat16(), TARGETS, axis)
    assert half.dtype == torch.float32
    assert half.isfinite()


# Eleven rows leave every one of 2, 3 and 4 ranks a piece, but not of one size; of nine, four ranks share three pieces.
UNEVEN = (11, 9)
# By the name of a cut: the rows of each rank, and the keywords that say so.
CUTS = {
    "as torch.chunk cuts": lambda rows, ranks: (list(rows.chunk(ranks)), {}),
    "as torch.chunk cuts, of a size that is known": lambda rows, ranks: (
        list(rows.chunk(ranks)),
        {"vocab_size": len(rows)},
    ),
    "as torch.tensor_split cuts": lambda rows, ranks: (list(rows.tensor_split(ranks)), {}),
    "padded at the end": lambda rows, ranks: (
        list(F.pad(rows, (0, 0, 0, -len(rows) % ranks), value=7.0).chunk(ranks)),
        {"vocab_size": len(rows)},
    ),
}


def uneven_piece(rows, cut, axis):
    """Return this rank's rows, perhaps none, and how to ask for them."""
    pieces, keywords = CUTS[cut](rows, axis.size)
    pieces += [rows[:0]] * (axis.size - len(pieces))
    return pieces[fs.axis_index(axis)].clone(), keywords


def padded_grad(full_grad, cut, axis):
    """Return the gradient of this rank's rows, that of all rows being given; padding has none."""
    piece, _ = uneven_piece(full_grad, cut, axis)
    if cut == "padded at the end":
        first = fs.axis_index(axis) * len(piece)
        piece[max(len(full_grad) - first, 0) :] = 0.0
    return piece


def uneven_setting(vocabulary):
    """Make hidden values, ids and the weights of an embedding and of a head."""
    ids = torch.arange(ROWS * TIME).reshape(ROWS, TIME) * 5 % vocabulary
    return normal(5)(ROWS, TIME, WIDTH), ids, normal(6)(vocabulary, WIDTH), 3 * normal(7)(vocabulary, WIDTH)


@pytest.mark.rows(8)
@pytest.mark.parametrize("vocabulary", UNEVEN)
@pytest.mark.parametrize("cut", CUTS)
@on_ranks(1, 2, 3, 4)
def test_pieces_need_not_be_of_one_size(cut, vocabulary):
    axis = fs.axis_of(fs.init_mesh({"tp": -1}, device="cpu"))
    h, ids, tokens, head = uneven_setting(vocabulary)
    own_tokens, keywords = uneven_piece(tokens, cut, axis)
    own_head, _ = uneven_piece(head, cut, axis)

    def dense(h, tokens, head):
        logits = F.linear(torch.tanh(h + F.embedding(ids, tokens)), head)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def parallel(h, tokens, head):
        full = torch.tanh(h + fs.vocab_parallel_embedding(ids, tokens, axis, **keywords))
        return fs.vocab_parallel_cross_entropy(fs.pcast(full, axis, to="varying"), head, ids, axis, **keywords)

    def parallel_of_logits(h, tokens, head):
        full = fs.pcast(torch.tanh(h + fs.vocab_parallel_embedding(ids, tokens, axis, **keywords)), axis, to="varying")
        return fs.vocab_parallel_cross_entropy(F.linear(full, head), None, ids, axis, **keywords)

    places = (0, 1, 2)
    (of_h, of_tokens, of_head), loss = grad_and_value(dense, places)(h, tokens, head)
    expected = of_h, padded_grad(of_tokens, cut, axis), padded_grad(of_head, cut, axis)
    for loss_fn in (parallel, parallel_of_logits):
        by_transform = grad_and_value(loss_fn, places)(h, own_tokens, own_head)
        assert_trees_close(by_transform, (expected, loss), **near((expected, loss)))
        leaves = [tensor.clone().requires_grad_() for tensor in (h, own_tokens, own_head)]
        value = loss_fn(*leaves)
        assert_trees_close(
            (torch.autograd.grad(value, leaves), value.detach()), (expected, loss), **near((expected, loss))
        )
        in_a_graph = fs.jit(lambda *tensors, loss_fn=loss_fn: grad_and_value(loss_fn, places)(*tensors))
        assert_trees_close(in_a_graph(h, own_tokens, own_head), (expected, loss), **near((expected, loss)))
    # Of several hidden states at once, and of a Hessian times a vector.
    several = torch.stack([h, 2 * h, -h])
    each = vmap(parallel, (0, None, None))(several, own_tokens, own_head)
    of_dense = vmap(dense, (0, None, None))(several, tokens, head)
    assert_trees_close(each, of_dense, **near(of_dense))
    of_rows = vmap(grad(parallel), (0, None, None))(several, own_tokens, own_head)
    of_dense = vmap(grad(dense), (0, None, None))(several, tokens, head)
    assert_trees_close(of_rows, of_dense, **near(of_dense))

    def slope(loss_fn, *weights):
        return lambda h: (grad(loss_fn)(h, *weights) * several[1]).sum()

    second = grad(slope(parallel, own_tokens, own_head))(h)
    of_dense = grad(slope(dense, tokens, head))(h)
    assert_trees_close(second, of_dense, **near(of_dense))


@on_ranks(3)
def test_a_piece_that_does_not_fit_the_vocabulary_is_refused_on_every_rank():
    axis = fs.axis_of(fs.init_mesh({"tp": -1}, device="cpu"))
    rows = normal(1)(11, WIDTH).tensor_split([4, 7])[fs.axis_index(axis)]
    text = "vocab_parallel_embedding: expected 4 rows of a vocabulary of 11 on rank 1 of 'tp', got 3"
    # One rank finds it, and others hear of it.
    with pytest.raises((ValueError, fs.comm.CollectiveError), match=re.escape(text)):
        fs.vocab_parallel_embedding(torch.tensor([1]), rows, axis, vocab_size=11)


@on_ranks(2)
def test_ranks_that_pass_different_vocabularies_are_told():
    """Six rows on each of two ranks fit a vocabulary of 11, whose last row is padding, and one of 12."""
    h = torch.ones(1, WIDTH, dtype=FULL["tokens"].dtype)
    no_ids = torch.ones(0, dtype=torch.int64)
    for call in (
        lambda rows, axis, size: fs.vocab_parallel_embedding(no_ids, rows, axis, vocab_size=size),
        lambda rows, axis, size: fs.vocab_parallel_cross_entropy(h, rows, torch.tensor([7]), axis, vocab_size=size),
    ):
        axis = fs.axis_of(fs.init_mesh({"tp": -1}, device="cpu"))
        rank = fs.axis_index(axis)
        with pytest.raises(fs.comm.CollectiveError) as caught:
            call(normal(1)(12, WIDTH).chunk(2)[rank], axis, 11 + rank)
        for size in (11, 12):
            assert f"vocabulary of {size}" in str(caught.value)


def test_bad_arguments_are_refused():
    given = {"h": torch.ones(2, 2), "weight": torch.ones(4, 2), "targets": torch.tensor([0, 3])}
    for change, text in (
        ({"h": torch.ones(2, 3)}, "h to be a tensor of shape (2, 2), got a float32 Tensor of shape (2, 3)"),
        ({"weight": None, "h": torch.ones(3, 2)}, "h to be a tensor of shape (2, rows), got a float32 Tensor of shape"),
        ({"weight": torch.ones(4)}, "weight to be a matrix, this rank's rows of it, got"),
        ({"targets": torch.tensor([-1, 0])}, "ids from 0 to 3, got -1 to 0"),
        ({"vocab_size": 0}, "vocab_size to be a whole number of 1 or more, or None, got 0"),
        ({"vocab_size": 3}, "3 rows of a vocabulary of 3 on rank 0 of 'tp', got 4; cut the weight by"),
    ):
        with pytest.raises(ValueError, match="vocab_parallel_cross_entropy: expected " + re.escape(text)):
            fs.vocab_parallel_cross_entropy(**{**given, "axis": fs.Axis("tp", 1, ""), **change})
