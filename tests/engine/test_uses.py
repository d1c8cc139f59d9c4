"""Uses of units: when they are gathered, awaited, kept and freed, and that ranks which compute other things agree."""

import gc
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.engine.leaf import Leaf
from fshard.engine.plan import PLAIN, Unit
from fshard.engine.use import Use
from tests.ranks import on_ranks
from tests.trees import one_axis


def zero3(**options):
    return fs.zero3(one_axis(), **{"min_shard_elements": 0, "merge_bytes": 0, "prefetch": 0, **options})


def gathers(record):
    return [entry.unit for entry in record if entry.op == "all_gather" and not entry.scalar]


def model_of(module, **options):
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.1)
    model = fs.functionalize(module, lambda _, part: isinstance(part, nn.Linear | nn.Embedding))
    return model, model.init(zero3(**options))


class Layers(nn.Module):
    def __init__(self, number=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(number))

    def forward(self, x, skipped=()):
        for i, layer in enumerate(self.layers):
            if i not in skipped:
                x = layer(x)
        return x


class Seen(torch.overrides.TorchFunctionMode):
    """Counts the weights of layers that are alive, each time that one computes."""

    def __init__(self):
        self.weights, self.alive = [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            self.weights.append(StorageWeakRef(args[1].untyped_storage()))
            self.alive.append(sum(not weight.expired() for weight in self.weights))
        return func(*args, **(kwargs or {}))


class NoGrad(nn.Module):
    """Runs a part without gradients, and a layer without gradients on one rank."""

    def __init__(self):
        super().__init__()
        self.first, self.part, self.layer, self.last = nn.Linear(4, 4), Layers(2), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, skips=False):
        x = self.first(x)
        with torch.no_grad():
            x = x + self.part(x)
            x = x if skips else x + self.layer(x)
        return self.last(x).sum()


@on_ranks(2)
def test_what_runs_without_gradients_is_not_gathered_again():
    model, params = model_of(NoGrad())
    with fs.comm.record() as record:
        fs.value_and_grad(lambda p: model.apply(p, torch.ones(2, 4)))(params)
    assert [gathers(record).count(name) for name in ("first", "part.layers.0", "part.layers.1")] == [2, 1, 1]


@on_ranks(2)
def test_layers_that_stay_for_the_backward_are_dropped_when_another_forward_follows():
    model, params = model_of(Layers(4), prefetch=1)
    with fs.comm.record() as record:
        fs.value_and_grad(lambda p: (model.apply(p, torch.ones(2, 4)) + model.apply(p, torch.ones(2, 4))).sum())(params)
    # The last two of the second application stay, those of the first do not.
    assert [gathers(record).count(f"layers.{i}") for i in range(4)] == [4, 4, 3, 3]


@on_ranks(2)
def test_a_leaf_that_a_gather_names_twice_is_sent_once():
    params = fs.shard({"a": torch.ones(4)}, zero3())
    with fs.comm.record() as record:
        _, grads = fs.value_and_grad(lambda p: sum(fs.gather([p["a"], p["a"]])).sum())(params)
    sent = {entry.op: entry.bytes for entry in record if not entry.scalar}
    assert sent == {"all_gather": 16, "reduce_scatter": 16}
    assert fs.unshard(grads)["a"].tolist() == [2.0] * 4


@on_ranks(2)
def test_gathers_under_way_are_awaited_before_they_are_dropped():
    params, finished = fs.shard({"w": torch.ones(4)}, zero3()), []
    use = Use(Unit("u", ("w",), 8, PLAIN, True), [Leaf("w", params["w"], params["w"].local)])
    use.start()
    ((group, finish),) = use._finish
    use._finish = [(group, lambda: finished.append(1) or finish())]
    use.release()
    assert (use.begun, use.full, finished) == (False, None, [1])


@dataclass(frozen=True)
class Notes(fs.ShardTransform):
    """Notes a number for each reduction."""

    note: Any
    number: int

    def gather(self, leaves, specs):
        return leaves

    def scatter(self, grads, specs):
        self.note(self.number)
        return grads


@on_ranks(2)
def test_bytes_of_reductions_under_way_are_bounded():
    module, log = Layers(6), []
    # A layer has 80 bytes: it is reduced by itself, and twice as many bytes may be under way.
    strategy = fs.compose(Notes(log.append, -1), zero3(merge_bytes=80), Notes(log.append, 1))
    model = fs.functionalize(module, nn.Linear)
    fs.value_and_grad(lambda p: model.apply(p, torch.ones(2, 4)).sum())(model.init(strategy, seed=0))
    assert max(itertools.accumulate(log)) == 2


class Behind(nn.Module):
    """The last layer inside is gathered together with what follows."""

    def __init__(self):
        super().__init__()
        self.inside, self.head = Layers(3), nn.Linear(4, 4)

    def forward(self, x, skipped):
        return self.head(self.inside(x, skipped)).sum()


@on_ranks(2)
def test_a_rank_skips_a_layer_that_is_gathered_with_what_follows():
    # A layer has 20 elements: two of them are merged.
    model, params = model_of(Behind(), merge_bytes=160)
    with fs.comm.record() as record:
        model.apply(params, torch.ones(2, 4), (2,) if dist.get_rank() == 0 else ())
    assert gathers(record) == ["inside.layers.0 to inside.layers.1", "inside.layers.2 to head"]


@on_ranks(2)
def test_units_inside_a_submodule_that_runs_are_freed_one_by_one():
    model, params = model_of(nn.Sequential(Layers(4)))
    with Seen() as seen:
        fs.value_and_grad(lambda p: model.apply(p, torch.ones(2, 4)).sum())(params)
    assert seen.alive == [1, 1, 1, 1]


@on_ranks(2)
def test_a_checkpoint_computes_again_with_a_weight_whose_gradient_is_there():
    params = fs.shard({"a": torch.ones(4), "b": torch.ones(4)}, zero3(prefetch=None))

    def loss(p):
        def both(x):
            y = fs.gather([p["a"]])[0] * x
            y = y + fs.gather([p["b"]])[0]
            # Nobody differentiates the sine, so that the sum behind b is the first to run, and needs nothing again.
            return y, y.sin()

        return checkpoint(both, torch.ones(4), use_reentrant=False)[0].sum()

    with fs.comm.record() as record:
        fs.value_and_grad(loss)(params)
    assert len(gathers(record)) == 3


def without_collector(program):
    gc.collect()
    gc.disable()
    try:
        return fs.testing.spmd(program, world=2)
    finally:
        gc.enable()


def test_weights_that_are_kept_are_freed_after_apply():
    def program():
        model, params = model_of(Layers(), regather=False)
        with Seen() as seen, torch.no_grad():
            model.apply(params, torch.ones(2, 4))
        return [weight.expired() for weight in seen.weights]

    assert without_collector(program) == [[True] * 3] * 2


@pytest.mark.parametrize("strategy", (fs.zero3, fs.zero1, fs.ddp))
def test_derived_leaves_are_freed_after_each_microbatch(strategy):
    def program():
        params, seen = fs.shard({"a": torch.ones(4)}, strategy(one_axis())), []

        def loss(p, _):
            merged = fs.tree_map(lambda local: 2 * local, p["a"])
            full = fs.gather(merged)
            seen.extend(StorageWeakRef(each.untyped_storage()) for each in (merged.local, full))
            return full.sum()

        fs.accumulate(loss)(params, [0, 1, 2])
        return [each.expired() for each in seen]

    assert without_collector(program) == [[True] * 6] * 2


@on_ranks(2)
def test_a_leaf_that_the_first_microbatch_alone_used_through_a_derived_one_has_a_gradient():
    params = fs.shard({"a": torch.ones(4), "b": torch.ones(4)}, zero3())

    def loss(p, uses):
        doubled = fs.gather(fs.tree_map(lambda local: 2 * local, p["a"]))
        return (doubled if uses else fs.gather(p["b"])).sum()

    _, grads = fs.accumulate(loss, reduce="sum")(params, [True, False])
    assert fs.unshard(grads)["a"].tolist() == [4.0] * 4


class LooksFirst(nn.Linear):
    """Reads its weight without a gradient before it reads it with one."""

    def forward(self, x):
        with torch.no_grad():
            size = self.weight.norm()
        return super().forward(x).sum() / size


@on_ranks(1, 2)
def test_a_weight_that_is_read_without_a_gradient_first_has_one(world_size):
    model, params = model_of(LooksFirst(4, 4))
    _, grads = fs.value_and_grad(model.apply)(params, torch.ones(2, 4))
    # The norm of 16 elements of 0.1 is 0.4.
    torch.testing.assert_close(fs.unshard(grads)["weight"], torch.full((4, 4), 2 / 0.4))


class InAnotherOrder(nn.Module):
    """Runs a submodule before one that stands in front of it."""

    def __init__(self, inside):
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(4, 4), Layers(inside), nn.Linear(4, 4)

    def forward(self, x, skips):
        x = self.inside(x, range(3) if skips else ())
        x = x + fs.psum(x.detach(), fs.axis_of(one_axis()))
        return self.last(self.first(x)).sum()


class ReadsTheTable(nn.Module):
    """Multiplies by a table of embeddings, outside of its module."""

    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(8, 4), Layers()

    def forward(self, x, skips):
        x = self.layers(x + self.table(torch.arange(2)))
        logits = F.linear(x, self.table.weight)
        return self.layers(x).sum() + (0 if skips else logits.sum())


class ReadsAFrozenNumber(nn.Module):
    """Multiplies by a frozen parameter of the whole module, behind layers that are trained."""

    def __init__(self):
        super().__init__()
        self.scale, self.layers = nn.Parameter(torch.ones(4), requires_grad=False), Layers()

    def forward(self, x, skips):
        scale = self.scale
        x = self.layers(x)
        return (x if skips else x * scale).sum()


class RunsAFrozenLayer(nn.Module):
    """Runs a frozen layer behind layers that are trained."""

    def __init__(self):
        super().__init__()
        self.layers, self.frozen = Layers(), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x, skips):
        x = self.layers(x)
        return (x if skips else self.frozen(x)).sum()


class ChecksATable(nn.Module):
    """Looks up embeddings inside a checkpoint."""

    def __init__(self):
        super().__init__()
        self.table, self.inside, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, skips):
        h = checkpoint(lambda x: self.inside(x + self.table(torch.arange(2))).tanh(), x, use_reentrant=False)
        return self.head(x).sum() + (0 if skips else h.sum())


MODULES = {
    "one layer that a rank skips": lambda: InAnotherOrder(1),
    "layers that a rank skips, in another order": lambda: InAnotherOrder(3),
    "a layer without gradients": NoGrad,
    "a table that is read outside of its module": ReadsTheTable,
    "a frozen parameter of the whole": ReadsAFrozenNumber,
    "a frozen layer behind trained ones": RunsAFrozenLayer,
    "a table inside a checkpoint": ChecksATable,
}


@pytest.mark.parametrize("prefetch", (0, None))
@pytest.mark.parametrize("name", MODULES)
def test_a_rank_whose_loss_needs_less_sends_the_same(name, prefetch):
    def program(skips):
        model, params = model_of(MODULES[name](), prefetch=prefetch)
        local = skips and dist.get_rank() == 0
        with fs.comm.record() as record:
            # A second application follows.
            loss = fs.value_and_grad(
                lambda p: model.apply(p, torch.ones(2, 4), local) + model.apply(p, torch.ones(2, 4), 0)
            )
            loss(params)
        return [(entry.op, entry.unit) for entry in record]

    both, one = (fs.testing.spmd(lambda skips=skips: program(skips), world=2) for skips in (False, True))
    assert one[0] == one[1] == both[0]


@on_ranks(2)
def test_a_unit_of_plain_tensors_inside_a_checkpoint_needs_no_gather():
    class Checked(Layers):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False).sum()

    model, params = model_of(Checked())
    plain = {name: fs.unshard({"": leaf})[""] for name, leaf in params.items() if "layers.1" in name}
    value, grads = fs.value_and_grad(lambda p: model.apply({**p, **plain}, torch.ones(2, 4)))(params)
    whole, expected = fs.value_and_grad(lambda p: model.apply(p, torch.ones(2, 4)))(params)
    assert torch.equal(value, whole)
    assert all(grads[name] is None for name in plain)
    for name in params.keys() - plain.keys():
        assert torch.equal(grads[name].local, expected[name].local)


@on_ranks(2)
def test_a_function_that_differentiates_inside_gathers_nothing_twice():
    model, params = model_of(Layers(1))

    def loss(p):
        x = torch.ones(2, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(model.apply(p, x).sum(), x)
        return slope.sum() + model.apply(p, x).sum()

    with fs.comm.record() as record:
        fs.value_and_grad(loss)(params)
    assert gathers(record).count("layers.0") <= 3


@on_ranks(2)
def test_gradients_of_maths_on_shards_are_added_behind_all_reductions():
    """Gradients of 2**24, 1, -2**24 and 1 show the order in which float32 adds them up, whatever the units."""

    def loss_of(params, x):
        gathered, direct = x
        product = fs.gather({"a": params["a"]})["a"] * fs.gather({"b": params["b"]})["b"]
        return gathered * product.sum() + direct * (params["a"].local.sum() + params["b"].local.sum())

    full, microbatches = {"a": torch.ones(2), "b": torch.ones(2)}, [(2.0**23, 1.0), (-(2.0**23), 1.0)]
    for make, options in ((fs.zero2, {}), (fs.zero3, {}), (fs.zero3, {"merge_bytes": 0})):
        params = fs.shard(full, make(one_axis(), min_shard_elements=0, **options))
        _, grads = fs.accumulate(loss_of, reduce="sum")(params, microbatches)
        assert [grads[name].local.item() for name in full] == [1.0, 1.0]


def scaled_by_another(params):
    """A leaf that is derived with the full tensor of an own one, whose gradient comes behind the derived leaf's."""
    full = fs.gather({"a": params["a"]})["a"]
    derived = fs.tree_map(lambda shard: shard * full.sum(), {"b": params["b"]})
    return fs.gather(derived)["b"].square().sum() + full.square().sum()


def derived_twice(params):
    """A leaf that is derived with the full tensor of another derived one."""
    first = fs.gather(fs.tree_map(lambda shard: 2 * shard, {"a": params["a"]}))["a"]
    second = fs.tree_map(lambda shard: shard * first.sum(), {"b": params["b"]})
    return fs.gather(second)["b"].square().sum()


# The first derived leaf is due at its step already, with zeros, and again behind the second one's backward.
@pytest.mark.parametrize(("f", "reductions"), [(scaled_by_another, 2), (derived_twice, 3)])
@on_ranks(2)
def test_gradients_behind_derived_leaves_are_those_of_torch_func(f, reductions):
    full = {"a": torch.arange(4.0, dtype=torch.float64), "b": torch.ones(6, dtype=torch.float64)}
    params = fs.shard(full, zero3())
    with fs.comm.record() as record:
        value, grads = fs.value_and_grad(f)(params)
    assert [entry.op for entry in record].count("reduce_scatter") == reductions
    expected, needed = torch.func.grad_and_value(lambda p: fs.objective(f(p), like=p))(params)
    fs.testing.assert_trees_close((value, grads), (needed, expected), rtol=1e-12, atol=0.0)
