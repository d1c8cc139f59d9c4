"""Private APIs by which torch traces programs into graphs, each with the versions it was checked on."""

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._C import _TorchDispatchModeKey
from torch.autograd import profiler
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from fshard._compat.autograd import frames_of
from fshard._compat.fake import is_fake
from fshard._compat.layouts import DECOMPOSITIONS, RESHAPES, correct_strides

# Checked on 2.13.
WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default
# Operators that torch has functions for, which read their arguments without a schema. Checked on 2.13.
_WITH_FUNCTIONS = (
    "_scaled_dot_product_flash_attention_for_cpu.default add.Tensor addmm.default as_strided.default bmm.default",
    "cat.default clone.default copy_.default embedding.default gelu.default mm.default mul.Tensor",
    "native_layer_norm.default permute.default relu.default split_with_sizes.default stack.default sum.dim_IntList",
    "t.default tanh.default transpose.int unbind.int",
)
# Operators that tell a trace in which range a symbol is.
_RANGES_OF_SYMBOLS = (torch.ops.aten.sym_constrain_range, torch.ops.aten.sym_constrain_range_for_size)
# How the names of operators begin that do with each entry of lists what they would do with it alone: torch's family
# for lists, and the updates of its fused optimizers. Others that torch calls fused take a single tensor.
_ENTRYWISE = ("aten::_foreach_", "aten::_fused_ada", "aten::_fused_sgd")


def _function_of(name: str) -> Callable[..., Any]:
    return next(getattr(home, name) for home in (torch, torch._C._nn, torch.Tensor) if hasattr(home, name))


@torch.enable_grad()
def _lstm_layer(*args: Any) -> Any:
    """Run a layer of oneDNN's LSTM, which makes the workspace of its backward only where gradients are recorded."""
    return torch.ops.aten.mkldnn_rnn_layer(*args)


_PYTHON_FUNCTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.aten.mkldnn_rnn_layer.default: _lstm_layer,
        # Some kernels lay their results out otherwise than a trace knows, and no view of the traced shape fits these.
        # The eager program called reshape, which copies them.
        torch.ops.aten.view.default: torch.Tensor.reshape,
        **{
            attrgetter(name)(torch.ops.aten): _function_of(name.partition(".")[0])
            for name in " ".join(_WITH_FUNCTIONS).split()
        },
    }
)


def python_function(target: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """A function that reaches an operator's kernels in less time, or where the operator does not. Checked on 2.13."""
    function = _PYTHON_FUNCTIONS.get(target)
    if function is None:
        return None
    # With a number for a tensor it may reach others.
    tensors = [isinstance(argument.type, torch.TensorType) for argument in target._schema.arguments]
    numbers = any(isinstance(given, int | float | complex) for given in itertools.compress(args, tensors))
    return None if numbers else function


def changes_geometry(target: Any) -> bool:
    """Whether an operator gives its argument another shape or other strides in place, as t_ does. Checked on 2.13."""
    return torch.Tag.inplace_view in getattr(target, "tags", ())


class Argument(NamedTuple):
    """One argument of an operator, whether its result may share memory with it, and whether it writes to it."""

    name: str
    aliased: bool
    written: bool


def arguments_of(target: Any) -> list[Argument] | None:
    """The arguments of an operator; None for what is no operator of torch's. Checked on 2.13."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    # Its schema denies it.
    is_view = target is torch.ops.aten._unsafe_view.default
    arguments = []
    for argument in target._schema.arguments:
        alias = argument.alias_info
        is_written = alias is not None and alias.is_write
        arguments.append(Argument(argument.name, aliased=is_view or alias is not None, written=is_written))
    return arguments


def is_effect(target: Any) -> bool:
    """Whether an operator is there for what it does alone, such as an assert. Checked on 2.13."""
    if arguments_of(target) is None:
        return False
    # Ranges of the profiler and of symbols say something of a trace, not of its values.
    is_about_trace = target.namespace == "profiler" or target.overloadpacket in _RANGES_OF_SYMBOLS
    return not target._schema.returns and not is_about_trace


def is_entrywise(target: Any) -> bool:
    """Whether an operator on lists does with each entry what it would do with it alone.

    Checked on 2.13.

    >>> aten = torch.ops.aten
    >>> [is_entrywise(target) for target in (aten._fused_adamw_.default, aten._fused_rms_norm.default)]
    [True, False]
    """
    return arguments_of(target) is not None and target._schema.name.startswith(_ENTRYWISE)


def guards_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Make a check that as many other tensors are distinct and look like these, without keeping them. Checked on 2.13.

    It compares types, dispatch keys, and so layouts, inference and lazy bits, dtypes, devices, shapes and strides; not
    where tensors begin in their storages, and outside of autograd not whether they require a gradient.
    """
    from torch._C._dynamo.guards import TensorGuards

    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def is_tracing() -> bool:
    """Whether a program is traced by make_fx, on tensors without values. Checked on 2.13."""
    return torch._C._get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None


# Whether a profiler of torch runs. Asked for each collective, so it is no function of Python. Checked on 2.13.
is_profiling = partial(getattr, profiler, "_is_profiler_enabled")


def capturing_device() -> str | None:
    """Return the accelerator's type if it records a graph of what its current stream is given. Checked on 2.13.

    It does not record a trace, whose tensors may lie on an accelerator that this machine does not have.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or is_tracing():
        return None
    module = torch.get_device_module(accelerator)
    # A process that has not used its accelerator is not to make a context there.
    if not hasattr(module, "is_current_stream_capturing") or not module.is_initialized():
        return None
    return accelerator.type if module.is_current_stream_capturing() else None


def show_range(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Let a profile show the calls of a function as a range. Checked on 2.13.

    In a trace the begin and the end of the range would become operators of the graph, so nothing is shown.
    """
    if is_tracing():
        return run
    return profiler.record_function(name)(run)


def trace_notes() -> dict[str, Any]:
    """A dict that lives as long as the running trace, for what belongs to it alone. Checked on 2.13."""
    tracer: Any = torch._C._get_dispatch_mode(_TorchDispatchModeKey.PROXY).tracer
    return tracer.__dict__.setdefault("fshard_notes", {})


def is_linearizing() -> bool:
    """Whether torch.func.linearize traces, which folds away what does not depend on tangents. Checked on 2.13."""
    return is_tracing() and any(frames_of(torch.func.linearize.__code__))


def sees_programs() -> bool:
    """Whether a mode of the user's, hooks on what autograd saves or its search for anomalies look on. Checked on 2.13.

    A default device is such a mode too, but known by its value.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None or torch.is_anomaly_enabled():
        return True
    return not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


# Called for each operator of a trace with the nodes that it adds, if `setting` sets it; ordinary traces call nothing.
NODE_OBSERVER: ContextVar[Callable[[Iterable[torch.fx.Node]], None] | None] = ContextVar(
    "fshard_node_observer", default=None
)


def make_graph_of(
    f: Callable[..., Any], tensors: Sequence[torch.Tensor]
) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """Trace a function by make_fx, on tensors without values; those it closes over are constants. Checked on 2.13.

    Returns:
        The graph, and the tensors with values that the function asked for these, as item() does.
    """
    # Imported here because it takes a second.
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental import proxy_tensor

    read: list[torch.Tensor] = []
    call = proxy_tensor.proxy_call
    # Read here: a backward may run in threads of autograd, which have contexts of their own.
    observe = NODE_OBSERVER.get()

    def noted(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            read.extend(given for given in args if torch.is_tensor(given) and not is_fake(given))
        last = next(iter(reversed(mode.tracer.graph.nodes)), None)
        result: Any = call(mode, func, pre_dispatch, args, kwargs)
        nodes = list(itertools.takewhile(lambda node: node is not last, reversed(mode.tracer.graph.nodes)))
        if nodes and func in RESHAPES:
            correct_strides(args[0], result, nodes[0].meta["val"])
        if observe is not None:
            observe(nodes)
        return result

    # Else torch's selective checkpoints leave what they drop to a compiler, and keep all. 2.11 has no such context.
    whole: AbstractContextManager[object] = (
        torch.compiler._non_strict_tracing_context()
        if hasattr(torch.compiler, "_non_strict_tracing_context")
        else patch.object(torch.utils.checkpoint, "_is_compiling", lambda *_: False)
    )
    # What was compiled before is traced too. The compiler is slow to import.
    compiler = sys.modules.get("torch._dynamo.config")
    inlined = nullcontext() if compiler is None else compiler.patch(error_on_nested_fx_trace=False)
    # Passes will change the graph: the code that it has until then is not needed.
    with _use_lazy_graph_module(True), patch.object(proxy_tensor, "proxy_call", noted), whole, inlined:
        make = proxy_tensor.make_fx(f, dict(DECOMPOSITIONS), tracing_mode="fake", _allow_non_fake_inputs=True)
        return make(*tensors), read


def asks_for_values(error: Exception) -> bool:
    """Whether a trace failed because a program asked for values. Checked on 2.13."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    if isinstance(error, TypeError):
        # Of Python's own functions: a symbol stands for a value that was read, and a tensor here has no format.
        return any(name in str(error) for name in ("SymInt", "SymFloat", "FakeTensor.__format__"))
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException | GuardOnDataDependentSymNode)
