"""The graph as it runs: fewer views, and torch's own functions for operators, with the same bits and aliases."""

import pytest
import torch

import fshard as fs
from fshard import _compat
from tests.trees import assert_same_bits, normal

aten = torch.ops.aten
X, Y, B = normal(1)(4, 6), normal(2)(6, 5), normal(3)(5)
Q = normal(4)(1, 2, 3, 4)
# For each operator arguments as a graph has them.
ARGUMENTS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: ((Q, Q + 1, Q.sin(), 0.0, True), {}),
    aten.add.Tensor: ((X, X.sin()), {"alpha": 2}),
    aten.addmm.default: ((B, X, Y), {}),
    aten.as_strided.default: ((X, (3, 2), (2, 1), 4), {}),
    aten.bmm.default: ((X[None], Y[None]), {}),
    aten.cat.default: (([X, X.sin()], 1), {}),
    aten.clone.default: ((X.t(),), {"memory_format": torch.contiguous_format}),
    aten.copy_.default: ((X, X.sin()), {}),
    aten.embedding.default: ((X, torch.tensor([3, 0])), {}),
    aten.gelu.default: ((X,), {"approximate": "tanh"}),
    aten.mm.default: ((X, Y), {}),
    aten.mul.Tensor: ((X, X.sin()), {}),
    aten.native_layer_norm.default: ((X, (6,), None, X[0], 1e-5), {}),
    aten.permute.default: ((X, (1, 0)), {}),
    aten.relu.default: ((X,), {}),
    aten.split_with_sizes.default: ((X, (1, 3)), {}),
    aten.stack.default: (([X, X.sin()], 1), {}),
    aten.sum.dim_IntList: ((X, (0,), True), {"dtype": torch.float32}),
    aten.t.default: ((X,), {}),
    aten.tanh.default: ((X,), {}),
    aten.transpose.int: ((X, 0, 1), {}),
    aten.unbind.int: ((X, 1), {}),
    aten.view.default: ((X, (3, -1)), {}),
}


class Overloads(_compat.DispatchMode):
    """Notes what is run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def several(found):
    return list(found) if isinstance(found, tuple | list) else [found]


def run(function, operator):
    """What a function makes of fresh arguments, what it runs, and where its results lie in the first argument."""
    args, kwargs = ARGUMENTS[operator]
    first = args[0].clone() if isinstance(args[0], torch.Tensor) else args[0]
    with Overloads() as mode:
        found = several(function(first, *args[1:], **kwargs))
    begin = first.data_ptr() if isinstance(first, torch.Tensor) else 0
    size = first.untyped_storage().nbytes() if begin else 0
    places = [tensor.data_ptr() - begin for tensor in found if 0 <= tensor.data_ptr() - begin < size]
    return found, mode.seen, places


def test_the_table_is_whole():
    known = {operator for name in dir(aten) for operator in overloads(name) if _compat.python_function(operator, ())}
    assert known == set(ARGUMENTS)


def overloads(name):
    packet = getattr(aten, name)
    return [getattr(packet, each) for each in packet.overloads()] if hasattr(packet, "overloads") else []


@pytest.mark.parametrize("operator", ARGUMENTS, ids=str)
def test_functions_run_the_operator_itself(operator):
    function = _compat.python_function(operator, ARGUMENTS[operator][0])
    (found, seen, places), (expected, _, wanted) = run(function, operator), run(operator, operator)
    assert_same_bits(found, expected)
    assert [tensor.stride() for tensor in found] == [tensor.stride() for tensor in expected]
    assert (seen, places) == ([operator], wanted)


def test_numbers_for_tensors_are_left_to_the_operator():
    assert _compat.python_function(aten.add.Tensor, (X, 2)) is None
    assert _compat.python_function(aten.add.Tensor, (X, X)) is torch.add


# Programs, and the operators that are left of them.
FOLDED = {
    "t of t": (lambda x: x.t().t() + 1, ["add"]),
    "strides given back": (lambda x: x.t().as_strided((4, 6), (6, 1)) + 1, ["add"]),
    "view of view": (lambda x: x.view(24).view(2, 12).view(3, 8) + 1, ["view", "add"]),
    "reshape": (lambda x: x.t().reshape(3, 8) + 1, ["t", "clone", "_unsafe_view", "add"]),
    "written through a view": (lambda x: (x * 2).t().t().add_(1), ["mul", "add_"]),
    "a view that is returned": (lambda x: (x.view(24), x.view(24).view(4, 6)), ["view"]),
    "a copy that a reshape would not make": (
        lambda x: x.clone(memory_format=torch.contiguous_format).view(24).add_(1) + x.view(24),
        ["clone", "view", "add_", "view", "add"],
    ),
    "a part": (lambda x: x.view(24)[3:9].view(2, 3) + 1, ["view", "slice", "view", "add"]),
    "strides of dims of one": (lambda x: x.view(24)[::2].view(12, 1).view(1, 12) + 1, None),
    "no view": (lambda x: x.t()[:, :3].reshape(18).view(3, 6) + 1, None),
}


@pytest.mark.parametrize("name", FOLDED)
def test_views_are_folded(name):
    f, expected = FOLDED[name]
    jitted = fs.jit(f)
    found, wanted = several(jitted(X)), several(f(X))
    assert_same_bits(found, wanted)
    assert [tensor.stride() for tensor in found] == [tensor.stride() for tensor in wanted]
    assert len({id(tensor) for tensor in found}) == len(found)
    (program,) = jitted._programs.values()
    calls = [node for node in program.run.graph.nodes if node.op.startswith("call")]
    names = [getattr(node.target, "__name__", str(node.target)).split(".")[0] for node in calls]
    assert expected is None or names == expected


def test_numbers_that_are_known_when_it_runs_are_left_alone():
    f = fs.jit(lambda x, n: x.t().t() * n.item())
    assert f(X, torch.tensor(2.0)).equal(X * 2)
