"""State that a step forgets: of which it makes a new value, and returns the old one."""

from collections.abc import Iterator

import torch
from torch.fx import Node

from fshard.ext.check.report import Mistake, StepProblem, frames_of
from fshard.ext.check.results import Result
from fshard.extend import graph_nodes


def find_dropped(nodes: list[Node], results: list[Result]) -> Iterator[StepProblem]:
    """Find state of which a new value is made, such as a running mean, while the step returns the old one."""
    kept = {result.node: result for result in results if result.is_state and result.node.op == "placeholder"}
    for node in nodes:
        for target in graph_nodes.find_write_targets(node):
            source = target.args[0] if target.target is torch.ops.aten.clone.default else None
            if isinstance(source, Node) and source in kept:
                text = (
                    "the step makes a new value of this leaf, and returns the old one; put the new one into the state."
                )
                yield StepProblem(Mistake.BUFFER_DIFFERS, "", kept.pop(source).path, frames_of(node), text)
