"""What draws a module's values, and in which order."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fshard.errors import Problem

Replace = Callable[[torch.Tensor], torch.Tensor]


class Call(NamedTuple):
    """One call that draws values.

    Attributes:
        path: Name of the submodule that it belongs to.
        module: The submodule.
        run: Draws.
    """

    path: str
    module: nn.Module
    run: Callable[[], Any]


def copied(module: nn.Module, replace: Replace, replace_buffer: Replace | None = None) -> nn.Module:
    """Copy a module with other tensors for its parameters and buffers; what was tied stays tied."""
    memo: dict[int, torch.Tensor] = {id(buffer): (replace_buffer or replace)(buffer) for buffer in module.buffers()}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(replace(parameter), requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


def calls_of(module: nn.Module) -> list[Call]:
    """What draws a module's values, in the order in which constructors end: children before their parent.

    A model of transformers draws all of its values itself.
    """
    calls = []
    for path, submodule in _children_first(module, "", set()):
        run = initializer_of(submodule) or _reset_of(submodule)
        if run is not None:
            calls.append(Call(path, submodule, run))
    return calls


def undrawable(module: nn.Module) -> list[Problem]:
    """The submodules with parameters of their own that nothing draws."""
    problems = []
    for path, submodule in module.named_modules():
        around = [path[:end] for end, letter in enumerate(path) if letter == "."] + ["", path]
        if any(initializer_of(module.get_submodule(name)) for name in around) or _reset_of(submodule):
            continue
        if any(True for _ in submodule.parameters(recurse=False)):
            found = f"{type(submodule).__name__} without reset_parameters"
            problems.append(Problem(path or "(root)", found, "a way to draw its values"))
    return problems


def initializer_of(module: nn.Module) -> Callable[[], Any] | None:
    """What draws the values of a model of transformers, submodules included; None for other modules."""
    # Of its class: a wrapper may hand on what it is asked for to a model inside it.
    draws = all(callable(getattr(type(module), name, None)) for name in ("initialize_weights", "_init_weights"))
    return getattr(module, "initialize_weights") if draws else None  # noqa: B009


class Blank(NamedTuple):
    """A copy of a module whose values are to be drawn.

    Attributes:
        module: The copy.
        parameters: Its parameters by the names of the module's, and those that models of transformers draw and drop.
        places: Where in the copy each of the module's parameters is drawn, by its name.
    """

    module: nn.Module
    parameters: dict[str, torch.Tensor]
    places: dict[str, str]


def blank_copy(module: nn.Module, replace: Replace, replace_buffer: Replace) -> Blank:
    """Copy a module for drawing its values anew, with other tensors.

    Models of transformers draw what they tie as if it were not tied, and then keep one of the two.
    """
    made = copied(module, replace, replace_buffer)
    parameters: dict[str, torch.Tensor] = dict(made.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    places = {name: name for name in parameters}
    for path, submodule in made.named_modules():
        # It marks what it has drawn before.
        submodule.__dict__.pop("_is_hf_initialized", None)
        tied = getattr(submodule, "all_tied_weights_keys", {}) if initializer_of(submodule) else {}
        for target, source in tied.items():
            found: dict[str, torch.Tensor] = dict(submodule.named_parameters(remove_duplicate=False))
            both = found.get(source)
            if both is None or found.get(target) is not both:
                continue
            holder, _, key = target.rpartition(".")
            other = nn.Parameter(replace(both), requires_grad=both.requires_grad)
            setattr(submodule.get_submodule(holder), key, other)
            prefix = f"{path}." if path else ""
            parameters[f"{prefix}{target} (dropped)"] = other
            places[names[both]] = f"{prefix}{source}"
    return Blank(made, parameters, places)


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """What draws a module's own values."""
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def _children_first(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every submodule once; not those whose values a model around them draws."""
    if module not in seen:
        seen.add(module)
        if initializer_of(module) is None:
            for name, child in module.named_children():
                yield from _children_first(child, f"{path}.{name}" if path else name, seen)
        else:
            seen.update(module.modules())
        yield path, module
