"""Activation checkpointing inside a unit, around one and around several has one process's numbers."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

import fshard as fs
from tests.ranks import on_ranks
from tests.trees import one_axis
from tests.unit_models import (
    HIDDEN,
    MORE_RULES,
    STRATEGIES,
    WIDTH,
    Block,
    Language,
    assert_one_process,
    assert_one_process_on_ranks,
    by_strategies,
    filled,
    tokens,
    vectors,
)

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


MODELS = {
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
@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_models(name, rule, strategies):
    assert_one_process_on_ranks(filled(MODELS[name]()), tokens, MORE_RULES[rule], strategies)


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", ("full, around each", "full, around nested", "full, around again"))
def test_recomputation_to_the_end(name):
    """A checkpoint usually stops once it has what was asked for."""
    module = filled(MODELS[name]())
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
