"""Constructors that draw or set values themselves, which no seed draws again."""

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

from fshard.errors import Problem
from fshard.init.calls import initializer_of

# torch's names for writing in place, as initialisers use them; those of libraries end alike.
_WRITES = frozenset(name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")) | {
    *("add_", "bernoulli_", "copy_", "div_", "exponential_", "fill_", "mul_", "random_", "sub_", "zero_"),
}
_ENDINGS = ("normal_", "uniform_", "normal_tf_")
_RESETS = ("reset_parameters", "_reset_parameters")


def drawn_by_constructors(module: nn.Module) -> list[Problem]:
    """List the submodules whose constructor draws or sets values that no reset_parameters draws again.

    The values of a module on the meta device are gone, and its constructor cannot be run again. Its code is read
    instead: it is searched for in-place writes to tensors, and so are the functions that it calls. A class that defines
    reset_parameters beside such a constructor is taken at its word, and so is one of torch's.
    """
    problems = []
    found: dict[type, str | None] = {}
    for path, submodule in module.named_modules():
        cls = type(submodule)
        if cls not in found:
            found[cls] = _write_of(cls)
        write = found[cls]
        own = any(name in vars(submodule) for name in _RESETS)
        if write and not own and _package(cls) not in _drawing_packages(module, path):
            text = f"{cls.__module__}.{cls.__qualname__}, whose constructor draws or sets values by {write}"
            problems.append(Problem(path or "(root)", text, "a reset_parameters that draws them again"))
    return problems


def _drawing_packages(module: nn.Module, path: str) -> set[str]:
    """Find the packages whose submodules are drawn by models of transformers around them."""
    around = [path[:end] for end, letter in enumerate(path) if letter == "."] + ["", path]
    models = (model for name in around if initializer_of(model := module.get_submodule(name)))
    return {_package(base) for model in models for base in type(model).__mro__}


def _write_of(cls: type) -> str | None:
    """Find the in-place write of a class's constructor, where the class has no reset_parameters of its own."""
    for base in cls.__mro__:
        if any(name in vars(base) for name in _RESETS):
            return None
        constructor = inspect.unwrap(vars(base).get("__init__", object.__init__))
        if isinstance(constructor, FunctionType) and (write := _write_in(constructor, cls, set())):
            return write
    return None


def _write_in(function: FunctionType, cls: type, seen: set[FunctionType]) -> str | None:
    """Find an in-place write of a function or one that it calls: a method of the class, or a function of its module."""
    if function in seen or _package(function) == "torch":
        return None
    seen.add(function)
    names = dict.fromkeys(_names(function.__code__))
    write = next((name for name in names if name in _WRITES or name.endswith(_ENDINGS)), None)
    if write is not None:
        return f"{write} in {function.__qualname__}"
    for name in names:
        if name in ("__init__", "forward"):
            continue
        for called in (inspect.getattr_static(cls, name, None), function.__globals__.get(name)):
            called = inspect.unwrap(getattr(called, "__func__", called)) if callable(called) else None
            if isinstance(called, FunctionType) and (write := _write_in(called, cls, seen)):
                return write
    return None


def _names(code: CodeType) -> Iterator[str]:
    """List the attributes and globals that code reads, nested functions included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD") and isinstance(instruction.argval, str):
            yield instruction.argval
        elif isinstance(instruction.argval, CodeType):
            yield from _names(instruction.argval)


def _package(thing: type | FunctionType) -> str:
    return (thing.__module__ or "").partition(".")[0]
