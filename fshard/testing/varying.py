"""check_varying: find where a local loss uses an invariant value as a varying one, or the other way round."""

import traceback
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.collectives import LOCATED, Over, reduction_axes, variance_of, walked
from fshard.errors import Problem, is_users_file, refuse
from fshard.tree import Axis, Flat, Sharded, Tree, flatten, is_sharded, unflatten

# Better advice than what follows from the types of a collective.
ADVICE = MappingProxyType(
    {"psum": "fs.psum_invariant, whose sum agrees", "all_gather": "fs.all_gather_invariant, whose result agrees"}
)
# By whether a value varies.
KINDS = ("agrees", "varies")


class _Place(NamedTuple):
    """An output of a node of autograd's graph, and whether the nodes that use it take it as varying."""

    node: Any
    output: int
    varies: bool


def check_varying(
    f: Callable[..., Any], params: Tree, *args: Any, has_aux: bool = False, reduce_over: Over = None
) -> None:
    """Follow a loss back to the parameters, and refuse each step that mixes varying and invariant values.

    A loss varies between ranks of the axes that batches are split over, and agrees between ranks of other axes, such as
    those of tensor parallelism. `psum_invariant` and `all_gather_invariant` make invariant values of
    varying ones, and `pvary` the other way; with a step of these left out, or one too many, gradients are wrong and
    mostly no error says so. Call it once on every rank, as a test: it runs `f` and walks the whole graph. The rules are
    those of jax.shard_map with check_vma.

    Args:
        f: A local loss as `value_and_grad` takes it: returns a scalar, or (sum, count).
        params: Its parameters, Sharded.
        *args: Passed to f behind them.
        has_aux: Whether f returns (loss, aux) instead, as for `value_and_grad`; aux is not looked at.
        reduce_over: As for `value_and_grad`.

    Raises:
        AssertionError: with every wrong step, the line that made it, and the remedy.

    >>> import torch, fshard as fs
    >>> def program(total):
    ...     tp = fs.axis_of(fs.init_mesh({"tp": -1}, device="cpu"))
    ...     params = fs.shard({"w": torch.ones(4)}, fs.split_dim(tp, dim=0))
    ...     try:
    ...         fs.testing.check_varying(lambda p: total(fs.gather(p)["w"].sum(), tp), params)
    ...     except AssertionError as error:
    ...         return str(error)
    >>> fs.testing.spmd(lambda: program(fs.psum_invariant), world=2)
    [None, None]
    >>> print(fs.testing.spmd(lambda: program(fs.psum), world=2)[0])
    check_varying: varying and invariant values are mixed
      File ...: expected one that agrees: fs.psum_invariant, whose sum agrees, got psum over 'tp', whose result varies
    To fix: see the docstrings of psum, psum_invariant and pvary.
    """
    flat = flatten(params)
    reduced = reduction_axes(flat, "check_varying", reduce_over)
    leaves = [_tracked(leaf) for leaf in flat.leaves]
    with torch.enable_grad(), comm.setting(LOCATED, True):
        out = f(unflatten(flat.treedef, leaves), *args)
    loss = out[0] if has_aux else out
    loss = loss[0] if isinstance(loss, tuple) else loss
    followed = Flat(flat.paths, leaves, flat.treedef)
    problems = [problem for axis in flat.axes for problem in _wrong_steps(loss, followed, axis, axis in reduced)]
    remedy = "see the docstrings of psum, psum_invariant and pvary"
    refuse("check_varying: varying and invariant values are mixed", problems, remedy, AssertionError)


def _tracked(leaf: Any) -> Any:
    if not is_sharded(leaf) or leaf.spec.frozen or not leaf.local.is_floating_point():
        return leaf
    return Sharded(leaf.local.detach().requires_grad_(), leaf.spec)


def _wrong_steps(loss: torch.Tensor, flat: Flat, axis: Axis, reduced: bool) -> Iterator[Problem]:
    ends = {
        torch.autograd.graph.get_gradient_edge(leaf.local).node: (path, leaf)
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if is_sharded(leaf) and leaf.local.requires_grad
    }

    def behind(place: _Place) -> list[_Place]:
        node, varies = place.node, place.varies
        if node in ends:
            return []
        edges, found = node.next_functions, variance_of(node)
        if found.result and found.operand is None:
            # Of a gather output i comes from input i, and the shards of a leaf may vary or agree.
            edges = [] if axis in found.axes else [edges[place.output]]
        elif axis in found.axes:
            varies = bool(found.operand)
        return [_Place(other, output, varies) for other, output in edges if other is not None]

    starts = [] if loss.grad_fn is None else [_Place(loss.grad_fn, loss.output_nr, reduced)]
    for place in walked(starts, behind):
        found = variance_of(place.node)
        if place.node in ends:
            path, leaf = ends[place.node]
            split = leaf.spec.dim_of(axis) is not None
            if split is not place.varies:
                held = "split over" if split else "whole on all ranks of"
                remedy = "fs.psum_invariant of it" if split else "fs.gather or fs.pvary of it first"
                yield Problem(path, f"a leaf that is {held} {axis.name!r}", f"one that {KINDS[place.varies]}: {remedy}")
        elif axis in found.axes and found.result is not place.varies:
            advice = "fs.psum_invariant of a value computed from it" if found.result else "fs.pvary of it first"
            got = f"{found.name} over {axis.name!r}, whose result {KINDS[found.result]}"
            needed = f"one that {KINDS[place.varies]}: {ADVICE.get(found.name, advice)}"
            yield Problem(_line(place.node), got, needed)


def _line(node: Any) -> str:
    """Find the line of the user's program that made a node."""
    frames = [frame for frame in node.metadata.get("stack", []) if is_users_file(frame.filename)]
    if not frames:
        return type(node).__name__
    (text,) = traceback.format_list(frames[-1:])
    return " ".join(text.split())
