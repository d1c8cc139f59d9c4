"""A model in training and in evaluation mode: one set of parameters and buffers."""

import copy
import pickle

import torch
from torch import nn

import fshard as fs
from tests.ranks import on_ranks
from tests.trees import assert_same_bits


def norm_and_dropout(device):
    with torch.device(device):
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


@on_ranks(1, 2)
def test_a_model_on_the_meta_device_is_evaluated_with_the_buffers_that_its_init_drew():
    model = fs.functionalize(norm_and_dropout("meta"), units=nn.Linear)
    evaluated = model.eval()
    params = model.init(fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")), seed=0)
    x = torch.linspace(-1.0, 1.0, 15).reshape(5, 3)
    out = evaluated.apply(params, x)

    module = norm_and_dropout("cpu").eval()
    module.load_state_dict(fs.unshard(params) | model.buffers)
    assert_same_bits(out, module(x).detach())
    assert_same_bits(evaluated.buffers, model.buffers)


def test_a_copy_in_another_mode_leaves_the_model_as_it_is():
    model = fs.functionalize(norm_and_dropout("cpu"))
    evaluated = model.eval()
    modes = [copied._bare.training for copied in (model, evaluated, evaluated.train(), model.eval().eval())]
    assert modes == [True, False, True, False]
    assert not any(submodule.training for submodule in evaluated._bare.modules())
    params = model.init(fs.ddp(fs.init_mesh({"shard": -1}, device="cpu")), seed=0)
    x = torch.ones(5, 3)
    # Calls of one mode in between do not change those of the other.
    first = evaluated.apply(params, x)
    _, updated = model.apply(params, x, buffers=model.buffers, key=1)
    assert updated["1.num_batches_tracked"] == 1
    assert_same_bits(evaluated.apply(params, x), first)
    for same in (copy.deepcopy(evaluated), pickle.loads(pickle.dumps(evaluated))):
        assert_same_bits(same.apply(params, x), first)


def test_parametrized_and_tied_weights_are_those_of_the_other_mode():
    module = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    model = fs.functionalize(module.train())
    params = model.init(fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    x = torch.ones(2, 4)
    assert_same_bits(model.eval().apply(params, x), module.eval()(x).detach())


class Scaled(nn.Linear):
    """A linear layer with a plain tensor among its attributes, such as a table of positions."""

    def __init__(self):
        super().__init__(4, 4)
        self.scales = torch.arange(4.0)

    def forward(self, x):
        return super().forward(x) * self.scales


@on_ranks(1, 2)
def test_a_traced_or_transformed_function_makes_another_mode_of_a_model_with_plain_tensors():
    model = fs.functionalize(Scaled())
    params = model.init(fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")), seed=0)
    x = torch.ones(2, 4)
    expected = model.apply(params, x).sum()

    def loss(params):
        return model.eval().apply(params, x).sum()

    assert_same_bits(fs.jit(loss)(params), expected)
    assert_same_bits(torch.func.grad_and_value(loss)(fs.gather(params))[1], expected)
