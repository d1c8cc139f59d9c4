"""Unit rules: what every form of `units=` selects, and what it refuses."""

import torch
from torch import nn

import fshard as fs
from tests.bad_input import text_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = nn.Linear(4, 4, bias=False)
        self.mlp = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x + self.scale * self.mlp(self.mixer(x))


class Tower(nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def of_block(i):
    return [f"blocks.{i}.scale", f"blocks.{i}.mixer.weight", f"blocks.{i}.mlp.0.weight", f"blocks.{i}.mlp.2.weight"]


EMBED = ("embed", ["embed.weight"])
# A tied weight is in every unit that uses it, by the first of its names.
HEAD = ("head", ["embed.weight", "head.bias"])
BLOCKS = [("blocks.0", of_block(0)), ("blocks.1", of_block(1))]
BY_BLOCK = [EMBED, *BLOCKS, HEAD]
ALL = ["embed.weight", *of_block(0), *of_block(1), "head.bias"]


def in_parts(i, *parts):
    """What a block owns, and its mixer, as units, with further parts of it and their parameters."""
    names = of_block(i)
    found = [("", names[:1]), (".mixer", names[1:2]), *((part, names[chosen]) for part, chosen in parts)]
    return [(f"blocks.{i}{part}", chosen) for part, chosen in found]


MLP, LAYERS = [(".mlp", slice(2, 4))], [(".mlp.0", slice(2, 3)), (".mlp.2", slice(3, 4))]
# A feed-forward network each; what else a block owns is one unit around them, and one for each other submodule.
BY_MLP = [EMBED, *in_parts(0, *MLP), *in_parts(1, *MLP), HEAD]
BY_LAYER = [EMBED, *in_parts(0, *LAYERS), *in_parts(1, *LAYERS), HEAD]

# What a rule selects of a Tower, as pairs of a submodule and its parameters, in the order of their gathering.
RULES = {
    "None": (None, [("", ALL)]),
    "a class": (Block, BY_BLOCK),
    "a tuple of classes": ((Block, nn.Embedding), BY_BLOCK),
    "a tuple whose parts overlap": (("blocks.*", Block, "blocks.0"), BY_BLOCK),
    "a name": ("blocks.1", [*BY_LAYER[:5], BLOCKS[1], HEAD]),
    "the name of a list": ("blocks", [EMBED, ("blocks", of_block(0) + of_block(1)), HEAD]),
    "a pattern": ("blocks.*", BY_BLOCK),
    "a pattern of one part": ("*", [EMBED, ("blocks", of_block(0) + of_block(1)), HEAD]),
    "a pattern inside": ("blocks.?.mlp", BY_MLP),
    "a function of the name": (lambda name, module: name.endswith("mlp"), BY_MLP),
    "a function of the module": (lambda name, module: hasattr(module, "mixer"), BY_BLOCK),
    # There are 84 parameters in a block, 24 in the embedding and 6 in the head without the tied weight.
    "a number": (84, BY_BLOCK),
    "a number that a block just misses": (85, [EMBED, ("blocks", of_block(0) + of_block(1)), HEAD]),
    "all parameters": (198, [("", ALL)]),
    "a list": (["embed", Block, "head"], BY_BLOCK),
    "a list in a list": ([["embed"], [Block]], BY_BLOCK),
    "a list of other forms": (
        [lambda name, module: name == "head", nn.Sequential, "blocks.0"],
        [EMBED, ("blocks.0", of_block(0)[:2]), BY_MLP[3], *BY_MLP[4:7], HEAD],
    ),
    "a list whose parts overlap": ([84, Block, "blocks.1", "blocks.1"], BY_BLOCK),
    "a class without parameters": (nn.ReLU, BY_LAYER),
    "a list of one inside another": (
        ["blocks.1.mlp", "blocks.1"],
        [*BY_LAYER[:5], ("blocks.1", of_block(1)[:2]), ("blocks.1.mlp", of_block(1)[2:]), HEAD],
    ),
}


def selected(module, units):
    return [(unit.path, list(unit.names)) for unit in fs.functionalize(module, units=units)._units]


def test_a_rule_selects_these_units():
    for name, (units, expected) in RULES.items():
        assert selected(Tower(), units) == expected, name


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
    with torch.device("meta"):
        assert fs.no_split(Declared("Block")) == (Block, nn.Sequential)
    assert selected(module, fs.no_split(module)) == selected(module, (Block, nn.Embedding))
    # A class that stands for the whole model is no unit.
    assert fs.no_split(Declared("Declared", "Block", tail=None)) == (Block,)


def test_tied_modules_are_one_unit_and_tied_parameters_are_in_many():
    """A submodule under two names is entered under either of them."""
    shared, other = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    other.weight = shared.weight
    module = nn.Sequential(shared, shared, other)
    assert selected(module, nn.Linear) == [("0", ["0.weight", "0.bias"]), ("2", ["0.weight"])]


# Rules that functionalize refuses, with the part that the error shows.
REFUSED = (
    *((nn.LSTM, nn.LSTM), (dict, dict), ("block.*", "block.*"), ("blocks.0.scale", "blocks.0.scale"), ([], [])),
    *(("blocks*0", "blocks*0"), (199, 199), (0, 0), (["embed", "tail"], "tail"), ((Block, nn.LSTM), nn.LSTM)),
)


def test_bad_rules_are_refused():
    for units, shown in REFUSED:
        text = f"functionalize: expected units to match submodules, got {shown!r}; name some of named_modules()"
        assert text_of(lambda u=units: fs.functionalize(Tower(), u)) == text
