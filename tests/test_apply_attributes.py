"""Laws 4 and 9: attributes that a forward sets do not outlive the call."""

from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal, one_axis
from tests.unit_models import filled, zero3

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


def writes_to_tensors(inner):
    inner.calls += 1
    inner.total += 1
    first = inner.total.item()
    inner.total = inner.total + inner.weight.sum()
    return first + inner.total + inner.calls


def writes_to_containers(inner):
    inner.outputs.append(inner.weight.sum())
    inner.by_name["weight"] = inner.by_name.get("weight", 0) + inner.weight.sum()
    inner.seen.add(1 + max(inner.seen))
    inner.ordered.move_to_end("first") if "first" in inner.ordered else inner.ordered.update(first=len(inner.ordered))
    inner.counts["some"] += 1
    inner.nested[0][0]["values"].append(1)
    found = len(inner.seen) + inner.counts["some"] * 10 + inner.ordered["first"] + len(inner.nested[0][0]["values"])
    return sum(inner.outputs) + inner.by_name["weight"] + found


def changes_mode_and_deletes(inner):
    inner.eval()
    first = hasattr(inner, "calls")
    if first:
        del inner.calls
    return 1 + first + inner.training


def registers_and_sets_a_parameter(inner):
    inner.register_forward_hook(lambda module, args, out: 2 * out)
    inner.more = nn.Sequential(*(nn.Identity() for _ in range(1 + len(getattr(inner, "more", ())))))
    inner.weight = nn.Parameter(2 * inner.weight.detach())
    return inner.weight.sum() + len(inner.more)


CHANGES = (
    *(caches_a_weight, writes_to_tensors, writes_to_containers, changes_mode_and_deletes),
    registers_and_sets_a_parameter,
)


class Stateful(nn.Module):
    """Its parent changes one unit's attributes, and one changes its own; a checkpoint reads what the forward set."""

    def __init__(self, change):
        super().__init__()
        self.first, self.second, self.change, self.mask = Inner(), Inner(), change, None

    def forward(self, x, fail=False):
        self.mask = (x > 0).to(x.dtype)
        part = checkpoint(lambda x: torch.tanh(self.second(x) * self.mask), x, use_reentrant=False)
        x = torch.tanh(self.first(x) + self.change(self.first) * self.first.scale) + part
        if fail:
            raise KeyError("after a change")
        return (self.second(x) * self.change(self.second)).square().mean()


def results(model, params, x):
    """All ways to run a model, each once."""
    loss, grads = fs.value_and_grad(model.apply)(params, x)
    _, again = fs.accumulate(model.apply)(params, [x, x])
    return loss, fs.unshard(grads), fs.unshard(again), model.apply(params, x), model.apply(fs.gather(params), x)


@on_ranks(1, pytest.param(2, marks=pytest.mark.slow))
def test_equal_calls_have_equal_results(world_size):
    """Those of a model that was never called, after calls on other parameters and calls that failed."""
    mesh = one_axis()
    x = normal(mesh.get_rank())(3, WIDTH)
    for change in CHANGES:
        module = filled(Stateful(change))
        params = fs.functionalize(module, Inner).init(zero3()(mesh))
        others = fs.tree_map(lambda leaf: leaf * 0.5, params)
        expected = [results(fs.functionalize(module, Inner), p, x) for p in (params, others)]
        model = fs.functionalize(module, Inner)
        # Ranks that fail apart by more than a moment would break the mesh.
        for run in (fs.value_and_grad(model.apply), model.apply) if world_size == 1 else ():
            with pytest.raises(KeyError, match="after a change"):
                run(params, x, fail=True)
        assert_same_bits([results(model, p, x) for p in (params, others)], expected)
