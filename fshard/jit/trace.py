"""Trace: a function of pytrees written down as one graph, on tensors without values."""

import gc
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from fshard import _compat, random
from fshard.collectives import Uses
from fshard.errors import Problem, leaf_error, refuse
from fshard.jit.passes import constants
from fshard.tree import Flat, Sharded, Treedef, flatten, is_sharded, unflatten
from fshard.tree.checks import describe, writes_counted

# Traces patch what belongs to the process, and so do compilers.
TRACING = threading.Lock()
_PACKAGES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_LIBRARY = str(Path(traceback.__file__).parent)
_SHOWS = ("__repr__", "__format__", "__str__")
_LOOKS = (*_SHOWS, "tolist", "numpy", "__array__")
_PLACES = (
    *("data_ptr", "is_set_to", "storage", "untyped_storage", "is_shared", "is_pinned"),
    *("_base", "_is_view", "_version"),
)
# Their models format values for the messages of checks alone, before they know whether to raise.
_CHECKING = ("transformers",)
_NO_VALUES = (
    "the value of a tensor, which a trace does not have",
    "use torch.where in the place of a branch, a tensor in the place of item(), fs.schedules or "
    "fs.from_torch_scheduler for a learning rate, and prints outside of the jitted function",
)
_NO_PLACES = (
    "where a tensor lies in memory, which differs from call to call",
    "ask for shapes, strides, offsets and `a is b`, for each of which the function is traced",
)
_NO_GRADS = ("an argument's .grad, which a trace does not have", "pass gradients as arguments of their own")


class Traced(NamedTuple):
    """A function as a graph.

    Attributes:
        graph: A torch.fx.GraphModule: maps the tensors of the arguments, in their order, to those of the result.
        paths: Paths of the arguments' tensors.
        treedef: Structure of the result.
        outputs: For each leaf of the result its spec where it is Sharded, True where it is a plain tensor, None where
            it is None.
        out_paths: Paths of the result's leaves.
        closed: Tensors that the function closes over, as operands or for their values.
        offsets: Whether the function asks where tensors begin in their storage.
    """

    graph: Any
    paths: list[str]
    treedef: Treedef
    outputs: list[Any]
    out_paths: list[str]
    closed: list[torch.Tensor]
    offsets: bool


def trace(flat: Flat, rebuild: Callable[[Any], Any], what: str = "jit", uses: Uses | None = None) -> Traced:
    """Write a function down.

    Args:
        flat: Its arguments, taken apart; their tensors become inputs of the graph.
        rebuild: Makes of the arguments' tree the function's result.
        what: Who asks, for errors.
        uses: What ranks have agreed on, and where it is noted which leaves are used; None where nobody asks.

    Returns:
        The graph, as it was traced.

    Raises:
        ValueError: if the function looks at values, or returns what is no tensor, with the line or the path.
    """
    places = [i for i, leaf in enumerate(flat.leaves) if is_sharded(leaf) or isinstance(leaf, torch.Tensor)]
    tensors = [flat.leaves[i].local if is_sharded(flat.leaves[i]) else flat.leaves[i] for i in places]
    found: list[Flat] = []
    unseen = _Unseen()

    def flat_function(*given: torch.Tensor) -> list[torch.Tensor]:
        leaves, wrapped = list(flat.leaves), dict[int, Sharded]()
        if uses is not None:
            _compat.trace_notes()["uses"] = uses
        for i, tensor in zip(places, given, strict=True):
            tensor.grad = None
            leaf = leaves[i]
            # One leaf that is given twice stays one.
            leaves[i] = wrapped.setdefault(id(leaf), Sharded(tensor, leaf.spec)) if is_sharded(leaf) else tensor
        with unseen:
            unseen.given = given
            out = flatten(rebuild(unflatten(flat.treedef, leaves)))
        _check_outputs(what, out)
        found.append(out)
        return [leaf.local if is_sharded(leaf) else leaf for leaf in out.leaves if leaf is not None]

    # Outside of modes such as the recorder's and inference mode, which are for what runs.
    with (
        TRACING,
        _compat.outside_modes(),
        writes_counted(),
        _explained(what),
        _generator_in_graph(),
        _no_garbage(),
        _numbers_unseen(),
    ):
        graph, read = _compat.make_graph_of(flat_function, _without_graphs(tensors))
    out = found[-1]
    outputs = [leaf.spec if is_sharded(leaf) else None if leaf is None else True for leaf in out.leaves]
    # Before passes take out operators whose values were read, and nothing else.
    closed = _closed(what, [*constants(graph), *read])
    return Traced(graph, [flat.paths[i] for i in places], out.treedef, outputs, out.paths, closed, unseen.offsets)


def _without_graphs(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that a trace knows the facts of, but no part of a graph of autograd, nor views of others."""
    made: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        kept = tensor.is_leaf and not torch.is_grad_enabled() and type(tensor) is not torch.Tensor
        given = tensor if kept else tensor.detach()
        if tensor.is_leaf and not torch.is_grad_enabled():
            given.requires_grad_(tensor.requires_grad)
        made.setdefault(id(tensor), given)
    return [made[id(tensor)] for tensor in tensors]


def _closed(what: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a closure, each once; those whose writes cannot be seen are refused."""
    problems = [
        Problem("(closure)", f"{describe(tensor)}, made in inference mode", "one whose writes are counted")
        for tensor in tensors
        if tensor.is_inference()
    ]
    if problems and not torch.is_inference_mode_enabled():
        raise leaf_error(f"{what}: the function closes over tensors", problems, "pass them as arguments")
    return list({id(tensor): tensor for tensor in tensors}.values())


def _check_outputs(what: str, out: Flat) -> None:
    problems = [
        Problem(path, describe(leaf), "a tensor")
        for path, leaf in zip(out.paths, out.leaves, strict=True)
        if leaf is not None and not is_sharded(leaf) and not isinstance(leaf, torch.Tensor)
    ]
    remedy = "return tensors; a graph computes nothing else, and a number would stay what it was in the first call"
    refuse(f"{what}: the function returns what is no tensor", problems, remedy)


class _Unseen(TorchFunctionMode):
    """Refuses to show tensors that have no values and no place yet."""

    def __init__(self) -> None:
        super().__init__()
        self.given: Sequence[torch.Tensor] = ()
        self.offsets = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        # A property is asked for by its descriptor's __get__.
        name = getattr(func.__self__, "__name__", "") if name == "__get__" else name
        self.offsets |= name == "storage_offset" and _is_asked_by_user()
        if name in _PLACES and _is_asked_by_user():
            raise _LookedAtError(f"Tensor.{name}", _NO_PLACES)
        if name == "grad" and any(args[0] is tensor for tensor in self.given) and _is_asked_by_user():
            raise _LookedAtError("Tensor.grad", _NO_GRADS)
        if name in _LOOKS:
            frame = _own_frame(traceback.extract_stack()[:-1])
            if frame is not None and not (name in _SHOWS and _package_of(frame.filename) in _CHECKING):
                raise _LookedAtError(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


class _LookedAtError(Exception):
    """The function asks for what a trace does not have."""

    def __init__(self, what: str, why: tuple[str, str] = _NO_VALUES) -> None:
        super().__init__(what)
        self.why = why


@contextmanager
def _numbers_unseen() -> Iterator[None]:
    """Refuse to show the numbers of item() too, which are symbols; torch itself names nodes by them."""
    with ExitStack() as stack:
        for cls, name in product((torch.SymInt, torch.SymFloat, torch.SymBool), _SHOWS):
            stack.enter_context(patch.object(cls, name, _shown_to_torch(cls, name)))
        yield


def _shown_to_torch(cls: type, name: str) -> Callable[..., str]:
    """Return a function that shows a number as before, but refuses the user's program."""
    show = getattr(cls, name)

    def run(number: Any, *args: Any) -> str:
        # Other threads may run meanwhile.
        if _compat.is_tracing() and _is_asked_by_user():
            raise _LookedAtError(f"{cls.__name__}.{name}")
        return str(show(number, *args))

    return run


def _is_asked_by_user() -> bool:
    """Whether the caller's caller is the user's own program, or what the standard library does for it."""
    frame = inspect.currentframe()
    frame = frame.f_back.f_back if frame and frame.f_back else None
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_PACKAGES)


@contextmanager
def _generator_in_graph() -> Iterator[None]:
    """Write down where torch.utils.checkpoint keeps the generator's state, so that it draws the same masks again."""
    get, put = torch.get_rng_state, torch.set_rng_state
    with patch.multiple(
        torch,
        # Other threads may run meanwhile.
        get_rng_state=lambda: random.random_state() if _compat.is_tracing() else get(),
        set_rng_state=lambda state: random.set_random_state(state) if _compat.is_tracing() else put(state),
    ):
        yield


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Keep Python's collector from going through a growing graph again and again: what is traced stays anyway."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn torch's errors on values that a trace does not have into one that names the line."""
    try:
        yield
    except Exception as error:
        if not (isinstance(error, _LookedAtError) or _compat.asks_for_values(error)):
            raise
        frame = _own_frame(traceback.extract_tb(error.__traceback__))
        place = f'{frame.filename}:{frame.lineno}: "{frame.line}"' if frame else "the function"
        looked, remedy = error.why if isinstance(error, _LookedAtError) else _NO_VALUES
        raise ValueError(f"{what}: expected no look at {looked}, got one in {place}; {remedy}") from error


def _package_of(filename: str) -> str | None:
    """The installed package that code belongs to; None for the user's own program."""
    _, installed, inside = filename.rpartition("site-packages/")
    return inside.partition("/")[0] if installed else None


def _own_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost line of the user's own program."""
    for frame in reversed(frames):
        if _is_own(frame.filename):
            return frame
    return None


def _is_own(filename: str) -> bool:
    """Whether code is neither torch's nor ours nor the standard library's."""
    return not (_is_library(filename) or filename.startswith(_PACKAGES))


def _is_library(filename: str) -> bool:
    """Whether code is of the standard library, or of no file."""
    return filename.startswith("<") or (filename.startswith(_LIBRARY) and "site-packages" not in filename)
