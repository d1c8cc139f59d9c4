"""Strategies that differ between units of a model, by `fs.masked`: their dtypes, gathers and messages."""

import copy
from fnmatch import fnmatch

import pytest
import torch
from torch import nn
from torch.func import grad_and_value
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import my_rank, on_ranks
from tests.tolerance import within
from tests.trees import assert_same_bits, one_axis
from tests.unit_models import WIDTH, Block, Language, filled, full, tokens, vectors, zero3


class Gated(nn.Module):
    """An expert whose output a router weights, both behind a norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.router, self.expert = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        return x + self.expert(h) * torch.sigmoid(self.router(h)).to(x.dtype)


class Routed(nn.Module):
    """Blocks with a router, perhaps computed again in the backward, between two layers."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList([Gated(), Gated()])
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return torch.tanh(self.last(x)).square().mean()


# The units that compute in float32, and the dtype of what each returns; the others compute in bfloat16.
WIDE = {"blocks.*.router": None, "blocks.*.norm": torch.bfloat16, "last": torch.float64}


def wide_routers(mesh):
    """ZeRO-3 with other dtypes for some units."""
    strategy = zero3(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)(mesh)
    for name, output in WIDE.items():
        strategy = fs.masked(zero3(param_dtype=torch.float32, output_dtype=output)(mesh), f"{name}.*", strategy)
    return strategy


def with_casting_hooks(module):
    """A copy of a module whose layers cast what they are given, and perhaps what they return, by hooks of torch."""
    module = copy.deepcopy(module)
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Linear | nn.LayerNorm):
            name = next((name for name in WIDE if fnmatch(path, name)), None)
            layer.to(torch.float32 if name else torch.bfloat16)
            layer.register_forward_pre_hook(lambda layer, args: (args[0].to(layer.weight.dtype),))
            if WIDE.get(name):
                layer.register_forward_hook(lambda *given, dtype=WIDE[name]: given[-1].to(dtype))
    return module


def mean_by_hooks(module, batches):
    """The objective and gradients of one process, each gradient summed in float32."""
    hooked = with_casting_hooks(module)
    losses = [hooked(x) for x in batches]
    grads = [torch.autograd.grad(loss, list(hooked.parameters())) for loss in losses]
    means = [sum(grad.float() for grad in column) / len(batches) for column in zip(*grads)]
    names = [name for name, _ in hooked.named_parameters()]
    return sum(loss.detach() for loss in losses) / len(batches), dict(zip(names, means))


@on_ranks(2)
def test_units_cast_their_inputs_to_the_dtype_of_their_own_strategy(world_size):
    """In all ways to differentiate, with the bits of torch's own hooks: sums of two ranks have one order."""
    batches = [x.float() for (x,) in vectors(2 * world_size)]
    mine = batches[my_rank() :: world_size]
    for checkpointed in (False, True):
        module = filled(Routed(checkpointed), torch.float32)
        expected = mean_by_hooks(module, batches[:world_size])
        model = fs.functionalize(module, nn.Module)
        params = model.init(wide_routers(one_axis()))
        run = fs.value_and_grad(model.apply)
        ways = (run, fs.jit(run), fs.value_and_grad(fs.remat(model.apply))) if checkpointed else (run,)
        for way in ways:
            assert_same_bits(full(way(params, mine[0])), expected)
        assert_same_bits(full(fs.accumulate(model.apply)(params, mine[:1])), expected)
        two_batches = full(fs.accumulate(model.apply)(params, mine))
        assert_trees_close(two_batches, mean_by_hooks(module, batches), **within(expected, terms=2 * world_size))
        with torch.no_grad():
            assert_same_bits(model.apply(params, batches[0]), with_casting_hooks(module)(batches[0]))
    # torch.func knows no checkpoints.
    module = filled(Routed(), torch.float32)
    model, expected = fs.functionalize(module, nn.Module), mean_by_hooks(module, batches[:world_size])
    params = model.init(wide_routers(one_axis()))
    grads, value = grad_and_value(lambda p: fs.objective(model.apply(p, mine[0]), like=p))(params)
    assert_trees_close(full((value, grads)), expected, **within(expected, terms=world_size))


class Follows(nn.Module):
    """Computes in the dtype of what it is given, with a large weight between two small ones."""

    def __init__(self):
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return F.linear(x * self.scale.to(x.dtype), self.weight.to(x.dtype), self.bias.to(x.dtype))


@pytest.mark.parametrize(("names", "expected"), [(("*.scale", "*.bias"), torch.bfloat16), ("*.weight", torch.float64)])
def test_a_unit_casts_to_the_dtype_that_most_of_its_elements_have(names, expected):
    """Whichever of its leaves comes first."""
    wide, narrow = (zero3(param_dtype=dtype)(one_axis()) for dtype in (torch.float64, torch.bfloat16))
    model = fs.functionalize(nn.Sequential(Follows()), Follows)
    params = model.init(fs.masked(wide, names, otherwise=narrow))
    assert model.apply(params, torch.ones(2, WIDTH)).dtype == expected


def messages_of(strategy):
    """What a step gathers and reduces, by the units in their order."""
    model = fs.functionalize(filled(Language(), torch.float32), Block)
    params = model.init(strategy)
    with fs.comm.record() as record:
        fs.value_and_grad(model.apply)(params, *tokens(2)[my_rank()])
    return [(str(entry.label), entry.unit) for entry in record if not entry.scalar]


def gathers_of(strategy):
    return [unit for label, unit in messages_of(strategy) if label == "gather"]


@on_ranks(2)
def test_units_differ_in_what_is_gathered_together_ahead_and_again():
    """Neighbors of different policies are not merged, and each unit is gathered as its own policy says."""
    mesh = one_axis()
    first, last = "embedding to blocks.0", "blocks.2 to head"
    again = fs.zero3(mesh, min_shard_elements=0, prefetch=0, bucket_bytes=2**20)
    kept = fs.zero3(mesh, min_shard_elements=0, prefetch=0, bucket_bytes=2**20, regather=False)
    assert gathers_of(fs.masked(kept, "blocks.1.*", otherwise=again)) == [first, "blocks.1", last, first]
    assert gathers_of(fs.masked(again, "blocks.1.*", otherwise=kept)) == [first, "blocks.1", last, "blocks.1"]
    # A rule decides by the names of units before they are merged.
    named = fs.zero3(mesh, min_shard_elements=0, prefetch=0, bucket_bytes=2**20, regather=("embedding", "blocks.0"))
    assert gathers_of(named) == [first, "blocks.1 to head", first]
    for prefetch in (0, 1):
        # While blocks.1 computes backward, or when its gradients are complete.
        messages = messages_of(fs.masked(zero3(prefetch=prefetch)(mesh), "blocks.1.*", otherwise=again))
        gathers = [message for message in messages if message[0] == "gather"]
        assert [unit for _, unit in gathers] == [first, "blocks.1", last, "blocks.1", first]
        last_gather = len(messages) - messages[::-1].index(gathers[-1])
        assert (last_gather < messages.index(("scatter", "blocks.1"))) == bool(prefetch)


def test_patterns_that_match_nothing_are_named():
    strategy = fs.masked(zero3()(one_axis()), "blocks.*.moe", otherwise=zero3(param_dtype=torch.bfloat16)(one_axis()))
    expected = r"shard: the mask 'blocks.\*.moe' matches no leaf. The leaves are blocks.0.norm.bias, "
    with pytest.raises(ValueError, match=expected):
        fs.functionalize(Language()).init(strategy)
