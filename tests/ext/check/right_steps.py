"""Steps without a mistake, in which nothing may be reported: strategies, wrappers, spellings and collectives.

More are those that mend the planted mistakes, and those of examples and of the laws of extensions (`test_sweep.py`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from tests.ext.check.programs import CLASSES, HIDDEN, TX, WIDTH, X, Y, state_of, train

FULL = {"w": torch.ones(WIDTH, HIDDEN), "b": torch.ones(HIDDEN), "head": torch.ones(HIDDEN, CLASSES)}
SHARD: Mapping[str, int] = {"shard": 8}
HYBRID: Mapping[str, int] = {"replicate": 2, "shard": 4}


class Right(NamedTuple):
    """A step without a mistake."""

    make: Callable[[Any], tuple[Any, ...]]  # makes the step and its arguments, of a mesh of one rank
    mesh: Mapping[str, int] = SHARD  # ranks on each axis


def loss_fn(params, x, y):
    full = fs.gather(params)
    return F.cross_entropy(torch.tanh(x @ full["w"] + full["b"]) @ full["head"], y)


def sum_and_count(params, x, y, mask):
    full = fs.gather(params)
    losses = F.cross_entropy(torch.tanh(x @ full["w"] + full["b"]) @ full["head"], y, reduction="none")
    return (losses * mask).sum(), mask.sum()


def by_strategy(strategy, mesh):
    return train(loss_fn), state_of(FULL, strategy(mesh)), X, Y


def mixed_precision(mesh):
    layout = fs.compose(fs.cast(gather=torch.bfloat16), fs.fully_shard(mesh["shard"]), fs.cast(scatter=torch.float32))
    return fs.zero3(mesh, layout=layout)


def masked(mesh):
    return fs.masked(fs.fully_shard(mesh["shard"]), "w", otherwise=fs.replicate(mesh["shard"]))


STRATEGIES = {
    "ddp": (fs.ddp, SHARD),
    "zero1": (fs.zero1, SHARD),
    "zero2": (fs.zero2, SHARD),
    "zero2 of every leaf": (partial(fs.zero2, min_shard_elements=0), SHARD),
    "zero3": (fs.zero3, SHARD),
    "zero3 of every leaf": (partial(fs.zero3, min_shard_elements=0), SHARD),
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


def by_optimizer(tx, mesh):
    return train(loss_fn, tx), state_of(FULL, fs.zero3(mesh, min_shard_elements=9), tx), X, Y


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


def scaled(mesh):
    """A loss in float16, scaled by what the optimizer's state says."""
    tx = fs.dynamic_loss_scale(fs.sgd(0.1))

    def step(state, x, y):
        scale = state.opt_state.scale
        loss, grads = fs.value_and_grad(lambda p: scale * loss_fn(p, x, y))(state.params)
        return fs.update(tx, state, grads), loss / scale

    return step, state_of(FULL, fs.zero2(mesh, min_shard_elements=0), tx), X, Y


def weighted(mesh):
    mask = torch.ones(len(Y))
    return train(sum_and_count, reduce="weighted"), state_of(FULL, fs.zero3(mesh)), X, Y, mask


def four_verbs(mesh):
    def step(state, x, y):
        full = fs.gather(state.params)
        grads, loss = torch.func.grad_and_value(loss_fn)(full, x, y)
        grads = fs.scatter_grads(grads, like=state.params, reduce="mean")
        return fs.update(TX, state, grads), fs.objective(loss, like=state.params)

    return step, state_of(FULL, fs.zero3(mesh, min_shard_elements=9)), X, Y


def accumulated(mesh, reduction_order=None):
    step = train(lambda p, xy: loss_fn(p, *xy), CLIPPED, fs.accumulate, reduction_order=reduction_order)
    return step, state_of(FULL, fs.zero2(mesh, min_shard_elements=0), CLIPPED), [(X, Y), (X + 1, Y)]


def tree_sums(mesh):
    step = train(loss_fn, reduction_order="tree")
    return step, state_of(FULL, fs.zero3(mesh, min_shard_elements=0)), X, Y


def jitted(mesh):
    step = fs.jit(train(loss_fn), donate_argnums=0)
    return step, state_of(FULL, fs.zero3(mesh, min_shard_elements=0)), X, Y


class Block(nn.Module):
    """A layer with dropout."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(x))))


def merged(mesh):
    """LoRA: rows of a leaf that is not trained and of an update are added on each rank, before they are gathered."""

    def loss_of_merged(params, base, x, y):
        b = fs.gather(params["b"])
        sums = fs.Sharded(base.local + params["a"].local @ b, base.spec)
        return F.cross_entropy(x @ fs.gather(sums), y)

    strategy = fs.zero3(mesh, min_shard_elements=0)
    state = state_of({"a": torch.ones(WIDTH, 2), "b": torch.ones(2, CLASSES)}, strategy)
    return train(loss_of_merged), state, fs.shard(torch.ones(WIDTH, CLASSES), strategy), X, Y


def summed_penalty(mesh):
    """Each rank adds the penalty of its shards to a sum over ranks, which has each element once."""

    def sum_with_penalty(params, x, y):
        return loss_fn(params, x, y) / 8 + 0.1 * params["w"].local.square().sum()

    return train(sum_with_penalty, reduce="sum"), state_of(FULL, fs.zero3(mesh, min_shard_elements=0)), X, Y


def private(mesh):
    """DP-SGD as in examples/dp_sgd.py, of samples and noise that the batch has."""

    def gradient(full, x, y):
        grads = torch.func.grad(lambda p: loss_fn(p, x[None], y[None]))(full)
        norm = torch.stack([leaf.square().sum() for leaf in grads.values()]).sum().sqrt()
        return fs.tree_map(lambda leaf: leaf * (1.0 / norm).clamp(max=1), grads)

    def step(state, x, y, noise):
        rows = torch.func.vmap(gradient, in_dims=(None, 0, 0))(fs.gather(state.params), x, y)
        sums = fs.scatter_grads(fs.tree_map(lambda leaf: leaf.sum(0), rows), like=state.params, reduce="sum")
        return fs.update(TX, state, fs.tree_map(lambda g, n: (g + 2.0 * n) / 100, sums, noise))

    strategy = fs.zero3(mesh, min_shard_elements=0)
    return step, state_of(FULL, strategy), X, Y, fs.shard(FULL, strategy)


def members_with_counts(mesh):
    """An ensemble whose optimizer state is an argument of its own, with a count of updates for each member."""
    tx = fs.adam(0.1)

    def of_one(params, opt_state, x, y):
        _, grads = fs.value_and_grad(loss_fn)(params, x, y)
        return tx.update(grads, opt_state, params)

    params = fs.shard(FULL, fs.zero3(mesh, min_shard_elements=0))
    stacked = fs.tree_map(lambda leaf: torch.stack([leaf, leaf]), params)
    opt_state = torch.func.vmap(tx.init)(stacked)
    return torch.func.vmap(of_one), stacked, opt_state, X.expand(2, -1, -1), Y.expand(2, -1)


def unequal_tokens(mesh):
    """Microbatches of unequal numbers of tokens, as in examples/unequal_tokens.py."""

    step = train(lambda p, batch: sum_and_count(p, *batch), CLIPPED, fs.accumulate, reduce="weighted")
    batches = [(X, Y, torch.ones(len(Y))), (X, Y, torch.zeros(len(Y)))]
    return step, state_of(FULL, fs.zero3(mesh), CLIPPED), batches


def split_module(mesh):
    """A module that tensor_parallel splits, which holds the axis of the mesh that the step is checked on."""
    module = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def split(axis):
        return fs.tensor_parallel(module, axis, {"0": "column", "2": "row"})

    def loss_of_split(params, x, tp):
        return fs.functionalize(split(tp)[0]).apply(params, x).square().mean()

    parallel, columns_and_rows = split(fs.axis_of(mesh["tp"]))
    strategy = fs.compose(fs.zero3(mesh, min_shard_elements=0), columns_and_rows)
    state = fs.TrainState.create(fs.functionalize(parallel).init(strategy, seed=0), TX)
    return train(loss_of_split), state, X, fs.axis_of(mesh["tp"])


def keys_by_index(mesh):
    """Dropout whose key has the number of the microbatch in the job, which ranks get with their batches."""
    model = fs.functionalize(nn.Sequential(Block(), nn.Linear(WIDTH, CLASSES)))

    def step(state, microbatches):
        key = fs.fold_in(state.key, state.step)

        def loss_of_one(params, microbatch):
            index, (x, y) = microbatch
            return F.cross_entropy(model.apply(params, x, key=fs.fold_in(key, index)), y)

        loss, grads = fs.accumulate(loss_of_one)(state.params, microbatches)
        return fs.update(TX, state, grads), loss

    params = model.init(fs.zero3(mesh, min_shard_elements=0), seed=0)
    return step, fs.TrainState.create(params, TX, key=0), [(torch.tensor(i), (X, Y)) for i in range(2)]


def smoothed_labels(mesh):
    """Torch divides a part of this loss by the count of labels that it does not ignore."""

    def loss_of_smoothed(params, x, y):
        return F.cross_entropy(x @ fs.gather(params)["w"], y, label_smoothing=0.1)

    return train(loss_of_smoothed), state_of(FULL, fs.zero3(mesh)), X, Y


def logged_term(mesh):
    """The loss has a Dice coefficient of each rank, whose mean over ranks is a part of it."""

    def loss_and_dice(params, x, y):
        full = fs.gather(params)
        hits, labels = (x @ full["w"]).sigmoid(), F.one_hot(y, HIDDEN)
        dice = 2 * (hits * labels).sum() / (hits.sum() + labels.sum())
        return 1 - dice, dice.detach()

    def step(state, x, y, axis):
        (loss, dice), grads = fs.value_and_grad(loss_and_dice, has_aux=True)(state.params, x, y)
        return fs.update(TX, state, grads), {"loss": loss, "dice": fs.pmean(dice, axis)}

    return step, state_of(FULL, fs.zero3(mesh)), X, Y, fs.axis_of(mesh)


def means_weighted_again(mesh):
    """Means over the counts of ranks, which are multiplied by these."""

    def step(state, x, y, mask, axis):
        def weighted_loss(params):
            total, count = sum_and_count(params, x, y, mask)
            mean = total / count
            return mean * (count / fs.pmean(count, axis)), mean.detach()

        (loss, mean), grads = fs.value_and_grad(weighted_loss, has_aux=True)(state.params)
        count = mask.sum()
        again = fs.pmean(mean * count, axis) / fs.pmean(count, axis)
        return fs.update(TX, state, grads), {"loss": loss, "again": again}

    return step, state_of(FULL, fs.zero3(mesh)), X, Y, torch.ones(len(Y)), fs.axis_of(mesh)


PROGRAMS = (
    *(scaled, weighted, four_verbs, accumulated, tree_sums, jitted, merged, private, unequal_tokens),
    *(members_with_counts, summed_penalty, keys_by_index, smoothed_labels, logged_term, means_weighted_again),
)
TABLE: Mapping[str, Right] = {
    **{name: Right(partial(by_strategy, strategy), mesh) for name, (strategy, mesh) in STRATEGIES.items()},
    **{name: Right(partial(by_optimizer, tx)) for name, tx in OPTIMIZERS.items()},
    **{program.__name__.replace("_", " "): Right(program) for program in PROGRAMS},
    "module that tensor_parallel splits": Right(split_module, {"shard": 4, "tp": 2}),
    "accumulated in a tree": Right(partial(accumulated, reduction_order="tree")),
}
