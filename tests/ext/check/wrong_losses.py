"""Losses that are wrong as users make them: in their counts, in their sums, and in what ranks of an axis share."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from tests.ext.check.mistakes import SHARD_TP, mistake
from tests.ext.check.programs import BATCH, CLASSES, HIDDEN, LAYER, TX, WIDTH, X, Y, parallel, split, state_of, train

HEAD = {"w": torch.ones(WIDTH, CLASSES)}
TOKENS, TIME = torch.zeros(BATCH, 3, dtype=torch.int64), 3
MASK = torch.ones(BATCH)


def losses_of(params, x, y):
    """The loss of each row."""
    return F.cross_entropy(x @ fs.gather(params)["w"], y, reduction="none")


@mistake("number of ranks")
def loss_divided_by_ranks(mesh):
    """As for a loss of which the framework sums gradients."""

    def loss_fn(params, x, y, axis):
        loss = losses_of(params, x, y).mean()
        return loss / axis.size  # <- here; right: return loss

    return train(loss_fn), state_of(HEAD, split(mesh)), X, Y, fs.axis_of(mesh)


@mistake("number of ranks", "doubled sum")
def loss_summed_over_ranks(mesh):
    """As torch.distributed.all_reduce sums one to print it."""

    def loss_fn(params, x, y, axis):
        loss = losses_of(params, x, y).mean()
        return fs.psum(loss, axis)  # <- here; right: return loss

    return train(loss_fn), state_of(HEAD, split(mesh)), X, Y, fs.axis_of(mesh)


@mistake("number of ranks", "doubled sum")
def tokens_of_all_ranks_and_a_mean(mesh):
    def step(state, x, y, mask, axis):
        def loss_fn(params):
            tokens = fs.psum(mask.sum(), axis)
            return (losses_of(params, x, y) * mask).sum() / tokens  # <- here

        run = fs.value_and_grad(loss_fn)  # <- here; right: run = fs.value_and_grad(loss_fn, reduce="sum")
        loss, grads = run(state.params)
        return fs.update(TX, state, grads), loss

    return step, state_of(HEAD, split(mesh)), X, Y, MASK, fs.axis_of(mesh)


@mistake("mean of means")
def mean_over_the_tokens_of_each_rank(mesh):
    def step(state, x, y, mask):
        def loss_fn(params):
            losses = losses_of(params, x, y) * mask
            return losses.sum() / mask.sum()  # <- here; right: return losses.sum(), mask.sum()

        reduce = "mean"  # right: reduce = "weighted"
        loss, grads = fs.value_and_grad(loss_fn, reduce=reduce)(state.params)
        return fs.update(TX, state, grads), loss

    return step, state_of(HEAD, split(mesh)), X, Y, MASK


@mistake("doubled sum")
def tokens_counted_twice(mesh):
    def loss_fn(params, x, y, mask, axis):
        total = (losses_of(params, x, y) * mask).sum()
        return total, fs.psum(mask.sum(), axis)  # <- here; right: return total, mask.sum()

    return train(loss_fn, reduce="weighted"), state_of(HEAD, split(mesh)), X, Y, MASK, fs.axis_of(mesh)


@mistake(only_a_run="How many labels are ignored is data, which may be equal on all ranks.", word="counts")
def mean_over_the_labels_that_are_not_ignored(mesh):
    def loss_fn(params, x, y):
        logits = x @ fs.gather(params)["w"]
        return F.cross_entropy(logits, y, ignore_index=0)  # <- here

    return train(loss_fn), state_of(HEAD, split(mesh)), X, Y


@mistake("refused", "missing sum", "doubled sum", mesh=SHARD_TP)
def sum_over_the_other_axis(mesh):
    def loss_fn(params, x, shard, tp):
        full = fs.gather(params)
        x = fs.pcast(x * full["norm"], tp, to="varying")
        hidden = torch.relu(x @ full["up"].T) @ full["down"].T
        x = fs.psum_invariant(hidden, shard)  # <- here; right: x = fs.psum_invariant(hidden, tp)
        return (x @ full["head"].T).square().mean()

    axes = fs.axis_of(mesh["shard"]), fs.axis_of(mesh["tp"])
    return train(loss_fn), state_of(LAYER, parallel(mesh)), X, *axes


@mistake("missing sum", mesh={"shard": 2, "cp": 2, "tp": 2})
def sum_over_one_of_two_axes(mesh):
    def loss_fn(params, x, cp, tp):
        part = x.sum() * fs.gather(params)["w"].square().sum()
        total = fs.psum_invariant(part, tp)  # <- here
        # right: total = fs.psum_invariant(total, cp)
        return total.log()  # <- here

    strategy = fs.compose(
        fs.fully_shard(mesh["shard"]), fs.split_dim(mesh["cp"], dim=1), fs.split_dim(mesh["tp"], dim=2)
    )
    state = state_of({"w": torch.ones(4, 4, 4)}, strategy)
    return train(loss_fn), state, X, fs.axis_of(mesh["cp"]), fs.axis_of(mesh["tp"])


@mistake("missing cast", "doubled sum", mesh=SHARD_TP)
def bias_before_the_sum(mesh):
    """Every rank adds the whole bias, and the sum has it as often as there are ranks."""

    def loss_fn(params, x, tp):
        full = fs.gather(params)
        x = fs.pcast(x * full["norm"], tp, to="varying")
        hidden = torch.relu(x @ full["up"].T) @ full["down"].T
        part = hidden + full["bias"]  # <- here; right: part = hidden
        x = fs.psum_invariant(part, tp)  # right: x = fs.psum_invariant(part, tp) + full["bias"]
        return (x @ full["head"].T).square().mean()

    return train(loss_fn), state_of(LAYER, parallel(mesh)), X, fs.axis_of(mesh["tp"])


@mistake("missing sum", mesh=SHARD_TP)
def norm_of_the_features_of_each_rank(mesh):
    """An RMSNorm of features that are split over `tp`."""

    def loss_fn(params, x, tp):
        full = fs.gather(params)
        hidden = fs.pcast(x * full["norm"], tp, to="varying") @ full["up"].T
        square = hidden.square().mean(-1, keepdim=True)
        # right: square = fs.psum(square, tp) / tp.size
        hidden = hidden * (square + 1e-6).rsqrt()  # <- here
        x = fs.psum_invariant(hidden @ full["down"].T, tp)
        return (x @ full["head"].T).square().mean()

    return train(loss_fn), state_of(LAYER, parallel(mesh)), X, fs.axis_of(mesh["tp"])


@mistake("missing sum", mesh=SHARD_TP)
def embedding_of_a_split_vocabulary(mesh):
    def loss_fn(params, tokens, tp):
        table = fs.gather(params)["up"]
        local = tokens - fs.axis_index(tp) * len(table)
        is_local = (local >= 0) & (local < len(table))
        rows = table[local.clamp(0, len(table) - 1)] * is_local[..., None]
        x = fs.psum(rows, tp)  # <- here; right: x = fs.psum_invariant(rows, tp)
        return (x * fs.gather(params)["norm"]).square().mean()

    return train(loss_fn), state_of(LAYER, parallel(mesh)), TOKENS, fs.axis_of(mesh["tp"])


@mistake("missing sum", "missing cast", mesh=SHARD_TP)
def features_gathered_as_if_they_agreed(mesh):
    def loss_fn(params, x, tp):
        full = fs.gather(params)
        hidden = fs.pcast(x * full["norm"], tp, to="varying") @ full["up"].T
        whole = fs.all_gather(hidden.T, tp)  # <- here; right: whole = fs.all_gather_invariant(hidden.T, tp)
        return whole.square().mean()

    return train(loss_fn), state_of(LAYER, parallel(mesh)), X, fs.axis_of(mesh["tp"])


@mistake(
    "missing sum",
    "mean of means",
    missed="Most routers balance the experts of each rank, and a run beside DDP has the same numbers.",
)
def balance_of_a_router_by_rank(mesh):
    """The product of two means, which are of the rows of a rank."""

    def loss_fn(params, x, axis):
        probabilities = (x @ fs.gather(params)["w"]).softmax(-1)
        chosen = F.one_hot(probabilities.argmax(-1), CLASSES).float().mean(0)
        # right: chosen = fs.pmean(chosen, axis)
        balance = (chosen * probabilities.mean(0)).sum()  # <- here
        return probabilities.square().mean() + 0.01 * CLASSES * balance

    return train(loss_fn), state_of(HEAD, split(mesh)), X, fs.axis_of(mesh)


@mistake("missing sum")
def penalty_of_shards(mesh):
    """Each rank has the penalty of its rows, of which the mean is N times too small."""

    def loss_fn(params, x, y):
        penalty = params["w"].local.square().sum()  # right: penalty = fs.gather(params)["w"].square().sum()
        return losses_of(params, x, y).mean() + 0.1 * penalty  # <- here

    return train(loss_fn), state_of(HEAD, split(mesh)), X, Y


@mistake("doubled sum")
def center_summed_twice(mesh):
    def loss_fn(params, x, axis):
        out = x @ fs.gather(params)["w"]
        total = fs.psum(out.sum(0), axis)
        total = fs.psum(total, axis)  # <- here; right: pass
        return (out - total / (len(x) * axis.size)).square().mean()

    return train(loss_fn), state_of(HEAD, split(mesh)), X, fs.axis_of(mesh)


@mistake("rank's own number", "missing sum", mesh=SHARD_TP)
def labels_shifted_by_the_rank(mesh):
    def loss_fn(params, x, y, tp):
        full = fs.gather(params)
        hidden = torch.relu(fs.pcast(x * full["norm"], tp, to="varying") @ full["up"].T)
        x = fs.psum_invariant(hidden @ full["down"].T, tp)
        y = y.roll(fs.axis_index(tp))  # <- here; right: pass
        return F.cross_entropy(x @ full["head"].T, y)  # <- here

    return train(loss_fn), state_of(LAYER, parallel(mesh)), X, Y, fs.axis_of(mesh["tp"])


@mistake("missing sum", "rank's own number", mesh=SHARD_TP)
def noise_that_differs_over_tp(mesh):
    model = fs.functionalize(nn.Dropout(0.5))

    def step(state, x, shard, tp):
        key = fs.fold_in(fs.fold_in(state.key, state.step), shard)
        key = fs.fold_in(key, tp)  # <- here; right: pass

        def loss_fn(params):
            full = fs.gather(params)
            noisy = model.apply({}, x * full["norm"], key=key)  # <- here
            hidden = torch.relu(fs.pcast(noisy, tp, to="varying") @ full["up"].T)
            x_of_all = fs.psum_invariant(hidden @ full["down"].T, tp)
            return (x_of_all @ full["head"].T).square().mean()

        loss, grads = fs.value_and_grad(loss_fn)(state.params)
        return fs.update(TX, state, grads), loss

    axes = fs.axis_of(mesh["shard"]), fs.axis_of(mesh["tp"])
    return step, state_of(LAYER, parallel(mesh), key=0), X, *axes


@mistake("same random numbers")
def dropout_without_the_rank(mesh):
    model = fs.functionalize(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Dropout(0.1), nn.Linear(HIDDEN, 1)))

    def step(state, x, axis):
        key = fs.fold_in(state.key, state.step)  # <- here
        # right: key = fs.fold_in(key, axis)

        def loss_fn(params):
            return model.apply(params, x, key=key).square().mean()  # <- here

        loss, grads = fs.value_and_grad(loss_fn)(state.params)
        return fs.update(TX, state, grads), loss

    state = fs.TrainState.create(model.init(split(mesh), seed=0), TX, key=0)
    return step, state, X, fs.axis_of(mesh)


@mistake(
    mesh={"shard": 2, "cp": 4},
    only_a_run="Which dim of a batch ranks split is known to the data alone.",
    word="positions",
)
def positions_without_the_rank(mesh):
    """Ranks of `cp` have parts of each sequence, and number them from 0."""

    def loss_fn(params, tokens):
        full = fs.gather(params)
        positions = torch.arange(tokens.shape[1])  # <- here
        x = full["tokens"][tokens] + full["positions"][positions]
        return x.square().mean() / math.sqrt(WIDTH)

    full = {"tokens": torch.ones(CLASSES, WIDTH), "positions": torch.ones(12, WIDTH)}
    return train(loss_fn), state_of(full, fs.zero3(mesh, axis=("shard", "cp"), min_shard_elements=0)), TOKENS


@mistake("number of ranks", mesh=SHARD_TP)
def mean_of_the_parts_of_a_product(mesh):
    def loss_fn(params, x, tp):
        full = fs.gather(params)
        x = fs.pcast(x * full["norm"], tp, to="varying")
        part = torch.relu(x @ full["up"].T) @ full["down"].T
        x = fs.psum_invariant(part, tp) / tp.size  # <- here; right: x = fs.psum_invariant(part, tp)
        return (x @ full["head"].T).square().mean()

    return train(loss_fn), state_of(LAYER, parallel(mesh)), X, fs.axis_of(mesh["tp"])
