"""Donated leaves are refused by optimizers, models and tools."""

from functools import partial

import pytest
import torch

import fshard as fs
from tests.jit.steps import train_step
from tests.jit.test_donation import X, donated, plus_one
from tests.ranks import on_ranks
from tests.trees import copied, one_axis

OPTIMIZERS = {
    "chain": lambda: fs.chain(fs.clip_by_global_norm(1.0), fs.sgd(0.1)),
    "from_torch": lambda: fs.from_torch(torch.optim.SGD, lr=0.1),
    "from_torch: adamw": lambda: fs.ema(fs.from_torch(torch.optim.AdamW, lr=0.1), 0.9),
    "adafactor": lambda: fs.adafactor(0.1),
    "whole": lambda: fs.whole(fs.sgd(0.1)),
    "dynamic_loss_scale": lambda: fs.dynamic_loss_scale(fs.sgd(0.1)),
}


# Of torch where a leaf is empty, and of parts that look for lost leaves themselves.
ERRORS = (RuntimeError, IndexError, ValueError)


def lose(tree):
    fs.jit(plus_one, donate_argnums=0)(tree)
    return tree


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_no_optimizer_begins_with_what_was_donated(name):
    """Its slots would be empty."""
    make = partial(fs.shard, {"x": X.clone()}, fs.zero3(one_axis(), min_shard_elements=0))
    tx = OPTIMIZERS[name]()
    # An inner optimizer may be the one that refuses.
    with pytest.raises(ValueError, match=donated(r"\w+", r"\['x'\]")):
        tx.init(lose(make()))
    with pytest.raises(ValueError, match=donated("scale_by_adam", r"\['x'\]")):
        fs.scale_by_adam().init(lose(make()))


@on_ranks(2)
def test_from_torch_updates_nothing_that_was_donated():
    """Its count of updates would stay empty, and torch would compare shapes."""
    tx, params = fs.from_torch(torch.optim.SGD, lr=0.1), fs.shard({"x": X.clone()}, fs.zero3(one_axis()))
    state = tx.init(params)
    with pytest.raises(ValueError, match=donated("from_torch", r"\['updates'\]")):
        tx.update(params, lose(copied(state)), params)
    with pytest.raises(ValueError, match=donated("from_torch", r"\['x'\]")):
        tx.update(params, state, lose(copied(params)))


@pytest.mark.parametrize("shape", [(1,), ()])
@on_ranks(2)
def test_sgd_updates_nothing_that_was_donated(shape):
    """Its count of updates would stay empty, and an empty parameter is broadcast against a gradient of one number."""
    tx, params = (
        fs.chain(fs.clip_by_global_norm(1.0), fs.sgd(0.1)),
        fs.shard({"x": X[1].view(shape)}, fs.ddp(one_axis())),
    )
    state = tx.init(params)
    with pytest.raises(ValueError, match=donated("chain", r"\['state'\]\[1\]\[1\].updates")):
        tx.update(params, lose(copied(state)), params)
    with pytest.raises(ValueError, match=donated("chain", r"\['params'\]\['x'\]")):
        tx.update(params, state, lose(copied(params)))


def test_what_was_donated_is_named_by_models_tools_and_messages_about_one_tensor():
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    model = fs.functionalize(torch.nn.BatchNorm1d(3))
    params, batch, tx = model.init(fs.ddp(mesh), seed=0), torch.ones(2, 3), fs.sgd(0.1)
    state = fs.TrainState.create(params, tx)
    lost = lose(copied(state))
    step = train_step(lambda p, x: model.apply(p, x, buffers=model.buffers)[0].sum(), tx)
    tools = {
        "plan": lambda: fs.plan(step, lost, batch, mesh={"shard": 4}),
        "check": lambda: fs.check(step, lost, batch, mesh={"shard": 4}),
        "jit": lambda: fs.make_graph(step)(lost, batch),
        "replay": lambda: fs.replay(step, lost, batch),
    }
    for name, call in tools.items():
        with pytest.raises(
            ValueError, match=rf"{name}: arguments were donated.*\n  \[?.*step: was donated to an earlier"
        ):
            call()
    whole, buffers = lose(fs.unshard(params)), lose(copied(model.buffers))
    for path, call in {
        r"params.*\n  \['bias'\]": lambda: model.apply(whole, batch, buffers=model.buffers),
        r"buffers.*\n  \['num_batches_tracked'\]": lambda: model.apply(params, batch, buffers=buffers),
        r"key.*an int64 Tensor of shape \(0,\) that": lambda: model.apply(params, batch, key=lose(torch.tensor(1))),
    }.items():
        with pytest.raises(ValueError, match=f"apply: {path}.* was donated to an earlier call"):
            call()
    with pytest.raises(
        ValueError, match=r"update: gradients do not fit.*\n.*\(0,\) that was donated to an earlier call"
    ):
        fs.update(tx, state, lost.params)


@pytest.mark.parametrize("shape", [(3,), ()])
@pytest.mark.parametrize("make", (partial(fs.sgd, momentum=0.9), fs.adamw, fs.lars))
def test_gradients_and_slots_that_were_donated_are_named_where_an_update_fails(make, shape):
    """Torch's errors are of sizes that do not fit."""
    tx, params = make(lr=0.1), {"x": torch.ones(shape)}
    state = tx.init(params)
    with pytest.raises(ERRORS, match=donated("chain", r"\['grads'\]\['x'\]")):
        tx.update(lose(copied(params)), state, params)
    with pytest.raises(ERRORS, match=donated("chain", r"\['state'\].*")):
        tx.update(params, lose(copied(state)), params)
    with pytest.raises(ERRORS, match=donated("chain", r".*\['x'\]")):
        tx.update(params, state, lose(copied(params)))


def test_arguments_of_a_model_that_were_donated_are_named_where_it_fails():
    model = fs.functionalize(torch.nn.Linear(3, 3))
    params, batch = model.init(fs.ddp(fs.init_mesh({"shard": -1}, device="cpu")), seed=0), lose(torch.ones(2, 3))

    def loss(params, x):
        return model.apply(params, x["a"]).sum()

    for path, call in (
        (r"\['args'\]\[0\]", lambda: fs.value_and_grad(loss)(params, {"a": batch})),
        (r"\['args'\]\[0\]", lambda: fs.accumulate(loss)(params, [{"a": batch}])),
        (r"\['args'\]\[0\]", lambda: model.apply(params, batch)),
        (r"\['kwargs'\]\['input'\]", lambda: model.apply(params, input=batch)),
    ):
        with pytest.raises(RuntimeError, match=donated("apply", path)) as error:
            call()
        assert "shapes cannot be multiplied" in str(error.value)


class StopError(Exception):
    """Ends a forward early."""


class Stopping(torch.nn.Linear):
    """Raises an error of its own, whatever it is called with."""

    def forward(self, x, other):
        raise StopError("early")


def test_an_error_of_a_model_stays_the_error_that_it_raised():
    """Whether donated leaves have caused it is not known, and a tree that holds itself has no leaves."""
    model, holding_itself = fs.functionalize(Stopping(3, 3)), []
    holding_itself.append(holding_itself)
    params = model.init(fs.ddp(fs.init_mesh({"shard": -1}, device="cpu")), seed=0)
    for other, notes in ((lose(torch.ones(2)), 1), (holding_itself, 0), (torch.ones(2), 0)):
        with pytest.raises(StopError, match="early") as error:
            model.apply(params, torch.ones(2, 3), other)
        assert len(getattr(error.value, "__notes__", ())) == notes
        assert error.traceback[-1].name == "forward"
        assert error.value.__context__ is None
