"""linear_call: a linear map of tensors with its transpose, jvp and vmap rule; custom_call: a map with its own backward.

The chain ties those that one forward calls.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from fshard import _compat, comm
from fshard.errors import expect
from fshard.tree import Axis, Tree, tree_leaves, tree_map
from fshard.tree.checks import check_operands

Tensors = Sequence[torch.Tensor]
LinearMap = Callable[[Tensors], Tensors]
# Maps tensors to outputs, and to what the backward needs: of these it gets the cotangents of the tensors.
Forward = Callable[[Tensors], tuple[Tensors, Tensors]]
Backward = Callable[[Tensors, Tensors], Sequence[torch.Tensor | None]]


class Maps(NamedTuple):
    """The maps of a node in autograd's graph that a call below made; most are partials, whose keywords tell more."""

    fun: Callable[..., Any]
    transpose: Callable[..., Any]


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
    return _located(list(_LinearCall.apply(fun, transpose, *tensors)) if tensors else [])


def _located(out: list[torch.Tensor]) -> list[torch.Tensor]:
    node: Any = out[0].grad_fn if out and comm.of_this_rank(_Running).located else None
    if node is not None:
        node.metadata["stack"] = traceback.format_stack()
    return out


class _Custom(NamedTuple):
    """The arguments of `custom_call` that its backward needs; `number` is that of tensors."""

    forward: Forward
    backward: Backward
    plain: LinearMap | None
    what: str
    remedy: str
    number: int

    def check(self, plainly: bool) -> None:
        """Refuse to be called plainly where there is no plain form."""
        needed, found = "first derivatives by value_and_grad or backward()", "torch.func, a jvp or a second derivative"
        expect(not plainly or self.plain is not None, self.what, needed, found, self.remedy)


class _CustomCall(Function):
    @staticmethod
    def forward(ctx: Any, custom: _Custom, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.custom, ctx.maps = custom, Maps(custom.forward, custom.backward)
        # Graphs that it may make for itself are no part of the caller's.
        # Its name goes with the tags of what it sends: ranks that were told other things wait, and are told how.
        with _running_with("chain", None), comm.concerning((custom.what,)):
            outputs, saved = custom.forward(tensors)
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        custom, again = ctx.custom, torch.is_grad_enabled()
        plainly = again or _compat.transforms_active()
        custom.check(plainly)
        if not plainly:
            return None, *custom.backward(ctx.saved_tensors, grads)
        tensors = ctx.saved_tensors[: custom.number]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        with torch.enable_grad():
            outputs = custom.plain(tensors)
            found = torch.autograd.grad(outputs, [tensors[i] for i in wanted], grads, create_graph=again)
        return None, *(found[wanted.index(i)] if i in wanted else None for i in range(custom.number))


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

    Both may call collectives of `comm`, or of this room, and neither is recorded by autograd. One autograd node;
    `check_varying` knows it by the keywords `axis` and `label`, where `forward` is a partial that has them.

    Args:
        forward: Maps the tensors to outputs, which are new, and to what is saved for the backward: inputs, outputs or
            others. With `plain` the tensors are saved first.
        backward: Maps what was saved, and cotangents of the outputs, to cotangents of the tensors; None for zeros.
        tensors: The operands, floating.
        what: The function's name, with all that ranks must have been told alike.
        axis: The axis that it communicates over.
        plain: The same function, made of operations that are differentiable to any order. It is called instead under
            torch.func and with tangents, and again where the backward itself is differentiated.
        remedy: Without `plain`, what the caller can do about the error.

    Returns:
        The outputs.

    Raises:
        ValueError: without `plain`, if more than a first derivative in reverse mode is asked for.
    """
    custom = _Custom(forward, backward, plain, what, remedy, len(tensors))
    plainly = _compat.transforms_active() or _compat.any_dual(tensors)
    custom.check(plainly)
    if plainly:
        assert plain is not None
        return list(plain(tensors))
    return in_chain(lambda tensors: _located(list(_CustomCall.apply(custom, *tensors))), tensors, axis)


def maps_of(node: Any) -> Maps | None:
    """Find the maps of a node in autograd's graph; None where neither call made it."""
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

    def __init__(self, passed: Callable[[], None]) -> None:
        """Nothing is tied yet; the backward calls `passed` before it runs what was called here, and behind it."""
        self.tokens: list[torch.Tensor] = []
        self._passed = passed

    def call(self, run: Callable[[Tensors], list[torch.Tensor]], tensors: Tensors) -> list[torch.Tensor]:
        """Call what makes one autograd node, tied where it is differentiated."""
        differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        return self._tied(run(self._tied(tensors))) if differentiated else run(tensors)

    def _tied(self, tensors: Tensors) -> list[torch.Tensor]:
        self.tokens = self.tokens or [torch.zeros((), requires_grad=True)]
        *out, token = _Tie.apply(self._passed, *tensors, self.tokens[-1])
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


@contextmanager
def chained(chain: Chain | None = None) -> Iterator[Chain]:
    """Tie the collectives that this rank's function calls inside the context.

    Args:
        chain: What ties them; None makes one.

    Yields:
        It: its first token is an input of the graph, and its last one an output, to be differentiated with zeros.
    """
    chain = chain or Chain(lambda: None)
    with _running_with("chain", chain):
        yield chain


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


def collective(
    what: str,
    tree: Tree,
    axis: Axis,
    run: Callable[..., Tensors],
    back: Callable[..., Tensors],
    *,
    dim: int | None = None,
    vary: bool | None = None,
) -> Tree:
    """Call a collective, a linear map, on all tensors of a tree, in the chain of the call that runs.

    Args:
        what: Its name.
        tree: The operands.
        axis: The axis that it communicates over.
        run: Maps tensors to as many outputs: `tuple`, or a function that takes axis= and label= too.
        back: Its transpose. One that does not communicate has label=None, by which checks of graphs know.
        dim: As for `check_operands`.
        vary: As for `check_operands`.

    Returns:
        The tree of outputs.
    """
    check_operands(what, tree, axis, dim, vary=vary)
    fun, transpose = (_told(f, {"axis": axis, "label": what}) for f in (run, back))
    outputs = iter(in_chain(partial(linear_call, fun, transpose), tree_leaves(tree), axis))
    return tree_map(lambda _: next(outputs), tree)


def _told(f: Callable[..., Tensors], keywords: dict[str, Any]) -> LinearMap:
    """Bind keywords to a map, but for those that it has; the identity takes none."""
    return f if f is tuple else partial(f, **{**keywords, **getattr(f, "keywords", {})})


def in_chain(run: Callable[[Tensors], list[torch.Tensor]], tensors: Tensors, axis: Axis) -> list[torch.Tensor]:
    """Call a collective in the chain of the call that runs, if there is one.

    Args:
        run: Calls it.
        tensors: The operands.
        axis: As for `collective`.

    Returns:
        What it returns.
    """
    chain = comm.of_this_rank(_Running).chain
    shared = chain is not None and tensors and axis.size > 1 and not _compat.transforms_active()
    return chain.call(run, tensors) if chain is not None and shared else run(tensors)
