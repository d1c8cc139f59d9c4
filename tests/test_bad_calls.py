"""A generated table of wrong calls: every argument of every public function in turn is replaced by wrong values.

A call may be taken or refused. Of those that are refused, nearly all must say which argument or leaf is wrong and what
was expected. A hang is ended by the timeout of the suite, and an abort ends the suite.
"""

import inspect
import math
import re
from types import FunctionType

import pytest
import torch
from torch import nn

import fshard as fs

# Refused calls that must be clear, of 100.
SHARE = 95
WRONG = {
    "None": None,
    "a number": 5,
    "a negative number": -1,
    "nan": math.nan,
    "a huge number": 10**30,
    "a text": "x",
    "an empty text": "",
    "an empty list": [],
    "an empty dict": {},
    "an object": object(),
    "a class": int,
    "a tensor of another shape": torch.ones(7, 3),
    "a tensor of integers": torch.ones(2, dtype=torch.int64),
    "a tensor on meta": torch.ones(4, 4, device="meta"),
    "another tree": {"other": torch.ones(2)},
    "a module": nn.Linear(2, 2),
}


def loss(params):
    return fs.gather(params)["w"].square().sum()


class World:
    """One rank, and what calls need."""

    def __init__(self):
        self.mesh = fs.init_mesh({"shard": -1}, device="cpu")
        self.axis = fs.axis_of(self.mesh)
        self.full = {"w": torch.ones(4, 4)}
        self.params = fs.shard(self.full, fs.zero2(self.mesh))
        self.tx = fs.sgd(0.1)
        self.state = fs.TrainState.create(self.params, self.tx)
        self.model = fs.functionalize(nn.Linear(4, 4))
        self.weights = self.model.init(fs.zero2(self.mesh), seed=0)
        self.grads = fs.tree_map(torch.ones_like, self.params)


# A valid call of each public function: a function of the world to its arguments.
CALLS = {
    "accumulate": lambda w: dict(f=lambda p, _: loss(p), reduce="mean", communicate="each"),
    "adafactor": lambda w: dict(lr=0.1, beta2_decay=-0.8, eps=(None, 1e-3), d=1.0, weight_decay=0.0),
    "adam": lambda w: dict(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0),
    "adamw": lambda w: dict(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0),
    "add_decayed_weights": lambda w: dict(weight_decay=0.1),
    "all_gather": lambda w: dict(tree=torch.ones(2), axis=w.axis, dim=0),
    "all_gather_invariant": lambda w: dict(tree=torch.ones(2), axis=w.axis, dim=0),
    "apply": lambda w: dict(model=w.model, params=w.weights, input=torch.ones(1, 4)),
    "axis_of": lambda w: dict(mesh=w.mesh, name="shard"),
    "bucket": lambda w: dict(transform=fs.zero3(w.mesh), nbytes=100),
    "cast": lambda w: dict(gather=torch.bfloat16, scatter=torch.float32),
    "clip_by_global_norm": lambda w: dict(max_norm=1.0, p=2.0),
    "clip_by_norm": lambda w: dict(max_norm=1.0, p=2.0),
    "clip_by_value": lambda w: dict(max_value=1.0),
    "ddp": lambda w: dict(mesh=w.mesh, axis="shard"),
    "dynamic_loss_scale": lambda w: dict(
        tx=w.tx, init_scale=2.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2
    ),
    "ema": lambda w: dict(tx=w.tx, decay=0.9),
    "every_k": lambda w: dict(tx=w.tx, k=2),
    "fold_in": lambda w: dict(key=1, data=2),
    "freeze": lambda w: dict(tx=w.tx, mask="w"),
    "from_torch": lambda w: dict(cls=torch.optim.SGD, lr=0.1),
    "from_torch_scheduler": lambda w: dict(
        cls=torch.optim.lr_scheduler.StepLR, lr=0.1, steps=3, name="lr", momentum=0.9, step_size=1
    ),
    "fully_shard": lambda w: dict(mesh=w.mesh, dim=0, min_shard_elements=0, algorithm="auto"),
    "functionalize": lambda w: dict(module=nn.Linear(2, 2), units=None),
    "gather": lambda w: dict(tree=w.params),
    "init_mesh": lambda w: dict(shape={"shard": -1}, device="cpu"),
    "jit": lambda w: dict(f=loss, donate_argnums=(), static_argnums=(), backend="graph"),
    "lamb": lambda w: dict(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0),
    "lars": lambda w: dict(lr=0.1, momentum=0.9, weight_decay=0.0, trust_coefficient=0.001, eps=0.0),
    "masked": lambda w: dict(tx=w.tx, mask="w"),
    "objective": lambda w: dict(loss=torch.ones(()), like=w.params, reduce="mean"),
    "partition": lambda w: dict(parts={"*": w.tx}),
    "psum": lambda w: dict(tree=torch.ones(2), axis=w.axis),
    "pmean": lambda w: dict(tree=torch.ones(2), axis=w.axis),
    "pvary": lambda w: dict(tree=torch.ones(2), axis=w.axis),
    "psum_invariant": lambda w: dict(tree=torch.ones(2), axis=w.axis),
    "quantize": lambda w: dict(mesh=w.mesh, block=64),
    "reduce_scatter": lambda w: dict(tree=torch.ones(2), axis=w.axis, dim=0),
    "replicate": lambda w: dict(mesh=w.mesh, algorithm="auto"),
    "reshard": lambda w: dict(tree=w.params, transform=fs.ddp(w.mesh)),
    "scatter_grads": lambda w: dict(grads=w.full, like=w.params, reduce="mean"),
    "sgd": lambda w: dict(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0),
    "shard": lambda w: dict(full_tree=w.full, transform=fs.zero2(w.mesh)),
    "skip_nonfinite": lambda w: dict(tx=w.tx),
    "split_dim": lambda w: dict(mesh=w.mesh, dim=0),
    "unshard": lambda w: dict(tree=w.params),
    "update": lambda w: dict(tx=w.tx, state=w.state, grads=w.grads, donate=False),
    "value_and_grad": lambda w: dict(f=loss, argnums=0, reduce="mean", has_aux=False),
    "whole": lambda w: dict(tx=w.tx),
    "zero1": lambda w: dict(mesh=w.mesh, axis="shard", min_shard_elements=0),
    "zero2": lambda w: dict(mesh=w.mesh, axis="shard", min_shard_elements=0),
    "zero3": lambda w: dict(mesh=w.mesh, axis="shard", regather=True, prefetch=1, merge_bytes=0, min_shard_elements=0),
}
# Functions of functions, and those that take trees of any leaves.
OTHERS = {
    *("chain", "compose", "from_dtensor", "hsdp", "hybrid_shard", "make_graph", "offload", "plan", "remat"),
    *("sync_buffers", "to_dtensor", "trace", "transform_state", "tree_leaves", "tree_map"),
}


def outcomes():
    """Each wrong call, and the error that it ended in, or None."""
    world = World()
    for name, make in CALLS.items():
        f = getattr(fs, name)
        f(**make(world))
        for argument in make(world):
            for label, value in WRONG.items():
                try:
                    f(**{**make(world), argument: value})
                except Exception as error:
                    yield name, argument, label, error
                else:
                    yield name, argument, label, None


def is_clear(argument, error):
    """Whether an error names the argument or a leaf, and says what was expected or what to do."""
    text = str(error)
    named = re.search(rf"\b{re.escape(argument)}\b|\n  [\[(.]", text) is not None
    return named and re.search(r"expected|To fix:|; |only \(", text) is not None


def test_refused_calls_are_clear():
    refused = [(*row, error) for *row, error in outcomes() if error is not None]
    unclear = [
        f"{name}({argument}={label}): {type(error).__name__}: {str(error)[:100]}"
        for name, argument, label, error in refused
        if not is_clear(argument, error)
    ]
    share = 100 * (1 - len(unclear) / len(refused))
    assert len(refused) > 500
    assert share >= SHARE, f"{share:.1f}% of {len(refused)}\n" + "\n".join(unclear)


def test_every_public_function_is_in_the_table():
    functions = {name for name in fs.__all__ if isinstance(getattr(fs, name), FunctionType)}
    assert functions == CALLS.keys() | OTHERS


@pytest.mark.parametrize("name", CALLS)
def test_valid_calls_name_arguments_of_the_function(name):
    inspect.signature(getattr(fs, name)).bind(**CALLS[name](World()))
