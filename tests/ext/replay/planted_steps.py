"""Steps with places for faults: a small GPT in every kind of step, and a pipeline of the same layers.

A comment `# PLACE name` marks the line of a place, which a report has to name.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from tests.ext.replay.inject import plant
from tests.trees import normal

STEPS = ("eager", "jitted", "accumulated", "recomputed", "weighted", "hsdp", "pipeline")
PLACES = ("activation", "gradient", "gathered", "reduced", "optimizer")
BLOCKS, WIDTH, WORDS, CONTEXT, ROWS = 2, 8, 13, 6, 4
# A changed operator changes what it returns by this part.
CHANGE = 1e-3


class Change(NamedTuple):
    """An operator of one version of a step that computes something else."""

    place: str = ""  # one of PLACES, which multiplies by a number in both versions, or "" for none
    index: int = 0  # the number of the block, or of the leaf of the optimizer's state; -1 changes nothing

    def factor(self, place: str, index: int) -> float:
        """What the value of a place is multiplied by."""
        return 1 + CHANGE if (place, index) == self else 1.0


class _OfRank(threading.local):
    """What transforms compute otherwise in the step that this rank runs. Ranks compare transforms, which are equal."""

    change = Change()


OF_RANK = _OfRank()


@contextmanager
def changing(change: Change) -> Iterator[None]:
    """Let transforms compute something else in the block."""
    OF_RANK.change = change
    try:
        yield
    finally:
        OF_RANK.change = Change()


class AtGradient(torch.autograd.Function):
    """The identity, with a place for faults in its backward."""

    @staticmethod
    def forward(ctx, x, index, change):
        ctx.index, ctx.change = index, change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = plant(grad, "gradient", ctx.index)  # PLACE gradient
        if ctx.change.place == "gradient":
            grad = grad * ctx.change.factor("gradient", ctx.index)  # PLACE changed gradient
        return grad, None, None


class Block(nn.Module):
    def __init__(self, index: int, change: Change, is_recomputed: bool) -> None:
        super().__init__()
        self.index, self.change, self.is_recomputed = index, change, is_recomputed
        self.norm, self.attention_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        if self.is_recomputed:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        scores = q @ k.mT / WIDTH**0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.out(scores.masked_fill(future, float("-inf")).softmax(-1) @ v)
        return x + self.down(self.activate(self.up(self.norm(x))))

    def activate(self, x):
        x = AtGradient.apply(x, self.index, self.change)
        changed = self.change == ("activation", self.index)
        x = F.gelu(x, approximate="tanh" if changed else "none")  # PLACE gelu
        return plant(x, "activation", self.index)  # PLACE activation


class GPT(nn.Module):
    def __init__(self, change: Change, is_recomputed: bool) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(index, change, is_recomputed) for index in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = self.embed(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Planted(fs.Wrapped):
    """Does all that another transform does, with places for faults behind its collectives."""

    index: int

    def gather(self, leaves, specs):
        full = list(self.inner.gather(leaves, specs))
        for i, leaf in enumerate(full):
            full[i] = plant(leaf, "gathered", self.index)  # PLACE gathered
            if OF_RANK.change.place == "gathered":
                full[i] = full[i] * OF_RANK.change.factor("gathered", self.index)  # PLACE changed gathered
        return full

    def scatter(self, grads, specs):
        sums = list(self.inner.scatter(grads, specs))
        for i, grad in enumerate(sums):
            sums[i] = plant(grad, "reduced", self.index)  # PLACE reduced
            if OF_RANK.change.place == "reduced":
                sums[i] = sums[i] * OF_RANK.change.factor("reduced", self.index)  # PLACE changed reduced
        return sums


def plant_in_optimizer(inner: fs.Optimizer, change: Change) -> fs.Optimizer:
    """An optimizer with a place for faults at each leaf of its new state."""

    def update(grads, state, params):
        updates, state = inner.update(grads, state, params)
        count = 0

        def visit(leaf):
            nonlocal count
            if not leaf.dim():
                return leaf
            leaf = plant(leaf, "optimizer", count)  # PLACE optimizer
            if change.place == "optimizer":
                leaf = leaf * change.factor("optimizer", count)  # PLACE changed optimizer
            count += 1
            return leaf

        return updates, fs.tree_map(visit, state)

    return fs.Optimizer(inner.init, update)


class Setting(NamedTuple):
    """A step, its state and this rank's batch."""

    step: Callable[..., Any]  # the function of (state, batch)
    plain: Callable[..., Any]  # the same without `fs.jit`
    gradients: Callable[..., Any]  # the function of (params, batch) that returns (loss, gradients)
    state: fs.TrainState
    batch: torch.Tensor
    units: tuple[str, ...]  # the patterns of leaves by the index that their places have


def make(kind: str, change: Change = Change()) -> Setting:  # noqa: B008
    """Make a step of a kind; call it on every rank."""
    return make_pipeline(change) if kind == "pipeline" else make_gpt(kind, change)


def optimizer(change: Change) -> fs.Optimizer:
    return plant_in_optimizer(fs.chain(fs.clip_by_global_norm(1.0), fs.adamw(1e-2)), change)


def layout(transform: fs.ShardTransform, units: tuple[str, ...]) -> fs.ShardTransform:
    """The transform for all leaves, with places that know which unit it is."""
    (*first, _), result = units, Planted(transform, len(units) - 1)
    for index, unit in reversed(list(enumerate(first))):
        result = fs.masked(Planted(transform, index), unit, otherwise=result)
    return result


def draw_apart(params: Any) -> Any:
    """Give each leaf values of its own, also those that are all 0 or 1 at the start."""
    drawn = normal(5)
    return fs.tree_map(lambda leaf: leaf + 0.1 * drawn(*leaf.shape, dtype=leaf.dtype), params)


def make_gpt(kind: str, change: Change) -> Setting:
    if kind == "hsdp":
        half = torch.distributed.get_world_size() // 2
        mesh = fs.init_mesh({"replicate": 2, "shard": half}, device="cpu")
        sharded = fs.hybrid_shard(mesh)
    else:
        mesh = fs.init_mesh({"shard": -1}, device="cpu")
        sharded = fs.fully_shard(mesh["shard"], min_shard_elements=0)
    units = (*(f"blocks.{index}.*" for index in range(BLOCKS)), "*")
    strategy = fs.zero3(mesh, layout=layout(sharded, units), bucket_bytes=0)
    model = fs.functionalize(GPT(change, kind == "recomputed"), units=Block)
    params = draw_apart(model.init(strategy, seed=0))
    tx = optimizer(change)
    state = fs.TrainState.create(params, tx)

    def loss_fn(params, rows):
        logits = model.apply(params, rows[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        if kind == "weighted":
            counted = (rows[:, 1:].flatten() != 0).float()
            return (losses * counted).sum(), counted.sum()
        return losses.mean()

    def gradients(params, rows):
        if kind == "accumulated":
            return fs.accumulate(loss_fn)(params, list(rows.chunk(2)))
        reduce = "weighted" if kind == "weighted" else "mean"
        return fs.value_and_grad(loss_fn, reduce=reduce)(params, rows)

    def step(state, rows):
        with changing(change):
            loss, grads = gradients(state.params, rows)
            return fs.update(tx, state, grads), loss

    jitted = fs.jit(step, donate_argnums=0) if kind == "jitted" else step
    return Setting(jitted, step, gradients, state, draw_batch(torch.distributed.get_rank()), units)


def draw_batch(seed: int) -> torch.Tensor:
    return torch.randint(WORDS, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(seed))


def make_pipeline(change: Change) -> Setting:
    """Two stages of BLOCKS layers each."""
    data = torch.distributed.get_world_size() // 2
    mesh = fs.init_mesh({"shard": data, "pipe": 2}, device="cpu")
    shard, pipe = (fs.axis_of(mesh, name) for name in ("shard", "pipe"))
    units = ("layers.*", "*")
    layers = fs.compose(fs.fully_shard(shard, dim=-1, min_shard_elements=0), fs.split_dim(pipe, dim=0))
    others = fs.fully_shard(shard, min_shard_elements=0)
    owned = fs.masked(Planted(layers, 0), "layers.*", otherwise=Planted(others, 1))
    draw = functools.partial(normal(0), dtype=torch.float32)
    full = {
        "embed": draw(WORDS, WIDTH),
        "layers": {"up": draw(2 * BLOCKS, 2 * WIDTH, WIDTH), "down": draw(2 * BLOCKS, WIDTH, 2 * WIDTH)},
        "head": draw(WORDS, WIDTH),
    }
    params = fs.shard(fs.tree_map(lambda leaf: 0.3 * leaf, full), fs.zero3(mesh, layout=owned, bucket_bytes=0))
    tx = optimizer(change)
    state = fs.TrainState.create(params, tx)

    def first(p, x):
        return p["embed"][x]

    def stage(p, h):
        for index in range(BLOCKS):
            x = F.linear(h, p["layers"]["up"][index])
            x = AtGradient.apply(x, index, change)
            changed = change == ("activation", index)
            x = F.gelu(x, approximate="tanh" if changed else "none")  # PLACE gelu of stage
            x = plant(x, "activation", index)  # PLACE activation of stage
            h = h + F.linear(x, p["layers"]["down"][index])
        return h

    def last(p, h, y):
        return F.cross_entropy(F.linear(h, p["head"]).flatten(0, 1), y.flatten())

    loss_fn = fs.pipeline(stage, pipe, microbatches=2, first=first, last=last)

    def gradients(params, rows):
        return fs.value_and_grad(loss_fn)(params, rows[:, :-1], rows[:, 1:])

    def step(state, rows):
        with changing(change):
            loss, grads = gradients(state.params, rows)
            return fs.update(tx, state, grads), loss

    return Setting(step, step, gradients, state, draw_batch(fs.axis_index(shard)), units)


@functools.cache
def line_of(place: str, kind: str) -> int:
    """The number of the line in this file that a place is marked at."""
    of_stage = kind == "pipeline" and place in ("gelu", "activation")
    mark = f"# PLACE {place}{' of stage' if of_stage else ''}"
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(mark))
