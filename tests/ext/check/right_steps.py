"""Steps without a mistake, in which nothing may be reported: strategies, wrappers, spellings, collectives, methods.

More are those that mend the planted mistakes, and those of examples and of the laws of extensions (`test_sweep.py`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from tests.ext.check.programs import (
    BATCH,
    CLASSES,
    HIDDEN,
    HYBRID,
    NETWORK,
    ONES,
    TX,
    WIDTH,
    X,
    Y,
    forward,
    from_loss,
    from_step,
    loss_fn,
    split,
    state_of,
    train,
)

SHARD: Mapping[str, int] = {"shard": 8}


class Right(NamedTuple):
    """A step without a mistake."""

    make: Callable[[Any], tuple[Any, ...]]  # makes the step and its arguments, of a mesh of one rank
    mesh: Mapping[str, int] = SHARD  # ranks on each axis


def sum_and_count(params, x, y, mask):
    losses = F.cross_entropy(forward(fs.gather(params), x), y, reduction="none")
    return (losses * mask).sum(), mask.sum()


def mixed_precision(mesh):
    layout = fs.compose(fs.cast(gather=torch.bfloat16), fs.fully_shard(mesh["shard"]), fs.cast(scatter=torch.float32))
    return fs.zero3(mesh, layout=layout)


def masked(mesh):
    return fs.masked(fs.fully_shard(mesh["shard"]), "w", otherwise=fs.replicate(mesh["shard"]))


def large(mesh):
    """ZeRO-3 that keeps the bias whole."""
    return fs.zero3(mesh, min_shard_elements=9)


def zero2(mesh):
    return fs.zero2(mesh, min_shard_elements=0)


STRATEGIES = {
    "ddp": (fs.ddp, SHARD),
    "zero1": (fs.zero1, SHARD),
    "zero2": (fs.zero2, SHARD),
    "zero2 of every leaf": (zero2, SHARD),
    "zero3": (fs.zero3, SHARD),
    "zero3 of every leaf": (split, SHARD),
    "zero3 that keeps": (partial(fs.zero3, min_shard_elements=0, regather=False), SHARD),
    "last dim": (lambda mesh: fs.fully_shard(mesh["shard"], dim=-1), SHARD),
    "hsdp": (partial(fs.hsdp, min_shard_elements=0), HYBRID),
    "ddp over two axes": (partial(fs.ddp, axis=("replicate", "shard")), HYBRID),
    "one dim over two axes": (partial(fs.zero3, axis=("shard", "replicate"), min_shard_elements=0), HYBRID),
    "two dims": (
        lambda mesh: fs.compose(fs.fully_shard(mesh["replicate"]), fs.fully_shard(mesh["shard"], dim=-1)),
        HYBRID,
    ),
    "mixed precision": (mixed_precision, SHARD),
    "in another dtype": (partial(fs.zero3, param_dtype=torch.bfloat16, reduce_dtype=torch.float32), SHARD),
    "masked": (masked, SHARD),
}


CLIPPED = fs.chain(fs.clip_by_global_norm(1.0), fs.adamw(1e-3, weight_decay=0.1))
OPTIMIZERS = {
    "sgd with momentum": fs.sgd(0.1, momentum=0.9),
    "adam of torch": fs.from_torch(torch.optim.Adam, lr=1e-3),
    "clipped": CLIPPED,
    "clipped leaf by leaf": fs.chain(fs.clip_by_norm(1.0), fs.sgd(0.1)),
    "ema": fs.ema(fs.adamw(1e-3), decay=0.99),
    "skip_nonfinite": fs.skip_nonfinite(CLIPPED),
    "freeze": fs.freeze(fs.sgd(0.1), "b"),
    "partition": fs.partition({"b": fs.sgd(0.1), "*": fs.adamw(1e-3)}),
    "schedule": fs.sgd(fs.schedules.warmup_cosine(0.0, 0.1, warmup_steps=2, decay_steps=9)),
}


SCALED = fs.dynamic_loss_scale(fs.sgd(0.1))


@from_step(NETWORK, zero2, tx=SCALED)
def scaled(state, x, y):
    """The loss is scaled by what the optimizer's state says."""
    scale = state.opt_state.scale
    loss, grads = fs.value_and_grad(lambda p: scale * loss_fn(p, x, y))(state.params)
    return fs.update(SCALED, state, grads), loss / scale


@from_step(NETWORK, large)
def four_verbs(state, x, y):
    full = fs.gather(state.params)
    grads, loss = torch.func.grad_and_value(loss_fn)(full, x, y)
    grads = fs.scatter_grads(grads, like=state.params, reduce="mean")
    return fs.update(TX, state, grads), fs.objective(loss, like=state.params)


def loss_of_microbatch(params, microbatch):
    return loss_fn(params, *microbatch)


def accumulated(**options):
    """Two microbatches, whose gradients are added up."""
    batch = {"microbatch": [(X, Y), (X + 1, Y)]}
    return from_loss(NETWORK, zero2, tx=CLIPPED, grad=fs.accumulate, batch=batch, **options)(loss_of_microbatch)


def jitted(mesh):
    step = fs.jit(train(loss_fn), donate_argnums=0)
    return step, state_of(NETWORK, split(mesh)), X, Y


class Block(nn.Module):
    """A layer with dropout."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(x))))


@from_loss(
    {"a": torch.ones(WIDTH, 2), "b": torch.ones(2, CLASSES)},
    batch={"base": lambda mesh: fs.shard(torch.ones(WIDTH, CLASSES), split(mesh))},
)
def merged(params, base, x, y):
    """LoRA: rows of a leaf that is not trained and of an update are added on each rank, before they are gathered."""
    b = fs.gather(params["b"])
    sums = fs.Sharded(base.local + params["a"].local @ b, base.spec)
    return F.cross_entropy(x @ fs.gather(sums), y)


@from_loss(NETWORK, reduce="sum")
def summed_penalty(params, x, y):
    """Each rank adds the penalty of its shards to a sum over ranks, which has each element once."""
    return loss_fn(params, x, y) / 8 + 0.1 * params["w"].local.square().sum()


@from_step(NETWORK, batch={"noise": lambda mesh: fs.shard(NETWORK, split(mesh))})
def private(state, x, y, noise):
    """DP-SGD as in examples/dp_sgd.py, of samples and noise that the batch has."""

    def gradient(full, x, y):
        grads = torch.func.grad(lambda p: loss_fn(p, x[None], y[None]))(full)
        norm = torch.stack([leaf.square().sum() for leaf in grads.values()]).sum().sqrt()
        return fs.tree_map(lambda leaf: leaf * (1.0 / norm).clamp(max=1), grads)

    rows = torch.func.vmap(gradient, in_dims=(None, 0, 0))(fs.gather(state.params), x, y)
    sums = fs.scatter_grads(fs.tree_map(lambda leaf: leaf.sum(0), rows), like=state.params, reduce="sum")
    return fs.update(TX, state, fs.tree_map(lambda g, n: (g + 2.0 * n) / 100, sums, noise))


def members_with_counts(mesh):
    """An ensemble whose optimizer state is an argument of its own, with a count of updates for each member."""
    tx = fs.adam(0.1)

    def of_one(params, opt_state, x, y):
        _, grads = fs.value_and_grad(loss_fn)(params, x, y)
        return tx.update(grads, opt_state, params)

    params = fs.shard(NETWORK, split(mesh))
    stacked = fs.tree_map(lambda leaf: torch.stack([leaf, leaf]), params)
    opt_state = torch.func.vmap(tx.init)(stacked)
    return torch.func.vmap(of_one), stacked, opt_state, X.expand(2, -1, -1), Y.expand(2, -1)


@from_loss(
    NETWORK,
    fs.zero3,
    tx=CLIPPED,
    grad=fs.accumulate,
    reduce="weighted",
    batch={"microbatch": [(X, Y, ONES), (X, Y, torch.zeros(BATCH))]},
)
def unequal_tokens(params, microbatch):
    """Microbatches of unequal numbers of tokens, as in examples/unequal_tokens.py."""
    return sum_and_count(params, *microbatch)


def split_module(mesh):
    """A module that tensor_parallel splits, which holds the axis of the mesh that the step is checked on."""
    module = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def cut(axis):
        return fs.tensor_parallel(module, axis, {"0": "column", "2": "row"})

    def loss_of_split(params, x, tp):
        return fs.functionalize(cut(tp)[0]).apply(params, x).square().mean()

    parallel, columns_and_rows = cut(fs.axis_of(mesh["tp"]))
    strategy = fs.compose(split(mesh), columns_and_rows)
    state = fs.TrainState.create(fs.functionalize(parallel).init(strategy, seed=0), TX)
    return train(loss_of_split), state, X, fs.axis_of(mesh["tp"])


MODEL = fs.functionalize(nn.Sequential(Block(), nn.Linear(WIDTH, CLASSES)))


@from_step(MODEL, key=0, batch={"microbatches": [(torch.tensor(i), (X, Y)) for i in range(2)]})
def keys_by_index(state, microbatches):
    """Dropout whose key has the number of the microbatch in the job, which ranks get with their batches."""
    key = fs.fold_in(state.key, state.step)

    def loss_of_one(params, microbatch):
        index, (x, y) = microbatch
        return F.cross_entropy(MODEL.apply(params, x, key=fs.fold_in(key, index)), y)

    loss, grads = fs.accumulate(loss_of_one)(state.params, microbatches)
    return fs.update(TX, state, grads), loss


@from_loss(NETWORK, fs.zero3)
def smoothed_labels(params, x, y):
    """Torch divides a part of this loss by the count of labels that it does not ignore."""
    return F.cross_entropy(x @ fs.gather(params)["w"], y, label_smoothing=0.1)


@from_step(NETWORK, fs.zero3)
def logged_term(state, x, y, axis):
    """The loss has a Dice coefficient of each rank, whose mean over ranks is a part of it."""

    def loss_and_dice(params):
        full = fs.gather(params)
        hits, labels = (x @ full["w"]).sigmoid(), F.one_hot(y, HIDDEN)
        dice = 2 * (hits * labels).sum() / (hits.sum() + labels.sum())
        return 1 - dice, dice.detach()

    (loss, dice), grads = fs.value_and_grad(loss_and_dice, has_aux=True)(state.params)
    return fs.update(TX, state, grads), {"loss": loss, "dice": fs.pmean(dice, axis)}


@from_step(NETWORK, fs.zero3)
def means_weighted_again(state, x, y, mask, axis):
    """Means over the counts of ranks, which are multiplied by these."""

    def weighted_loss(params):
        total, count = sum_and_count(params, x, y, mask)
        mean = total / count
        return mean * (count / fs.pmean(count, axis)), mean.detach()

    (loss, mean), grads = fs.value_and_grad(weighted_loss, has_aux=True)(state.params)
    count = mask.sum()
    again = fs.pmean(mean * count, axis) / fs.pmean(count, axis)
    return fs.update(TX, state, grads), {"loss": loss, "again": again}


@from_step(
    {"a": NETWORK["w"], "b": NETWORK["w"], "scale": torch.tensor(2.0)},
    partial(fs.zero3, min_shard_elements=2),
    batch={"images": X, "texts": X + 1},
)
def clip(state, images, texts, axis):
    """CLIP: two towers, a temperature that is learned, rows of all ranks, both ways."""

    def loss_of(params):
        full = fs.gather(params)
        a = F.normalize(images @ full["a"], dim=-1)
        b = F.normalize(texts @ full["b"], dim=-1)
        every_a, every_b = fs.all_gather(a, axis), fs.all_gather(b, axis)
        scale = full["scale"].exp()
        labels = torch.arange(len(a)) + fs.axis_index(axis) * len(a)
        return (F.cross_entropy(scale * a @ every_b.T, labels) + F.cross_entropy(scale * b @ every_a.T, labels)) / 2

    loss, grads = fs.value_and_grad(loss_of)(state.params)
    params = fs.update(TX, state, grads)
    return params, {"loss": loss, "scale": fs.gather(params.params)["scale"].exp()}


@from_loss({"w": NETWORK["w"]})
def whole_batch(params, x, axis):
    """Each rank computes the loss of the rows of all ranks."""
    rows = fs.all_gather(F.normalize(x @ fs.gather(params)["w"], dim=-1), axis)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def adversarial(mesh):
    """GAN: two networks, two optimizers, and a penalty at points that each rank draws for itself."""
    of_generator, of_critic = fs.adamw(1e-4), fs.chain(fs.clip_by_global_norm(1.0), fs.adamw(4e-4))

    def step(state, real, noise, axis):
        generator, critic = state
        key = fs.fold_in(fs.fold_in(critic.key, critic.step), axis)

        def make(full):
            return torch.tanh(noise @ full["w"])

        def loss_of_critic(params):
            full = fs.gather(params)
            fake = make(fs.gather(generator.params)).detach()
            share = (fs.fold_in(key, torch.arange(len(real))) & 255).float()[:, None] / 255
            points = share * real + (1 - share) * fake
            points = points.requires_grad_()
            (slopes,) = torch.autograd.grad(forward(full, points).sum(), points, create_graph=True)
            penalty = (slopes.norm(dim=1) - 1).square().mean()
            return forward(full, fake).mean() - forward(full, real).mean() + 10 * penalty

        loss, grads = fs.value_and_grad(loss_of_critic)(critic.params)
        critic = fs.update(of_critic, critic, grads)

        def loss_of_generator(params):
            return -forward(fs.gather(critic.params), make(fs.gather(params))).mean()

        other_loss, grads = fs.value_and_grad(loss_of_generator)(generator.params)
        generator = fs.update(of_generator, generator, grads)
        return (generator, critic), {"critic": loss, "generator": other_loss}

    generator = fs.TrainState.create(fs.shard({"w": torch.ones(WIDTH, WIDTH)}, split(mesh)), of_generator)
    critic = fs.TrainState.create(fs.shard(NETWORK, split(mesh)), of_critic, key=0)
    return step, (generator, critic), X, X + 1, fs.axis_of(mesh)


@from_step(
    NETWORK,
    partial(fs.hsdp, min_shard_elements=0),
    buffers={"mean": torch.zeros(HIDDEN), "variance": torch.ones(HIDDEN)},
)
def normalized_over_two_axes(state, x, y, replicate, shard):
    """BatchNorm of the rows of all ranks of a grid, by sums and counts."""

    def total(value):
        return fs.psum(fs.psum(value, shard), replicate)

    def loss_of(params):
        full = fs.gather(params)
        out = x @ full["w"]
        count = total(torch.tensor(float(len(x))))
        mean = total(out.sum(0)) / count
        variance = total(out.square().sum(0)) / count - mean.square()
        out = (out - mean) * (variance + 1e-5).rsqrt() + full["b"]
        return F.cross_entropy(out @ full["head"], y), (mean.detach(), variance.detach())

    (loss, (mean, variance)), grads = fs.value_and_grad(loss_of, has_aux=True)(state.params)
    buffers = {
        "mean": 0.9 * state.buffers["mean"] + 0.1 * mean,
        "variance": 0.9 * state.buffers["variance"] + 0.1 * variance,
    }
    return fs.update(TX, state, grads)._replace(buffers=buffers), loss


@from_step(
    {"w": NETWORK["w"]},
    buffers={"counts": torch.ones(3), "totals": torch.ones(3, HIDDEN), "codes": torch.ones(3, HIDDEN)},
)
def codebook(state, x, axis):
    """VQ-VAE, whose codebook is an average over the rows of all ranks."""
    codes = state.buffers["codes"]

    def loss_of(params):
        rows = x @ fs.gather(params)["w"]
        number = torch.cdist(rows, codes).argmin(-1)
        nearest = codes[number]
        through = rows + (nearest - rows).detach()
        return (through.square().mean() + 0.25 * (rows - nearest).square().mean()), (rows.detach(), number)

    (loss, (rows, number)), grads = fs.value_and_grad(loss_of, has_aux=True)(state.params)
    chosen = F.one_hot(number, len(codes)).float()
    counts = fs.psum(chosen.sum(0), axis)
    sums = fs.psum(chosen.T @ rows, axis)
    counts = 0.99 * state.buffers["counts"] + 0.01 * counts
    totals = 0.99 * state.buffers["totals"] + 0.01 * sums
    buffers = {"counts": counts, "totals": totals, "codes": totals / (counts[:, None] + 1e-5)}
    return fs.update(TX, state, grads)._replace(buffers=buffers), {"loss": loss, "used": (counts > 0.1).sum()}


@from_step(
    {name: leaf.expand(8, *leaf.shape) for name, leaf in NETWORK.items()},
    lambda mesh: fs.zero3(mesh, layout=fs.own_dim(mesh["shard"])),
)
def own_members(state, x, y, axis):
    """Each rank trains a member of its own, and reports the mean of the losses of all."""

    def loss_of(params):
        own = {name: stacked[0] for name, stacked in fs.gather(params).items()}
        return F.cross_entropy(forward(own, x), y)

    loss, grads = fs.value_and_grad(loss_of, reduce="sum")(state.params)
    return fs.update(TX, state, grads), loss / axis.size


PROGRAMS = (
    *(scaled, four_verbs, jitted, merged, private, unequal_tokens, members_with_counts, summed_penalty),
    *(keys_by_index, smoothed_labels, logged_term, means_weighted_again),
    *(clip, whole_batch, adversarial, codebook, own_members),
)
TABLE: Mapping[str, Right] = {
    **{name: Right(from_loss(NETWORK, strategy)(loss_fn), mesh) for name, (strategy, mesh) in STRATEGIES.items()},
    **{name: Right(from_loss(NETWORK, large, tx=tx)(loss_fn)) for name, tx in OPTIMIZERS.items()},
    **{program.__name__.replace("_", " "): Right(program) for program in PROGRAMS},
    "weighted": Right(from_loss(NETWORK, fs.zero3, reduce="weighted")(sum_and_count)),
    "tree sums": Right(from_loss(NETWORK, reduction_order="tree")(loss_fn)),
    "accumulated": Right(accumulated()),
    "accumulated in a tree": Right(accumulated(reduction_order="tree")),
    "module that tensor_parallel splits": Right(split_module, {"shard": 4, "tp": 2}),
    "normalized over two axes": Right(normalized_over_two_axes, HYBRID),
}
