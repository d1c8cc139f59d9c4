"""Buffers: those without values get some where the module draws them."""

from collections.abc import Mapping

import torch
from torch import nn

from fshard import _compat
from fshard.errors import Problem, leaf_error
from fshard.init.replay import fill_blank, new_parameter


class NewBuffers:
    """Makes the buffers that a module draws with, and says which of those without values it has drawn."""

    def __init__(self, module: nn.Module, given: Mapping[str, torch.Tensor]) -> None:
        self._given = given
        self._names = {buffer: name for name, buffer in module.named_buffers()}
        # Kept, so that no other tensor has its id.
        self._blank: dict[int, torch.Tensor] = {}

    def __call__(self, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer for the copy of the module: of its value, or one to be drawn."""
        given = self._given[self._names[buffer]]
        if not given.is_meta:
            return given.clone()
        made = fill_blank(new_parameter(given))
        self._blank[id(made)] = made
        return made

    def drawn(self, made: nn.Module) -> dict[str, torch.Tensor]:
        """The buffers of a copy of the module that had no values and have some now."""
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
        buffers: What `apply` was given, or the module's own.

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
