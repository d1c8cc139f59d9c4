"""What is held when: gathered weights are freed as soon as their unit has run."""

import gc
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import _compat
from fshard.engine.call import KEY
from fshard.testing import spmd
from tests.ranks import my_rank, on_ranks
from tests.trees import one_axis
from tests.unit_models import WIDTH, Dropped, filled, vectors, zero3

LAYERS = 6


class Log:
    """Full tensors that came and went, by the number of their layer; ranks have one each."""

    def __init__(self):
        self.gathered, self.grads, self.notes = [], [], []

    def note(self, event, layer):
        held = [{number for number, ref, _ in refs if not ref.expired()} for refs in (self.gathered, self.grads)]
        self.notes.append((event, layer, *held))


@dataclass(frozen=True)
class Watched(fs.ShardTransform):
    """Looks at full tensors on their way in, and at full gradients on their way out."""

    log: Any

    def gather(self, leaves, specs):
        self.log.gathered += references(leaf for leaf in leaves if not leaf.is_meta)
        return leaves

    def scatter(self, grads, specs):
        self.log.grads += references(grads)
        return grads


def references(tensors):
    """The layers of weights, which have as many rows as 100 and their number, with their memory and its bytes."""
    storages = [(max(x.shape) - 100, x.untyped_storage()) for x in tensors if x.dim() == 2]
    return [(layer, StorageWeakRef(storage), storage.nbytes()) for layer, storage in storages]


class Layer(nn.Module):
    """Notes what is held when its forward begins and ends, and when the backward comes to it and has left it."""

    def __init__(self, number, checkpointed):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(100 + number, WIDTH)), nn.Parameter(torch.empty(WIDTH))
        self.number, self.checkpointed = number, checkpointed

    def forward(self, pair):
        x, log = pair
        log.note("begin", self.number)
        y = checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)
        log.note("end", self.number)
        y.register_hook(lambda grad: log.note("backward begins", self.number))
        if x.requires_grad:
            x.register_hook(lambda grad: log.note("backward ends", self.number))
        return y, log

    def run(self, x):
        return x + torch.tanh(x @ self.weight.T) @ self.weight + self.bias


class AfterRecurrent(nn.Module):
    """A layer behind a recurrent one, whose weights have 100 rows."""

    def __init__(self):
        super().__init__()
        self.lstm, self.layer = nn.LSTM(WIDTH, 25, proj_size=WIDTH), Layer(1, checkpointed=False)

    def forward(self, pair):
        x, log = pair
        return self.layer((self.lstm(x)[0], log))


def noted(module, world_size, **options):
    """What each rank noted, with everything that it logged."""
    filled(module)

    def program():
        log, model = Log(), fs.functionalize(module, lambda _, part: isinstance(part, Layer | nn.LSTM))
        params = model.init(fs.compose(zero3(**options)(one_axis()), Watched(log)))
        (x,) = vectors(world_size)[my_rank()]
        _, log.returned = fs.value_and_grad(lambda p: model.apply(p, (x, log))[0].square().mean())(params)
        log.note("returned", -1)
        return log

    return spmd(program, world_size)


# Which layers are gathered again: all, none, or these.
REGATHER = {True: set(range(LAYERS)), False: set(), ("1", "2"): {1, 2}}


@pytest.mark.rows(4)
@pytest.mark.parametrize("regather", REGATHER)
@pytest.mark.parametrize("checkpointed", (False, True))
@pytest.mark.parametrize("world_size, prefetch", [(2, 0), (3, 1)])
def test_a_unit_s_weight_is_freed_after_its_turn(world_size, prefetch, checkpointed, regather):
    """In the forward and the backward, but for units gathered ahead or kept; gradients go as they are reduced."""
    again = REGATHER[regather]
    # The last units stay for the backward where no gathers are under way in their place.
    last_dropped = LAYERS - 1 - prefetch
    module = nn.Sequential(*(Layer(number, checkpointed) for number in range(LAYERS)))
    for log in noted(module, world_size, prefetch=prefetch, regather=regather):
        events = {(event, layer) for event, layer, _, _ in log.notes}
        assert {("backward begins", n) for n in range(LAYERS)} < events
        for event, layer, weights, grads in log.notes:
            kept = set(range(layer)) - again
            if event in ("begin", "end"):
                first = min(layer, last_dropped)
                assert kept | {layer} <= weights <= kept | set(range(first, layer + prefetch + 1)), (event, layer)
                assert not grads
            elif event.startswith("backward"):
                # What was computed again lets go of its weight once all of it has been differentiated.
                last = layer + (checkpointed and event == "backward begins")
                assert kept <= weights <= kept | set(range(layer - prefetch - 1, last + 1)), (event, layer, weights)
                assert grads <= {layer, layer + 1}, (event, layer, grads)
        assert log.notes[-1] == ("returned", -1, set(), set())
        twice = [n for n in range(last_dropped) if n in again]
        assert Counter(layer for layer, *_ in log.gathered) == Counter([*range(LAYERS), *twice])


def test_a_recurrent_layer_lets_its_weights_go_after_its_turn():
    """torch lists them in the module, which would hold them until the call ends."""
    for log in noted(AfterRecurrent(), 2, prefetch=0):
        assert log.notes[0] == ("begin", 1, {1}, set())
        assert {layer for layer, *_ in log.gathered} >= {0, 1}


@pytest.mark.parametrize("keep", (False, True))
@on_ranks(2)
def test_a_second_gradient_is_added_in_the_memory_of_the_first_unless_that_is_held(keep):
    log, kept, places = Log(), [], []
    params = fs.shard(torch.ones(100, WIDTH), fs.compose(zero3()(one_axis()), Watched(log)))

    def loss(p):
        uses = [fs.gather(p), fs.gather(p)]
        for use in uses:
            use.register_hook(lambda grad: places.append(grad.untyped_storage()._cdata))
            use.register_hook(lambda grad: kept.extend([grad] if keep else []))
        return (uses[0] + 2 * uses[1]).square().sum()

    _, grads = fs.value_and_grad(loss)(params)
    assert ([place.cdata for _, place, _ in log.grads] == places[:1]) != keep
    values = [grad.unique().tolist() for grad in (*kept, fs.unshard(grads))]
    assert values == ([[12.0], [6.0], [18.0]] if keep else [[18.0]])


def refer_to_calls(case):
    """Differentiate on two ranks, and return a weak reference to the call of each."""
    module, calls = filled(nn.Sequential(*(Dropped(11, case == "a checkpoint") for _ in range(3)))).eval(), []
    computed = "1.perceptron.inner.weight"

    def program():
        model, (x,) = fs.functionalize(module, nn.Linear), vectors(2)[my_rank()]

        def loss(p):
            calls.append(weakref.ref(_compat.thread_object(KEY)))
            if case == "a computed leaf":
                p = p | {computed: fs.tree_map(torch.tanh, p[computed])}
            y = model.apply(p, x)
            return y.square().mean(), torch.softmax(y, -1) if case == "a result that is not used" else None

        fs.value_and_grad(loss, has_aux=True)(model.init(zero3()(one_axis())))

    spmd(program, 2)
    return calls


def test_nothing_leads_back_to_a_call_that_has_ended():
    """Hooks of a graph that stays would, and a result that is saved with its graph: no garbage collector sees those."""
    calls = {case: refer_to_calls(case) for case in ("a checkpoint", "a computed leaf", "a result that is not used")}
    gc.collect()
    left = [case for case, references in calls.items() if any(call() is not None for call in references)]
    assert list(map(len, calls.values())) == [2, 2, 2]
    assert left == []
