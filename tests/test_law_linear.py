"""Law: a leaf or a unit costs as many calls however many there are, and nothing looks for one in a list of all.

The calls of every function are counted, for twice as many too; reads of lists that grow are such calls.
"""

import gc
import sys
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.engine import call, plan
from fshard.engine.cursor import Cursor
from tests.trees import one_axis

NUMBER = 48
UPDATE = fs.chain(fs.clip_by_global_norm(1.0), fs.from_torch(torch.optim.AdamW, lr=0.1))


class Reads(list):
    """A list whose reads are calls of Python."""

    def __iter__(self):
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, at):
        return [self[n] for n in range(len(self))[at]] if isinstance(at, slice) else super().__getitem__(at)

    def count(self, value):
        return sum(value == element for element in self)

    def __contains__(self, value):
        return self.count(value) > 0


def count_calls(f):
    counts = Counter()

    def count(frame, event, function):
        # Caches compare specs with equal ones of an earlier tree, or not.
        if event in ("call", "c_call") and frame.f_code.co_name != "__eq__":
            counts[frame.f_code if event == "call" else getattr(function, "__qualname__", function)] += 1

    # What earlier tests left would be collected meanwhile, and call back what watches it, such as torch.compile.
    gc.disable()
    sys.setprofile(count)
    try:
        f()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts


def zero3(bucket_bytes=0):
    return fs.zero3(one_axis(), min_shard_elements=0, bucket_bytes=bucket_bytes)


def tree_of(number):
    return {f"{i}": torch.ones(2) for i in range(number)}


def gathers(number, use):
    def loss(params):
        x = torch.ones(2)
        for shard in params.values():
            x = use(lambda x, shard: x * fs.gather(shard), x, shard)
        return x.sum()

    return lambda: fs.value_and_grad(loss)(fs.shard(tree_of(number), zero3()))


def model(number, bucket_bytes):
    """A model of so many units, in pairs."""
    blocks = [nn.Sequential(nn.LayerNorm(2), nn.LayerNorm(2)) for _ in range(number // 2)]
    model = fs.functionalize(nn.Sequential(*blocks), units=nn.LayerNorm)
    params = model.init(zero3(bucket_bytes))
    return lambda: fs.value_and_grad(lambda params: model.apply(params, torch.ones(2)).sum())(params)


def updated(number):
    state = fs.TrainState.create(fs.shard(tree_of(number), zero3()), UPDATE)
    return lambda: fs.reshard(fs.update(UPDATE, state, fs.tree_map(torch.cos, state.params)), fs.ddp(one_axis()))


def refused(number):
    expected = fs.tree.flatten(tree_of(number))
    flat = expected._replace(leaves=expected.leaves[1:], treedef=None)
    flat.paths = Reads(expected.paths[1:])

    def run():
        with pytest.raises(ValueError, match="trees differ in structure"):
            fs.tree.checks.same_structure("it", flat, expected)

    return run


PROGRAMS = {
    "plain gathers": lambda number: gathers(number, lambda f, *args: f(*args)),
    "checkpoints": lambda number: gathers(number, lambda *args: checkpoint(*args, use_reentrant=False)),
    "units": partial(model, bucket_bytes=0),
    "merged units": partial(model, bucket_bytes=2**20),
    "clip, update and reshard": updated,
    "a refusal": refused,
}


@pytest.mark.rows(len(PROGRAMS))
@pytest.mark.parametrize("program", PROGRAMS)
def test_calls_grow_with_the_number(program, monkeypatch):
    begin, merge, make = Cursor.__init__, plan.merge_small_units, call.make_plan

    def counted(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.steps, self._to_gather = Reads(self.steps), Reads(self._to_gather)

    monkeypatch.setattr(Cursor, "__init__", counted)
    monkeypatch.setattr(plan, "merge_small_units", lambda *args: Reads(merge(*args)))
    monkeypatch.setattr(call, "make_plan", lambda *args: (made := make(*args))._replace(unit_of=Reads(made.unit_of)))
    # The first run fills caches.
    _, before, after = (count_calls(PROGRAMS[program](number)) for number in (2, NUMBER, 2 * NUMBER))
    assert not {f: (before[f], after[f]) for f in after if after[f] > 2 * before[f] + NUMBER}
