"""Wrong steps of methods of training: contrast, distillation, adversaries, adaptive rates, and grids of ranks."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from tests.ext.check.mistakes import SHARD_TP, mistake
from tests.ext.check.programs import HYBRID, LAYER, NETWORK, TX, forward, from_loss, from_step, loss_fn, parallel


def loss_of_full(full, x, y):
    return F.cross_entropy(forward(full, x), y)


def loss_and_local(params, x, y):
    loss = loss_fn(params, x, y)
    return loss, loss.detach()


def loss_and_right(params, x, y):
    """The loss, and which rows are right."""
    logits = forward(fs.gather(params), x)
    return F.cross_entropy(logits, y), (logits.argmax(-1) == y).float()


@mistake("missing sum", make=from_step(NETWORK))
def trust_ratio_of_shards(state, x, y, axis):
    """LARS by hand."""
    loss, grads = fs.value_and_grad(loss_fn)(state.params, x, y)

    def move(p, g):
        squares = torch.stack([p.local.square().sum(), g.local.square().sum()])
        # right: squares = fs.psum_invariant(squares, axis)
        ratio = (squares[0] / squares[1]).sqrt()  # <- here
        return fs.tree_map(lambda p, g: p - 0.1 * ratio * g, p, g)  # <- here

    params = {name: move(p, grads[name]) for name, p in state.params.items()}
    return state._replace(params=params), loss


@mistake("missing sum", make=from_step(NETWORK))
def threshold_of_shards(state, x, y, axis):
    """Gradients below the mean magnitude of a rank's part of their leaf are dropped."""
    loss, grads = fs.value_and_grad(loss_fn)(state.params, x, y)

    def drop(g):
        total = g.local.abs().sum()
        # right: total = fs.psum_invariant(total, axis)
        mean = total / math.prod(g.spec.shape)
        return fs.tree_map(lambda g: torch.where(g.abs() < mean, 0.0, g), g)  # <- here

    grads = {name: drop(g) for name, g in grads.items()}
    return fs.update(TX, state, grads), loss


@mistake("buffer differs", make=from_step(NETWORK, buffers={"best": torch.tensor(9.0)}))
def best_loss_of_each_rank(state, x, y):
    """As early stopping keeps it."""
    (loss, local), grads = fs.value_and_grad(loss_and_local, has_aux=True)(state.params, x, y)
    # right: local = loss
    best = torch.minimum(state.buffers["best"], local)  # <- here
    return fs.update(TX, state, grads)._replace(buffers={"best": best}), loss


@mistake("missing sum", make=from_step(NETWORK))
def rate_by_the_loss_of_each_rank(state, x, y):
    (loss, local), grads = fs.value_and_grad(loss_and_local, has_aux=True)(state.params, x, y)
    # right: local = loss
    rate = 0.1 / (1 + local)  # <- here
    params = fs.tree_map(lambda p, g: p - rate * g, state.params, grads)  # <- here
    return state._replace(params=params), loss


@mistake("rank's own number", make=from_step(NETWORK, fs.ddp, buffers=lambda mesh: fs.shard(NETWORK, fs.ddp(mesh))))
def teacher_that_forgets_by_the_rank(state, x, y, axis):
    """The decay of the average that a teacher is depends on the rank."""
    loss, grads = fs.value_and_grad(loss_fn)(state.params, x, y)
    after = fs.update(TX, state, grads)
    decay = 0.9 + 0.01 * fs.axis_index(axis)  # <- here; right: decay = 0.9
    teacher = fs.tree_map(lambda t, p: decay * t + (1 - decay) * p, state.buffers, after.params)  # <- here
    return after._replace(buffers=teacher), loss


@mistake("same random numbers", make=from_step(NETWORK, key=0))
def penalty_at_equal_points(state, real, fake, axis):
    """WGAN-GP, whose points between real and fake rows all ranks draw by one key."""

    class Between(nn.Module):
        def forward(self, real, fake):
            share = torch.rand(len(real), 1)
            return share * real + (1 - share) * fake  # <- here

    key = fs.fold_in(state.key, state.step)
    # right: key = fs.fold_in(key, axis)

    def penalty(params):
        full = fs.gather(params)
        points = fs.functionalize(Between()).apply({}, real, fake, key=key).requires_grad_()
        (slopes,) = torch.autograd.grad(forward(full, points).sum(), points, create_graph=True)
        return (slopes.norm(dim=1) - 1).square().mean()

    loss, grads = fs.value_and_grad(penalty)(state.params)
    return fs.update(TX, state, grads), loss


@mistake("unused batch", make=from_step(NETWORK))  # <- here
def critic_that_sees_no_fakes(state, real, fake):
    def loss_of(params):
        full = fs.gather(params)
        rows = real, real  # <- here; right: rows = real, fake
        return F.softplus(-forward(full, rows[0])).mean() + F.softplus(forward(full, rows[1])).mean()

    loss, grads = fs.value_and_grad(loss_of)(state.params)
    return fs.update(TX, state, grads), loss


@mistake("local metric", mesh=HYBRID, make=from_step(NETWORK, partial(fs.hsdp, min_shard_elements=0)))
def metric_over_one_of_two_axes(state, x, y, replicate, shard):
    (loss, local), grads = fs.value_and_grad(loss_and_local, has_aux=True)(state.params, x, y)
    perplexity = fs.pmean(local, shard).exp()  # <- here
    # right: perplexity = fs.pmean(fs.pmean(local, shard), replicate).exp()
    return fs.update(TX, state, grads), {"loss": loss, "perplexity": perplexity}


@mistake("missing sum", mesh=HYBRID, make=from_step(NETWORK, partial(fs.ddp, axis=("replicate", "shard"))))
def gradients_over_one_of_two_axes(state, x, y, replicate, shard):
    full = fs.gather(state.params)
    grads, loss = torch.func.grad_and_value(loss_of_full)(full, x, y)
    grads = fs.tree_map(lambda g: fs.psum_invariant(g, shard) / shard.size, grads)
    # right: grads = fs.tree_map(lambda g: fs.psum_invariant(g, replicate) / replicate.size, grads)
    params = {name: fs.Sharded(p.local - 0.1 * grads[name], p.spec) for name, p in state.params.items()}  # <- here
    return state._replace(params=params), fs.objective(loss, like=state.params)


@mistake("doubled sum", make=from_step(NETWORK))
def norm_that_is_summed_again(state, x, y, axis):
    loss, grads = fs.value_and_grad(loss_fn)(state.params, x, y)
    square = fs.global_norm(grads).square()
    square = fs.psum_invariant(square, axis)  # <- here; right: pass
    return fs.update(TX, state, grads), {"loss": loss, "norm": square.sqrt()}


@mistake("number of ranks", make=from_step(NETWORK))
def right_rows_over_the_rows_of_one_rank(state, x, y, axis):
    (loss, is_right), grads = fs.value_and_grad(loss_and_right, has_aux=True)(state.params, x, y)
    count = fs.psum(is_right.sum(), axis)  # <- here
    rows = len(x)  # right: rows = len(x) * axis.size
    return fs.update(TX, state, grads), {"loss": loss, "accuracy": count / rows}  # <- here


@mistake("local metric", make=from_step(NETWORK))
def sum_of_all_over_the_weights_of_one_rank(state, x, y, weights, axis):
    (loss, is_right), grads = fs.value_and_grad(loss_and_right, has_aux=True)(state.params, x, y)
    weight = weights.sum()
    # right: weight = fs.psum(weight, axis)
    accuracy = fs.psum((is_right * weights).sum(), axis) / weight  # <- here
    return fs.update(TX, state, grads), {"loss": loss, "accuracy": accuracy}  # <- here


@mistake(
    "mean of means",
    missed="The count of a weighted loss may be any weight of a rank, such as 1.",
    make=from_loss(NETWORK, reduce="weighted"),
)
def mean_in_a_weighted_loss(params, x, y, mask):
    """Which is divided by the count of all ranks again."""
    losses = mask * F.cross_entropy(forward(fs.gather(params), x), y, reduction="none")
    return losses.mean(), mask.sum()  # <- here; right: return losses.sum(), mask.sum()


@mistake("missing sum", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def softmax_of_the_classes_of_each_rank(params, x, shard, tp):
    full = fs.gather(params)
    scores = (fs.pcast(x * full["norm"], tp, to="varying") @ full["up"].T).exp()
    total = scores.sum(-1, keepdim=True)
    # right: total = fs.psum(total, tp)
    mixed = fs.psum_invariant((scores / total) @ full["down"].T, tp)  # <- here
    return (mixed @ full["head"].T).square().mean()


@mistake(
    only_a_run="Which row of another rank belongs to one of this is known to the data alone.",
    word="positions",
    make=from_loss({"w": NETWORK["w"]}),
)
def labels_without_the_rank(params, x, axis):
    """Each rank compares its rows with those of all, and takes those of the first rank for its own."""
    rows = F.normalize(x @ fs.gather(params)["w"], dim=-1)
    every = fs.all_gather(rows, axis)
    labels = torch.arange(len(rows))  # <- here
    return F.cross_entropy(rows @ every.T, labels)
