"""Law 3 for units: models cut in every way, checkpointed, routed and differentiated, have one process's numbers."""

import itertools
from functools import partial
from operator import attrgetter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fshard as fs
from fshard.testing import assert_trees_close
from tests.checkpoints import selective_checkpoint
from tests.ranks import my_rank, on_ranks
from tests.trees import one_axis
from tests.unit_models import (
    CHOSEN,
    HIDDEN,
    MORE_RULES,
    STRATEGIES,
    VOCABULARY,
    WIDTH,
    Block,
    Dropped,
    Language,
    Perceptron,
    Row,
    assert_each_is_one_process,
    filled,
    near,
    tie_head,
    tokens,
    vectors,
    zero3,
)

kept = partial(checkpoint, use_reentrant=False)
# Keeps the products of matrices and computes the rest again.
selective = selective_checkpoint([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


def tie_blocks(model):
    """Units that share a leaf: one next to the other, and one far away."""
    first, second, third = (block.perceptron for block in model.blocks)
    third.inner.weight, third.outer.weight = first.inner.weight, first.outer.weight
    model.blocks[1].norm = model.blocks[0].norm
    second.outer.bias = first.outer.bias
    model.blocks[2].scale = model.norm.weight


class ReadsAhead(Language):
    """Reads weights of units before, after and inside their turns, and the head's as the embedding's."""

    def hidden(self, h):
        h = h.to(self.blocks[2].perceptron.inner.weight.dtype)
        for i, block in enumerate(self.blocks):
            h = block(h) + self.blocks[i - 1].scale
        return h * self.blocks[1].perceptron.outer.bias

    def logits(self, h):
        return F.linear(self.norm(h), self.embedding.weight)


class InOrder(Language):
    """Enters its blocks in an order that may not be the one of their registration, so many times."""

    def __init__(self, order, tie=lambda model: None):
        super().__init__(tie)
        self.order = order

    def hidden(self, h):
        for i in self.order:
            h = self.blocks[i](h)
        return h


def frozen_units():
    model = Language()
    for path in ("blocks.0", "blocks.2.perceptron", "norm", "blocks.1.scale"):
        attrgetter(path)(model).requires_grad_(False)
    return model


def frozen_and_tied():
    model = Language(tie_head)
    model.embedding.weight.requires_grad_(False)
    return model


LANGUAGES = {
    "tied blocks": lambda: Language(tie_blocks, hidden=(13, 11, 13)),
    "frozen and tied": frozen_and_tied,
    "reads ahead": ReadsAhead,
    "twice around, tied": lambda: InOrder((0, 1, 2) * 2, tie_head),
    "twice in a row, backwards": lambda: InOrder((2, 2, 1, 1, 0)),
    "frozen units": frozen_units,
}


class Around(Language):
    """Checkpoints its blocks: each of them, some together, or all with what comes before and after."""

    def __init__(self, run, form, tie=lambda model: None):
        super().__init__(tie)
        self.run, self.form = run, form

    def hidden(self, h):
        a, b, c = self.blocks
        if self.form == "all":
            return self.run(super().hidden, h)
        if self.form == "nested":
            return self.run(lambda h: self.run(b, self.run(a, h)), c(h))
        if self.form == "again":
            # A unit used twice in one checkpoint, and once more after it.
            return a(self.run(lambda h: a(b(a(h))), h))
        return self.run(c, self.run(b, self.run(a, h)))

    def logits(self, h):
        return self.run(super().logits, h) if self.form in ("all", "nested") else super().logits(h)


def inside():
    """Blocks that checkpoint what they do."""
    model = Language()
    model.blocks = nn.ModuleList(Dropped(hidden, checkpointed=True) for hidden in (13, HIDDEN, 11))
    return model.eval()


CHECKPOINTED = {
    "inside": inside,
    "each": partial(Around, kept, "each"),
    "all": partial(Around, kept, "all"),
    "each, selective": partial(Around, selective, "each"),
    "all, selective": partial(Around, selective, "all"),
    "nested": partial(Around, kept, "nested", tie_head),
    "again": partial(Around, kept, "again", tie_head),
}


class Critic(nn.Module):
    """Scores vectors, by a head that is frozen; checkpoints its blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, (13, HIDDEN, 11)))
        self.head, self.scale = nn.Linear(WIDTH, 1).requires_grad_(False), nn.Parameter(torch.empty(WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = kept(block, x)
        return self.head(torch.tanh(x * self.scale)).square()


def penalised(apply, params, x):
    """WGAN-GP: the gradient with respect to the inputs is part of the loss."""
    x = x.detach().requires_grad_()
    score = apply(params, x)
    (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + (grad.square().sum(-1) - 1).square().mean()


def thrice(apply, params, x):
    return apply(params, x * apply(params, x * apply(params, x))).mean()


def scaled(params, names=("",)):
    """Compute some parameters from what they are."""
    chosen = {name: leaf for name, leaf in params.items() if any(part in name for part in names)}
    return dict(params) | fs.tree_map(lambda x: 1.5 * torch.tanh(x), chosen)


def minus_a_target(apply, params, *batch):
    """The target has no gradient."""
    target = apply(fs.tree_map(lambda x: x.detach() * 0.9, params), *batch)
    return (apply(params, *batch) - target).square()


# Losses of parameters that are made of shards.
OF_SHARDS = {
    "all of them": lambda apply, p, *x: apply(scaled(p), *x),
    "some of them": lambda apply, p, *x: apply(scaled(p, ["blocks.1", "scale"]), *x) + apply(p, *x),
    "twice": lambda apply, p, *x: apply(q := scaled(p), *x) * apply(q, *x) ** 2,
    "target without gradient": minus_a_target,
    "gathered after maths": lambda apply, p, *x: apply(scaled(fs.gather(scaled(p))), *x),
}
EXPERTS = 3
# For each rank the experts of two layers, in the order of their use.
ROUTINGS = {
    "different": [([0, 1], [2]), ([1], [0, 2]), ([0, 2], [1])],
    "in another order": [([0, 1], [2]), ([2, 0], [1]), ([1], [2, 0])],
    "first ranks have none": [([], []), ([], [1]), ([2, 1, 0], [])],
    "nobody has some": [([1], []), ([], []), ([1], [])],
    "the same": [([0, 2], [1])] * 3,
}


class Mixture(nn.Module):
    """Experts whose gate is registered before or after them, and used before."""

    def __init__(self, gate_last, run):
        super().__init__()
        experts = nn.ModuleList(Perceptron(hidden) for hidden in (13, HIDDEN, 11))
        parts = {"gate": nn.Linear(WIDTH, EXPERTS), "experts": experts}
        for name in sorted(parts, reverse=not gate_last):
            self.add_module(name, parts[name])
        self.bias, self.run = nn.Parameter(torch.empty(WIDTH)), run

    def forward(self, x, picks):
        weights, out = F.softmax(self.gate(x), -1), x
        for e in picks:
            out = out + weights[..., e : e + 1] * self.run(self.experts[e], x)
        return out + self.bias


def plainly(f, *args):
    return f(*args)


class Switching(nn.Module):
    """A language model of two mixtures, with a layer and a parameter that only some ranks use.

    It may checkpoint each expert, each mixture, or both mixtures together.
    """

    def __init__(self, gate_last=False, tied=False, expert=plainly, mixture=plainly, mixtures=plainly):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = Mixture(gate_last, expert), Mixture(gate_last, expert)
        self.some = Perceptron()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
            self.second.experts[0].inner.weight = self.first.experts[0].inner.weight
            self.second.experts[2].outer.bias = self.some.outer.bias
        self.mixture, self.mixtures = mixture, mixtures

    def hidden(self, h, picks):
        h = self.mixture(self.first, h, picks[0])
        return self.mixture(self.second, h, picks[1])

    def forward(self, tokens, picks):
        h = self.mixtures(self.hidden, self.embedding(tokens), picks)
        if len(picks[0]) != 1:
            h = self.some(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), tokens.flatten())


SWITCHING = {
    "gate first": {},
    "tied": dict(tied=True, gate_last=True),
    "each expert checkpointed": dict(expert=kept),
    "each mixture checkpointed": dict(mixture=kept),
    "both mixtures checkpointed together": dict(mixtures=kept, gate_last=True),
}
SWITCHING_RULES = {
    "experts": Perceptron,
    "mixtures and experts": (Mixture, Perceptron),
    "every module": nn.Module,
    "one unit": None,
}


def is_supported(model, routing):
    """Whether ranks that compute a checkpoint inside a mixture again go through the same units in one order."""
    return model != "each expert checkpointed" or routing == "the same"


def picks(routing, ranks):
    return [(batch, picks) for (batch,), picks in zip(tokens(ranks), ROUTINGS[routing])]


ROUTED = [row for row in itertools.product(SWITCHING, SWITCHING_RULES, ROUTINGS) if is_supported(row[0], row[2])]


def routed(model, rule, routing, **options):
    return Row(filled(Switching(**SWITCHING[model])), SWITCHING_RULES[rule], partial(picks, routing), **options)


def made_of_shards(model):
    """Gradients that autograd goes on from are finished on every rank in the same order, whatever it has used."""
    plain = {name: option for name, option in SWITCHING[model].items() if option is not kept}
    routing = "different" if is_supported(model, "different") else "the same"
    reference = filled(Switching(**plain))
    return routed(model, "experts", routing, loss=OF_SHARDS["all of them"], reference=reference)


class Stages(nn.Module):
    """Blocks of which a rank runs the first few; and it may read parameters behind the last."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(Perceptron(hidden) for hidden in (13, HIDDEN, 11))
        self.scale, self.wide = nn.Parameter(torch.empty(WIDTH)), nn.Parameter(torch.empty(WIDTH, 5001))

    def forward(self, x, depth):
        for stage in self.stages[:depth]:
            x = stage(x)
        return (torch.tanh(x * self.scale) @ self.wide if depth > 1 else x).square().mean()


def depths(ranks):
    return [(x, depth) for (x,), depth in zip(vectors(ranks), (2, 3, 1))]


def some_computed(apply, params, *batch):
    """Gradients of computed leaves are reduced at once, and take none with them that this rank alone has."""
    return apply(scaled(params, ["stages.0"]), *batch)


def by_rules(rows, rules, shift):
    """Rows by one rule after another, from one on."""
    chosen = itertools.islice(itertools.cycle(rules.items()), shift, None)
    return {f"{name} by {rule}": row._replace(units=units) for (name, row), (rule, units) in zip(rows.items(), chosen)}


def languages(models, shift):
    return by_rules({name: Row(filled(build()), None) for name, build in models.items()}, MORE_RULES, shift)


def losses(shift):
    rows = {loss.__name__: Row(filled(Critic()), None, vectors, loss) for loss in (penalised, thrice)}
    return by_rules(rows, MORE_RULES | {"a list": MORE_RULES["a list"][1:-1]}, shift)


def of_shards(shift):
    units = nn.Module if shift % 2 else (Block, nn.Linear)
    return {name: Row(filled(Language(tie_head)), units, tokens, loss) for name, loss in OF_SHARDS.items()}


# The rows of each table, of which each number up to SHIFTS shows others.
SHIFTS = 12


def routing(shift):
    rows = {f"{row}": routed(*row) for row in ROUTED[shift::SHIFTS]}
    rows |= {f"{model}, of shards": made_of_shards(model) for model in list(SWITCHING)[shift % 2 :: 2]}
    return rows | {"stages, computed": Row(filled(Stages()), Perceptron, depths, some_computed)}


TABLES = {
    "languages": partial(languages, LANGUAGES),
    "checkpointed": partial(languages, CHECKPOINTED),
    "losses": losses,
    "of shards": of_shards,
    "routing": routing,
}


@pytest.mark.rows(len(TABLES))
@pytest.mark.parametrize("table", TABLES)
def test_units_are_one_process(table):
    strategies = {name: STRATEGIES[name] for name in CHOSEN}
    rows = dict(list(TABLES[table](0).items())[::2])
    # Routings are of three ranks.
    assert_each_is_one_process(rows, 3 if table == "routing" else 2, strategies, each=False)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.parametrize("table", TABLES)
def test_units_are_one_process_by_every_rule_and_strategy(table, ranks):
    """And every row of the tables, of which the test above takes half; each number of them by every third strategy."""
    for n in range(SHIFTS):
        strategies = dict(itertools.islice(STRATEGIES.items(), n % 3, None, 3))
        assert_each_is_one_process(TABLES[table](n), ranks, strategies, again=True)


def test_every_strategy():
    """Of a model that does it all at once."""
    everything = {"everything": Row(filled(ReadsAhead(tie_head, hidden=(13, 11, 7))), nn.Module)}
    assert_each_is_one_process(everything, 2, STRATEGIES)


def test_experts_in_checkpoints_that_other_ranks_pass():
    """A unit that a rank passes over belongs to no checkpoint of the expert that it enters."""
    rows = {"experts": routed("each expert checkpointed", "experts", "different")}
    assert_each_is_one_process(rows, 3, {"prefetch 2": zero3(prefetch=2)})


def test_checkpoints_that_run_to_their_end():
    """They read weights again whose gradients are finished, and which the backward no longer needs."""
    rows = {name: Row(filled(CHECKPOINTED[name]()), Block) for name in ("nested", "again")}
    rows |= {f"{row}": routed(*row) for row in ROUTED[::2] if row[1:] == ("experts", "different")}
    with set_checkpoint_early_stop(False):
        assert_each_is_one_process(rows, 3, {n: STRATEGIES[n] for n in ("prefetch 1", "zero2")}, each=False)


def assert_is_that_of_full_tensors(loss, params):
    """A loss whose parameters are gathered unit by unit has the gradients that it has where they are gathered first."""
    expected = fs.value_and_grad(lambda p: loss(fs.gather(p)))(params)
    assert_trees_close(fs.value_and_grad(loss)(params), expected, **near(expected))


@on_ranks(3)
def test_reductions_do_not_overtake_a_collective_of_the_loss(world_size):
    mesh, module = one_axis(), filled(Stages())
    axis = fs.axis_of(mesh)
    module.stages[1].forward = lambda x: fs.pmean(torch.tanh(x), axis)
    model, (x, depth) = fs.functionalize(module, Perceptron), depths(world_size)[my_rank()]
    params = model.init(STRATEGIES["some kept, prefetch 2"](mesh))
    assert_is_that_of_full_tensors(lambda p: model.apply(p, x, max(depth, 2)), params)


class Reentrant(nn.Module):
    """Two units, the second in a reentrant checkpoint, with or without an input that takes a gradient."""

    def __init__(self, grad_in):
        super().__init__()
        self.first, self.second, self.grad_in = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), grad_in

    def forward(self, x):
        x = checkpoint(self.second, self.first(x) if self.grad_in else x, use_reentrant=True)
        return (x if self.grad_in else self.first(x)).square().mean()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@on_ranks(2)
def test_reentrant_checkpoints_are_refused():
    """By the name of a leaf whose gradient torch would leave out, on every rank."""
    mesh = one_axis()
    (x,) = vectors(2)[mesh.get_rank()]
    text = r"\['second\..*is read inside a reentrant checkpoint.*use_reentrant=False"
    for grad_in, strategy in ((False, STRATEGIES["prefetch 1"]), (True, fs.ddp)):
        model = fs.functionalize(filled(Reentrant(grad_in)), nn.Linear)
        params = model.init(strategy(mesh))
        run = fs.value_and_grad(model.apply)
        for form, batch in ((run, x), (fs.accumulate(model.apply), [x, x]), (fs.jit(run), x)):
            with pytest.raises(ValueError, match=text):
                form(params, batch)


@on_ranks(2)
def test_two_models_in_one_loss():
    """Both are trained, and a unit of one runs between units of the other."""
    mesh, (x,) = one_axis(), vectors(2)[my_rank()]
    models = [fs.functionalize(filled(m), Block) for m in (Critic(), nn.Sequential(Block(), Perceptron()))]

    def loss(params):
        student, teacher = (partial(model.apply, leaves) for model, leaves in zip(models, params))
        return (student(x) - teacher(x)).square().mean() + student(teacher(x) * x).mean()

    for prefetch in (0, 2):
        assert_is_that_of_full_tensors(loss, tuple(model.init(zero3(prefetch=prefetch)(mesh)) for model in models))


@on_ranks(2)
def test_low_rank_adaptation():
    """What trained leaves are added to trains them, beside frozen leaves of its unit."""
    mesh, (x,), module = one_axis(), vectors(2)[my_rank()], filled(nn.Sequential(Block(), Block(HIDDEN)))
    model, weights = fs.functionalize(module, Block), {n: p.detach() for n, p in module.named_parameters()}
    added = {name: torch.sin(weight) for name, weight in weights.items() if weight.dim() == 2}

    def loss(params):
        return model.apply(params, x).square().mean()

    for strategy in (STRATEGIES["prefetch 0"], STRATEGIES["merged"]):
        base, delta = fs.shard(weights, strategy(mesh), frozen="*"), fs.shard(added, strategy(mesh))

        def of_delta(delta, base=base):
            merged = {name: fs.Sharded(base[name].local + leaf.local, leaf.spec) for name, leaf in delta.items()}
            return loss(base | merged)

        whole = fs.shard(weights | {name: weights[name] + leaf for name, leaf in added.items()}, strategy(mesh))
        value, grads = fs.value_and_grad(lambda p: loss(fs.gather(p)))(whole)
        expected = value, {name: grads[name] for name in added}
        assert_trees_close(fs.value_and_grad(of_delta)(delta), expected, **near(expected))
