"""Arguments out of range and leaves in the wrong place: each is refused by name, with a remedy."""

import copy
import math
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard import checkpoint
from fshard.errors import Problem, leaf_error
from tests.ranks import on_ranks
from tests.trees import one_axis

NAN = math.nan

# For each optimizer: arguments that must be refused, and the words for what is expected.
RATE, FRACTION = "a finite number, 0 or more", "a number, 0 or more and below 1"


def out_of_range(rates, with_betas):
    """Rows of optimizers: of the names of their rates, and of betas."""
    return [
        *(
            (make, {"lr": 0.1, name: value}, f"expected {name} to be {RATE}, got {value!r:.40}")
            for make, names in rates.items()
            for name in names
            for value in (-1e-9, NAN, "x", True)
        ),
        *(
            (make, {"lr": 0.1, "betas": betas}, f"expected {where} to be {FRACTION}, got {value}")
            for make in with_betas
            for betas, where, value in (
                ((1.5, 0.9), "betas[0]", "1.5"),
                ((0.9, 1.0), "betas[1]", "1.0"),
            )
        ),
    ]


OUT_OF_RANGE = [
    *out_of_range(
        {
            fs.sgd: ("lr", "momentum", "weight_decay"),
            fs.adam: ("lr", "eps", "weight_decay"),
            fs.adamw: ("lr", "eps", "weight_decay"),
        },
        with_betas=(fs.adam, fs.adamw),
    ),
    (fs.sgd, {"lr": 0.1, "dampening": "x"}, "sgd: expected dampening to be a finite number, got 'x'"),
    (fs.sgd, {"lr": torch.ones(2)}, f"sgd: expected lr to be {RATE}, got a float32 Tensor of shape (2,)"),
    (fs.scale_by_adam, {"eps": -1}, f"scale_by_adam: expected eps to be {RATE}, got -1"),
    (fs.scale_by_adam, {"betas": (1.5, 0.9)}, f"scale_by_adam: expected betas[0] to be {FRACTION}, got 1.5"),
    (fs.clip_by_norm, {"max_norm": "x"}, f"clip_by_norm: expected max_norm to be {RATE}, got 'x'"),
    (fs.clip_by_value, {"max_value": None}, f"clip_by_value: expected max_value to be {RATE}, got None"),
    (fs.add_decayed_weights, {"weight_decay": -1}, f"add_decayed_weights: expected weight_decay to be {RATE}, got -1"),
    (fs.ema, {"tx": fs.sgd(0.1), "decay": "x"}, "ema: expected decay to be a number from 0 to 1, got 'x'"),
    (
        fs.dynamic_loss_scale,
        {"tx": fs.sgd(0.1), "growth_interval": "x"},
        "dynamic_loss_scale: expected growth_interval to be a number above 0, got 'x'",
    ),
    (
        fs.from_torch_scheduler,
        {"cls": torch.optim.lr_scheduler.StepLR, "lr": 0.1, "steps": 10**30, "step_size": 1},
        "from_torch_scheduler: expected steps to be a number of updates, 1 to 10,000,000, got 1000000000",
    ),
    (fs.partition, {"parts": None}, "partition: expected parts to be a mapping from masks to their parts, got None"),
    (fs.freeze, {"tx": fs.sgd(0.1), "mask": []}, "freeze: expected the mask to be a glob pattern"),
]


def check_hyperparameters_out_of_range_are_refused_by_name(row):
    make, arguments, text = row
    with pytest.raises(ValueError, match=re.escape(text)):
        make(**arguments)


def label(row):
    return f"{row[0].__name__} {row[1]!r:.50}"


@pytest.mark.parametrize("row", OUT_OF_RANGE, ids=label)
def test_hyperparameters_out_of_range_are_refused_by_name(row):
    check_hyperparameters_out_of_range_are_refused_by_name(row)


def check_the_ends_of_ranges_tensors_and_schedules_are_taken(make):
    for lr in (0, 0.0, torch.tensor(0.1), torch.tensor(0.1, requires_grad=True), lambda count: 0.1 / (count + 1)):
        make(lr)
    make(torch.empty((), device="meta"))


def test_the_ends_of_ranges_tensors_and_schedules_are_taken():
    for make in (fs.sgd, fs.adam, fs.adamw):
        check_the_ends_of_ranges_tensors_and_schedules_are_taken(make)
    fs.adam(0.1, (0, 0.999)), fs.sgd(0.1, dampening=-1.0), fs.clip_by_norm(1, math.inf), fs.ema(fs.sgd(1), 1)
    torch.func.vmap(lambda lr: (fs.sgd(lr), lr)[1])(torch.ones(3))
    fs.freeze(fs.sgd(0.1), ["a", "b"]).init({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)})


def test_arguments_of_transforms_jit_update_and_checkpoints():
    mesh = one_axis()
    x = torch.ones(2)
    params = fs.shard({"w": torch.ones(2)}, fs.zero2(mesh))
    state = fs.TrainState.create(params, fs.sgd(0.1))
    rows = [
        (lambda: fs.fully_shard(mesh, dim="x"), "fully_shard: expected dim to be a whole number, got 'x'"),
        (lambda: fs.own_dim(mesh, None), "own_dim: expected dim to be a whole number, got None"),
        (lambda: fs.split_dim(mesh, dim=None), "split_dim: expected dim to be a whole number, got None"),
        (lambda: fs.zero3(mesh, min_shard_elements=NAN), "expected min_shard_elements to be 0 or more, got nan"),
        (lambda: fs.zero3(None), "mesh: expected a DeviceMesh or an Axis, got None"),
        (lambda: fs.functionalize(5), "functionalize: expected module to be an nn.Module, got an int"),
        (lambda: checkpoint.Manager(None), "checkpoint.Manager: expected directory to be a path, got None"),
        (lambda: checkpoint.save(None, {"w": x}, 1), "checkpoint.save: expected directory to be a path, got None"),
        (lambda: checkpoint.restore(None, {"w": x}), "checkpoint.restore: expected directory to be a path, got None"),
        (lambda: checkpoint.latest(None), "checkpoint.latest: expected directory to be a path, got None"),
        (lambda: fs.jit(lambda x: x, donate_argnums=5)(x), "expected donate_argnums to be numbers of arguments by"),
        (lambda: fs.update(fs.sgd(0.1), state, params, donate="x"), "update: donate: expected True or False, got 'x'"),
    ]
    for call, text in rows:
        with pytest.raises(ValueError, match=re.escape(text)):
            call()
    assert fs.jit(lambda x, by=2: x * by, static_argnums=1)(x).equal(2 * x)


@on_ranks(2)
def test_a_sharded_leaf_in_the_place_of_a_tensor_is_refused():
    params = fs.shard({"w": torch.ones(4, 4)}, fs.zero3(one_axis()))
    w, x = params["w"], torch.randn(2, 4)
    for call in (
        *(lambda: w @ x, lambda: x @ w, lambda: w * 2, lambda: 2 * w, lambda: x * w, lambda: w + x, lambda: -w),
        *(lambda: w.shape, lambda: w.sum(), lambda: w.backward(), lambda: w[0], lambda: float(w), lambda: w < 1),
        *(lambda: F.linear(x, w), lambda: torch.stack([w, w]), lambda: x.copy_(w)),
        lambda: torch.optim.AdamW(params.values()),
    ):
        with pytest.raises((TypeError, AttributeError)):
            call()


def test_a_sharded_leaf_is_still_a_node():
    w = fs.shard({"w": torch.ones(4, 4)}, fs.zero3(one_axis()))["w"]
    assert not hasattr(w, "shape") and not hasattr(w, "__array__") and not hasattr(w, "nothing")  # noqa: PT018
    for other in (copy.copy(w), copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert type(other) is fs.Sharded
        assert other.local.equal(w.local)
        assert other.spec == w.spec
    assert torch.utils._pytree.tree_map(torch.neg, w).local.equal(-w.local)
    assert torch.func.vmap(lambda leaf: fs.tree_map(torch.neg, leaf))(w).local.equal(-w.local)


def linear_with(change):
    module = nn.Sequential(nn.Linear(2, 2))
    change(module[0])
    return module


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused_by_name(method):
    changed = "a change of the gradients that come back, or a transform with a scatter of its own"
    module = linear_with(lambda m: getattr(m.weight, method)(print))
    with pytest.raises(ValueError, match=re.escape(f"\n  ['0.weight']: expected {changed}, got a hook of {method}\n")):
        fs.functionalize(module)


def test_long_names_are_shortened_with_both_ends():
    text = str(leaf_error("verb: wrong", [Problem("begin" + "x" * 100_000 + "end", "y" * 100_000, "z")], "mend"))
    assert len(text) < 3000
    assert "  begin" in text
    assert "end: expected z, got yyy" in text
    tree = {"w" * 100_000: 3}
    with pytest.raises(ValueError, match="shard: ") as caught:
        fs.shard(tree, fs.zero2(one_axis()))
    assert len(str(caught.value)) < 3000
