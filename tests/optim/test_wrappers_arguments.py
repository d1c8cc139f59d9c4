"""What every optimizer and wrapper does alike: frozen leaves pass through, and states of others are refused."""

import re
from functools import partial

import pytest
import torch
from torch import optim

import fshard as fs
from tests.optim.test_from_torch import CASES
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal, one_axis


def sgd():
    return fs.from_torch(optim.SGD, lr=0.1, momentum=0.9)


WRAPPERS = {
    "skip_nonfinite": fs.skip_nonfinite,
    "dynamic_loss_scale": fs.dynamic_loss_scale,
    "every_k": lambda tx: fs.every_k(tx, 1),
    "every_k, 2": lambda tx: fs.every_k(tx, 2),
    "ema": lambda tx: fs.ema(tx, 0.9),
}
NATIVE = ("sgd", "adam", "adamw", "lamb", "lars")
OPTIMIZERS = {
    **{name: lambda wrap=wrap: wrap(sgd()) for name, wrap in WRAPPERS.items()},
    **{name: lambda name=name: getattr(fs, name)(0.1) for name in NATIVE},
    "sgd momentum": lambda: fs.sgd(0.1, 0.9),
    "clip_by_norm": lambda: fs.chain(fs.clip_by_norm(0.5), sgd()),
    "clip_by_value": lambda: fs.chain(fs.clip_by_value(0.5), sgd()),
    "add_decayed_weights": lambda: fs.chain(fs.add_decayed_weights(0.1), sgd()),
    "all at once": lambda: fs.ema(fs.skip_nonfinite(fs.dynamic_loss_scale(fs.every_k(fs.adamw(0.1), 1))), 0.5),
}


EVERY = OPTIMIZERS | {f"from_torch {row}": partial(fs.from_torch, cls, **how) for row, (cls, how) in CASES.items()}


@pytest.mark.parametrize("donate", (False, True))
@pytest.mark.parametrize("case", EVERY)
@on_ranks(2)
def test_frozen_and_absent_leaves_pass_through(case, donate):
    tx = EVERY[case]()
    draw = normal()
    # A length that does not divide: its norm must not see the padding, and its bits do not depend on the order of sums.
    full = {"fixed": draw(5, 3), "trained": draw(1), "absent": None}
    grads = [draw(1) for _ in range(2)]
    strategy = fs.zero2(one_axis(), min_shard_elements=0)
    params = fs.shard(full, strategy, frozen=lambda path: "fixed" in path)
    fixed = params["fixed"]
    state = fs.TrainState.create(params, tx)
    alone, alone_state = full["trained"], tx.init(full["trained"])
    for grad in grads:
        gradients = {"fixed": None, "trained": fs.shard(grad, strategy), "absent": None}
        state = fs.update(tx, state, gradients, donate=donate)
        alone, alone_state = tx.update(grad, alone_state, alone)
    assert state.step.item() == 2
    assert state.params["fixed"] is fixed
    assert_same_bits(fs.unshard(fixed), full["fixed"])
    if hasattr(state.opt_state, "average"):
        assert state.opt_state.average["fixed"] is fixed
    assert state.params["absent"] is None
    assert_same_bits(fs.unshard(state.params)["trained"], alone)
    for slot in getattr(state.opt_state, "slots", {}).values():
        assert slot["fixed"] is slot["absent"] is None
        assert slot["trained"] is not None


@pytest.mark.parametrize("case", EVERY)
def test_nothing_to_train(case):
    tx = EVERY[case]()
    frozen = fs.shard({"w": torch.ones(3)}, fs.ddp(one_axis()), frozen=lambda path: True)
    for params, grads in (({}, {}), (frozen, {"w": None})):
        for update in (tx.update, tx.update_donated or tx.update):
            new, state = update(grads, tx.init(params), params)
            assert fs.tree_leaves(new) == fs.tree_leaves(params)
            if case not in OPTIMIZERS:
                assert state[:3] == (torch.tensor(1), {}, {})
            elif case in NATIVE:
                assert state.updates.item() == 1


STATES = {"skip_nonfinite": "SkipState", "dynamic_loss_scale": "ScaleState", "every_k": "EveryState", "ema": "EmaState"}


@pytest.mark.parametrize("donate", (False, True))
@pytest.mark.parametrize("name", STATES)
def test_state_of_another_optimizer_is_refused(name, donate):
    tx = WRAPPERS[name](sgd())
    params = torch.ones(2)
    text = (
        f"{name}: expected the state to be a {STATES[name]}, got a TorchState; update with the optimizer that made "
        "the state"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        (tx.update_donated if donate else tx.update)(params, sgd().init(params), params)
    assert_same_bits(params, torch.ones(2))
