"""Results and state that are wrong as users make them: metrics of a rank, and state that differs between ranks."""

import torch
import torch.nn.functional as F

import fshard as fs
from tests.ext.check.mistakes import SHARD_TP, mistake
from tests.ext.check.programs import CLASSES, LAYER, TX, WIDTH, from_step, parallel

FULL = {"w": torch.ones(WIDTH, CLASSES), "b": torch.ones(CLASSES)}


def loss_and_logits(params, x, y):
    full = fs.gather(params)
    logits = x @ full["w"] + full["b"]
    return F.cross_entropy(logits, y), logits.detach()


def loss_alone(params, x, y):
    loss, _ = loss_and_logits(params, x, y)
    return loss, loss.detach()


@mistake("local metric", make=from_step(FULL))
def accuracy_of_one_rank(state, x, y, axis):
    (loss, logits), grads = fs.value_and_grad(loss_and_logits, has_aux=True)(state.params, x, y)
    accuracy = (logits.argmax(-1) == y).float().mean()  # <- here
    # right: accuracy = fs.pmean(accuracy, axis)
    return fs.update(TX, state, grads), {"loss": loss, "accuracy": accuracy}  # <- here


@mistake("mean of means", make=from_step(FULL))
def mean_of_perplexities(state, x, y, axis):
    (loss, local), grads = fs.value_and_grad(loss_alone, has_aux=True)(state.params, x, y)
    perplexity = fs.pmean(local.exp(), axis)  # <- here; right: perplexity = fs.pmean(local, axis).exp()
    return fs.update(TX, state, grads), {"loss": loss, "perplexity": perplexity}


@mistake("mean of means", make=from_step(FULL))
def mean_of_deviations(state, x, y, axis):
    (loss, logits), grads = fs.value_and_grad(loss_and_logits, has_aux=True)(state.params, x, y)
    # right: logits = fs.all_gather(logits, axis)
    deviation = fs.pmean(logits.std(), axis)  # <- here; right: deviation = logits.std()
    return fs.update(TX, state, grads), {"loss": loss, "deviation": deviation}


@mistake("mean of means", make=from_step(FULL))
def mean_of_f1_scores(state, x, y, axis):
    """The counts of all ranks are to be added up first."""
    (loss, logits), grads = fs.value_and_grad(loss_and_logits, has_aux=True)(state.params, x, y)
    predicted, actual = logits.argmax(-1) == 0, y == 0
    hits, count = (predicted & actual).sum(), predicted.sum() + actual.sum()
    # right: hits, count = fs.psum(hits, axis), fs.psum(count, axis)
    score = 1 - (1 - 2 * hits / count)
    score = fs.pmean(score, axis)  # <- here; right: pass
    return fs.update(TX, state, grads), {"loss": loss, "f1": score}


@mistake("doubled sum", "local metric", mesh=SHARD_TP, make=from_step(LAYER, parallel))
def metric_over_the_other_axis(state, x, y, shard, tp):
    def loss_fn(params):
        full = fs.gather(params)
        hidden = torch.relu(fs.pcast(x * full["norm"], tp, to="varying") @ full["up"].T)
        logits = fs.psum_invariant(hidden @ full["down"].T, tp) @ full["head"].T
        return F.cross_entropy(logits, y), logits.detach()

    (loss, logits), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params)
    is_right = (logits.argmax(-1) == y).float().mean()
    accuracy = fs.pmean(is_right, tp)  # <- here; right: accuracy = fs.pmean(is_right, shard)
    return fs.update(TX, state, grads), {"loss": loss, "accuracy": accuracy}


@mistake("number of ranks", make=from_step(FULL))
def accuracies_added_up(state, x, y, axis):
    (loss, logits), grads = fs.value_and_grad(loss_and_logits, has_aux=True)(state.params, x, y)
    is_right = (logits.argmax(-1) == y).float().mean()
    accuracy = fs.psum(is_right, axis)  # <- here; right: accuracy = fs.pmean(is_right, axis)
    return fs.update(TX, state, grads), {"loss": loss, "accuracy": accuracy}


@mistake("doubled sum", make=from_step(FULL))
def objective_that_is_summed_again(state, x, y, axis):
    (loss, _), grads = fs.value_and_grad(loss_and_logits, has_aux=True)(state.params, x, y)
    loss = fs.psum(loss, axis)  # <- here; right: pass
    return fs.update(TX, state, grads), loss


@mistake("buffer differs", make=from_step(FULL, buffers={"average": torch.zeros(())}))
def average_of_the_losses_of_one_rank(state, x, y):
    (loss, local), grads = fs.value_and_grad(loss_alone, has_aux=True)(state.params, x, y)
    local = local  # right: local = loss
    average = 0.9 * state.buffers["average"] + 0.1 * local  # <- here
    return fs.update(TX, state, grads)._replace(buffers={"average": average}), loss


@mistake("buffer differs", make=from_step(FULL, buffers={"variance": torch.ones(CLASSES)}))
def variance_of_one_rank(state, x, y, axis):
    """BatchNorm by hand: the mean is that of all ranks, and the variance is not."""

    def loss_fn(params):
        full = fs.gather(params)
        out = x @ full["w"]
        mean = fs.pmean(out.mean(0), axis)
        variance = (out - mean).square().mean(0)  # <- here
        # right: variance = fs.pmean(variance, axis)
        out = (out - mean) * (variance + 1e-5).rsqrt() + full["b"]
        return F.cross_entropy(out, y), variance.detach()

    (loss, variance), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params)
    running = 0.9 * state.buffers["variance"] + 0.1 * variance  # <- here
    return fs.update(TX, state, grads)._replace(buffers={"variance": running}), loss


@mistake("buffer differs", "missing sum", make=from_step(FULL, fs.ddp))
def codes_of_each_rank(state, x, y, axis):
    """Replicated leaves are rounded to steps that each rank takes from its own activations."""
    (loss, logits), grads = fs.value_and_grad(loss_and_logits, has_aux=True)(state.params, x, y)
    largest = logits.abs().amax()  # right: largest = fs.pmax(logits.abs().amax(), axis)
    state = fs.update(TX, state, grads)
    params = fs.tree_map(lambda p: (p / largest * 127).round() * largest / 127, state.params)  # <- here
    return state._replace(params=params), loss
