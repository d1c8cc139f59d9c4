"""Uses: the owners of full tensors."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard import _compat, comm
from fshard.engine.leaf import Leaf
from fshard.engine.plan import Unit
from fshard.transforms.compose import check_results, reduction
from fshard.tree import grouped
from fshard.tree.checks import check_versions, count_writes

# The transform by which a leaf is gathered.
transform_of = operator.attrgetter("spec.transform")


class Use:
    """One gathering of a unit in a forward, and again in its backward: the owner of its full tensors.

    Attributes:
        unit: The unit.
        leaves: Its leaves.
        trained: Those that take a gradient.
        places: The number of each.
        begun: Whether its full tensors are under way or there.
        full: The full tensors, by leaf; None until they have been waited for.
        outputs: Tensors handed out to the function, by leaf, while its scope lasts; autograd knows them.
        left: Whether its scope has ended.
        checkpoint: The outermost checkpoint that computes with it again, until whose end it stays open.
        closed: Whether another use has replaced it in the forward.
        lazy: Whether the backward gathers it again on demand alone.
        due: Number of the step of the backward at which its gradients are due.
    """

    def __init__(self, unit: Unit, leaves: Sequence[Leaf]) -> None:
        """Nothing is gathered yet."""
        self.unit, self.leaves = unit, leaves
        self.places = {leaf: i for i, leaf in enumerate(leaves)}
        self.trained = [leaf for leaf in leaves if leaf.trained]
        self.due = -1
        self.checkpoint: Any = None
        self.full: list[torch.Tensor] | None = None
        self.outputs: dict[int, torch.Tensor] = {}
        self.begun = self.left = self.closed = self.lazy = False
        self._holders: list[tuple[dict[str, Any], str]] = []
        self._finish: list[tuple[list[int], Callable[[], Sequence[torch.Tensor]]]] = []
        self._versions: list[int] = []

    @_compat.outside_selective_checkpoint()
    def start(self) -> None:
        """Start to gather, unless that is under way."""
        if self.begun:
            return
        leaves, self.begun = self.leaves, True
        missing = [leaf if leaf.keeper is None else None for leaf in leaves]
        if not self.unit.regathered:
            for leaf in leaves:
                leaf.keeper = leaf.keeper or self
        paths = [leaf.path for leaf in missing if leaf is not None]
        with count_writes(), torch.no_grad(), comm.concerning([self.unit.name], paths):
            self._finish = [
                (group, transform.start_gather([leaves[i].stored for i in group], [leaves[i].spec for i in group]))
                for transform, group in grouped(missing, transform_of).items()
            ]

    @_compat.outside_selective_checkpoint()
    def wait(self) -> list[torch.Tensor]:
        """Wait for the full tensors, and gather them if need be."""
        if self.full is None:
            self.start()
            found: dict[int, torch.Tensor] = {}
            finishing, self._finish = self._finish, []
            with count_writes(), torch.no_grad():
                for group, finish in finishing:
                    leaves = [self.leaves[i] for i in group]
                    found.update(zip(group, checked("gather", leaves, finish()), strict=True))
            full = [
                found[i] if i in found else leaf.keeper.tensor_of(leaf)  # type: ignore[union-attr]
                for i, leaf in enumerate(self.leaves)
            ]
            for leaf, tensor in zip(self.leaves, full, strict=True):
                leaf.gathered(tensor)
            self.full, self._versions = full, _compat.versions(full)
        return self.full

    def tensor_of(self, leaf: Leaf) -> torch.Tensor:
        """The full tensor of a leaf."""
        return self.wait()[self.places[leaf]]

    def release(self) -> None:
        """Drop all full tensors; those that are under way come first."""
        if self.begun:
            self.wait()
        self.full, self.begun = None, False

    def hand_out(self, holder: dict[str, Any], key: str) -> None:
        """Note where an output was put, so that it is taken back when the use's scope ends."""
        self._holders.append((holder, key))

    def take_back(self) -> None:
        """Take back what was handed out: outside of its scope nobody finds a use's tensors."""
        for holder, key in self._holders:
            holder.pop(key, None)
        self.outputs, self._holders = {}, []

    def check_writes(self, what: str) -> None:
        """Refuse in-place writes to full tensors, which would not reach the parameters, or reach them unseen."""
        if self.full is not None:
            check_versions(what, [leaf.path for leaf in self.leaves], self.full, self._versions)


def checked(half: str, leaves: Sequence[Leaf], results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Check what a user's transform has made of leaves, as `check_results` does; those of fshard pass through.

    Args:
        half: "gather" or "scatter".
        leaves: Leaves of one transform.
        results: What that returned.
    """
    transform = transform_of(leaves[0])
    if reduction(transform).is_foreign:
        check_results(transform, half, results, [leaf.path for leaf in leaves], [leaf.spec for leaf in leaves])
    return results
