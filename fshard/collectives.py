"""Differentiable collectives on trees, each with its transpose, jvp and vmap rule.

The convention is that of jax.shard_map: inside a local loss, values vary between ranks; psum and pmean of varying
values give varying ones and are their own transposes. `psum_invariant` and `pvary` are the typed pair: the first makes
a value that agrees between ranks, the second hands such a value to each rank's own maths.

Then the objective, a sum of losses by psum_invariant, and the checks that read varying and invariant values off the
graph of a loss. Over 600 lines, because these checks and the objective know the maps of the collectives' nodes.
"""

import json
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import Function

from fshard import _compat, comm
from fshard.checks import (
    check_axes,
    check_dim,
    check_loss,
    check_operands,
    check_reduce,
    check_tensors,
    check_transforms,
    describe,
)
from fshard.errors import Problem, leaf_error
from fshard.tree import Axis, Flat, Spec, Tree, flatten, is_sharded, tree_leaves, tree_map

Tensors = Sequence[torch.Tensor]
LinearMap = Callable[[Tensors], Tensors]


class Maps(NamedTuple):
    """The maps of a node in autograd's graph that `linear_call` made; most are partials, whose keywords tell more."""

    fun: LinearMap
    transpose: LinearMap


class _LinearCall(Function):
    @staticmethod
    def forward(fun: LinearMap, transpose: LinearMap, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {id(tensor) for tensor in tensors}
        # autograd needs a new tensor where fun returns its input, but no copy.
        return tuple(out.view_as(out) if id(out) in given else out for out in fun(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.maps = Maps(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *_LinearCall.apply(ctx.maps.transpose, ctx.maps.fun, *grads)

    @staticmethod
    def jvp(ctx: Any, _fun: None, _transpose: None, *tangents: torch.Tensor) -> Any:
        return _LinearCall.apply(*ctx.maps, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], fun: LinearMap, transpose: LinearMap, *tensors: torch.Tensor) -> Any:
        # The batch dim goes last, so that the dims that fun counts keep their numbers. All tensors get one: which
        # gradients have a batch may depend on a rank's data, and ranks must send the same shapes.
        moved = [
            t.unsqueeze(-1).expand(*t.shape, info.batch_size) if d is None else t.movedim(d, -1)
            for t, d in zip(tensors, in_dims[2:], strict=True)
        ]
        outputs = _LinearCall.apply(fun, transpose, *moved)
        return outputs, tuple(out.dim() - 1 for out in outputs)


def linear_call(fun: LinearMap, transpose: LinearMap, tensors: Tensors) -> list[torch.Tensor]:
    """Call a linear map on a list of tensors, with its transpose for the backward pass.

    One autograd node for the whole list. Output i may depend on input i alone, and both maps must leave trailing dims
    they do not know of alone: vmap puts its batch there. Follows jax.custom_derivatives.linear_call.

    Args:
        fun: Maps the tensors to as many outputs.
        transpose: Maps cotangents of the outputs to cotangents of the tensors.
        tensors: The operands.

    Returns:
        fun's outputs, differentiable to any order in both modes.
    """
    out = list(_LinearCall.apply(fun, transpose, *tensors)) if tensors else []
    if out and comm.of_this_rank(_Running).located and (node := out[0].grad_fn) is not None:
        node.metadata["stack"] = traceback.format_stack()
    return out


def maps_of(node: Any) -> Maps | None:
    """Find the maps of a node in autograd's graph; None where `linear_call` did not make it."""
    maps = getattr(node, "maps", None)
    return maps if isinstance(maps, Maps) else None


def operands(node: Any) -> Sequence[tuple[Any, int]]:
    """List the nodes behind a node in autograd's graph, with their outputs; not what only ties collectives together."""
    edges: Sequence[tuple[Any, int]] = node.next_functions
    return edges[:-1] if hasattr(node, "passed") else edges


class _Tie(Function):
    """Tie tensors to a token: where the token is differentiated, so are they, by zeros where nobody uses them."""

    @staticmethod
    def forward(ctx: Any, passed: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.passed = passed
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.passed()
        return None, *grads


class Chain:
    """The collectives of one forward, tied together so that every rank runs their transposes, in reverse order.

    A rank may have no use for what a collective returned, and autograd would leave out its transpose, for which the
    other ranks wait.

    Attributes:
        tokens: The first token, which requires a gradient, and the last one; none until something is tied.
    """

    def __init__(self, note: Callable[[str, Axis, bool], None], mark: Callable[[], Callable[[], None]]) -> None:
        """Nothing is tied yet.

        Args:
            note: Called with the name of each collective, its axis, and whether it is differentiated.
            mark: Returns what the backward calls before it runs what was called here.
        """
        self.tokens: list[torch.Tensor] = []
        self._note, self._mark = note, mark

    def call(self, what: str, axis: Axis, fun: LinearMap, transpose: LinearMap, tensors: Tensors) -> list[torch.Tensor]:
        """As `linear_call`, tied."""
        differentiated = any(tensor.requires_grad for tensor in tensors)
        self._note(what, axis, differentiated)
        if not differentiated:
            return linear_call(fun, transpose, tensors)
        return self._tied(linear_call(fun, transpose, self._tied(tensors)))

    def _tied(self, tensors: Tensors) -> list[torch.Tensor]:
        self.tokens = self.tokens or [torch.zeros((), requires_grad=True)]
        *out, token = _Tie.apply(self._mark(), *tensors, self.tokens[-1])
        self.tokens[1:] = [token]
        return out


class _Running:
    """State of the collectives that this rank's functions call now.

    Attributes:
        chain: Ties those of a call together, if one runs.
        located: Whether nodes in autograd's graph keep the stack that made them.
        reductions: How often a value that varies has been summed into one that agrees.
    """

    chain: Chain | None = None
    located = False
    reductions = 0


def chained(chain: Chain) -> AbstractContextManager[None]:
    """Tie the collectives that this rank's function calls inside the context.

    Args:
        chain: What ties them.

    Returns:
        The context.
    """
    return _running_with("chain", chain)


def located() -> AbstractContextManager[None]:
    """Let nodes of collectives that this rank's function calls inside the context keep the stack that made them.

    torch's anomaly mode does it for all nodes, but of all threads of a process, of which each may be a rank.

    Returns:
        The context.
    """
    return _running_with("located", True)


@contextmanager
def _running_with(name: str, value: Any) -> Iterator[None]:
    running = comm.of_this_rank(_Running)
    before = getattr(running, name)
    setattr(running, name, value)
    try:
        yield
    finally:
        setattr(running, name, before)


def reductions() -> int:
    """Count how often this rank has summed a value that varies into one that agrees."""
    return comm.of_this_rank(_Running).reductions


def _on_tree(tree: Tree, fun: LinearMap, transpose: LinearMap, what: str, axis: Axis) -> Tree:
    tensors, chain = tree_leaves(tree), comm.of_this_rank(_Running).chain
    plain = all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
    tied = tensors and axis.size > 1 and plain and torch.is_grad_enabled() and not _compat.transforms_active()
    call = partial(chain.call, what, axis) if chain is not None and tied else linear_call
    outputs = iter(call(fun, transpose, tensors))
    return tree_map(lambda _: next(outputs), tree)


def psum(tree: Tree, axis: Axis) -> Tree:
    """Sum each tensor over the ranks of an axis, inside a local loss.

    Its own transpose: where every rank goes on to its own loss, a rank's value reaches all of those losses. Follows
    jax.lax.psum of varying values.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis to sum over.

    Returns:
        The tree of sums, in rank order where the algorithm is direct.
    """
    check_operands("psum", tree, axis, vary=True)
    total = partial(comm.all_reduce, axis=axis, label="psum")
    return _on_tree(tree, total, total, "psum", axis)


def pmean(tree: Tree, axis: Axis) -> Tree:
    """Average each tensor over the ranks of an axis, inside a local loss; see `psum`.

    What ranks differentiate by themselves, as an inner gradient by torch.func.grad, is their own part of its gradient:
    for the mean of such gradients take the pmean of them, or `value_and_grad` inside.

    Args:
        tree: Floating tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis to average over.

    Returns:
        The tree of means.
    """
    check_operands("pmean", tree, axis)
    return tree_map(lambda tensor: tensor / axis.size, psum(tree, axis))


def pvary(tree: Tree, axis: Axis) -> Tree:
    """Hand a value that agrees between ranks to each rank's own maths; its cotangents are summed over the ranks.

    The transpose of `psum_invariant`. Follows jax.lax.pvary.

    Args:
        tree: Tensors that agree between the ranks of `axis`.
        axis: The mesh axis.

    Returns:
        The same values.
    """
    check_operands("pvary", tree, axis, vary=False)
    return _on_tree(tree, tuple, partial(comm.all_reduce, axis=axis, label="pvary"), "pvary", axis)


def psum_invariant(tree: Tree, axis: Axis) -> Tree:
    """Sum over the ranks of an axis into a value that agrees between them, such as an objective.

    The transpose of `pvary`. Follows jax.lax.psum from varying to invariant.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis to sum over.

    Returns:
        The tree of sums.
    """
    check_operands("psum_invariant", tree, axis, vary=True)
    comm.of_this_rank(_Running).reductions += 1
    run = partial(comm.all_reduce, axis=axis, label="psum_invariant")
    return _on_tree(tree, run, tuple, "psum_invariant", axis)


def all_gather(tree: Tree, axis: Axis, dim: int = 0) -> Tree:
    """Concatenate every rank's tensors along a dim; the transpose of `reduce_scatter`.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis to gather over.
        dim: The dim to concatenate along, counted from the front.

    Returns:
        Tensors axis.size times as long along `dim`.
    """
    check_dim("all_gather", dim)
    check_operands("all_gather", tree, axis, dim)
    return _on_tree(tree, _gathering(axis, dim, "all_gather"), _scattering(axis, dim), "all_gather", axis)


def all_gather_invariant(tree: Tree, axis: Axis, dim: int = 0) -> Tree:
    """Concatenate every rank's tensors along a dim into a value that agrees between ranks.

    Its transpose takes this rank's piece of the cotangent, which agrees too. Follows jax.lax.all_gather_invariant.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis to gather over.
        dim: The dim to concatenate along, counted from the front.

    Returns:
        Tensors axis.size times as long along `dim`.
    """
    check_dim("all_gather_invariant", dim)
    check_operands("all_gather_invariant", tree, axis, dim)
    run = _gathering(axis, dim, "all_gather_invariant")
    return _on_tree(tree, run, partial(_own_piece, axis=axis, dim=dim), "all_gather_invariant", axis)


def reduce_scatter(tree: Tree, axis: Axis, dim: int = 0) -> Tree:
    """Sum over ranks and keep this rank's piece of a dim; the transpose of `all_gather`.

    Args:
        tree: Tensors of equal shapes and dtypes on every rank.
        axis: The mesh axis to sum over.
        dim: The dim to split, counted from the front; its size must be a multiple of axis.size.

    Returns:
        Tensors 1 / axis.size as long along `dim`.

    Raises:
        ValueError: if a leaf has no such dim, or it does not divide, with the leaf's path.
    """
    check_dim("reduce_scatter", dim)
    check_operands("reduce_scatter", tree, axis, dim)
    if any(leaf.shape[dim] % axis.size for leaf in tree_leaves(tree)):
        flat = flatten(tree)
        problems = [
            Problem(path, f"size {tensor.shape[dim]} of dim {dim}", f"a multiple of {axis.size}")
            for path, leaf in zip(flat.paths, flat.leaves, strict=True)
            for tensor in tree_leaves(leaf)
            if tensor.shape[dim] % axis.size
        ]
        raise leaf_error(f"reduce_scatter over {axis.name!r}: dims do not divide", problems, "pad the dim")
    return _on_tree(tree, _scattering(axis, dim), _gathering(axis, dim, "all_gather"), "reduce_scatter", axis)


def _gathering(axis: Axis, dim: int, label: str) -> LinearMap:
    return partial(_concatenate, axis=axis, dim=dim, label=label)


def _scattering(axis: Axis, dim: int) -> LinearMap:
    return partial(_scatter, axis=axis, dim=dim, label="reduce_scatter")


def _concatenate(tensors: Tensors, axis: Axis, dim: int, label: str) -> Tensors:
    return [rows.movedim(0, dim).flatten(dim, dim + 1) for rows in comm.all_gather(tensors, axis=axis, label=label)]


def _own_piece(tensors: Tensors, axis: Axis, dim: int) -> Tensors:
    return [tensor.unflatten(dim, (axis.size, -1)).select(dim, comm.rank(axis)).contiguous() for tensor in tensors]


def _scatter(tensors: Tensors, axis: Axis, dim: int, label: str) -> Tensors:
    stacks = [tensor.unflatten(dim, (axis.size, -1)).movedim(dim, 0) for tensor in tensors]
    return comm.reduce_scatter(stacks, axis=axis, label=label)


def reduction_axes(like: Tree, what: str) -> tuple[Axis, ...]:
    """The mesh axes that the gradients of `like` are summed over: those its transforms gather or replicate on.

    Args:
        like: A tree whose leaves are all Sharded, or none; None counts as neither.
        what: The verb that asks, for its error.

    Returns:
        The axes, which are the same for every leaf; none where no leaf is Sharded.

    Raises:
        ValueError: if leaves disagree, or only some are Sharded.
    """
    flat = flatten(like)
    check_axes(what, flat)
    check_transforms(what, flat)
    # Leaves share their transforms: by identity, each is looked at once.
    transforms = {
        id(leaf.spec.transform): (path, leaf.spec.transform)
        for path, leaf in zip(reversed(flat.paths), reversed(flat.leaves), strict=True)
        if is_sharded(leaf)
    }
    if not transforms:
        check_tensors(what, flat)
        return ()
    sharded = {path: transform.axes for path, transform in transforms.values()}
    first = next(path for path, leaf in zip(flat.paths, flat.leaves, strict=True) if is_sharded(leaf))
    needed = sharded[first]
    problems = [
        Problem(path, describe(leaf), f"a Sharded leaf, as {first} is")
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if leaf is not None and not is_sharded(leaf)
    ]
    if problems:
        remedy = "shard the whole tree (fs.ddp keeps leaves whole), or keep other leaves out of the parameters"
        raise leaf_error(f"{what}: plain leaves among Sharded ones", problems, remedy)
    if all(set(axes) == set(needed) for axes in sharded.values()):
        return needed
    names = [axis.name for axis in needed]
    problems = [
        Problem(path, f"axes {[axis.name for axis in found]}", f"{names} of one mesh, as for {first}")
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if is_sharded(leaf) and set(found := leaf.spec.transform.axes) != set(needed)
    ]
    if problems:
        raise leaf_error(f"{what}: leaves are reduced over different axes", problems, "shard the tree on one mesh")
    return needed


Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def objective(loss: Loss, like: Tree, reduce: str = "mean") -> torch.Tensor:
    """Close a local loss into the objective that agrees between ranks.

    `value_and_grad` calls it for you; code under torch.func calls it itself.

    Args:
        loss: This rank's scalar loss; for "weighted" the pair (sum, count).
        like: Parameters, whose specs tell the ranks; of plain tensors alone, this rank by itself.
        reduce: "mean" over ranks, "sum" over ranks, or "weighted": sum of sums divided by the sum of counts.

    Returns:
        The objective, a scalar equal on every rank and differentiable.

    Raises:
        ValueError: if `reduce` is another word, `loss` is not what it asks for, or a leaf of `like` is no tensor.
    """
    check_reduce(reduce, "objective")
    check_loss(loss, reduce, "objective")
    axes = reduction_axes(like, "objective")
    value, count = loss if isinstance(loss, tuple) else (loss, None)
    comm.same_call("objective", axes, flatten(like), reduce=reduce)
    return divided(total(value, axes), denominator(count, axes, reduce))


def total(tree: Tree, axes: Sequence[Axis]) -> Tree:
    """Sum over several mesh axes into values that agree between all their ranks."""
    for axis in axes:
        tree = psum_invariant(tree, axis)
    return tree


# For each call that differentiates, which leaves are used.
Used = tuple[tuple[bool, ...], ...]


class Uses:
    """Which leaves one trace uses, in each of its calls that differentiate.

    Attributes:
        used: What this rank's losses used.
        axes: The axes of each call.
    """

    def __init__(self, agreed: Used = ()) -> None:
        """Nothing is traced yet; `agreed` says what the traces of all ranks use, once they have asked each other."""
        self.used: Used = ()
        self.axes: list[Sequence[Axis]] = []
        self._agreed = agreed

    def take(self, used: list[bool], axes: Sequence[Axis]) -> list[bool]:
        """Note what the next call used on this rank, and return what some rank uses, as far as that is known."""
        agreed = self._agreed[len(self.used)] if self._agreed else used
        self.used, self.axes = (*self.used, tuple(used)), [*self.axes, axes]
        return list(agreed)


def agreed_uses(uses: Uses) -> Used:
    """Ask all ranks which leaves their traces use.

    Args:
        uses: What this rank's trace does.

    Returns:
        What some rank uses, the same on every rank.

    Raises:
        ValueError: on every rank, if their traces differentiate other things.
    """
    used = uses.used
    for axis in dict.fromkeys(axis for axes in uses.axes for axis in axes if axis.size > 1):
        texts = comm.texts(json.dumps(used), axis, comm.Verb.AGREE)
        rows = [json.loads(text) for text in texts]
        if len({tuple(map(len, row)) for row in rows}) > 1:
            found = ", ".join(str([len(call) for call in row]) for row in rows)
            raise ValueError(
                f"jit: ranks of {axis.name!r} differentiate losses of several numbers of leaves: expected the same "
                f"numbers, got {found}; make the same calls of value_and_grad on every rank"
            )
        used = tuple(tuple(map(any, zip(*calls, strict=True))) for calls in zip(*rows, strict=True))
    return used


def closed(
    value: torch.Tensor, paths: Sequence[str], used: list[bool], status: Sequence[bool], axes: Sequence[Axis]
) -> tuple[torch.Tensor, list[bool], list[bool]]:
    """Sum a loss over ranks, and hear with it which leaves any of them used, and how they fared.

    Args:
        value: This rank's loss, outside of any graph.
        paths: The paths of leaves.
        used: For each of them whether this rank used it.
        status: Other facts of this rank.
        axes: The mesh axes.

    Returns:
        The sum, for each leaf whether some rank used it, and for each other fact whether it holds on some rank.
    """
    asked = [axis for axis in axes if axis.size > 1]
    if _compat.is_tracing():
        uses, numbers = _compat.trace_notes().get("uses"), [value]
        used = used if uses is None else uses.take(used, axes)
        said = [f"{path} {'used' if yes else 'unused'}" for path, yes in zip(paths, used, strict=True)]
        comm.ops.told(json.dumps({"leaves": said}))
    else:
        # Between processors where they can, or the host would wait for its accelerator; in the dtype of the loss, so
        # that both can travel in one buffer.
        device = torch.device("cpu") if all(map(comm.serves_host, asked)) else value.device
        numbers = [value, torch.tensor([*used, *status], dtype=value.dtype, device=device)]
    together = [numbers] if numbers[-1].device == value.device else [[number] for number in numbers]
    for axis in asked:
        label = comm.Label(comm.Verb.OBJECTIVE, phase=comm.Phase.END)
        together = [comm.all_reduce(each, axis, label) for each in together]
    numbers = [number for each in together for number in each]
    if not asked or len(numbers) == 1:
        return numbers[0], used, list(status)
    found = [number > 0 for number in numbers[1].tolist()]
    return numbers[0], found[: len(used)], found[len(used) :]


def denominator(count: Any, axes: Sequence[Axis], reduce: str) -> Any:
    """Compute the divisor of summed losses and gradients: 1, the number of ranks, or the sum of counts."""
    if reduce == "weighted":
        # In one dtype whatever a rank counts in, and a wide one; the count is no part of the graph.
        return total(count.detach().to(torch.float64), axes)
    return math.prod(axis.size for axis in axes) if reduce == "mean" else 1


def divided(value: torch.Tensor, divisor: Any) -> torch.Tensor:
    """Divide a sum by its denominator, in the sum's dtype; nothing is computed where that is the number one."""
    return value if isinstance(divisor, int) and divisor == 1 else (value / divisor).to(value.dtype)


Place = TypeVar("Place")


def reduced_over(loss: torch.Tensor, axes: Sequence[Axis]) -> Axis | None:
    """Find an axis that a loss has been summed over already, by `objective` or `psum_invariant`.

    Args:
        loss: A scalar.
        axes: The axes that it will be summed over.

    Returns:
        The first such axis; None where there is none, or it was handed to this rank's own maths again by `pvary`.
    """
    starts = [] if loss.grad_fn is None else [loss.grad_fn]
    nodes = walked(starts, lambda node: _next(node) if _axis_of(node, "transpose", "pvary") is None else ())
    found = (_axis_of(node, "fun", "psum_invariant") for node in nodes)
    return next((axis for axis in found if axis in axes), None)


def refuse_unsummed(
    what: str,
    outputs: Sequence[torch.Tensor],
    leaves: Sequence[tuple[str, Spec, torch.Tensor]],
    sums: Callable[[Any], bool],
) -> None:
    """Refuse leaves that ranks hold whole and a loss reaches past `gather` and `pvary`, where gradients are summed.

    Args:
        what: The verb that runs, for the error.
        outputs: Where the graph of the loss begins.
        leaves: Path, spec and local tensor of each leaf that autograd found a gradient for.
        sums: Tells of a node whether it sums gradients by itself.

    Raises:
        ValueError: with the path of every leaf that some way reaches without a pvary, or a gather, over each such axis.
    """
    ends, needed = {}, {}
    for path, spec, tensor in leaves:
        axes = spec.transform.axes if spec.transform else ()
        agreeing = [axis for axis in axes if axis.size > 1 and spec.dim_of(axis) is None]
        if agreeing:
            ends[torch.autograd.graph.get_gradient_edge(tensor).node], needed[path] = path, agreeing
    if not ends:
        return

    def behind(place: tuple[Any, frozenset[Axis]]) -> list[tuple[Any, frozenset[Axis]]]:
        node, varied = place
        if node in ends or sums(node):
            return []
        varied = varied | _summed_over(node)
        return [(other, varied) for other in _next(node)]

    starts = [(output.grad_fn, frozenset[Axis]()) for output in outputs if output.grad_fn is not None]
    reached = ((ends[node], varied) for node, varied in walked(starts, behind) if node in ends)
    wrong = {path for path, varied in reached if not varied.issuperset(needed[path])}
    problems = [
        Problem(
            path, f"maths on a leaf that ranks of {[axis.name for axis in axes]} hold as one value", "gather or pvary"
        )
        for path, axes in needed.items()
        if path in wrong
    ]
    if problems:
        remedy = "gather these leaves, or hand them to each rank's own maths by fs.pvary, so that gradients are summed"
        raise leaf_error(f"{what}: gradients would stay unsummed", problems, remedy)


def walked(starts: Iterable[Place], behind: Callable[[Place], Iterable[Place]]) -> Iterator[Place]:
    """Walk through a graph, to each place once.

    Args:
        starts: Where to begin.
        behind: Lists the places that come right behind one; called after that one was yielded.

    Yields:
        The places, in no particular order.
    """
    waiting = list(starts)
    seen = set(waiting)
    while waiting:
        place = waiting.pop()
        yield place
        new = dict.fromkeys(other for other in behind(place) if other not in seen)
        seen.update(new)
        waiting.extend(new)


def check_not_reduced(loss: torch.Tensor, axes: Sequence[Axis], what: str) -> None:
    """Refuse a local loss that ranks have summed already, whose gradients would be too small by their number."""
    axis = reduced_over(loss, [axis for axis in axes if axis.size > 1])
    if axis is not None:
        raise ValueError(
            f"{what}: expected the loss to be this rank's own, got one reduced over {axis.name!r} already, by "
            "fs.objective or fs.psum_invariant; return the loss of its batch, which is reduced for you, or sum "
            "parts of it by fs.psum"
        )


def check_agrees(value: torch.Tensor, flat: Flat, axes: Sequence[Axis], what: str) -> None:
    """Refuse an objective that differs between ranks of an axis over which leaves are split and nothing is reduced.

    Args:
        value: The objective.
        flat: The parameters.
        axes: The axes that it was reduced over.
        what: The verb that asks, for its error.

    Raises:
        ValueError: on every rank, with the values of all.
    """
    # By identity: leaves share their axes, which are slow to hash.
    placed = {id(axis): axis for leaf in flat.leaves if is_sharded(leaf) for axis in leaf.spec.axes}
    others = [axis for axis in dict.fromkeys(placed.values()) if axis.size > 1 and axis not in axes]
    if not others or _compat.is_transformed(value) or _compat.is_tracing():
        return
    for axis in others:
        (rows,) = comm.all_gather([value.detach()], axis, comm.Verb.AGREE)
        tolerance = torch.finfo(value.dtype).eps ** 0.5 * rows.abs().amax()
        if (rows - rows[0]).abs().amax() > tolerance:
            found = ", ".join(f"{number:.6g}" for number in rows.tolist())
            raise ValueError(
                f"{what}: expected a loss that agrees between ranks of {axis.name!r}, over which leaves stay split, "
                f"got {found}; sum partial results by fs.psum_invariant before they are used"
            )


def _next(node: Any) -> Iterator[Any]:
    return (behind for behind, _ in operands(node) if behind is not None)


def _summed_over(node: Any) -> frozenset[Axis]:
    """The axes over which a node's backward sums: that of a pvary, or those of a gather under torch.func."""
    if (axis := _axis_of(node, "transpose", "pvary")) is not None:
        return frozenset([axis])
    scatter = _partial(node, "transpose")
    return frozenset(scatter.keywords.get("summed_over", ())) if scatter is not None else frozenset()


def _axis_of(node: Any, side: str, label: str) -> Axis | None:
    """The axis of a collective in a graph, by the label of the map on one side of its linear call."""
    found = _partial(node, side)
    return found.keywords["axis"] if found is not None and found.keywords.get("label") == label else None


def _partial(node: Any, side: str) -> partial[Any] | None:
    """The map on one side of a linear call; None where a node is none, or its map was not made by `partial`."""
    found = getattr(maps_of(node), side, None)
    return found if isinstance(found, partial) else None
