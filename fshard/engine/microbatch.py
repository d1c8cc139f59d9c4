"""Microbatches: what a call holds from the start of a forward to the end of its backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard.collectives import CollectiveTape, make_derived_leaf_agree
from fshard.engine.backward import Backward
from fshard.engine.forward import Forward
from fshard.engine.leaf import Leaf
from fshard.engine.started import Started, take_over
from fshard.tree import Sharded, is_sharded


class Microbatch:
    """One run of the function, its backward, and the leaves that it computes with.

    Attributes:
        forward: The run of the function.
        backward: Its backward, once that has started.
        tape: Ties the collectives of the function, so that every rank runs their transposes.
        derived: The leaves that the function computed and that take a gradient.
    """

    def __init__(self, forward: Forward, leaves: Sequence[Leaf], on_transpose: Callable[[], None]) -> None:
        """Begin before the function runs.

        Args:
            forward: The forward that runs it.
            leaves: The leaves that the call bound.
            on_transpose: Called in the backward before and after the transpose of each collective of the function.
        """
        self.forward = forward
        self.backward: Backward | None = None
        self.tape = CollectiveTape(on_transpose)
        self.derived: list[Leaf] = []
        self._leaf_of_tensor_id = {id(leaf.tensor): leaf for leaf in leaves}
        # Hold on to the tensors of derived leaves. A leaf may hold only a view of its tensor, and another tensor could
        # get the id of one that is gone.
        self._computed_tensors: list[torch.Tensor] = []

    def has(self, param: Any) -> bool:
        """Return whether the call bound a parameter, or the function computed it from such."""
        return is_sharded(param) and (param.local.requires_grad or id(param.local) in self._leaf_of_tensor_id)

    def get_or_derive_leaf(self, path: str, param: Sharded) -> Leaf:
        """Return the leaf that the call bound for a parameter; make a derived leaf if it bound none.

        To make one may record collectives for the backward, which `make_derived_leaf_agree` adds.
        """
        leaf = self._leaf_of_tensor_id.get(id(param.local))
        if leaf is None:
            leaf = self._derive_leaf(path, param)
        # What a checkpoint computes again uses the gather of its forward.
        if isinstance(param, Started) and not self.forward.is_over:
            leaf.started = take_over(param)
        return leaf

    def _derive_leaf(self, path: str, param: Sharded) -> Leaf:
        with torch.enable_grad():
            settled = make_derived_leaf_agree(path, param.local, param.spec)
        leaf = Leaf(path, Sharded(settled, param.spec), param.local, derived=True)
        self._leaf_of_tensor_id[id(param.local)] = leaf
        self._computed_tensors.append(param.local)
        if leaf.trained:
            self.derived.append(leaf)
        return leaf

    def drop_references(self, keep_shared: bool) -> None:
        """Drop the gathered units.

        Args:
            keep_shared: Whether bound leaves keep the full tensors that they share, and their pieces of those that are
                gathered again, for the next microbatch.
        """
        self.forward.drop_references()
        for leaf in self._leaf_of_tensor_id.values():
            leaf.gathered_units = ()
            if leaf.derived or not keep_shared:
                leaf.shared_from = None
                leaf.piece = None
        if not keep_shared:
            # Nothing is left to drop when the call ends.
            self._leaf_of_tensor_id = {}
