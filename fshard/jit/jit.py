"""jit: a function traced once for equal arguments, and run as a graph from then on."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.collectives import Used, Uses, agreed_uses
from fshard.errors import Problem, expect, refuse
from fshard.jit.backends import BACKENDS, Backend, ready
from fshard.jit.donation import assign_donated_outputs, match_donated_outputs, pair_inputs_with_results
from fshard.jit.early_updates import schedule_early_updates
from fshard.jit.facts import collect_facts, refuse_tree_sums
from fshard.jit.nodes import find_inputs
from fshard.jit.passes import refuse_ambient_random, refuse_writes, remove_dead_views
from fshard.jit.signature import Signature, changes, exact, outline, signature
from fshard.jit.trace import Traced, trace
from fshard.tree import Axis, Exact, Flat, Sharded, flatten, tensor_of, tensors_of, unflatten
from fshard.tree.checks import check_axes, describe, mark_donated, refuse_donated
from fshard.update import check_same_step


class Program(NamedTuple):
    """A graph of a function.

    Attributes:
        traced: What was traced.
        donated: Leaves that are donated tensors.
        written: Those of them that something may be written to.
        closed: Tensors that the function closes over, and how often they had been written to.
        facts: What decides its collectives, for each axis that ranks compare it over.
        told: The facts that hold before ranks have agreed on the leaves that any of them uses.
        run: Maps the arguments' tensors to the results', once it is ready to run.
    """

    traced: Traced
    donated: list[int]
    written: set[int]
    closed: list[tuple[torch.Tensor, int]]
    facts: Mapping[Axis, str]
    told: str
    run: Callable[..., Any]


class Jitted:
    """A jitted function.

    Attributes:
        traces: For each trace why it was made, the first one first.
        backend: What runs graphs.
    """

    def __init__(self, f: Callable[..., Any], donated: Sequence[int], static: Sequence[int], backend: Backend) -> None:
        """Nothing is traced yet."""
        functools.update_wrapper(self, f)
        self._f, self._donated, self._static, self.backend = f, donated, static, backend
        self._programs: dict[Signature, Program] = {}
        # Of the last call what its graph is found again by: its outline, guards that compare tensors, and the graph.
        self._last: tuple[Signature, Callable[..., bool], Program] | None = None
        # For what this rank's traces have used, what those of all ranks do.
        self._uses: dict[Used, Used] = {}
        self.traces: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        with comm.calling("jit", lambda: flatten((args, kwargs)).axes):
            flat = self._flat(args, kwargs)
            if _compat.is_tracing() or _compat.transforms_active() or _compat.sees_programs():
                return self._f(*args, **kwargs)
            tensors = [tensor for tensor in tensors_of(flat.leaves) if isinstance(tensor, torch.Tensor)]
            # Of sparse and quantized ones a trace keeps too little.
            if any(x.requires_grad or x.layout is not torch.strided or x.is_quantized for x in tensors):
                return self._f(*args, **kwargs)
            check_axes("jit", flat)
            program = self._program(flat, tensors)
            if program.closed:
                _check_closed(program, flat)
            comm.same_call("jit", list(program.facts), program.facts)
            check_same_step("jit", (args, kwargs))
            with torch.no_grad():
                return _run(program, flat, tensors)

    def found_for(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Signature, Program, Flat]:
        """Find the graph of a call, or trace it, with what it is found by."""
        flat = self._flat(args, kwargs)
        tensors = [tensor for tensor in tensors_of(flat.leaves) if isinstance(tensor, torch.Tensor)]
        return signature(outline(flat), flat), self._program(flat, tensors), flat

    def graph_for(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Traced:
        """Trace the function as a call would, up to the graph that its backend is given."""
        return self._graph(self._flat(args, kwargs)).traced

    def _flat(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Flat:
        """Take the arguments apart; static ones are leaves that are compared by their values."""
        found = f"{self._donated} in a call with {len(args)}"
        needed = "donate_argnums to be numbers of arguments by position"
        expect(max(self._donated, default=-1) < len(args), "jit", needed, found, "count from 0")
        given = [exact(arg) if i in self._static else arg for i, arg in enumerate(args)]
        return flatten((tuple(given), kwargs))

    def _program(self, flat: Flat, tensors: Sequence[torch.Tensor]) -> Program:
        """Find the graph of a call, or trace it."""
        asked, last = outline(flat), self._last
        if last is not None and last[0] == asked and last[1](*tensors):
            return last[2]
        refuse_donated("jit", flat)
        key = signature(asked, flat)
        if key not in self._programs:
            program = self.program_for(key, flat)
            self._programs[key] = program._replace(run=ready(program.traced.graph, self.backend))
        program = self._programs[key]
        # Guards do not compare these; and donated tensors have this shape.
        tells = not (key.same or key.keys or any(tensor.shape == (0,) for tensor in tensors))
        self._last = (asked, _compat.guards_of(tensors), program) if tells else None
        return program

    def program_for(self, key: Signature, flat: Flat) -> Program:
        """Trace a graph for a signature that there is none for."""
        before = next(reversed(self._programs), None)
        found = {} if before is None else changes(before, key, flat.paths)
        problems = [
            Problem(path, "{1}, a leaf that is no tensor and was {0} before".format(*found[path]), "a tensor")
            for path, leaf in zip(flat.paths, flat.leaves, strict=True)
            if path in found and not isinstance(leaf, Exact)
        ]
        remedy = "pass tensors, which may change, or make it a static argument: each value has its own trace"
        refuse("jit: leaves that are part of the graph have changed", problems, remedy)
        why = "; ".join(f"{name} was {old} and is {new}" for name, (old, new) in found.items())
        uses = Uses()
        program = self._graph(flat, uses)
        agreed = self._agreed(uses, program.told, flat.axes)
        if agreed != uses.used:
            program = self._graph(flat, Uses(agreed))
        self.traces.append(why if self._programs else "the first call")
        return program

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

    def _graph(self, flat: Flat, uses: Uses | None = None) -> Program:
        traced = trace(flat, self._f, uses)
        graph = traced.graph.graph
        facts = collect_facts(graph)
        refuse_tree_sums(facts, self.backend)
        remove_dead_views(graph)
        matches = match_donated_outputs(flat, traced.treedef, self._donated)
        inputs = dict(zip(traced.inputs, find_inputs(graph), strict=True))
        refuse_writes(graph, {node: flat.paths[leaf] for leaf, node in inputs.items() if leaf not in matches})
        refuse_ambient_random(graph)
        donation = pair_inputs_with_results(traced, flat, matches)
        # A backend of the user's may not keep the order in which an input is read and written.
        if not callable(self.backend):
            assign_donated_outputs(graph, donation.results)
            schedule_early_updates(graph)
        donated = [leaf for leaf in inputs if leaf in matches]
        written = {*donated} - donation.unchanged
        closed = [(tensor, _compat.version(tensor)) for tensor in traced.closed]
        compared = facts.for_each_axis(flat.axes)
        return Program(traced, donated, written, closed, compared, facts.before_agreement(), traced.graph)


def jit(
    f: Callable[..., Any] | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
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
            argument is written in its place, at the same addresses. The old leaves are left empty before the step
            runs, so a state whose step failed is lost too.
        static_argnums: Arguments by position that are no tensors and may change; the function is traced for each value.
        backend: "graph" runs the operators one by one, bit for bit as eager code. "inductor" compiles those between
            collectives to kernels, which round otherwise, and leaves collectives, updates and random numbers where they
            are. A function of the torch.fx.GraphModule and its inputs as fake tensors returns what is run in its place;
            its results take no argument's memory.

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
    known = callable(backend) or backend in BACKENDS
    expect(known, "jit", f"backend to be one of {BACKENDS} or a function", repr(backend))
    expect(f is None or callable(f), "jit", "f to be a function", describe(f))

    make = functools.partial(Jitted, donated=donated, static=static, backend=backend)
    return make if f is None else make(f)


def _run(program: Program, flat: Flat, tensors: list[torch.Tensor]) -> Any:
    """Run a graph; the results that are donated tensors belong to the caller, and the arguments are left empty."""
    traced = program.traced
    if program.written:
        others = zip(traced.inputs, _compat.share_memory(tensors), strict=True)
        for n in [n for n, (i, shared) in enumerate(others) if shared and i in program.written]:
            tensors[n] = _compat.copied_as_it_is(tensors[n])
    # The graph updates a leaf as soon as its gradient is there, while the backward of others goes on. A rank that fails
    # in between has updated other leaves than its peers, so all are lost before the first of them is written to.
    moved = mark_donated([flat.leaves[i] for i in program.donated])
    outputs = program.run(*[moved.get(id(tensor), tensor) for tensor in tensors])
    leaves = [
        tensor if spec is None else Sharded(tensor, spec) for tensor, spec in zip(outputs, traced.specs, strict=True)
    ]
    return unflatten(traced.treedef, leaves)


def _check_closed(program: Program, flat: Flat) -> None:
    """Refuse a call after a write to a tensor that the function closes over, or that would donate one."""
    donated = {id(tensor_of(flat.leaves[i])) for i in program.donated}
    for tensor, version in program.closed:
        alone = _compat.version(tensor) == version and id(tensor) not in donated
        needed, found = "nothing written to what the function closes over", f"a write to {describe(tensor)}"
        expect(alone, "jit", needed, found, "pass it as an argument alone, such as state.buffers")


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
    fit = all(type(n) is int and n >= 0 for n in numbers)
    expect(fit, "jit", f"{name}_argnums to be numbers of arguments by position, from 0", repr(value))
    return numbers
