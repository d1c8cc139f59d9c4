"""Arguments, masks, schedules, states and leaves that optimizers refuse, each with the text of its error."""

from functools import partial

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

import fshard as fs
from tests.bad_input import text_of
from tests.optim.test_wrappers import NATIVE, WRAPPERS, sgd

NAN, INF = float("nan"), float("inf")
W = {"w": torch.ones(2)}

PARAMS = {"a": torch.ones(2), "b": torch.ones(2)}
MASK = "expected the mask to be a glob pattern of leaves' names, several, or a function of (name, leaf)"
MASKS = [
    (lambda: fs.freeze(fs.sgd(0.1), {"a": 1, "b": 0}), f"freeze: {MASK}, got a dict"),
    (
        lambda: fs.masked(fs.sgd(0.1), "bias").init(PARAMS),
        "masked: the mask 'bias' matches no leaf of a, b; name some of these",
    ),
    (
        lambda: fs.partition({"a": fs.sgd(0.1), "c*": fs.sgd(0.1), "*": fs.sgd(0.1)}).init(PARAMS),
        "partition: the mask 'c*' matches no leaf of a, b; name some of these",
    ),
    (
        lambda: fs.chain(fs.add_decayed_weights(0.1, "w*"), fs.sgd(0.1)).init(PARAMS),
        "masked: the mask 'w*' matches no leaf of a, b; name some of these",
    ),
    (lambda: fs.freeze(fs.sgd(0.1), ()).init(PARAMS), f"freeze: {MASK}, got a tuple"),
    (
        lambda: fs.partition({"a": fs.sgd(0.1)}).init(PARAMS),
        'partition: no mask matches b; add one for "*", which matches all that are left',
    ),
    (
        lambda: fs.partition({}),
        "partition: expected parts of Optimizers alone or GradientTransformations alone, got nothing",
    ),
    (
        lambda: fs.partition({"a": fs.sgd(0.1), "*": fs.clip_by_value(1.0)}),
        "partition: expected parts of Optimizers alone or GradientTransformations alone, got an Optimizer, a "
        "GradientTransformation",
    ),
    (
        lambda: fs.masked(optim.AdamW, "a"),
        "masked: expected tx to be an Optimizer or a GradientTransformation, got a type; make one by fs.from_torch",
    ),
    (lambda: fs.masked(fs.sgd(0.1), 3), f"masked: {MASK}, got an int"),
    (
        lambda: fs.masked(fs.sgd(0.1), "a").update(PARAMS, fs.sgd(0.1).init(PARAMS)[:1], PARAMS),
        "masked: expected the state to be a tuple of 2, got a tuple of 1; update with the optimizer that made the "
        "state",
    ),
]


UPDATES = "expected steps to be a number of updates, 1 or more, got"
STEP = partial(fs.from_torch_scheduler, lr_scheduler.StepLR, step_size=2)


def exploding(optimizer, value):
    return lr_scheduler.LambdaLR(optimizer, lambda count: value if count == 2 else 1.0)


def used_where_not_finite():
    tx = fs.from_torch(optim.SGD, lr=lambda count: 1.0 / (1 - count))
    params, state = tx.update(W, tx.init(W), W)
    tx.update(params, state, params)


CONSTANT = fs.schedules.constant(1.0)
SCHEDULES = [
    *((partial(STEP, lr=0.1, steps=n), f"from_torch_scheduler: {UPDATES} {n!r}") for n in (0, -1, 2.0, True)),
    (
        lambda: fs.from_torch_scheduler(lr_scheduler.ReduceLROnPlateau, lr=0.1, steps=3),
        "from_torch_scheduler: ReduceLROnPlateau needs a metric at every step; keep the learning rate in the state "
        "instead, by from_torch(..., inject=['lr'])",
    ),
    (lambda: STEP(lr=NAN, steps=3), "from_torch_scheduler: expected lr to be a finite number, 0 or more, got nan"),
    *(
        (
            partial(fs.from_torch_scheduler, exploding, lr=0.1, steps=3, value=value),
            f"from_torch_scheduler: expected lr to be a finite number, got {value} at count 2",
        )
        for value in (INF, NAN)
    ),
    (
        used_where_not_finite,
        "from_torch: expected lr to be a finite number, got inf at count 1; mend the schedule",
    ),
    *(
        (partial(schedule, 1), "schedule: expected the count to be an int64 tensor of shape (), got an int")
        for schedule in (STEP(lr=0.1, steps=2), fs.schedules.linear(0.0, 1.0, 2))
    ),
    (lambda: fs.schedules.constant(NAN), "schedules.constant: expected value to be a finite number, got nan"),
    (lambda: fs.schedules.linear(0.0, INF, 3), "schedules.linear: expected end to be a finite number, got inf"),
    (lambda: fs.schedules.linear(0.0, 1.0, 0), f"schedules.linear: {UPDATES} 0"),
    (lambda: fs.schedules.cosine(1.0, 2.5), f"schedules.cosine: {UPDATES} 2.5"),
    (
        lambda: fs.schedules.warmup_cosine(1.0, 5, 5),
        "schedules.warmup_cosine: expected steps to be a number of updates, 6 or more, got 5",
    ),
    (
        lambda: fs.schedules.join([CONSTANT], [3]),
        "schedules.join: expected one boundary between two schedules, got boundaries: 1, schedules: 1",
    ),
    (
        lambda: fs.schedules.join([CONSTANT] * 3, [3, 3]),
        "schedules.join: expected boundaries[1] to be a number of updates, 4 or more, got 3",
    ),
]


# For each argument what its error expects, and values that are refused.
SCALE = {
    # The scale is kept in float32, where 1e39 is inf and 1e-50 is 0.
    "init_scale": ("a number above 0, finite in float32", (0.0, -1.0, INF, NAN, 1e39, 1e-50)),
    "growth_factor": ("a number above 1", (1.0, 0.5, NAN)),
    "backoff_factor": ("a number between 0 and 1", (0.0, 1.0, NAN)),
    "growth_interval": ("a number above 0", (0, -1)),
}


def test_arguments_of_wrappers_are_refused():
    for name, (needed, values) in SCALE.items():
        for value in values:
            text = f"dynamic_loss_scale: expected {name} to be {needed}, got {value!r}"
            assert text_of(partial(fs.dynamic_loss_scale, sgd(), **{name: value})) == text
    for decay in (-0.1, 1.1, NAN):
        text = f"ema: expected decay to be a number from 0 to 1, got {decay}"
        assert text_of(partial(fs.ema, sgd(), decay=decay)) == text
    for case, wrap in WRAPPERS.items():
        end = "fs.from_torch" + ("" if case == "ema" else " or an fs.chain with one")
        text = f"{case.split(',')[0]}: expected tx to be an Optimizer, such as {end}, got a GradientTransformation"
        assert text_of(partial(wrap, fs.clip_by_value(1.0))) == text


ZERO = torch.tensor(0.0, dtype=torch.float64)
TAKES_SUMS = {
    **{"clip_by_global_norm": {"max_norm": 1.0}, "clip_by_norm": {"max_norm": 1.0}},
    **{"add_decayed_weights": {"weight_decay": 0.1}, "from_torch": {"cls": optim.SGD, "lr": 0.1}},
}


def refused_sums(takes_sums):
    """Calls of functions with their arguments, and the texts of their errors."""
    for name, arguments in takes_sums.items():
        call = partial(getattr(fs, name), **arguments, sums="pairs")
        yield call, f"{name}: expected sums to be \"tree\" or None, got 'pairs'"


ARGUMENTS = [
    *(
        (partial(fs.sgd, 0.1, nesterov=True, **hyper), "sgd: nesterov needs a momentum above 0 and no dampening")
        for hyper in ({}, {"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.9, "dampening": ZERO})
    ),
    *(
        (
            partial(fs.from_torch, optim.AdamW, inject=(name,), **hyper),
            f"from_torch: expected inject to name numbers, got {name!r}, which is {found}",
        )
        for name, hyper, found in (
            ("lr", {}, "not among its arguments"),
            ("betas", {"betas": (0.9, 0.99)}, "a tuple"),
            ("amsgrad", {"amsgrad": True}, "a bool"),
        )
    ),
    *refused_sums(TAKES_SUMS),
    (
        lambda: fs.clip_by_norm(1.0, 2.5, sums="tree"),
        'clip_by_norm: expected p to be 2 or inf with sums="tree", got 2.5',
    ),
    (
        lambda: fs.from_torch(optim.Adam, fused=True, sums="tree"),
        'from_torch: expected a kernel of Adam for sums="tree" that rounds alike, got fused=True; leave out fused, or '
        "sums",
    ),
    (lambda: fs.global_norm(W, 0.0), "global_norm: expected p to be a number above 0, got 0.0"),
    (
        lambda: fs.clip_by_global_norm(1.0, keep_norm="yes"),
        "clip_by_global_norm: keep_norm: expected True or False, got 'yes'; pass one of the two",
    ),
]


def test_refusals():
    for call, text in (*MASKS, *SCHEDULES, *ARGUMENTS):
        assert text_of(call) == text


STATES = {
    **{"sgd": "SgdState", "adam": "AdamState", "adamw": "AdamState"},
    "scale_by_adam": "AdamState",
}
MAKE = {name: partial(getattr(fs, name), 0.1) for name in NATIVE} | {"scale_by_adam": fs.scale_by_adam}


def check_states_of_others_are_refused(tx, name, state):
    end = "got a tuple; update with the optimizer that made the state"
    assert text_of(lambda: tx.update(W, (), W)) == f"{name}: expected a state of class {state}, {end}"


@pytest.mark.rows(8)
@pytest.mark.parametrize("name", STATES)
def test_states_of_others_are_refused(name):
    check_states_of_others_are_refused(MAKE[name](), name, STATES[name])


def check_leaves_and_rates_are_refused(make, checked_by, takes_complex):
    """The optimizer of a learning rate, the name in its errors, and whether its leaves may be complex."""
    tx = make(0.1)
    assert text_of(lambda: tx.init({"i": torch.arange(2)})) == (
        f"{checked_by}: leaves cannot take a gradient\n"
        "  ['i']: expected a floating tensor, got an int64 Tensor of shape (2,)\n"
        "To fix: shard these leaves with frozen=, or keep them out of the parameters."
    )
    if not takes_complex:
        assert text_of(lambda: tx.init({"w": torch.ones(2, dtype=torch.complex64)})) == (
            f"{checked_by}: leaves are complex\n"
            "  ['w']: expected a real tensor, got a complex64 Tensor of shape (2,)\n"
            "To fix: keep torch.view_as_real of them as parameters, or step them by fs.sgd."
        )
    for rate in (INF, torch.tensor(INF)):
        diverging = make(lambda count, rate=rate: rate)
        text = "update: expected the learning rate to be a finite number, got inf at count 0"
        assert text_of(partial(diverging.update, W, diverging.init(W), W)) == text


@pytest.mark.rows(5)
@pytest.mark.parametrize("name", NATIVE)
def test_leaves_and_rates_are_refused(name):
    check_leaves_and_rates_are_refused(getattr(fs, name), name, takes_complex=name == "sgd")


def test_an_injected_rate_that_is_not_finite_is_refused():
    tx = fs.from_torch(optim.SGD, inject=("lr",), lr=0.1)
    state = tx.init(W)._replace(hyper={"lr": torch.tensor(NAN)})
    text = "from_torch: expected lr to be a finite number, got nan at count 0; mend the schedule"
    assert text_of(lambda: tx.update(W, state, W)) == text


def test_a_norm_of_no_tensors_is_refused():
    assert text_of(lambda: fs.global_norm({"w": 3.0})) == (
        "global_norm: leaves are no tensors\n"
        "  ['w']: expected a Sharded leaf or a tensor, got a float\n"
        "To fix: keep other values out of the tree."
    )


PAIR, BOTH = "update: expected tx.update to return the pair ({}, state), got ", "; return both, the state also where it"
RESULTS = (
    (fs.Optimizer, lambda params, state: params, PAIR.format("params") + "a dict" + BOTH),
    (fs.Optimizer, lambda params, state: (params, state, 0), PAIR.format("params") + "a tuple" + BOTH),
    (
        fs.Optimizer,
        lambda params, state: (state, params),
        "update: tx.update returns (params, state), and its params: trees differ in structure\n"
        "  ['w']: expected a leaf, got nothing\nTo fix: ",
    ),
    (fs.GradientTransformation, lambda grads, state: grads, PAIR.format("grads") + "a dict" + BOTH),
)


def test_what_is_no_pair_is_refused_as_an_update():
    for cls, made, text in RESULTS:
        tx = cls(lambda params: (), lambda grads, state, params, made=made: made(grads, state))
        tx = tx if cls is fs.Optimizer else fs.chain(tx, fs.sgd(0.1))
        assert text_of(partial(fs.update, tx, fs.TrainState.create(W, tx), W)).startswith(text)
