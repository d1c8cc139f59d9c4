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
from fshard.transforms.compose import reduction, sum_dtype
from fshard.tree import ReshardPolicy, Sharded, grouped, matches
from fshard.tree.checks import check_versions, describe, writes_counted

_PLAIN = ReshardPolicy()


class Like(NamedTuple):
    """Shape, dtype and device of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Part(NamedTuple):
    """A part of a gradient, and whether it may be written to."""

    grad: torch.Tensor
    own: bool


class Sum:
    """Gradients that are added up, in place from where the sum is no one else's tensor.

    Attributes:
        value: The sum so far; None before the first part.
    """

    __slots__ = ("_own", "value")

    def __init__(self) -> None:
        """Nothing is added yet."""
        self.value: torch.Tensor | None = None
        self._own = False

    def add(self, part: torch.Tensor, dtype: torch.dtype | None = None, own: bool = False) -> None:
        """Add a part.

        Args:
            part: The part.
            dtype: The dtype in which two parts and more are added up; None leaves it to them.
            own: Whether the part may be written to.
        """
        if self.value is None:
            self.value, self._own = part, own
            return
        wide = self.value if dtype is None else self.value.to(dtype)
        self.value = wide.add_(part) if self._own or wide is not self.value else wide + part
        self._own = True

    def take(self) -> torch.Tensor | None:
        """Hand over the sum, and begin anew."""
        value, self.value = self.value, None
        return value


class Leaf:
    """One leaf as a call sees it: the owner of its gradient.

    Attributes:
        path: The leaf's path.
        spec: Its spec.
        tensor: The local tensor that autograd knows: the call's own leaf, or one computed from such.
        stored: The same outside of any graph.
        trained: Whether it takes a gradient.
        derived: Whether it was computed inside the call, so that autograd goes on from its reduced gradient.
        like: Shape, dtype and device of the full tensor, once it has been gathered.
        large: Whether it is large enough for an autograd node of its own.
        bucket_bytes: Its gradient is reduced together with others up to this many bytes; a larger one by itself.
        keeper: The use that keeps its full tensor for others, where the policy says so.
        first: The first use of the running forward, in whose backward the gradient is complete.
        accumulated: Whether gradients of several microbatches are added up.
        owed: Whether a reduction of it is due on every rank, whether this one has used the leaf or not.
        used: Whether a backward of this rank has reached it.
        state: The state of its transform, if that has one.
        hooks: Functions that run on this rank's full gradient in each backward, by the numbers of their registrations.
    """

    __slots__ = (
        *("_full", "_reduced", "_unhooked", "derived", "first", "hooks", "keeper", "large", "like", "owed", "path"),
        *("accumulated", "bucket_bytes", "spec", "state", "stored", "tensor", "trained", "used"),
    )

    def __init__(self, path: str, leaf: Sharded, derived: bool = False) -> None:
        """Take a leaf in."""
        self.path, self.spec, self.tensor, self.derived = path, leaf.spec, leaf.local, derived
        self.stored = leaf.local.detach()
        self.trained = leaf.local.requires_grad
        if derived and self.trained and reduction(leaf.spec.transform).has_state:
            found = "a leaf computed from others whose transform has a state"
            remedy = "gather leaves as they are, or give the result the spec of one whose transform has no state"
            raise leaf_error("gather: no state", [Problem(path, found, "one of the parameters")], remedy)
        self.like: Like | None = None
        self.large = self.accumulated = self.owed = self.used = False
        self.bucket_bytes = bucket_bytes_of(leaf)
        self.keeper: Use | None = None
        self.first: Use | None = None
        # Of this rank: the full gradient of the running backward before hooks, that of all backwards, the reduced one.
        self._unhooked, self._full, self._reduced = Sum(), Sum(), Sum()
        self.state: Any = None
        self.hooks: dict[int, Callable[[torch.Tensor], torch.Tensor | None]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        assert self.like is not None
        return self.like.shape.numel() * self.like.dtype.itemsize

    def zeros(self) -> torch.Tensor:
        """Make the gradient of a rank that did not use the leaf."""
        assert self.like is not None
        return torch.zeros(self.like.shape, dtype=self.like.dtype, device=self.like.device)

    def gathered(self, full: torch.Tensor) -> None:
        """Note dtype and shape of the full tensor, the same on every rank."""
        if self.like is None:
            self.like = Like(full.shape, full.dtype, full.device)
            self.large = self.nbytes >= min(self.bucket_bytes, comm.PACK_BYTES)

    def add_partial(self, grad: torch.Tensor) -> None:
        """Add to this rank's full gradient; where hooks are to run, to that of the running backward."""
        self.used = True
        if self.hooks:
            self._unhooked.add(grad)
        else:
            self._full.add(grad, self._sum_dtype(grad.dtype))

    def run_hooks(self) -> None:
        """Run hooks on the gradient of the running backward, which is complete, and add their result.

        Raises:
            ValueError: if a hook returns something else than a gradient.
        """
        unhooked = self._unhooked.take()
        if unhooked is None:
            return
        # A copy, which hooks may keep or write to.
        grad = unhooked.clone()
        for hook in self.hooks.values():
            with torch.no_grad():
                found = hook(grad)
            fits = isinstance(found, torch.Tensor) and _same_kind(found, grad)
            if found is not None and not fits:
                problem = Problem(self.path, describe(found), f"None or {describe(grad)}")
                remedy = "return one like its argument"
                raise leaf_error("register_hook: a hook's result is no gradient", [problem], remedy)
            grad = grad if found is None else found.detach()
        self._full.add(grad, self._sum_dtype(grad.dtype))

    def take_partial(self) -> torch.Tensor:
        """Hand over this rank's full gradient; zeros where it has none."""
        self.owed = False
        grad = self._full.take()
        return self.zeros() if grad is None else grad

    def _sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Find the dtype in which gradients of a dtype are added up."""
        return sum_dtype(self.spec, dtype) if self.accumulated else dtype

    def as_part(self, grad: torch.Tensor, own: bool | None = None) -> Part:
        """Cast a part of the reduced gradient to the dtype in which such parts are added up.

        Args:
            grad: The part.
            own: Whether it may be written to; None asks the transform that reduced it.
        """
        wide = grad.to(self._sum_dtype(self.stored.dtype))
        own = reduction(self.spec.transform).is_new if own is None else own
        return Part(wide, own or wide is not grad)

    def add_reduced(self, part: Part) -> None:
        """Add a part of the reduced gradient."""
        self._reduced.add(part.grad, own=part.own)

    def take_reduced(self) -> torch.Tensor:
        """Hand over the reduced gradient to autograd, which goes on from it."""
        grad = self._reduced.take()
        assert grad is not None
        return grad

    def take_grad(self, divisor: Any = 1) -> torch.Tensor:
        """Hand over the reduced gradient, divided and in the stored dtype; zeros where this rank has none."""
        grad = self._reduced.take()
        return torch.zeros_like(self.stored) if grad is None else divided(grad, divisor).to(self.stored.dtype)


def divided_parts(parts: Sequence[Part], divisor: Any) -> list[Part]:
    """Divide parts of gradients, as `divided` does: in place where they may be written to, by one operator for all."""
    if isinstance(divisor, int) and divisor == 1:
        return list(parts)
    _compat.divide_in_place([part.grad for part in parts if part.own], divisor)
    return [part if part.own else Part(divided(part.grad, divisor), True) for part in parts]


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.dtype, a.device, a.layout) == (b.shape, b.dtype, b.device, b.layout)


def policy_of(leaves: Sequence[Leaf | Sharded]) -> ReshardPolicy:
    """Find the reshard policy of leaves that share one strategy; the default where their specs have none."""
    return next((leaf.spec.reshard for leaf in leaves if leaf.spec.reshard), _PLAIN)


def bucket_bytes_of(leaf: Leaf | Sharded) -> int:
    """Find the size of the buckets that a leaf's gradient is reduced in; small leaves of one unit always share one."""
    given = reduction(leaf.spec.transform).bucket_bytes
    return max(policy_of([leaf]).bucket_bytes, comm.PACK_BYTES) if given is None else given


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
        """The policy of its leaves."""
        return policy_of(self.leaves)

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
        inside: Uses within which it lies, which stay open while it is.
        state: Where its full tensors are.
        full: The full tensors, by leaf; None for single ones that were dropped.
        outputs: Tensors handed out to the function, by leaf, while the unit is open; autograd knows them.
        opened: Whether the forward has come to it.
        closed: Whether another one has taken its place in the forward.
        stays: Whether its tensors stay from the forward to the backward, which comes to it before all else.
        saved: Whether the backward needs its tensors: autograd saved a handle of one, or a checkpoint will run its
            forward again.
        sequence: Number of the first autograd node that may have used it.
        checkpoints: How many checkpoints of this rank's compute with it.
        until: Number of the use that the backward must have left before the tensors may go, because a checkpoint of
            this rank's may need them until then; None where none does.
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
            pool: Memory that the gather may write to; what it leaves of it is gone afterwards.
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
                (group, transform.start_gather([leaves[i].stored for i in group], [leaves[i].spec for i in group]))
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
            self.full, self.state = [found[i] for i in range(len(leaves))], State.FULL
            self._versions = [_compat.version(found[i]) for i in range(len(leaves))]
        return self.full

    def tensor_of(self, leaf: Leaf) -> torch.Tensor:
        """The full tensor of a leaf."""
        found = self.wait()[self.unit.places[leaf]]
        assert found is not None
        return found

    def drop(self, index: int, pool: comm.Pool | None = None) -> None:
        """Drop the full tensor of one leaf.

        Args:
            index: Its number.
            pool: Takes its memory, if nobody else holds it and the next gather may write to it.
        """
        if self.state is State.FULL:
            tensor, self.full[index] = self.full[index], None
            if pool is not None and self.regathered and tensor is not None:
                pool.put(tensor)

    def release(self, pool: comm.Pool | None = None) -> None:
        """Drop all full tensors."""
        if self.state is State.GATHERING:
            # This rank had no use for it, but the gather is under way.
            self.wait()
        for index in range(len(self.full)):
            self.drop(index, pool)
        self.full, self.state = [], State.ABSENT

    def group_of(self, index: int) -> list[int]:
        """List the leaves that share an autograd node with one: small ones do, and so a buffer of gradients."""
        leaves = self.unit.leaves
        if leaves[index].large and not leaves[index].derived:
            return [index]
        derived = leaves[index].derived
        return [
            i
            for i, leaf in enumerate(leaves)
            if i not in self.outputs and leaf.trained and leaf.derived == derived and (derived or not leaf.large)
        ]

    def hand_out(self, holder: dict[str, Any], key: str) -> None:
        """Note where an output was put, to be taken from there when the unit's scope ends."""
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
            paths, stored = zip(*((leaf.path, leaf.stored) for leaf in self.unit.leaves), strict=True)
            check_versions(what, paths, self.full, self._versions, stored)


def turn_of(use: Use, reduce: bool) -> Turn:
    """Describe a use to the schedule.

    Args:
        use: The use.
        reduce: Whether gradients of the call's own leaves are reduced in this backward.
    """
    leaves = use.unit.leaves
    # A computed leaf hands its gradient on at each use; the call's own have theirs complete at the first.
    due = [i for i, leaf in enumerate(leaves) if leaf.trained and (leaf.derived or (reduce and leaf.first is use))]
    # Large leaves come first: small ones share a node, which autograd reaches last.
    due.sort(key=lambda i: (leaves[i].derived, not leaves[i].large, -i))
    nbytes = [leaves[i].nbytes for i in due]
    # Gradients of one node come all at once: they count where the first of them is reduced.
    shared = [n for n, i in enumerate(due) if not leaves[i].large and not leaves[i].derived]
    for n in shared[1:]:
        nbytes[shared[0]], nbytes[n] = nbytes[shared[0]] + nbytes[n], 0
    return Turn(use.regathered and use.saved, use.unit.nbytes, use.unit.ahead, tuple(due), tuple(nbytes))
