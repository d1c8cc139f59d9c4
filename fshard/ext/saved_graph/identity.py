"""The identity of a function: a digest of its code and of all values that a trace of it can reach.

It is a pickle of the function that nobody reads: functions, classes and modules are taken apart too, into closures,
defaults, attributes and the globals that code names. What pickle cannot take apart has no identity. Files of source are
compared besides, because such a walk does not see what code computes the name of.
"""

import functools
import io
import os
import pickle
import sys
import sysconfig
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

import fshard as fs
from fshard.extend import Jitted, Mesh, files, is_users_file, read_environment

_INSTALLED = tuple(map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
# The attributes that tell one piece of code from another, but for its place in a file.
_CODE_ATTRIBUTES = """
    co_code co_consts co_names co_varnames co_freevars co_cellvars co_flags
    co_exceptiontable co_argcount co_posonlyargcount co_kwonlyargcount
"""
# The types of values that are known by their names, or are made of functions and of what these are bound to; and the
# attributes that tell them apart.
_NAMING_ATTRIBUTES = "__module__ __qualname__ __name__ __self__ __func__ __wrapped__ fget fset fdel func"
_NAMED_TYPES = (
    types.BuiltinFunctionType,
    types.MethodType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    property,
    classmethod,
    staticmethod,
    functools.cached_property,
    type(functools.cache(len)),
)
# Attributes that a class has for Python itself, and pickle refuses.
_INTERNAL_ATTRIBUTES = ("_abc_impl", "__annotations__")


def compute_identity(values: Any, axes: Iterable[fs.Axis]) -> str:
    """Compute a digest of values and of all that is reached from them.

    Args:
        values: The values.
        axes: The axes of the arguments. The groups of their processes have other names in each process.

    Raises:
        TypeError: if a value that is reached cannot be taken apart, and so has no identity.
    """
    content = io.BytesIO()
    pickler = _Pickler(content, axes)
    try:
        pickler.dump(values)
        for part in pickler.pending:
            pickler.owner = part.__qualname__
            pickler.dump(_take_class_apart(part) if isinstance(part, type) else _take_function_apart(part))
    except Exception as error:
        raise TypeError(f"{error}, which was reached from {pickler.owner}") from error
    return files.digest(content.getvalue())


class _Pickler(pickle.Pickler):
    """Writes values, each object once.

    Attributes:
        owner: The name of the function or class that is taken apart.
        pending: Functions and classes, which are taken apart one after another: a chain of them may be longer than
            Python's stack.
    """

    def __init__(self, file: io.BytesIO, axes: Iterable[fs.Axis]) -> None:
        super().__init__(file, protocol=4)
        # Pickle would tell equal texts that are one object from those that are two.
        self.fast = True
        self.owner = "the arguments"
        self.pending: list[Any] = []
        self._axes = list(axes)
        self._environment = read_environment()
        # The number of each object, and the object, so that no other takes its address.
        self._visited: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, value: Any) -> Any:
        """Return what is written in the place of a value; None if that is the value."""
        if value is None or type(value) in (bool, int, float, bytes):
            return None
        if type(value) is str:
            # It may name a variable of the environment.
            return repr((value, self._environment.get(value))).encode()
        number, _ = self._visited.setdefault(id(value), (len(self._visited), value))
        if number < len(self._visited) - 1:
            return number
        if isinstance(value, fs.Axis):
            place = self._axes.index(value) if value in self._axes else None
            return "axis", value.name, value.size, value.device_type, place
        if isinstance(value, set | frozenset):
            return "set", sorted(compute_identity(part, self._axes) for part in value)
        if isinstance(value, type | types.FunctionType):
            self.pending.append(value)
            return "pending"
        for kind, take_apart in _PARTS.items():
            if isinstance(value, kind):
                return kind.__name__, take_apart(value)
        if type(value).__module__ == "builtins" or _is_library(type(value).__module__):
            return None
        # It may keep some of its attributes from pickle.
        return type(value), getattr(value, "__dict__", None), value.__reduce_ex__(4)


def _take_class_apart(cls: type) -> list[Any]:
    names = [cls.__module__, cls.__qualname__]
    if _is_library(cls.__module__):
        return names
    attributes = [(name, part) for name, part in vars(cls).items() if name not in _INTERNAL_ATTRIBUTES]
    return [*names, type(cls), cls.__bases__, attributes]


def _take_function_apart(function: types.FunctionType) -> list[Any]:
    name = [function.__module__, function.__qualname__]
    is_library = _is_library(function.__globals__.get("__name__", ""))
    # What a decorator of a library makes of a function of the program has the name and the module of that function.
    is_named_there = getattr(sys.modules.get(function.__module__), function.__qualname__, None) is function
    if is_library and is_named_there and _is_library(function.__module__):
        return name
    code = function.__code__
    values = {} if is_library else _find_globals(function.__globals__, set(_list_names(code)))
    return [name, code, function.__defaults__, function.__kwdefaults__, vars(function), function.__closure__, values]


def _find_globals(namespace: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Find the values that code may read from globals, and from modules of the program among them."""
    values: dict[str, Any] = {}
    namespaces = [namespace]
    for space in namespaces:
        for name in sorted(names & space.keys()):
            value = space[name]
            values[f"{space.get('__name__')}.{name}"] = value
            is_of_program = isinstance(value, types.ModuleType) and not _is_library(value.__name__)
            if is_of_program and all(vars(value) is not other for other in namespaces):
                namespaces.append(vars(value))
    return values


def _list_names(code: types.CodeType) -> Iterator[str]:
    """List the names in a piece of code and those inside it, and its texts, by which `getattr` may find a value."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _list_names(constant)


# What pickle does not take apart, or where it takes what a call changes or other processes name differently.
_PARTS: Mapping[type, Callable[[Any], Any]] = MappingProxyType(
    {
        types.CodeType: attrgetter(*_CODE_ATTRIBUTES.split()),
        # A cell is empty before the variable is assigned.
        types.CellType: lambda cell: [cell.cell_contents] if cell != types.CellType() else [],
        MappingProxyType: dict,
        # What functions that dispatch by types, and other caches, refer to.
        weakref.ref: lambda reference: [reference()],
        types.ModuleType: attrgetter("__name__"),
        torch.dtype: lambda dtype: repr(dtype).encode(),
        # A graph that holds values of a tensor is not stored.
        torch.Tensor: lambda x: [*x.shape, *x.stride(), x.dtype, x.device, x.requires_grad],
        Jitted: attrgetter("_f", "_donate_argnums", "_static_argnums", "_static_argnames", "backend", "passes"),
        Mesh: lambda mesh: [mesh.mesh.tolist(), mesh.mesh_dim_names, mesh.device_type],
        **dict.fromkeys(
            _NAMED_TYPES, lambda value: [getattr(value, name, None) for name in _NAMING_ATTRIBUTES.split()]
        ),
    }
)


def _is_library(module_name: str) -> bool:
    """Whether a module belongs to Python, torch, fshard or an installed package."""
    package = module_name.partition(".")[0]
    path = getattr(sys.modules.get(package), "__file__", None)
    return _is_library_file(path) if path else package in sys.builtin_module_names


def _is_library_file(path: str) -> bool:
    return _is_installed(path) or not is_users_file(path)


def _is_installed(path: str) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in _INSTALLED)


def list_sources(others: Iterable[str] = ()) -> dict[str, str]:
    """List the files of all modules that are loaded but for torch's, and other files, with digests of them."""
    paths = set(others)
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        # A version number stands for torch.
        if path is not None and name.partition(".")[0] != "torch" and not _is_kernel(path):
            paths.add(path)
    return {path: _digest_file(path) for path in sorted(paths)}


def _is_kernel(path: str) -> bool:
    """Whether Inductor wrote a file: it sets this variable, and names a file and its folder by the file's content."""
    directory, file = read_environment().get("TORCHINDUCTOR_CACHE_DIR"), Path(path)
    return directory is not None and file.is_relative_to(directory) and file.parent.name == file.name[1:3]


def are_sources_equal(sources: Mapping[str, str]) -> bool:
    """Tell whether files are as they were, and no other file of the program itself is loaded."""
    current = list_sources(sources)
    expected = {path: current[path] for path in current if path in sources or not _is_library_file(path)}
    return expected == sources


def _digest_file(path: str) -> str:
    """Compute a digest of a source file; of one of an installed package, which nobody edits, its size and time."""
    if not os.path.isfile(path):
        return "no file"
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns}" if _is_installed(path) else files.digest(Path(path).read_bytes())


def find_late_changes(sources: Iterable[str]) -> list[str]:
    """List the files that were changed after this process had started, which may run the code from before."""
    start = find_process_start()
    return [path for path in sources if _find_last_change(path) >= start]


def _find_last_change(path: str) -> float:
    """Find when a file was changed last, in seconds since 1970."""
    status = os.stat(path)
    if _is_installed(path):
        # An installer that replaces a file by an old one, as uv does, changes its directory too. Hard links to the file
        # that it makes elsewhere change only the file's time; the first import of a package, only the directory's.
        return max(status.st_mtime, min(status.st_ctime, os.stat(Path(path).parent).st_mtime))
    # Copying or extracting a file cannot set this time, as it can that of the content.
    return status.st_ctime


def find_process_start() -> float:
    """Find when this process started, in seconds since 1970."""
    # The name of the program, in parentheses, may contain spaces.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
