"""Gathered units: when they are gathered, awaited, kept and freed, and that ranks which compute other things agree."""

import gc
import itertools
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fshard as fs
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import one_axis

X = torch.ones(2, 4)


def zero3(**options):
    return fs.zero3(one_axis(), **{"min_shard_elements": 0, "bucket_bytes": 0, "prefetch": 0, **options})


def gathers(f, *args):
    """The units that a call gathers, and what it returns."""
    with fs.comm.record() as record:
        result = f(*args)
    return [entry.unit for entry in record if entry.op == "all_gather" and not entry.scalar], result


def model_of(module, **options):
    """A model whose layers are units, and its parameters, all of 0.1."""
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.1)
    model = fs.functionalize(module, lambda _, part: isinstance(part, nn.Linear | nn.Embedding))
    return model, model.init(zero3(**options))


def linear():
    """A layer of 20 elements, or 80 bytes: with buckets of 160 bytes two of them are merged."""
    return nn.Linear(4, 4)


class Layers(nn.Module):
    def __init__(self, number=3):
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(number))

    def forward(self, x, skipped=()):
        for i, layer in enumerate(self.layers):
            if i not in skipped:
                x = layer(x)
        return x


class Parts(nn.Module):
    """Some parts, and a function that computes with them."""

    def __init__(self, compute, **parts):
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.compute(self, *args)


def without_grad(self, x, skips=False):
    """Runs a part without gradients, and a layer without gradients on one rank."""
    x = self.first(x)
    with torch.no_grad():
        x = x + self.part(x)
        x = x if skips else x + self.layer(x)
    return self.last(x).sum()


def no_grad():
    return Parts(without_grad, first=linear(), part=Layers(2), layer=linear(), last=linear())


class LinearWeights(torch.overrides.TorchFunctionMode):
    """Counts the weights of layers that are alive, each time that one computes."""

    def __init__(self):
        self.weights = []
        self.alive = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            self.weights.append(StorageWeakRef(args[1].untyped_storage()))
            self.alive.append(sum(not weight.expired() for weight in self.weights))
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_what_runs_without_gradients_is_not_gathered_again():
    model, params = model_of(no_grad())
    units, _ = gathers(fs.value_and_grad(lambda p: model.apply(p, X)), params)
    assert [units.count(name) for name in ("first", "part.layers.0", "part.layers.1")] == [2, 1, 1]


@on_ranks(2)
def test_layers_that_stay_for_the_backward_are_dropped_where_another_forward_follows():
    """The last two of the second forward stay."""
    model, params = model_of(Layers(4), prefetch=1)
    units, _ = gathers(fs.value_and_grad(lambda p: (model.apply(p, X) + model.apply(p, X)).sum()), params)
    assert [units.count(f"layers.{i}") for i in range(4)] == [4, 4, 3, 3]


@on_ranks(2)
def test_a_function_that_differentiates_inside_gathers_nothing_again():
    model, params = model_of(Layers(1))

    def slope(p):
        x = X.clone().requires_grad_()
        return torch.autograd.grad(model.apply(p, x).sum(), x)[0].sum() + model.apply(p, x).sum()

    assert len(gathers(fs.value_and_grad(slope), params)[0]) <= 3


def skips_inside(self, x, skipped):
    return self.head(self.inside(x, skipped)).sum()


@on_ranks(2)
def test_a_layer_that_one_rank_skips_is_gathered_with_what_follows():
    model, params = model_of(Parts(skips_inside, inside=Layers(), head=linear()), bucket_bytes=160)
    units, _ = gathers(model.apply, params, X, (2,) if my_rank() == 0 else ())
    assert units == ["inside.layers.0 to inside.layers.1", "inside.layers.2 to head"]


class Failing(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.add_(1)
        raise OSError("the user's")


def goes_on(self, x, catches):
    with suppress(OSError) if catches else nullcontext():
        self.failing(x)
    return self.last(x).sum()


@on_ranks(1, 2)
def test_an_exception_of_a_submodule_is_not_replaced_and_its_writes_are_refused():
    """Where the forward goes on after it, the writes are refused when the forward ends."""
    inside = Parts(lambda self, x: self.inner(x), inner=Failing(4, 4))
    in_front = nn.Sequential(Failing(4, 4), linear())
    for failing, bucket_bytes in itertools.product((inside, in_front), (0, 160)):
        model, params = model_of(Parts(goes_on, failing=failing, last=linear()), bucket_bytes=bucket_bytes)
        for run in (fs.value_and_grad(model.apply), model.apply):
            with pytest.raises(OSError, match=r"^the user's$"):
                run(fs.tree_map(torch.clone, params), X, False)
            with pytest.raises(ValueError, match=r"\['failing\..*weight'\]: was written to once"):
                run(fs.tree_map(torch.clone, params), X, True)


@on_ranks(2)
def test_a_leaf_that_a_gather_names_twice_is_sent_once():
    params = fs.shard({"a": torch.ones(4)}, zero3(prefetch=None))
    with fs.comm.record() as record:
        _, grads = fs.value_and_grad(lambda p: sum(fs.gather([p["a"], p["a"]])).sum())(params)
    assert {entry.op: entry.bytes for entry in record if not entry.scalar} == {"all_gather": 16, "reduce_scatter": 16}
    assert fs.unshard(grads)["a"].tolist() == [2.0] * 4


@on_ranks(2)
def test_plain_gathers_in_a_checkpoint():
    params = fs.shard({"a": torch.ones(4), "b": torch.ones(4)}, zero3(prefetch=None))

    def loss(p):
        def both(x):
            y = fs.gather([p["a"]])[0] * x
            y = y + fs.gather([p["b"]])[0]
            # Nobody differentiates the sine, so that the sum behind b is the first to run, and needs nothing again.
            return y, y.sin()

        return checkpoint(both, torch.ones(4), use_reentrant=False)[0].sum()

    assert len(gathers(fs.value_and_grad(loss), params)[0]) == 3


def products(self, x):
    return torch.tanh(x @ self.first) @ self.second


@on_ranks(2)
def test_each_leaf_of_a_regathered_unit_is_its_own():
    """Leaves of one shape are told apart: gradients are the bits of zero2, which gathers nothing again."""
    names = ("0.first", "0.second", "1.first", "1.second")
    full = {name: torch.linspace(-1, 1 + n, 16).reshape(4, 4) for n, name in enumerate(names)}
    square = torch.zeros(4, 4)
    blocks = [Parts(products, first=nn.Parameter(square), second=nn.Parameter(square)) for _ in range(2)]
    model = fs.functionalize(nn.Sequential(*blocks), units=Parts)
    run = fs.value_and_grad(lambda p: model.apply(p, X).square().sum())
    units, (_, grads) = gathers(run, fs.shard(full, zero3()))
    assert units == ["0", "1", "0"]
    _, expected = run(fs.shard(full, fs.zero2(one_axis(), min_shard_elements=0, bucket_bytes=0)))
    fs.testing.assert_trees_close(fs.unshard(grads), fs.unshard(expected), exact=True)


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
    log = []
    # A layer is reduced by itself, and twice as many bytes may be under way.
    strategy = fs.compose(Notes(log.append, -1), zero3(bucket_bytes=80), Notes(log.append, 1))
    model = fs.functionalize(Layers(6), nn.Linear)
    fs.value_and_grad(lambda p: model.apply(p, X).sum())(model.init(strategy, seed=0))
    assert max(itertools.accumulate(log)) == 2


@on_ranks(2)
def test_units_inside_a_submodule_are_freed_one_by_one():
    model, params = model_of(nn.Sequential(Layers(4)))
    with LinearWeights() as layers:
        fs.value_and_grad(lambda p: model.apply(p, X).sum())(params)
    assert layers.alive == [1, 1, 1, 1]


def test_weights_that_are_kept_and_derived_leaves_are_freed_without_the_collector():
    """After apply, and after each microbatch."""

    def program():
        model, params = model_of(Layers(), regather=False)
        with LinearWeights() as layers, torch.no_grad():
            model.apply(params, X)
        refs = layers.weights

        def loss(p, _):
            doubled = fs.tree_map(lambda local: 2 * local, p["a"])
            full = fs.gather(doubled)
            refs.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (doubled.local, full))
            return full.sum()

        for strategy in (fs.zero3, fs.zero1, fs.ddp):
            fs.accumulate(loss)(fs.shard({"a": torch.ones(4)}, strategy(one_axis())), [0, 1, 2])
        assert len(refs) == 3 + 3 * 6
        assert all(ref.expired() for ref in refs)

    gc.collect()
    gc.disable()
    try:
        fs.testing.spmd(program, world=2)
    finally:
        gc.enable()


def looks_first(self, x):
    """Reads its weight without a gradient before it reads it with one."""
    with torch.no_grad():
        size = self.layer.weight.norm()
    return self.layer(x).sum() / size


@on_ranks(1, 2)
def test_a_weight_that_is_read_without_a_gradient_first_has_one():
    model, params = model_of(Parts(looks_first, layer=linear()))
    _, grads = fs.value_and_grad(model.apply)(params, X)
    # The norm of 16 elements of 0.1 is 0.4.
    expected = torch.full((4, 4), 2 / 0.4)
    torch.testing.assert_close(fs.unshard(grads)["layer.weight"], expected, **within(expected, terms=16))


def in_another_order(self, x, skips):
    """Runs a submodule before one that stands in front of it."""
    x = self.inside(x, range(3) if skips else ())
    x = x + fs.psum(x.detach(), fs.axis_of(one_axis()))
    return self.last(self.first(x)).sum()


def reads_the_table(self, x, skips):
    """Multiplies by a table of embeddings, outside of its module; and by a frozen number behind trained layers."""
    scale = self.scale
    x = self.layers(x + self.table(torch.arange(2)))
    logits = F.linear(x, self.table.weight)
    x = self.layers(x)
    return x.sum() if skips else self.frozen(x).sum() + (logits * scale).sum()


def checks_a_table(self, x, skips):
    """Looks up embeddings inside a checkpoint."""
    h = checkpoint(lambda x: self.inside(x + self.table(torch.arange(2))).tanh(), x, use_reentrant=False)
    return self.head(x).sum() + (0 if skips else h.sum())


def sums_behind_a_part(self, x, skips):
    """Skips the last layer of a part, and adds up over ranks before the next layer runs."""
    x = self.inside(x, (2,) if skips else ())
    return self.head(x + fs.psum(x.detach(), fs.axis_of(one_axis()))).sum()


def reading():
    frozen = {"scale": nn.Parameter(torch.ones(8), False), "frozen": linear().requires_grad_(False)}
    return Parts(reads_the_table, table=nn.Embedding(8, 4), layers=Layers(), **frozen)


MODULES = (
    lambda: Parts(in_another_order, first=linear(), inside=Layers(1), last=linear()),
    lambda: Parts(in_another_order, first=linear(), inside=Layers(3), last=linear()),
    no_grad,
    reading,
    lambda: Parts(checks_a_table, table=nn.Embedding(8, 4), inside=linear(), head=linear()),
    lambda: Parts(sums_behind_a_part, inside=Layers(3), head=linear()),
)


@on_ranks(2)
def test_a_rank_whose_loss_needs_less_sends_the_same():
    """Merged, the last layer of a part is gathered with what follows it."""
    for make, (prefetch, bucket_bytes) in itertools.product(MODULES, ((0, 0), (0, 160))):
        records = []
        for skips in (False, my_rank() == 0):
            model, params = model_of(make(), prefetch=prefetch, bucket_bytes=bucket_bytes)
            # A second application follows.
            run = fs.value_and_grad(lambda p: model.apply(p, X, skips) + model.apply(p, X, 0))  # noqa: B023
            with fs.comm.record() as record:
                run(params)
            records.append([(entry.op, entry.unit) for entry in record])
        assert records[0] == records[1]


def gradients_inside(self, x, skips):
    """Runs a layer with gradients inside a part that runs without them."""
    x = self.first(x)
    with torch.no_grad():
        y = self.part(x, skips)
    return self.last(x + y).sum()


def layer_with_gradients(self, x, skips):
    with torch.enable_grad():
        return x if skips else self.layer(x).tanh()


@on_ranks(2)
def test_a_layer_with_gradients_inside_a_part_without_them():
    """Its backward gathers it on demand. So all ranks must run it, and ranks that differ there are named."""
    part = Parts(layer_with_gradients, layer=linear())
    model, params = model_of(Parts(gradients_inside, first=linear(), part=part, last=linear()))
    run = fs.value_and_grad(model.apply)
    units, (_, grads) = gathers(run, params, X, False)
    assert units == ["first", "part.layer", "last", "part.layer", "first"]
    kept = fs.shard(fs.unshard(params), fs.zero2(one_axis()))
    fs.testing.assert_trees_close(fs.unshard(grads), fs.unshard(run(kept, X, False)[1]), exact=True)
    with pytest.raises(RuntimeError, match=r"gather of part\.layer"):
        run(params, X, my_rank() == 0)


def returns(self, x):
    """Comes to its first layer again, each time in a checkpoint of its own."""
    first, second, third = self.layers
    for layer in (first, second, first, third):
        x = checkpoint(layer, x, use_reentrant=False)
    return x


@on_ranks(2)
def test_a_checkpoint_recomputes_with_its_own_gathered_unit():
    """Of two gatherings of a unit the later one is due first; the earlier one is not gathered before its turn."""
    model, params = model_of(Parts(returns, layers=Layers().layers))
    units, _ = gathers(fs.value_and_grad(lambda p: model.apply(p, X).square().sum()), params)
    assert [int(unit[-1]) for unit in units] == [0, 1, 0, 2, 0, 1, 0]


@on_ranks(2)
def test_gradients_of_maths_on_shards_are_added_behind_all_reductions():
    """Gradients of 2**24, 1, -2**24 and 1 show the order in which float32 adds them up, whatever the units."""

    def loss_of(params, factors):
        of_gathered, of_shards = factors
        product = fs.gather({"a": params["a"]})["a"] * fs.gather({"b": params["b"]})["b"]
        return of_gathered * product.sum() + of_shards * (params["a"].local.sum() + params["b"].local.sum())

    full, microbatches = {"a": torch.ones(2), "b": torch.ones(2)}, [(2.0**23, 1.0), (-(2.0**23), 1.0)]
    for make, options in ((fs.zero2, {}), (fs.zero3, {}), (fs.zero3, {"bucket_bytes": 0})):
        params = fs.shard(full, make(one_axis(), min_shard_elements=0, **options))
        _, grads = fs.accumulate(loss_of, reduce="sum")(params, microbatches)
        assert [grads[name].local.item() for name in full] == [1.0, 1.0]


@on_ranks(2)
def test_a_leaf_that_the_first_microbatch_alone_used_through_a_derived_one_has_a_gradient():
    def loss_of(params, uses):
        doubled = fs.gather(fs.tree_map(lambda local: 2 * local, params["a"]))
        return (doubled if uses else fs.gather(params["b"])).sum()

    params = fs.shard({"a": torch.ones(2), "b": torch.ones(2)}, zero3())
    _, grads = fs.accumulate(loss_of, reduce="sum")(params, [True, False])
    assert fs.unshard(grads)["a"].tolist() == [4.0] * 2
