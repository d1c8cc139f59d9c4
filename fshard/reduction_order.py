"""Reduction orders: in which order gradients, losses and counts are added up, over microbatches and over ranks.

Without a name, a rank adds up its microbatches in turn, and a backend adds up the ranks. The order "tree" adds up all
microbatches of a job in one binary tree, so that the bits do not depend on the number of ranks.

This module knows what the two have in common and where they differ. Others ask a `ReductionOrder` or its `JobSums`
instead of comparing names; transforms ask the policy of the leaves that an order has marked.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import torch

from fshard.collectives import Over
from fshard.comm.collective import sum_in_tree
from fshard.errors import Problem, expect, refuse
from fshard.microbatches import Share, share_of
from fshard.transforms.axis import _FullyShard, _SplitDim
from fshard.transforms.base import ShardTransform, walk_parts
from fshard.transforms.compose import _Composed
from fshard.transforms.local import _Cast, _Offload
from fshard.transforms.structure import reduction
from fshard.tree import Axis, Flat, ReshardPolicy, Spec, Tree, flatten, is_sharded, leaves_of

# The fact by which verbs tell other ranks, and jit, of an order that has a name.
FACT = "reduction_order"


class GradientOwner(Protocol):
    """A leaf of the engine, which owns the gradient of the last microbatch, or the sum over all that have run.

    Attributes:
        path: The leaf's path.
    """

    path: str

    def take_microbatch(self) -> torch.Tensor | None:
        """Hand over the gradient of the last microbatch; None if there is none."""

    def put_sum(self, total: torch.Tensor) -> None:
        """Receive the sum over all microbatches."""


class JobSums:
    """The sums of one job over microbatches and ranks. This class adds up in turn.

    Attributes:
        has_several: Whether sums have several terms, so that a gradient is not divided before all of them are added.
    """

    def __init__(self, *, has_several: bool) -> None:
        """Begin with nothing added."""
        self.has_several = has_several

    def add_numbers(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add up numbers of this rank's microbatches as far as this rank can.

        Args:
            values: A tensor for each microbatch, all of one shape.

        Returns:
            A tensor to sum over ranks. `finish_numbers` makes the total of that sum.
        """
        return sum(values[1:], values[0])

    def finish_numbers(self, summed: torch.Tensor) -> torch.Tensor:
        """Make the total of what `add_numbers` returned, once it is summed over ranks."""
        return summed

    def add_gradients(self, leaves: Iterable[GradientOwner], *, last: bool) -> None:
        """Add the gradients of the microbatch that has just run; after the last one, leaves own the sums.

        In turn there is nothing to do: a leaf adds each gradient to what it owns.

        Args:
            leaves: The leaves that take a gradient.
            last: Whether this was the last microbatch.
        """


class _TreeJobSums(JobSums):
    """Adds up in one binary tree over the microbatches of all ranks."""

    def __init__(self, share: Share) -> None:
        # The only microbatch of a rank is one of several too. Its gradients are rounded, and divided, where those of
        # ranks that have several are.
        super().__init__(has_several=True)
        self._share = share
        self._gradients: dict[str, TreeSum] = {}

    def add_numbers(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put each number at the place of its microbatch among those of the job, with zeros elsewhere.

        A sum with zeros is exact, so the sum over ranks holds every number.
        """
        zeros = [torch.zeros_like(values[0])] * self._share.ranks
        rows = []
        for value in values:
            rows += [*zeros[: self._share.rank], value, *zeros[self._share.rank + 1 :]]
        return torch.stack(rows)

    def finish_numbers(self, summed: torch.Tensor) -> torch.Tensor:
        # A negative zero counts as a zero, as it does where other ranks' zeros are added to it.
        return sum_in_tree(list(summed + 0.0))

    def add_gradients(self, leaves: Iterable[GradientOwner], *, last: bool) -> None:
        for leaf in leaves:
            gradient = self._gradients.setdefault(leaf.path, TreeSum())
            gradient.add(leaf.take_microbatch())
            if last:
                total = self._gradients.pop(leaf.path).total()
                if total is not None:
                    leaf.put_sum(total)


class TreeSum:
    """Adds up a power of two of parts in one binary tree, and holds the fewest partial sums that this allows.

    A part that is None counts as zeros; so a sum has the same bits whoever holds them.
    """

    def __init__(self) -> None:
        """Nothing is added yet."""
        # By level: a sum of 2**level parts.
        self._sums: dict[int, torch.Tensor | None] = {}

    def add(self, part: torch.Tensor | None) -> None:
        """Add the part that comes next."""
        level = 0
        while level in self._sums:
            before = self._sums.pop(level)
            # Zeros make a positive zero of a negative one.
            if before is not None:
                part = before + (0.0 if part is None else part)
            elif part is not None:
                part = part + 0.0
            level += 1
        self._sums[level] = part

    def total(self) -> torch.Tensor | None:
        """Return the sum; None where no part was a tensor."""
        return next(iter(self._sums.values()), None)


class ReductionOrder:
    """An order of additions. This class adds up in turn; it has no name, and refuses nothing.

    Attributes:
        name: The name that users pass as `reduction_order`, and that policies hold.
        keeps_bits: Whether optimizers must give bits that do not depend on how leaves are split.
        communicate_values: What `accumulate` takes for `communicate`.
    """

    name: str | None = None
    keeps_bits = False
    communicate_values: tuple[str | None, ...] = (None, "each", "once", "outer_once")

    def list_facts(self) -> Mapping[str, str]:
        """List what ranks must agree on, by name."""
        return {FACT: self.name} if self.name else {}

    def choose_communication(self, api_name: str, params: Tree, communicate: str | None) -> str:
        """Choose whether gradients are reduced in each microbatch or once.

        Args:
            api_name: The public function that runs, for errors.
            params: The parameters, whose policies choose where the user does not.
            communicate: What the user passed.

        Returns:
            "each", "once" or "outer_once".

        Raises:
            ValueError: if `communicate` is unknown, or no leaf has an outermost of several axes to reduce over once.
        """
        expected = f"communicate to be one of {self.communicate_values}"
        expect(communicate in self.communicate_values, api_name, expected, repr(communicate))
        sharded = filter(is_sharded, leaves_of(params))
        if communicate == "outer_once" and not any(reduction(leaf.spec.transform).halves for leaf in sharded):
            raise ValueError(
                f'{api_name}: communicate="outer_once" needs leaves that are reduced over one axis after another, as '
                'under fs.hsdp. Take such a strategy, or communicate="each" or "once".'
            )
        if communicate:
            return communicate
        if "once" not in self.communicate_values:
            return "each"
        policies = [spec.reshard or ReshardPolicy() for spec in flatten(params).specs]
        return "each" if all(policy.reduce_each_microbatch for policy in policies) else "once"

    def check_reduce_over(self, api_name: str, reduce_over: Over) -> None:
        """Refuse axes to reduce over that do not go with the order."""

    def begin_sums(self, api_name: str, axes: Sequence[Axis], microbatches: int) -> JobSums:
        """Begin the sums of one job.

        Args:
            api_name: The public function that runs, for errors.
            axes: The axes that gradients are summed over.
            microbatches: The number of microbatches on this rank.

        Returns:
            The sums.

        Raises:
            ValueError: if the order cannot add up so many microbatches on so many ranks.
        """
        return JobSums(has_several=microbatches > 1)

    def mark_leaves(self, flat: Flat, axes: tuple[Axis, ...]) -> Flat:
        """Let the policies of leaves name this order, so that their transforms sum over ranks in it.

        Args:
            flat: The parameters.
            axes: The axes that gradients are summed over.

        Returns:
            The parameters with their new specs.

        Raises:
            ValueError: if a leaf's transform cannot keep the order.
        """
        return flat

    def refuse_torch_func(self, api_name: str) -> None:
        """Refuse to differentiate by torch.func, if its sums would be in another order."""

    def refuse_math_on_shards(self, api_name: str, paths: Sequence[str]) -> None:
        """Refuse gradients that come from math on shards, if only those of gathers are summed in the order.

        Args:
            api_name: The public function that runs, for the error.
            paths: The paths of the leaves with such gradients.

        Raises:
            ValueError: with the path of every such leaf.
        """


class _TreeOrder(ReductionOrder):
    """One binary tree over the microbatches of a job. Optimizers add exactly."""

    name = "tree"
    keeps_bits = True
    # With "once", this rank's full gradients would be added up in turn before they come to the tree.
    communicate_values = (None, "each")

    def check_reduce_over(self, api_name: str, reduce_over: Over) -> None:
        remedy = "shard the parameters on these axes alone"
        expect(reduce_over is None, api_name, 'reduce_over or reduction_order="tree"', "both", remedy)

    def begin_sums(self, api_name: str, axes: Sequence[Axis], microbatches: int) -> JobSums:
        share = share_of(axes)
        number = microbatches * share.ranks
        is_power_of_two = number & (number - 1) == 0
        expected = 'powers of two of ranks and of microbatches for reduction_order="tree"'
        got = f"{microbatches} microbatches on each of {share.ranks} ranks"
        expect(is_power_of_two, api_name, expected, got, 'take others, or leave out reduction_order="tree"')
        return _TreeJobSums(share)

    def mark_leaves(self, flat: Flat, axes: tuple[Axis, ...]) -> Flat:
        leaves: list[Any] = []
        for leaf in flat.leaves:
            leaves.append(replace(leaf, spec=_with_tree_sums(leaf.spec, axes)) if is_sharded(leaf) else leaf)
        return flat._replace(leaves=leaves)

    def refuse_torch_func(self, api_name: str) -> None:
        expected = 'no reduction_order="tree" inside torch.func, nor of plain tensors'
        raise ValueError(f"{api_name}: expected {expected}, got it; leave it out")

    def refuse_math_on_shards(self, api_name: str, paths: Sequence[str]) -> None:
        problems = [Problem(path, "math on its shard", "a gather of the parameter itself") for path in paths]
        remedy = "compute with full tensors, after the gather"
        refuse(f'{api_name}: reduction_order="tree" cannot add up gradients of math on shards', problems, remedy)


ORDERS = (ReductionOrder(), _TreeOrder())


def find_order(api_name: str, name: Any) -> ReductionOrder:
    """Return the order that a user names.

    Args:
        api_name: The function that the user called, for the error.
        name: "tree" or None.

    Returns:
        The order.

    Raises:
        ValueError: if no order has this name.
    """
    for order in ORDERS:
        if name == order.name:
            return order
    raise ValueError(f'{api_name}: expected reduction_order to be "tree" or None, got {name!r}')


def order_of(spec: Spec) -> ReductionOrder:
    """Return the order that the policy of a leaf names. All leaves that a call bound agree."""
    policy = spec.reshard
    return find_order("policy", policy and policy.reduction_order)


def refuse_inductor(facts: Mapping[str, str]) -> None:
    """Refuse to let Inductor compile a step whose order of additions has a name.

    Args:
        facts: What the verbs in the step have recorded, by name.

    Raises:
        ValueError: if one of them has an order.
    """
    if FACT in facts:
        raise ValueError(
            'jit: reduction_order="tree" promises equal bits, but the kernels of backend="inductor" round differently '
            'depending on fusion. Use backend="graph", or leave out reduction_order="tree".'
        )


@lru_cache(maxsize=4096)
def _with_tree_sums(spec: Spec, axes: tuple[Axis, ...]) -> Spec:
    """Let a leaf's transform sum gradients in the tree.

    Args:
        spec: The leaf's spec.
        axes: The axes that it sums over, in the order of all leaves.

    Returns:
        The spec, whose policy names the tree.

    Raises:
        ValueError: if the transform does something whose bits depend on how many ranks there are.
    """
    remedy = 'take a strategy without it, or leave out reduction_order="tree"'
    order = [axis.name for axis in axes if axis.size > 1]
    leaf_order = [axis.name for axis in spec.transform.axes if axis.size > 1]
    expected = f"transforms that sum over {order} in this order"
    expect(leaf_order == order, 'reduction_order="tree"', expected, f"{leaf_order}", remedy)
    exact = _Composed, _FullyShard, _Cast, _Offload, _SplitDim, ShardTransform
    misfits = []
    for part in walk_parts(spec.transform):
        if type(part) not in exact:
            misfits.append(type(part).__name__.strip("_"))
        elif isinstance(part, _SplitDim) and part.brings_data:
            misfits.append("own_dim")
    accepted = "fully_shard, replicate, split_dim, casts and offload"
    expect(not misfits, 'reduction_order="tree"', accepted, ", ".join(misfits), remedy)
    return replace(spec, reshard=replace(spec.reshard or ReshardPolicy(), reduction_order=_TreeOrder.name))
