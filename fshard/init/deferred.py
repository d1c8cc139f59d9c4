"""Deferred initialisation: `Model.init` with a seed."""

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from itertools import compress
from typing import Any

import torch
from torch import nn

from fshard import _compat, comm, lazy_names
from fshard.errors import Problem, expect, refuse
from fshard.init.drawing import Reset, blank_like, is_left_out, own_reset
from fshard.init.replay import replay
from fshard.random import keeping_generators
from fshard.shard import Layouts, fingerprint, is_frozen, stored, unfit
from fshard.transforms import ShardTransform
from fshard.transforms.structure import layout_axes
from fshard.tree import Axis, Sharded, Spec
from fshard.tree.checks import SEED, check_arguments

REMEDY = (
    "pass reset=, a function that sets the values of a submodule, or add reset_parameters to these modules, as "
    "fs.with_init_weights does to models of transformers, or leave out seed and take their values"
)

# Imports the extension that draws by a counter when it is first asked for.
find_in_extensions = lazy_names.make_getattr("fshard.init")

# Set to True, by `comm.setting`, around a function that makes a state which is read from a checkpoint right after it:
# `Model.init` then makes abstract leaves, unless the module has buffers that only `init` gives values.
SKIP_DRAWING: ContextVar[bool] = ContextVar("fshard_skip_drawing", default=False)


def init(
    module: nn.Module,
    transform: ShardTransform,
    seed: int,
    mode: str,
    reset: Reset | None,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
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
    specs, facts, layouts = _lay_out(params, transform)
    undrawn, remedy = ([], REMEDY) if reset else _find_undrawn_root(module)
    shards = {}
    # The module's buffers, and blank ones in the places of those on the meta device.
    before = {}
    for name, buffer in _compat.named_buffers(module):
        before[name] = blank_like(buffer) if buffer.is_meta else buffer.clone()
    after = dict(before)
    if not layouts.problems and not undrawn:
        draw = replay if mode == "replay" else find_in_extensions("draw_by_counter")
        with keeping_generators(), torch.no_grad():
            for name, piece, fact in draw(module, after, specs, seed, reset):
                facts[f"[{name!r}]"] = fact
                if piece is not None:
                    shards[name] = stored(piece, specs[name])
    layouts.check(facts)
    undrawn = undrawn or _find_undrawn(params, shards, layout_axes(transform))
    refuse("model.init: values cannot be drawn from a seed", undrawn, remedy)
    buffers = {}
    for name, buffer in _compat.named_buffers(module):
        if buffer.is_meta and not is_left_out(after[name], before[name]):
            buffers[name] = after[name].detach()
    in_order = {name: shards[name] for name in params}
    return in_order, buffers


def init_abstract(module: nn.Module, transform: ShardTransform) -> dict[str, Sharded]:
    """Lay a module's parameters out without values, which takes no memory.

    Args:
        module: The module, with values or on the meta device.
        transform: How to shard.

    Returns:
        Sharded parameters on the meta device by name.

    Raises:
        ValueError: on every rank, if ranks hold different trees, or a shape does not fit the transform.
    """
    params = dict(_compat.named_parameters(module))
    specs, facts, layouts = _lay_out(params, transform)
    layouts.check(facts)
    leaves = {}
    for name, leaf in params.items():
        spec = specs[name]
        local = torch.empty(spec.local_shape, dtype=leaf.dtype, device="meta")
        leaves[name] = Sharded(local, spec)
    return leaves


def may_skip_drawing(module: nn.Module) -> bool:
    """Whether values are about to be replaced, as `SKIP_DRAWING` says, and no buffer waits for `init` to draw it."""
    if not SKIP_DRAWING.get():
        return False
    return not any(buffer.is_meta for _, buffer in _compat.named_buffers(module))


def _find_undrawn(params: Iterable[str], shards: Mapping[str, Sharded], axes: Sequence[Axis]) -> list[Problem]:
    """List the parameters with elements that were not drawn, of which each rank sees those in its own shard."""
    flags = comm.join_flags([name not in shards for name in params], axes, "shard")
    misfit = "elements left out by reset_parameters", "a value for each"
    return [Problem(f"[{name!r}]", *misfit) for name in compress(params, flags)]


def _lay_out(
    params: Mapping[str, torch.Tensor], transform: ShardTransform
) -> tuple[dict[str, Spec], dict[str, str], Layouts]:
    """Find the specs of parameters, what ranks compare of each before it has values, and those that do not fit.

    Returns:
        The specs by name, the texts by path, and the layouts, with the problems of those that cannot be sharded.
    """
    specs = {}
    facts = {}
    layouts = Layouts("shard", transform, list(params), list(params.values()))
    for name, leaf in params.items():
        path = f"[{name!r}]"
        has_no_values = leaf.is_meta and leaf.layout == torch.strided
        misfit = None if has_no_values else unfit(leaf)
        if misfit:
            layouts.problems.append(Problem(path, *misfit))
        spec = Spec(tuple(leaf.shape), frozen=is_frozen(leaf))
        specs[name] = layouts.of(path, name, leaf, spec)
        facts[path] = fingerprint(leaf, specs[name], "without values")
    return specs, facts, layouts


def _find_undrawn_root(module: nn.Module) -> tuple[list[Problem], str]:
    """List a module that draws its values by a method which nothing calls here, and say how to draw them."""
    module = _compat.unwrapped(module)
    kind = type(module)
    methods = ("init_weights", "_init_weights", "initialize_weights")
    name = next((name for name in methods if hasattr(kind, name)), None)
    if name is None or own_reset(module) is not None:
        return [], REMEDY
    problem = Problem("(root)", f"{kind.__name__}, whose {name} is not called", "a way to draw its values")
    # Models of transformers draw one submodule at a time.
    if hasattr(module, "_init_weights"):
        return [problem], REMEDY
    reset = f"reset=lambda module: module.{name}() if isinstance(module, {kind.__name__}) else None"
    remedy = f"pass {reset}, which draws the whole model at once, or a reset that draws one submodule at a time"
    return [problem], remedy
