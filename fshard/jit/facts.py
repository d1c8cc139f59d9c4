"""Facts of a graph: what ranks must have in common, or they would send different things."""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from torch.fx import Graph, Node

from fshard import _compat, comm
from fshard.collectives import TracedUsage
from fshard.comm import ops
from fshard.jit.nodes import find_collective, pair_arguments
from fshard.tree import Axis


class Facts(NamedTuple):
    """What decides the collectives of a graph.

    Attributes:
        of_verbs: What the verbs in it were given, by name: specs, dtypes, `reduce`, which leaves the losses used, and
            what passes of the caller decided.
        axes: The axes that it communicates over.
        collectives: For the group of each of these axes the texts of its collectives, in their order. The name of a
            group identifies an axis: operators of a graph do not hold the type of the axis' devices.
    """

    of_verbs: dict[str, str]
    axes: list[Axis]
    collectives: dict[str, list[str]]

    def for_each_axis(self, axes: Sequence[Axis]) -> dict[Axis, str]:
        """Write as JSON what ranks compare over each axis in every call.

        The collectives are those of the axis: stages of a pipeline differ in what they send over other axes.

        Args:
            axes: The axes of the arguments. If there are any, only these are compared, because a rank whose trace
                failed knows no others.

        Returns:
            The JSON for each of these axes; if there are none, for each axis of the collectives.
        """
        texts = {}
        for axis in axes or self.axes:
            collectives = "\n".join(self.collectives.get(axis.group_name, ()))
            texts[axis] = json.dumps({**self.of_verbs, "collectives": collectives})
        return texts

    def before_agreement(self) -> str:
        """Write as JSON what ranks compare before they agree on the leaves that any of them uses."""
        return json.dumps({name: text for name, text in self.of_verbs.items() if name != "leaves"})


def collect_facts(graph: Graph, usage: TracedUsage) -> Facts:
    """Collect the facts of a graph.

    The operator record_facts only carries facts to this function, so dead-code elimination may drop it afterwards.

    Args:
        graph: The graph as it was traced.
        usage: Which leaves the trace used.

    Returns:
        The facts.

    Raises:
        ValueError: if it has collectives of torch.distributed: they have no transpose, and a graph cannot hold their
            group.
    """
    # The dicts keep the order in which values appear, each of them once.
    of_verbs: dict[str, dict[str, None]] = {comm.VERB_FACT: {"jit": None}}
    axes: dict[Axis, None] = {}
    collectives = defaultdict[str, list[str]](list)
    for node in graph.nodes:
        collective = find_collective(node)
        if node.target is ops.record_facts:
            for name, value in json.loads(node.args[0]).items():
                of_verbs.setdefault(name, {})[value] = None
        elif collective is not None:
            values = {argument.name: value for argument, value in pair_arguments(node)}
            axis = Axis(values["axis"], values["size"], values["group"])
            axes[axis] = None
            collectives[axis.group_name].append(_describe_collective(collective))
        elif _is_foreign_collective(node):
            raise ValueError(
                f"jit: the function calls torch.distributed's {node.target}, which cannot be part of a graph. Use "
                "fs.psum, fs.pmean, fs.all_gather or fs.reduce_scatter over a mesh axis, or move the call out of the "
                "function."
            )
    if usage.texts:
        of_verbs["leaves"] = dict.fromkeys(usage.texts)
    texts_of_verbs = {name: "\n".join(values) for name, values in of_verbs.items()}
    return Facts(texts_of_verbs, list(axes), dict(collectives))


def _describe_collective(collective: comm.Collective) -> str:
    text = f"{collective.op} ({collective.label} {collective.unit}) over {collective.axis!r}"
    # In an all-to-all each rank may send a different amount, so sizes are not compared.
    if collective.op == "all_to_all":
        return text
    return f"{text} of {collective.tensors} tensors, {collective.bytes} bytes"


def _is_foreign_collective(node: Node) -> bool:
    """Whether an operator is torch's own for a collective; fshard's waits use one of them too."""
    namespace = getattr(node.target, "namespace", "")
    return namespace in ("c10d", "_c10d_functional") and node.target is not _compat.WAIT_TENSOR
