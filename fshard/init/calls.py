"""Calls that draw a module's values, in order, and copies of the module to draw on."""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fshard import _compat
from fshard.errors import Problem, leaf_error

Replace = Callable[[torch.Tensor], torch.Tensor]
Reset = Callable[[nn.Module], Any]


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
    """Copy a module with other tensors for its parameters and buffers; tied ones stay tied."""
    memo: dict[int, torch.Tensor] = {id(buffer): (replace_buffer or replace)(buffer) for buffer in module.buffers()}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(replace(parameter), requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


def calls_of(module: nn.Module, reset: Reset | None = None) -> list[Call]:
    """List the calls that draw a module's values, in the order in which constructors end: children before their parent.

    A model of transformers draws all of its values itself, unless `reset` is given.
    """
    calls = []
    for path, submodule in _children_first(module, "", set(), reset is not None):
        run = partial(reset, submodule) if reset else initializer_of(submodule) or _reset_of(submodule)
        if run is not None:
            calls.append(Call(path, submodule, run))
    return calls


def undrawable(module: nn.Module) -> list[Problem]:
    """List the submodules with parameters of their own that nothing draws, and a root that draws its submodules'."""
    problems = []
    names = [name for name in ("init_weights", "_init_weights") if callable(getattr(type(module), name, None))]
    if names and not (initializer_of(module) or _reset_of(module)):
        found = f"{type(module).__name__}, whose {names[0]} is not called"
        problems.append(Problem("(root)", found, "a way to draw its values"))
    for path, submodule in module.named_modules():
        drawn = drawers(module, path) or _reset_of(submodule)
        if not drawn and any(True for _ in submodule.parameters(recurse=False)):
            found = f"{type(submodule).__name__} without reset_parameters"
            problems.append(Problem(path or "(root)", found, "a way to draw its values"))
    return problems


def initializer_of(module: nn.Module) -> Callable[[], Any] | None:
    """Return the method that draws all values of a model of transformers; None for other modules."""
    # Of its class: a wrapper may pass attribute reads on to a model inside it.
    draws = all(callable(getattr(type(module), name, None)) for name in ("initialize_weights", "_init_weights"))
    return getattr(module, "initialize_weights") if draws else None  # noqa: B009


def drawers(module: nn.Module, path: str) -> list[nn.Module]:
    """List the models of transformers that draw the values of a submodule: itself, or those around it."""
    names = [path[:end] for end, letter in enumerate(path) if letter == "."] + ["", path]
    return [model for model in map(module.get_submodule, names) if initializer_of(model)]


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

    Models of transformers draw tied parameters as if they were not tied, and then keep one of the two.
    """
    made = copied(module, replace, replace_buffer)
    parameters: dict[str, torch.Tensor] = dict(made.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    places = {name: name for name in parameters}
    for path, submodule in made.named_modules():
        # It marks the submodules that it has drawn before.
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
    """Return the method that draws a module's own values, or None."""
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def _children_first(module: nn.Module, path: str, seen: set[nn.Module], every: bool) -> Iterator[tuple[str, nn.Module]]:
    """Visit every submodule once; unless `every`, not those whose values a model around them draws."""
    if module not in seen:
        seen.add(module)
        if every or initializer_of(module) is None:
            for name, child in module.named_children():
                yield from _children_first(child, f"{path}.{name}" if path else name, seen, every)
        else:
            seen.update(module.modules())
        yield path, module


def new_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """Make a tensor for the values of a parameter, where they are to be."""
    return torch.empty_like(parameter, device=device_of(parameter))


def device_of(parameter: torch.Tensor) -> torch.device:
    """Return where the values of a parameter are to be."""
    return torch.get_default_device() if parameter.is_meta else parameter.device


def fill_blank(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor so that elements that nobody draws are found."""
    return tensor.fill_(torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0)


class NewBuffers:
    """Makes the buffers that a module draws with, and says which of those without values it has drawn."""

    def __init__(self, module: nn.Module, given: Mapping[str, torch.Tensor]) -> None:
        self._given = given
        self._names = {buffer: name for name, buffer in module.named_buffers()}
        # Kept, so that no other tensor has its id.
        self._blank: dict[int, torch.Tensor] = {}

    def __call__(self, buffer: torch.Tensor) -> torch.Tensor:
        """Make a buffer for the copy of the module: of its value, or one to be drawn."""
        given = self._given[self._names[buffer]]
        if not given.is_meta:
            return given.clone()
        made = fill_blank(new_parameter(given))
        self._blank[id(made)] = made
        return made

    def drawn(self, made: nn.Module) -> dict[str, torch.Tensor]:
        """Return the buffers of a copy of the module that had no values and have some now."""
        drawn = {}
        for name, buffer in made.named_buffers():
            given = self._given.get(name)
            if given is None or not given.is_meta or buffer.is_meta or _compat.is_fake(buffer):
                continue
            # It was filled when it was made, and is filled once more if it is drawn.
            same = id(buffer) in self._blank and _compat.version(buffer) == 1 and buffer.numel()
            if not same and not buffer.isnan().any():
                drawn[name] = buffer.detach()
        return drawn


def refuse_blank(buffers: Mapping[str, torch.Tensor]) -> None:
    """Refuse buffers without values.

    Args:
        buffers: The buffers that `apply` was given, or the module's own.

    Raises:
        ValueError: with the name of each that is on the meta device.
    """
    problems = [
        Problem(f"[{name!r}]", "a tensor on the meta device", "a tensor with values")
        for name, buffer in buffers.items()
        if isinstance(buffer, torch.Tensor) and buffer.is_meta
    ]
    if problems:
        remedy = "pass buffers= with values for them, or write to them in the module's reset_parameters"
        if _compat.is_tracing():
            remedy += (
                "; fs.plan takes those of its state without values: make it with buffers=model.buffers, and pass "
                "buffers=state.buffers"
            )
        raise leaf_error("apply: buffers have no values", problems, remedy)
