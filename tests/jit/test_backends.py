"""The graph as it runs: fewer views, with the same bits, strides and aliases."""

import torch

import fshard as fs
from tests.trees import assert_same_bits, normal

X = normal(1)(4, 6)


def several(found):
    return list(found) if isinstance(found, tuple | list) else [found]


# Programs, and the operators that are left of them.
FOLDED = {
    "t of t": (lambda x: x.t().t() + 1, ["add"]),
    "strides given back": (lambda x: x.t().as_strided((4, 6), (6, 1)) + 1, ["add"]),
    "view of view": (lambda x: x.view(24).view(2, 12).view(3, 8) + 1, ["view", "add"]),
    "written through a view": (lambda x: (x * 2).t().t().add_(1), ["mul", "add_"]),
    "a view that is returned": (lambda x: (x.view(24), x.view(24).view(4, 6)), ["view"]),
    "a copy that a reshape would not make": (
        lambda x: x.clone(memory_format=torch.contiguous_format).view(24).add_(1) + x.view(24),
        ["clone", "view", "add_", "view", "add"],
    ),
    "a part": (lambda x: x.view(24)[3:9].view(2, 3) + 1, ["view", "slice", "view", "add"]),
    "strides of dims of one": (lambda x: x.view(24)[::2].view(12, 1).view(1, 12) + 1, None),
}


def test_views_are_folded():
    for f, expected in FOLDED.values():
        jitted = fs.jit(f)
        found, wanted = several(jitted(X)), several(f(X))
        assert_same_bits(found, wanted)
        assert [tensor.stride() for tensor in found] == [tensor.stride() for tensor in wanted]
        assert len({id(tensor) for tensor in found}) == len(found)
        (program,) = jitted._programs.values()
        calls = [node for node in program.run.graph.nodes if node.op.startswith("call")]
        names = [getattr(node.target, "__name__", str(node.target)).split(".")[0] for node in calls]
        assert expected is None or names == expected
