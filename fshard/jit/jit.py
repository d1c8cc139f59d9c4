"""jit: a function traced once for equal arguments, and run as a graph from then on."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.collectives import Used, Uses, agreed_uses
from fshard.errors import Problem, expect, refuse
from fshard.jit.backends import BACKENDS, Backend, ready, writes_in_place
from fshard.jit.donation import argument_of, mark_donated, pairs_of, refuse_closed, refuse_shared, write
from fshard.jit.early import update_early
from fshard.jit.passes import (
    Told,
    clean,
    donate,
    refuse_ambient_random,
    refuse_foreign_collectives,
    refuse_hidden_results,
    refuse_tree_sums,
    refuse_writes,
    told_in,
)
from fshard.jit.signature import (
    Known,
    Signature,
    changed_values,
    changes,
    flat_arguments,
    signature,
    unhashable,
)
from fshard.jit.trace import Traced, trace
from fshard.tree import Axis, Flat, Sharded, unflatten
from fshard.tree.checks import check_axes, describe, refuse_donated

# Leaves that hold a tensor.
_HELD = (Sharded, torch.Tensor)


class _Program(NamedTuple):
    """A graph that is ready to run.

    Attributes:
        traced: What was traced.
        run: Maps the arguments' tensors to the results'.
        donated: Inputs that are donated.
        pairs: For donated inputs the results that are written in their place.
        written: Those of them that something is written to.
        passed: For donated inputs that nothing is written to the results that they are themselves.
        in_place: Whether the graph writes them there itself.
        closed: Tensors that the function closes over, and how often they had been written to.
        facts: What decides its collectives, for each axis that ranks compare it over.
    """

    traced: Traced
    run: Callable[..., Any]
    donated: list[int]
    written: list[int]
    pairs: dict[int, int]
    passed: dict[int, int]
    in_place: bool
    closed: list[tuple[torch.Tensor, int]]
    facts: Mapping[Axis, str]


class Jitted:
    """A jitted function.

    Attributes:
        traces: For each trace why it was made, the first one first.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        donate_argnums: Sequence[int],
        static_argnums: Sequence[int],
        static_argnames: Sequence[str],
        backend: Backend,
    ) -> None:
        """Nothing is traced yet."""
        functools.update_wrapper(self, f)
        parameters = _parameters(f)
        open_ended = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)
        if unknown := sorted(set(static_argnames) - {p.name for p in parameters}) * (not open_ended):
            raise ValueError(f"jit: expected static_argnames to be names of the function's arguments, got {unknown}")
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._f, self._donated, self._backend, self._positional = f, donate_argnums, backend, len(names)
        self._static = static_argnums or [i for i, name in enumerate(names) if name in static_argnames]
        self._names = static_argnames or [names[i] for i in static_argnums if i < len(names)]
        self._programs: dict[Signature, _Program] = {}
        self._last: tuple[Known, _Program] | None = None
        # For what this rank's traces have used, what those of all ranks do.
        self._uses: dict[Used, Used] = {}
        # Whether a trace has asked where tensors begin in their storage.
        self._offsets = False
        self.traces: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        with comm.calling("jit", lambda: _axes_of(flat_arguments(args, kwargs, self._static, self._names))):
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for name, numbers in (("donate", self._donated), ("static", self._static)):
            if beyond := [n for n in numbers if n >= max(len(args), self._positional)]:
                found = f"{beyond[0]} in a call with {len(args)}; count from 0, and pass such arguments by position"
                raise ValueError(f"jit: expected {name}_argnums to be numbers of arguments by position, got {found}")
        flat = flat_arguments(args, kwargs, self._static, self._names)
        leaves = [leaf for leaf in flat.leaves if isinstance(leaf, _HELD)]
        tensors = [leaf.local if isinstance(leaf, Sharded) else leaf for leaf in leaves]
        if _compat.is_tracing() or _compat.transforms_active() or _compat.sees_programs():
            return self._f(*args, **kwargs)
        static = [(f"{i}", args[i]) for i in self._static if i < len(args)]
        static += [(name, kwargs[name]) for name in self._names if name in kwargs]
        program = self._last_program(flat, tensors, static)
        if program is None:
            if _runs_inline(tensors):
                return self._f(*args, **kwargs)
            program = self._program(flat, tensors, args, kwargs, static)
        self._check_closed(program, flat, tensors)
        comm.same_call("jit", list(program.facts), program.facts)
        with torch.no_grad():
            shared = _compat.share_memory([tensors[i] for i in program.written])
            # Such as what fs.gather returned for a leaf that ranks hold whole.
            copies = {
                i: _compat.copied_as_it_is(tensors[i])
                for i, others in zip(program.written, shared, strict=True)
                if others
            }
            for i, copy in copies.items():
                tensors[i] = copy
            outputs = list(program.run(*tensors))
            if not program.in_place:
                write(program.pairs, tensors, outputs)
            taken = program.pairs | program.passed
            for k in taken.values():
                outputs[k] = None
            for (i, k), kept in zip(taken.items(), mark_donated([leaves[i] for i in taken]), strict=True):
                outputs[k] = copies.get(i, kept)
        return _assembled(program.traced, outputs)

    def _last_program(
        self, flat: Flat, tensors: Sequence[torch.Tensor], static: Sequence[tuple[str, Any]]
    ) -> _Program | None:
        """The graph of the last call, if it is that of this one too."""
        if self._last is None:
            return None
        known, program = self._last
        # Values that cannot be hashed are named where the signature is computed.
        with suppress(TypeError):
            return program if known.covers(flat, tensors, static) else None
        return None

    def _program(
        self,
        flat: Flat,
        tensors: Sequence[torch.Tensor],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        static: Sequence[tuple[str, Any]],
    ) -> _Program:
        """Find the graph of a call, or trace it."""
        refuse_donated("jit", flat)
        check_axes("jit", flat)
        try:
            asked = signature(flat, tensors, static, self._offsets)
            program = self._programs.get(asked)
        except TypeError:
            raise unhashable(static, flat) from None
        if program is None:
            program = self._traced(asked, flat, args, kwargs)
            if program.traced.offsets and not self._offsets:
                self._offsets, asked = True, signature(flat, tensors, static, True)
            self._programs[asked] = program
        if self._donated:
            refuse_shared(flat, self._donated, program.passed)
        self._last = Known(asked, flat, tensors), program
        return program

    def _check_closed(self, program: _Program, flat: Flat, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse a call after a write to a tensor that the function closes over, or that would donate one."""
        reached = {id(tensor) for tensor, _ in program.closed}
        if reached and any(id(tensors[i]) in reached for i in program.donated):
            refuse_closed(flat, self._donated, reached)
        for tensor, version in program.closed:
            if _compat.version(tensor) != version:
                found = f"a write to a {describe(tensor)[2:]} since the trace"
                raise ValueError(
                    f"jit: expected nothing written to what the function closes over, got {found}; pass it as an "
                    "argument"
                )

    def _traced(self, asked: Signature, flat: Flat, args: Sequence[Any], kwargs: dict[str, Any]) -> _Program:
        if self._programs:
            before = next(reversed(self._programs))
            problems = [
                Problem(path, f"{b!r}, a leaf that is no tensor and was {a!r} before", "a tensor")
                for path, a, b in changed_values(before, asked, flat)
            ]
            remedy = "pass tensors, which may change, or make it a static argument: each value has its own trace"
            refuse("jit: leaves that are part of the graph have changed", problems, remedy)
            why = "; ".join(changes(before, asked, flat.paths))
        else:
            why = "the first call"

        uses = Uses()
        traced, pairs, passed, said, told, sent_over = self._graph(flat, args, kwargs, uses)
        agreed = self._agreed(uses, told, _axes_of(flat))
        if agreed != uses.used:
            traced, pairs, passed, said, _, sent_over = self._graph(flat, args, kwargs, Uses(agreed))
        closed = [(tensor, _compat.version(tensor)) for tensor in traced.closed]
        run = ready(traced.graph, self._backend)
        self.traces.append(why)
        # A rank whose trace fails knows the axes of its arguments alone.
        axes = _axes_of(flat) or sent_over
        donated = [i for i, path in enumerate(traced.paths) if argument_of(path) in self._donated]
        in_place = writes_in_place(self._backend)
        written = [i for i in donated if i not in passed]
        return _Program(traced, run, donated, written, pairs, passed, in_place, closed, said.facts(axes))

    def _agreed(self, uses: Uses, told: str, axes: Sequence[Axis]) -> Used:
        """Which leaves the traces of all ranks use.

        Ranks ask each other in their first trace. One that traces again, as for a batch of another shape, may be the
        only one, and takes what was agreed for the leaves that it used before. Leaves that it did not use before are
        facts of its graph, in which ranks that differ are named.
        """
        if not self._programs:
            # First for failures and other verbs: a rank whose trace has failed says so and asks nothing.
            comm.same_call("jit", axes, dict.fromkeys(axes, told))
            self._uses[uses.used] = agreed_uses(uses)
        return self._uses.get(uses.used, uses.used)

    def graph_for(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Traced:
        """Trace the function as a call would, up to the graph that its backend is given."""
        return self._graph(flat_arguments(args, kwargs, self._static, self._names), args, kwargs)[0]

    def _graph(
        self, flat: Flat, args: Sequence[Any], kwargs: dict[str, Any], uses: Uses | None = None
    ) -> tuple[Traced, dict[int, int], dict[int, int], Told, str, tuple[Axis, ...]]:
        def rebuild(tree: Any) -> Any:
            positional, keywords = tree
            keywords = {name: kwargs[name] if name in self._names else given for name, given in keywords.items()}
            return self._f(*(args[i] if i in self._static else a for i, a in enumerate(positional)), **keywords)

        traced = trace(flat, rebuild, uses=uses)
        refuse_foreign_collectives(traced.graph.graph)
        if self._backend == "inductor":
            refuse_tree_sums(traced.graph.graph)
        said, told, axes = told_in(traced.graph.graph)
        clean(traced.graph)
        donated = [argument_of(path) in self._donated for path in traced.paths]
        refuse_writes(traced.graph.graph, traced.paths, donated)
        refuse_ambient_random(traced.graph.graph)
        refuse_hidden_results(traced.graph.graph)
        pairs, passed = pairs_of(traced, flat, self._donated)
        if writes_in_place(self._backend):
            update_early(traced.graph.graph)
            donate(traced.graph, pairs)
        return traced, pairs, passed, said, told, axes


def jit(
    f: Callable[..., Any] | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    backend: Backend = "graph",
) -> Any:
    """Trace a function into one graph of operators and collectives, and run that from then on.

    The graph holds all that the eager function does, in its order: gathers ahead of their use and again in the
    backward, gradients reduced as they appear, the update; host code between them is gone. It is traced anew where
    structure, specs, shapes, strides, dtypes, devices, bits such as is_conj, `a is b`, modes such as autocast, or
    static values change, by type and bits, and `traces` tells why. Inside another jitted function, under torch.func,
    modes and saved-tensor hooks of the caller's, where arguments require a gradient, and for sparse or quantized
    tensors, the function runs as it is. Follows jax.jit.

    Args:
        f: A pure function of pytrees of tensors, which returns such; None makes a decorator of the other arguments.
        donate_argnums: Arguments that the caller donates: the part of the result that has the structure of such an
            argument is written in its place, at the same addresses, and the old tensors are emptied.
        static_argnums: Arguments that are no tensors and may change; the function is traced for each value.
        static_argnames: The same by name. Of one of the two alone the other follows by the function's signature.
        backend: "graph" runs the operators one by one, bit for bit as eager code. "inductor" compiles those between
            collectives to kernels, which round otherwise, and leaves collectives, updates and random numbers where they
            are. A function of the torch.fx.GraphModule and its inputs as fake tensors returns what is run in its place.

    Returns:
        The function. Its attribute `traces` lists for each trace why it was made.

    Raises:
        ValueError: if an argument makes no sense; by the function returned, if the function looks at values, returns
            what is no tensor, draws random numbers without a key, or writes to what it was not donated.

    >>> step = jit(lambda x: {"y": x.sin()})
    >>> step(torch.zeros(2)), step(torch.zeros(2)), step.traces
    ({'y': tensor([0., 0.])}, {'y': tensor([0., 0.])}, ['the first call'])
    """
    donated, static = _numbers("donate", donate_argnums), _numbers("static", static_argnums)
    names = tuple(static_argnames) if isinstance(static_argnames, list | tuple) else (static_argnames,)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"jit: expected static_argnames to be names of arguments, got {static_argnames!r}")
    if both := sorted(set(donated) & set(static)):
        raise ValueError(f"jit: expected arguments to be donated or static, got {both} as both")
    if not callable(backend) and backend not in BACKENDS:
        raise ValueError(f"jit: expected backend to be one of {BACKENDS} or a function, got {backend!r}")
    if f is None:
        return lambda g: Jitted(g, donated, static, names, backend)
    expect(callable(f), "jit", "f to be a function", describe(f))
    return Jitted(f, donated, static, names, backend)


def _runs_inline(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a function runs as it is, for tensors that are differentiated, or of which a trace keeps too little.

    Such are sparse and quantized ones.
    """
    if any(tensor.layout is not torch.strided or tensor.is_quantized for tensor in tensors):
        return True
    graded = torch.is_grad_enabled()
    return any(tensor.requires_grad and (graded or not tensor.is_leaf) for tensor in tensors)


def _parameters(f: Callable[..., Any]) -> list[inspect.Parameter]:
    """The arguments that a function names, as far as its signature is known."""
    try:
        return list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        return []


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        raise ValueError(f"jit: expected {name}_argnums to be numbers of arguments by position, from 0, got {value!r}")
    return numbers


def _axes_of(flat: Flat) -> tuple[Axis, ...]:
    """The axes of several ranks that Sharded arguments live on."""
    return tuple(axis for axis in flat.axes if axis.size > 1)


def _assembled(traced: Traced, outputs: Sequence[torch.Tensor]) -> Any:
    tensors = iter(outputs)
    leaves = [
        None if out is None else next(tensors) if out is True else Sharded(next(tensors), out) for out in traced.outputs
    ]
    return unflatten(traced.treedef, leaves)
