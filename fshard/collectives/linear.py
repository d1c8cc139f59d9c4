"""linear_call: a linear map of tensors with its transpose, jvp and vmap rule.

A `CollectiveTape` ties the collectives of one forward together.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from fshard import _compat, comm
from fshard.errors import refuse
from fshard.tree import Axis, Spec, Tree, flatten, is_sharded, tree_leaves, tree_map
from fshard.tree.checks import check_operands

Tensors = Sequence[torch.Tensor]
LinearMap = Callable[[Tensors], Tensors]
# A map of tensors that communicates; called with axis= and label= too.
Move = Callable[..., Tensors]
# Whether values vary between ranks; of shards, the specs of their leaves, which say it for each axis.
Kind = bool | Sequence[Spec]


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

    def of_transpose(self) -> "Variance":
        """Describe the transpose, whose operands are cotangents of the results."""
        return Variance(f"the transpose of {self.name}", self.axes, operand=self.result, result=self.operand)


# Of a map that does not communicate.
_LOCAL = Variance("", (), operand=False, result=False)


def _varies(kind: Kind, axis: Axis, number: int) -> bool:
    if isinstance(kind, bool):
        return kind
    return kind[number].dim_of(axis) is not None


@dataclass(frozen=True)
class Linear:
    """A linear map on lists of tensors, with its transpose.

    Output i may depend on input i alone, and both maps must leave trailing dims they do not know of alone: vmap puts
    its batch there.

    Attributes:
        run: Maps the tensors to as many outputs.
        transpose: Maps cotangents of the outputs to cotangents of the tensors.
        variance: Which of them vary.
    """

    run: LinearMap
    transpose: LinearMap
    variance: Variance

    def to_transpose(self) -> "Linear":
        """Make the transpose, whose transpose is the map."""
        return Linear(self.transpose, self.run, self.variance.of_transpose())


class _LinearCall(Function):
    @staticmethod
    def forward(linear: Linear, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        operands = {id(tensor) for tensor in tensors}
        outputs = []
        for output in linear.run(tensors):
            # autograd needs a new tensor where a map returns its input, but no copy.
            outputs.append(output.view_as(output) if id(output) in operands else output)
        return tuple(outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.linear = inputs[0]
        ctx.variance = ctx.linear.variance

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        _refuse_own_elements("jacrev", ctx.variance, _compat.outputs_of_jacrev)
        return None, *_LinearCall.apply(ctx.linear.to_transpose(), *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> Any:
        _refuse_own_elements("jacfwd", ctx.variance, _compat.inputs_of_jacfwd)
        return _LinearCall.apply(ctx.linear, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], linear: Linear, *tensors: torch.Tensor) -> Any:
        # The batch dim goes last, so that the dims that the map counts keep their numbers. All tensors get one: which
        # gradients have a batch may depend on a rank's data, and ranks must send the same shapes.
        batches = []
        for tensor, dim in zip(tensors, in_dims[1:], strict=True):
            if dim is None:
                batches.append(tensor.unsqueeze(-1).expand(*tensor.shape, info.batch_size))
            else:
                batches.append(tensor.movedim(dim, -1))
        outputs = _LinearCall.apply(linear, *batches)
        return outputs, tuple(output.dim() - 1 for output in outputs)


def _refuse_own_elements(transform: str, variance: Variance, running: Callable[[], Iterator[Tree]]) -> None:
    """Refuse to differentiate element by element where an element is another one on each rank.

    Args:
        transform: The transform of torch.func that does so.
        variance: That of the collective which cotangents or tangents have come to.
        running: Lists the trees whose elements such transforms, now on the stack, take one by one.

    Raises:
        ValueError: with the path of every leaf that is split over an axis of the collective.
    """
    axes = [axis for axis in variance.axes if axis.size > 1]
    if not axes:
        return

    def misfit(leaf: Any) -> tuple[str, str] | None:
        if not is_sharded(leaf):
            return None
        for axis in axes:
            if leaf.spec.dim_of(axis) is not None:
                return f"one that is split over {axis.name!r}", "a leaf that is replicated"
        return None

    for tree in running():
        refuse(
            f"{transform}: these leaves are sharded, so each rank would differentiate by different elements and the "
            "columns would be added together",
            flatten(tree).problems(misfit),
            "use products with a sharded basis, vmap(lambda v: jvp(gradient, (params,), (v,))[1])(basis), or gather "
            "first and differentiate with respect to full tensors",
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
    if not tensors:
        return []
    return list(_LinearCall.apply(linear, *tensors))


def variance_of(node: Any) -> Variance:
    """Find what varies at a node in autograd's graph: over no axes where no call above made it."""
    variance = getattr(node, "variance", None)
    return variance if isinstance(variance, Variance) else _LOCAL


class _Tie(Function):
    """Tie tensors to a token: where the token is differentiated, so are they, by zeros where nobody uses them."""

    @staticmethod
    def forward(ctx: Any, at_backward: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.at_backward = at_backward
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.at_backward()
        return None, *grads


def is_tie(node: Any) -> bool:
    """Whether a node of autograd's graph ties tensors to a token, which is its last input and output."""
    return hasattr(node, "at_backward")


class CollectiveTape:
    """The collectives of one forward, tied together so that every rank runs their transposes, in reverse order.

    A rank may have no use for what a collective returned, and autograd would leave out its transpose, for which the
    other ranks wait.

    Attributes:
        tokens: The first token, which requires a gradient, and the last one; none until something is tied.
        axes: Those that the collectives communicate over, as keys.
    """

    def __init__(self, at_backward: Callable[[], None]) -> None:
        """Tie nothing yet.

        Args:
            at_backward: Is called by the backward before and after the transpose of each collective on the tape.
        """
        self.tokens: list[torch.Tensor] = []
        self.axes: dict[Axis, None] = {}
        self._at_backward = at_backward

    def tie(self, tensors: Tensors) -> list[torch.Tensor]:
        """Tie tensors that are differentiated to the last token."""
        if not self.tokens:
            self.tokens = [torch.zeros((), requires_grad=True)]
        *outputs, token = _Tie.apply(self._at_backward, *tensors, self.tokens[-1])
        self.tokens[1:] = [token]
        return outputs


# The tape of the call that runs; None where none is differentiated.
TAPE: ContextVar[CollectiveTape | None] = ContextVar("fshard_tape", default=None)
# What is called with the functions, leaves, axes and options of each differentiation before it runs.
OBSERVED: ContextVar[Callable[..., None] | None] = ContextVar("fshard_observed", default=None)
# How often this rank has made a value that agrees of one that varies.
REDUCTIONS: ContextVar[int] = ContextVar("fshard_reductions", default=0)


@contextmanager
def record_on_tape(tape: CollectiveTape | None = None) -> Iterator[CollectiveTape]:
    """Tie the collectives that this rank's function calls inside the context.

    Args:
        tape: What ties them; None makes one.

    Yields:
        The tape. Its first token is an input of the graph, and its last one an output, to be differentiated with zeros.
    """
    tape = tape or CollectiveTape(lambda: None)
    with comm.setting(TAPE, tape):
        yield tape


def run_on_tape(run: Callable[[Tensors], list[torch.Tensor]], tensors: Tensors, axis: Axis) -> list[torch.Tensor]:
    """Call a function that makes one autograd node and communicates over an axis, on the tape of the call, if any."""
    tape = TAPE.get()
    is_differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if tape is None or axis.size == 1 or not is_differentiated or _compat.transforms_active():
        return run(tensors)
    tape.axes[axis] = None
    return tape.tie(run(tape.tie(tensors)))


def collective(
    api_name: str,
    tree: Tree,
    axis: Axis,
    run: Move,
    transpose: Move,
    *,
    dim: int | None = None,
    operand_varies: bool | None = None,
    result_varies: bool = True,
) -> Tree:
    """Call a collective, a linear map, on all tensors of a tree, on the tape of the call that runs.

    Args:
        api_name: Its name, which labels its messages.
        tree: The operands.
        axis: The axis that it communicates over.
        run: Maps tensors to as many outputs.
        transpose: Its transpose; a partial may have another label.
        dim: As for `check_operands`.
        operand_varies: Whether operands vary between ranks; None where they may also agree.
        result_varies: Whether results vary.

    Returns:
        The tree of outputs.
    """
    flat = check_operands(api_name, tree, axis, dim, vary=operand_varies)
    if not result_varies:
        REDUCTIONS.set(REDUCTIONS.get() + 1)
    linear = Linear(
        run=_bind(run, axis, api_name),
        transpose=_bind(transpose, axis, api_name),
        # An operand that may agree is taken as varying: its cotangent is this rank's part.
        variance=Variance(api_name, (axis,), operand=operand_varies is not False, result=result_varies),
    )
    # Tensors of other names may have the same shapes, so the message has to say whose they are.
    has_names = flat.treedef.type not in (None, list, tuple)
    with comm.annotate_collectives((), flat.paths) if has_names else nullcontext():
        outputs = iter(run_on_tape(partial(linear_call, linear), tree_leaves(tree), axis))
    return tree_map(lambda _: next(outputs), tree)


def _bind(move: Move, axis: Axis, label: str) -> LinearMap:
    """Bind a move to an axis, and to a label unless it has one."""
    keywords = {"axis": axis, "label": label, **getattr(move, "keywords", {})}
    return partial(move, **keywords)
