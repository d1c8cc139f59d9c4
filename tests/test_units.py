"""Models cut into units in every way, checkpointed and compiled too, have the loss and gradients of one process."""

from functools import partial
from operator import attrgetter

import pytest
import torch
from torch import nn
from torch._dynamo import lookup_backend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

import fshard as fs
from tests.ranks import on_ranks
from tests.trees import one_axis
from tests.unit_models import (
    HIDDEN,
    LENGTH,
    MORE_RULES,
    RULES,
    STRATEGIES,
    VOCABULARY,
    WIDTH,
    Block,
    Language,
    Perceptron,
    assert_one_process,
    assert_one_process_on_ranks,
    by_strategies,
    filled,
    tokens,
    vectors,
    zero3,
)


def tie_head(model):
    model.head.weight = model.embedding.weight


def tie_blocks(model):
    """Units that share a leaf: one next to the other, and one far away."""
    first, second, third = (block.perceptron for block in model.blocks)
    third.inner.weight, third.outer.weight = first.inner.weight, first.outer.weight
    model.blocks[1].norm = model.blocks[0].norm
    second.outer.bias = first.outer.bias
    model.blocks[2].scale = model.norm.weight


def share_block(model):
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[1], model.blocks[0]])


class TiedByAttribute(Language):
    def logits(self, h):
        return F.linear(self.norm(h), self.embedding.weight)


class ReadsAhead(Language):
    """Reads weights of units before, after and inside their turns, as some models do for their dtypes."""

    def hidden(self, h):
        h = h.to(self.blocks[2].perceptron.inner.weight.dtype)
        for i, block in enumerate(self.blocks):
            h = block(h) + self.blocks[i - 1].scale
        return h * self.blocks[1].perceptron.outer.bias


class InOrder(Language):
    """Enters its blocks in an order that may not be the one of their registration."""

    def __init__(self, order, tie=lambda model: None):
        super().__init__(tie)
        self.order = order

    def hidden(self, h):
        for i in self.order:
            h = self.blocks[i](h)
        return h


class TwiceAround(Language):
    def hidden(self, h):
        return super().hidden(super().hidden(h))


class ComputesAside(Language):
    """Uses a unit's outputs after others have run, and one unit inside another's forward."""

    def hidden(self, h):
        first, second, third = self.blocks
        early = first(h)
        return second(third(early)) + early * first.scale


class LooksFirst(Block):
    """Reads each weight without a gradient before it reads it with one."""

    def forward(self, x):
        with torch.no_grad():
            size = sum(parameter.square().mean() for parameter in self.parameters())
        return super().forward(x) * torch.cos(size)


def look_first(model):
    model.blocks = nn.ModuleList(LooksFirst(hidden) for hidden in (13, 11))
    model.blocks.append(Block(5))


class Everything(TwiceAround, ReadsAhead, TiedByAttribute):
    """All of it at once."""


def freeze(*paths, tie=lambda model: None):
    """Freeze some submodules and parameters of a model, once others are tied."""

    def apply(model):
        tie(model)
        for path in paths:
            attrgetter(path)(model).requires_grad_(False)

    return apply


def add_unused(model):
    model.blocks.insert(1, Block(5))
    model.blocks[3].register_parameter("unused", nn.Parameter(torch.empty(3, 5)))
    model.register_parameter("unused", nn.Parameter(torch.empty(2)))


LANGUAGES = {
    "language": Language,
    "tied": lambda: Language(tie_head),
    "tied by attribute": TiedByAttribute,
    "tied blocks": lambda: Language(tie_blocks, hidden=(13, 11, 13)),
    "shared block": lambda: Language(share_block),
    "reads ahead": ReadsAhead,
    "twice in a row": lambda: InOrder((0, 0, 1, 1, 2, 2)),
    "twice around": TwiceAround,
    "twice around, tied": lambda: TwiceAround(tie_head),
    "backwards": lambda: InOrder((2, 1, 0)),
    "computes aside": ComputesAside,
    "read without a gradient first": lambda: Language(look_first),
    "frozen leaves": lambda: Language(
        freeze("embedding.weight", "blocks.0.scale", "blocks.1.perceptron.inner.weight", "norm.bias")
    ),
    "frozen units": lambda: Language(freeze("blocks.0", "blocks.2.perceptron", "norm")),
    "frozen front": lambda: Language(freeze("embedding", "blocks.0", "blocks.1")),
    "frozen and tied": lambda: Language(freeze("embedding.weight", tie=tie_head)),
    "unused": lambda: InOrder((0, 2, 3), add_unused),
}


@pytest.mark.rows(1)
@by_strategies("rule", ("two classes", "every module"), MORE_RULES)
@pytest.mark.parametrize("name", LANGUAGES)
def test_language_models(name, rule, strategies):
    assert_one_process_on_ranks(filled(LANGUAGES[name]()), tokens, MORE_RULES[rule], strategies)


@pytest.mark.rows(1)
@pytest.mark.parametrize("rule", RULES)
def test_every_strategy(rule):
    assert_one_process(filled(Everything(tie_head)), tokens(), MORE_RULES[rule], STRATEGIES)


@pytest.mark.rows(2)
@pytest.mark.parametrize("prefetch", (0, 1, 2))
def test_a_list_says_the_order_of_gathering(prefetch):
    """Units that a model enters backwards are gathered ahead in that order, each once."""
    rule = ["embedding", "blocks.2", "blocks.1", "blocks.0", "norm", "head"]
    module = filled(InOrder((2, 1, 0)))
    assert_one_process(module, tokens(), rule, {"zero3": zero3(prefetch=prefetch)}, again=True)


class Loss(nn.Module):
    """A module's output, or the first of several, as a loss."""

    def __init__(self, *modules):
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x):
        for part in self.parts:
            out = part(x)
            x = out[0] if isinstance(out, tuple) else out
        return x.square().mean()


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x.flip(0), x)


class Containers(nn.Module):
    """Parameters in lists and dicts, of no dimension, of one element and of none."""

    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([torch.empty(WIDTH, WIDTH), torch.empty(WIDTH)])
        self.dict = nn.ParameterDict({"scalar": torch.empty(()), "one": torch.empty(1), "cube": torch.empty(1, 1, 1)})
        self.nested = nn.ParameterDict({"list": nn.ParameterList([torch.empty(WIDTH, 1), torch.empty(0, WIDTH)])})
        self.scalar = nn.Parameter(torch.empty(()))

    def forward(self, x):
        y = F.linear(x, self.list[0], self.list[1]) * self.dict["scalar"] + self.dict["one"] * self.dict["cube"]
        for weight in self.list:
            y = y + weight.sum()
        return y * self.scalar + x @ self.nested["list"][0] + self.nested["list"][1].sum()


class Steps(nn.Module):
    """A cell that is called once for each element of a sequence."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        hidden = torch.zeros_like(x[:, 0])
        for i in range(x.shape[1]):
            hidden = self.cell(x[:, i], hidden)
        return hidden


MODULES = {
    "lstm": lambda: Loss(
        nn.LSTM(WIDTH, 5, num_layers=3, batch_first=True, bidirectional=True, proj_size=4), nn.Linear(8, 3)
    ),
    "gru": lambda: Loss(Perceptron(), nn.GRU(WIDTH, WIDTH, num_layers=2), nn.GRU(WIDTH, 3)),
    "cell": lambda: Loss(Perceptron(), Steps(nn.GRUCell(WIDTH, WIDTH))),
    "attention": lambda: Loss(Attention(WIDTH, 2), Attention(WIDTH, 4, bias=False, add_bias_kv=True)),
    "encoder": lambda: Loss(
        *(nn.TransformerEncoderLayer(WIDTH, 2, 19, dropout=0.0, norm_first=first) for first in (True, False))
    ),
    "encoder of layers": lambda: Loss(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 19, dropout=0.0), 2, enable_nested_tensor=False)
    ),
    "containers": lambda: Loss(Containers(), Containers()),
    "convolution": lambda: Loss(nn.Conv1d(LENGTH, 5, 3), nn.GroupNorm(5, 5), nn.Flatten(), nn.Linear(30, 3)),
    "weight norm": lambda: Loss(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    ),
}

MODULE_RULES = {"every module": nn.Module, "parts": "parts.*", "one unit": None, "a size": 30}


@pytest.mark.rows(1)
@by_strategies("rule", ("every module", "parts"), MODULE_RULES)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, rule, strategies):
    assert_one_process_on_ranks(filled(MODULES[name]()), vectors, MODULE_RULES[rule], strategies)


def test_no_size_divides():
    """The tables test what they say."""
    shapes = {parameter.shape[0] for parameter in Language().parameters()}
    assert VOCABULARY in shapes
    assert all(any(size % ranks for size in shapes) for ranks in (2, 3))


kept = partial(checkpoint, use_reentrant=False)

# Keeps the products of matrices and computes the rest again.
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
selective = partial(kept, context_fn=partial(create_selective_checkpoint_contexts, PRODUCTS))


class Inside(Block):
    """Checkpoints one of its submodules, or what it computes with a parameter of its own."""

    def __init__(self, hidden, run, own):
        super().__init__(hidden)
        self.run, self.own = run, own

    def forward(self, x):
        if self.own:
            return self.run(super().forward, x)
        return self.run(self.perceptron, self.norm(x * self.scale)) * self.scale


class Around(Language):
    """Checkpoints its blocks: each of them, some together, or all with what comes before and after."""

    def __init__(self, run, several="", tied=False):
        super().__init__()
        self.run, self.several = run, several
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, h):
        if self.several == "all":
            return self.run(super().hidden, h)
        if self.several == "nested":
            return self.run(lambda h: self.run(self.blocks[1], self.run(self.blocks[0], h)), self.blocks[2](h))
        if self.several == "pairs":
            return self.blocks[2](self.run(lambda h: self.blocks[1](self.blocks[0](h)), h))
        if self.several == "again":
            # A unit used twice in one checkpoint, and once more after it.
            return self.blocks[0](self.run(lambda h: self.blocks[0](self.blocks[1](self.blocks[0](h))), h))
        if self.several == "some":
            return self.blocks[2](self.run(self.blocks[1], self.blocks[0](h)))
        for block in self.blocks:
            h = self.run(block, h)
        return h

    def logits(self, h):
        return self.run(super().logits, h) if self.several in ("all", "nested") else super().logits(h)


def inside(run, own):
    model = Language()
    model.blocks = nn.ModuleList(Inside(hidden, run, own) for hidden in (13, HIDDEN, 11))
    return model


class Whole(Language):
    """Checkpoints its forward, from embedding to loss."""

    def forward(self, tokens):
        # One input must take a gradient, and tokens do not.
        start = torch.zeros((), dtype=torch.float64, requires_grad=True)
        return kept(lambda start: super(Whole, self).forward(tokens) + start, start)


class Plain(Language):
    """Checkpoints what is no module, with a weight of a unit that is used outside too."""

    def logits(self, h):
        return kept(lambda h: F.linear(self.norm(h) * self.blocks[1].scale, self.embedding.weight), h)


CHECKPOINTED = {
    **{
        f"{name}, {how}": build
        for name, run in (("full", kept), ("selective", selective))
        for how, build in {
            "inside": partial(inside, run, False),
            "inside, all of it": partial(inside, run, True),
            **{
                f"around {several or 'each'}": partial(Around, run, several) for several in ("", "some", "pairs", "all")
            },
        }.items()
    },
    "full, around nested": partial(Around, kept, "nested"),
    "full, around again": partial(Around, kept, "again"),
    "full, around all, tied": partial(Around, kept, "all", True),
    "whole": Whole,
    "plain": Plain,
}


@pytest.mark.rows(1)
@by_strategies("rule", ("two classes", "every module"), MORE_RULES)
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointed_models(name, rule, strategies):
    assert_one_process_on_ranks(filled(CHECKPOINTED[name]()), tokens, MORE_RULES[rule], strategies)


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", ("full, around each", "full, around nested", "full, around again"))
def test_recomputation_to_the_end(name):
    """A checkpoint usually stops once it has what was asked for."""
    module = filled(CHECKPOINTED[name]())
    with set_checkpoint_early_stop(False):
        assert_one_process(module, tokens(), Block, {"zero3": STRATEGIES["prefetch 1"]}, again=True)


class Reentrant(nn.Module):
    """Two units, the second in a reentrant checkpoint, with or without an input that takes a gradient."""

    def __init__(self, grad_in):
        super().__init__()
        self.first, self.second, self.grad_in = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), grad_in

    def forward(self, x):
        if self.grad_in:
            x = self.first(x)
        x = checkpoint(self.second, x, use_reentrant=True)
        return (x if self.grad_in else self.first(x)).square().mean()


def in_a_function(grad_in, params, x):
    first, second = ({name: params[f"{part}.{name}"] for name in ("weight", "bias")} for part in ("first", "second"))
    if grad_in:
        x = F.linear(x, **fs.gather(first))
    x = checkpoint(lambda x: F.linear(x, **fs.gather(second)), x, use_reentrant=True)
    return (x if grad_in else F.linear(x, **fs.gather(first))).square().mean()


@pytest.mark.rows(1)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@on_ranks(1, 2)
def test_reentrant_checkpoints_are_refused(world_size):
    """By the name of a leaf whose gradient torch would leave out, on every rank; not where none is asked for."""
    mesh = one_axis()
    (x,) = vectors(world_size)[mesh.get_rank()]
    for grad_in in (False, True):
        model = fs.functionalize(filled(Reentrant(grad_in)), nn.Linear)
        for strategy in (STRATEGIES["prefetch 1"], STRATEGIES["zero2"], fs.ddp):
            params = model.init(strategy(mesh))
            for loss in (model.apply, partial(in_a_function, grad_in)):
                run = fs.value_and_grad(loss)
                for form, given in ((run, x), (fs.accumulate(loss), [x, x]), (fs.jit(run), x)):
                    with pytest.raises(ValueError, match=r"(?s)\['second\..*reentrant.*use_reentrant=False"):
                        form(params, given)

            def distilled(p, x, model=model):
                with torch.no_grad():
                    teacher = model.apply(fs.gather(p), x)
                    straight = F.linear(x, *fs.gather([p["second.weight"], p["second.bias"]]))
                return F.linear(x, *fs.gather([p["first.weight"], p["first.bias"]])).mean() * teacher * straight.mean()

            _, grads = fs.value_and_grad(distilled)(params, x)
            assert fs.unshard(grads)["first.weight"].count_nonzero() == WIDTH**2
        with torch.no_grad():
            model.apply(params, x)


def compiled(module):
    return torch.compile(module, backend="aot_eager")


def compile_parts(*paths, before=lambda model: None):
    """Compile some submodules of a model, once it is made ready."""

    def apply(model):
        before(model)
        for path in paths:
            model.set_submodule(path, compiled(model.get_submodule(path)))

    return apply


def tie_far(model):
    tie_head(model)
    model.blocks[2].perceptron.outer.bias = model.blocks[0].perceptron.outer.bias


BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


class InPlace(Language):
    """Blocks that compile their own forward."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


COMPILED = {
    "blocks": lambda: Language(compile_parts(*BLOCKS)),
    "some": lambda: Language(compile_parts("blocks.1", "head")),
    "inside": lambda: Language(compile_parts(*(f"{block}.perceptron" for block in BLOCKS))),
    "tied": lambda: Language(compile_parts(*BLOCKS, before=tie_far)),
    "frozen": lambda: Language(compile_parts(*BLOCKS, before=freeze("blocks.0", "blocks.1.perceptron.inner"))),
    "whole": lambda: compiled(Language()),
    "in place": InPlace,
}
COMPILED_RULES = {"one unit": None, "a class": Block, "parts": Perceptron, "every module": nn.Module}
# The compiler itself looks at the gradient of whatever a block is called on.
COMPILES = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@COMPILES
@pytest.mark.slow
@pytest.mark.parametrize("rule", COMPILED_RULES)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_models(name, rule):
    torch._dynamo.reset()
    strategies = {name: STRATEGIES[name] for name in ("prefetch 1", "merged")}
    for world_size in (1, 2):
        assert_one_process(filled(COMPILED[name]()), tokens(world_size), COMPILED_RULES[rule], strategies)


@COMPILES
@pytest.mark.rows(1)
@pytest.mark.parametrize("prefetch", (0, 1))
@on_ranks(1)
def test_blocks_are_compiled_once(prefetch):
    """The same code runs in every call and in the backward, not a fresh one for each gathered weight."""
    torch._dynamo.reset()
    graphs, counts = [], []

    def counting(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    module = filled(Language())
    for i, block in enumerate(module.blocks):
        module.blocks[i] = torch.compile(block, backend=counting, dynamic=False)
    mesh, model = one_axis(), fs.functionalize(module, Block)
    params = model.init(zero3(prefetch=prefetch)(mesh))
    for batch in tokens(3):
        fs.value_and_grad(lambda p: model.apply(p, *batch))(params)  # noqa: B023
        counts.append(len(graphs))
    assert counts == [len(module.blocks)] * 3
