"""assert_matches_ddp: on every rank it names what differs from DDP."""

import re
from functools import partial

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import assert_matches_ddp
from tests.ranks import my_rank, on_ranks
from tests.trees import normal, one_axis

SGD = fs.from_torch(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    """A layer, BatchNorm, a buffer that never changes, and a branch that a flag switches on."""

    def __init__(self):
        super().__init__()
        draw = normal(1)
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.branch = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        for parameter in self.parameters():
            parameter.data = draw(*parameter.shape, dtype=torch.float32)

    def forward(self, x, branch=True):
        x = self.norm(self.layer(x)) * self.mask
        return self.branch(x) if branch else x


def compare_with_ddp(
    reduce="mean", keeps_buffers=True, syncs_buffers=True, use_branch=True, added=0.0, factor=1.0, lr_factor=1.0
):
    """Compare two steps of Net with those of DDP; a rank may leave the branch out, and change its loss.

    The loss is multiplied by a factor where it is reported, and by another where it is differentiated.
    """
    model = fs.functionalize(Net())
    params = model.init(fs.zero3(one_axis(), min_shard_elements=0))

    def train_step(state, x):
        def loss_fn(params, x):
            out, buffers = model.apply(params, x, use_branch, buffers=state.buffers)
            return lr_factor * out.square().mean(), buffers

        (loss, buffers), grads = fs.value_and_grad(loss_fn, reduce=reduce, has_aux=True)(state.params, x)
        if syncs_buffers:
            buffers = fs.sync_buffers(buffers, state.params)
        # A donated state cannot be traced for the operation that differs first, which takes most of the time.
        state = fs.update(SGD, state, grads, donate=True)
        if keeps_buffers:
            state = state._replace(buffers=buffers)
        if reduce == "sum":
            loss = loss / 2
        return state, factor * loss / lr_factor + added

    batches = [normal(10 * step + my_rank())(5, 3, dtype=torch.float32) for step in range(2)]
    return assert_matches_ddp(
        train_step,
        fs.TrainState.create(params, SGD, buffers=model.buffers),
        batches,
        module=Net(),
        loss_fn=lambda ddp, x: ddp(x, use_branch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        exact=True,
    )


FIRST = "step 0 (counted from 0) is the first that differs from DDP: trees differ\n"
LOSS = FIRST.replace("trees differ\n", "the loss")
CHANGED = FIRST.replace("trees differ\n", "the change of the parameters")
SUMMED = " is 2 times that of DDP, the number of ranks: a sum where a mean is meant?\n"
LOSS_OF_THREE = LOSS + SUMMED.replace("2", "3").replace(
    "the number of ranks", "as many as microbatches of an accumulation, perhaps"
)
HALVED = "is 2 times smaller than that of DDP, the number of ranks: a mean taken twice, or where a sum is meant?"
RATES = " Or do the learning rates differ?\n"
CHANGE_SUMMED = CHANGED + SUMMED.rstrip("\n") + RATES
BOTH_HALVED = f"{LOSS} {HALVED}; the change of the parameters {HALVED}{RATES}"
COUNT = FIRST + "  ['buffers']['norm.num_batches_tracked']: expected equal values, got Expected 1 but got 0"


def wrong_steps(rank):
    """Options that make a step wrong, and the texts of the errors on both ranks."""
    return [
        ({"keeps_buffers": False}, COUNT, COUNT),
        ({"syncs_buffers": False}, "rank 1: " + FIRST + "  ['buffers']['norm", FIRST + "  ['buffers']['norm.running_"),
        ({"reduce": "sum"}, CHANGE_SUMMED, CHANGE_SUMMED),
        ({"factor": 2.0}, LOSS + SUMMED + "  ['loss']", LOSS + SUMMED + "  ['loss']"),
        ({"factor": 3.0}, LOSS_OF_THREE, LOSS_OF_THREE),
        ({"factor": 2.5}, FIRST + "  ['loss']", FIRST + "  ['loss']"),
        ({"factor": 0.5, "lr_factor": 0.5}, BOTH_HALVED, BOTH_HALVED),
        ({"added": float(rank)}, "rank 1: " + FIRST + "  ['loss']", FIRST + "  ['loss']: expected "),
    ]


class Sloped(nn.Module):
    """A layer and an activation, whose slope is no parameter."""

    def __init__(self, slope):
        super().__init__()
        self.layer = nn.Linear(3, 4, dtype=torch.float64)
        self.slope = slope
        draw = normal(1)
        for parameter in self.parameters():
            parameter.data = draw(*parameter.shape)

    def forward(self, x):
        x = self.layer(x)
        return nn.functional.leaky_relu(x, self.slope)


def compare_slopes(slope=0.1, lr=0.1, **changes):
    """Compare steps of two modules with DDP's, by other arguments where they are given."""
    model = fs.functionalize(Sloped(slope))
    tx = fs.from_torch(torch.optim.SGD, lr=lr)

    def loss_fn(params, x):
        return model.apply(params, x).square().mean()

    def train_step(state, x):
        loss, grads = fs.value_and_grad(loss_fn)(state.params, x)
        return fs.update(tx, state, grads), loss

    arguments = {
        "train_step": train_step,
        "state": fs.TrainState.create(model.init(fs.zero3(one_axis(), min_shard_elements=0)), tx),
        "batches": [normal(my_rank())(5, 3)],
        "module": Sloped(0.1),
        "loss_fn": lambda ddp, x: ddp(x).square().mean(),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "exact": True,
    }
    assert_matches_ddp(**arguments | changes)


DONATED = "\nThe step donates its state. Without donation this error also names the operation that differs first."
ALL_AGREE = (
    "All operations that the forward and the backward share with the module agree. Look at the loss, at the reduction "
    "of gradients, at the optimizer, and of buffers at fs.sync_buffers."
)
NAMED = r"""
To fix: look at the first leaf that differs\.
The first operation that differs from the module's:
diff: aten\.leaky_relu differs by 0\.\d+ of its largest value on ranks 0 and 1
  phase: forward
  at: test_matches_ddp\.py:\d+ in forward: return nn\.functional\.leaky_relu\(x, self\.slope\)
  at: test_matches_ddp\.py:\d+ in loss_fn: return model\.apply\(params, x\)\.square\(\)\.mean\(\)
  at: test_matches_ddp\.py:\d+ in train_step: loss, grads = fs\.value_and_grad\(loss_fn\)\(state\.params, x\)
  module: Sloped$"""


@on_ranks("2 processes")
def test_the_operation_that_differs_first_is_named_with_its_module_and_line():
    with pytest.raises(AssertionError, match=NAMED):
        compare_slopes(0.2)
    with pytest.raises(AssertionError, match=re.escape(ALL_AGREE)):
        compare_slopes(0.1, lr=0.2)


def wrong_calls():
    """Arguments by which nothing is compared, or that are something else, and the refusals."""
    module, optimizer = Sloped(0.1), torch.optim.SGD
    returns = "train_step to return (state, loss), got"
    unchanged = "batches, not used up, that change DDP's parameters to finite ones, got none"
    for name, value, text in (
        ("batches", [], unchanged),
        ("batches", iter(()), unchanged),
        ("batches", [torch.full((5, 3), torch.nan, dtype=torch.float64)], unchanged),
        ("batches", [normal(0)(5, 3)] * (1 + my_rank()), "equally many batches on each rank, got [1, 2]"),
        ("optimizer", optimizer(module.parameters(), lr=0.1), "optimizer to be a Callable, got a SGD"),
        ("optimizer", None, "optimizer to be a Callable, got None"),
        ("module", Sloped, "module to be a Module, got the class Sloped"),
        ("module", fs.functionalize(module), "module to be a Module, got a Model"),
        ("loss_fn", None, "loss_fn to be a Callable, got None"),
        ("state", dict(module.named_parameters()), "state to be a TrainState, got a dict"),
        ("train_step", None, "train_step to be a Callable, got None"),
        ("train_step", lambda state, x: x.mean(), f"{returns} a float64 Tensor of shape ()"),
        ("train_step", lambda state, x: state, f"{returns} a TrainState"),
        ("train_step", lambda state, x: (state.params, x.mean()), f"{returns} a dict, a float64 Tensor of shape ()"),
        # A step that returns its numbers to log, as most do.
        ("train_step", lambda state, x: (state, {"loss": x.mean()}), f"{returns} a TrainState, a dict"),
        ("train_step", lambda state, x: (state, 0.5, None), f"{returns} a TrainState, a float, None"),
        ("train_step", lambda state, x: (), f"{returns} "),
        ("loss_fn", lambda ddp, x: (ddp(x).mean(), {}), "loss_fn to return the loss, got a tuple"),
    ):
        yield {name: value}, text
    yield {"lr": 0.0, "optimizer": partial(optimizer, lr=0.0)}, unchanged


@on_ranks("2 processes")
def test_calls_by_which_nothing_is_compared_are_refused():
    compare_slopes()
    for changes, text in wrong_calls():
        with pytest.raises(ValueError, match=f"^assert_matches_ddp: expected {re.escape(text)}"):
            compare_slopes(**changes)
    for tolerance in (torch.inf, torch.nan, -1.0, "x", True):
        with pytest.raises(ValueError, match="expected atol to be a finite number, 0 or more, got "):
            compare_slopes(lr=0.2, exact=False, rtol=0.0, atol=tolerance)


@on_ranks("2 processes")
def test_every_rank_names_the_difference():
    for uses in (True, my_rank() == 0, False):
        compare_with_ddp(use_branch=uses)
    for options, *texts in wrong_steps(my_rank()):
        with pytest.raises(AssertionError, match=re.escape(texts[my_rank()])) as caught:
            compare_with_ddp(**options)
        assert str(caught.value).endswith(DONATED)
