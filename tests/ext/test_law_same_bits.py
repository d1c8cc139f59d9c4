"""Law: training with sums="tree" has the same bits on any number of ranks, of threads or of processes."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard.testing import assert_same_bits

VOCABULARY, WIDTH, CONTEXT, SEQUENCES = 61, 36, 12, 2
# Of which nothing divides the width, or all that 36 = 4 * 9 has.
STRATEGIES = {
    "ddp": fs.ddp,
    "zero1": fs.zero1,
    "zero2": fs.zero2,
    "zero3": fs.zero3,
    "hsdp": lambda mesh, **options: fs.hsdp(
        fs.init_mesh({"replicate": 1 + (mesh.size() > 2), "shard": -1}, device="cpu"), **options
    ),
}
PRECISIONS = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.float32, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
    # The sums over microbatches are wider than the shards.
    "bfloat16 shards": (torch.bfloat16, {"reduce_dtype": torch.float32}),
    "float64": (torch.float64, {}),
}


class Block(nn.Module):
    """A transformer's layer, whose masks are drawn from a key: simulated ranks share torch's own generator."""

    def __init__(self, drawn):
        super().__init__()
        self.drawn, self.dropout = drawn, nn.Dropout(0.1)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, key):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropped(self.proj(attended), key)
        return x + self.dropped(self.down(F.gelu(self.up(self.norm2(x)))), key + 1)

    def dropped(self, x, key):
        if self.drawn:
            return self.dropout(x)
        chances = torch.rand(x.shape, generator=torch.Generator().manual_seed(key))
        return x * (chances > 0.1) / 0.9


class Language(nn.Module):
    """Predicts the next token, with dropout, and an embedding that is the head too."""

    def __init__(self, drawn):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(drawn) for _ in range(2))

    def forward(self, tokens, number):
        h = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            h = block(h, 10 * number + 2 * i)
        return self.norm(h) @ self.embedding.weight.T


def batch(step, microbatches):
    """The job's microbatches of a step, and how many tokens of each sequence count."""
    ids = fs.sample_ids(step, 3, samples=101, batch=microbatches * SEQUENCES)
    steps = torch.arange(CONTEXT + 1)
    tokens = (ids[:, None] * 7 + steps * (1 + ids[:, None] % 5)) % VOCABULARY
    parts = zip(tokens.unflatten(0, (microbatches, -1)), ids.unflatten(0, (microbatches, -1)), strict=True)
    return [(i, part, 1 + numbers % CONTEXT) for i, (part, numbers) in enumerate(parts)]


def make_step(tx, module, microbatches):
    model = fs.functionalize(module, units=Block)

    def step(state, mine):
        key = fs.fold_in(state.key, state.step)

        def loss_fn(params, microbatch):
            index, tokens, lengths = microbatch
            logits = model.apply(params, tokens[:, :-1], index, key=fs.fold_in(key, index)).float()
            losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
            counted = torch.arange(CONTEXT) < lengths[:, None]
            return (losses * counted).sum(), counted.sum()

        options = dict(reduce="weighted", sums="tree")
        run = fs.accumulate(loss_fn, **options)
        loss, grads = run(state.params, mine)
        return fs.update(tx, state, grads), loss

    return step, lambda strategy: fs.TrainState.create(model.init(strategy), tx, key=0)


def check(strategy, precision, microbatches, worlds, steps, drawn=False, jitted=False):
    dtype, options = PRECISIONS[precision]
    options = options if strategy in ("zero3", "hsdp") else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Language(drawn).to(dtype)
    # Every gradient is longer than that.
    tx = fs.chain(fs.clip_by_global_norm(1e-2, sums="tree"), fs.adamw(3e-3, weight_decay=0.1))
    step, make = make_step(tx, module, microbatches)
    strategies = partial(STRATEGIES[strategy], min_shard_elements=50) if strategy != "ddp" else fs.ddp
    assert_same_bits(
        fs.jit(step) if jitted else step,
        lambda mesh: make(strategies(mesh, **options)),
        [batch(number, microbatches) for number in range(steps)],
        worlds,
        timeout=600,
    )


@pytest.mark.parametrize("microbatches", (8, pytest.param(16, marks=pytest.mark.slow)))
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.rows(2)
def test_training_has_one_answer(strategy, precision, microbatches):
    check(strategy, precision, microbatches, (1, 2, 4, 8), steps=2)


@pytest.mark.parametrize("processes", ((2,), pytest.param((2, 4), marks=pytest.mark.slow)), ids=str)
@pytest.mark.parametrize("strategy", ("zero3", "hsdp"))
@pytest.mark.parametrize("jitted", (False, pytest.param(True, marks=pytest.mark.slow)), ids=("eager", "jitted"))
@pytest.mark.rows(1)
def test_processes_have_it_too(strategy, jitted, processes, workers):
    """With masks of nn.Dropout, which torch's own generator draws after a key."""
    # What was jitted does not travel to processes once it has run in this one.
    worlds = (workers(1) if jitted else 1, *map(workers, processes))
    check(strategy, "float32", 8, worlds, steps=4, drawn=True, jitted=jitted)
