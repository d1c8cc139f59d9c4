"""check_optimizer: it passes what is right, and names the law and the leaf of each way to be wrong."""

import re

import pytest
import torch

import fshard as fs
from fshard._compat import is_tracing
from fshard.testing import RankError, check_optimizer
from tests.optim.test_table import TABLE
from tests.trees import normal

PARAMS = {"v": normal(1)(7), "w": normal(2)(5, 3), "x": normal(3)(2, 4, dtype=torch.float32)}
CALLS = []


def check_optimizers_of_the_library_pass(row):
    params = {
        **PARAMS,
        "wide": normal(4)(3, 5),
        "tall": normal(5)(6, 2),
        "vector.bias": normal(6)(3),
        "i": torch.ones(2),
    }
    check_optimizer(row.make(), params, world_sizes=(1, 3))


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", TABLE)
def test_optimizers_of_the_library_pass(name):
    check_optimizers_of_the_library_pass(TABLE[name])


def transformation(f):
    return fs.GradientTransformation(lambda params: (), lambda grads, state, params: (fs.tree_map(f, grads), state))


def optimizer(f):
    return fs.Optimizer(lambda params: (), lambda grads, state, params: (fs.tree_map(f, params, grads), state))


def counted(grad):
    CALLS.append(grad)
    return grad * len(CALLS)


def logged(grads, state, params):
    return grads, {"norm": sum(grad.square().sum() for grad in fs.tree_leaves(grads))}


APART = "check_optimizer: 2 ranks under {} do not end where one rank does\n  ['{}']"
WRONG = {
    "a norm of parts": (transformation(lambda grad: grad / grad.norm()), APART.format("zero3", "params") + "['v']: "),
    "state of parts": (
        fs.GradientTransformation(lambda params: {"norm": torch.zeros(())}, logged),
        APART.format("zero3", "state") + "[0]['norm']: ",
    ),
    "writes to gradients": (
        transformation(lambda grad: grad.detach().numpy().fill(0) or grad),
        "check_pure: the step changed its arguments\n  argument 1['v']: ",
    ),
    "hidden state": (transformation(counted), "twice has other bits\n  .params['v']: expected "),
    "None is no gradient": (optimizer(lambda param, grad: param - grad), "TypeError: unsupported operand"),
    "None decays": (
        optimizer(lambda param, grad: param * 0.9 if grad is None else param - grad),
        "check_optimizer: a parameter without a gradient has moved\n  ['v']: expected ",
    ),
    "a look at a value": (
        transformation(lambda grad: grad if grad.sum() > 1e9 else grad / 2),
        "ValueError: jit: expected no look at the value of a tensor",
    ),
    "other maths in a trace": (
        transformation(lambda grad: grad / 2 if is_tracing() else grad),
        "check_optimizer: jitted, an update has other bits\n  .params['v']: expected ",
    ),
}


def test_what_is_wrong_is_named():
    for tx, text in WRONG.values():
        with pytest.raises((AssertionError, RankError), match=re.escape(text)):
            check_optimizer(tx, PARAMS, world_sizes=(1, 2))


def test_what_makes_no_sense_is_refused():
    for tx, params, text in (
        (torch.optim.SGD, PARAMS, "check_optimizer: expected tx to be an Optimizer or a GradientTransformation"),
        (fs.sgd(0.1), {"w": 1}, "check_optimizer: leaves are no tensors"),
    ):
        with pytest.raises(ValueError, match=text):
            check_optimizer(tx, params)
