"""Private APIs by which torch traces programs into graphs, each with the versions it was checked on."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C import _TorchDispatchModeKey
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from torch.fx import GraphModule


# Checked on 2.13.
WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default
# What tensor.to() becomes. Checked on 2.13.
TO_COPY = torch.ops.aten._to_copy.default


class Argument(NamedTuple):
    """One argument of an operator, whether its result may share memory with it, and whether it writes to it."""

    name: str
    aliased: bool
    written: bool


def arguments_of(target: Any) -> list[Argument] | None:
    """The arguments of an operator; None for what is no operator of torch's. Checked on 2.13."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    infos = [(argument.name, argument.alias_info) for argument in target._schema.arguments]
    # Its schema denies it.
    is_view = target is torch.ops.aten._unsafe_view.default
    return [Argument(name, is_view or info is not None, info is not None and info.is_write) for name, info in infos]


def is_tracing() -> bool:
    """Whether a program is traced by make_fx, on tensors without values. Checked on 2.13."""
    return torch._C._get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None


def trace_notes() -> dict[str, Any]:
    """A dict that lives as long as the running trace, for what belongs to it alone. Checked on 2.13."""
    tracer: Any = torch._C._get_dispatch_mode(_TorchDispatchModeKey.PROXY).tracer
    notes: dict[str, Any] = tracer.__dict__.setdefault("fshard_notes", {})
    return notes


def is_linearizing() -> bool:
    """Whether torch.func.linearize traces, which folds away what does not depend on tangents. Checked on 2.13."""
    frame = sys._getframe() if is_tracing() else None
    while frame is not None:
        if frame.f_code.co_name == "linearize" and frame.f_code.co_filename.endswith("eager_transforms.py"):
            return True
        frame = frame.f_back
    return False


def outside_modes() -> AbstractContextManager[object]:
    """Run without dispatch modes, which a trace would write down. Checked on 2.13."""
    return _disable_current_modes()


def make_graph_of(f: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> "GraphModule":
    """Trace a function by make_fx, on tensors without values; those it closes over are constants. Checked on 2.13."""
    # Imported here because it takes a second.
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental.proxy_tensor import make_fx

    # Passes will change the graph: the code that it has until then is not needed.
    with _use_lazy_graph_module(True):
        return make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)


def asks_for_values(error: Exception) -> bool:
    """Whether a trace failed because a program asked for values. Checked on 2.13."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException | GuardOnDataDependentSymNode)
