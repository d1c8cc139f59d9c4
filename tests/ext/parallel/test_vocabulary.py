"""Vocabulary-parallel embedding and cross entropy equal those of full rows, which no rank ever holds."""

import re
from functools import partial
from typing import NamedTuple

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
OPTIONS = (
    *((targets, options) for targets in (TARGETS, IGNORED) for options in ({}, {"reduction": "sum"})),
    (TARGETS, {"ignore_index": 7}),
)
# Sums of VOCABULARY exponentials and of all tokens, one after the other and back.
near = partial(within, terms=ROWS * TIME + VOCABULARY, steps=2)


def assert_near(actual, expected):
    assert_trees_close(actual, expected, **near(expected))


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


@pytest.mark.parametrize("scatter_dim", (None, 1))
@on_ranks(2)
def test_losses_and_gradients_are_those_of_full_rows(scatter_dim):
    """By torch's own options, also where ids are in pieces of time between embedding and head."""
    params, axis, _ = sharded(2, 2)
    x = TARGETS.flip(1)
    for targets, options in OPTIONS:
        loss, grads = fs.value_and_grad(loss_fn)(params, x, targets, axis, options, scatter_dim)
        assert_near((fs.unshard(grads), loss), grad_and_value(dense_loss)(FULL, x, targets, options))


@on_ranks(2)
def test_a_loss_of_each_target_also_of_logits_and_of_half_precision():
    params, axis, _ = sharded(2, 2)
    h, head = normal(4)(ROWS, TIME, WIDTH), fs.gather(params)["head"]
    loss = partial(fs.vocab_parallel_cross_entropy, axis=axis)
    each = loss(h, head, IGNORED, reduction="none")
    logits = F.linear(h, FULL["head"]).flatten(0, 1)
    assert_near(each, F.cross_entropy(logits, IGNORED.flatten(), reduction="none").view(ROWS, TIME))
    assert_same_bits(loss(F.linear(h, head), None, IGNORED, reduction="none"), each)
    half = loss(1e4 * h.bfloat16(), head.bfloat16(), TARGETS)
    assert half.dtype == torch.float32
    assert half.isfinite()


# Eleven rows leave every one of 2, 3 and 4 ranks a piece, but not of one size; of five, four ranks share three pieces.
UNEVEN = (11, 5)
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


class Uneven(NamedTuple):
    """Hidden values and ids of a rank, the weights of an embedding and of a head, whole and its own rows."""

    axis: fs.Axis
    h: torch.Tensor
    ids: torch.Tensor
    full: tuple[torch.Tensor, torch.Tensor]
    pieces: tuple[torch.Tensor, torch.Tensor]
    keywords: dict[str, int]

    def hidden(self, h, tokens):
        embedded = fs.vocab_parallel_embedding(self.ids, tokens, self.axis, **self.keywords)
        return fs.pcast(torch.tanh(h + embedded), self.axis, to="varying")

    def of_hidden(self, h, tokens, head):
        hidden = self.hidden(h, tokens)
        return fs.vocab_parallel_cross_entropy(hidden, head, self.ids, self.axis, **self.keywords)

    def of_logits(self, h, tokens, head):
        logits = F.linear(self.hidden(h, tokens), head)
        return fs.vocab_parallel_cross_entropy(logits, None, self.ids, self.axis, **self.keywords)

    def dense(self, h, tokens, head):
        logits = F.linear(torch.tanh(h + F.embedding(self.ids, tokens)), head)
        return F.cross_entropy(logits.flatten(0, 1), self.ids.flatten())


def uneven(vocabulary, cut):
    axis = fs.axis_of(fs.init_mesh({"tp": -1}, device="cpu"))
    full = normal(6)(vocabulary, WIDTH), 3 * normal(7)(vocabulary, WIDTH)
    tokens, keywords = uneven_piece(full[0], cut, axis)
    head, _ = uneven_piece(full[1], cut, axis)
    ids = torch.arange(ROWS * TIME).reshape(ROWS, TIME) * 5 % vocabulary
    return Uneven(axis, normal(5)(ROWS, TIME, WIDTH), ids, full, (tokens, head), keywords)


@pytest.mark.parametrize("vocabulary", UNEVEN)
@pytest.mark.parametrize("cut", CUTS)
@on_ranks(1, 2, 3, 4)
def test_pieces_need_not_be_of_one_size(cut, vocabulary):
    case = uneven(vocabulary, cut)
    arguments = (case.h, *case.pieces)
    (of_h, *of_weights), loss = grad_and_value(case.dense, (0, 1, 2))(case.h, *case.full)
    expected = (of_h, *(padded_grad(full_grad, cut, case.axis) for full_grad in of_weights)), loss
    for parallel in (case.of_hidden, case.of_logits):
        transformed = grad_and_value(parallel, (0, 1, 2))
        assert_near(transformed(*arguments), expected)
        leaves = [tensor.clone().requires_grad_() for tensor in arguments]
        value = parallel(*leaves)
        assert_near((torch.autograd.grad(value, leaves), value.detach()), expected)
    assert_near(fs.jit(transformed)(*arguments), expected)


@pytest.mark.rows(1)
@pytest.mark.parametrize("cut", CUTS)
@on_ranks(2)
def test_batches_and_second_derivatives(cut):
    """Of several hidden states at once, and of a Hessian times a vector."""
    case = uneven(UNEVEN[0], cut)
    several = torch.stack([case.h, 2 * case.h, -case.h])

    def slope(loss_fn, *weights):
        return lambda h: (grad(loss_fn)(h, *weights) * several[1]).sum()

    for transform in (lambda f: f, grad):
        batched = vmap(transform(case.of_hidden), (0, None, None))(several, *case.pieces)
        assert_near(batched, vmap(transform(case.dense), (0, None, None))(several, *case.full))
    second = grad(slope(case.of_hidden, *case.pieces))(case.h)
    assert_near(second, grad(slope(case.dense, *case.full))(case.h))


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
            assert f"vocab_size={size}" in str(caught.value)


def test_bad_arguments_are_refused():
    given = {"h": torch.ones(2, 2), "weight": torch.ones(4, 2), "targets": torch.tensor([0, 3])}
    for change, text in (
        ({"h": torch.ones(2, 3)}, "h to be a tensor of shape (2, 2), got a float32 Tensor of shape (2, 3)"),
        ({"weight": None, "h": torch.ones(3, 2)}, "h to be a tensor of shape (2, rows), got a float32 Tensor of shape"),
        ({"weight": torch.ones(4)}, "weight to be a matrix, this rank's rows of it, got"),
        ({"targets": torch.tensor([-1, 0])}, "ids from 0 to 3, got -1 to 0"),
        ({"vocab_size": 0}, "vocab_size to be a whole number from 1, got 0"),
        ({"vocab_size": 3}, "3 rows of a vocabulary of 3 on rank 0 of 'tp', got 4; cut the weight by"),
    ):
        with pytest.raises(ValueError, match="vocab_parallel_cross_entropy: expected " + re.escape(text)):
            fs.vocab_parallel_cross_entropy(**{**given, "axis": fs.Axis("tp", 1, ""), **change})
