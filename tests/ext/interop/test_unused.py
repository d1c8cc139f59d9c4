"""Leaves whose gradient is None, in the form of torch's own optimizers."""

import pytest
import torch

import fshard as fs
from tests.optim.test_from_torch import CASES
from tests.optim.test_unused import gradients, run, values
from tests.trees import assert_same_bits


@pytest.mark.parametrize("case", ("AdamW, foreach", "SGD dampening, foreach"))
def test_torch_goes_on_where_a_leaf_has_not_begun(case):
    """Its state in torch's form is that of an optimizer that has never seen the gradient."""
    cls, hyper = CASES[case]
    tx, module = fs.from_torch(cls, **hyper), torch.nn.Module()
    for name, value in values().items():
        module.register_parameter(name, torch.nn.Parameter(value))
    optimizer = cls(module.parameters(), **hyper)
    grads = gradients("late start")
    state = run(tx, fs.TrainState.create(values(), tx), grads[:2])
    state_dict = fs.checkpoint.to_optimizer_state_dict(state.opt_state, module, optimizer)
    assert list(state_dict["state"]) == [1]
    optimizer.load_state_dict(state_dict)
    for name, value in state.params.items():
        getattr(module, name).data = value.clone()
    for step in grads[2:]:
        for name, grad in step.items():
            getattr(module, name).grad = grad
        optimizer.step()
    expected = {name: param.detach() for name, param in module.named_parameters()}
    assert_same_bits(run(tx, state, grads[2:]).params, expected)
