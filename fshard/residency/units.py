"""Units and uses: leaves that are gathered together, and one such gathering."""

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from fshard import _compat, comm
from fshard.checks import check_versions, writes_counted
from fshard.collectives import linear_call
from fshard.errors import Problem, leaf_error
from fshard.residency.slots import Slot, policy_of, specs_of
from fshard.tree import Residency
from fshard.varying import used_without_pvary


@dataclass(frozen=True, eq=False)
class Unit:
    """Leaves that are gathered together.

    Attributes:
        name: For errors and rules.
        slots: The leaves.
        regathered: Whether their policy drops them after their forward; None asks it.
    """

    name: str
    slots: tuple[Slot, ...]
    regathered: bool | None = None

    @functools.cached_property
    def places(self) -> dict[Slot, int]:
        """Where each leaf stands among them."""
        return {slot: i for i, slot in enumerate(self.slots)}

    @functools.cached_property
    def residency(self) -> Residency:
        """The policy of its leaves, which share one strategy."""
        return policy_of(self.slots)


def is_regathered(unit: Unit) -> bool:
    """Whether a unit's policy drops it after its forward."""
    rule = unit.residency.regather if unit.regathered is None else unit.regathered
    if isinstance(rule, bool):
        return rule
    if callable(rule):
        return bool(rule(unit.name))
    patterns = (rule,) if isinstance(rule, str) else rule
    return any(fnmatch.fnmatchcase(unit.name, pattern) for pattern in patterns)


class Use:
    """One gathering of a unit, from its start to the last reduction of its gradients.

    Attributes:
        unit: What is gathered.
        index: Its number among the uses of a call.
        regathered: Whether its tensors are dropped after the forward.
        kept: Tensors that need no gathering, until the others are gathered.
        full: The gathered tensors while they are held, by slot; single ones are dropped in the backward.
        outputs: Those handed out, which autograd knows, while the unit is open.
        closed: Whether its turn in the order is over.
        saved: Whether the backward will need its tensors: autograd saved a note of one, or a checkpoint will run its
            forward again.
        sequence: Number of the first autograd node that may have used it.
        checkpoints: How many checkpoints of this rank's compute with it.
        until: Number of the use that the backward must have left before the tensors may go, because a checkpoint of
            this rank's may need them until then; None where none does.
        anchor: Output of a node that must be reached on every rank.
        on_close: Where tensors that were handed out are to be taken from again.
    """

    __slots__ = (
        *(
            "_finish",
            "_log",
            "_spares",
            "_versions",
            "anchor",
            "closed",
            "full",
            "index",
            "kept",
            "on_close",
            "outputs",
            "regathered",
        ),
        *("checkpoints", "saved", "sequence", "unit", "until"),
    )

    def __init__(
        self,
        unit: Unit,
        regathered: bool,
        kept: Mapping[Slot, torch.Tensor],
        log: list[str],
        spares: list[torch.Tensor],
    ) -> None:
        """Nothing is gathered yet."""
        self.unit, self.regathered, self.kept, self._log, self._spares = unit, regathered, kept, log, spares
        self.index = -1
        self.full: list[torch.Tensor | None] | None = None
        self.outputs: dict[int, torch.Tensor] = {}
        self.closed = self.saved = False
        self.sequence = self.checkpoints = 0
        self.until: int | None = None
        self.anchor: torch.Tensor | None = None
        self.on_close: list[tuple[dict[str, Any], str]] = []
        self._finish: list[tuple[list[int], Callable[[], Sequence[torch.Tensor]]]] | None = None
        self._versions: list[int] = []

    @_compat.outside_selective_checkpoint()
    def start(self) -> None:
        """Start gathering what is not there, unless that is under way."""
        if self.full is not None or self._finish is not None:
            return
        slots = self.unit.slots
        groups: dict[Any, list[int]] = {}
        for i, slot in enumerate(slots):
            if slot not in self.kept:
                groups.setdefault(slot.spec.transform, []).append(i)
        if groups:
            self._log.append(f"gather {self.unit.name}")
        paths = [slots[i].path for group in groups.values() for i in group]
        with writes_counted(), torch.no_grad(), comm.reusing(self._spares), comm.concerning(self.unit.name, paths):
            self._finish = [
                (group, transform.start_gather([slots[i].stored for i in group], specs_of(slots, group)))
                for transform, group in groups.items()
            ]

    @_compat.outside_selective_checkpoint()
    def wait(self) -> list[torch.Tensor | None]:
        """Start gathering if need be, and wait for it."""
        if self.full is None:
            self.start()
            assert self._finish is not None
            slots = self.unit.slots
            full: list[torch.Tensor | None] = [self.kept.get(slot) for slot in slots]
            with writes_counted(), torch.no_grad():
                for group, finish in self._finish:
                    for i, gathered in zip(group, finish(), strict=True):
                        full[i] = comm.reusable(gathered)
            self._finish, self.full, self.kept = None, full, {}
            self._versions = [-1 if tensor is None else _compat.version(tensor) for tensor in full]
            for slot, tensor in zip(slots, full, strict=True):
                if slot.like is None and tensor is not None:
                    slot.set_like(tensor)
        return self.full

    def drop(self, index: int, spare: bool = True) -> None:
        """Let go of a gathered tensor.

        Args:
            index: Its number.
            spare: Whether the gather that starts next may write to its memory.
        """
        if self.full is not None:
            tensor, self.full[index] = self.full[index], None
            memory = comm.spare(tensor) if spare and self.regathered and tensor is not None else None
            self._spares.extend([] if memory is None else [memory])

    def drop_all(self) -> None:
        """Let go of all of them."""
        for index in range(len(self.full or ())):
            self.drop(index)
        self.full = None

    def settle(self) -> None:
        """Wait for a gather that this rank had no use for."""
        if self._finish is not None:
            self.wait()

    def sharing_node(self, index: int) -> list[int]:
        """The leaves that share an autograd node with one: small ones do, and so a buffer of gradients."""
        slots = self.unit.slots
        if slots[index].derived:
            return [i for i, slot in enumerate(slots) if i not in self.outputs and slot.trained and slot.derived]
        if slots[index].alone:
            return [index]
        return [
            i
            for i, slot in enumerate(slots)
            if i not in self.outputs and slot.trained and not slot.derived and not slot.alone
        ]

    def close(self) -> None:
        """Take back what was handed out: outside its scope nobody finds a unit's tensors."""
        self.outputs = {}
        for holder, key in self.on_close:
            holder.pop(key, None)
        self.on_close = []

    def check_writes(self, what: str) -> None:
        """Refuse in-place writes to gathered tensors, which would not reach the parameters, or reach them unseen."""
        if self.full is None:
            return
        paths, stored = zip(*((slot.path, slot.stored) for slot in self.unit.slots), strict=True)
        check_versions(what, paths, self.full, self._versions, stored)


# An input of every unit's node, so that a backward reaches units of calls now over, which have none of its leaves.
ANY_CALL = torch.zeros((), requires_grad=True)


class _Deliver(Function):
    """Hand gathered tensors to autograd, and their gradients to the call."""

    @staticmethod
    def forward(ctx: Any, call: Any, use: Use, group: list[int], full: list[Any], *tensors: torch.Tensor) -> Any:
        ctx.call, ctx.use, ctx.group, ctx.reaches = call, use, group, len(tensors) - len(group)
        ctx.set_materialize_grads(False)
        # The last output keeps the node within reach of a rank that uses none of the others.
        anchor = [torch.zeros(())] if use.unit.slots[group[0]].derived else []
        return (*(tensor.detach() for tensor in full), *anchor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if ctx.call.ended:
            slots = [ctx.use.unit.slots[i] for i, grad in zip(ctx.group, grads, strict=False) if grad is not None]
            raise leaf_error(
                "value_and_grad: the loss uses full tensors of a call now over, which take no gradient any more",
                [Problem(slot.path, "a full tensor that an earlier call gathered", "this call's") for slot in slots],
                "gather inside of each call, or keep full.detach() where a constant is meant",
            )
        delivered = ctx.call.deliver(ctx.use, ctx.group, grads[: len(ctx.group)])
        return None, None, None, None, *delivered, *[None] * ctx.reaches


@_compat.outside_selective_checkpoint()
def deliver(call: Any, use: Use, group: list[int]) -> None:
    """Make a use's outputs for some of its slots, with one autograd node for all of them."""
    full = use.wait()
    tensors = [use.unit.slots[i].tensor for i in group]
    if any(tensor.requires_grad for tensor in tensors):
        tensors.append(ANY_CALL)
    outputs = _Deliver.apply(call, use, group, [full[i] for i in group], *tensors)
    use.outputs.update(zip(group, outputs, strict=False))
    if len(outputs) > len(group):
        use.anchor = outputs[-1]


def scattered(slots: Sequence[Slot], group: Sequence[int], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Reduce gradients differentiably and at once, for code that differentiates inside the call."""
    out: dict[int, torch.Tensor] = {}
    by_transform: dict[Any, list[int]] = {}
    for position, i in enumerate(group):
        by_transform.setdefault(slots[i].spec.transform, []).append(position)
    for transform, positions in by_transform.items():
        specs = specs_of(slots, [group[p] for p in positions])
        full = [slots[group[p]].zeros() if (grad := grads[p]) is None else grad for p in positions]
        run, transpose = (
            functools.partial(transform.scatter, specs=specs),
            functools.partial(transform.gather, specs=specs),
        )
        out.update(zip(positions, linear_call(run, transpose, full), strict=True))
    return [out[position].to(slots[i].stored.dtype) for position, i in enumerate(group)]


def mark_used(loss: torch.Tensor, slots: Sequence[Slot]) -> None:
    """Mark the leaves that a loss depends on by maths on shards.

    Ranks run the backwards of leaves that were computed from others whether they use these or not, so that the
    gradients which autograd returns do not tell.

    Args:
        loss: This rank's loss, after its backward.
        slots: The call's own leaves.
    """
    ends = {torch.autograd.graph.get_gradient_edge(slot.tensor).node: slot for slot in slots}
    waiting: list[Any] = [loss.grad_fn]
    seen = {loss.grad_fn, None}
    while waiting:
        node = waiting.pop()
        if node in ends:
            ends[node].used = True
        edges = [behind for behind, _ in getattr(node, "next_functions", ())]
        if isinstance(use := getattr(node, "use", None), Use):
            # One node delivers several leaves; a leaf of the call's own has been marked when its gradient arrived.
            members = [use.unit.slots[i] for i in node.group]
            edges = [edge for edge, slot in zip(edges, members, strict=False) if slot.derived and slot.used]
        new = [edge for edge in edges if edge not in seen]
        seen.update(new)
        waiting.extend(new)


def refuse_unsummed(
    what: str, outputs: Sequence[torch.Tensor], slots: Sequence[Slot], grads: Sequence[torch.Tensor | None]
) -> None:
    """Refuse gradients of leaves that ranks hold alike which came past `gather` and `pvary`, where they are summed.

    Args:
        what: The verb that runs, for the error.
        outputs: Where the graph of the loss begins.
        slots: The leaves.
        grads: What autograd itself found for them.

    Raises:
        ValueError: with the path of every such leaf.
    """
    direct = []
    for slot, grad in zip(slots, grads, strict=True):
        axes = slot.spec.transform.axes if slot.spec.transform else ()
        agreeing = [axis for axis in axes if axis.size > 1 and slot.spec.dim_of(axis) is None]
        if grad is not None and agreeing:
            direct.append((slot, agreeing))
    if not direct:
        return
    found = used_without_pvary(outputs, [(slot.tensor, axes) for slot, axes in direct], _Deliver)
    problems = [
        Problem(
            slot.path, f"maths on a leaf that ranks of {[axis.name for axis in axes]} hold alike", "gather or pvary"
        )
        for (slot, axes), wrong in zip(direct, found, strict=True)
        if wrong
    ]
    remedy = "gather these leaves, or hand them to each rank's own maths by fs.pvary, so that gradients are summed"
    if problems:
        raise leaf_error(f"{what}: gradients would stay unsummed", problems, remedy)


def refuse_unhooked(what: str, slots: Sequence[Slot]) -> None:
    """Refuse gradients that hooks on parameters would not see, or see in parts.

    Args:
        what: The verb that runs, for the error.
        slots: Leaves whose gradients are no part of the full one that is collected in a backward.

    Raises:
        ValueError: with the path of every one that has hooks.
    """
    found = "maths on its shards, or a derivative by it inside the loss"
    problems = [Problem(slot.path, found, "uses of the gathered leaf alone") for slot in slots if slot.hooks]
    if problems:
        remedy = "gather these leaves first and differentiate outside, or remove the hooks before functionalize"
        raise leaf_error(f"{what}: gradients that hooks on parameters would not see", problems, remedy)
