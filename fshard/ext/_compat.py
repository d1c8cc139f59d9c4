"""Private APIs of torch and transformers that extensions use, each with the versions it was checked on."""

import inspect
import linecache
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

import fshard as fs
from fshard.extend import (
    NODE_OBSERVER,
    EngineCall,
    expect,
    is_users_file,
    named_modules,
    next_sequence_number,
    setting,
    trace,
    walk_graph,
)

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# A copy to another dtype or device.
TO_COPY = torch.ops.aten._to_copy.default
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Types of schemas for which torch would take other values too, such as None or any whole number.
_TYPES_OF_KINDS: Mapping[str, Any] = MappingProxyType(
    {
        "Tensor": Tensor | int | float,
        "bool": bool,
        "ScalarType": torch.dtype,
        "Layout": torch.layout,
        "MemoryFormat": torch.memory_format,
    }
)


def import_for_traces() -> None:
    """Import what torch itself imports in the first trace, which takes a second. Checked on 2.13."""
    import torch._dynamo
    import torch._functorch.partitioners
    import torch.export._trace  # noqa: F401


def unsaved_buffers(module: torch.nn.Module) -> set[str]:
    """The names of buffers that are not persistent, so that a state dict does not have them. Checked on 2.13."""
    return {
        f"{path}.{key}".lstrip(".")
        for path, submodule in named_modules(module, remove_duplicate=False)
        for key in submodule._non_persistent_buffers_set
    }


def fuses_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes these. Checked on 2.13."""
    return q.is_cpu and q.dtype in _DTYPES and q.shape[-1] == v.shape[-1]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and each query's log-sum-exp of scores, which is wide where the tensors are narrow. Checked on 2.13."""
    q, k, v = map(_dense, (q, k, v))
    out, logs = _FORWARD(q, k, v, 0.0, causal, scale=scale)
    return out, logs


def fused_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logs: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of q, k and v; `out` and `logs` may be those of all keys, of which these are some.

    Checked on 2.13.
    """
    grad, q, k, v = map(_dense, (grad, q, k, v))
    dq, dk, dv = _BACKWARD(grad, q, k, v, out, logs, 0.0, causal, scale=scale)
    return dq, dk, dv


def _dense(tensor: Tensor) -> Tensor:
    """The kernel reads a head's numbers one after another."""
    if tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def list_graph(
    api_name: str,
    out: Tensor,
    sources: Sequence[Tensor],
    expected: str,
    remedy: str,
) -> list[Any]:
    """List the nodes of autograd that have computed a result. Checked on 2.13.

    Raises:
        ValueError: if one of them accumulates a gradient and belongs to none of the sources: it would be lost.
    """
    ends = {get_gradient_edge(source).node for source in sources if source.requires_grad}
    nodes = list(walk_graph(filter(None, [out.grad_fn]), list_sources))
    is_closed = all(node in ends or not hasattr(node, "variable") for node in nodes)
    expect(is_closed, api_name, expected, "a closure's tensor that requires a gradient", remedy)
    return nodes


def list_sources(node: Any) -> list[Any]:
    """List the nodes of autograd that a node takes the cotangents on to."""
    return [other for other, _ in node.next_functions if other]


def is_transformed(tensor: Tensor) -> bool:
    """Whether a torch.func transform holds a tensor, whose values then are not to be had. Checked on 2.13."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def weight_conversions(module: Any) -> tuple[list[Any], list[Any]]:
    """The renamings and the converters of a model of transformers, from files to the model.

    Checked on transformers 5.23.
    """
    loading = import_module("transformers.core_model_loading")
    transforms = import_module("transformers.conversion_mapping").get_model_conversion_mapping(module)
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    return renamings, converters


def weight_order(name: str) -> Any:
    """The key by which transformers sorts the names of weights. Checked on transformers 5.23."""
    return import_module("transformers.core_model_loading").dot_natural_key(name)


def rename_weight(
    name: str,
    module: Any,
    expected: Mapping[str, Any],
    renamings: Sequence[Any],
    converters: Sequence[Any],
) -> tuple[str, str | None]:
    """The name that a model has for a weight of files, and the pattern of the converter that takes it, or None.

    Checked on transformers 5.23.
    """
    loading = import_module("transformers.core_model_loading")
    new_name, pattern = loading.rename_source_key(name, renamings, converters, module.base_model_prefix, expected)
    return new_name, pattern


def drop_ignored_names(module: Any, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
    """Leave out the names that a model of transformers lets files lack, and those that it lets them have besides.

    Checked on transformers 5.23.
    """
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    module._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, info.unexpected_keys


def list_unsaved_names(module: Any) -> frozenset[str]:
    """The names that a model of transformers does not save. Checked on transformers 5.23."""
    return frozenset(module._keys_to_ignore_on_save or ())


def drop_tied_weights(state: dict[str, Tensor], module: Any) -> dict[str, Tensor]:
    """Leave one name of each tied weight, the one that a model of transformers writes to files.

    Checked on transformers 5.23.
    """
    modeling = import_module("transformers.modeling_utils")
    return dict(modeling.remove_tied_weights_from_state_dict(state, module))


def revert_conversions(module: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state dict of a model of transformers to the weights that it writes to files.

    Checked on transformers 5.23.
    """
    return dict(import_module("transformers.core_model_loading").revert_weight_conversion(module, state))


def schema_of(function: Any) -> Any:
    """The schema of an operator of torch's: its `arguments`, and its results as `returns`. Checked on 2.13.

    None of what TorchScript alone has, such as `aten.add.int` on two numbers: no trace has it.
    """
    if not torch._C._dispatch_has_kernel(function.name()):
        return None
    return function._schema


def parse_schema(text: str) -> Any:
    """The schema of an operator by its text. Checked on 2.13."""
    return torch._C.parse_schema(text)


def check_call(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Refuse arguments that an operator does not take, and return the types of its results.

    Checked on 2.11, 2.13 and 2.14.1.

    Args:
        schema: The schema of the operator.
        args: Its arguments. Where schemas have the type Tensor, operators of arithmetic take numbers too.
        kwargs: Its keywords. None are names of arguments that have a place, such as `from`, which is no name of Python.

    Raises:
        RuntimeError, TypeError: if they do not fit the schema.
    """
    kinds = {argument.name: str(argument.real_type) for argument in schema.arguments}
    named = [argument.name for argument in schema.arguments if argument.name in kwargs and not argument.kwarg_only]
    if named:
        raise TypeError(f"{named} are given by their place")
    # Torch refuses those that the schema does not have.
    values = [*map(_stand_in, args, kinds.values()), *args[len(kinds) :]]
    keywords = {name: _stand_in(value, kinds.get(name, "")) for name, value in kwargs.items()}
    torch._C._check_schema_allow_fake_script_object(schema, *values, **keywords)
    return [str(result.real_type) for result in schema.returns]


def _stand_in(value: Any, kind: str) -> Any:
    """Refuse a value of another type, and return a tensor in the place of a number where the type is Tensor."""
    base = kind.removeprefix("Optional[").removesuffix("]")
    if value is None and base != kind:
        return None
    if not isinstance(value, _TYPES_OF_KINDS.get(base, object)):
        raise TypeError(f"expected {kind}, got {type(value)}")
    return torch.as_tensor(value) if base == "Tensor" else value


def name_operator(node: torch.fx.Node) -> str:
    """Name the operator of a node, or a constant, as torch writes it. Checked on 2.13."""
    target: Any = node.target
    name = str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
    if node.op == "get_attr":
        return f"the constant {name}"
    return name.removesuffix(".default").removesuffix(".Tensor")


def lazy_module(graph: Graph) -> GraphModule:
    """A module of a graph, whose code is generated only if it is run. Checked on 2.13."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(torch.nn.Module(), graph)


def compile_by_inductor(module: Any, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compile a graph of operators to kernels, in an order that Inductor chooses. Checked on 2.13.

    Inductor is imported here, because that takes seconds.

    Args:
        module: A torch.fx.GraphModule that writes to no input; its results keep their strides.
        examples: Its inputs as fake tensors, or none.

    Returns:
        A function of the inputs that returns a sequence of the results.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    first_result = module.graph.output_node().args[0][0]
    fake_mode = first_result.meta["val"].fake_mode
    table = select_decomp_table()
    trace = make_fx(module, decomposition_table=table, tracing_mode="real")
    with fake_mode:
        lowered = trace(*examples)
    lowered.graph.eliminate_dead_code()
    output: Any = lowered.graph.output_node()
    number_of_results = len(output.args[0])
    output.meta["user_visible_output_idxs"] = list(range(number_of_results))
    run = compile_fx_inner(lowered, list(examples))

    def compiled(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return run(list(tensors))

    return compiled


# An origin keeps so many lines of the user's program.
MAX_FRAMES = 3
# Functions that stand in the stack of an operator of a trace. Checked on 2.13.
_RUN_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_CALL_MODULE = torch.nn.Module._call_impl.__code__
_ENGINE_CALLS = (EngineCall.forward.__code__, EngineCall.backward.__code__)
_UPDATE = inspect.unwrap(fs.update).__code__
_TRACE = trace.__code__
# The folder of fshard, as names of files begin.
_PACKAGE = f"{Path(_UPDATE.co_filename).parent}/"
# Files whose functions compute a part of a forward again, in the backward.
_RECOMPUTING_FILES = (torch.utils.checkpoint.__file__, fs.remat.__code__.co_filename)
# The standard library. Packages that pip installed may lie inside of it.
_LIBRARY = Path(sysconfig.get_path("stdlib"))
_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))


class Frame(NamedTuple):
    """A line of the user's program that was running.

    Attributes:
        file: The file.
        line: The number of the line.
        function: The function that it is in.
    """

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The line itself."""
        return linecache.getline(self.file, self.line).strip()


class Origin(NamedTuple):
    """Where an operator of a graph comes from.

    Attributes:
        frames: Lines of the user's program that ran it, the innermost first. For an operator of the backward those
            that run inside the backward, such as of an autograd Function; mostly none.
        forward: For an operator of the backward the lines of its forward.
        module: The name of the submodule that it belongs to, or of its forward's; for the model itself the name of its
            class; empty outside of models.
        phase: "forward", "backward", "recomputed" (a part of the forward that a checkpoint computes again in the
            backward) or "update".
        microbatch: The number of the microbatch, counted from 0.
        is_users: Whether a line of the user's program ran it, and no function of fshard's in between; for an operator
            of the backward whether it ran its forward.
    """

    frames: tuple[Frame, ...] = ()
    forward: tuple[Frame, ...] = ()
    module: str = ""
    phase: str = "forward"
    microbatch: int = 0
    is_users: bool = False


def find_forward(node: Any) -> Origin:
    """Find the line that made a node of autograd's graph, inside `noting_origins`."""
    notes: Any = NODE_OBSERVER.get()
    return notes.find_forward(node)


def origin_of(node: torch.fx.Node) -> Origin:
    """Return where a node comes from."""
    origin: Origin = node.meta.get("origin", Origin())
    return origin


def frames_of(node: torch.fx.Node) -> tuple[Frame, ...]:
    """Return the lines of the user's program that a node comes from, for the backward those of its forward."""
    origin = origin_of(node)
    return origin.forward or origin.frames


def find_start(wait: torch.fx.Node) -> tuple[Any, int]:
    """Find the operator that starts what a node waits for, and which of its buffers that is."""
    buffer: Any = wait.args[0]
    start, index = buffer.args
    return start, index


def noting_origins() -> AbstractContextManager[None]:
    """Let traces note in `node.meta["origin"]` the `Origin` of each node, inside a context.

    Nodes that passes add later, and those of operators of higher order such as torch.cond, have none.
    """
    return setting(NODE_OBSERVER, _OriginNotes())


def list_traced_nodes() -> list[torch.fx.Node]:
    """List the nodes that the running trace has added to its graph. Checked on 2.13."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    return list(mode.tracer.graph.nodes)


class _Stack:
    """What the stack of an operator says, from the operator outwards.

    Attributes:
        frames: Lines of the user's program.
        modules: The modules that run, the innermost first.
        frames_around: For an operator of the backward the lines that the backward was called from.
        in_backward: Whether the engine of autograd runs.
        recomputes: Whether a part of the forward runs again inside of it.
        phase: What fshard does: "forward", "backward" or "update".
        microbatch: The number of the microbatch.
        is_users: Whether no function of fshard's ran the operator.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.modules: list[torch.nn.Module] = []
        self.frames_around: list[Frame] = []
        self.in_backward = False
        self.recomputes = False
        self.phase = "forward"
        self.microbatch = 0
        self.is_users = True

    def leave_backward(self) -> None:
        """Go on with what called the engine of autograd."""
        self.in_backward = True
        self.recomputes = self.recomputes or bool(self.modules)

    def enter_engine_call(self, frame: FrameType) -> None:
        """Read what a call of fshard's engine is doing."""
        self.microbatch = frame.f_locals["self"].microbatches_begun - 1
        if frame.f_code is EngineCall.backward.__code__:
            self.phase = "backward"

    def add_line(self, frame: FrameType) -> None:
        """Add a line of the user's program."""
        frames = self.frames_around if self.in_backward else self.frames
        if len(frames) < MAX_FRAMES:
            frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))


class _OriginNotes:
    """Notes the origins of the nodes of traces."""

    def __init__(self) -> None:
        self._module_names: dict[torch.nn.Module, str] = {}
        self._is_users: dict[str, bool] = {}
        # By the number that autograd gives to a node of its graph.
        self._forwards: dict[int, Origin] = {}

    def __call__(self, nodes: Iterable[torch.fx.Node]) -> None:
        """Note the origin of nodes that an operator has just added."""
        origin = None
        for node in nodes:
            if "origin" not in node.meta:
                origin = origin or self._find_origin()
                node.meta["origin"] = origin

    def find_forward(self, node: Any) -> Origin:
        """Find the origin of the operator that made a node of autograd's graph."""
        return self._forwards.get(node._sequence_nr(), Origin())

    def _find_origin(self) -> Origin:
        """Find the origin of the operator that is being traced. Checked on 2.13."""
        stack = self._read_stack(sys._getframe(2))
        frames = tuple(stack.frames)
        module = self._name_module(stack.modules)
        differentiated: Any = torch._C._current_autograd_node()
        forward = Origin()
        if differentiated is not None:
            forward = self._forwards.get(differentiated._sequence_nr(), forward)
        if (stack.in_backward or differentiated is not None) and not stack.recomputes:
            return Origin(frames, forward.frames, forward.module, "backward", stack.microbatch, forward.is_users)
        if not frames:
            frames = tuple(stack.frames_around)
        phase = "recomputed" if stack.recomputes else stack.phase
        origin = Origin(frames, (), module, phase, stack.microbatch, stack.is_users)
        # Autograd has already numbered the node that this operator belongs to.
        self._forwards.setdefault(next_sequence_number() - 1, origin)
        return origin

    def _read_stack(self, frame: FrameType | None) -> _Stack:
        stack = _Stack()
        while frame is not None and frame.f_code is not _TRACE:
            code = frame.f_code
            if code is _RUN_ENGINE:
                stack.leave_backward()
            elif code is _CALL_MODULE and not stack.in_backward:
                stack.modules.append(frame.f_locals["self"])
            elif code is _UPDATE:
                stack.phase = "update"
            elif code in _ENGINE_CALLS:
                stack.enter_engine_call(frame)
            elif code.co_filename in _RECOMPUTING_FILES:
                stack.recomputes = stack.recomputes or not stack.in_backward
            elif code.co_name in ("__torch_dispatch__", "__torch_function__"):
                # A mode runs the operator for what is outside of it.
                stack.is_users = True
            elif not stack.frames and code.co_filename.startswith(_PACKAGE):
                stack.is_users = False
            elif self._is_users_code(code, frame.f_lineno):
                self._add_method_of_module(stack, frame)
                stack.add_line(frame)
            frame = frame.f_back
        # Without the engine nothing runs again: a checkpoint calls the function in the forward too.
        stack.recomputes = stack.recomputes and stack.in_backward
        return stack

    def _add_method_of_module(self, stack: _Stack, frame: FrameType) -> None:
        """Find the module where a checkpoint runs a method of it again, and not the module itself."""
        if stack.modules or stack.in_backward or frame.f_code.co_varnames[:1] != ("self",):
            return
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and owner in self._module_names:
            stack.modules.append(owner)

    def _is_users_code(self, code: CodeType, line: int) -> bool:
        file = code.co_filename
        if file not in self._is_users:
            path = Path(file)
            is_installed = any(path.is_relative_to(folder) for folder in _INSTALLED)
            is_library = path.is_relative_to(_LIBRARY) and not is_installed
            # Code that was generated, such as that of a dataclass, has no lines to show. Python 3.13 would show those
            # of `python -c`, whose name is the same.
            has_lines = file != "<string>" and bool(linecache.getline(file, line))
            self._is_users[file] = has_lines and not is_library and is_users_file(file)
        return self._is_users[file]

    def _name_module(self, modules: Sequence[torch.nn.Module]) -> str:
        """Name the innermost of the modules that run, as the outermost names it."""
        if not modules:
            return ""
        if modules[0] not in self._module_names:
            root = modules[-1]
            for name, module in named_modules(root):
                self._module_names.setdefault(module, name or type(root).__name__)
        return next((self._module_names[module] for module in modules if module in self._module_names), "")
