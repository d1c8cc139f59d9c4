"""lamb, lars and adafactor: the arithmetic of the papers, full or sharded, derivatives, arguments that are refused."""

import pytest
import torch

import fshard as fs
from fshard.testing import assert_trees_close
from tests.bad_input import text_of
from tests.ext.optim import test_native as core
from tests.ext.optim.test_native import LAYOUTS, SHAPES, STEPS, run, tree
from tests.optim.test_unused import BETAS, MOMENTUM
from tests.ranks import on_ranks
from tests.test_bad_input import RATE
from tests.tolerance import within
from tests.trees import meshes, one_axis


def slow_lamb(param, grads, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
    """Algorithm 2 of You et al. (2020), with phi the identity."""
    mean, square = torch.zeros_like(param), torch.zeros_like(param)
    for step, grad in enumerate(grads, 1):
        mean = betas[0] * mean + (1 - betas[0]) * grad
        square = betas[1] * square + (1 - betas[1]) * grad**2
        direction = (mean / (1 - betas[0] ** step)) / ((square / (1 - betas[1] ** step)).sqrt() + eps)
        direction = direction + weight_decay * param
        size, length = param.norm(), direction.norm()
        param = param - lr * (size / length if size > 0 and length > 0 else 1.0) * direction
    return param


def slow_lars(param, grads, lr, momentum=0.9, weight_decay=0.0, trust_coefficient=0.001, eps=0.0):
    """optax.lars: decay, trust ratio, learning rate, then trace."""
    trace = torch.zeros_like(param)
    for grad in grads:
        decayed = grad + weight_decay * param
        size, length = param.norm(), decayed.norm()
        trust = trust_coefficient * size / (length + eps) if size > 0 and length > 0 else 1.0
        trace = -lr * trust * decayed + momentum * trace
        param = param + trace
    return param


LAYERWISE = {
    "lamb": (fs.lamb, slow_lamb, BETAS | {"weight_decay": 0.1}),
    "lars": (fs.lars, slow_lars, MOMENTUM | {"weight_decay": 0.1, "trust_coefficient": 0.5, "eps": 0.01}),
    "lars plain": (fs.lars, slow_lars, {"lr": 0.1}),
}


def layers(seed):
    """A leaf that starts from zero, one that gets no gradient and one that gets none at first."""
    zeros = {"from zero": seed == 0, "idle": seed > 0, "late": seed in (1, 2)}
    made = tree(seed, shapes=SHAPES | dict.fromkeys(zeros, (4,)))
    return made | {name: torch.zeros(4, dtype=torch.float64) for name, zero in zeros.items() if zero}


@pytest.mark.parametrize("case", LAYERWISE)
@on_ranks(3)
def test_layerwise_follows_the_papers(case):
    ours, slow, hyper = LAYERWISE[case]
    grads = [layers(step) for step in range(1, STEPS + 1)]
    expected = {name: slow(param, [grad[name] for grad in grads], **hyper) for name, param in layers(0).items()}
    # Each norm sums 15 squares.
    near = within(expected, terms=15, steps=STEPS)
    for layout in ("ddp", "last dim", "some whole"):
        strategy = LAYOUTS[layout](meshes())
        params, _ = run(ours(**hyper), lambda full: fs.shard(full, strategy), layers)  # noqa: B023
        assert_trees_close(fs.unshard(params), expected, **near)


REFUSED = (
    (fs.lamb, {"lr": -1.0}, f"lamb: expected lr to be {RATE}, got -1.0"),
    (fs.adafactor, {"beta2_decay": 0.5}, "adafactor: expected beta2_decay to be a number, 0 or less, got 0.5"),
    (
        fs.adafactor,
        {"eps": (torch.ones(2), 1e-3)},
        "adafactor: expected eps[0] to be a finite number, 0 or more, got a float32 Tensor of shape (2,)",
    ),
    (fs.adafactor, {"eps": ("", 1e-3)}, "adafactor: expected eps[0] to be a finite number, 0 or more, got ''"),
    (fs.adafactor, {"d": 0.5}, "adafactor: expected d to be a finite number, 1 or more, got 0.5"),
    (
        fs.adafactor,
        {"reduction_order": "all"},
        "scale_by_factored_rms: expected reduction_order to be \"tree\" or None, got 'all'",
    ),
    (fs.whole, {"tx": torch.optim.Muon}, "whole: expected tx to be an Optimizer, such as fs.from_torch, got"),
)


def test_arguments_are_refused_by_name():
    for make, given, text in REFUSED:
        assert text_of(lambda: make(**given)).startswith(text)  # noqa: B023


def test_whole_refuses_a_leaf_that_was_frozen_so_far():
    transform, tx = fs.ddp(one_axis()), fs.whole(fs.adam(0.1))
    state = fs.TrainState.create(fs.shard({"a": torch.ones(3), "b": torch.ones(2)}, transform, frozen="a"), tx)
    state = fs.reshard(state, transform, frozen="b")
    grads = fs.shard({"a": torch.ones(3)}, transform) | {"b": None}
    assert text_of(lambda: fs.update(tx, state, grads)) == (
        "whole: leaves have no optimizer state\n"
        "  ['a']: was frozen when the state was made\n"
        "To fix: make the state again with fs.TrainState.create."
    )


@on_ranks(2)
def test_derivatives_of_shards_are_those_of_full_trees(world_size):
    for make, _, hyper in (LAYERWISE["lamb"], LAYERWISE["lars"]):
        core.check_derivatives_of_shards_are_those_of_full_trees((make, hyper), world_size, "zero2 of every leaf")
