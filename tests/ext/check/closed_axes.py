"""Steps that close over axes of a mesh of one rank, as functions that take the axes of another mesh."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import CellType, FunctionType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

import fshard as fs


def open_axes(step: Callable[..., Any], axes: Sequence[fs.Axis]) -> Callable[..., Any]:
    """Make of a step one that takes axes behind its arguments, in the place of those that it closes over."""

    def run(*arguments: Any) -> Any:
        first = len(arguments) - len(axes)
        return replace_axes(step, {axis.name: axis for axis in arguments[first:]})(*arguments[:first])

    return run


def replace_axes(value: Any, axes: Mapping[str, fs.Axis], copies: dict[int, Any] | None = None) -> Any:
    """Put axes in the place of others of their names, in what functions close over, and in containers of such."""
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, fs.Axis):
        return axes.get(value.name, value)
    if isinstance(value, DeviceMesh) and len(value.mesh_dim_names) == 1:
        return axes.get(value.mesh_dim_names[0], value)
    again = partial(replace_axes, axes=axes, copies=copies)
    if isinstance(value, FunctionType):
        return _replace_in_function(value, again, copies)
    if isinstance(value, partial):
        keywords = {name: again(each) for name, each in value.keywords.items()}
        return partial(again(value.func), *map(again, value.args), **keywords)
    if isinstance(value, dict):
        return {name: again(each) for name, each in value.items()} if type(value) is dict else value
    if isinstance(value, list):
        return [again(each) for each in value]
    if isinstance(value, tuple):
        return type(value)(*map(again, value)) if hasattr(value, "_fields") else tuple(map(again, value))
    if is_dataclass(value) and not isinstance(value, type | fs.Sharded):
        olds = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        changes = {name: again(old) for name, old in olds.items()}
        return replace(value, **{name: new for name, new in changes.items() if new is not olds[name]})
    return value


def _replace_in_function(function: FunctionType, again: Callable[[Any], Any], copies: dict[int, Any]) -> FunctionType:
    """Copy a function with cells of its own; it may close over itself."""
    if not function.__closure__:
        return function
    cells = tuple(CellType() for _ in function.__closure__)
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copies[id(function)] = copy
    for cell, old in zip(cells, function.__closure__, strict=True):
        try:
            cell.cell_contents = again(old.cell_contents)
        except ValueError:
            # The variable is not bound yet.
            continue
    return copy
