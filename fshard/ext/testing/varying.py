"""check_varying: find where a local loss uses an invariant value as a varying one, or the other way round."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import fshard as fs
from fshard.extend import (
    LOCATED,
    Problem,
    Typed,
    find_mixed,
    flatten,
    is_users_file,
    reduction_axes,
    refuse,
    setting,
)


def check_varying(
    f: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    reduce_over: fs.Axis | str | Sequence[fs.Axis | str] | None = None,
) -> None:
    """Follow a loss back to the parameters, and refuse each step that mixes varying and invariant values.

    A loss varies between ranks of the axes that batches are split over, and agrees between ranks of other axes, such as
    those of tensor parallelism. `psum_invariant` and `all_gather_invariant` make invariant values of
    varying ones, and `pcast` the other way; with a step of these left out, or one too many, gradients are wrong and
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
      File ...: expected a value that agrees between ranks (use fs.psum_invariant, whose sum agrees), got psum over ...
    To fix: see the docstrings of psum, psum_invariant and pcast.
    """
    flat = flatten(params)
    reduced = reduction_axes(flat, "check_varying", reduce_over)
    leaves = [_tracked(leaf) for leaf in flat.leaves]
    with torch.enable_grad(), setting(LOCATED, True):
        out = f(flat.unflatten(leaves), *args)
    loss = out[0] if has_aux else out
    loss = loss[0] if isinstance(loss, tuple) else loss
    followed = flat._replace(leaves=leaves)
    problems = [problem for axis in flat.axes for problem in _wrong_steps(loss, followed, axis, axis in reduced)]
    remedy = "see the docstrings of psum, psum_invariant and pcast"
    refuse("check_varying: varying and invariant values are mixed", problems, remedy, AssertionError)


def _tracked(leaf: Any) -> Any:
    if not isinstance(leaf, fs.Sharded) or leaf.spec.frozen or not leaf.local.is_floating_point():
        return leaf
    return fs.Sharded(leaf.local.detach().requires_grad_(), leaf.spec)


def _wrong_steps(loss: torch.Tensor, flat: Any, axis: fs.Axis, reduced: bool) -> Iterator[Problem]:
    ends = {
        torch.autograd.graph.get_gradient_edge(leaf.local).node: (path, leaf.spec)
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if isinstance(leaf, fs.Sharded) and leaf.local.requires_grad
    }
    starts = [] if loss.grad_fn is None else [Typed(loss.grad_fn, loss.output_nr, reduced)]
    return find_mixed(starts, ends, axis, _line)


def _line(node: Any) -> str:
    """Find the line of the user's program that made a node."""
    frames = [frame for frame in node.metadata.get("stack", []) if is_users_file(frame.filename)]
    if not frames:
        return type(node).__name__
    (text,) = traceback.format_list(frames[-1:])
    return " ".join(text.split())
