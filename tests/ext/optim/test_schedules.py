"""from_torch_scheduler: torch's own values, looked up by the number of updates made."""

import math
from functools import partial

import numpy
import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

import fshard as fs
from fshard.testing import assert_trees_close
from tests.bad_input import text_of
from tests.tolerance import within
from tests.trees import assert_same_bits, normal

STEPS = 12


def warmed_up(optimizer, warmup, start_factor=0.1):
    """A function for several schedulers: a linear warm-up, then a cosine."""
    line = lr_scheduler.LinearLR(optimizer, start_factor, total_iters=warmup)
    half = lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - warmup)
    return lr_scheduler.SequentialLR(optimizer, [line, half], milestones=[warmup])


SCHEDULERS = {
    "StepLR": (lr_scheduler.StepLR, {"step_size": 3, "gamma": 0.3}),
    "CosineAnnealingWarmRestarts": (lr_scheduler.CosineAnnealingWarmRestarts, {"T_0": 3, "T_mult": 2}),
    "OneCycleLR": (lr_scheduler.OneCycleLR, {"max_lr": 0.5, "total_steps": STEPS}),
    "CyclicLR": (lr_scheduler.CyclicLR, {"base_lr": 0.1, "max_lr": 0.5, "step_size_up": 4}),
    "LambdaLR": (lr_scheduler.LambdaLR, {"lr_lambda": lambda count: 1 / (1 + count)}),
    "SequentialLR": (warmed_up, {"warmup": 4}),
}
# Those that cycle the momentum too, by the name it has in SGD.
CYCLES = ("OneCycleLR", "CyclicLR")


def test_values_are_those_of_torch():
    for case, name in (*((case, "lr") for case in SCHEDULERS), *((case, "momentum") for case in CYCLES)):
        cls, arguments = SCHEDULERS[case]
        optimizer = optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
        scheduler, expected = cls(optimizer, **arguments), []
        for _ in range(STEPS):
            expected.append(optimizer.param_groups[0][name])
            optimizer.step()
            scheduler.step()
        assert len(set(expected)) > 1
        # The rates are the same whether the momentum is cycled or not.
        fixed = {"cycle_momentum": False} if case in CYCLES and name == "lr" else {}
        schedule = fs.from_torch_scheduler(cls, 0.1, STEPS, name=name, **arguments, **fixed)
        actual = [schedule(torch.tensor(count)) for count in (*range(STEPS), 10**12)]
        assert {(value.dtype, value.shape) for value in actual} == {(torch.float64, ())}
        assert [*map(float, actual)] == [*expected, expected[-1]]


@pytest.mark.rows(4)
@pytest.mark.parametrize("options", ({}, {"foreach": True}, {"foreach": False}, {"fused": True}))
def test_training_gets_the_bits_of_torch(options):
    """Whether torch keeps the learning rate as a tensor in a kernel of its own or not."""
    cls, arguments = SCHEDULERS["SequentialLR"]
    params = {"w": torch.nn.Parameter(normal(0)(5, 3, dtype=torch.float32)), "scalar": torch.nn.Parameter(normal(1)())}
    ours = fs.tree_map(lambda param: param.detach().clone(), params)
    theirs = optim.AdamW(list(params.values()), lr=0.1, **options)
    scheduler = cls(theirs, **arguments)
    tx = fs.from_torch(optim.AdamW, lr=fs.from_torch_scheduler(cls, 0.1, STEPS, **arguments), **options)
    state = tx.init(ours)
    for step in range(STEPS):
        grads = {name: normal(2 + step)(*leaf.shape, dtype=leaf.dtype) for name, leaf in ours.items()}
        for name, param in params.items():
            param.grad = grads[name].clone()
        theirs.step()
        scheduler.step()
        ours, state = tx.update(grads, state, ours)
        assert_same_bits(ours, {name: param.detach() for name, param in params.items()})


def numbers(schedule, counts):
    return [float(schedule(torch.tensor(count))) for count in counts]


def test_schedules_in_closed_form():
    """As torch's schedulers of like names, which are the oracle; their sums of steps round otherwise."""
    table, length = fs.from_torch_scheduler, STEPS + 1
    line = table(lr_scheduler.LinearLR, 0.4, length, start_factor=0.25, end_factor=1.0, total_iters=7)
    half = table(lr_scheduler.CosineAnnealingLR, 0.4, length, T_max=STEPS, eta_min=0.1)
    pairs = (
        (fs.schedules.linear(0.1, 0.4, 7), line),
        (fs.schedules.cosine(0.4, STEPS, end_value=0.1), half),
        (fs.schedules.warmup_cosine(0.1, 0.4, 4, STEPS), table(warmed_up, 0.4, length, warmup=4, start_factor=0.25)),
        (fs.schedules.warmup_cosine(0.0, 0.4, 0, STEPS, end_value=0.1), half),
    )
    for schedule, expected in pairs:
        rates = numbers(expected, range(length))
        # torch adds up a step at a time.
        near = within(rates, terms=length)
        assert_trees_close(numbers(schedule, range(length)), rates, **near)
        # What comes later stays where it is.
        assert_trees_close(numbers(schedule, [10**6]), numbers(schedule, [STEPS]), **near)
    joined = fs.schedules.join([fs.schedules.constant(3.0), fs.schedules.linear(1.0, 0.0, 2), line], [2, 5])
    expected = [3.0, 3.0, 1.0, 0.5, 0.0, 0.1]
    assert_trees_close(numbers(joined, range(6)), expected, **within(expected, terms=2))
    for end in (0.1, 1e-20):
        for schedule in (fs.schedules.linear(0.3, end, 7), fs.schedules.cosine(0.3, 7, end_value=end)):
            assert numbers(schedule, [7, 10**6]) == [end, end]
    batch = torch.arange(8)
    for schedule in (joined, *sum(pairs, ())):
        assert [schedule(count) for count in range(6)] == numbers(schedule, range(6))
    assert_same_bits(torch.func.vmap(joined)(batch), torch.stack([joined(count) for count in batch]))


UPDATES = "to be a number of updates from 1 to 10,000,000, got"
CYCLES_MOMENTUM = (
    "changes the momentum too, in Adam the first beta, and this schedule would leave it as it is. Pass "
    'cycle_momentum=False, and for the momentum of SGD a schedule of its own with name="momentum".'
)
REFUSED = (
    *(
        (
            lambda case=case: fs.from_torch_scheduler(SCHEDULERS[case][0], 0.1, STEPS, **SCHEDULERS[case][1]),
            f"from_torch_scheduler: {case} {CYCLES_MOMENTUM}",
        )
        for case in CYCLES
    ),
    (
        lambda: fs.from_torch_scheduler(lr_scheduler.ReduceLROnPlateau, 0.1, STEPS),
        "from_torch_scheduler: ReduceLROnPlateau needs a number of each epoch, so its values are not known before the "
        'run. Pass inject=("lr",) to fs.from_torch, and replace hyper["lr"] of its state.',
    ),
    (
        lambda: fs.from_torch_scheduler(lr_scheduler.StepLR, 0.1, 2.0, step_size=2),
        f"from_torch_scheduler: expected steps {UPDATES} 2.0",
    ),
    (
        lambda: fs.from_torch_scheduler(lr_scheduler.StepLR, 0.1, STEPS, name="weight_decay", step_size=2),
        'from_torch_scheduler: expected name to be "lr" or "momentum", got \'weight_decay\'',
    ),
    *(
        (
            lambda warmup=warmup: fs.schedules.warmup_cosine(0.0, 1.0, warmup, 6),
            "schedules.warmup_cosine: expected warmup_steps to be a number of updates, 0 or more and below the 6 of "
            f"decay_steps, got {warmup}",
        )
        for warmup in (6, -1, 2.5)
    ),
    (lambda: fs.schedules.warmup_cosine(0.0, 1.0, 0, 0), f"schedules.warmup_cosine: expected decay_steps {UPDATES} 0"),
    *(
        (make, f"schedules.{name} to be a finite number, got nan")
        for make, name in (
            (lambda: fs.schedules.constant(math.nan), "constant: expected value"),
            (lambda: fs.schedules.linear(0.0, math.nan, 4), "linear: expected end_value"),
            (lambda: fs.schedules.cosine(math.nan, 4), "cosine: expected init_value"),
            (lambda: fs.schedules.warmup_cosine(0.0, math.nan, 2, 4), "warmup_cosine: expected peak_value"),
        )
    ),
    (lambda: fs.schedules.linear(0.0, 1.0, 0), f"schedules.linear: expected transition_steps {UPDATES} 0"),
    (lambda: fs.schedules.cosine(1.0, 10**8), f"schedules.cosine: expected decay_steps {UPDATES} 100000000"),
    (
        lambda: fs.schedules.join([fs.schedules.constant(1.0)] * 3, [3, 3]),
        "schedules.join: expected a boundary between any two schedules, in rising order, got boundaries [3, 3] of 3 "
        "schedules",
    ),
)


def test_arguments_that_do_not_fit_are_refused():
    for call, text in REFUSED:
        assert text_of(call) == text


# Values that are no rate. A vector would be broadcast against shards, which get other elements of it on each rank.
NO_RATES = {
    "a float64 Tensor of shape (3,)": torch.full((3,), 0.1, dtype=torch.float64),
    "a complex64 Tensor of shape ()": torch.tensor(0.1j),
    "nan": math.nan,
    "'x'": "x",
    "None": None,
    f"{10**39}": 10**400,
}


def one_update(make, lr):
    params = {"w": torch.ones(3)}
    tx = make(lr=lr)
    return tx.update(params, tx.init(params), params)[0]


OF_TORCH = partial(fs.from_torch, optim.SGD)


@pytest.mark.parametrize("make", (fs.sgd, fs.adamw, fs.lamb, fs.lars, fs.adafactor, OF_TORCH))
def test_a_schedule_whose_value_is_no_number_is_refused(make):
    for got, value in NO_RATES.items():
        text = f"update: expected the value of the schedule of lr to be a finite number, got {got}"
        assert text_of(partial(one_update, make, lambda count, value=value: value)) == text


def test_a_comparison_is_a_schedule_of_0_and_1():
    for make in (fs.sgd, OF_TORCH):
        for value in (True, torch.tensor(True), numpy.bool_(True), numpy.float32(1.0), numpy.array(1.0)):
            assert_same_bits(one_update(make, lambda count, value=value: value), {"w": torch.zeros(3)})


def test_schedules_of_betas_return_what_the_class_takes():
    """Of other hyperparameters, and in optimizers that are not torch's, a tuple is no number."""
    for betas in ([0.5, 0.9], (0.5, 0.9)):
        make = partial(fs.from_torch, optim.Adam, betas=lambda count, betas=betas: betas)
        assert_same_bits(one_update(make, 0.1), one_update(partial(fs.from_torch, optim.Adam, betas=betas), 0.1))
    for make in (fs.sgd, fs.adafactor):
        text = "update: expected the value of the schedule of lr to be a finite number, got (0.1,)"
        assert text_of(partial(one_update, make, lambda count: (0.1,))) == text
