"""Steps that train unlike DDP: those that the tests of assert_matches_ddp plant."""

import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from tests.ext.check.mistakes import mistake
from tests.ext.check.programs import TX, from_loss, from_step

MODEL = fs.functionalize(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
FULL = {"w": torch.ones(6, 8)}
OTHER_RATE, FROZEN = fs.sgd(0.2), fs.freeze(TX, "w")
CONSTANT = "A constant of the step is as right as any other."


@mistake("buffer differs", make=from_step(MODEL, buffers=MODEL.buffers))
def buffers_that_are_not_kept(state, x):
    def loss_fn(params):
        out, buffers = MODEL.apply(params, x, buffers=state.buffers)  # <- here
        return out.square().mean(), buffers

    (loss, buffers), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params)
    buffers = fs.sync_buffers(buffers, state.params)
    # right: state = state._replace(buffers=buffers)
    return fs.update(TX, state, grads), loss  # <- here


@mistake("buffer differs", make=from_step(MODEL, buffers=MODEL.buffers))
def buffers_that_are_not_synchronized(state, x):
    def loss_fn(params):
        out, buffers = MODEL.apply(params, x, buffers=state.buffers)  # <- here
        return out.square().mean(), buffers

    (loss, buffers), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params)
    # right: buffers = fs.sync_buffers(buffers, state.params)
    return fs.update(TX, state._replace(buffers=buffers), grads), loss


@mistake("number of ranks", missed="Ranks may have parts of one loss, or models of their own.", make=from_step(FULL))
def sum_where_a_mean_is_meant(state, x, axis):
    def loss_fn(params):
        return (x @ fs.gather(params)["w"]).square().mean()

    run = fs.value_and_grad(loss_fn, reduce="sum")  # <- here; right: run = fs.value_and_grad(loss_fn)
    loss, grads = run(state.params)
    loss = loss / axis.size  # right: pass
    return fs.update(TX, state, grads), loss


@mistake("number of ranks", make=from_step(FULL))
def loss_that_is_reported_times_the_ranks(state, x, axis):
    loss, grads = fs.value_and_grad(lambda p: (x @ fs.gather(p)["w"]).square().mean())(state.params)
    state = fs.update(TX, state, grads)
    return state, axis.size * loss  # <- here; right: return state, loss


@mistake(only_a_run=CONSTANT, word="constants", make=from_step(FULL))
def loss_that_is_reported_times_a_number(state, x):
    loss, grads = fs.value_and_grad(lambda p: (x @ fs.gather(p)["w"]).square().mean())(state.params)
    state = fs.update(TX, state, grads)
    return state, 2.5 * loss  # <- here


@mistake("number of ranks", make=from_loss(FULL))
def loss_that_is_divided_and_averaged(params, x, axis):
    loss = (x @ fs.gather(params)["w"]).square().mean()
    return loss * (1 / axis.size)  # <- here; right: return loss


@mistake("rank's own number", "local metric", make=from_step(FULL))
def loss_that_differs_between_ranks(state, x, axis):
    loss, grads = fs.value_and_grad(lambda p: (x @ fs.gather(p)["w"]).square().mean())(state.params)
    loss = loss + fs.axis_index(axis)  # <- here; right: pass
    return fs.update(TX, state, grads), loss


@mistake(only_a_run=CONSTANT, word="constants", make=from_loss(FULL))
def slope_of_another_activation(params, x):
    x = x @ fs.gather(params)["w"]
    return F.leaky_relu(x, 0.2).square().mean()  # <- here


@mistake(only_a_run=CONSTANT, word="constants", make=from_step(FULL))
def learning_rate_of_another_run(state, x):
    loss, grads = fs.value_and_grad(lambda p: (x @ fs.gather(p)["w"]).square().mean())(state.params)
    return fs.update(OTHER_RATE, state, grads), loss  # <- here


@mistake(
    only_a_run="A leaf may be frozen on purpose.",
    word="frozen",
    make=from_step({**FULL, "b": torch.ones(8)}, tx=FROZEN),
)
def leaf_that_is_frozen(state, x):
    def loss_fn(params):
        full = fs.gather(params)
        return (x @ full["w"] + full["b"]).square().mean()

    loss, grads = fs.value_and_grad(loss_fn)(state.params)
    return fs.update(FROZEN, state, grads), loss  # <- here
