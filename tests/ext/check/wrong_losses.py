"""Losses that are wrong as users make them: in their counts, in their sums, and in what ranks of an axis share."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from tests.ext.check.mistakes import SHARD_TP, mistake
from tests.ext.check.programs import CLASSES, HIDDEN, LAYER, TX, WIDTH, from_loss, from_step, parallel

HEAD = {"w": torch.ones(WIDTH, CLASSES)}
DROPOUT = fs.functionalize(nn.Dropout(0.5))
MODEL = fs.functionalize(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Dropout(0.1), nn.Linear(HIDDEN, 1)))


def over_three_axes(mesh):
    return fs.compose(fs.fully_shard(mesh["shard"]), fs.split_dim(mesh["cp"], dim=1), fs.split_dim(mesh["tp"], dim=2))


def losses_of(params, x, y):
    """The loss of each row."""
    return F.cross_entropy(x @ fs.gather(params)["w"], y, reduction="none")


@mistake("number of ranks", make=from_loss(HEAD))
def loss_divided_by_ranks(params, x, y, axis):
    """As for a loss of which the framework sums gradients."""
    loss = losses_of(params, x, y).mean()
    return loss / axis.size  # <- here; right: return loss


@mistake("number of ranks", "doubled sum", make=from_loss(HEAD))
def loss_summed_over_ranks(params, x, y, axis):
    """As torch.distributed.all_reduce sums one to print it."""
    loss = losses_of(params, x, y).mean()
    return fs.psum(loss, axis)  # <- here; right: return loss


@mistake("number of ranks", "doubled sum", make=from_step(HEAD))
def tokens_of_all_ranks_and_a_mean(state, x, y, mask, axis):
    def loss_fn(params):
        tokens = fs.psum(mask.sum(), axis)
        return (losses_of(params, x, y) * mask).sum() / tokens  # <- here

    run = fs.value_and_grad(loss_fn)  # <- here; right: run = fs.value_and_grad(loss_fn, reduce="sum")
    loss, grads = run(state.params)
    return fs.update(TX, state, grads), loss


@mistake("mean of means", make=from_step(HEAD))
def mean_over_the_tokens_of_each_rank(state, x, y, mask):
    def loss_fn(params):
        losses = losses_of(params, x, y) * mask
        return losses.sum() / mask.sum()  # <- here; right: return losses.sum(), mask.sum()

    reduce = "mean"  # right: reduce = "weighted"
    loss, grads = fs.value_and_grad(loss_fn, reduce=reduce)(state.params)
    return fs.update(TX, state, grads), loss


@mistake("doubled sum", make=from_loss(HEAD, reduce="weighted"))
def tokens_counted_twice(params, x, y, mask, axis):
    total = (losses_of(params, x, y) * mask).sum()
    return total, fs.psum(mask.sum(), axis)  # <- here; right: return total, mask.sum()


@mistake(
    only_a_run="How many labels are ignored is data, which may be equal on all ranks.",
    word="counts",
    make=from_loss(HEAD),
)
def mean_over_the_labels_that_are_not_ignored(params, x, y):
    logits = x @ fs.gather(params)["w"]
    return F.cross_entropy(logits, y, ignore_index=0)  # <- here


@mistake("refused", "missing sum", "doubled sum", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def sum_over_the_other_axis(params, x, shard, tp):
    full = fs.gather(params)
    x = fs.pcast(x * full["norm"], tp, to="varying")
    hidden = torch.relu(x @ full["up"].T) @ full["down"].T
    x = fs.psum_invariant(hidden, shard)  # <- here; right: x = fs.psum_invariant(hidden, tp)
    return (x @ full["head"].T).square().mean()


@mistake(
    "missing sum", mesh={"shard": 2, "cp": 2, "tp": 2}, make=from_loss({"w": torch.ones(4, 4, 4)}, over_three_axes)
)
def sum_over_one_of_two_axes(params, x, cp, tp):
    part = x.sum() * fs.gather(params)["w"].square().sum()
    total = fs.psum_invariant(part, tp)  # <- here
    # right: total = fs.psum_invariant(total, cp)
    return total.log()  # <- here


@mistake("missing cast", "doubled sum", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def bias_before_the_sum(params, x, tp):
    """Every rank adds the whole bias, and the sum has it as often as there are ranks."""
    full = fs.gather(params)
    x = fs.pcast(x * full["norm"], tp, to="varying")
    hidden = torch.relu(x @ full["up"].T) @ full["down"].T
    part = hidden + full["bias"]  # <- here; right: part = hidden
    x = fs.psum_invariant(part, tp)  # right: x = fs.psum_invariant(part, tp) + full["bias"]
    return (x @ full["head"].T).square().mean()


@mistake("missing sum", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def norm_of_the_features_of_each_rank(params, x, tp):
    """An RMSNorm of features that are split over `tp`."""
    full = fs.gather(params)
    hidden = fs.pcast(x * full["norm"], tp, to="varying") @ full["up"].T
    square = hidden.square().mean(-1, keepdim=True)
    # right: square = fs.psum(square, tp) / tp.size
    hidden = hidden * (square + 1e-6).rsqrt()  # <- here
    x = fs.psum_invariant(hidden @ full["down"].T, tp)
    return (x @ full["head"].T).square().mean()


@mistake("missing sum", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def embedding_of_a_split_vocabulary(params, tokens, tp):
    table = fs.gather(params)["up"]
    local = tokens - fs.axis_index(tp) * len(table)
    is_local = (local >= 0) & (local < len(table))
    rows = table[local.clamp(0, len(table) - 1)] * is_local[..., None]
    x = fs.psum(rows, tp)  # <- here; right: x = fs.psum_invariant(rows, tp)
    return (x * fs.gather(params)["norm"]).square().mean()


@mistake("missing sum", "missing cast", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def features_gathered_as_if_they_agreed(params, x, tp):
    full = fs.gather(params)
    hidden = fs.pcast(x * full["norm"], tp, to="varying") @ full["up"].T
    whole = fs.all_gather(hidden.T, tp)  # <- here; right: whole = fs.all_gather_invariant(hidden.T, tp)
    return whole.square().mean()


@mistake(
    "missing sum",
    "mean of means",
    missed="Most routers balance the experts of each rank, and a run beside DDP has the same numbers.",
    make=from_loss(HEAD),
)
def balance_of_a_router_by_rank(params, x, axis):
    """The product of two means, which are of the rows of a rank."""
    probabilities = (x @ fs.gather(params)["w"]).softmax(-1)
    chosen = F.one_hot(probabilities.argmax(-1), CLASSES).float().mean(0)
    # right: chosen = fs.pmean(chosen, axis)
    balance = (chosen * probabilities.mean(0)).sum()  # <- here
    return probabilities.square().mean() + 0.01 * CLASSES * balance


@mistake("missing sum", make=from_loss(HEAD))
def penalty_of_shards(params, x, y):
    """Each rank has the penalty of its rows, of which the mean is N times too small."""
    penalty = params["w"].local.square().sum()  # right: penalty = fs.gather(params)["w"].square().sum()
    return losses_of(params, x, y).mean() + 0.1 * penalty  # <- here


@mistake("doubled sum", make=from_loss(HEAD))
def center_summed_twice(params, x, axis):
    out = x @ fs.gather(params)["w"]
    total = fs.psum(out.sum(0), axis)
    total = fs.psum(total, axis)  # <- here; right: pass
    return (out - total / (len(x) * axis.size)).square().mean()


@mistake("rank's own number", "missing sum", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def labels_shifted_by_the_rank(params, x, y, tp):
    full = fs.gather(params)
    hidden = torch.relu(fs.pcast(x * full["norm"], tp, to="varying") @ full["up"].T)
    x = fs.psum_invariant(hidden @ full["down"].T, tp)
    y = y.roll(fs.axis_index(tp))  # <- here; right: pass
    return F.cross_entropy(x @ full["head"].T, y)  # <- here


@mistake("missing sum", "rank's own number", mesh=SHARD_TP, make=from_step(LAYER, parallel, key=0))
def noise_that_differs_over_tp(state, x, shard, tp):
    key = fs.fold_in(fs.fold_in(state.key, state.step), shard)
    key = fs.fold_in(key, tp)  # <- here; right: pass

    def loss_fn(params):
        full = fs.gather(params)
        noisy = DROPOUT.apply({}, x * full["norm"], key=key)  # <- here
        hidden = torch.relu(fs.pcast(noisy, tp, to="varying") @ full["up"].T)
        x_of_all = fs.psum_invariant(hidden @ full["down"].T, tp)
        return (x_of_all @ full["head"].T).square().mean()

    loss, grads = fs.value_and_grad(loss_fn)(state.params)
    return fs.update(TX, state, grads), loss


@mistake("same random numbers", make=from_step(MODEL, key=0))
def dropout_without_the_rank(state, x, axis):
    key = fs.fold_in(state.key, state.step)  # <- here
    # right: key = fs.fold_in(key, axis)

    def loss_fn(params):
        return MODEL.apply(params, x, key=key).square().mean()  # <- here

    loss, grads = fs.value_and_grad(loss_fn)(state.params)
    return fs.update(TX, state, grads), loss


@mistake(
    mesh={"shard": 2, "cp": 4},
    only_a_run="Which dim of a batch ranks split is known to the data alone.",
    word="positions",
    make=from_loss(
        {"tokens": torch.ones(CLASSES, WIDTH), "positions": torch.ones(12, WIDTH)},
        lambda mesh: fs.zero3(mesh, axis=("shard", "cp"), min_shard_elements=0),
    ),
)
def positions_without_the_rank(params, tokens):
    """Ranks of `cp` have parts of each sequence, and number them from 0."""
    full = fs.gather(params)
    positions = torch.arange(tokens.shape[1])  # <- here
    x = full["tokens"][tokens] + full["positions"][positions]
    return x.square().mean() / math.sqrt(WIDTH)


@mistake("number of ranks", mesh=SHARD_TP, make=from_loss(LAYER, parallel))
def mean_of_the_parts_of_a_product(params, x, tp):
    full = fs.gather(params)
    x = fs.pcast(x * full["norm"], tp, to="varying")
    part = torch.relu(x @ full["up"].T) @ full["down"].T
    x = fs.psum_invariant(part, tp) / tp.size  # <- here; right: x = fs.psum_invariant(part, tp)
    return (x @ full["head"].T).square().mean()
