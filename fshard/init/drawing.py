"""What replay and counter share: copies of a module, tensors to draw, and functions that draw them."""

import copy
import dis
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from fshard import _compat
from fshard.errors import Problem, describe_error, refuse
from fshard.tree import tree_leaves
from fshard.tree.checks import is_differentiable

__all__ = ["Drawing", "Drawn", "Reset", "blank_like", "children_first", "copy_module", "has_fakes", "set_values"]

Reset = Callable[[nn.Module], Any]
# Called with an operator, its arguments and its keywords before the operator runs, which it may refuse.
Observer = Callable[[Any, Any, dict[str, Any]], None]
# One parameter: its name, this rank's shard or None where elements were left out, and the text that ranks compare.
Drawn = tuple[str, torch.Tensor | None, str]


def copy_module(
    module: nn.Module,
    replace: Callable[[torch.Tensor], torch.Tensor],
    memo: Mapping[int, torch.Tensor] | None = None,
) -> nn.Module:
    """Copy a module with other tensors for its parameters and buffers; tied ones stay tied.

    Functions among its attributes and hooks that close over a submodule close over its copy, as bound methods do.

    Args:
        module: The module.
        replace: Makes the other tensors.
        memo: Others that it may refer to, such as those of the modules around it, by their ids; they are not copied.
    """
    replaced: dict[int, Any] = dict(memo or {})
    # Outside of a trace or a transform around it, where plain tensors among the attributes cannot be copied.
    with _compat.outside_modes(), _compat.outside_transforms():
        for buffer in module.buffers():
            replaced[id(buffer)] = replace(buffer)
        for parameter in module.parameters():
            replaced[id(parameter)] = nn.Parameter(replace(parameter), requires_grad=parameter.requires_grad)
        try:
            module_copy = copy.deepcopy(module, replaced)
        except Exception as error:
            raise ValueError(
                f"functionalize: copy.deepcopy cannot copy the module: {describe_error(error)}. If it has "
                "weights of torch.nn.utils.weight_norm or prune, run it once under torch.no_grad() before. Keep locks, "
                "files and the like outside of it."
            ) from error
    for submodule in module_copy.modules():
        _compat.read_parametrized_by(submodule, _compat.compute_parametrized)
        for holder in (vars(submodule), *vars(submodule).values()):
            # Exact types only: these are copies.
            if type(holder) in (dict, OrderedDict):
                for key, value in holder.items():
                    holder[key] = _rebind(value, replaced)
    return module_copy


def _rebind(value: Any, copies: dict[int, Any]) -> Any:
    """Return the copy of a module; of a function that closes over one, a function that closes over its copy.

    A deep copy of a function is the function itself, which would compute with the weights of the module that was
    copied.
    """
    if isinstance(value, MethodType):
        method = MethodType(_rebind(value.__func__, copies), _rebind(value.__self__, copies))
        return value if method == value else method
    if isinstance(value, FunctionType) and id(value) not in copies:
        # It may close over itself.
        copies[id(value)] = value
        _refuse_globals(value, copies)
        closure = value.__closure__ or ()
        cells = [_rebind_cell(cell, copies) for cell in closure]
        if any(map(operator.is_not, cells, closure)):
            function = FunctionType(value.__code__, value.__globals__, None, value.__defaults__, tuple(cells))
            function.__kwdefaults__ = value.__kwdefaults__
            # Not by update_wrapper, whose __wrapped__ would keep the module of each copy that this one is a copy of.
            function.__dict__ = value.__dict__
            copies[id(value)] = function
    return copies.get(id(value), value)


def _refuse_globals(function: FunctionType, copies: Mapping[int, Any]) -> None:
    """Refuse a function that reads a part of the module as a global of its program, which a copy cannot change."""
    for instruction in dis.get_instructions(function):
        name = instruction.argval
        content = None
        if instruction.opname == "LOAD_GLOBAL":
            content = function.__globals__.get(name)
        part = getattr(content, "__self__", content)
        if isinstance(part, nn.Module | nn.Parameter) and id(part) in copies:
            raise ValueError(
                f"functionalize: {function.__qualname__} reads the global {name}, which is part of the module, so it "
                f"would always compute with the weights of this module. Make it in a function that takes {name} as an "
                "argument."
            )


def _rebind_cell(cell: CellType, copies: dict[int, Any]) -> CellType:
    """Return the same cell where nothing changes: other functions may write to it. It may be empty.

    A function that closes over a buffer keeps it, because the copy's may have no values.
    """
    content = None
    with suppress(ValueError):
        content = cell.cell_contents
    # Outside of the context, which would hide that a function is refused.
    rebound = _rebind(content, copies)
    return cell if rebound is content or type(rebound) is torch.Tensor else CellType(rebound)


def blank_like(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor for the values of another, of NaN or zeros."""
    device = torch.get_default_device() if tensor.is_meta else tensor.device
    return torch.empty_like(tensor, device=device).fill_(torch.nan if is_differentiable(tensor) else 0)


def is_left_out(tensor: torch.Tensor, blank: torch.Tensor) -> bool:
    """Tell whether elements of a blank tensor, or of the one in its place, were not set."""
    if tensor.is_meta or _compat.is_fake(tensor):
        return True
    if is_differentiable(tensor):
        return bool(tensor.isnan().any())
    # It was filled once, when it was made.
    is_same = _compat.storage_key(tensor) == _compat.storage_key(blank)
    return is_same and _compat.version(tensor) == 1 and tensor.numel() > 0


def refuse_blank(buffers: Mapping[str, torch.Tensor]) -> None:
    """Refuse buffers without values.

    Args:
        buffers: The buffers that `apply` was given, or the module's own.

    Raises:
        ValueError: with the name of each that is on the meta device.
    """
    misfit = "a tensor on the meta device", "a tensor with values"
    problems = [Problem(f"[{name!r}]", *misfit) for name, buffer in buffers.items() if buffer.is_meta]
    remedy = (
        "pass buffers= with values for them, such as state.buffers or the buffers of the model whose init made the "
        "parameters (its eval() shares them), or write to them in the module's reset_parameters"
    )
    refuse("apply: buffers have no values", problems, remedy)


def set_values(submodule: nn.Module, reset: Reset | None) -> None:
    """Set the values of a submodule by `reset`, or by its own method where that is None.

    A wrapper has the methods and tensors of the submodule inside, which is drawn by itself.
    """
    if _compat.unwrapped(submodule) is not submodule:
        return
    draw = own_reset(submodule) if reset is None else partial(reset, submodule)
    if draw:
        draw()


def own_reset(module: nn.Module) -> Callable[[], Any] | None:
    """Return the method that draws a module's own values, or None."""
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def children_first(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """List the submodules, each once, in the order in which constructors end: children before their parent."""
    if module not in seen:
        seen.add(module)
        for name, child in module.named_children():
            yield from children_first(child, f"{path}.{name}" if path else name, seen)
        yield path, module


def has_fakes(args: Any, kwargs: Any) -> bool:
    """Tell whether tensors without values are among the arguments of an operator."""
    return any(map(_compat.is_fake, tree_leaves((args, kwargs))))


class Drawing(_compat.DispatchMode):
    """Random operators draw from a generator of this mode, because other threads may draw from torch's.

    It gives the numbers of torch's own one. A reset that seeds torch's generator itself draws from that.
    """

    def __init__(self, observe: Observer, seed: int) -> None:
        """Seed both generators, and hand operators to `observe` before they run."""
        super().__init__()
        self._observe = observe
        torch.manual_seed(seed)
        self._generator = torch.Generator().manual_seed(torch.initial_seed())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._observe(func, args, kwargs)
        generator = self._generator
        shared = torch.default_generator
        is_random = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        is_elsewhere = any(torch.is_tensor(arg) and arg.device.type != "cpu" for arg in args)
        if not is_random or is_elsewhere or shared.initial_seed() != generator.initial_seed():
            return func(*args, **kwargs)
        if any(argument.name == "generator" for argument in _compat.arguments_of(func) or []):
            return func(*args, **kwargs | {"generator": generator})
        shared.set_state(generator.get_state())
        result = func(*args, **kwargs)
        generator.set_state(shared.get_state())
        return result
