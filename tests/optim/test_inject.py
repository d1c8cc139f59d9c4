"""from_torch(inject=...): hyperparameters that the state holds."""

import re

import pytest
import torch
from torch import optim

import fshard as fs
from tests.trees import assert_same_bits, normal

PARAMS = {"w": normal(0)(5, 3), "b": normal(1)(7)}
RATES = (0.1, 0.03, 0.0, 1.0)


def gradients(step):
    return {name: normal(10 * step + i)(*value.shape) for i, (name, value) in enumerate(PARAMS.items())}


@pytest.mark.parametrize("donate", (False, True))
@pytest.mark.parametrize("cls", (optim.AdamW, optim.SGD, optim.RMSprop))
def test_a_rate_that_is_replaced_in_the_state_is_that_of_a_class_told_so(cls, donate):
    tensors = {name: torch.nn.Parameter(value.clone()) for name, value in PARAMS.items()}
    optimizer = cls(tensors.values(), lr=0.5, weight_decay=0.1)
    tx = fs.from_torch(cls, inject=("lr", "weight_decay"), lr=0.5, weight_decay=0.1)
    state = fs.TrainState.create(fs.tree_map(torch.clone, PARAMS), tx)
    assert fs.tree_map(float, state.opt_state.hyper) == {"lr": 0.5, "weight_decay": 0.1}
    for step, rate in enumerate(RATES, start=1):
        hyper = {"lr": torch.tensor(rate, dtype=torch.float64), "weight_decay": torch.tensor(rate / 7)}
        state = state._replace(opt_state=state.opt_state._replace(hyper=hyper))
        state = fs.update(tx, state, gradients(step), donate=donate)
        optimizer.param_groups[0].update(lr=rate, weight_decay=float(torch.tensor(rate / 7)))
        for name, grad in gradients(step).items():
            tensors[name].grad = grad
        optimizer.step()
        assert_same_bits(state.params, {name: tensor.detach() for name, tensor in tensors.items()})
        assert state.opt_state.hyper["lr"] is hyper["lr"]


@pytest.mark.parametrize("donate", (False, True))
def test_a_schedule_s_last_value_can_be_read(donate):
    tx = fs.from_torch(optim.SGD, inject=("lr",), lr=lambda count: RATES[int(count)])
    state = fs.TrainState.create(fs.tree_map(torch.clone, PARAMS), tx)
    for step, rate in enumerate(RATES):
        state = fs.update(tx, state, gradients(step), donate=donate)
        assert state.opt_state.hyper["lr"].item() == rate
        assert state.opt_state.hyper["lr"].dtype is torch.float64


@pytest.mark.parametrize(
    "name, hyper, found",
    [
        ("lr", {}, "not among its arguments"),
        ("betas", {"betas": (0.9, 0.99)}, "a tuple"),
        ("amsgrad", {"amsgrad": True}, "a bool"),
    ],
)
def test_what_is_no_number_is_not_injected(name, hyper, found):
    text = f"from_torch: expected inject to name numbers, got {name!r}, which is {found}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        fs.from_torch(optim.AdamW, inject=(name,), **hyper)


def test_an_injected_rate_that_is_not_finite_is_refused():
    tx = fs.from_torch(optim.SGD, inject=("lr",), lr=0.1)
    state = tx.init(PARAMS)._replace(hyper={"lr": torch.tensor(float("nan"))})
    text = "from_torch: expected lr to be a finite number, got nan after 0 updates; mend the schedule"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        tx.update(gradients(0), state, PARAMS)
