"""remat: compute again in the backward rather than keep what a function saves."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from fshard import _compat, random
from fshard.errors import expect
from fshard.tree import Tree, tree_leaves, tree_map
from fshard.tree.checks import describe, is_differentiable

Flat = Callable[..., tuple[torch.Tensor, ...]]

# Stands for a tensor in a structure.
_PLACE = object()


def remat(f: Callable[..., Any], *, save: Sequence[str] = ()) -> Callable[..., Any]:
    """Keep a function's arguments instead of what it computes on the way, and run it again in the backward.

    With `fs.gather` inside, full tensors are dropped after the forward and gathered again in the backward, under
    torch.func too. Follows jax.checkpoint; outside torch.func it is torch.utils.checkpoint.

    Args:
        f: A function of pytrees of tensors; under torch.func it must take everything that is differentiated as an
            argument. torch's CPU generator draws again what it drew.
        save: Operators whose results are kept and not computed again, as `fs.make_graph` names them: ("aten.topk",)
            keeps the choice of a mixture's experts, which rounding may change. Then torch takes first derivatives in
            reverse mode alone, and under torch.func of no remat inside another.

    Returns:
        A function of the same arguments and result.

    Raises:
        ValueError: if `save` is no list of names of operators; by the function returned, under torch.func, if `f`
            reaches a tensor that is differentiated otherwise than by its arguments.

    >>> torch.func.grad(remat(lambda x: x.sin().sum()))(torch.zeros(2))
    tensor([1., 1.])
    """
    named = isinstance(save, list | tuple) and all(isinstance(name, str) and "." in name for name in save)
    kept = [attrgetter(name)(torch.ops) for name in save] if named else []
    expect(named and all(map(callable, kept)), "remat", 'save to be names as ["aten.topk"]', f"{save!r:.40}")

    def saves(_: Any, op: Any, *__: Any, **___: Any) -> bool:
        return op in kept or getattr(op, "overloadpacket", None) in kept

    contexts = partial(create_selective_checkpoint_contexts, saves) if save else noop_context_fn
    honor_hooks = _compat.honor_saved_tensor_hooks() if save else {}

    def run(*args: Any, **kwargs: Any) -> Any:
        if not _compat.transforms_active():
            whole = _recomputed_whole_where_needed(f)
            return checkpoint(whole, *args, use_reentrant=False, context_fn=contexts, **honor_hooks, **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        structure: list[Tree] = []

        def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = iter(tensors)
            again_args, again_kwargs = tree_map(
                lambda leaf: next(given) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
            )
            out = f(*again_args, **again_kwargs)
            structure[:] = [tree_map(lambda leaf: _PLACE if isinstance(leaf, torch.Tensor) else leaf, out)]
            return tuple(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))

        state, (first, later) = _random_state(), contexts()

        def once(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with first:
                return flat(*tensors)

        def again(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with _drawing_from(state), later:
                return flat(*tensors)

        outputs = iter(_Remat.apply(once, again, *leaves))
        return tree_map(lambda leaf: next(outputs) if leaf is _PLACE else leaf, structure[0])

    return run


def _recomputed_whole_where_needed(f: Callable[..., Any]) -> Callable[..., Any]:
    """Let a checkpoint compute all of `f` again if an operator of it fills a tensor that autograd has saved already.

    A checkpoint stops its recomputation as soon as autograd has saved as many tensors as in the forward. If the last
    one is the noise of an RReLU, that is before the operator has filled it, and the backward would read memory without
    values. One more tensor is then saved behind `f`. Elsewhere the early stop spares the last operator, in a block of
    a transformer a product of matrices.
    """
    decided: list[bool] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        begin = _compat.next_sequence_number()
        out = f(*args, **kwargs)
        # The recomputation does what the forward did.
        if not decided:
            tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            decided.append(_compat.fills_what_it_saved(tensors, begin))
        if decided[0]:
            torch.ones((), requires_grad=True).square()
        return out

    return run


def _random_state() -> torch.Tensor:
    """Return the state of torch's CPU generator; in a trace, which has no values, by an operator of its graph."""
    return _compat.plain(random.random_state() if _compat.is_tracing() else torch.get_rng_state())


@contextmanager
def _drawing_from(state: torch.Tensor) -> Iterator[None]:
    """Let torch's CPU generator draw what it drew from a state on, and put its own state back."""
    if not _compat.is_tracing():
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(state)
            yield
        return
    before = _random_state()
    random.set_random_state(state)
    yield
    random.set_random_state(before)


class _ArgumentsOnly(TorchFunctionMode):
    """Refuses operations on tensors that are differentiated and were not passed: their gradients would be lost."""

    def __init__(self, passed: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.passed = {id(tensor) for tensor in passed}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Below a transform of f's own everything is wrapped.
        for tensor in () if _compat.transforms_active() else tree_leaves((args, kwargs or {})):
            # What is on the meta device has no gradient to lose, such as a module's copy without values.
            if not isinstance(tensor, torch.Tensor) or id(tensor) in self.passed or tensor.is_meta:
                continue
            if _compat.is_transformed(tensor) or (tensor.requires_grad and not torch.is_grad_enabled()):
                found = f"{describe(tensor)} that f reaches otherwise"
                raise ValueError(
                    f"remat: expected all that is differentiated among the arguments of f, got {found}; pass it "
                    "too, or its gradient would be lost"
                )
        return func(*args, **(kwargs or {}))


class _Remat(Function):
    @staticmethod
    def forward(flat: Flat, again: Flat, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with _ArgumentsOnly(tensors):
            out = flat(*tensors)
        return tuple(tensor.detach() if any(tensor is given for given in tensors) else tensor for tensor in out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.again, tensors = inputs[1], inputs[2:]
        ctx.mark_non_differentiable(*(tensor for tensor in output if not is_differentiable(tensor)))
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        trained = [i for i, tensor in enumerate(tensors) if is_differentiable(tensor)]

        def run(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = dict(enumerate(tensors)) | dict(zip(trained, some, strict=True))
            return tuple(tensor for tensor in ctx.again(*given.values()) if is_differentiable(tensor))

        outputs, pull_back, *_ = torch.func.vjp(run, *(tensors[i] for i in trained))
        wanted = [grad for grad in grads if grad is not None and is_differentiable(grad)]
        found = dict(zip(trained, pull_back(tuple(wanted[: len(outputs)])), strict=True))
        return None, None, *map(found.get, range(len(tensors)))

    @staticmethod
    def jvp(ctx: Any, _flat: None, _again: None, *tangents: torch.Tensor | None) -> Any:
        tensors = ctx.saved_tensors
        filled = [torch.zeros_like(x) if t is None else t for x, t in zip(tensors, tangents, strict=True)]
        return torch.func.jvp(ctx.again, tuple(tensors), tuple(filled))[1]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], flat: Flat, again: Flat, *tensors: torch.Tensor) -> Any:
        both = (torch.func.vmap(f, in_dims=in_dims[2:], randomness=info.randomness) for f in (flat, again))
        outputs = _Remat.apply(*both, *tensors)
        return outputs, (0,) * len(outputs)
