"""Arguments out of range and leaves in the wrong place: each is refused by name, with a remedy."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
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
            for value in (-1e-9, NAN, "x")
        ),
        *(
            (make, {"lr": 0.1, "betas": betas}, f"expected {where} to be {FRACTION}, got {value}")
            for make in with_betas
            for betas, where, value in (((0.9, 1.0), "betas[1]", "1.0"),)
        ),
    ]


OUT_OF_RANGE = [
    *out_of_range({fs.sgd: ("momentum",), fs.adamw: ("lr", "eps", "weight_decay")}, with_betas=(fs.adamw,)),
    (fs.sgd, {"lr": torch.ones(2)}, f"sgd: expected lr to be {RATE}, got a float32 Tensor of shape (2,)"),
    (fs.clip_by_norm, {"max_norm": "x"}, f"clip_by_norm: expected max_norm to be {RATE}, got 'x'"),
    (fs.ema, {"tx": fs.sgd(0.1), "decay": "x"}, "ema: expected decay to be a number from 0 to 1, got 'x'"),
    (fs.partition, {"parts": None}, "partition: expected parts to be a mapping from masks to their parts, got None"),
]


def check_hyperparameters_out_of_range_are_refused_by_name(row):
    make, arguments, text = row
    with pytest.raises(ValueError, match=re.escape(text)):
        make(**arguments)


def label(row):
    return f"{row[0].__name__} {row[1]!r:.50}"


def test_hyperparameters_out_of_range_are_refused_by_name():
    for row in OUT_OF_RANGE:
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
