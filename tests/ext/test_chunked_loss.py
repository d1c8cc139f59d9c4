"""chunked_loss: numbers of all logits with those of one chunk held, the head gathered and reduced once."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import OF_EVERY_LEAF, normal, one_axis

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


@pytest.mark.parametrize("strategy", ("ddp", "zero2", "zero3"))
@on_ranks(2)
def test_it_is_the_dense_loss_with_the_head_gathered_and_reduced_once(strategy):
    params, batch = fs.shard(FULL, OF_EVERY_LEAF[strategy](one_axis())), (X[my_rank() :: 2], TARGETS[my_rank() :: 2])
    expected = fs.value_and_grad(dense, reduce="weighted")(params, *batch)
    for options in ({"chunks": 5}, {"chunks": 100}, {"dtype": torch.float64}):
        with fs.comm.record() as record:
            result = fs.value_and_grad(partial(chunked, **options), reduce="weighted")(params, *batch)
        assert_trees_close(result, expected, **near(expected))
        travels = [str(entry.label) for entry in record if "['head'][0]" in str(entry.about)]
        assert travels == (["scatter"] if strategy == "ddp" else ["gather", "scatter"])
    # Law 5, and derivatives that a loss differentiated at once has none of.
    reference = grad(lambda p: fs.objective(chunked(p, *batch), like=p, reduce="weighted"))(params)
    assert_trees_close(reference, expected[1], **near(expected[1]))


@pytest.mark.parametrize("requires_grad", (True, False))
def test_losses_of_chunks_in_half_precision_are_rounded_once_after_their_sum(requires_grad):
    """In bfloat16 a sum that grows by one chunk after another loses digits in each addition."""
    w = torch.zeros(VOCABULARY, WIDTH, dtype=torch.bfloat16, requires_grad=requires_grad)
    targets = torch.zeros(2048, dtype=torch.int64)
    h = torch.zeros(len(targets), WIDTH, dtype=torch.bfloat16)
    total, count = fs.chunked_loss(h, w, targets, chunks=256)
    of_one_chunk = F.cross_entropy(F.linear(h[:8], w), targets[:8], reduction="sum")
    assert total.dtype is torch.bfloat16
    assert count == len(targets)
    assert total == 256 * of_one_chunk


def test_logits_and_sums_are_in_the_dtype_that_was_asked_for():
    """The sum over chunks of a narrow head's gradient is less rounded than in its own dtype."""
    w, h = (tensor.bfloat16().requires_grad_() for tensor in (FULL["head"][0], X[0]))
    expected = F.cross_entropy(F.linear(h, w).float(), Y[0], reduction="sum")
    exact = torch.autograd.grad(F.cross_entropy(F.linear(h.double(), w.double()), Y[0], reduction="sum"), w)[0]
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        total, _ = fs.chunked_loss(h, w, Y[0], chunks=TIME, dtype=None if dtype is w.dtype else dtype)
        assert total.dtype is dtype
        errors.append((torch.autograd.grad(total, w)[0].double() - exact.double()).norm())
    assert_trees_close(fs.chunked_loss(h, w, Y[0], dtype=torch.float32)[0], expected, **near(expected))
    assert errors[0] < errors[1]


def test_logits_of_one_chunk_are_held():
    vocabulary, repeats = 2048, 10
    full = {"trunk": FULL["trunk"].float(), "head": [torch.ones(vocabulary, WIDTH), torch.ones(vocabulary)]}
    params = fs.shard(full, fs.zero3(one_axis()))

    def peak(loss):
        step = fs.value_and_grad(loss, reduce="weighted")
        return fs.make_graph(step)(params, X.float().repeat(1, repeats, 1), TARGETS.repeat(1, repeats)).peak_bytes()

    logits = vocabulary * TARGETS.numel() * repeats * 4
    all_at_once, halves = peak(dense), peak(partial(chunked, chunks=2))
    assert halves < all_at_once - 2 * logits / 2 < all_at_once
    assert peak(partial(chunked, chunks=4)) < halves - logits / 4


def test_second_derivatives_are_those_of_torch_func_alone():
    h, y, w = X[0], Y[0], FULL["head"][0]
    grads = vmap(grad(lambda h, y: fs.chunked_loss(h[None], w, y[None], chunks=2)[0]))(h, y)
    expected = vmap(grad(lambda h, y: F.cross_entropy(w @ h, y)))(h, y)
    assert_trees_close(grads, expected, **near(expected))


@pytest.mark.parametrize("used", (range(2, 6), ()))
def test_a_chunk_whose_loss_uses_no_logits_adds_zeros(used):
    """Such as one without a target that counts; the others have their gradients, whichever comes first."""
    tensors = [X[0].clone().requires_grad_(), *(tensor.clone().requires_grad_() for tensor in FULL["head"])]
    weights = torch.zeros(TIME, dtype=torch.float64)
    weights[list(used)] = 1.0

    def loss(logits, weights):
        if not weights.any():
            return torch.tensor(3.0, dtype=torch.float64), 0
        return (weights * logits.logsumexp(-1)).sum(), 1

    h, *head = tensors
    total, _ = fs.chunked_loss(h, head, weights, chunks=6, loss=loss)
    expected = (weights * F.linear(h, *head).logsumexp(-1)).sum()
    idle_chunks = 6 - len(used) // 2
    assert_trees_close(total - 3.0 * idle_chunks, expected, **near([expected, 3.0 * idle_chunks]))
    actual = torch.autograd.grad(total, tensors, materialize_grads=True)
    expected = torch.autograd.grad(expected, tensors)
    assert_trees_close(actual, expected, **near(expected))


TRAINED = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("change", "text"),
    (
        ({"h": X[0, :, :2]}, "h of shape (12, 6), by targets and head, got a float64 Tensor of shape (12, 2)"),
        ({"chunks": 0}, "chunks to be a whole number from 1, got 0"),
        (
            {"loss": lambda logits, y: ((logits * TRAINED).sum(), y.numel())},
            "loss to compute with logits and targets, got a closure's tensor that requires a gradient; detach it",
        ),
    ),
)
def test_wrong_calls_are_refused(change, text):
    arguments = {"head": FULL["head"][0].clone().requires_grad_(), "h": X[0], "targets": Y[0]}
    with pytest.raises(ValueError, match=re.escape("chunked_loss: expected " + text)):
        fs.chunked_loss(**arguments | change)


@pytest.mark.parametrize("create_graph", (True, False))
def test_a_second_backward_is_refused(create_graph):
    w = FULL["head"][0].clone().requires_grad_()
    total, _ = fs.chunked_loss(X[0], w, Y[0])
    text = "chunked_loss: expected one backward, for a first derivative, got another, or create_graph; call it again"
    if not create_graph:
        torch.autograd.grad(total, w, retain_graph=True)
    with pytest.raises(ValueError, match=text):
        torch.autograd.grad(total, w, create_graph=create_graph)
