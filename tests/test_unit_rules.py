"""Unit rules: what every form of `units=` selects, and what it refuses."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as wrapped

import fshard as fs
from tests.bad_input import text_of
from tests.trees import one_axis


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = nn.Linear(4, 4, bias=False)
        self.mlp = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
        self.scale = nn.Parameter(torch.ones(4))


class Tower(nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight


LAYERS = [["blocks.%d", "blocks.%d.mixer", "blocks.%d.mlp.0", "blocks.%d.mlp.2"], ["blocks.%d"]]
MLPS = ["blocks.%d", "blocks.%d.mixer", "blocks.%d.mlp"]


def tower(*blocks):
    """Units of a tower, given those of each block."""
    return ["embed", *(path % i for i, paths in enumerate(blocks) for path in paths), "head"]


BY_BLOCK, BY_MLP, BY_LIST = tower(["blocks.%d"], ["blocks.%d"]), tower(MLPS, MLPS), ["embed", "blocks", "head"]

# Rules and the submodules that they select of a Tower, in the order of their gathering.
RULES = [
    (None, [""]),
    (Block, BY_BLOCK),
    ((Block, nn.Embedding), BY_BLOCK),
    (("blocks.*", Block, "blocks.0"), BY_BLOCK),
    ("blocks.1", tower(*LAYERS)),
    ("blocks", BY_LIST),
    ("*", BY_LIST),
    ("blocks.?.mlp", BY_MLP),
    (lambda name, module: name.endswith("mlp"), BY_MLP),
    (lambda name, module: hasattr(module, "mixer"), BY_BLOCK),
    # There are 84 parameters in a block, 24 in the embedding and 6 in the head without the tied weight.
    (84, BY_BLOCK),
    (85, BY_LIST),
    (198, [""]),
    ([["embed"], [Block]], BY_BLOCK),
    ([lambda name, _: name == "head", nn.Sequential, "blocks.0"], tower(["blocks.%d", MLPS[2]], MLPS)),
    ([84, Block, "blocks.1", "blocks.1"], BY_BLOCK),
    # A class without parameters, and one unit inside another.
    (nn.ReLU, tower(LAYERS[0], LAYERS[0])),
    (["blocks.1.mlp", "blocks.1"], tower(LAYERS[0], ["blocks.%d", MLPS[2]])),
]


def selected(module, units):
    """The paths of units, each of which has the parameters of the submodules whose nearest unit it is."""
    names_of_units = {unit.path: list(unit.leaf_names) for unit in fs.functionalize(module, units=units)._units}
    # A tied weight is in every unit that uses it, by the first of its names.
    first_names = {parameter: name for name, parameter in module.named_parameters()}
    expected = {path: [] for path in names_of_units}
    for name, submodule in module.named_modules():
        names = [first_names[parameter] for parameter in submodule.parameters(recurse=False)]
        if names:
            around = [path for path in expected if not path or f"{name}.".startswith(f"{path}.")]
            expected[max(around, key=len)] += names
    assert names_of_units == {path: list(dict.fromkeys(names)) for path, names in expected.items()}
    return list(names_of_units)


def test_a_rule_selects_these_units():
    for units, expected in RULES:
        assert selected(Tower(), units) == expected, units


def wrapped_tower():
    tower = Tower()
    apply_activation_checkpointing(tower, check_fn=lambda submodule: isinstance(submodule, Block | nn.Linear))
    return wrapped(wrapped(tower))


def test_checkpoint_wrappers_change_no_name_that_rules_and_units_have():
    model, plain = fs.functionalize(wrapped_tower()), fs.functionalize(Tower())
    assert model.init(fs.ddp(one_axis())).keys() == plain.init(fs.ddp(one_axis())).keys()
    for units, expected in RULES:
        assert [unit.path for unit in fs.functionalize(wrapped_tower(), units=units)._units] == expected
        assert fs.functionalize(wrapped_tower(), units=units)._units == fs.functionalize(Tower(), units=units)._units
    with pytest.raises(ValueError, match="matches no submodule"):
        fs.functionalize(wrapped_tower(), units="blocks.0._checkpoint_wrapped_module")


def test_tied_modules_are_one_unit_and_tied_parameters_are_in_many():
    """A submodule under two names is entered under either of them."""
    shared, other = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    other.weight = shared.weight
    assert selected(nn.Sequential(shared, shared, other), nn.Linear) == ["0", "2"]


def test_bad_rules_are_refused():
    wrong = (nn.LSTM, "block.*", "blocks.0.scale", [], 199, 2.5, True, nn.Linear(2, 2))
    for units, shown in (*zip(wrong, wrong, strict=True), (["embed", "tail"], "tail"), ((Block, nn.LSTM), nn.LSTM)):
        text = (
            f"functionalize: units={shown!r} matches no submodule. Use names that module.named_modules() lists, a "
            "module class, a number of parameters, or a function of (name, module)."
        )
        assert text_of(lambda u=units: fs.functionalize(Tower(), u)) == text
