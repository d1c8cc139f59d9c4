"""Gathered units: the owners of full tensors."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard import _compat, comm
from fshard.engine.leaf import NOT_GATHERED, Leaf, describe_full
from fshard.engine.plan import Unit
from fshard.transforms.compose import split_gather
from fshard.transforms.run import check_results, may_take_gradients
from fshard.tree import grouped
from fshard.tree.checks import check_versions, count_writes

# The transform that gathers a leaf.
get_transform = operator.attrgetter("spec.transform")

# Leaves of one transform whose gather has started, and a function that waits for their full tensors.
PendingGather = tuple[Sequence[Leaf], Callable[[], Sequence[torch.Tensor]]]


class GatheredUnit:
    """One gathering of a unit, and the owner of its full tensors.

    A forward gathers the unit. If the unit's policy says so, the full tensors are dropped after the forward and
    gathered again in the backward, by the same object. A unit that the forward gathers twice has two such objects.

    Attributes:
        unit: The unit of the plan.
        leaves: The leaves of the unit.
        trained: The leaves that take a gradient.
        full_tensors: The full tensor of each leaf; None until they have been waited for.
        outputs: The tensors that autograd knows and the function received, by leaf, while the scope lasts.
        scope_ended: Whether the scope in which the function may read the full tensors has ended.
        is_closed: Whether the forward has closed this unit, because another unit opened after it.
        checkpoint: The outermost activation checkpoint that will recompute with this unit. The unit stays open until
            that checkpoint ends.
        is_lazy: Whether the backward gathers the unit only on demand.
        is_finished: Whether the backward has passed the step at which the unit's gradients are due.
    """

    def __init__(self, unit: Unit, leaves: Sequence[Leaf]) -> None:
        """Describe the unit; no tensor is gathered yet."""
        self.unit = unit
        self.leaves = leaves
        self.trained = [leaf for leaf in leaves if leaf.trained]
        self.full_tensors: dict[Leaf, torch.Tensor] | None = None
        self.outputs: dict[Leaf, torch.Tensor] = {}
        self.scope_ended = False
        self.is_closed = False
        self.checkpoint: Any = None
        self.is_lazy = False
        self.is_finished = False
        # The gathers that are under way; None before they start and after they have arrived.
        self._pending: list[PendingGather] | None = None
        # The leaves whose full tensors are not the stored ones, to which the call itself counts writes.
        self._copied: list[Leaf] = []
        self._copy_versions: list[int] = []
        # For each output the dict in which the function finds it, its key there, and the output, one after another: the
        # garbage collector would count thousands of tuples.
        self._output_places: list[Any] = []

    def start(self) -> None:
        """Start the all-gathers, unless they have started already."""
        if self._pending is None and self.full_tensors is None:
            self._pending = self._start_gathers()

    @_compat.outside_selective_checkpoint
    def _start_gathers(self) -> list[PendingGather]:
        pending: list[PendingGather] = []
        missing: list[Leaf] = []
        for leaf in self.leaves:
            # Leaves that share the full tensor of another gathered unit are not gathered again.
            if leaf.shared_from is not None:
                continue
            if not self.unit.is_regathered:
                leaf.shared_from = self
            if leaf.started is None:
                missing.append(leaf)
            else:
                pending.append(([leaf], leaf.started))
                # If the unit is gathered again, the gather starts anew.
                leaf.started = None
        for transform, indices in grouped(missing, get_transform).items():
            leaves = [missing[index] for index in indices]
            pending.append((leaves, self._start_gather(transform, leaves)))
        return pending

    def _start_gather(self, transform: Any, leaves: Sequence[Leaf]) -> Callable[[], Sequence[torch.Tensor]]:
        """Start to gather leaves of one transform, from the pieces that their ranks keep if there are such."""
        paths = [leaf.path for leaf in leaves]
        specs = [leaf.spec for leaf in leaves]
        shards = [leaf.stored for leaf in leaves]
        has_gradients = may_take_gradients(shards)
        axis = leaves[0].regather_axis
        with count_writes(), torch.no_grad(), comm.annotate_collectives([self.unit.name], paths):
            if axis is None or not self.unit.is_regathered:
                finish = transform.start_gather(shards, specs)
            else:
                before, after = split_gather(transform, axis)
                # A tied leaf may have its piece from another unit.
                new = [leaf for leaf in leaves if leaf.piece is None]
                pieces = before.gather([leaf.stored for leaf in new], [leaf.spec for leaf in new])
                for leaf, piece in zip(new, pieces, strict=True):
                    leaf.piece = piece
                finish = after.start_gather([leaf.piece for leaf in leaves], specs)
        return lambda: check_results(transform, "gather", finish(), paths, specs, has_gradients)

    def wait(self) -> dict[Leaf, torch.Tensor]:
        """Return the full tensors by leaf, and gather them if they are not present."""
        full = self.full_tensors
        if full is None:
            self.start()
            full = self._finish_gathers()
            self.full_tensors = full
            self._copied = [leaf for leaf, tensor in full.items() if tensor is not leaf.stored or leaf.derived]
            self._copy_versions = _compat.versions([full[leaf] for leaf in self._copied])
        return full

    @_compat.outside_selective_checkpoint
    def _finish_gathers(self) -> dict[Leaf, torch.Tensor]:
        pending = self._pending or ()
        self._pending = None
        tensors: dict[Leaf, torch.Tensor] = {}
        with count_writes(), torch.no_grad():
            for leaves, finish in pending:
                tensors.update(zip(leaves, finish(), strict=True))

        full = {}
        for leaf in self.leaves:
            tensor = tensors.get(leaf)
            if tensor is None:
                assert leaf.shared_from is not None
                tensor = leaf.shared_from.wait()[leaf]
            if leaf.full_facts is NOT_GATHERED:
                is_stored = tensor is leaf.stored
                leaf.full_facts = tensor if is_stored else describe_full(tensor.shape, tensor.dtype, tensor.device)
            full[leaf] = tensor
        return full

    def release(self) -> None:
        """Drop the full tensors."""
        # A gather that has started must finish before its buffers can be dropped.
        if self._pending is not None:
            self.wait()
        self.full_tensors = None

    def register_output(self, holder: dict[str, Any], key: str, output: torch.Tensor) -> None:
        """Record where an output is stored, so that `revoke_outputs` can remove it.

        Args:
            holder: The dict that holds the output, such as a module's parameters.
            key: The key of the output in `holder`.
            output: The output.
        """
        self._output_places += holder, key, output

    def revoke_outputs(self) -> None:
        """Remove every output from the place where the function found it, because the scope has ended."""
        places = iter(self._output_places)
        for holder, key, output in zip(places, places, places, strict=True):
            # The function may have put another tensor there, as torch.func.functional_call does.
            if dict.get(holder, key) is output:
                dict.pop(holder, key)
        self.outputs = {}
        self._output_places = []

    def check_writes(self, api_name: str) -> None:
        """Refuse in-place writes to full tensors.

        A write to a gathered copy would be lost, and a write to a tensor that shares memory with the parameter would
        change it without autograd's knowledge.

        Args:
            api_name: The public function that runs, for the error.

        Raises:
            ValueError: with the path of every leaf that was written to.
        """
        if self.full_tensors is not None:
            paths = (leaf.path for leaf in self._copied)
            copies = [self.full_tensors[leaf] for leaf in self._copied]
            check_versions(api_name, paths, copies, self._copy_versions)
