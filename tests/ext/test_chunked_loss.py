"""chunked_loss: numbers of all logits with those of one chunk held, the head gathered and reduced once."""

import re
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import normal, one_axis

WIDTH, VOCABULARY, TIME = 6, 64, 12
X, Y = normal(1)(4, TIME, WIDTH), torch.randint(VOCABULARY, (4, TIME), generator=torch.Generator().manual_seed(2))
TARGETS = Y.masked_fill(Y % 5 == 0, -100)
FULL = {"trunk": normal(3)(WIDTH, WIDTH), "head": [normal(4)(VOCABULARY, WIDTH), normal(5)(VOCABULARY)]}


def dense(params, x, y):
    full = fs.gather(params)
    logits = F.linear(torch.tanh(x @ full["trunk"]), *full["head"])
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), (y != -100).sum()


def chunked(params, x, y, **options):
    return fs.chunked_loss(torch.tanh(x @ fs.gather(params["trunk"])), params["head"], y, **options)


# Sums over all tokens, in chunks, of sums over the vocabulary.
near = partial(within, terms=4 * TIME + VOCABULARY)


def of_head(record):
    """How often the head travels, and why."""
    return Counter(str(entry.label) for entry in record if "['head'][0]" in str(entry.about))


TRAINED = torch.ones((), requires_grad=True)
SPLIT = {"min_shard_elements": 0}


@pytest.mark.parametrize("strategy", (fs.ddp, partial(fs.zero2, **SPLIT), partial(fs.zero3, **SPLIT)))
@on_ranks(2)
def test_it_is_the_dense_loss_with_the_head_gathered_and_reduced_once(strategy):
    params, batch = fs.shard(FULL, strategy(one_axis())), (X[my_rank() :: 2], TARGETS[my_rank() :: 2])
    expected = fs.value_and_grad(dense, reduce="weighted")(params, *batch)
    for options in ({"chunks": 5}, {"chunks": 100}, {"dtype": torch.float64}):
        with fs.comm.record() as record:
            found = fs.value_and_grad(lambda *a, o=options: chunked(*a, **o), reduce="weighted")(params, *batch)
        assert_trees_close(found, expected, **near(expected))
        assert of_head(record) == Counter(["scatter"] if strategy is fs.ddp else ["gather", "scatter"])
    # Law 5, and derivatives that a loss differentiated at once has none of.
    reference = grad(lambda p: fs.objective(chunked(p, *batch), like=p, reduce="weighted"))(params)
    assert_trees_close(reference, expected[1], **near(expected[1]))


def test_logits_and_sums_are_in_the_dtype_that_was_asked_for():
    """The sum over chunks of a narrow head's gradient is less rounded than in its own dtype."""
    w, h = (tensor.bfloat16().requires_grad_() for tensor in (FULL["head"][0], X[0]))
    found, expected = [], F.cross_entropy(F.linear(h, w).float(), Y[0], reduction="sum")
    for dtype in (torch.float32, None):
        total, _ = fs.chunked_loss(h, w, Y[0], chunks=TIME, dtype=dtype)
        found.append(torch.autograd.grad(total, w)[0])
        assert total.dtype is (dtype or torch.bfloat16)
    assert_trees_close(fs.chunked_loss(h, w, Y[0], dtype=torch.float32)[0], expected, **near(expected))
    exact = torch.autograd.grad(F.cross_entropy(F.linear(h.double(), w.double()), Y[0], reduction="sum"), w)[0]
    errors = [(grad.double() - exact.double()).norm() for grad in found]
    assert errors[0] < errors[1]


def test_logits_of_one_chunk_are_held():
    params = {"trunk": FULL["trunk"], "head": [torch.ones(4096, WIDTH), torch.ones(4096)]}
    batch = X.float().repeat(1, 20, 1), TARGETS.repeat(1, 20)
    params["trunk"] = params["trunk"].float()
    peaks = []
    for f in (dense, chunked, lambda *a: chunked(*a, chunks=16)):
        step = fs.value_and_grad(f, reduce="weighted")
        sharded = fs.shard(params, fs.zero3(one_axis()))
        peaks.append(fs.make_graph(step)(sharded, *batch).peak_bytes())
    logits = 4096 * TARGETS.numel() * 20 * 4
    assert peaks[1] < peaks[0] - 2 * logits * 7 / 8 < peaks[0]
    assert peaks[2] < peaks[1] - logits / 16


def test_second_derivatives_are_those_of_torch_func_alone():
    h, y, w = X[0], Y[0], FULL["head"][0]
    found = vmap(grad(lambda h, y: fs.chunked_loss(h[None], w, y[None], chunks=2)[0]))(h, y)
    expected = vmap(grad(lambda h, y: F.cross_entropy(w @ h, y)))(h, y)
    assert_trees_close(found, expected, **near(expected))


@pytest.mark.parametrize(
    ("change", "text"),
    (
        ({"h": X[0, :, :2]}, "h of shape (12, 6), by targets and head, got a float64 Tensor of shape (12, 2)"),
        ({"chunks": 0}, "chunks to be a positive number, got 0"),
        (
            {"loss": lambda logits, y: ((logits * TRAINED).sum(), y.numel())},
            "loss to compute with logits and targets, got a closure's tensor that requires a gradient; detach it",
        ),
    ),
)
def test_wrong_calls_are_refused(change, text):
    given = {"head": FULL["head"][0].clone().requires_grad_(), "h": X[0], "targets": Y[0], **change}
    with pytest.raises(ValueError, match=re.escape("chunked_loss: expected " + text)):
        fs.chunked_loss(**given)


@pytest.mark.parametrize("create_graph", (True, False))
def test_a_second_backward_is_refused(create_graph):
    w = FULL["head"][0].clone().requires_grad_()
    total, _ = fs.chunked_loss(X[0], w, Y[0])
    text = "chunked_loss: expected one backward, for a first derivative, got another, or create_graph; call it again"
    if not create_graph:
        torch.autograd.grad(total, w, retain_graph=True)
    with pytest.raises(ValueError, match=text):
        torch.autograd.grad(total, w, create_graph=create_graph)
