"""Blocks that torch.compile has compiled, as units, inside units and around them, have one process's numbers."""

import pytest
import torch
from torch import nn
from torch._dynamo import lookup_backend

import fshard as fs
from fshard.testing import spmd
from tests.trees import one_axis
from tests.unit_models import STRATEGIES, Block, Language, Perceptron, assert_one_process, filled, tokens, zero3


def compiled(module):
    return torch.compile(module, backend="aot_eager")


def compile_blocks(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = compiled(block)


def compile_some(model):
    model.blocks[1] = compiled(model.blocks[1])
    model.head = compiled(model.head)


def compile_inside(model):
    for block in model.blocks:
        block.perceptron = compiled(block.perceptron)


def compile_and_tie(model):
    model.head.weight = model.embedding.weight
    model.blocks[2].perceptron.outer.bias = model.blocks[0].perceptron.outer.bias
    compile_blocks(model)


def compile_and_freeze(model):
    model.blocks[0].requires_grad_(False)
    model.blocks[1].perceptron.inner.requires_grad_(False)
    compile_blocks(model)


class InPlace(Language):
    """Blocks that compile their own forward."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


MODELS = {
    "blocks": lambda: Language(compile_blocks),
    "some": lambda: Language(compile_some),
    "inside": lambda: Language(compile_inside),
    "tied": lambda: Language(compile_and_tie),
    "frozen": lambda: Language(compile_and_freeze),
    "whole": lambda: compiled(Language()),
    "in place": InPlace,
}
# The compiler itself looks at the gradient of whatever a block is called on.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

RULES = {"one unit": None, "a class": Block, "parts": Perceptron, "every module": nn.Module}


def compiled_case(name, rule):
    torch._dynamo.reset()
    strategies = {name: STRATEGIES[name] for name in ("prefetch 1", "merged")}
    for world_size in (1, 2):
        assert_one_process(filled(MODELS[name]()), tokens(world_size), RULES[rule], strategies)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_every_compiled_model(name, rule):
    compiled_case(name, rule)


@pytest.mark.rows(1)
@pytest.mark.parametrize("prefetch", (0, 1))
def test_blocks_are_compiled_once(prefetch):
    """The same code runs in every call and in the backward, not a fresh one for each gathered weight."""
    torch._dynamo.reset()
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    module = filled(Language())
    for i, block in enumerate(module.blocks):
        module.blocks[i] = torch.compile(block, backend=counting, dynamic=False)

    def program():
        mesh, model = one_axis(), fs.functionalize(module, Block)
        params = model.init(zero3(prefetch=prefetch)(mesh))
        counts = []
        for batch in tokens(3):
            fs.value_and_grad(lambda p: model.apply(p, *batch))(params)  # noqa: B023
            counts.append(len(graphs))
        return counts

    (counts,) = spmd(program, 1)
    assert counts == [len(module.blocks)] * 3
