"""no_split: the units that a model declares as transformers does."""

from torch import nn

import fshard as fs
from tests.test_unit_rules import Block, Tower


class Declared(nn.Module):
    """Has a model among its submodules that declares its units by the names of their classes, as transformers does."""

    def __init__(self, *names, tail=("Sequential",)):
        super().__init__()
        self.tower = Tower()
        self.tower._no_split_modules = set(names)
        self._no_split_modules = tail


def test_units_that_a_model_declares():
    module = Declared("Block", "Embedding", "ReLU", "LSTM", tail=None)
    assert fs.no_split(module) == (nn.Embedding, Block, nn.ReLU)
    assert fs.no_split(Declared("Block")) == (Block, nn.Sequential)
    # A class that stands for the whole model is no unit.
    assert fs.no_split(Declared("Declared", "Block", tail=None)) == (Block,)
