"""Operators of a step on processors: those beside plain PyTorch's are for a whole unit, not one for each leaf."""

from functools import partial

import pytest
import torch

import fshard as fs
from fshard import _compat
from tests.launches import count_per_layer, make_plain_step, make_step
from tests.operators import Operators
from tests.ranks import on_ranks
from tests.trees import one_axis

aten = torch.ops.aten
# They make memory, wait, or look up a dtype.
OPERATORS_WITHOUT_KERNELS = (
    aten.empty.memory_format,
    aten.empty_like.default,
    _compat.WAIT_TENSOR,
    aten.promote_types.default,
)
WITHOUT_KERNELS = set(map(str, OPERATORS_WITHOUT_KERNELS))

# So many operators may each layer of 12 leaves add. Small leaves are copied into one buffer, and out of it.
LIMIT = 20


def count(step):
    """Count the operators that a step runs, without views."""
    with Operators() as operators:
        step()
    return sum(name not in WITHOUT_KERNELS and not is_view(name) for name in operators.names)


def is_view(name):
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload).is_view


STEPS = [(fs.ddp, False), (fs.zero2, False), (fs.zero3, False), (fs.zero3, True)]


@pytest.mark.rows(2)
@pytest.mark.parametrize(("strategy", "jit"), STEPS)
@on_ranks(2)
def test_a_layer_adds_few_operators_to_those_of_plain_pytorch(strategy, jit):
    """The casts of a unit, its divisions and its part of the update are one operator each."""
    plain = count_per_layer(partial(make_plain_step, "cpu"), count)
    sharded = count_per_layer(partial(make_step, one_axis(), strategy, jit=jit), count)
    assert sharded - plain <= LIMIT
