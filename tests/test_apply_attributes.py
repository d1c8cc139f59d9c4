"""Laws 4 and 9: attributes that a forward sets do not outlive the call."""

from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal, one_axis
from tests.unit_models import BOUND, filled, zero3

WIDTH = 5


class Inner(nn.Linear):
    """A unit with attributes of every kind."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.calls, self.total, self.outputs = 0, torch.zeros(()), []
        self.by_name, self.ordered, self.counts = {"calls": [0]}, OrderedDict(last=1), defaultdict(int, some=1)
        self.seen, self.nested = {1}, ([{"values": [1]}], "text")
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))


def caches_a_weight(inner):
    if not hasattr(inner, "cache"):
        inner.cache = inner.weight.detach() * 2
    return inner.cache.sum()


def counts(inner):
    inner.calls += 1
    return inner.calls


def writes_to_a_tensor(inner):
    inner.total += 1
    return inner.total.item()


def replaces_a_tensor(inner):
    inner.total = inner.total + inner.weight.sum()
    return inner.total


def appends(inner):
    inner.outputs.append(inner.weight.sum())
    return sum(inner.outputs)


def writes_to_a_dict(inner):
    inner.by_name["calls"][0] += 1
    inner.by_name["weight"] = inner.by_name.get("weight", 0) + inner.weight.sum()
    return inner.by_name["calls"][0] + inner.by_name["weight"]


def writes_to_other_dicts(inner):
    inner.ordered.move_to_end("first") if "first" in inner.ordered else inner.ordered.update(first=len(inner.ordered))
    inner.counts["some"] += 1
    inner.counts["other"] += 2
    return inner.counts["some"] * 10 + inner.counts["other"] + inner.ordered["first"]


def adds_to_a_set(inner):
    inner.seen.add(1 + max(inner.seen))
    return len(inner.seen)


def writes_to_what_lies_inside(inner):
    inner.nested[0][0]["values"].append(1)
    inner.nested[0].append({})
    return len(inner.nested[0][0]["values"]) + len(inner.nested[0])


def deletes(inner):
    if hasattr(inner, "calls"):
        del inner.calls
        return 1
    return 2


def changes_mode(inner):
    inner.eval()
    inner.training = not inner.training
    inner.requires = inner.__dict__.get("requires", 0) + 1
    return inner.requires + inner.training


def sets_a_parameter(inner):
    inner.weight = nn.Parameter(2 * inner.weight.detach())
    return inner.weight.sum()


def registers_a_hook(inner):
    inner.register_forward_hook(lambda module, args, out: 2 * out)
    return 1


def adds_a_submodule(inner):
    inner.more = nn.Sequential(*(nn.Identity() for _ in range(1 + len(getattr(inner, "more", ())))))
    return len(inner.more)


CHANGES = (
    *(caches_a_weight, counts, writes_to_a_tensor, replaces_a_tensor, appends, writes_to_a_dict),
    *(writes_to_other_dicts, adds_to_a_set, writes_to_what_lies_inside, deletes, changes_mode),
    *(sets_a_parameter, registers_a_hook, adds_a_submodule),
)


class Stateful(nn.Module):
    """Its parent changes one unit's attributes, and one changes its own."""

    def __init__(self, change):
        super().__init__()
        self.first, self.second, self.change, self.fail = Inner(), Inner(), change, False

    def forward(self, x, fail=False):
        x = torch.tanh(self.first(x) + self.change(self.first) * self.first.scale)
        if fail:
            raise KeyError("after a change")
        return (self.second(x) * self.change(self.second)).square().mean()


def results(model, params, x):
    """All ways to run a model, each once."""
    loss, grads = fs.value_and_grad(lambda p: model.apply(p, x))(params)
    return loss, fs.unshard(grads), model.apply(params, x), model.apply(fs.gather(params), x)


@pytest.mark.rows(1)
@on_ranks(1, 2)
def test_equal_calls_have_equal_results():
    """Those of a model that was never called, after calls on other parameters and calls that failed."""
    mesh = one_axis()
    x = normal(1 + mesh.get_rank())(3, WIDTH)
    for change in CHANGES:
        module = filled(Stateful(change))
        model = fs.functionalize(module, Inner)
        params = model.init(zero3()(mesh))
        others = fs.tree_map(lambda leaf: leaf * 0.5, params)
        expected = [results(fs.functionalize(module, Inner), p, x) for p in (params, others)]
        for run in (
            fs.value_and_grad(lambda p, m=model: m.apply(p, x, fail=True)),
            lambda p, m=model: m.apply(p, x, fail=True),
        ):
            with pytest.raises(KeyError, match="after a change"):
                run(params)
        try:
            assert_same_bits([results(model, p, x) for p in (params, others)], expected)
        except AssertionError as error:
            error.add_note(change.__name__)
            raise


class Masked(nn.Module):
    """Sets what its checkpointed part reads, in the backward too."""

    def __init__(self):
        super().__init__()
        self.inner, self.mask = Inner(), None

    def part(self, x):
        return torch.tanh(self.inner(x) * self.mask)

    def forward(self, x):
        self.mask = (x > 0).to(x.dtype)
        return checkpoint(self.part, x, use_reentrant=False).square().mean()


@on_ranks(1, 2)
def test_a_checkpoint_reads_in_the_backward_what_the_forward_has_set(world_size):
    module, mesh = filled(Masked()), one_axis()
    batches = [normal(rank)(3, WIDTH) for rank in range(world_size)]
    ranks = [torch.autograd.grad(module(x), [module.inner.weight, module.inner.bias]) for x in batches]
    expected = [sum(grads) / world_size for grads in zip(*ranks)]
    module.mask = None
    model, batch = fs.functionalize(module, Inner), batches[mesh.get_rank()]
    params = model.init(zero3()(mesh))
    for run in (fs.value_and_grad, fs.accumulate):
        _, grads = run(model.apply)(params, batch if run is fs.value_and_grad else [batch, batch])
        found = [fs.unshard(grads)[name] for name in ("inner.weight", "inner.bias")]
        assert_trees_close(found, expected, rtol=0, atol=BOUND)
