"""The table of laws of extensions: one process's numbers, purity, jit's bits, the bytes of a formula, restarts."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad_and_value

import fshard as fs
from fshard.testing import assert_trees_close
from tests.checkpoint.states import zeros_like
from tests.ext.parallel import test_attention as attention
from tests.ext.parallel import test_moe as moe
from tests.ext.parallel import test_pipeline as pipeline
from tests.ext.parallel import test_tensor as tensor
from tests.ext.parallel import test_vocabulary as vocabulary
from tests.jit.steps import collectives, refused
from tests.ranks import my_rank, on_ranks
from tests.test_law_purity import unchanged
from tests.tolerance import within
from tests.trees import assert_alike, normal, one_axis

RANKS, STEPS = 4, 2
SIZES = (2, 2)
# In the largest batch of these.
TOKENS = tensor.ROWS * tensor.TIME
Tree = Any


class Setting(NamedTuple):
    """One rank's side of a program, and the bytes that it sends in a step by label, if they depend on no values."""

    params: Tree
    batch: Sequence[torch.Tensor]
    loss_fn: Callable[..., Any]
    sent: Mapping[str, float] | None


class Row(NamedTuple):
    """What an extension does in a step, on a rank and in one process, and what numbers of a lossy one may be off by."""

    setting: Callable[[], Setting]
    full: Callable[[], Tree]
    loss: Callable[[Tree], torch.Tensor]
    tx: fs.Optimizer = fs.sgd(0.1, momentum=0.9)
    reduce: str = "mean"
    refused: str | None = None
    error: float = 0.0


def sequence(attend, order, sent):
    """A GPT whose sequence is split over two ranks, which send so many blocks of values under a label in a layer."""
    mesh = fs.init_mesh({"shard": 2, "cp": 2}, device="cpu")
    shard, cp = fs.axis_of(mesh["shard"]), fs.axis_of(mesh["cp"])
    at = fs.ring_positions(cp, attention.TIME, order)
    batch = tuple(tokens.chunk(2)[fs.axis_index(shard)][:, at] for tokens in attention.tokens())
    values = batch[0].numel() * attention.WIDTH * 8 * attention.LAYERS
    params = fs.shard(attention.gpt(), fs.zero3(mesh, layout=fs.hybrid_shard(mesh, axis="shard", replicate_axis="cp")))
    loss_fn = partial(attention.loss_fn, at=at, attention=attend(cp))
    return Setting(params, batch, loss_fn, {label: blocks * values for label, blocks in sent.items()})


def ring():
    """k and v go round, and in the backward their gradients with them."""
    attend = partial(fs.ring_attention, is_causal=True, order="zigzag")
    return sequence(lambda cp: partial(attend, axis=cp), "zigzag", {"ring_attention": 6})


def ulysses():
    """Four tensors are swapped twice."""
    attend = F.scaled_dot_product_attention
    return sequence(lambda cp: partial(fs.ulysses(attend, cp), is_causal=True), "contiguous", {"all_to_all": 4})


def of_gpt(params):
    return attention.loss_fn(params, *attention.tokens(), torch.arange(attention.TIME), attention.dense)


def mixture(**options):
    """Slots of experts travel there and back, forward and backward, but for gradients of the first layer's tokens."""
    params, batch, axes = moe.setting(SIZES)
    slots = moe.EXPERTS * options.get("capacity", 0) * moe.WIDTH * 8 * (SIZES[1] - 1) / SIZES[1]
    shares = 2 * moe.EXPERTS * 8 * sum((size - 1) / size for size in SIZES)
    sent = {"all_to_all": (4 * moe.LAYERS - 1) * slots, "psum": moe.LAYERS * shares}
    loss_fn = partial(moe.loss_fn, mixture=moe.parallel, **axes, **options)
    return Setting(params, batch, loss_fn, sent if options else None)


def of_mixture(params, **options):
    total, count = moe.loss_fn(params, *moe.data(), moe.dense, **options)
    return total / count


def stages(schedule):
    return Setting(*pipeline.setting(SIZES, schedule), pipeline.sent_by_label(SIZES, schedule))


def of_stages(params):
    return pipeline.dense_loss(params, *pipeline.batch())


def split(sequence_dim):
    params, batch, loss_fn = tensor.setting("GPT", SIZES, sequence_dim)
    return Setting(params, batch, loss_fn, tensor.sent_by_label(SIZES[1], sequence_dim, tensor.ROWS // SIZES[0]))


def full_of_module():
    return {key: parameter.detach() for key, parameter in tensor.module_of("GPT").named_parameters()}


def of_module(params):
    x, y = tensor.data()
    out = functional_call(copy.deepcopy(tensor.module_of("GPT")), params, x)
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


WORDS = vocabulary.TARGETS.flip(1), vocabulary.TARGETS


def words(loss_fn):
    params, axis, shard = vocabulary.sharded(RANKS, SIZES[1])
    batch = tuple(ids.chunk(shard.size)[fs.axis_index(shard)] for ids in WORDS)
    # Rows of the embedding and gradients of the head's input; a largest logit, exponentials and a target's logit.
    rows = batch[0].numel() * 8 * (axis.size - 1) / axis.size
    sent = {"psum_invariant": 2 * rows * (vocabulary.WIDTH + 2), "pcast": 2 * rows * vocabulary.WIDTH, "pmax": 2 * rows}
    return Setting(params, batch, partial(loss_fn, axis=axis), sent)


def in_chunks(params, x, y, axis):
    """Each chunk's loss is vocabulary-parallel."""
    full = fs.gather(params)
    h = fs.pcast(torch.tanh(fs.vocab_parallel_embedding(x, full["tokens"], axis)), axis, to="varying")

    def loss(logits, y):
        return fs.vocab_parallel_cross_entropy(logits, None, y, axis, reduction="sum"), y.numel()

    total, count = fs.chunked_loss(h, full["head"], y, chunks=2, loss=loss)
    return total / count


def of_words(params):
    return vocabulary.dense_loss(params, *WORDS, {})


def squares(params, x, y):
    full = fs.gather(params)
    return (torch.tanh(x @ full["in"]) @ full["out"] - y).square().mean()


def matrices():
    draw = normal(5)
    return {"in": draw(8, 12) / 3, "out": draw(12, 8) / 3}


ROWS = normal(6)(16, 8), normal(7)(16, 8)


def plain(transform=fs.zero2):
    batch = tuple(tensor.chunk(RANKS)[my_rank()] for tensor in ROWS)
    return Setting(fs.shard(matrices(), transform(one_axis())), batch, squares, {})


def of_squares(params):
    return squares(params, *ROWS)


optimizer = partial(Row, plain, matrices, of_squares)
words_row = partial(Row, full=lambda: vocabulary.FULL, loss=of_words)
CAPACITY = "moe.dispatch: expected a capacity inside fs.jit, where sizes are fixed, got None; pass capacity="
LIMITED = partial(of_mixture, capacity=5, groups=RANKS)
TABLE = {
    "ring_attention": Row(ring, attention.gpt, of_gpt),
    "ulysses": Row(ulysses, attention.gpt, of_gpt),
    "moe": Row(mixture, moe.initial, of_mixture, reduce="weighted", refused=CAPACITY),
    "moe by capacity": Row(partial(mixture, capacity=5), moe.initial, LIMITED, reduce="weighted"),
    "pipeline gpipe": Row(partial(stages, "gpipe"), pipeline.full_params, of_stages),
    "pipeline 1f1b": Row(partial(stages, "1f1b"), pipeline.full_params, of_stages),
    "tensor_parallel": Row(partial(split, None), full_of_module, of_module),
    "tensor_parallel over time": Row(partial(split, 1), full_of_module, of_module),
    "vocab_parallel": words_row(partial(words, partial(vocabulary.loss_fn, options={}))),
    "chunked_loss": words_row(partial(words, in_chunks)),
    # A weight below 1 is off by half a step of 254, and what is computed with it by no more than four times that.
    "quantize": Row(partial(plain, partial(fs.quantize, block=4)), matrices, of_squares, error=4 / 254),
    "lamb": optimizer(fs.lamb(0.1)),
    "lars": optimizer(fs.lars(0.1)),
    "adafactor": optimizer(fs.adafactor(0.1)),
    "whole": optimizer(fs.whole(fs.from_torch(torch.optim.Muon, lr=0.1))),
}
EVERY = pytest.mark.parametrize("name", TABLE)


class Program(NamedTuple):
    """A rank's first state, its batch, its step, and the bytes that the step sends by label."""

    state: fs.TrainState
    batch: Sequence[torch.Tensor]
    step: Callable[..., Any]
    sent: Mapping[str, float] | None

    def train(self, steps=STEPS, step=None, state=None):
        """The last state, and the losses."""
        state, losses = state or self.state, []
        for _ in range(steps):
            state, loss = (step or self.step)(state, *self.batch)
            losses.append(loss)
        return state, losses


def program(name):
    row = TABLE[name]
    params, batch, loss_fn, sent = row.setting()

    def step(state, *batch):
        loss, grads = fs.value_and_grad(loss_fn, reduce=row.reduce)(state.params, *batch)
        return fs.update(row.tx, state, grads), loss

    return Program(fs.TrainState.create(params, row.tx), batch, step, sent)


def in_one_process(row):
    def step(state):
        grads, loss = grad_and_value(row.loss)(state.params)
        return fs.update(row.tx, state, grads), loss

    return Program(fs.TrainState.create(row.full(), row.tx), (), step, None)


@EVERY
@on_ranks(RANKS)
def test_numbers_are_those_of_one_process(name):
    row = TABLE[name]
    state, losses = program(name).train()
    expected, expected_losses = in_one_process(row).train()
    for values, wanted in ((fs.unshard(state.params), expected.params), (losses, expected_losses)):
        # Sums over all tokens, in parts of ranks, which a step hands on to the next.
        rounding = within(wanted, TOKENS, STEPS)["atol"]
        assert_trees_close(values, wanted, rtol=0.0, atol=row.error + rounding)


@EVERY
@on_ranks(RANKS)
def test_a_step_is_pure_and_sends_the_bytes_of_the_formula(name):
    """Besides what the strategy gathers, sums and compares."""
    state, batch, step, expected = program(name)
    with unchanged((state, batch)):
        with fs.comm.record() as record:
            first = step(state, *batch)
        assert_alike(first, step(state, *batch))
    sent = Counter()
    for entry in record:
        if not entry.scalar and entry.sent and entry.label not in ("gather", "scatter", "objective"):
            sent[str(entry.label)] += entry.sent
    assert expected is None or sent == {label: count for label, count in expected.items() if count}


FAST = ("moe", "quantize", "lamb", "lars", "adafactor", "whole")
JITTED = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in TABLE]


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", JITTED)
@on_ranks(RANKS)
def test_jit_has_the_same_bits(name):
    row, eager = TABLE[name], program(name)
    if row.refused is not None:
        with refused(row.refused):
            fs.jit(eager.step)(eager.state, *eager.batch)
        return
    with fs.comm.record() as of_eager:
        expected = eager.train()
    with fs.comm.record() as of_graph:
        assert_alike(eager.train(step=fs.jit(eager.step)), expected)
    assert collectives(of_graph) == collectives(of_eager)


@EVERY
@on_ranks(RANKS)
def test_training_goes_on_through_a_restart(name, tmp_path):
    whole = program(name)
    expected, losses = whole.train()
    middle, _ = whole.train(1)
    fs.checkpoint.save(tmp_path, middle, 1)
    restored = fs.checkpoint.restore(tmp_path, zeros_like(middle))
    assert_alike(whole.train(STEPS - 1, state=restored), (expected, losses[1:]))
