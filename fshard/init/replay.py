"""Replay: draw a module's values as drawing the whole module does, one outermost submodule that draws at a time."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fshard import _compat
from fshard.init import drawing
from fshard.init.drawing import Drawing, Drawn, Reset, blank_like, children_first, copy_module, is_left_out
from fshard.shard import fingerprint, local_piece
from fshard.tree import Spec


def replay(
    module: nn.Module, buffers: dict[str, torch.Tensor], specs: Mapping[str, Spec], seed: int, reset: Reset | None
) -> Iterator[Drawn]:
    """Draw values with the numbers of torch's generator, in the order of drawing the whole module.

    Args:
        module: The module, which is not changed.
        buffers: Its buffers by name, which are drawn too, or replaced.
        specs: The parameters' specs.
        seed: The seed of torch's generator, whose state the caller puts back.
        reset: As for `Model.init`.

    Yields:
        Each parameter that lies in a submodule that draws.
    """
    make = _compat.fake_maker()
    tried = copy_module(module, make)
    # The whole module without values. Each submodule that draws is copied from it with values, drawn, and dropped.
    bare = copy_module(module, make)
    paths = _outermost(tried, reset, seed)
    mode = Drawing(_refuse_others, seed)
    names: dict[Any, str] = {parameter: name for name, parameter in _compat.named_parameters(bare)}
    names |= {buffer: name for name, buffer in _compat.named_buffers(bare)}
    originals: dict[Any, torch.Tensor] = dict(zip(bare.parameters(), module.parameters(), strict=True))
    last_path = {parameter: path for path in paths for parameter in bare.get_submodule(path).parameters()}
    # Values of tied parameters, from the first submodule that has them to the last.
    held: dict[Any, torch.Tensor] = {}
    # What a submodule may refer to around it, which is not copied.
    surroundings: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in names}
    drawn: set[nn.Module] = set()

    def values_of(tensor: torch.Tensor) -> torch.Tensor:
        if tensor in originals:
            return held.setdefault(tensor, blank_like(originals[tensor]))
        return buffers[names[tensor]]

    def draw(path: str) -> Iterator[Drawn]:
        """Draw one submodule, in a frame of its own: its values are freed before those of the next one are made."""
        source = bare.get_submodule(path)
        made = copy_module(source, values_of, surroundings)
        for inside, _ in children_first(source, "", drawn):
            with mode:
                drawing.set_values(made.get_submodule(inside), reset)
        for key, buffer in source.named_buffers():
            buffers[names[buffer]] = made.get_buffer(key)
        for key, parameter in source.named_parameters():
            # A reset may have put another in its place.
            value = made.get_parameter(key).detach()
            blank = held.pop(parameter)
            if last_path[parameter] != path:
                held[parameter] = value
                continue
            name = names[parameter]
            piece = None if is_left_out(value, blank) else local_piece(value, specs[name])
            yield name, piece, fingerprint(value, specs[name])

    for path in paths:
        yield from draw(path)


def _outermost(module: nn.Module, reset: Reset | None, seed: int) -> list[str]:
    """Find the outermost submodules that draw, by calls that fail at the first operator on a tensor of theirs."""
    paths: list[str] = []
    mode = Drawing(_refuse_others, seed)
    for path, submodule in module.named_modules():
        if paths and (not paths[-1] or path.startswith(f"{paths[-1]}.")):
            continue
        try:
            with mode:
                drawing.set_values(submodule, reset)
        except Exception:
            paths.append(path)
    return paths


def _refuse_others(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse tensors without values, such as those that another submodule draws."""
    if drawing.has_fakes(args, kwargs):
        raise ValueError(
            "model.init: expected reset to use tensors of the submodule that it was given, got those of another; set "
            "their values together in the reset_parameters of a module around both"
        )
