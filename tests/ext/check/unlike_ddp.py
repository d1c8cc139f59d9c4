"""Steps that train unlike DDP: those that the tests of assert_matches_ddp plant."""

import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from tests.ext.check.mistakes import mistake
from tests.ext.check.programs import TX, X, split, state_of, train

MODULE = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
CONSTANT = "A constant of the step is as right as any other."


def make_state(model, mesh):
    return fs.TrainState.create(model.init(fs.zero3(mesh, min_shard_elements=0), seed=0), TX, buffers=model.buffers)


@mistake("buffer differs")
def buffers_that_are_not_kept(mesh):
    model = fs.functionalize(MODULE)

    def step(state, x):
        def loss_fn(params):
            out, buffers = model.apply(params, x, buffers=state.buffers)  # <- here
            return out.square().mean(), buffers

        (loss, buffers), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params)
        buffers = fs.sync_buffers(buffers, state.params)
        # right: state = state._replace(buffers=buffers)
        return fs.update(TX, state, grads), loss  # <- here

    return step, make_state(model, mesh), X


@mistake("buffer differs")
def buffers_that_are_not_synchronized(mesh):
    model = fs.functionalize(MODULE)

    def step(state, x):
        def loss_fn(params):
            out, buffers = model.apply(params, x, buffers=state.buffers)  # <- here
            return out.square().mean(), buffers

        (loss, buffers), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params)
        # right: buffers = fs.sync_buffers(buffers, state.params)
        return fs.update(TX, state._replace(buffers=buffers), grads), loss

    return step, make_state(model, mesh), X


@mistake("number of ranks", missed="Ranks may have parts of one loss, or models of their own.")
def sum_where_a_mean_is_meant(mesh):
    def step(state, x, axis):
        def loss_fn(params):
            return (x @ fs.gather(params)["w"]).square().mean()

        run = fs.value_and_grad(loss_fn, reduce="sum")  # <- here; right: run = fs.value_and_grad(loss_fn)
        loss, grads = run(state.params)
        loss = loss / axis.size  # right: pass
        return fs.update(TX, state, grads), loss

    return step, state_of({"w": torch.ones(6, 8)}, split(mesh)), X, fs.axis_of(mesh)


@mistake("number of ranks")
def loss_that_is_reported_times_the_ranks(mesh):
    def step(state, x, axis):
        loss, grads = fs.value_and_grad(lambda p: (x @ fs.gather(p)["w"]).square().mean())(state.params)
        state = fs.update(TX, state, grads)
        return state, axis.size * loss  # <- here; right: return state, loss

    return step, state_of({"w": torch.ones(6, 8)}, split(mesh)), X, fs.axis_of(mesh)


@mistake(only_a_run=CONSTANT, word="constants")
def loss_that_is_reported_times_a_number(mesh):
    def step(state, x):
        loss, grads = fs.value_and_grad(lambda p: (x @ fs.gather(p)["w"]).square().mean())(state.params)
        state = fs.update(TX, state, grads)
        return state, 2.5 * loss  # <- here

    return step, state_of({"w": torch.ones(6, 8)}, split(mesh)), X


@mistake("number of ranks")
def loss_that_is_divided_and_averaged(mesh):
    def loss_fn(params, x, axis):
        loss = (x @ fs.gather(params)["w"]).square().mean()
        return loss * (1 / axis.size)  # <- here; right: return loss

    return train(loss_fn), state_of({"w": torch.ones(6, 8)}, split(mesh)), X, fs.axis_of(mesh)


@mistake("rank's own number", "local metric")
def loss_that_differs_between_ranks(mesh):
    def step(state, x, axis):
        loss, grads = fs.value_and_grad(lambda p: (x @ fs.gather(p)["w"]).square().mean())(state.params)
        loss = loss + fs.axis_index(axis)  # <- here; right: pass
        return fs.update(TX, state, grads), loss

    return step, state_of({"w": torch.ones(6, 8)}, split(mesh)), X, fs.axis_of(mesh)


@mistake(only_a_run=CONSTANT, word="constants")
def slope_of_another_activation(mesh):
    def loss_fn(params, x):
        x = x @ fs.gather(params)["w"]
        return F.leaky_relu(x, 0.2).square().mean()  # <- here

    return train(loss_fn), state_of({"w": torch.ones(6, 8)}, split(mesh)), X


@mistake(only_a_run=CONSTANT, word="constants")
def learning_rate_of_another_run(mesh):
    tx = fs.sgd(0.2)

    def step(state, x):
        loss, grads = fs.value_and_grad(lambda p: (x @ fs.gather(p)["w"]).square().mean())(state.params)
        return fs.update(tx, state, grads), loss  # <- here

    return step, state_of({"w": torch.ones(6, 8)}, split(mesh)), X


@mistake(only_a_run="A leaf may be frozen on purpose.", word="frozen")
def leaf_that_is_frozen(mesh):
    tx = fs.freeze(TX, "w")

    def step(state, x):
        def loss_fn(params):
            full = fs.gather(params)
            return (x @ full["w"] + full["b"]).square().mean()

        loss, grads = fs.value_and_grad(loss_fn)(state.params)
        return fs.update(tx, state, grads), loss  # <- here

    params = fs.shard({"w": torch.ones(6, 8), "b": torch.ones(8)}, split(mesh))
    return step, fs.TrainState.create(params, tx), X
