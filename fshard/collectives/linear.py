"""linear_call: a linear map of tensors with its transpose, jvp and vmap rule; custom_call: a map with its own backward.

The chain ties those that one forward calls.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from fshard import _compat, comm
from fshard.errors import expect, refuse
from fshard.tree import Axis, Spec, Tree, flatten, is_sharded, tree_leaves, tree_map
from fshard.tree.checks import check_operands

Tensors = Sequence[torch.Tensor]
LinearMap = Callable[[Tensors], Tensors]
Moves = Callable[..., Tensors]
# Of the operands and of the outputs of a collective.
Varies = tuple[bool | None, bool]
# Whether values vary between ranks; of shards, the specs of their leaves, which say it for each axis.
Kind = bool | Sequence[Spec]
# Maps tensors to outputs, and to what the backward needs: of these it gets the cotangents of the tensors.
Forward = Callable[[Tensors], tuple[Tensors, Tensors]]
Backward = Callable[[Tensors, Tensors], Sequence[torch.Tensor | None]]


class Variance(NamedTuple):
    """Whether the operands and results of a map vary between ranks; checks of a loss read it off the loss's graph.

    Attributes:
        name: The map's name.
        axes: The axes of these ranks.
        operand: Whether operands vary; the specs of leaves where the operands are their shards.
        result: Whether results vary, or the specs of leaves, in the same way.
    """

    name: str
    axes: Sequence[Axis]
    operand: Kind
    result: Kind

    def operand_varies(self, axis: Axis, number: int) -> bool:
        """Whether an operand varies between the ranks of an axis."""
        return _varies(self.operand, axis, number)

    def result_varies(self, axis: Axis, number: int) -> bool:
        """Whether a result varies between the ranks of an axis."""
        return _varies(self.result, axis, number)

    def transposed(self) -> "Variance":
        """Describe the transpose, whose operands are cotangents of the results."""
        return Variance(f"the transpose of {self.name}", self.axes, self.result, self.operand)


def _varies(kind: Kind, axis: Axis, number: int) -> bool:
    return kind if isinstance(kind, bool) else kind[number].dim_of(axis) is not None


@dataclass(frozen=True)
class Linear:
    """A linear map on lists of tensors, with its transpose.

    Output i may depend on input i alone, and both maps must leave trailing dims they do not know of alone: vmap puts
    its batch there.

    Attributes:
        run: Maps the tensors to as many outputs.
        transpose: Maps cotangents of the outputs to cotangents of the tensors.
        variance: Which of them vary; None for a map whose operands and results are alike.
    """

    run: LinearMap
    transpose: LinearMap
    variance: Variance | None = None

    def transposed(self) -> "Linear":
        """Make the transpose, whose transpose is the map."""
        return Linear(self.transpose, self.run, self.variance and self.variance.transposed())


class _LinearCall(Function):
    @staticmethod
    def forward(linear: Linear, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {id(tensor) for tensor in tensors}
        # autograd needs a new tensor where a map returns its input, but no copy.
        return tuple(out.view_as(out) if id(out) in given else out for out in linear.run(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.linear, ctx.variance = inputs[0], inputs[0].variance

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        _refuse_own_elements("jacrev", ctx.variance, _compat.outputs_of_jacrev)
        return None, *_LinearCall.apply(ctx.linear.transposed(), *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> Any:
        _refuse_own_elements("jacfwd", ctx.variance, _compat.inputs_of_jacfwd)
        return _LinearCall.apply(ctx.linear, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], linear: Linear, *tensors: torch.Tensor) -> Any:
        # The batch dim goes last, so that the dims that the map counts keep their numbers. All tensors get one: which
        # gradients have a batch may depend on a rank's data, and ranks must send the same shapes.
        moved = [
            t.unsqueeze(-1).expand(*t.shape, info.batch_size) if d is None else t.movedim(d, -1)
            for t, d in zip(tensors, in_dims[1:], strict=True)
        ]
        outputs = _LinearCall.apply(linear, *moved)
        return outputs, tuple(out.dim() - 1 for out in outputs)


def _refuse_own_elements(transform: str, variance: Variance | None, running: Callable[[], Iterator[Tree]]) -> None:
    """Refuse to differentiate element by element where an element is another one on each rank.

    Args:
        transform: The transform of torch.func that does so.
        variance: That of the collective which cotangents or tangents have come to.
        running: Lists the trees whose elements such transforms, now on the stack, take one by one.

    Raises:
        ValueError: with the path of every leaf that is split over an axis of the collective.
    """
    axes = [axis for axis in variance.axes if axis.size > 1] if variance else []
    if not axes:
        return
    for tree in running():

        def misfit(leaf: Any) -> tuple[str, str] | None:
            split = [axis.name for axis in axes if is_sharded(leaf) and leaf.spec.dim_of(axis) is not None]
            if not split:
                return None
            return f"one that is split over {split[0]!r}", "a leaf that ranks hold whole"

        refuse(
            f"{transform}: each rank would take elements of its own, and columns of all ranks would be added up",
            flatten(tree).problems(misfit),
            "take products with a sharded basis, vmap(lambda v: jvp(gradient, (params,), (v,))[1])(basis), or "
            "differentiate by full tensors, gathered before",
        )


def linear_call(linear: Linear, tensors: Tensors) -> list[torch.Tensor]:
    """Call a linear map on a list of tensors, with its transpose for the backward pass.

    One autograd node for the whole list. Follows jax.custom_derivatives.linear_call.

    Args:
        linear: The map.
        tensors: The operands.

    Returns:
        Its outputs, differentiable to any order in both modes.
    """
    return _located(list(_LinearCall.apply(linear, *tensors)) if tensors else [])


def _located(out: list[torch.Tensor]) -> list[torch.Tensor]:
    node: Any = out[0].grad_fn if out and LOCATED.get() else None
    if node is not None:
        node.metadata["stack"] = traceback.extract_stack()
    return out


class _CustomCall(Function):
    @staticmethod
    def forward(ctx: Any, forward: Forward, given: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.given, ctx.variance = given, given[-1]
        # Graphs that it may make for itself are no part of the caller's.
        # Its name goes with the tags of what it sends: ranks that were told other things wait, and are told how.
        with chained(), comm.concerning((ctx.variance.name,)):
            outputs, saved = forward(tensors)
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        backward, refuse, _ = ctx.given
        refuse(torch.is_grad_enabled() or _compat.transforms_active())
        return None, None, *backward(ctx.saved_tensors, grads)


def custom_call(
    forward: Forward,
    backward: Backward,
    tensors: Tensors,
    what: str,
    axis: Axis,
    *,
    plain: LinearMap | None = None,
    remedy: str = "",
) -> list[torch.Tensor]:
    """Call a function of tensors whose forward and backward both communicate, in the chain of the call that runs.

    Both may call collectives of `comm`, or of this room, and neither is recorded by autograd. One autograd node.
    Operands and outputs vary between the ranks of the axis, as `check_varying` knows.

    Args:
        forward: Maps the tensors to outputs, which are new, and to what is saved for the backward: inputs, outputs or
            others.
        backward: Maps what was saved, and cotangents of the outputs, to cotangents of the tensors; None for zeros.
        tensors: The operands, floating.
        what: The function's name, with all that ranks must have been told alike.
        axis: The axis that it communicates over.
        plain: The same function, made of operations that are differentiable to any order. It is called instead under
            torch.func and with tangents.
        remedy: What the caller can do about the error.

    Returns:
        The outputs.

    Raises:
        ValueError: if more than a first derivative in reverse mode is asked for, but by torch.func with `plain`.
    """

    def refuse(wrong: bool) -> None:
        needed, found = "first derivatives by value_and_grad or backward()", "torch.func, a jvp or a second derivative"
        expect(not wrong, what, needed, found, remedy)

    if _compat.transforms_active() or _compat.any_dual(tensors):
        refuse(plain is None)
        return list(plain(tensors))  # type: ignore[misc]
    call = partial(_CustomCall.apply, forward, (backward, refuse, Variance(what, (axis,), True, True)))
    return in_chain(lambda tensors: _located(list(call(*tensors))), tensors, axis)


def variance_of(node: Any) -> Variance:
    """Find what varies at a node in autograd's graph: over no axes where no call above made it."""
    found = getattr(node, "variance", None)
    return found if isinstance(found, Variance) else Variance("", (), False, False)


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

    def __init__(self, passed: Callable[[], None]) -> None:
        """Nothing is tied yet; the backward calls `passed` before it runs what was called here, and behind it."""
        self.tokens: list[torch.Tensor] = []
        self._passed = passed

    def tied(self, tensors: Tensors) -> list[torch.Tensor]:
        """Tie tensors that are differentiated to the last token."""
        self.tokens = self.tokens or [torch.zeros((), requires_grad=True)]
        *out, token = _Tie.apply(self._passed, *tensors, self.tokens[-1])
        self.tokens[1:] = [token]
        return out


# Ties the collectives of the call that runs.
_chain: ContextVar[Chain | None] = ContextVar("fshard_chain", default=None)
# Whether nodes in autograd's graph keep the stack that made them: torch's anomaly mode belongs to all threads of a
# process, of which each may be a rank.
LOCATED: ContextVar[bool] = ContextVar("fshard_located", default=False)
# How often this rank has summed a value that varies into one that agrees.
REDUCTIONS: ContextVar[int] = ContextVar("fshard_reductions", default=0)


@contextmanager
def chained(chain: Chain | None = None) -> Iterator[Chain]:
    """Tie the collectives that this rank's function calls inside the context.

    Args:
        chain: What ties them; None makes one.

    Yields:
        It: its first token is an input of the graph, and its last one an output, to be differentiated with zeros.
    """
    chain = chain or Chain(lambda: None)
    with comm.setting(_chain, chain):
        yield chain


def in_chain(run: Callable[[Tensors], list[torch.Tensor]], tensors: Tensors, axis: Axis) -> list[torch.Tensor]:
    """Call what makes one autograd node and communicates over an axis, in the chain of the call that runs, if any."""
    chain = _chain.get()
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if chain is None or axis.size == 1 or not differentiated or _compat.transforms_active():
        return run(tensors)
    return chain.tied(run(chain.tied(tensors)))


def collective(
    what: str, tree: Tree, axis: Axis, run: Moves, back: Moves, *, dim: int | None = None, varies: Varies = (None, True)
) -> Tree:
    """Call a collective, a linear map, on all tensors of a tree, in the chain of the call that runs.

    Args:
        what: Its name.
        tree: The operands.
        axis: The axis that it communicates over.
        run: Maps tensors to as many outputs; called with axis= and label= too.
        back: Its transpose, called in the same way; a partial may have another label.
        dim: As for `check_operands`.
        varies: Whether operands vary between ranks, or agree, or None where they may do either; and whether outputs do.

    Returns:
        The tree of outputs.
    """
    operand, result = varies
    check_operands(what, tree, axis, dim, vary=operand)
    keywords = {"axis": axis, "label": what}
    fun, transpose = (partial(f, **(keywords | getattr(f, "keywords", {}))) for f in (run, back))
    linear = Linear(fun, transpose, Variance(what, (axis,), operand is not False, result))
    outputs = iter(in_chain(partial(linear_call, linear), tree_leaves(tree), axis))
    return tree_map(lambda _: next(outputs), tree)
