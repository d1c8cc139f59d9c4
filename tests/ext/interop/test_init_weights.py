"""with_init_weights: submodules draw by the `_init_weights` of the innermost model around them, as transformers do."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from tests.test_init import MODES, REMEDY
from tests.test_unit_rules import Block, Tower
from tests.trees import assert_same_bits, one_axis


class Transformer(nn.Module):
    """Draws its submodules' values as models of transformers do, each model its own."""

    def __init__(self, layer, std=0.5):
        super().__init__()
        self.layer, self.std = layer(), std

    def initialize_weights(self):
        with torch.no_grad():
            self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=self.std)
            nn.init.zeros_(module.bias)


def test_leaves_that_an_initializer_of_a_model_leaves_out_are_refused():
    """Such as those that models of transformers draw in their constructors."""
    with torch.device("meta"):
        model = fs.functionalize(fs.with_init_weights(Transformer(lambda: nn.LayerNorm(3))))
    with pytest.raises(ValueError, match="values cannot be drawn from a seed") as caught:
        model.init(fs.ddp(one_axis()), seed=0)
    assert "['layer.weight']: expected a value for each, got elements left out" in str(caught.value)
    assert str(caught.value).endswith(REMEDY)


def children_first(module):
    for child in module.children():
        yield from children_first(child)
    yield module


# A weight that is tied and the one that is its source, of either model.
TIES = (("layer.1.layer", "layer.0"), ("layer.0", "layer.1.layer"))


def nested(target, source):
    """A model of transformers around another, inside of a module that is none; two layers share a weight."""
    inner = Transformer(lambda: nn.Linear(3, 3), std=2.0)
    module = nn.Sequential(nn.Linear(2, 3), Transformer(lambda: nn.Sequential(nn.Linear(3, 3), inner)), nn.LayerNorm(3))
    inner.layer.weight = module[1].layer[0].weight
    module[1].all_tied_weights_keys = {f"{target}.weight": f"{source}.weight"}
    return module


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("mode", MODES)
def test_models_of_transformers_draw_by_their_own_initializer(mode, tie):
    """With tied weights as if they were not tied, of which the source's is kept, as after their init_weights."""
    oracle = nested(*tie)
    inner = oracle[1].layer[1]
    target, source = map(oracle[1].get_submodule, tie)
    target.weight = nn.Parameter(torch.empty(3, 3))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        oracle[0].reset_parameters()
        for part in children_first(oracle[1]):
            (inner if part in (inner, inner.layer) else oracle[1])._init_weights(part)
    target.weight = source.weight
    expected = {name: p.detach() for name, p in oracle.named_parameters()}

    def program():
        with torch.device("meta"):
            model = fs.functionalize(fs.with_init_weights(nested(*tie)))
        params = fs.unshard(model.init(fs.zero2(one_axis(), min_shard_elements=0), seed=3, mode=mode))
        assert params.keys() == expected.keys()
        assert not any(leaf.isnan().any() for leaf in params.values())
        if mode == "replay":
            assert_same_bits(params, expected)
        return params

    first, second = spmd(program, 2)
    assert_same_bits(first, second)


class Declared(nn.Module):
    """Has a model among its submodules that declares its units by the names of their classes, as transformers does."""

    def __init__(self, inner, outer=None):
        super().__init__()
        self.tower = Tower()
        self.tower._no_split_modules = set(inner)
        self._no_split_modules = outer


def test_units_that_a_model_declares():
    assert fs.no_split(Declared(["Block", "Embedding", "ReLU", "LSTM"])) == (nn.Embedding, Block, nn.ReLU)
    assert fs.no_split(Declared(["Block"], outer=("Sequential",))) == (Block, nn.Sequential)
    # A class that stands for the whole model is no unit.
    assert fs.no_split(Declared(["Declared", "Block"])) == (Block,)
