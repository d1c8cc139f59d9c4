"""check_varying: find where a local loss uses an invariant value as a varying one, or the other way round."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
    those of tensor parallelism. `psum_invariant` and `all_gather_invariant` turn varying values into invariant ones,
    and `pcast` does the opposite. If one of these is missing, or there is one too many, gradients are wrong, mostly
    without an error. Call this once on every rank, as a test: it runs `f` and walks the whole graph. The rules are
    those of jax.shard_map with check_vma.

    Args:
        f: A local loss as `value_and_grad` takes it: returns a scalar, or (sum, count).
        params: Its parameters, Sharded.
        *args: Further arguments of f.
        has_aux: Whether f returns (loss, aux) instead, as for `value_and_grad`; aux is not checked.
        reduce_over: As for `value_and_grad`.

    Raises:
        AssertionError: with every wrong step, the line that made it, and how to mend it. For a sum that is missing,
            the line is the one that needs it: that of the loss, or of a collective.

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
    reduced_axes = reduction_axes(flat, "check_varying", reduce_over)
    tracked = flat._replace(leaves=[_track(leaf) for leaf in flat.leaves])
    with torch.enable_grad(), setting(LOCATED, True), _RecordingStacks():
        out = f(tracked.unflatten(tracked.leaves), *args)
    loss = out[0] if has_aux else out
    loss = loss[0] if isinstance(loss, tuple) else loss
    problems: list[Problem] = []
    for axis in flat.axes:
        problems += _find_wrong_steps(loss, tracked, axis, varies=axis in reduced_axes)
    remedy = "see the docstrings of psum, psum_invariant and pcast"
    refuse("check_varying: varying and invariant values are mixed", problems, remedy, AssertionError)


class _RecordingStacks(TorchFunctionMode):
    """Records in each node of autograd's graph the stack where it was made, on this thread, as anomaly mode does."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, and record the stack in the nodes of its results."""
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            node: Any = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
            if node is not None:
                node.metadata.setdefault("stack", traceback.extract_stack())
        return result


def _track(leaf: Any) -> Any:
    """Let a leaf that is trained begin a graph of its own; return others as they are."""
    if not isinstance(leaf, fs.Sharded) or leaf.spec.frozen or not leaf.local.is_floating_point():
        return leaf
    return fs.Sharded(leaf.local.detach().requires_grad_(), leaf.spec)


def _find_wrong_steps(loss: torch.Tensor, flat: Any, axis: fs.Axis, varies: bool) -> Iterator[Problem]:
    """Walk the graph from a loss that varies between ranks of an axis, or agrees, back to the leaves."""
    ends = {}
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, fs.Sharded) and leaf.local.requires_grad:
            node = torch.autograd.graph.get_gradient_edge(leaf.local).node
            ends[node] = path, leaf.spec
    starts = [] if loss.grad_fn is None else [Typed(loss.grad_fn, loss.output_nr, varies)]
    return find_mixed(starts, ends, axis, _line_of, locates_missing_sums=True)


def _line_of(node: Any) -> str:
    """Write the line of the user's program that made a node, or the node's class if there is none."""
    frames = [frame for frame in node.metadata.get("stack", []) if is_users_file(frame.filename)]
    if not frames:
        return type(node).__name__
    (text,) = traceback.format_list(frames[-1:])
    return " ".join(text.split())
