"""reduction_order="tree": losses, counts and gradients of a job have the bits of one binary tree at any W."""

import copy
import math
import re
from dataclasses import replace
from functools import partial, reduce
from itertools import product

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.comm.collective import sum_in_tree
from fshard.reduction_order import TreeSum, find_order, order_of
from fshard.testing import spmd
from fshard.tree import flatten
from tests.ranks import on_ranks
from tests.trees import as_bytes, assert_same_bits, normal, one_axis
from tests.unit_models import filled

VOCABULARY, WIDTH = 11, 7


class Tied(nn.Module):
    """An embedding that is used twice, a layer that some microbatches leave out, and gradients of negative zeros."""

    def __init__(self):
        super().__init__()
        self.embedding, self.zero = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.inner, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, with_layer):
        hidden = self.embedding(tokens) + -0.0 * self.zero
        hidden = hidden + torch.tanh(self.inner(hidden))
        if with_layer:
            hidden = hidden + self.sometimes(hidden)
        return self.head(hidden)


def microbatch(number):
    """Two rows of tokens, and a mask that leaves out more of them in some."""
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (2, 6), generator=draw)
    return tokens, torch.rand(2, 5, generator=draw) < 0.3 + 0.1 * (number % 7), number % 4 != 1


def local(run, how, params, batch):
    """The loss of a microbatch, as each way to reduce takes it."""
    tokens, counted, with_layer = batch
    losses = nn.functional.cross_entropy(
        run(params, tokens, with_layer)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
    )
    kept = losses * counted.flatten()
    return (kept.sum(), counted.sum()) if how == "weighted" else kept.mean()


def added(parts):
    """The tree over a power of two of parts."""
    half = len(parts) // 2
    return added(parts[:half]) + added(parts[half:]) if half else parts[0]


def oracle(dtype, how, number):
    """All microbatches in one process, one after another, and their sums by the definition."""
    module = filled(Tied(), dtype)
    params, rows = dict(module.named_parameters()), []
    for i in range(number):
        loss = local(lambda _, *args: module(*args), how, params, microbatch(i))
        value, count = loss if how == "weighted" else (loss, torch.tensor(1))
        grads = torch.autograd.grad(value, list(params.values()), allow_unused=True)
        grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params.values())]
        rows.append([count.double(), value.detach(), *grads])
    count, *sums = (added(column) for column in zip(*rows))
    value, *grads = [(total / count).to(total.dtype) for total in sums]
    return value, dict(zip(params, grads))


def strategies(world_size):
    """Every strategy by name, and both orders of the dims of a mesh of two axes."""
    line, every = one_axis(), {"min_shard_elements": 20}
    table = {f.__name__: f(line, **every) for f in (fs.zero3, fs.zero2, fs.zero1)} | {"ddp": fs.ddp(line)}
    table["zero3 in units"] = fs.zero3(line, bucket_bytes=0, min_shard_elements=0)
    table["second dim"] = fs.zero3(line, layout=fs.fully_shard(line, dim=-1))
    if world_size % 2 == 0:
        for sizes in ({"replicate": world_size // 2, "shard": 2}, {"shard": 2, "replicate": world_size // 2}):
            table[f"hsdp {sizes}"] = fs.hsdp(fs.init_mesh(sizes, device="cpu"), **every)
    return table


@pytest.mark.rows(2)
@pytest.mark.parametrize("number", (8, 16))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@on_ranks(1, 2, 4, 8, "2 processes")
def test_losses_and_gradients_have_the_bits_of_the_tree_at_any_world_size(world_size, dtype, number):
    """By each strategy against the oracle: the ways to reduce take turns."""
    expected = {how: oracle(dtype, how, number) for how in ("mean", "weighted")}
    for turn, (name, strategy) in enumerate(strategies(world_size).items()):
        how = list(expected)[turn % 2]
        model = fs.functionalize(filled(Tied(), dtype), units=nn.Linear)
        params = model.init(strategy)
        mine = fs.microbatches(list(map(microbatch, range(number))), params)
        value, grads = fs.accumulate(partial(local, model.apply, how), reduce=how, reduction_order="tree")(params, mine)
        assert_same_bits({(name, how): (value, fs.unshard(grads))}, {(name, how): expected[how]})


def test_mixed_precision_sums_in_the_dtype_of_the_reduction():
    """A rank's one microbatch too, whose uses of a tied leaf are added up."""

    def program():
        gradients = []
        for reduced, number in product((torch.float32, torch.bfloat16, None), (8, 2)):
            model = fs.functionalize(filled(Tied(), torch.float32), units=nn.Module)
            mixed = {"param_dtype": torch.bfloat16, "reduce_dtype": reduced}
            params = model.init(fs.zero3(one_axis(), min_shard_elements=20, bucket_bytes=0, **mixed))
            step = fs.accumulate(partial(local, model.apply, "mean"), reduction_order="tree")
            gradients.append(fs.unshard(step(params, fs.microbatches(list(map(microbatch, range(number))), params))[1]))
        return gradients

    (one,), (many, *_) = spmd(program, 1), spmd(program, 2)
    assert_same_bits(many, one)


@on_ranks(2, 4)
def test_value_and_grad_is_one_microbatch_a_rank(world_size):
    model = fs.functionalize(filled(Tied(), torch.float32))
    params, loss = model.init(fs.zero3(one_axis(), min_shard_elements=20)), partial(local, model.apply, "mean")
    (batch,) = fs.microbatches(list(map(microbatch, range(world_size))), params)
    run = fs.value_and_grad(loss, reduction_order="tree")
    accumulated = fs.accumulate(loss, reduction_order="tree")(params, [batch])
    assert_same_bits(fs.tree_leaves(run(params, batch)), fs.tree_leaves(accumulated))
    # Inside another derivative it would be maths of torch.func, whose sums are no tree.
    outer = fs.tree_map(lambda tensor: tensor.detach().requires_grad_(), params)
    with torch.enable_grad(), pytest.raises(ValueError, match=r'no reduction_order="tree" inside torch\.func'):
        run(outer, batch)


@pytest.mark.parametrize("number", (1, 4, 32))
def test_the_tree_is_that_of_its_definition(number):
    """And holds at most log2(number) partial sums, beside the part that comes."""
    draw = normal()
    parts = [draw(9, dtype=torch.float32) * 10.0 ** (i % 13) for i in range(number)]
    unused = {1, 2, number - 1} if number > 3 else set()
    values = [torch.zeros(9) if i in unused else part for i, part in enumerate(parts)]
    tree = TreeSum()
    for i, part in enumerate(parts):
        assert len(tree._sums) <= math.log2(number)
        tree.add(None if i in unused else part)
    assert_same_bits(tree.total(), added(values))
    assert_same_bits(sum_in_tree(list(torch.stack(values) + 0.0)), added(values) + 0.0)
    assert number < 8 or not as_bytes(reduce(torch.add, values)).equal(as_bytes(added(values)))


def sharded(strategy):
    return fs.shard({"w": torch.ones(30, 4)}, strategy(one_axis()))


def summed(p, batch):
    return fs.gather(p)["w"].sum()


def on_shards(p, batch):
    return fs.gather(fs.tree_map(lambda tensor: 2 * tensor, p))["w"].sum()


def on_shards_of_another_policy(p, batch):
    made = fs.Sharded(2 * p["w"].local, replace(p["w"].spec, reshard=None))
    return fs.gather({"w": made})["w"].sum()


ON_SHARDS = "math on shards\n  ['w']: expected a gather of the parameter itself, got math on its shard\nTo fix: compute"
THREE = 'powers of two of ranks and of microbatches for reduction_order="tree", got 3 microbatches on each of 2'
# A function, its number of microbatches, options, and part of the error.
REFUSED = (
    (summed, 2, {"reduction_order": "pairs"}, "expected reduction_order to be \"tree\" or None, got 'pairs'"),
    (on_shards, 2, {}, ON_SHARDS),
    (on_shards_of_another_policy, 2, {}, ON_SHARDS.partition(", got")[0]),
    (summed, 3, {}, THREE),
    (summed, 2, {"communicate": "once"}, "expected communicate to be one of (None, 'each'), got 'once'"),
)


@on_ranks(2)
def test_what_would_change_bits_is_refused():
    for f, number, options, text in REFUSED:
        with pytest.raises(ValueError, match=re.escape(text)):
            fs.accumulate(f, **{"reduction_order": "tree", **options})(sharded(fs.zero3), list(range(number)))
    text = 'reduction_order="tree" promises equal bits, but the kernels of backend="inductor" round'
    with pytest.raises(ValueError, match=text):
        fs.jit(fs.accumulate(summed, reduction_order="tree"), backend="inductor")(sharded(fs.ddp), [0, 1])
    with pytest.raises(ValueError, match="7 microbatches cannot be shared equally by 2 ranks"):
        fs.microbatches(range(7), sharded(fs.ddp))


@on_ranks(2)
def test_transforms_are_equal_where_their_strategies_are():
    """And the policy of leaves names the order of their sums."""
    flat, again = (flatten(sharded(fs.zero3)) for _ in range(2))
    axes = flat.specs[0].transform.axes
    for name in (None, "tree"):
        order = find_order("it", name)
        marked = order.mark_leaves(flat, axes)
        assert order_of(marked.specs[0]) is order
        assert marked.specs == order.mark_leaves(again, axes).specs
        assert (marked.specs == flat.specs) == (name is None)
        assert marked.specs[0].reshard.reduction_order == name
        assert marked.specs[0].reshard.sums_in_tree is (name == "tree")
        assert copy.copy(marked.specs[0].transform).axes == axes
    assert order_of(fs.Spec((2,))) is find_order("it", None)
