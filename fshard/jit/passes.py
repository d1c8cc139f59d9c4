"""Passes over a traced graph: what it may not do, what it need not do, and writing into donated inputs."""

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fshard import _compat, comm, random
from fshard.comm import ops
from fshard.errors import Problem, refuse
from fshard.tree import Axis

aten = torch.ops.aten
# They return what they are given, as far as a graph without autograd can tell.
_NOTHING = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
# Which do nothing where the result looks as before.
_VIEWS = (aten.view.default, aten.slice.Tensor, aten.expand.default)
COPIES = (aten.clone.default, aten.lift_fresh_copy.default)


def roots(graph: Graph) -> dict[Node, frozenset[Node]]:
    """For each node the inputs, constants and copies whose memory its result may be."""
    found: dict[Node, frozenset[Node]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") or node.target in COPIES:
            found[node] = frozenset([node])
        elif node.op == "call_function":
            found[node] = frozenset().union(*(found[given] for given in _aliased(node)))
    return found


def _aliased(node: Node) -> Iterator[Node]:
    """List the nodes that a node's result may share memory with."""
    given = arguments(node)
    if given is None or node.target is _compat.WAIT_TENSOR:
        # Of a list that an operator has returned, or of what was waited for.
        yield from node.all_input_nodes
        return
    for argument, value in given:
        if argument.aliased:
            yield from _nodes(value)


def arguments(node: Node) -> list[tuple[_compat.Argument, Any]] | None:
    """The arguments of an operator with what is given for them."""
    arguments = _compat.arguments_of(node.target)
    if arguments is None:
        return None
    given = (node.args[i] if i < len(node.args) else node.kwargs.get(a.name) for i, a in enumerate(arguments))
    return list(zip(arguments, given, strict=True))


def _nodes(given: Any) -> list[Node]:
    several = given if isinstance(given, list | tuple) else [given]
    return [node for node in several if isinstance(node, Node)]


def written(node: Node) -> list[Node]:
    """What a node writes to."""
    found: list[Node] = []
    for argument, value in arguments(node) or ():
        # Fused optimizers declare that they write to gradients, and do where there is a scale for them.
        if argument.written and not (argument.name == "grads" and node.kwargs.get("grad_scale") is None):
            found += _nodes(value)
    return found


def sent_by(node: Node) -> comm.Collective | None:
    """Return the collective that an operator of a graph starts, if any."""
    return ops.collective_of(node.target, map_arg(node.args, lambda given: given.meta.get("val")))


def refuse_writes(graph: Graph, paths: Sequence[str], donated: Sequence[bool]) -> None:
    """Refuse a graph that writes to inputs which are not donated, or to what the function closes over."""
    inputs = {node: i for i, node in enumerate(placeholders(graph))}
    found = roots(graph)
    problems: dict[str, Problem] = {}
    for node, target in [(writer, target) for writer in graph.nodes for target in written(writer)]:
        for root in found[target]:
            if root.op == "get_attr":
                problems["(closure)"] = Problem(
                    "(closure)", f"{node.target} on a tensor it closes over", "none; pass it"
                )
            elif root in inputs and not donated[inputs[root]]:
                path = paths[inputs[root]]
                problems[path] = Problem(path, f"{node.target} on an argument", "a new tensor, or donate_argnums")
    remedy = "return what is new; a jitted function writes to donated arguments alone"
    refuse("jit: the function writes to tensors", list(problems.values()), remedy)


def refuse_ambient_random(graph: Graph) -> None:
    """Refuse random numbers of no key, which a graph would draw from wherever torch's generator happens to be."""
    keyed, at = False, {}
    for node in graph.nodes:
        if node.target is random.random_state:
            at[node] = keyed
        elif node.target is random.seed:
            keyed = True
        elif node.target is random.set_random_state:
            keyed = at.get(node.args[0], False)
        elif not keyed and (drawing := next(filter(is_random, _with_branches(node)), None)):
            raise ValueError(
                f"jit: expected random numbers with a key, got {drawing.target} without one; pass "
                "model.apply(..., key=...) a key of each step by fs.fold_in(state.key, state.step)"
            )


def _with_branches(node: Node) -> Iterator[Node]:
    """A node, and those of the graphs that it is given, as torch.cond is."""
    yield node
    for given in node.all_input_nodes:
        module = getattr(node.graph.owning_module, str(given.target)) if given.op == "get_attr" else None
        for inner in module.graph.nodes if isinstance(module, GraphModule) else ():
            yield from _with_branches(inner)


def refuse_foreign_collectives(graph: Graph) -> None:
    """Refuse collectives of torch's own, which have no transpose, and whose group a graph cannot hold."""
    for node in graph.nodes:
        name = str(node.target)
        if name.startswith(("c10d.", "_c10d_functional.")) and node.target is not _compat.WAIT_TENSOR:
            raise ValueError(
                f"jit: expected collectives of fshard alone, got {name} of torch.distributed; call fs.psum, "
                "fs.pmean, fs.all_gather or fs.reduce_scatter over an axis of the mesh, or call it outside"
            )


def refuse_hidden_results(graph: Graph) -> None:
    """Refuse oneDNN's recurrent kernel, whose backward needs what its forward keeps out of a trace."""
    if any(str(node.target).startswith("aten.mkldnn_rnn_layer_backward") for node in graph.nodes):
        remedy = "call torch.backends.mkldnn.set_flags(False) first, for eager steps too"
        raise ValueError(f"jit: expected torch's own kernel for nn.LSTM, got oneDNN's, which has no trace; {remedy}")


def refuse_tree_sums(graph: Graph) -> None:
    """Refuse sums="tree" in a graph whose kernels are not torch's own, before it is cleaned."""
    if any("sums" in json.loads(node.args[0]) for node in graph.nodes if node.target is ops.told):
        found = "Inductor's, whose bits depend on what it joins them with"
        remedy = 'take backend="graph", or leave out sums="tree"'
        raise ValueError(f'jit: expected torch\'s own kernels for sums="tree", got {found}; {remedy}')


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers; kernels of attention may, and do not where they drop nothing."""
    tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if not tagged or str(node.target).startswith("fshard."):
        return False
    return not any(argument.name == "dropout_p" and value in (None, 0.0) for argument, value in arguments(node) or ())


class Told(NamedTuple):
    """What decides the collectives of a graph.

    Attributes:
        entries: What its verbs were told, and which leaves they used.
        sent: The axis and the text of each collective.
    """

    entries: Mapping[str, Any]
    sent: Sequence[tuple[Axis, str]]

    def facts(self, axes: Sequence[Axis]) -> Mapping[Axis, str]:
        """Say which facts ranks of each axis compare: stages of a pipeline differ in what they send over other axes."""
        each = {axis: "\n".join(text for other, text in self.sent if other == axis) for axis in axes}
        return {axis: json.dumps({**self.entries, "collectives": each[axis]}) for axis in axes}


def told_in(graph: Graph) -> tuple[Told, str, tuple[Axis, ...]]:
    """Find the facts that decide the collectives of a graph, before it is cleaned.

    Args:
        graph: As it was traced.

    Returns:
        What its verbs were told, which leaves they used and the collectives themselves; what holds before ranks have
        agreed on the leaves that any of them uses; and the axes that collectives are over.
    """
    entries: dict[str, Any] = {comm.VERB: "jit"}
    used: dict[str, Any] = {}
    sent: list[tuple[Axis, str]] = []
    number = 0
    for node in graph.nodes:
        if node.target is ops.told:
            facts = json.loads(node.args[0])
            if verb := facts.pop(comm.VERB, ""):
                entries[comm.VERB] += f"\n{verb}"
            number += 1
            for name, value in facts.items():
                found = used if name == "leaves" else entries
                found[name if found.get(name, value) == value else f"{name} of its verb {number}"] = value
        collective = sent_by(node)
        if collective is not None:
            name, size, group = node.args[-4:-1]
            # Each rank has its own part of an exchange.
            said = (
                "" if collective.op == "all_to_all" else f" of {collective.tensors} tensors, {collective.bytes} bytes"
            )
            text = f"{collective.op} ({collective.label} {collective.unit}) over {name!r}{said}"
            sent.append((Axis(name, size, group), text))
    told = Told({**entries, **used}, sent)
    return told, json.dumps(entries), tuple(dict.fromkeys(axis for axis, _ in sent))


def placeholders(graph: Graph) -> list[Node]:
    """The inputs, in their order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def results(graph: Graph) -> list[Node]:
    """The results, in their order."""
    return list(next(iter(reversed(graph.nodes))).args[0])


def clean(module: GraphModule) -> None:
    """Take out what does nothing, and what nobody uses."""
    graph = module.graph
    stands_for: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.target in _NOTHING or node.target in _VIEWS:
            before = stands_for.get(node.args[0], node.args[0])
            if node.target in _NOTHING or _is_same(before, node):
                stands_for[node] = before
    replace(graph, stands_for)
    graph.eliminate_dead_code(is_impure)


def replace(graph: Graph, stands_for: Mapping[Node, Node]) -> None:
    """Let nodes take the place of others, all at once: a fused optimizer takes every leaf, and is written once."""
    for user in dict.fromkeys(user for node in stands_for for user in node.users):
        user.args = map_arg(user.args, lambda node: stands_for.get(node, node))
        user.kwargs = map_arg(user.kwargs, lambda node: stands_for.get(node, node))
    for node in stands_for:
        graph.erase_node(node)


def is_view(node: Node) -> bool:
    """Whether a node does no more than look at memory in another way, or take one of several results."""
    if node.target is operator.getitem:
        return True
    given = [argument for argument, _ in arguments(node) or ()]
    return any(argument.aliased for argument in given) and not any(argument.written for argument in given)


def is_impure(node: Node) -> bool:
    """Whether a node must stay though nobody uses its result."""
    if node.op in ("placeholder", "output"):
        return True
    # A collective is there for the other ranks too, and must have ended before its buffers go.
    if node.target in (_compat.WAIT_TENSOR, ops.wait, *random.EFFECTS):
        return True
    if node.target is not ops.told and _compat.is_effect(node.target):
        return True
    return any(argument.written for argument, _ in arguments(node) or ())


def _is_same(before_node: Node, after_node: Node) -> bool:
    before, after = before_node.meta["val"], after_node.meta["val"]
    return before.shape == after.shape and before.stride() == after.stride() and before.dtype is after.dtype


def donate(module: GraphModule, pairs: Mapping[int, int]) -> None:
    """Let results be written to inputs, each as soon as nothing needs what was there.

    Args:
        module: The graph.
        pairs: For numbers of donated inputs those of the results that take their place.
    """
    graph, inputs, outs = module.graph, placeholders(module.graph), results(module.graph)
    order: dict[Node, float] = {node: n for n, node in enumerate(graph.nodes)}
    found = roots(graph)
    last = {root: root for root in found if root in found[root]}
    for node, memory in found.items():
        for user in (user for user in node.users if user.op != "output"):
            for root in memory:
                last[root] = max(last[root], user, key=order.__getitem__)
    # Copies that have been taken out, and the inputs that are written to in their place.
    stands_for: dict[Node, Node] = {}
    for i, k in pairs.items():
        given, result = inputs[i], stands_for.get(outs[k], outs[k])
        copied = _written_root(result)
        copied = stands_for.get(copied, copied)
        if copied is given:
            outs[k] = given
            continue
        if copied.target in COPIES and copied.args[0] is given and last[given] is copied:
            # A copy that was made to be written to: the input itself may be.
            last[given], stands_for[copied] = max(last[copied], given, key=order.__getitem__), given
            outs[k] = given
            continue
        if any(stands_for.get(root, root).op != "call_function" for root in found[result]):
            # What lies in another input, or elsewhere in this one, may be overwritten before it is read.
            with graph.inserting_after(result):
                copy = graph.call_function(aten.clone.default, (result,))
            # Nodes are numbered by whole numbers, between which there is room for one that reads.
            copy.meta["val"], order[copy] = result.meta["val"], order[result] + 0.5
            for root in (stands_for.get(root, root) for root in found[result]):
                last[root] = max(last[root], copy, key=order.__getitem__)
            result = copy
        with graph.inserting_after(max(result, last[given], key=order.__getitem__)):
            graph.call_function(aten.copy_.default, (given, result)).meta["val"] = given.meta["val"]
        outs[k] = given
    next(iter(reversed(graph.nodes))).args = (outs,)
    replace(graph, stands_for)
    graph.eliminate_dead_code(is_impure)


def _written_root(node: Node) -> Node:
    """Find the node whose memory operators in place have written to."""
    while True:
        first = next(iter(arguments(node) or ()), None)
        if first is None or not first[0].written or not isinstance(first[1], Node):
            return node
        node = first[1]


def finish_waits(module: GraphModule) -> None:
    """Wait as eager code does, for the backend to let go of its tensors too."""
    for node in module.graph.nodes:
        if node.target is _compat.WAIT_TENSOR:
            node.target = ops.wait
    module.graph.lint()


def constants(module: GraphModule) -> list[torch.Tensor]:
    """The tensors that the function closes over."""
    names = dict.fromkeys(node.target for node in module.graph.nodes if node.op == "get_attr")
    tensors = [getattr(module, str(name)) for name in names]
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
