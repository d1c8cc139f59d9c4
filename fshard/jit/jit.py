"""jit: a function that is traced once for equal arguments, and run as a graph from then on."""

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, count
from types import MethodType
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.collectives import TracedUsage, Usage, agree_on_usage
from fshard.errors import Problem, expect, refuse
from fshard.jit.backends import BACKENDS, Backend, find_in_extensions, prepare
from fshard.jit.donation import assign_donated_outputs, match_donated_outputs, pair_inputs_with_results
from fshard.jit.early_updates import schedule_early_updates
from fshard.jit.facts import Facts, collect_facts
from fshard.jit.graph_pass import GraphPass
from fshard.jit.nodes import find_inputs, find_results
from fshard.jit.passes import fold_views_and_remove_dead_nodes, refuse_ambient_random, refuse_written_inputs
from fshard.jit.signature import Signature, complete_outline, find_changes, make_aval, make_exact, make_outline
from fshard.jit.trace import Traced, replace_abstract, trace
from fshard.reduction_order import refuse_inductor
from fshard.shard import find_copy_target
from fshard.tree import Axis, Exact, Flat, Sharded, attributes_of, flatten, map_nodes, tensor_of, unflatten
from fshard.tree.checks import (
    Range,
    check_axes,
    describe,
    mark_donated,
    refuse_abstract,
    refuse_donated,
    refuse_frozen_counters,
)
from fshard.update import TrainState, check_same_step, pin_params

# A function of the caller that keeps programs from one process to the next. It gets the jitted function, the signature
# of a call and its arguments, before a trace, which may change what it reads. It returns the Program that this rank
# stored before, or None; and a function that stores the one that is traced now, or None if no later process can find
# it. It must not raise, and must not return a program of other code, of other values that the function reads, or of
# other options. Where it cannot tell, it has no program.
ProgramCache = Callable[["Jitted", Signature, Flat], tuple[Any, Callable[[Any], None] | None]]


class Program(NamedTuple):
    """A graph of a function, with what a call of it needs.

    Attributes:
        traced: The graph, and the structure of its arguments and results.
        donated_leaves: The indices of the arguments' leaves that are donated tensors.
        overwritten_leaves: Those of them that something may be written to.
        captures: For each tensor that the function closes over its `_describe_capture` when the function was traced.
        facts: For each axis what ranks compare over it in every call, because it decides the graph's collectives.
        trace_facts: What ranks compare in their first trace, before they agree on the leaves that any of them uses.
        origin: Where it is from, if it was not traced.
        run: A function from the arguments' tensors to the results'; None until the backend has made it.
        guards: Checks whether the tensors of a call look as those of the trace; None where they cannot tell.
    """

    traced: Traced
    donated_leaves: list[int]
    overwritten_leaves: set[int]
    captures: list[tuple[Any, ...]]
    facts: Mapping[Axis, str]
    trace_facts: str
    origin: str = ""
    run: Callable[..., Any] | None = None
    guards: Callable[..., bool] | None = None


class Jitted:
    """A jitted function.

    Attributes:
        traces: For each trace why it was made, the first one first.
        backend: What runs graphs.
        passes: Passes of the caller over them. A copy of the function (`copy.copy`) without passes traces what the
            first of them gets.
        cache: What keeps its programs for later processes, if anything does.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        donate_argnums: Sequence[int],
        static_argnums: Sequence[int],
        static_argnames: Sequence[str],
        backend: Backend,
        passes: Sequence[GraphPass],
        cache: ProgramCache | None = None,
    ) -> None:
        """Nothing is traced yet."""
        functools.update_wrapper(self, f)
        self._f = f
        self._donate_argnums = donate_argnums
        self._static_argnums = static_argnums
        self._static_argnames = static_argnames
        self.backend = backend
        self.passes = passes
        self.cache = cache
        self._programs: dict[Signature, Program] = {}
        # The last call: its signature without what guards compare, and what it ran.
        self._last: tuple[Signature, Program] | None = None
        # Maps the usage that this rank traced to the usage that all ranks agreed on. Empty until the first agreement.
        self._agreed_usage: dict[Usage, Usage] = {}
        self.traces: list[str] = []

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind a method to its object, as a function of Python does. The object is argument 0."""
        return self if instance is None else MethodType(self, instance)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without programs, which are those of this function's passes and captured tensors."""
        return self.__dict__ | {"_programs": {}, "_last": None, "traces": []}

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        with comm.calling("jit", lambda: flatten((args, kwargs)).axes):
            flat = self._flatten(args, kwargs)
            tensors = _find_tensors(flat)
            is_watched = _compat.is_tracing() or _compat.transforms_active() or _compat.sees_programs()
            if is_watched or not _can_trace(tensors):
                return self._f(*args, **kwargs)
            check_axes("jit", flat)
            program = self._find_program(flat, tensors)
            if program.captures:
                _refuse_changed_captures(program, flat)
            comm.check_same_facts("jit", program.facts)
            refuse_frozen_counters("jit", (args, kwargs))
            check_same_step("jit", (args, kwargs))
            with torch.no_grad():
                return _run(program, flat, tensors)

    def find_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Signature, Program, Flat]:
        """Find the signature of a call, its program, which is traced if there is none, and its leaves."""
        flat = self._flatten(args, kwargs)
        signature = complete_outline(make_outline(flat), flat)
        return signature, self._find_program(flat, _find_tensors(flat)), flat

    def trace_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Traced:
        """Trace the function as a call would, up to the graph that its backend is given.

        Ranks do not ask each other here. Where they use different leaves, the graph is that of a call if one was made
        before, and otherwise that of the leaves that this rank uses.
        """
        flat = replace_abstract(self._flatten(args, kwargs))
        usage = TracedUsage()
        program = self._build_program(flat, usage)
        return self._build_for_agreed_usage(program, usage, flat).traced

    def memory(self, /, *args: Any, **kwargs: Any) -> Any:
        """Report the memory of a call over its operators, with and without the passes of the caller. Nothing runs.

        Args:
            *args: Arguments as for a call.
            **kwargs: Its keywords.

        Returns:
            The report. Print it to read what is held at the peak, and what the passes chose.
        """
        return find_in_extensions("MemoryReport")(self, args, kwargs)

    def make_program(self, signature: Signature, flat: Flat) -> Program:
        """Trace the function for a signature that there is no program for."""
        store = None
        if self.cache is not None:
            loaded, store = self.cache(self, signature, flat)
            # A trace may ask other ranks what they use, so all of them load their program or trace.
            if self._agree_to_load(loaded, flat.axes):
                return loaded
        usage = TracedUsage()
        program = self._build_program(flat, usage)
        if not self._agreed_usage:
            # Compare calls first: a rank whose trace failed reports that here and does not take part in the agreement.
            comm.check_same_facts("jit", dict.fromkeys(flat.axes, program.trace_facts))
            self._agreed_usage[usage.used] = agree_on_usage(usage)
        agreed_program = self._build_for_agreed_usage(program, usage, flat)
        # A later process that loads it does not ask other ranks what they use.
        if store is not None and agreed_program is program:
            store(program)
        return agreed_program

    def _agree_to_load(self, program: Program | None, axes: Sequence[Axis]) -> bool:
        """Tell whether all ranks have loaded a program. Later traces ask nobody, so then each rank may do as it can."""
        if self._agreed_usage:
            return program is not None
        # A rank whose call failed reports that here.
        comm.check_same_facts("jit", dict.fromkeys(axes, json.dumps({comm.VERB_FACT: "jit"})))
        digest = None
        if program is not None:
            digest = hashlib.blake2b(program.trace_facts.encode(), digest_size=6).hexdigest()
        label = comm.Label(comm.Verb.AGREE, ("graph in the cache",))
        digest_of_all = comm.merge_objects(digest, lambda some, other: some if some == other else None, axes, label)
        if digest_of_all is None:
            return False
        # It was stored because all leaves that any rank uses were used on this rank.
        self._agreed_usage[()] = ()
        return True

    def _flatten(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Flat:
        """Take the arguments apart. Static ones become leaves that are compared by their values."""
        if self._donate_argnums and max(self._donate_argnums) >= len(args):
            raise ValueError(
                f"jit: donate_argnums={self._donate_argnums} names an argument that this call does not pass by "
                f"position (it passes {len(args)}). Count from 0, and pass donated arguments by position."
            )
        if self._static_argnums:
            remedy = "Pass a hashable value, such as a tuple."
            args = [
                make_exact(arg, f"static argument {i}", remedy) if i in self._static_argnums else arg
                for i, arg in enumerate(args)
            ]
        for name in self._static_argnames:
            if name in kwargs:
                exact = make_exact(kwargs[name], f"static argument {name!r}", "Pass a hashable value, such as a tuple.")
                kwargs = kwargs | {name: exact}
        return flatten((tuple(args), kwargs))

    def _find_program(self, flat: Flat, tensors: Sequence[torch.Tensor]) -> Program:
        """Find the program of a call, or make it."""
        outline = make_outline(flat)
        if self._last is not None:
            last_outline, program = self._last
            if last_outline == outline and program.guards is not None and program.guards(*tensors):
                return program
        refuse_donated("jit", flat)
        refuse_abstract("jit", flat)
        signature = complete_outline(outline, flat)
        if signature not in self._programs:
            earlier = next(reversed(self._programs), None)
            changes = {} if earlier is None else find_changes(earlier, signature, flat.paths)
            _refuse_changed_values(changes, flat)
            program = self.make_program(signature, flat)
            reason = "; ".join(f"{name} {change}" for name, change in changes.items()) or "the first call"
            run = prepare(program.traced.module, self.backend)
            self._programs[signature] = program._replace(run=run, guards=_make_guards(signature, tensors))
            self.traces.append(program.origin or reason)
        program = self._programs[signature]
        self._last = outline, program
        return program

    def _build_for_agreed_usage(self, program: Program, usage: TracedUsage, flat: Flat) -> Program:
        """Trace again if ranks have agreed on other leaves than the trace of a program used.

        A rank that traces again, for example for a batch of another shape, may be the only one. It takes what was
        agreed for the leaves that it used before. Leaves that it did not use before are facts of its graph, and ranks
        that differ in them are named.
        """
        agreed = self._agreed_usage.get(usage.used, usage.used)
        if agreed == usage.used:
            return program
        return self._build_program(flat, TracedUsage(agreed))

    def _build_program(self, flat: Flat, usage: TracedUsage) -> Program:
        """Trace the function, and run all passes over its graph in their order. README.md has the reasons for it."""
        traced = trace(flat, self._f, usage)
        graph = traced.module.graph
        facts = collect_facts(graph, usage)
        if self.backend == "inductor":
            refuse_inductor(facts.of_verbs)
        fold_views_and_remove_dead_nodes(graph)
        result_of_donated_leaf = match_donated_outputs(flat, traced.treedef, self._donate_argnums)
        donated_leaves = []
        path_of_protected_input = {}
        for leaf_index, node in zip(traced.input_leaves, find_inputs(graph), strict=True):
            if leaf_index in result_of_donated_leaf:
                donated_leaves.append(leaf_index)
            else:
                path_of_protected_input[node] = flat.paths[leaf_index]
        refuse_written_inputs(graph, path_of_protected_input)
        refuse_ambient_random(graph)
        donation = pair_inputs_with_results(traced, flat, result_of_donated_leaf)
        # A backend of the user's may not keep the order in which an input is read and written.
        if not callable(self.backend):
            assign_donated_outputs(graph, donation.result_number_of_input)
            schedule_early_updates(graph)
        traced, passed_facts = self._run_passes(traced, facts)
        return Program(
            traced=traced,
            donated_leaves=donated_leaves,
            overwritten_leaves=set(donated_leaves) - donation.unchanged_leaves,
            captures=list(map(_describe_capture, traced.captured)),
            facts=passed_facts.for_each_axis(flat.axes),
            trace_facts=facts.before_agreement(),
        )

    def _run_passes(self, traced: Traced, facts: Facts) -> tuple[Traced, Facts]:
        """Run the passes of the caller over a graph, and add what they decide to its facts."""
        decisions = []
        for graph_pass in self.passes:
            try:
                traced, decision = graph_pass(traced)
                # Before a donated state is gone.
                traced.module.graph.lint()
                list(zip(find_results(traced.module.graph), traced.specs, strict=True))
            except Exception as error:
                raise ValueError(f"jit: the pass {graph_pass.name}: {error}") from error
            decisions.append(f"{graph_pass.name}: {decision}")
        if decisions:
            # A pass may have added collectives.
            facts = collect_facts(traced.module.graph, TracedUsage())._replace(
                of_verbs=facts.of_verbs | {"passes": "\n".join(decisions)}
            )
        return traced, facts


def jit(
    f: Callable[..., Any] | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    backend: Backend = "graph",
    passes: Sequence[GraphPass] = (),
    cache: ProgramCache | None = None,
) -> Any:
    """Trace a function into one graph of operators and collectives, and run that from then on.

    The graph does what the eager function does, in its order: it gathers units ahead of their use and again in the
    backward, reduces gradients as they appear, and updates. The host code in between is gone. The function is traced
    again when structure, specs, shapes, strides, dtypes, devices, bits such as is_conj, `a is b`, modes such as
    autocast, or static values (compared by type and bits) change, and `traces` says why.

    The function runs as it is, without a graph, inside another jitted function, under torch.func, under modes and
    saved-tensor hooks of the caller's, if arguments require a gradient, and for sparse, nested or quantized tensors and
    those of other classes than torch.Tensor and Parameter. Follows jax.jit.

    Args:
        f: A pure function of pytrees of tensors that returns a pytree of tensors. Leave it out to use jit(...) as a
            decorator.
        donate_argnums: Arguments that the caller donates. The part of the result that has the structure of such an
            argument is written in its place, at the same addresses. The old leaves are left empty before the step
            runs, so a state whose step failed is lost too.
        static_argnums: Positions of arguments that are not tensors. They must be hashable, and a new value traces the
            function again. Arguments that a call does not pass by position are left alone.
        static_argnames: Names of such arguments, which a call may pass by keyword or by position.
        backend: "graph" runs the operators one by one, bit for bit as eager code. "inductor" compiles the operators
            between collectives to kernels, which round differently, and leaves collectives, updates and random numbers
            where they are. A function of the torch.fx.GraphModule and its inputs as fake tensors returns what is run
            instead; its results take no argument's memory.
        passes: Hashable functions that map the graph to another graph, such as `fs.fit`, in the order in which they
            run. They get it with the writes to donated arguments in place, and the backend gets what they return. What
            they decide must be the same on every rank, and ranks compare it in every call.
        cache: Keeps graphs for later processes, which then do not trace, such as `fs.graph_cache(directory)`. It needs
            the backend "graph". In the first call ranks agree on whether all of them have the graph.

    Returns:
        The function. Its attribute `traces` lists for each trace why it was made. Its method `memory` reports the
        memory of a call, without running it.

    Raises:
        ValueError: if an argument makes no sense; by the function returned, if the function reads values, returns
            something that is no tensor, draws random numbers without a key, changes a mode of torch such as the default
            dtype, or writes to what is not donated, if a pass fails, or if passes decide differently on other ranks.
        TypeError: by the function returned, if a static argument, or a leaf that is no tensor, cannot be hashed.

    >>> step = jit(lambda x: {"y": x.sin()})
    >>> step(torch.zeros(2)), step(torch.zeros(2)), step.traces
    ({'y': tensor([0., 0.])}, {'y': tensor([0., 0.])}, ['the first call'])
    """
    donated = _read_several(_POSITIONS, "donate_argnums", donate_argnums)
    static_numbers = _read_several(_POSITIONS, "static_argnums", static_argnums)
    static_names = _read_several(_NAMES, "static_argnames", static_argnames)
    expect(
        callable(backend) or backend in BACKENDS, "jit", f"backend to be one of {BACKENDS} or a function", repr(backend)
    )
    are_passes = isinstance(passes, list | tuple) and all(isinstance(graph_pass, GraphPass) for graph_pass in passes)
    expect(are_passes, "jit", "passes to be a tuple of hashable functions of a graph, each with a name", repr(passes))

    if cache is not None:
        is_cache = callable(cache) and not isinstance(cache, type)
        expect(is_cache, "jit", "cache to be one such as fs.graph_cache(directory)", describe(cache))
        expect(backend == "graph", "jit", 'backend to be "graph", whose graphs a cache can keep', repr(backend))

    def make_jitted(f: Callable[..., Any]) -> Jitted:
        expect(callable(f), "jit", "f to be a function", describe(f))
        static = _find_static_positions(f, static_numbers, static_names, donated)
        return Jitted(f, donated, static, static_names, backend, tuple(passes), cache)

    return make_jitted if f is None else make_jitted(f)


def _find_tensors(flat: Flat) -> list[torch.Tensor]:
    """List the tensors of a call in the order of a graph's inputs."""
    return [tensor for tensor in flat.tensors if isinstance(tensor, torch.Tensor)]


def _can_trace(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a trace keeps all of thousands of tensors: of sparse, nested, dual or other ones it keeps too little."""
    is_plain = set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}
    if not is_plain or _compat.any_dual(tensors):
        return False
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.requires_grad or tensor.is_quantized or tensor.is_nested:
            return False
    return True


def _make_guards(signature: Signature, tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Make guards of the tensors of a call; None where these and an outline do not tell all that a signature tells."""
    # A donated tensor is left with the shape (0,), and must not be taken for one that was empty before.
    if signature.same or signature.keys or (0,) in attributes_of(tensors, "shape"):
        return None
    return _compat.guards_of(tensors)


def _refuse_changed_values(changes: Mapping[str, str], flat: Flat) -> None:
    """Refuse leaves such as numbers, which the trace made part of the graph, if they have another value now."""
    problems = []
    for path, leaf in flat.named_leaves:
        # None is part of the structure, and static arguments may change.
        if path in changes and not isinstance(leaf, Exact | torch.Tensor | Sharded | None):
            problems.append(Problem(path, changes[path]))
    remedy = "pass a tensor, or list the argument in static_argnums, which traces once for each value"
    refuse("jit: values that the trace fixed have changed", problems, remedy)


def _describe_capture(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Describe what a graph assumes of a tensor; assigning .data, as Module.to does, counts as no write."""
    return _compat.version(tensor), tensor.requires_grad, *make_aval(tensor)


def _refuse_changed_captures(program: Program, flat: Flat) -> None:
    """Refuse a call after a write to a tensor that the function closes over, or that would donate one."""
    donated = {id(tensor_of(flat.leaves[leaf_index])) for leaf_index in program.donated_leaves}
    for tensor, description in zip(program.traced.captured, program.captures, strict=True):
        if id(tensor) in donated:
            raise ValueError(
                f"jit: the function closes over {describe(tensor)}, which this call donates. Use the argument inside "
                "the function instead."
            )
        if _describe_capture(tensor) != description:
            raise ValueError(
                f"jit: the function closes over {describe(tensor)}, which was modified after the trace, so the graph "
                "may be out of date. Pass it as an argument, such as state.buffers."
            )


def _run(program: Program, flat: Flat, tensors: list[torch.Tensor]) -> Any:
    """Run a graph. Donated arguments are emptied; the results take over their memory."""
    traced = program.traced
    copy_target = find_copy_target(flat.specs)
    if program.overwritten_leaves:
        if copy_target:
            # Gathers of earlier calls may still read what this writes to.
            torch.accelerator.synchronize(copy_target)
        # Something may be written to these, which memory that others hold must not see.
        for n in compress(count(), _compat.share_memory(tensors)):
            if traced.input_leaves[n] in program.overwritten_leaves:
                tensors[n] = _compat.copied_as_it_is(tensors[n])
    # The graph updates a leaf as soon as its gradient is there, while the backward of others goes on. A rank that fails
    # in between has updated other leaves than its peers, so all are lost before the first of them is written to.
    moved = mark_donated([flat.leaves[leaf_index] for leaf_index in program.donated_leaves])
    assert program.run is not None
    outputs = program.run(*[moved.get(id(tensor), tensor) for tensor in tensors])
    leaves = [
        tensor if spec is None else Sharded(tensor, spec) for tensor, spec in zip(outputs, traced.specs, strict=True)
    ]
    results = unflatten(traced.treedef, leaves)
    return map_nodes(pin_params, results, TrainState) if copy_target else results


_POSITIONS = Range(
    "one or more positions of arguments, counted from 0", lambda value: type(value) is int and value >= 0
)
_NAMES = Range("one or more names of arguments", lambda value: isinstance(value, str) and value.isidentifier())


def _read_several(allowed: Range, option: str, value: Any) -> tuple[Any, ...]:
    several = tuple(value) if isinstance(value, list | tuple) else (value,)
    expect(all(map(allowed.allows, several)), "jit", f"{option} to be {allowed.expected}", f"{value!r:.40}")
    return several


def _find_static_positions(
    f: Callable[..., Any], numbers: tuple[int, ...], names: Sequence[str], donated: tuple[int, ...]
) -> tuple[int, ...]:
    """Find the positions of static arguments, and refuse numbers and names of arguments that no call passes."""
    static = [*numbers]
    try:
        parameters = inspect.signature(f, follow_wrapped=False).parameters
    except ValueError:
        # Functions written in C may have no signature.
        parameters = inspect.signature(lambda *args, **kwargs: None).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    positional = [name for name, kind in zip(parameters, kinds, strict=True) if kind < inspect.Parameter.VAR_POSITIONAL]
    for option, positions in (("static", numbers), ("donate", donated)):
        last = max(positions, default=-1)
        if last >= len(positional) and inspect.Parameter.VAR_POSITIONAL not in kinds:
            raise ValueError(
                f"jit: {option}_argnums={positions} names argument {last}, but the function takes {len(positional)} "
                "arguments by position. Count from 0."
            )
    for name in names:
        if name not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ValueError(
                f"jit: static_argnames has {name!r}, but the function takes no argument of this name. Its arguments "
                f"are {', '.join(parameters)}."
            )
        if name in parameters and parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            static.append(positional.index(name))
    for number in donated:
        if number in static:
            raise ValueError(
                f"jit: argument {number} is static and in donate_argnums. A static argument has no memory to donate."
            )
    return tuple(static)
