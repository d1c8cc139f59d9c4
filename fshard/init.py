"""Initialisation: a module's values drawn anew from a seed."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fshard.errors import Problem, leaf_error

# torch's default generator belongs to the process, so simulated ranks take turns to seed it.
_SEEDING = threading.Lock()


def copied(module: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Copy a module with other tensors for its parameters and buffers; what was tied stays tied."""
    memo: dict[int, torch.Tensor] = {id(buffer): replace(buffer) for buffer in module.buffers()}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(replace(parameter), requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


def drawn(module: nn.Module, buffers: Mapping[str, torch.Tensor], seed: int) -> nn.Module:
    """Copy a module with values drawn anew, as `Model.init` says."""

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        device = torch.get_default_device() if tensor.is_meta else tensor.device
        # NaN, so that what nobody draws is found.
        return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0, device=device)

    made = copied(module, fresh)
    problems = []
    for path, submodule in made.named_modules():
        if _reset_of(submodule) is None and any(True for _ in submodule.parameters(recurse=False)):
            found = f"{type(submodule).__name__} without reset_parameters"
            problems.append(Problem(path or "(root)", found, "a way to draw its values"))
    remedy = "add reset_parameters to these modules, or leave out seed to take the values the module has"
    if not problems:
        with _SEEDING, torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            for submodule in _children_first(made, set()):
                reset = _reset_of(submodule)
                if reset is not None:
                    reset()
            for name, buffer in made.named_buffers():
                if not buffers[name].is_meta:
                    buffer.copy_(buffers[name])
        for name, parameter in made.named_parameters():
            if parameter.isnan().any():
                problems.append(Problem(f"[{name!r}]", "elements left out by reset_parameters", "a value for each"))
        remedy = "draw them in reset_parameters, or leave out seed to take the values the module has"
    if problems:
        raise leaf_error("model.init: values cannot be drawn from a seed", problems, remedy)
    return made


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """What draws a module's own values."""
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Every submodule once, in the order in which constructors end."""
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module
