"""Leaves, units and uses: the owners of full tensors and of partial gradients."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.collectives import divided
from fshard.engine.schedule import Ahead, Turn
from fshard.errors import Problem, leaf_error
from fshard.transforms.compose import reduction, start_gather, sum_dtype
from fshard.tree import ReshardPolicy, Sharded, grouped, matches
from fshard.tree.checks import check_versions, writes_counted

_PLAIN = ReshardPolicy()


class Part(NamedTuple):
    """A part of a gradient, and whether it may be written to."""

    grad: torch.Tensor
    own: bool


def _sum(total: Part | None, part: Part, dtype: torch.dtype | None = None) -> Part:
    """Add a part to a sum of gradients, in place where the sum may be written to; a dtype widens the sum of several."""
    if total is None:
        return part
    wide = total.grad if dtype is None else total.grad.to(dtype)
    own = total.own or wide is not total.grad
    return Part(wide.add_(part.grad) if own else wide + part.grad, True)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Most tensors have that dtype, and an operator takes longer to find that out.
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


class Leaf:
    """One leaf as a call sees it: the owner of its gradient.

    Attributes:
        path: The leaf's path.
        spec: Its spec.
        policy: Its reshard policy; the default where its spec has none.
        tensor: The local tensor that autograd knows: an own leaf of the call, or a derived one.
        stored: The same outside of any graph.
        nbytes: Bytes of the full tensor.
        trained: Whether it takes a gradient.
        derived: Whether it was computed inside the call, so that autograd goes on from its reduced gradient.
        shape: Shape of the full tensor, once it has been gathered.
        dtype: Its dtype.
        device: Its device.
        large: Whether it is large enough for an autograd node of its own.
        bucket_bytes: Its gradient is reduced together with others up to this many bytes; a larger one by itself.
        keeper: The use that keeps its full tensor for others, where the policy says so.
        first: The first use of the running forward, in whose backward the gradient is complete.
        accumulated: Whether gradients of several microbatches are added up.
        owed: Whether a reduction of it is due on every rank, whether this one has used the leaf or not.
        used: Whether a backward of this rank has reached it.
        state: The state of its transform, if that has one.
    """

    __slots__ = (
        *("_full", "_is_new", "_reduced", "derived", "first", "keeper", "large", "owed", "path"),
        *("accumulated", "bucket_bytes", "device", "dtype", "nbytes", "policy", "shape", "spec", "state", "stored"),
        *("tensor", "trained", "used"),
    )

    def __init__(self, path: str, leaf: Sharded, stored: torch.Tensor, derived: bool = False) -> None:
        """Take a leaf in."""
        self.path, self.spec, self.tensor, self.derived = path, leaf.spec, leaf.local, derived
        self.stored = stored.detach() if stored.requires_grad else stored
        self.trained = leaf.local.requires_grad
        facts, self.policy = reduction(leaf.spec.transform), leaf.spec.reshard or _PLAIN
        if derived and self.trained and facts.has_state:
            found = "a leaf computed from others whose transform has a state"
            remedy = "gather leaves as they are, or give the result the spec of one whose transform has no state"
            raise leaf_error("gather: no state", [Problem(path, found, "one of the parameters")], remedy)
        self.shape: Sequence[int] | None = None
        self.large = self.accumulated = self.owed = self.used = False
        # Small leaves of one unit always share a bucket.
        self.bucket_bytes = max(self.policy.bucket_bytes, comm.PACK_BYTES)
        self._is_new = facts.is_new
        self.keeper: Use | None = None
        self.first: Use | None = None
        # _full: this rank's sum over backwards. _reduced: after reduction.
        self._full: Part | None = None
        self._reduced: Part | None = None
        self.state: Any = None

    def zeros(self) -> torch.Tensor:
        """Make the gradient of a rank that did not use the leaf."""
        assert self.shape is not None
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def gathered(self, full: torch.Tensor) -> None:
        """Note dtype and shape of the full tensor, the same on every rank."""
        if self.shape is None:
            self.shape = self.spec.shape if full.shape == self.spec.shape else full.shape
            self.dtype, self.device, self.nbytes = full.dtype, full.device, full.nbytes
            self.large = self.nbytes >= comm.PACK_BYTES

    def add_partial(self, grad: torch.Tensor) -> None:
        """Add to this rank's full gradient."""
        self.used, part = True, Part(grad, False)
        self._full = part if self._full is None else _sum(self._full, part, self._sum_dtype(grad.dtype))

    def take_partial(self) -> torch.Tensor:
        """Hand over this rank's full gradient; zeros where it has none."""
        full, self._full, self.owed = self._full, None, False
        return self.zeros() if full is None else full.grad

    def _sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Find the dtype in which gradients of a dtype are added up."""
        return sum_dtype(self.spec, dtype) if self.accumulated else dtype

    def as_part(self, grad: torch.Tensor, own: bool | None = None) -> Part:
        """Cast a part of the reduced gradient to the dtype in which such parts are added up.

        Args:
            grad: The part.
            own: Whether it may be written to; None asks the transform that reduced it.
        """
        wide = _cast(grad, self._sum_dtype(self.stored.dtype))
        own = self._is_new if own is None else own
        return Part(wide, own or wide is not grad)

    def add_reduced(self, part: Part) -> None:
        """Add a part of the reduced gradient."""
        self._reduced = _sum(self._reduced, part)

    def take_reduced(self) -> torch.Tensor:
        """Hand over the reduced gradient to autograd, which goes on from it."""
        reduced, self._reduced = self._reduced, None
        assert reduced is not None
        return reduced.grad

    def take_grad(self, divisor: Any = 1) -> torch.Tensor:
        """Hand over the reduced gradient, divided and in the stored dtype; zeros where this rank has none."""
        reduced, self._reduced = self._reduced, None
        if reduced is None:
            return torch.zeros_like(self.stored)
        return _cast(divided(reduced.grad, divisor), self.stored.dtype)


def divided_parts(parts: Sequence[Part], divisor: Any) -> list[Part]:
    """Divide parts of gradients, as `divided` does: in place where they may be written to, by one operator for all."""
    if isinstance(divisor, int) and divisor == 1:
        return list(parts)
    _compat.divide_in_place([part.grad for part in parts if part.own], divisor)
    return [part if part.own else Part(divided(part.grad, divisor), True) for part in parts]


def transform_of(leaf: Leaf) -> Any:
    """Find the transform by which a leaf is gathered."""
    return leaf.spec.transform


@dataclass(frozen=True, eq=False)
class Unit:
    """Leaves that are gathered together.

    Attributes:
        name: For errors and policies.
        leaves: The leaves.
        inside: How many of the units that come next in its model lie inside it.
        apart: Whether it is never merged with others, because ranks may enter it in an order of their own.
        regathered: Whether it is dropped after its forward and gathered again; None asks the policy of its leaves.
    """

    name: str
    leaves: tuple[Leaf, ...]
    inside: int = 0
    apart: bool = False
    regathered: bool | None = None

    @functools.cached_property
    def places(self) -> dict[Leaf, int]:
        """The number of each leaf."""
        return {leaf: i for i, leaf in enumerate(self.leaves)}

    @functools.cached_property
    def policy(self) -> ReshardPolicy:
        """The policy of its leaves, which share one strategy."""
        return next((leaf.policy for leaf in self.leaves if leaf.spec.reshard), _PLAIN)

    @functools.cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """Groups of leaves whose gradients come at once, last ones first; to be read after the first gather.

        Each large leaf has an autograd node of its own. Small ones share a node, and so a buffer of gradients; autograd
        reaches their node last. Derived leaves share another.
        """
        trained = [i for i in reversed(range(len(self.leaves))) if self.leaves[i].trained]
        own = [i for i in trained if not self.leaves[i].derived]
        large = [(i,) for i in own if self.leaves[i].large]
        small = tuple([i for i in own if not self.leaves[i].large])
        derived = tuple([i for i in trained if self.leaves[i].derived])
        return [group for group in (*large, small, derived) if group]

    @functools.cached_property
    def ahead(self) -> Ahead:
        """How far gathers run ahead of it."""
        policy = self.policy
        return Ahead(1, policy.ahead_bytes) if policy.prefetch is None else Ahead(policy.prefetch, 0)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes that a gather of it moves: the full leaves as they are stored."""
        split = (leaf for leaf in self.leaves if leaf.spec.partition)
        return sum(math.prod(leaf.spec.padded_shape) * leaf.stored.element_size() for leaf in split)

    @functools.cached_property
    def is_regathered(self) -> bool:
        """Whether its policy drops it after its forward."""
        rule = self.policy.regather if self.regathered is None else self.regathered
        return rule if isinstance(rule, bool) else matches(rule, self.name)


class State(Enum):
    """Where the full tensors of a use are."""

    ABSENT = "absent"
    GATHERING = "gathering"
    FULL = "full"


class Use:
    """One gathering of a unit in a forward, and again in its backward: the owner of its full tensors.

    Attributes:
        unit: The unit.
        number: Its number among the uses of a forward, once it has been opened.
        regathered: Whether its tensors are dropped after the forward.
        inside: The uses that it lies inside, which stay open while it is.
        state: Where its full tensors are.
        full: The full tensors, by leaf; None for single ones that were dropped.
        outputs: Tensors handed out to the function, by leaf, while the unit is open; autograd knows them.
        opened: Whether the forward has come to it.
        closed: Whether another use has replaced it in the forward.
        stays: Whether its tensors stay from the forward to the backward, which needs them first.
        saved: Whether the backward needs its tensors: autograd saved a handle of one, or a checkpoint will run its
            forward again.
        sequence: Number of the first autograd node that may have used it.
        checkpoints: How many checkpoints of this rank compute with it.
        until: Keep the tensors until the backward has left the use of this number: a checkpoint of this rank may need
            them until then. None: no checkpoint does.
        anchor: Output of a node that the backward must reach on every rank.
    """

    __slots__ = (
        *("_finish", "_handed_out", "_versions", "anchor", "checkpoints", "closed", "full", "inside", "number"),
        *("opened", "outputs", "regathered", "saved", "sequence", "state", "stays", "unit", "until"),
    )

    def __init__(self, unit: Unit, regathered: bool) -> None:
        """Nothing is gathered yet."""
        self.unit, self.number, self.regathered, self.state = unit, -1, regathered, State.ABSENT
        self.full: list[torch.Tensor | None] = []
        self.outputs: dict[int, torch.Tensor] = {}
        self.inside: tuple[Use, ...] = ()
        self.opened = self.closed = self.saved = self.stays = False
        self.sequence = self.checkpoints = 0
        self.until: int | None = None
        self.anchor: torch.Tensor | None = None
        self._handed_out: list[tuple[dict[str, Any], str]] = []
        self._finish: list[tuple[list[int], Callable[[], Sequence[torch.Tensor]]]] = []
        self._versions: list[int] = []

    @_compat.outside_selective_checkpoint()
    def start(self, pool: comm.Pool | None = None) -> None:
        """Start to gather, unless that is under way.

        Args:
            pool: Memory that the gather may write to; the rest of it is freed.
        """
        if self.state is not State.ABSENT:
            return
        leaves = self.unit.leaves
        missing = [leaf if leaf.keeper is None else None for leaf in leaves]
        if not self.regathered:
            for leaf in leaves:
                leaf.keeper = leaf.keeper or self
        groups = grouped(missing, transform_of)
        paths = [leaf.path for leaf in missing if leaf is not None]
        with writes_counted(), torch.no_grad(), comm.concerning([self.unit.name], paths, pool):
            self._finish = [
                (group, start_gather(transform, [leaves[i].stored for i in group], [leaves[i].spec for i in group]))
                for transform, group in groups.items()
            ]
        self.state = State.GATHERING

    @_compat.outside_selective_checkpoint()
    def wait(self) -> list[torch.Tensor | None]:
        """Wait for the full tensors, and gather them if need be."""
        if self.state is not State.FULL:
            self.start()
            leaves = self.unit.leaves
            found: dict[int, torch.Tensor] = {}
            finishing, self._finish = self._finish, []
            with writes_counted(), torch.no_grad():
                for group, finish in finishing:
                    for i, gathered in zip(group, finish(), strict=True):
                        found[i] = comm.reusable(gathered)
                        leaves[i].gathered(found[i])
            for i, leaf in enumerate(leaves):
                if i not in found:
                    assert leaf.keeper is not None
                    found[i] = leaf.keeper.tensor_of(leaf)
            full = [found[i] for i in range(len(leaves))]
            self.full, self.state, self._versions = [*full], State.FULL, _compat.versions(full)
        return self.full

    def tensor_of(self, leaf: Leaf) -> torch.Tensor:
        """The full tensor of a leaf."""
        found = self.wait()[self.unit.places[leaf]]
        assert found is not None
        return found

    def drop(self, group: Sequence[int], pool: comm.Pool | None = None) -> None:
        """Drop the full tensors of some leaves.

        Args:
            group: Their numbers.
            pool: Takes their memory, if nobody else holds it and the next gather may write to it.
        """
        if self.state is State.FULL:
            for index in group:
                tensor, self.full[index] = self.full[index], None
                if pool is not None and self.regathered and tensor is not None:
                    pool.put(tensor)
                # Otherwise this name would still hold the last one.
                del tensor

    def release(self, pool: comm.Pool | None = None) -> None:
        """Drop all full tensors."""
        if self.state is State.GATHERING:
            # This rank had no use for it, but the gather is under way.
            self.wait()
        self.drop(range(len(self.full)), pool)
        self.full, self.state = [], State.ABSENT

    def hand_out(self, holder: dict[str, Any], key: str) -> None:
        """Note where an output was put, so that it is taken back when the unit's scope ends."""
        self._handed_out.append((holder, key))

    def take_back(self) -> None:
        """Take back what was handed out: outside of its scope nobody finds a unit's tensors."""
        self.outputs = {}
        for holder, key in self._handed_out:
            holder.pop(key, None)
        self._handed_out = []

    def check_writes(self, what: str) -> None:
        """Refuse in-place writes to full tensors, which would not reach the parameters, or reach them unseen."""
        if self.state is State.FULL:
            leaves, full = self.unit.leaves, [tensor for tensor in self.full if tensor is not None]
            check_versions(what, [leaf.path for leaf in leaves], full, self._versions, [leaf.stored for leaf in leaves])


def turn_of(use: Use, reduce: bool) -> Turn:
    """Describe a use to the schedule.

    Args:
        use: The use.
        reduce: Whether gradients of the call's own leaves are reduced in this backward.
    """
    leaves = use.unit.leaves

    def is_due(leaf: Leaf) -> bool:
        # A derived leaf hands its gradient on at each use; that of an own leaf is complete at its first use.
        return leaf.derived or (reduce and leaf.first is use)

    due = [tuple([i for i in group if is_due(leaves[i])]) for group in use.unit.groups]
    due = [group for group in due if group]
    nbytes = [sum([leaves[i].nbytes for i in group]) for group in due]
    return Turn(use.regathered and use.saved, use.unit.nbytes, use.unit.ahead, tuple(due), tuple(nbytes))
