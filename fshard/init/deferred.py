"""Deferred initialisation: `Model.init` with a seed."""

import itertools
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fshard import _compat, comm, lazy_names
from fshard.errors import Problem, expect, refuse
from fshard.init.drawing import Reset, blank_like, is_left_out, own_reset
from fshard.init.replay import replay
from fshard.shard import SAME_TREE, Layouts, fingerprint, is_frozen, stored, unfit
from fshard.transforms import ShardTransform
from fshard.transforms.structure import layout_axes
from fshard.tree import Sharded, Spec
from fshard.tree.checks import SEED, check_arguments

REMEDY = (
    "pass reset=, a function that sets the values of a submodule, or add reset_parameters to these modules, as "
    "fs.with_init_weights does to models of transformers, or leave out seed and take their values"
)

# Imports the extension that draws by a counter when it is first asked for.
find_in_extensions = lazy_names.make_getattr("fshard.init")

# torch's default generator belongs to the process, so simulated ranks take turns to seed it.
_SEEDING = threading.Lock()


def init(
    module: nn.Module, transform: ShardTransform, seed: int, mode: str, reset: Reset | None
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Draw a module's values anew and keep this rank's shards of them.

    Args:
        module: The module, which is not changed; it draws with those of its buffers that have values.
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
    check_arguments("model.init", SEED, seed=seed)
    params = dict(_compat.named_parameters(module))
    specs, misfits = _laid_out(params, transform)
    undrawn = [] if reset else _undrawn_root(module)
    entries = {name: fingerprint(leaf, specs[name], "without values") for name, leaf in params.items()}
    shards: dict[str, Sharded] = {}
    given = dict(_compat.named_buffers(module))
    before = {name: blank_like(buffer) if buffer.is_meta else buffer.clone() for name, buffer in given.items()}
    after = dict(before)
    if not misfits and not undrawn:
        draw = replay if mode == "replay" else find_in_extensions("draw_by_counter")
        with _SEEDING, torch.random.fork_rng(), torch.no_grad():
            for name, piece, entry in draw(module, after, specs, seed, reset):
                entries[name] = entry
                if piece is not None:
                    shards[name] = stored(piece, specs[name])
    axes = layout_axes(transform)
    problem = comm.find_disagreement({f"[{name!r}]": entry for name, entry in entries.items()}, axes, "shard")
    refuse("shard: ranks hold different trees", [problem] if problem else [], SAME_TREE)
    refuse("shard: leaves cannot be sharded", misfits, "pass full tensors whose shapes fit the strategy")
    # A rank sees only the elements of its own part that were left out.
    left = map(any, zip(*comm.all_gather_object([name not in shards for name in params], axes, "shard"), strict=True))
    found, needed = "elements left out by reset_parameters", "a value for each"
    undrawn = undrawn or [Problem(f"[{name!r}]", found, needed) for name in itertools.compress(params, left)]
    refuse("model.init: values cannot be drawn from a seed", undrawn, REMEDY)
    drawn = [name for name in given if given[name].is_meta and not is_left_out(after[name], before[name])]
    return {name: shards[name] for name in params}, {name: after[name].detach() for name in drawn}


def _laid_out(params: Mapping[str, torch.Tensor], transform: ShardTransform) -> tuple[dict[str, Spec], list[Problem]]:
    """Find the specs of parameters, and those that cannot be sharded."""
    specs: dict[str, Spec] = {}
    layouts = Layouts("shard", transform, list(params), list(params.values()))
    for name, leaf in params.items():
        spec = Spec(tuple(leaf.shape), frozen=is_frozen(leaf))
        misfit = None if leaf.is_meta and leaf.layout == torch.strided else unfit(leaf)
        if misfit:
            layouts.problems.append(Problem(f"[{name!r}]", *misfit))
        specs[name] = layouts.of(f"[{name!r}]", name, leaf, spec)
    return specs, layouts.problems


def _undrawn_root(module: nn.Module) -> list[Problem]:
    """List a module whose constructor draws its values by a method that nothing calls here."""
    module = _compat.unwrapped(module)
    methods = ("init_weights", "_init_weights", "initialize_weights")
    names = [name for name in methods if hasattr(type(module), name)]
    if not names or own_reset(module) is not None:
        return []
    found = f"{type(module).__name__}, whose {names[0]} is not called"
    return [Problem("(root)", found, "a way to draw its values")]
