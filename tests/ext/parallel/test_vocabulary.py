"""Vocabulary-parallel embedding and cross entropy equal those of full rows, which no rank ever holds."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal

VOCABULARY, WIDTH, ROWS, TIME = 24, 6, 8, 4
TARGETS = torch.randint(VOCABULARY, (ROWS, TIME), generator=torch.Generator().manual_seed(3))
IGNORED = TARGETS.masked_fill(TARGETS % 5 == 0, -100)
FULL = {"tokens": normal(1)(VOCABULARY, WIDTH), "head": 3 * normal(2)(VOCABULARY, WIDTH)}
OPTIONS = ({}, {"reduction": "sum"}, {"ignore_index": 7})
# Sums of WIDTH products, VOCABULARY exponentials and all tokens, in another order.
ROUNDING = {"rtol": 0.0, "atol": 64 * ROWS * TIME * VOCABULARY * torch.finfo(torch.float64).eps}


def dense_loss(params, x, y, options):
    h = torch.tanh(F.embedding(x, params["tokens"]))
    return F.cross_entropy(F.linear(h, params["head"]).flatten(0, 1), y.flatten(), **options)


def loss_fn(params, x, y, axis, options, scatter_dim=None):
    """Time may be in pieces between embedding and head, as sequence parallelism has it."""
    full = fs.gather(params)
    h = torch.tanh(fs.vocab_parallel_embedding(x, full["tokens"], axis, scatter_dim=scatter_dim))
    h = fs.pvary(h, axis) if scatter_dim is None else fs.all_gather(h, axis, dim=scatter_dim)
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
            assert_trees_close((found[0], fs.unshard(found[1])), (loss, expected), **ROUNDING)


@on_ranks(2)
def test_options_are_those_of_torch():
    params, axis, _ = sharded(2, 2)
    x = TARGETS.flip(1)
    for options in OPTIONS:
        for targets in (TARGETS, IGNORED) if "ignore_index" not in options else (TARGETS,):
            expected, loss = grad_and_value(dense_loss)(FULL, x, targets, options)
            found = fs.value_and_grad(loss_fn)(params, x, targets, axis, options)
            assert_trees_close((found[0], fs.unshard(found[1])), (loss, expected), **ROUNDING)
    full = fs.gather(params)
    h = normal(4)(ROWS, TIME, WIDTH)
    each = fs.vocab_parallel_cross_entropy(h, full["head"], IGNORED, axis, reduction="none")
    logits = F.linear(h, FULL["head"]).flatten(0, 1)
    expected = F.cross_entropy(logits, IGNORED.flatten(), reduction="none").view(ROWS, TIME)
    assert_trees_close(each, expected, **ROUNDING)
    of_logits = fs.vocab_parallel_cross_entropy(F.linear(h, full["head"]), None, IGNORED, axis, reduction="none")
    assert_same_bits(of_logits, each)
    half = fs.vocab_parallel_cross_entropy(1e4 * h.bfloat16(), full["head"].bfloat16(), TARGETS, axis)
    assert half.dtype == torch.float32
    assert half.isfinite()


def test_bad_arguments_are_refused():
    given = {"h": torch.ones(2, 2), "weight": torch.ones(4, 2), "targets": torch.tensor([0, 3])}
    for change, text in (
        ({"h": torch.ones(2, 3)}, "h to be a tensor of shape (2, 2), got a float32 Tensor of shape (2, 3)"),
        ({"weight": None, "h": torch.ones(3, 2)}, "h to be a tensor of shape (2, rows), got a float32 Tensor of shape"),
        ({"weight": torch.ones(4)}, "weight to be a matrix, this rank's rows of it, got"),
        ({"targets": torch.tensor([-1, 0])}, "ids from 0 to 3, got -1 to 0"),
    ):
        with pytest.raises(ValueError, match="vocab_parallel_cross_entropy: expected " + re.escape(text)):
            fs.vocab_parallel_cross_entropy(**{**given, "axis": fs.Axis("tp", 1, ""), **change})
