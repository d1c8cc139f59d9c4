"""An update runs few operators for each leaf, and the bits of a leaf do not depend on the leaves beside it."""

import operator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from tests.trees import assert_same_bits, normal

RATE = 0.1
# The operators of an update for each leaf, its count included; those that numbers of all leaves take are not.
OPERATORS = {
    "sgd": (lambda: fs.sgd(RATE), 1),
    "sgd momentum": (lambda: fs.sgd(RATE, 0.9), 3),
    "sgd nesterov": (lambda: fs.sgd(RATE, 0.9, nesterov=True, weight_decay=0.1), 5),
    "sgd dampening": (lambda: fs.sgd(RATE, 0.9, dampening=0.1), 4),
    "adamw": (lambda: fs.chain(fs.clip_by_global_norm(1.0), fs.adamw(RATE)), 13),
    "adamw by a schedule": (lambda: fs.adamw(lambda count: RATE / (1 + count)), 13),
    "clip_by_norm": (lambda: fs.chain(fs.clip_by_norm(1.0), fs.sgd(RATE)), 3),
    "lamb": (lambda: fs.lamb(RATE, weight_decay=0.1), 15),
    "lars": (lambda: fs.lars(RATE, weight_decay=0.1), 8),
    "adafactor": (lambda: fs.adafactor(RATE), 21),
    "skip_nonfinite": (lambda: fs.skip_nonfinite(fs.sgd(RATE)), 5),
}


def count_operators(tx, leaves):
    params = {str(i): torch.ones(4, 4) for i in range(leaves)}
    state = fs.TrainState.create(params, tx)
    graph = fs.make_graph(lambda state, grads: fs.update(tx, state, grads))(state, params)
    calls = [node for node in graph.module.graph.nodes if node.op == "call_function"]
    return sum(node.target is not operator.getitem for node in calls)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_for_each_leaf(name):
    make, expected = OPERATORS[name]
    few, many = 3, 13
    assert (count_operators(make(), many) - count_operators(make(), few)) / (many - few) == expected


# More than two vectors of any processor hold, for kernels that treat the rest in another way.
LEAVES, STEPS = 37, 3
BESIDE = {
    "adamw": lambda: fs.adamw(RATE),
    "sgd dampening": lambda: fs.sgd(RATE, 0.9, dampening=0.1),
    "clip_by_norm": lambda: fs.chain(fs.clip_by_norm(0.1), fs.sgd(RATE)),
    "lamb": lambda: fs.lamb(RATE),
    "adafactor": lambda: fs.adafactor(RATE),
}


def train(tx, indices):
    """Some updates, of which some leaves miss the first ones.

    They begin with the 32nd, because kernels for AVX round 0.999**32 in full vectors and behind them in other ways.
    """
    params = {str(i): normal(i)(2, 1 + i % 5) for i in indices}
    state = fs.tree_map(lambda leaf: leaf if leaf.is_floating_point() else leaf + 31, tx.init(params))
    for step in range(STEPS):
        drawn = {str(i): normal(i + LEAVES * (1 + step))(2, 1 + i % 5) for i in indices}
        grads = {name: grad if step >= int(name) % STEPS else None for name, grad in drawn.items()}
        params, state = tx.update(grads, state, params)
    return params


@pytest.mark.parametrize("name", BESIDE)
def test_the_bits_of_a_leaf_do_not_depend_on_the_leaves_beside_it(name):
    """As where a chain updates some leaves at a time, or another part of a partition has the rest."""
    together = train(BESIDE[name](), range(LEAVES))
    for i in (0, 1, 20, LEAVES - 1):
        assert_same_bits(train(BESIDE[name](), [i]), {str(i): together[str(i)]})


class CopyLog(TorchDispatchMode):
    """The copies between devices."""

    def __init__(self):
        super().__init__()
        self.copies = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **kwargs or {})
        if operator.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            devices = {tensor.device.type for tensor in (result, *args) if torch.is_tensor(tensor)}
            self.copies += [operator] * (len(devices) > 1)
        return result


def beside(value):
    """A number on the device of the leaves."""
    return torch.tensor(value, device="meta")


NO_COPIES = {
    "sgd": lambda: fs.sgd(beside(RATE), beside(0.9), dampening=beside(0.1)),
    "adamw": lambda: fs.adamw(beside(RATE), (beside(0.9), 0.99)),
    "lamb": lambda: fs.lamb(RATE, weight_decay=0.1),
    "lars": lambda: fs.lars(RATE, weight_decay=0.1),
    "adafactor": lambda: fs.adafactor(RATE, weight_decay=0.1),
    "adafactor by a schedule": lambda: fs.adafactor(lambda count: RATE / (1 + count)),
}


@pytest.mark.parametrize("name", NO_COPIES)
def test_no_number_is_copied_to_another_device(name):
    """Counts lie on the processor. The host waits for a copy from there to an accelerator."""
    params = {str(i): torch.ones(4, 4, device="meta") for i in range(3)}
    tx = NO_COPIES[name]()
    state = tx.init(params)
    with CopyLog() as log:
        tx.update(params, state, params)
    assert log.copies == []
