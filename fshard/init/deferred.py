"""Deferred initialisation: `Model.init` with a seed."""

import itertools
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fshard import comm
from fshard.errors import Problem, expect, refuse
from fshard.init.calls import NewBuffers, Reset, calls_of, undrawable
from fshard.init.counter import UNDRAWN, count
from fshard.init.replay import replay
from fshard.shard import (
    SAME_TREE,
    Layouts,
    check_transform,
    fingerprint,
    is_frozen,
    laid_out,
    local_piece,
    stored,
    unfit,
)
from fshard.transforms import ShardTransform
from fshard.transforms.compose import at, layout_axes, masks
from fshard.tree import Sharded, Spec, flatten, names_of, unflatten
from fshard.tree.checks import check_matches, check_seed, describe, outline

REMEDY = "pass reset=, a function that sets the values of a submodule, or add reset_parameters to these modules"

# torch's default generator belongs to the process, so simulated ranks take turns to seed it.
_SEEDING = threading.Lock()


def init(
    module: nn.Module,
    buffers: Mapping[str, torch.Tensor],
    transform: ShardTransform,
    seed: int,
    mode: str,
    reset: Reset | None = None,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Draw a module's values anew and keep this rank's shards of them.

    Args:
        module: The module, which is not changed.
        buffers: Its buffers by name; the module draws with those that have values.
        transform: How to shard.
        seed: Where the values come from.
        mode: "replay" or "counter", as for `Model.init`.
        reset: As for `Model.init`.

    Returns:
        Sharded parameters by name, and the buffers that were on the meta device and have been drawn.

    Raises:
        ValueError: as `Model.init`.
    """
    expect(mode in ("replay", "counter"), "model.init", 'mode to be "replay" or "counter"', repr(mode))
    check_seed("model.init", seed)
    expect(reset is None or callable(reset), "model.init", "reset to be a function of a submodule", describe(reset))
    if reset is None:
        _refuse_undrawn(undrawable(module))
    made = _Shards(module, transform, reset)
    blank = NewBuffers(module, buffers)
    drawn = module
    if not made.problems:
        with _SEEDING, torch.random.fork_rng(), torch.no_grad():
            drawn = made.replay(blank, seed) if mode == "replay" else made.count(blank, seed)
    return made.finish(), blank.drawn(drawn)


class _Shards:
    """The shards of a module's parameters, made one by one and compared between ranks at the end."""

    def __init__(self, module: nn.Module, transform: ShardTransform, reset: Reset | None) -> None:
        """Lay out all parameters."""
        check_transform(transform, "shard")
        self._module, self._transform, self._reset = module, transform, reset
        self._flat = flatten(dict(module.named_parameters()))
        self._names = names_of(self._flat.treedef)
        check_matches("shard", masks(transform), self._names, self._flat.leaves)
        self.problems: list[Problem] = []
        self._undrawn: dict[str, Problem] = {}
        self._remedy = REMEDY
        self._specs: dict[str, Spec] = {}
        self._entries: dict[str, str] = {}
        self._shards: dict[str, Sharded] = {}
        layouts: Layouts = {}
        for path, name, leaf in zip(self._flat.paths, self._names, self._flat.leaves, strict=True):
            blank = leaf.is_meta and leaf.layout == torch.strided and torch.get_default_device().type != "meta"
            misfit = None if blank else unfit(leaf)
            spec = Spec(tuple(leaf.shape), frozen=is_frozen(leaf))
            if misfit:
                self.problems.append(Problem(path, *misfit))
            chosen = at(transform, name, leaf)
            self._specs[name] = spec if misfit else laid_out(path, spec, chosen, self.problems, layouts)
            self._entries[name] = misfit[0] if misfit else fingerprint(leaf, self._specs[name], "without values")

    def replay(self, new_buffer: Callable[[torch.Tensor], torch.Tensor], seed: int) -> nn.Module:
        """Draw the values that constructing the module draws."""

        def keep(name: str, full: torch.Tensor) -> None:
            self._keep(name, local_piece(full, self._specs[name]), fingerprint(full, self._specs[name]))

        made, left = replay(self._module, new_buffer, seed, keep, partial(calls_of, reset=self._reset))
        for name in left:
            self._undrawn[name] = Problem(f"[{name!r}]", *UNDRAWN)
        return made

    def count(self, new_buffer: Callable[[torch.Tensor], torch.Tensor], seed: int) -> nn.Module:
        """Draw this rank's part of each parameter, by its elements' numbers."""
        counted = count(self._module, new_buffer, self._specs, seed, partial(calls_of, reset=self._reset))
        self._undrawn = {problem.path: problem for problem in counted.problems}
        self._remedy = 'pass mode="replay", which runs any reset_parameters'
        for name, parameter in self._module.named_parameters():
            # One after another is rounded, and dropped.
            part = counted.parts.pop(name)
            self._entries[name] = fingerprint(parameter, self._specs[name], str(part))
            if not counted.problems:
                self._keep(name, part.local(), self._entries[name])
        return counted.module

    def _keep(self, name: str, local: torch.Tensor, entry: str) -> None:
        """Keep the shard of a parameter, and the text of it that ranks compare."""
        self._undrawn.pop(name, None)
        if _has_nan(local):
            self._undrawn[name] = Problem(f"[{name!r}]", *UNDRAWN)
        self._entries[name] = entry
        self._shards[name] = Sharded(stored(local, self._specs[name]), self._specs[name])

    def finish(self) -> Any:
        """Compare with the other ranks, and return the shards by name."""
        entries = {path: self._entries[name] for path, name in zip(self._flat.paths, self._names, strict=True)}
        entries["(structure)"] = outline(self._flat.treedef)
        axes = layout_axes(self._transform)
        problem = comm.disagreement(entries, axes, "shard")
        refuse("shard: ranks hold different trees", [problem] if problem else [], SAME_TREE)
        refuse("shard: leaves cannot be sharded", self.problems, "pass full tensors whose shapes fit the strategy")
        # A rank sees only the elements of its own part that were left out.
        undrawn = map(
            any, zip(*comm.everyone([name in self._undrawn for name in self._names], axes, "shard"), strict=True)
        )
        for name in itertools.compress(self._names, undrawn):
            self._undrawn.setdefault(name, Problem(f"[{name!r}]", *UNDRAWN))
        _refuse_undrawn(list(self._undrawn.values()), self._remedy)
        return unflatten(self._flat.treedef, [self._shards[name] for name in self._names])


def _has_nan(tensor: torch.Tensor) -> bool:
    floating = tensor.is_floating_point() or tensor.is_complex()
    # A sum takes no memory, and has no NaN where no element has, but for infinities of both signs.
    return floating and bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def _refuse_undrawn(problems: list[Problem], remedy: str = REMEDY) -> None:
    remedy = f"{remedy}, or leave out seed to take the values the module has"
    refuse("model.init: values cannot be drawn from a seed", problems, remedy)
