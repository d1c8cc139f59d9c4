"""Bad modules and parameters for them: what functionalize, init and apply refuse."""

import torch
from torch import nn

import fshard as fs
from tests.bad_input import Row, assert_all_refused, make_world
from tests.ranks import on_ranks

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
        "functionalize: expected module to be an nn.Module, got a type; call its class first",
    ),
    Row(
        "a lazy module",
        lambda _: (nn.Sequential(linear(), nn.LazyLinear(2, bias=False), nn.LazyBatchNorm1d(affine=False)),),
        fs.functionalize,
        "functionalize: lazy parameters\n"
        "  ['1.weight']: expected a tensor with a shape, got UninitializedParameter\n"
        "  ['2.running_mean']: expected a tensor with a shape, got UninitializedBuffer\n"
        "  ['2.running_var']: expected a tensor with a shape, got UninitializedBuffer\n"
        "To fix: run the module once before.",
    ),
    Row(
        "a seed for what cannot draw its values",
        lambda world: (Unresettable(), world.zero2),
        lambda module, strategy: fs.functionalize(module).init(strategy, seed=0),
        "model.init: values cannot be drawn from a seed\n"
        "  (root): expected a way to draw its values, got Unresettable without reset_parameters\n"
        "  inner.1.extra: expected a way to draw its values, got ParameterList without reset_parameters\n"
        "To fix: add reset_parameters to these modules, or leave out seed to take the values the module has.",
    ),
    Row(
        "a meta module without a seed",
        lambda world: (nn.Sequential(linear(), nn.Linear(2, 1, device="meta")), world.zero2),
        lambda module, strategy: fs.functionalize(module).init(strategy),
        "model.init: parameters have no values\n"
        "  ['1.weight']: expected a tensor with values, got a tensor on the meta device\n"
        "  ['1.bias']: expected a tensor with values, got a tensor on the meta device\n"
        "To fix: pass seed= to draw them.",
    ),
    Row(
        "init by no strategy",
        lambda world: (linear(), "zero2"),
        lambda module, strategy: fs.functionalize(module).init(strategy, seed=0),
        "model.init: expected strategy to be a ShardTransform such as fs.zero2(mesh), got a str",
    ),
    Row(
        "seeds that differ between ranks",
        lambda world: (linear(), world.zero2, world.rank),
        lambda module, strategy, seed: fs.functionalize(module).init(strategy, seed=seed),
        "shard: ranks hold different trees\n"
        "  ['bias']: expected float32[2] of hash {hash} split by P('shard') as on rank shard=0, got float32[2] of "
        "hash {hash} split by P('shard') on rank shard=1\n"
        "To fix: build the same tree on every rank, from one seed; simulated ranks share a generator, so build it "
        "before they start.",
        ("shard", "shard"),
    ),
    *(
        Row(name, *applied(linear(), params), f"apply: {error}")
        for name, params, error in [
            (
                "parameters that are missing and unexpected",
                {"weight": torch.ones(2, 3), "scale": torch.ones(2)},
                "params do not match the module's\n"
                "  ['bias']: expected a leaf, got nothing\n"
                "  ['scale']: expected nothing, got a leaf" + MODEL,
            ),
            (
                "parameters of other shapes",
                {"weight": torch.ones(2, 3), "bias": torch.ones(1)},
                "params do not match the module's\n  ['bias']: expected a tensor of shape (2,), got shape (1,)" + MODEL,
            ),
            (
                "parameters that are no tensors",
                {"weight": torch.ones(2, 3), "bias": 1.0},
                "params do not match the module's\n  ['bias']: expected a tensor of shape (2,), got a float" + MODEL,
            ),
            (
                "parameters without names",
                [torch.ones(2, 3)],
                "expected params to be a dict by name, got a list; pass what model.init or apply returned",
            ),
        ]
    ),
    Row(
        "sharded parameters of other shapes",
        lambda world: (linear(), fs.functionalize(nn.Linear(2, 2)).init(world.zero2, seed=0)),
        lambda module, params: fs.functionalize(module).apply(params, torch.ones(4, 3)),
        "apply: params do not match the module's\n"
        "  ['weight']: expected a tensor of shape (2, 3), got shape (2, 2)" + MODEL,
    ),
    Row(
        "a forward that writes to a parameter",
        *applied(Writing(3, 2, bias=False), None),
        "apply: parameters were written to\n"
        "  ['weight']: expected none, got 1 in-place writes\n"
        "To fix: compute a new tensor instead; the caller's state is whole.",
        ("gather",),
    ),
    Row(
        "buffers that would be lost",
        *applied(nn.BatchNorm1d(3), None),
        "apply: buffers were updated and would be lost\n"
        "  ['num_batches_tracked']: expected an unchanged one, got an updated buffer\n"
        "To fix: pass buffers= and keep those returned, or functionalize the module in eval mode.",
        ("gather",),
    ),
    Row(
        "buffers that are missing and unexpected",
        *applied(nn.BatchNorm1d(3), None, buffers={"running_mean": torch.zeros(3), "running_var": 1.0, "seen": 0}),
        "apply: buffers do not match the module's\n"
        "  ['num_batches_tracked']: expected a leaf, got nothing\n"
        "  ['running_var']: expected a tensor, got a float\n"
        "  ['seen']: expected nothing, got a leaf" + MODEL,
    ),
    Row(
        "apply of a module",
        lambda _: (linear(), {}, torch.ones(4, 3)),
        fs.apply,
        "apply: expected model to be a Model, got a Linear; make one by fs.functionalize",
    ),
]


def test_bad_modules_are_refused():
    assert_all_refused(ROWS)


@on_ranks(2)
def test_buffers_that_are_passed_are_returned():
    world = make_world()
    model = fs.functionalize(nn.BatchNorm1d(3))
    params = model.init(world.zero2)
    _, buffers = model.apply(params, torch.ones(4, 3), buffers=model.buffers)
    assert (int(buffers["num_batches_tracked"]), int(model.buffers["num_batches_tracked"])) == (1, 0)
