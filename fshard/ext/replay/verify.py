"""verify: runs a step twice, and names the operation that disagrees with itself or between ranks."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from statistics import mode
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fshard import Axis, Sharded, Spec, comm
from fshard.ext.replay.observed_run import draws, run_step, tensors_in
from fshard.ext.replay.operations import OperationReport, Operations, find_start
from fshard.extend import calling, flatten, graph_nodes, hash_of, name_ranks, process_rank

# Where an operator that starts a collective says whether ranks send each other rows, counted from its last argument.
_DIRECT = -5
_ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


def verify(step: Callable[..., Any], *args: Any) -> OperationReport | None:
    """Run a step twice, and find the first operation whose result is not what it should be, bit for bit.

    The graph of the step runs operator by operator. A digest of each result is compared between the two runs, and
    between ranks where they must agree: on replicated leaves, on what is gathered, on the rows of sums over ranks, and
    on what an operation of several ranks computes of equal operands. A difference comes from bad hardware, a race, or a
    kernel that is not deterministic. Of an operation that is wrong in both runs, with operands that no other rank has,
    nothing can tell.

    Both runs draw the same random numbers, and begin with zeros in empty memory. The arguments and the states of
    torch's generators stay as they are.

    Args:
        step: A function that `make_graph` can trace, such as a train step. Of a function of `jit` the function inside
            is run.
        *args: Its arguments.

    Returns:
        None if all agree, else the first disagreement. Print it for a report; it is equal on every rank.

    Raises:
        ValueError: if the step cannot be traced, or ranks make different calls.

    >>> import torch, fshard as fs
    >>> fs.verify(lambda x: x.sin().sum(), torch.ones(3)) is None
    True
    """
    with calling("verify", lambda: flatten(args).axes):
        operations = Operations("verify", flatten(args).axes, step, args)
        first = _Digests(operations)
        for event in run_step(operations):
            first.observe(*event)
        # The last one has the results of the step, which the second run makes again.
        del event
        changed = None
        for node, _, results in run_step(operations):
            if changed is None and node in first.results and _digest(results) != first.results[node]:
                changed = node
        report = operations.report_first(changed, "gave other bits in a second run of the same step")
        if report is not None:
            return report
        return _compare_ranks(operations, first.claims)


def _compare_ranks(operations: Operations, claims: Mapping[Node, tuple[str, str]]) -> OperationReport | None:
    """Report the first result on which ranks must agree and do not."""
    claims_by_rank = operations.gather([process_rank(), dict(claims.values())])
    for node, (cause, _) in claims.items():
        votes = {}
        for rank, results in claims_by_rank:
            if cause in results:
                votes[rank] = results[cause]
        common = mode(votes.values())
        right = [rank for rank in votes if votes[rank] == common]
        wrong = [rank for rank in votes if votes[rank] != common]
        if not wrong:
            continue
        verdict = f"did not give the bits of {name_ranks(right)}"
        if len(right) <= len(wrong):
            wrong = list(votes)
            verdict = "gave different bits, and nothing tells which are right,"
        return operations.report_first(node, verdict, wrong)
    return operations.report_first(None)


class _Digests:
    """Digests of what the operations of one run made.

    Attributes:
        results: The digests of results; those of views are left out.
        claims: For nodes whose result is that of other ranks too a digest of what decides it, and the result.
    """

    def __init__(self, operations: Operations) -> None:
        self.results: dict[Node, str] = {}
        self.claims: dict[Node, tuple[str, str]] = {}
        self._operations = operations
        # For sums over ranks that a graph adds up itself digests of the rows that this rank sends.
        self._rows: dict[Node, list[str]] = {}

    def observe(self, node: Node, operands: Mapping[Node, Any], results: Sequence[torch.Tensor]) -> None:
        """Look at what a node read and made; called for each node of a run."""
        collective = self._operations.collectives.get(node)
        if collective is not None and collective.op == "all_reduce" and node.args[_DIRECT]:
            self._rows[node] = list(map(hash_of, operands.values()))
        if not results or graph_nodes.is_view(node):
            return
        self.results[node] = _digest(results)
        cause, result = self._make_claim(node, operands, results)
        if cause is not None:
            name = str(self._operations.describe(node))
            self.claims[node] = _hash(f"{name} {cause}"), _hash(str(result))

    def _make_claim(
        self, node: Node, operands: Mapping[Node, Any], results: Sequence[torch.Tensor]
    ) -> tuple[object, object]:
        """Say what decides a result, and the result: ranks that have the same cause must have the same result."""
        leaf = self._operations.leaves.get(node)
        if isinstance(leaf, Sharded):
            # The coordinates on the axes whose ranks may hold other values.
            axes = [axis for axis in self._operations.axes if not _replicates(leaf.spec, axis)]
            return list(map(comm.rank, axes)), self.results[node]
        if graph_nodes.is_wait(node):
            return self._claim_arrival(node, results)
        if node.op != "call_function" or draws(node):
            return None, None
        digests = {}
        for source, value in operands.items():
            digests[source] = _digest(tensors_in(value))
        arguments: Any = map_arg([*node.args, node.kwargs], digests.__getitem__)
        # Each rank adds its own row to the others, so that the two operands may be in either order.
        if node.target in _ADDITIONS:
            arguments = sorted(map(str, arguments))
        return arguments, self.results[node]

    def _claim_arrival(self, node: Node, results: Sequence[torch.Tensor]) -> tuple[object, object]:
        """Say from which collective a buffer is, if all of its ranks have the same one."""
        start, index = find_start(node)
        collective = self._operations.collectives[start]
        if collective.op not in ("all_gather", "all_reduce"):
            return None, None
        identity = self._operations.identities[start]
        if start not in self._rows:
            return identity, self.results[node]
        # The buffer lacks the rank's own row, and so ranks have the same rows in other orders.
        rows = [self._rows[start][index]]
        rows += map(hash_of, results[0])
        return identity, sorted(rows)


def _replicates(spec: Spec, axis: Axis) -> bool:
    return axis in spec.axes and spec.dim_of(axis) is None


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    return " ".join(f"{hash_of(tensor)} {tensor.dtype} {tensor.shape} {tensor.stride()}" for tensor in dense)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
