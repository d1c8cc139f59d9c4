"""verify: runs a step twice, and names the operation that disagrees with itself or between ranks."""

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fshard import Sharded
from fshard.ext.replay.places import Operations, Place, list_ranks
from fshard.ext.replay.ranks import Ranks
from fshard.ext.replay.repeat import TracedCall, read_generators, run_repeatably, trace_call
from fshard.ext.replay.shared import Axes, find_common_axes
from fshard.extend import calling, flatten, hash_of

_API_NAME = "verify"
# The digests of results by their nodes.
Digests = dict[Node, str]


class Disagreement(NamedTuple):
    """An operation whose result disagrees, as `verify` returns it; equal on every rank.

    Attributes:
        between: "runs" if two runs on a rank gave other bits, or "ranks" if ranks differ where they must agree.
        place: The operation, and the ranks whose result is wrong, or all that differ where nothing says which of them
            are.
        others: The ranks that they differ from, if these are more; empty otherwise.
    """

    between: str
    place: Place
    others: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The report."""
        ranks = list_ranks(self.place.ranks)
        operator = self.place.subject
        is_one = len(self.place.ranks) == 1
        if self.between == "runs":
            verb = "gives" if is_one else "give"
            headline = f"{ranks} {verb} other bits for {operator} in a second run of the same step"
        elif self.others:
            verb = "differs" if is_one else "differ"
            headline = (
                f"{ranks} {verb} from {list_ranks(self.others)} in the result of {operator}, on which all must agree"
            )
        else:
            headline = f"{ranks} differ in the result of {operator}, on which all must agree; any of them may be wrong"
        return f"verify: {headline}\n{self.place}"


def verify(step: Callable[..., Any], *args: Any) -> Disagreement | None:
    """Run a step twice, and find the first operation whose result is not what it should be, bit for bit.

    The graph of the step runs operator by operator. A digest of each result is compared between the two runs, and
    between ranks where they must agree: on what is gathered, on sums over ranks, on replicated leaves, and on all that
    is computed of these alone. A difference comes from bad hardware, a race, or a kernel that is not deterministic. Of
    an operation that is wrong in both runs, in a value that is a rank's own, nothing can tell.

    Both runs draw the same random numbers, keyed or not, and begin with zeros in empty memory. The arguments and the
    states of torch's generators stay as they are.

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
    with calling(_API_NAME, lambda: flatten(args).axes):
        call = trace_call(_API_NAME, step, args)
        states = read_generators()
        digests = _digest_results(call, states)
        digests_again = _digest_results(call, states)
        comparison = _DigestComparison(call, digests)
        return comparison.compare_runs(digests_again) or comparison.compare_ranks()


def _digest_results(call: TracedCall, generator_states: torch.Tensor) -> Digests:
    """Run a call, and return a digest of each result."""
    digests: Digests = {}

    def watch(node: Node, operands: Mapping[Node, Any], results: Sequence[torch.Tensor]) -> None:
        if results:
            digests[node] = "".join(hash_of(tensor) for tensor in results if tensor.layout is torch.strided)

    run_repeatably(call, generator_states, watch)
    return digests


class _DigestComparison:
    """Compares digests of a call between runs and between ranks."""

    def __init__(self, call: TracedCall, digests: Digests) -> None:
        self._call = call
        self._digests = digests
        self._operations = Operations(call)
        self._ranks = Ranks(_API_NAME, call.flat.axes)

    def compare_runs(self, digests_again: Digests) -> Disagreement | None:
        """Find the first result that differs from that of the second run."""
        differing = (node for node, digest in self._digests.items() if digests_again[node] != digest)
        first = self._ranks.find_first(self._operations, next(differing, None), [])
        return first and Disagreement("runs", first[0])

    def compare_ranks(self) -> Disagreement | None:
        """Find the first result that ranks must agree on and do not."""
        names = {node: str(name) for node, name in self._operations.names.items()}
        constants = {name: _digest_constants(node) for node, name in names.items()}
        # By the names of operations, because numbers of nodes differ between ranks.
        digests = {names[node]: digest for node, digest in self._digests.items()}
        digests_by_rank, constants_by_rank = zip(*self._ranks.gather([digests, constants]), strict=True)
        agreements = self._find_agreements(names, digests_by_rank, constants_by_rank)
        first_node = None
        judgement: list[list[int]] = []
        for node in self._digests:
            peers = self._ranks.along(agreements[node])
            votes = [digests_by_rank[peer].get(names[node]) for peer in peers]
            if None not in votes and len(set(votes)) > 1:
                first_node = node
                judgement = self._judge(peers, votes)
                break
        first = self._ranks.find_first(self._operations, first_node, judgement)
        if first is None:
            return None
        place, (ranks, others) = first
        return Disagreement("ranks", place._replace(ranks=tuple(ranks)), tuple(others))

    def _find_agreements(
        self,
        names: Mapping[Node, str],
        digests_by_rank: Sequence[Mapping[str, str]],
        constants_by_rank: Sequence[Mapping[str, str]],
    ) -> dict[Node, Axes]:
        """Find the axes along which ranks must agree on each result."""
        axes = frozenset(axis.name for axis in self._ranks.axes)
        shared_inputs: dict[Node, Axes] = {}
        varying_constants: dict[Node, Axes] = {}
        for node, name in names.items():
            leaf = self._call.leaf_of(node)
            if isinstance(leaf, Sharded):
                shared_inputs[node] = frozenset(axis.name for axis in leaf.spec.axes if leaf.spec.dim_of(axis) is None)
            elif node.op == "call_function":
                constants = [by_name.get(name) for by_name in constants_by_rank]
                varying_constants[node] = axes - self._ranks.find_agreement(constants)
            else:
                # A step or a key is the same on all ranks, and a batch is not: nothing but the values says which it is.
                digests = [by_name.get(name) for by_name in digests_by_rank]
                shared_inputs[node] = self._ranks.find_agreement(digests)
        return find_common_axes(self._call.traced.module.graph, axes, shared_inputs, varying_constants)

    def _judge(self, peers: Sequence[int], votes: Sequence[str | None]) -> list[list[int]]:
        """Return the ranks that are wrong and those that are right, by the majority; without one all may be wrong."""
        ((common, count),) = Counter(votes).most_common(1)
        numbers = [self._ranks.numbers[peer] for peer in peers]
        if 2 * count <= len(votes):
            return [numbers, []]
        wrong = [number for number, vote in zip(numbers, votes, strict=True) if vote != common]
        right = [number for number, vote in zip(numbers, votes, strict=True) if vote == common]
        return [wrong, right]


def _digest_constants(node: Node) -> str:
    """Return a checksum of the arguments of a node that are no tensors."""
    constants = map_arg((node.args, node.kwargs), lambda source: None)
    return f"{zlib.crc32(repr(constants).encode()):08x}"
