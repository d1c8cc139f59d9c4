"""linear_call: a linear map of tensors with its transpose, jvp and vmap rule, and the chain of those in one forward."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from fshard import _compat, comm
from fshard.tree import Axis, Tree, tree_leaves, tree_map

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


def count_reduction() -> None:
    """Note that this rank sums a value that varies into one that agrees."""
    comm.of_this_rank(_Running).reductions += 1


def reductions() -> int:
    """Count how often this rank has summed a value that varies into one that agrees."""
    return comm.of_this_rank(_Running).reductions


def on_tree(tree: Tree, fun: LinearMap, transpose: LinearMap, what: str, axis: Axis) -> Tree:
    """Call a collective, a linear map, on all tensors of a tree, in the chain of the call that runs.

    Args:
        tree: The operands.
        fun: As for `linear_call`.
        transpose: As for `linear_call`.
        what: The collective's name.
        axis: The axis that it communicates over.

    Returns:
        The tree of outputs.
    """
    tensors, chain = tree_leaves(tree), comm.of_this_rank(_Running).chain
    plain = all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
    tied = tensors and axis.size > 1 and plain and torch.is_grad_enabled() and not _compat.transforms_active()
    call = partial(chain.call, what, axis) if chain is not None and tied else linear_call
    outputs = iter(call(fun, transpose, tensors))
    return tree_map(lambda _: next(outputs), tree)
