"""Bad modules and parameters for them: what functionalize, init and apply refuse."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from tests.bad_input import Row, assert_refused, make_world

MODEL = "\nTo fix: pass those of this model."


class Unresettable(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(2, 1))
        self.inner[1].extra = nn.ParameterList([torch.ones(1)])


class Writing(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(2.0)
        return super().forward(x)


def linear():
    return nn.Linear(3, 2)


def applied(module, params, **keywords):
    """A row's arguments and call: apply a model of `module` to parameters, by default its own."""
    model = fs.functionalize(module)

    def arguments(world):
        own = model.init(world.zero2) if params is None else params
        return module, own, torch.ones(4, 3)

    return arguments, lambda module, params, x: model.apply(params, x, **keywords)


ROWS = [
    Row(
        "functionalize of a class",
        lambda _: (nn.Linear,),
        fs.functionalize,
        "functionalize: got a type, needed an nn.Module; call its class first",
    ),
    Row(
        "a lazy module",
        lambda _: (nn.Sequential(linear(), nn.LazyLinear(2, bias=False), nn.LazyBatchNorm1d(affine=False)),),
        fs.functionalize,
        "functionalize: lazy parameters\n"
        "  ['1.weight']: found UninitializedParameter, needed a tensor with a shape\n"
        "  ['2.running_mean']: found UninitializedBuffer, needed a tensor with a shape\n"
        "  ['2.running_var']: found UninitializedBuffer, needed a tensor with a shape\n"
        "To fix: run the module once before.",
    ),
    Row(
        "a seed for what cannot draw its values",
        lambda world: (Unresettable(), world.zero2),
        lambda module, strategy: fs.functionalize(module).init(strategy, seed=0),
        "model.init: values cannot be drawn from a seed\n"
        "  (root): found Unresettable without reset_parameters, needed a way to draw its values\n"
        "  inner.1.extra: found ParameterList without reset_parameters, needed a way to draw its values\n"
        "To fix: add reset_parameters to these modules, or leave out seed to take the values the module has.",
    ),
    Row(
        "a meta module without a seed",
        lambda world: (nn.Sequential(linear(), nn.Linear(2, 1, device="meta")), world.zero2),
        lambda module, strategy: fs.functionalize(module).init(strategy),
        "model.init: parameters have no values\n"
        "  ['1.weight']: found a tensor on the meta device, needed one with values\n"
        "  ['1.bias']: found a tensor on the meta device, needed one with values\nTo fix: pass seed= to draw them.",
    ),
    Row(
        "init by no strategy",
        lambda world: (linear(), "zero2"),
        lambda module, strategy: fs.functionalize(module).init(strategy, seed=0),
        "shard: strategy is a str, needed a ShardTransform such as fs.zero2(mesh)",
    ),
    Row(
        "seeds that differ between ranks",
        lambda world: (linear(), world.zero2, world.rank),
        lambda module, strategy, seed: fs.functionalize(module).init(strategy, seed=seed),
        "shard: ranks hold different trees\n"
        "  ['bias']: found float32[2] of hash {hash} split by P('shard') on rank shard=1, "
        "needed float32[2] of hash {hash} split by P('shard') as on rank shard=0\n"
        "To fix: build the same tree on every rank, for instance from one seed.",
        ("shard", "shard"),
    ),
    *(
        Row(name, *applied(linear(), params), f"apply: parameters {error}")
        for name, params, error in [
            (
                "parameters that are missing and unexpected",
                {"weight": torch.ones(2, 3), "scale": torch.ones(2)},
                "do not match the module's\n  ['bias']: found nothing, needed a leaf\n"
                "  ['scale']: found a leaf, needed nothing" + MODEL,
            ),
            (
                "parameters of other shapes",
                {"weight": torch.ones(2, 3), "bias": torch.ones(1)},
                "do not match the module's\n  ['bias']: found shape (1,), needed a tensor of shape (2,)" + MODEL,
            ),
            (
                "parameters that are no tensors",
                {"weight": torch.ones(2, 3), "bias": 1.0},
                "do not match the module's\n  ['bias']: found a float, needed a tensor of shape (2,)" + MODEL,
            ),
            (
                "parameters without names",
                [torch.ones(2, 3)],
                "are a list, needed a dict by name; pass what model.init or apply returned",
            ),
        ]
    ),
    Row(
        "sharded parameters of other shapes",
        lambda world: (linear(), fs.functionalize(nn.Linear(2, 2)).init(world.zero2, seed=0)),
        lambda module, params: fs.functionalize(module).apply(params, torch.ones(4, 3)),
        "apply: parameters do not match the module's\n"
        "  ['weight']: found shape (2, 2), needed a tensor of shape (2, 3)" + MODEL,
    ),
    Row(
        "a forward that writes to a parameter",
        *applied(Writing(3, 2, bias=False), None),
        "apply: parameters were written to\n  ['weight']: found 1 in-place writes, needed none\n"
        "To fix: compute a new tensor instead; the caller's state is whole.",
        ("gather",),
    ),
    Row(
        "buffers that would be lost",
        *applied(nn.BatchNorm1d(3), None),
        "apply: buffers were updated and would be lost\n"
        "  ['num_batches_tracked']: found an updated buffer, needed an unchanged one\n"
        "To fix: pass buffers= and keep those returned, or functionalize the module in eval mode.",
        ("gather",),
    ),
    Row(
        "buffers that are missing and unexpected",
        *applied(nn.BatchNorm1d(3), None, buffers={"running_mean": torch.zeros(3), "running_var": 1.0, "seen": 0}),
        "apply: buffers do not match the module's\n  ['num_batches_tracked']: found nothing, needed a leaf\n"
        "  ['running_var']: found a float, needed a tensor\n  ['seen']: found a leaf, needed nothing" + MODEL,
    ),
    Row(
        "apply of a module",
        lambda _: (linear(), {}, torch.ones(4, 3)),
        fs.apply,
        "apply: model is a Linear, needed a Model; make one by fs.functionalize",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=repr)
def test_bad_modules_are_refused(row):
    assert_refused(row, row.ranks)


def test_buffers_that_are_passed_are_returned():
    def program():
        world = make_world()
        model = fs.functionalize(nn.BatchNorm1d(3))
        params = model.init(world.zero2)
        _, buffers = model.apply(params, torch.ones(4, 3), buffers=model.buffers)
        assert (int(buffers["num_batches_tracked"]), int(model.buffers["num_batches_tracked"])) == (1, 0)

    spmd(program, 2)
