"""Units that a rank skips: a mixture of experts whose routing differs between ranks has one process's numbers."""

import itertools
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import one_axis
from tests.unit_models import (
    CHOSEN,
    HIDDEN,
    RANKS,
    STRATEGIES,
    VOCABULARY,
    WIDTH,
    Perceptron,
    assert_one_process,
    assert_one_process_on_ranks,
    by_strategies,
    filled,
    tokens,
    vectors,
)

EXPERTS = 3

# For each rank the experts of two layers, in the order of their use.
ROUTINGS = {
    "different": [([0, 1], [2]), ([1], [0, 2]), ([0, 2], [1])],
    "in another order": [([0, 1], [2]), ([2, 0], [1]), ([1], [2, 0])],
    "first ranks have none": [([], []), ([], [1]), ([2, 1, 0], [])],
    "nobody has some": [([1], []), ([], []), ([1], [])],
    "nobody has any": [([], []), ([], []), ([], [])],
    "backwards": [([2, 1, 0], [2, 1, 0]), ([0, 1, 2], [1, 0]), ([1, 2, 0], [0])],
    "the same": [([0, 2], [1])] * 3,
    "the same backwards": [([2, 1, 0], [1, 0])] * 3,
}


class Mixture(nn.Module):
    """Experts whose gate is registered before or after them, and used before."""

    def __init__(self, gate_last, checkpointed=False):
        super().__init__()
        if not gate_last:
            self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Perceptron(hidden) for hidden in (13, HIDDEN, 11))
        if gate_last:
            self.gate = nn.Linear(WIDTH, EXPERTS)
        self.bias = nn.Parameter(torch.empty(WIDTH))
        self.checkpointed = checkpointed

    def picked(self, x, weights, picks):
        return sum((weights[..., e : e + 1] * self.experts[e](x) for e in picks), torch.zeros_like(x))

    def forward(self, x, picks):
        weights, out = F.softmax(self.gate(x), -1), x
        if self.checkpointed == "together":
            return out + checkpoint(self.picked, x, weights, picks, use_reentrant=False) + self.bias
        for e in picks:
            y = checkpoint(self.experts[e], x, use_reentrant=False) if self.checkpointed else self.experts[e](x)
            out = out + weights[..., e : e + 1] * y
        return out + self.bias


class Switching(nn.Module):
    """A language model of two mixtures, with a layer and a parameter that only some ranks use."""

    def __init__(self, gate_last=False, tied=False, inner=False, outer=False, around=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = Mixture(gate_last, inner), Mixture(gate_last, inner)
        self.some = Perceptron()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
            self.second.experts[0].inner.weight = self.first.experts[0].inner.weight
            self.second.experts[2].outer.bias = self.some.outer.bias
        self.outer, self.around = outer, around

    def hidden(self, h, picks):
        for mixture, picked in zip((self.first, self.second), picks):
            h = checkpoint(mixture, h, picked, use_reentrant=False) if self.outer else mixture(h, picked)
        return h

    def forward(self, tokens, picks):
        h = self.embedding(tokens)
        h = checkpoint(self.hidden, h, picks, use_reentrant=False) if self.around else self.hidden(h, picks)
        if len(picks[0]) != 1:
            h = self.some(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), tokens.flatten())


MODELS = {
    "gate first": {},
    "gate last": dict(gate_last=True),
    "tied": dict(tied=True, gate_last=True),
    "each expert checkpointed": dict(inner=True),
    "experts checkpointed together": dict(inner="together"),
    "experts checkpointed in a checkpoint": dict(inner=True, around=True),
    "each mixture checkpointed": dict(outer=True),
    "both mixtures checkpointed together": dict(around=True, gate_last=True),
    "experts and mixtures checkpointed": dict(inner=True, outer=True),
}
NO_CHECKPOINTS = dict(inner=False, outer=False, around=False)

RULES = {
    "experts": Perceptron,
    "mixtures and experts": (Mixture, Perceptron),
    "every module": nn.Module,
    "one unit": None,
    "mixtures": Mixture,
    "parts of experts": "*.experts.*.*",
}


# In these, checkpoints begin inside a mixture's own forward.
INNER = ("each expert checkpointed", "experts checkpointed together")


def is_supported(model, rule, routing):
    """Whether all ranks, where they compute a checkpoint again, go through the same units in one order.

    Or, if not all of them enter it, whether it holds no more than one unit, and those that do come to it in one order.
    """
    if model not in INNER or rule in ("one unit", "mixtures") or routing.startswith("the same"):
        return True
    one_unit = model == "each expert checkpointed" and rule in ("experts", "mixtures and experts")
    return routing == "nobody has any" or (one_unit and routing in ("different", "nobody has some"))


def differing(model, rule):
    """A routing that differs between ranks, where that is supported."""
    return "different" if is_supported(model, rule, "different") else "the same"


def batches(routing, world_size):
    return [(batch, picks) for (batch,), picks in zip(tokens(world_size), ROUTINGS[routing])]


@pytest.mark.rows(2)
@by_strategies("routing", ("different",), ROUTINGS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model", [model for model in MODELS if model not in INNER])
def test_routing_differs_between_ranks(model, rule, routing, strategies):
    module = filled(Switching(**MODELS[model]))
    assert_one_process_on_ranks(module, partial(batches, routing), RULES[rule], strategies)


INNER_ROWS = [", ".join(row) for row in itertools.product(INNER, RULES, ROUTINGS) if is_supported(*row)]


@pytest.mark.rows(3)
@by_strategies("row", [f"{model}, experts, {differing(model, 'experts')}" for model in INNER], INNER_ROWS)
def test_checkpoints_begin_inside_a_mixture(row, strategies):
    model, rule, routing = row.split(", ")
    module = filled(Switching(**MODELS[model]))
    assert_one_process_on_ranks(module, partial(batches, routing), RULES[rule], strategies)


@on_ranks(2)
def test_ranks_that_compute_other_units_again_in_a_checkpoint_are_told():
    """The first rank comes to the last expert first, the other one to the first."""
    mesh, module = one_axis(), filled(Switching(inner="together"))
    rank = mesh.get_rank()
    model = fs.functionalize(module, Perceptron)
    params = model.init(STRATEGIES["prefetch 0"](mesh))
    batch, picks = batches("different", 2)[rank]
    with pytest.raises(fs.comm.CollectiveError) as caught:
        fs.value_and_grad(lambda p: model.apply(p, batch, picks))(params)
    # Rows of a rank, of two weights and two biases: six and four of the expert with 11, seven and four of that with 13.
    first, other = (
        f"all_gather number N (gather of second.experts.{e}) over 'shard' of float64 ({n},), {8 * n} bytes in "
        "value_and_grad"
        for e, n in ((2, 6 * 8 + 6 + 4 * 11 + 4), (0, 7 * 8 + 7 + 4 * 13 + 4))
    )
    assert re.sub(r"number \d+", "number N", str(caught.value)) == (
        "ranks differ in a collective\n"
        f"  rank 0: {first}\n"
        f"  rank 1: {other}\n"
        f"  rank {rank}, this one, was in {(first, other)[rank]}\n"
        "To fix: mend the first error; go on from the last checkpoint, or in the same processes: call fs.init_mesh on "
        "every rank, and the step again with the state before it."
    )


@pytest.mark.rows(2)
@pytest.mark.parametrize("strategy", ("prefetch 1", "merged"))
@pytest.mark.parametrize(
    "model, routing",
    [
        (model, routing)
        for model in ("gate last", *(model for model in MODELS if model.startswith(("each exp", "experts"))))
        for routing in ROUTINGS
        if is_supported(model, "experts", routing)
    ],
)
def test_every_rank_takes_part_whatever_its_routing(model, routing, strategy):
    module = filled(Switching(**MODELS[model]))
    assert_one_process(module, batches(routing, RANKS), Perceptron, {strategy: STRATEGIES[strategy]}, again=True)


@pytest.mark.rows(1)
@pytest.mark.parametrize("model", [model for model in MODELS if "checkpointed" in model])
def test_checkpoints_that_run_to_their_end(model):
    """They read weights again whose gradients are finished, and which the backward no longer needs."""
    module = filled(Switching(**MODELS[model]))
    with set_checkpoint_early_stop(False):
        for rule in ("experts", "every module"):
            assert_one_process(
                module,
                batches(differing(model, rule), RANKS),
                RULES[rule],
                {name: STRATEGIES[name] for name in ("prefetch 1", "zero2")},
            )


@pytest.mark.rows(1)
@pytest.mark.parametrize("model", MODELS)
def test_parameters_made_of_shards(model):
    """Gradients that autograd goes on from are finished on every rank in the same order, whatever it has used."""
    module, plain = filled(Switching(**MODELS[model])), filled(Switching(**MODELS[model] | NO_CHECKPOINTS))

    def loss(apply, params, *batch):
        return apply(fs.tree_map(lambda leaf: 1.5 * torch.tanh(leaf), params), *batch)

    options = dict(loss=loss, reference=plain)
    routing = differing(model, "experts")
    assert_one_process_on_ranks(module, partial(batches, routing), Perceptron, CHOSEN, **options)


class Stages(nn.Module):
    """Blocks of which a rank runs the first few."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(Perceptron(hidden) for hidden in (13, HIDDEN, 11))

    def forward(self, x, depth):
        for stage in self.stages[:depth]:
            x = stage(x)
        return x.square().mean()


def test_a_rank_stops_before_the_last_units():
    """It gathers them all the same, where other ranks enter them."""
    depths = (2, 3, 1)

    def batches(ranks):
        return [(x, depth) for (x,), depth in zip(vectors(ranks), depths)]

    assert_one_process_on_ranks(filled(Stages()), batches, Perceptron, CHOSEN)


class Late(nn.Module):
    """Parameters of an open unit that some ranks read behind the unit, or the collective, inside."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside
        self.scale, self.wide = nn.Parameter(torch.empty(WIDTH)), nn.Parameter(torch.empty(WIDTH, 5001))

    def forward(self, x, late):
        x = self.inside(x)
        return (torch.tanh(x * self.scale) @ self.wide if late else x).square().mean()


class Outer(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.first, self.late = Perceptron(), Late(inside)

    def forward(self, x, late):
        return self.late(self.first(x), late)


LATE = (True, False, True)


def test_reductions_wait_for_the_ranks_that_have_no_gradient_yet():
    """Gradients of computed leaves are reduced at once, and take none with them that this rank alone has."""

    def loss(apply, params, *batch):
        computed = {name: fs.tree_map(torch.tanh, leaf) for name, leaf in params.items() if "inside" in name}
        return apply(params | computed, *batch)

    def batches(ranks):
        return [(x, late) for (x,), late in zip(vectors(ranks), LATE)]

    assert_one_process_on_ranks(filled(Outer(Perceptron())), batches, (Late, Perceptron), CHOSEN, loss=loss)


@on_ranks(2, 3)
def test_reductions_do_not_overtake_a_collective_of_the_loss(world_size):
    full = {name: p.detach() for name, p in filled(Outer(torch.tanh)).named_parameters()}
    mesh = one_axis()
    axis, rank = fs.axis_of(mesh), mesh.get_rank()
    model = fs.functionalize(Outer(lambda x: fs.pmean(torch.tanh(x), axis)), (Late, Perceptron))
    ((x,), late) = vectors(world_size)[rank], LATE[rank]
    for strategy in CHOSEN[world_size].values():
        params = fs.shard(full, strategy(mesh))
        expected = fs.value_and_grad(lambda p: model.apply(fs.gather(p), x, late))(params)
        for _ in range(2):
            assert_trees_close(fs.value_and_grad(lambda p: model.apply(p, x, late))(params), expected)
