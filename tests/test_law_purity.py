"""Law 4: nothing changes its inputs, the same step gives the same bits, and after an exception the state is whole."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.func import grad

import fshard as fs
from fshard import _compat
from tests.ranks import BreaksInBackward, BrokenError, on_ranks
from tests.trees import CASTS, STRATEGIES, as_bytes, assert_same_bits, assorted, meshes, normal, one_axis

WORLD_SIZES = (1, 2, 3)
ALL_STRATEGIES = STRATEGIES | CASTS

TX = fs.chain(fs.clip_by_global_norm(0.1), fs.from_torch(torch.optim.AdamW, lr=0.1, weight_decay=0.1))


@contextmanager
def unchanged(*trees):
    """Assert that no tensor of some trees was written to: not one bit differs, and no write was counted."""
    tensors = [tensor for tensor in fs.tree_leaves(trees) if isinstance(tensor, torch.Tensor)]
    assert tensors
    before = [(as_bytes(tensor), _compat.version(tensor)) for tensor in tensors]
    yield
    for tensor, (bits, version) in zip(tensors, before):
        assert as_bytes(tensor).equal(bits)
        assert _compat.version(tensor) == version


class Given(NamedTuple):
    """What verbs are called with on one rank."""

    full: dict
    state: fs.TrainState
    batch: torch.Tensor


def given(strategy):
    on, full = meshes(), assorted()
    params = fs.shard(full, ALL_STRATEGIES[strategy](on), frozen=lambda path: "row" in path)
    state = fs.TrainState.create(params, TX, buffers={"mean": normal(1)(3)}, key=torch.arange(2))
    batch = normal(2 + fs.comm.rank(fs.axis_of(on.line)))(4, 5)
    # The second step's state has moments that are not zero.
    return Given(full, train_step(state, batch)[0], batch)


def loss_fn(params, batch):
    full = fs.gather(params)
    return torch.tanh(batch.to(full["w"].dtype) @ full["w"] * full["scalar"]).sum() + full["row"].sum()


def train_step(state, batch):
    loss, grads = fs.value_and_grad(loss_fn)(state.params, batch)
    return fs.update(TX, state, grads), loss


def local_grads(g):
    trained = {name: leaf for name, leaf in fs.gather(g.state.params).items() if leaf is not None}
    grads = grad(lambda p: loss_fn(p, g.batch))(trained)
    return {**grads, "nothing": None}


def four_verbs(g):
    grads = fs.scatter_grads(local_grads(g), like=g.state.params)
    return fs.update(TX, g.state, grads)


# Each is called with what `given` returns and calls one verb, or a few together.
VERBS: dict[str, Callable] = {
    "shard": lambda g: fs.shard(g.full, g.state.params["w"].spec.transform),
    "unshard": lambda g: fs.unshard(g.state),
    "reshard": lambda g: fs.reshard(g.state, fs.zero2(one_axis(), min_shard_elements=0)),
    "gather": lambda g: fs.gather(g.state.params),
    "objective": lambda g: fs.objective(g.batch.sum(), like=g.state.params),
    "value_and_grad": lambda g: fs.value_and_grad(loss_fn)(g.state.params, g.batch),
    "psum": lambda g: fs.psum(fs.tree_leaves(g.state.params), fs.axis_of(one_axis())),
    "pmean": lambda g: fs.pmean(fs.tree_leaves(g.state.params), fs.axis_of(one_axis())),
    "pvary": lambda g: fs.pvary(fs.tree_leaves(g.state.params), fs.axis_of(one_axis())),
    "psum_invariant": lambda g: fs.psum_invariant(fs.tree_leaves(g.state.params), fs.axis_of(one_axis())),
    "all_gather": lambda g: fs.all_gather(g.batch, fs.axis_of(one_axis())),
    "reduce_scatter": lambda g: fs.reduce_scatter(g.batch.expand(6, 4, 5), fs.axis_of(one_axis())),
    "sync_buffers": lambda g: fs.sync_buffers(g.state.buffers, like=g.state.params, by="mean"),
    "train_step": lambda g: train_step(g.state, g.batch),
    "four verbs": four_verbs,
}


@pytest.mark.rows(8)
@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_verbs_leave_their_inputs_alone_and_repeat_their_bits(strategy):
    g = given(strategy)
    for verb in VERBS.values():
        with unchanged(g):
            first = verb(g)
            assert_same_bits(fs.tree_leaves(verb(g)), fs.tree_leaves(first))


@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_scatter_grads_and_update_leave_gradients_alone(strategy):
    g = given(strategy)
    local = local_grads(g)
    with unchanged(g, local):
        grads = fs.scatter_grads(local, like=g.state.params, reduce="weighted", count=torch.tensor(4))
    for tx in (TX, fs.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)):
        state = fs.TrainState.create(g.state.params, tx)
        with unchanged(g, state, grads):
            after = fs.update(tx, state, grads)
        with unchanged(after, grads):
            assert_same_bits(fs.unshard(fs.update(tx, state, grads)), fs.unshard(after))


@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("strategy", ("ddp", "zero2 of every leaf"))
def test_apply_leaves_parameters_and_buffers_alone(strategy):
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True))
    model = fs.functionalize(module)
    params, x = model.init(STRATEGIES[strategy](meshes()), seed=0), normal()(4, 5).float()
    with unchanged(params, model.buffers, x, module.state_dict()):
        out, buffers = model.apply(params, x, buffers=model.buffers)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.apply(params, x[:, 1:])
        assert_same_bits(model.apply(params, x, buffers=model.buffers), (out, buffers))
    assert not buffers["1.running_mean"].equal(model.buffers["1.running_mean"])


def fails_before_gather(params, batch):
    raise BrokenError


def fails_after_gather(params, batch):
    loss_fn(params, batch)
    raise BrokenError


def fails_in_backward(params, batch):
    return BreaksInBackward.apply(loss_fn(params, batch), "in the backward")


def fails_in_a_later_gradient_transformation(state, batch):
    def fail(grads, state, params):
        raise BrokenError

    late = fs.chain(fs.clip_by_global_norm(0.1), fs.GradientTransformation(lambda params: (), fail), TX)
    _, grads = fs.value_and_grad(loss_fn)(state.params, batch)
    fs.update(late, state._replace(opt_state=((), (), state.opt_state)), grads)


def stacked(params):
    """Shards that do not have the shapes of their specs."""
    return fs.tree_map(lambda tensor: torch.stack([tensor, tensor]), params)


# Steps that fail on every rank, by the user's fault or by that of the arguments, and with what.
FAILING_STEPS = {
    "before gather": (BrokenError, lambda state, batch: fs.value_and_grad(fails_before_gather)(state.params, batch)),
    "after gather": (BrokenError, lambda state, batch: fs.value_and_grad(fails_after_gather)(state.params, batch)),
    "in backward": (BrokenError, lambda state, batch: fs.value_and_grad(fails_in_backward)(state.params, batch)),
    "in update": (BrokenError, fails_in_a_later_gradient_transformation),
    "reduce": (ValueError, lambda state, batch: fs.value_and_grad(loss_fn, reduce="max")(state.params, batch)),
    "loss": (ValueError, lambda state, batch: fs.value_and_grad(lambda p, x: x)(state.params, batch)),
    "structure": (ValueError, lambda state, batch: fs.scatter_grads({}, like=state.params)),
    "full grads": (ValueError, lambda state, batch: fs.update(TX, state, fs.gather(state.params))),
    "shape": (ValueError, lambda state, batch: fs.gather(stacked(state.params))),
    "like": (ValueError, lambda state, batch: fs.objective(batch, like=state.params)),
}


@pytest.mark.rows(1)
@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_is_whole_after_an_exception(strategy):
    """No bit of it differs, and the next step is the one that would have been made without the exception."""
    g = given(strategy)
    expected = train_step(g.state, g.batch)
    for error, step in FAILING_STEPS.values():
        with unchanged(g):
            with pytest.raises(error):
                step(g.state, g.batch)
            assert_same_bits(fs.unshard(train_step(g.state, g.batch)), fs.unshard(expected))
