"""verify: runs a step twice, and names the operation that disagrees with itself or between ranks."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import mode
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fshard import Sharded, Spec, TrainState, comm
from fshard.ext._compat import find_start
from fshard.ext.replay.observed_run import draws, run_step, tensors_in
from fshard.ext.replay.operations import OperationReport, Operations
from fshard.extend import calling, flatten, graph_nodes, hash_of, name_ranks, process_rank

# Where an operator that starts a collective says whether ranks send each other rows, counted from its last argument.
_DIRECT = -5
_ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


def verify(step: Callable[..., Any], *args: Any) -> OperationReport | None:
    """Run a step twice, and find the first operation whose result is not what it should be, bit for bit.

    The graph of the step runs operator by operator. A digest of each result is compared between the two runs, and
    between ranks where they must agree: on replicated leaves of arguments and results, on the counts and other plain
    tensors of a `TrainState` but its buffers, on what is gathered, on the rows of sums over ranks, and on what an
    operation of several ranks computes of equal operands. A difference comes from bad hardware, a race, or a kernel
    that is not deterministic. Of an operation that is wrong in both runs, with operands that no other rank has, nothing
    can tell.

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
        # Each rank may have buffers, such as statistics of a batch norm, and remainders of messages of its own.
        states = [arg._replace(buffers=None, transform_state=None) for arg in args if isinstance(arg, TrainState)]
        digests, claims = _digest_step(operations, set(map(id, flatten(states).leaves)))
        changed = None
        for node, _, results in run_step(operations):
            if changed is None and node in digests and _digest(results) != digests[node]:
                changed = node
        report = operations.report_first(changed, "gave other bits in a second run of the same step")
        if report is not None:
            return report
        return _compare_ranks(operations, claims)


def _compare_ranks(operations: Operations, claims: Sequence[tuple[Node, str, str]]) -> OperationReport | None:
    """Report the first result on which ranks must agree and do not."""
    shared_of_cause = {cause: shared for _, cause, shared in claims}
    claims_by_rank = operations.gather([process_rank(), shared_of_cause])
    for node, cause, _ in claims:
        votes = {rank: results[cause] for rank, results in claims_by_rank if cause in results}
        common = mode(votes.values())
        wrong = [rank for rank, vote in votes.items() if vote != common]
        if not wrong:
            continue
        right = sorted(votes.keys() - wrong)
        if len(right) > len(wrong):
            return operations.report_first(node, f"did not give the bits of {name_ranks(right)}", wrong)
        verdict = "gave different bits, and nothing tells which are right,"
        return operations.report_first(node, verdict, list(votes))
    return operations.report_first(None)


def _digest_step(
    operations: Operations, state_leaves: Collection[int]
) -> tuple[dict[Node, str], list[tuple[Node, str, str]]]:
    """Run a step, and digest what its operations make; views are left out.

    Args:
        operations: The step.
        state_leaves: The ids of leaves of a TrainState.

    Returns:
        The digests of results; and for nodes whose result is that of other ranks too digests of what decides it, and of
        what these ranks must have in common.
    """
    digests: dict[Node, str] = {}
    claims: list[tuple[Node, str, str]] = []
    # For sums over ranks that a graph adds up itself digests of the rows that this rank sends.
    rows: dict[Node, list[str]] = {}

    def claim(node: Node, cause: str, shared: str) -> None:
        claims.append((node, _hash(cause), _hash(shared)))

    for node, operands, results in run_step(operations):
        collective = operations.collectives.get(node)
        if collective is not None and collective.op == "all_reduce" and node.args[_DIRECT]:
            rows[node] = list(map(hash_of, operands.values()))
        if node.op == "output":
            for source, spec in operations.result_specs.items():
                place = _find_place(operations, spec)
                claim(source, f"{operations.result_paths[source]} {place}", _digest([operands[source]]))
        if not results or graph_nodes.is_view(node):
            continue
        shared = _digest(results)
        digests[node] = shared
        if graph_nodes.is_wait(node):
            start, index = find_start(node)
            if start in rows:
                # The buffer lacks the rank's own row, and so ranks have the same rows in other orders.
                rows_of_ranks = [rows[start][index], *map(hash_of, results[0])]
                shared = str(sorted(rows_of_ranks))
        cause = _find_cause(operations, node, operands)
        if cause is None and id(operations.leaves.get(node, node)) in state_leaves:
            cause = ""
        if cause is not None:
            claim(node, f"{operations.names[node]} {cause}", shared)
    return digests, claims


def _find_cause(operations: Operations, node: Node, operands: Mapping[Node, Any]) -> object:
    """Find what decides a result: ranks that have the same cause must have the same result. None if nothing does."""
    leaf = operations.leaves.get(node)
    if isinstance(leaf, Sharded):
        return _find_place(operations, leaf.spec)
    if graph_nodes.is_wait(node):
        start, _ = find_start(node)
        has_equal_results = operations.collectives[start].op in ("all_gather", "all_reduce")
        return operations.identities[start] if has_equal_results else None
    if node.op != "call_function" or draws(node):
        return None

    def digest(source: Node) -> Any:
        return _digest(tensors_in(operands[source]))

    arguments: Any = map_arg([*node.args, node.kwargs], digest)
    if node.target in _ADDITIONS:
        # Each rank adds its own row to the others, so that the two operands may be in either order.
        return sorted(map(str, arguments))
    return arguments


def _find_place(operations: Operations, spec: Spec) -> list[int]:
    """Find the rank's coordinates on the axes whose ranks may hold other values of a leaf."""
    place = []
    for axis in operations.axes:
        if axis not in spec.axes or spec.dim_of(axis) is not None:
            place.append(comm.rank(axis))
    return place


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    texts = (f"{hash_of(tensor)} {tensor.dtype} {tensor.shape} {tensor.stride()}" for tensor in dense)
    return " ".join(texts)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
