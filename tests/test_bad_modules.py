"""Bad modules, parameters and arguments, and writes to gathered weights."""

import re

import pytest
import torch
from torch import nn

import fshard as fs
from tests.bad_input import Row, assert_all_refused
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis
from tests.unit_models import filled


class Writing(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        with torch.no_grad():
            self.weight.mul_(2.0)
        return y


@pytest.mark.parametrize("min_shard_elements", (0, 1000), ids=("split", "whole"))
@on_ranks(2)
def test_a_module_that_writes_to_a_weight_of_its_unit_is_refused(min_shard_elements):
    module = filled(nn.Sequential(nn.Linear(3, 3), Writing(3, 3), nn.Linear(3, 3)), torch.float32)
    model = fs.functionalize(module, units=nn.Linear)
    strategy = fs.zero3(one_axis(), min_shard_elements=min_shard_elements, merge_bytes=0)
    params = fs.shard(dict(module.named_parameters()), strategy)
    before = fs.tree_map(torch.clone, params)
    problem = "  ['1.weight']: expected none, got 1 in-place writes"
    remedy = "To fix: compute a new tensor instead; other leaves are whole."
    error = f"value_and_grad: parameters were written to\n{problem}\n{remedy}"
    with pytest.raises(ValueError, match=re.escape(error)):
        fs.value_and_grad(lambda p: model.apply(p, torch.ones(4, 3)).sum())(params)
    if not min_shard_elements:
        assert_same_bits(fs.tree_leaves(params), fs.tree_leaves(before))


MODEL = "\nTo fix: pass those of this model."
STRUCTURE = "\nTo fix: pass trees made from the same parameters."


class Unresettable(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(2, 1))
        self.inner[1].extra = nn.ParameterList([torch.ones(1)])


def applied(module, params, **keywords):
    """A row's arguments and call: apply a model of `module` to parameters, by default its own."""
    model = fs.functionalize(module)

    def arguments(world):
        own = model.init(world.zero2) if params is None else params
        return module, own, torch.ones(4, 3)

    return arguments, lambda module, params, x: model.apply(params, x, **keywords)


MODULES = [
    Row(
        "a seed for what cannot draw its values",
        lambda world: (Unresettable(), world.zero2),
        lambda module, strategy: fs.functionalize(module).init(strategy, seed=0),
        "model.init: values cannot be drawn from a seed\n"
        "  ['scale']: expected a value for each, got elements left out by reset_parameters\n"
        "  ['inner.1.extra.0']: expected a value for each, got elements left out by reset_parameters\n"
        "To fix: pass reset=, a function that sets the values of a submodule, or add reset_parameters to these "
        "modules, as fs.with_init_weights does to models of transformers, or leave out seed and take their values.",
        ("shard",),
    ),
    *(
        Row(name, *applied(nn.Linear(3, 2), params), f"apply: {error}")
        for name, params, error in [
            (
                "parameters that are missing and unexpected",
                {"weight": torch.ones(2, 3), "scale": torch.ones(2)},
                "params: trees differ in structure\n"
                "  ['bias']: expected a leaf, got nothing\n"
                "  ['scale']: expected nothing, got a leaf" + STRUCTURE,
            ),
            (
                "parameters of other shapes",
                {"weight": torch.ones(2, 3), "bias": torch.ones(1)},
                "params do not match the module's\n  ['bias']: expected shape (2,), got shape (1,)" + MODEL,
            ),
        ]
    ),
    Row(
        "buffers that would be lost",
        *applied(nn.BatchNorm1d(3), None),
        "apply: buffers were updated and would be lost\n"
        "  ['num_batches_tracked']: expected an unchanged one, got an updated buffer\n"
        "To fix: pass buffers= and keep those returned, or functionalize the module in eval mode.",
        ("gather",),
    ),
]


def test_bad_modules_are_refused():
    assert_all_refused(MODULES)
