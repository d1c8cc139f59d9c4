"""Law: training with reduction_order="tree" has the same bits on any number of ranks, of threads or of processes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard.testing import assert_same_bits

VOCABULARY, WIDTH, CONTEXT, SEQUENCES = 61, 36, 12, 2
# Of which nothing divides the width, or all that 36 = 4 * 9 has.
STRATEGIES = {
    "ddp": lambda mesh, min_shard_elements: fs.ddp(mesh),
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
}


class Block(nn.Module):
    """A layer with attention, and masks of torch's own generator."""

    def __init__(self, dropout):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.dropout(self.proj(F.gelu(attended)))


def batch(step, microbatches):
    """The job's microbatches of a step, and how many tokens of each sequence count."""
    ids = fs.sample_ids(3, step, dataset_size=101, batch_size=microbatches * SEQUENCES)
    tokens = (ids[:, None] * 7 + torch.arange(CONTEXT + 1) * (1 + ids[:, None] % 5)) % VOCABULARY
    parts = zip(tokens.unflatten(0, (microbatches, -1)), ids.unflatten(0, (microbatches, -1)), strict=True)
    return [(i, part, 1 + numbers % CONTEXT) for i, (part, numbers) in enumerate(parts)]


def check(strategy, precision, microbatches, worlds, steps, dropout=0.0, jitted=False):
    dtype, options = PRECISIONS[precision]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = (Block(dropout) for _ in range(2))
        module = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY, bias=False))
        module[-1].weight = module[0].weight
        model = fs.functionalize(module.to(dtype), units=Block)
    # Every gradient is longer than that.
    tx = fs.chain(fs.clip_by_global_norm(1e-2, reduction_order="tree"), fs.adamw(3e-3, weight_decay=0.1))

    def step(state, mine):
        key = fs.fold_in(state.key, state.step)

        def loss_fn(params, microbatch):
            index, tokens, lengths = microbatch
            logits = model.apply(params, tokens[:, :-1], key=fs.fold_in(key, index)).float()
            losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
            counted = torch.arange(CONTEXT) < lengths[:, None]
            return (losses * counted).sum(), counted.sum()

        run = fs.accumulate(loss_fn, reduce="weighted", reduction_order="tree")
        loss, grads = run(state.params, mine)
        return fs.update(tx, state, grads), loss

    def first_state(mesh):
        casts = options if strategy in ("zero3", "hsdp") else {}
        params = model.init(STRATEGIES[strategy](mesh, min_shard_elements=50, **casts))
        return fs.TrainState.create(params, tx, key=0)

    batches = [batch(number, microbatches) for number in range(steps)]
    assert_same_bits(fs.jit(step) if jitted else step, first_state, batches, worlds, timeout=600)


@pytest.mark.parametrize("microbatches", (8, pytest.param(16, marks=pytest.mark.slow)))
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.rows(2)
def test_training_has_one_answer(strategy, precision, microbatches):
    check(strategy, precision, microbatches, worlds=(1, 2, microbatches // 2), steps=1, dropout=0.1)


@pytest.mark.parametrize("jitted", (False, pytest.param(True, marks=pytest.mark.slow)), ids=("eager", "jitted"))
def test_processes_have_it_too(jitted, workers):
    """With masks of nn.Dropout, which torch's own generator draws after a key."""
    # What was jitted does not travel to processes once it has run in this one.
    worlds = workers(1) if jitted else 1, workers(2)
    check("hsdp", "float32", 8, worlds, steps=2, dropout=0.1, jitted=jitted)
