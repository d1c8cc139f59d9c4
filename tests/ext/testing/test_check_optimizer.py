"""check_optimizer: it passes what is right, and names the law and the leaf of each way to be wrong."""

import re

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard._compat import is_tracing
from fshard.testing import RankError, check_optimizer
from tests.optim.test_table import TABLE
from tests.ranks import my_rank
from tests.trees import normal

PARAMS = {"v": normal(1)(7), "w": normal(2)(5, 3), "x": normal(3)(2, 4, dtype=torch.float32)}
CALLS = []


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", TABLE)
def test_optimizers_of_the_library_pass(name):
    params = {"wide": normal(4)(3, 5), "tall": normal(5)(6, 2), "vector.bias": normal(6)(3), "i": torch.ones(2)}
    check_optimizer(TABLE[name].make(), PARAMS | params, world_sizes=(1, 3))


def transformation(f):
    return fs.GradientTransformation(lambda params: (), lambda grads, state, params: (fs.tree_map(f, grads), state))


def optimizer(f):
    return fs.Optimizer(lambda params: (), lambda grads, state, params: (fs.tree_map(f, params, grads), state))


def scale_by_calls(grad):
    CALLS.append(grad)
    return grad * len(CALLS)


def log_norm(grads, state, params):
    return grads, {"norm": sum(grad.square().sum() for grad in fs.tree_leaves(grads))}


def with_state(first, change):
    """A transformation that changes its state, and nothing else."""
    return fs.GradientTransformation(
        lambda params: {"s": first}, lambda grads, state, params: (grads, {"s": change(state["s"])})
    )


AS_INIT = "the state has another structure, shape, dtype or NaN after an update; return a state as init makes it"
NORMS = "take norms and sums of whole leaves by fs.leaf_norms or fs.global_norm; tensors are this rank's parts"
APART = f"check_optimizer: rank 0 of 2 under {{}} does not end where one rank does; {NORMS}: trees differ\n  ['{{}}']"
WRONG = [
    (torch.optim.SGD, "expected tx to be an Optimizer or a GradientTransformation"),
    # A norm of parts, in updates and in the state.
    (transformation(lambda grad: grad / grad.norm()), APART.format("zero3", "params") + "['v']: "),
    (
        fs.GradientTransformation(lambda params: {"norm": torch.zeros((), dtype=torch.float64)}, log_norm),
        APART.format("zero3", "state") + "[0]['norm']: ",
    ),
    (
        transformation(lambda grad: grad.detach().numpy().fill(0) or grad),
        "check_pure: the step changed its arguments\n  argument 1['v']: ",
    ),
    (transformation(scale_by_calls), "twice has other bits; keep all state in the state: trees differ\n  .params['v']"),
    (
        fs.GradientTransformation(lambda params: {"norm": torch.zeros(())}, lambda grads, state, params: (grads, {})),
        f"check_optimizer: {AS_INIT}: assert_trees_close: trees differ in structure\n  [0]['norm']: ",
    ),
    # A state that grows, one of another dtype, and one that is NaN while the parameters are finite.
    (with_state(torch.zeros(1), lambda old: old.repeat(2)), f"{AS_INIT}: trees differ\n  [0]['s']: "),
    (with_state(torch.zeros(1), torch.Tensor.double), f"{AS_INIT}: trees differ\n  [0]['s']: "),
    (with_state(torch.zeros(1), lambda old: old / 0), f"{AS_INIT}: trees differ\n  [0]['s']: "),
    # What depends on a rank, where it is whole.
    (
        transformation(lambda grad: grad * (1 + my_rank())),
        "check_optimizer: rank 1 of 2 under ddp does not end where one rank does; ",
    ),
    # NaN is equal on all ranks.
    (
        transformation(lambda grad: grad * torch.nan),
        "check_optimizer: parameters are not finite: trees differ\n  ['v']: ",
    ),
    (optimizer(lambda param, grad: param - grad), "TypeError: unsupported operand"),
    (
        optimizer(lambda param, grad: param * 0.9 if grad is None else param - grad),
        "check_optimizer: a parameter without a gradient has moved; leave it as it is where grad is None: ",
    ),
    (
        transformation(lambda grad: grad / 2 if is_tracing() else grad),
        "check_optimizer: jitted, an update has other bits; compute by tensors alone: ",
    ),
]


@pytest.mark.parametrize("first", (torch.tensor(torch.inf), torch.ones(2).to(torch.float8_e4m3fn)), ids=str)
def test_a_state_may_hold_infinity_and_numbers_of_a_byte(first):
    """As a loss that is the least one so far, and as moments that are kept small."""
    check_optimizer(with_state(first, torch.clone), PARAMS, world_sizes=(1, 2))


def test_ranks_are_compared_with_one_rank():
    by_ranks = transformation(lambda grad: grad * min(2, dist.get_world_size()))
    with pytest.raises(AssertionError, match="rank 0 of 2 under ddp does not end where one rank does"):
        check_optimizer(by_ranks, PARAMS, world_sizes=(2, 3))


def test_what_would_compare_nothing_is_refused():
    tx = fs.sgd(0.1)
    for params, sizes, text in (
        ({}, (1, 2), "params with elements, got none"),
        ({"w": torch.ones(0, 3)}, (1, 2), "params with elements, got none"),
        (PARAMS, (), "world_sizes to have one above 1, got ()"),
        (PARAMS, (1,), "world_sizes to have one above 1, got (1,)"),
        (PARAMS, 2, "world_sizes to have one above 1, got 2"),
    ):
        with pytest.raises(ValueError, match=f"^check_optimizer: expected {re.escape(text)}$"):
            check_optimizer(tx, params, world_sizes=sizes)


def test_what_is_wrong_is_named():
    for tx, text in WRONG:
        with pytest.raises((AssertionError, RankError, ValueError), match=re.escape(text)):
            check_optimizer(tx, PARAMS, world_sizes=(1, 2))
