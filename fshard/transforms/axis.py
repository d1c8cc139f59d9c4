"""Transforms over one mesh axis: fully_shard, replicate, split_dim and own_dim."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from fshard import comm
from fshard.errors import Problem, refuse
from fshard.mesh import Mesh, axis_of
from fshard.transforms.base import BuiltIn, Finish, LayoutError, ShardTransform, Specs, Tensors, foreign_names
from fshard.tree import Axis, Spec
from fshard.tree.checks import WHOLE, Range, check_arguments, check_numbers, describe


@dataclass(frozen=True)
class _FullyShard(BuiltIn):
    """Split leaves over an axis, and keep small ones whole.

    A transform that sends in another way overrides `start_rows` and `start_sums`.
    """

    axis: Axis
    dim: int
    min_shard_elements: float

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (self.axis,)

    def layout(self, spec: Spec) -> Spec:
        if math.prod(spec.shape) < self.min_shard_elements:
            return spec.on(self.axis)
        # A number is stored with one dim.
        num_dims = max(len(spec.shape), 1)
        return spec.split(self.axis, _count_from_front(self.dim, num_dims, spec, self.axis))

    def start_rows(self, shards: Tensors, specs: Specs) -> Finish:
        """Start sending shards to all ranks.

        Args:
            shards: The shards of leaves that are split over this axis.
            specs: The specs of these leaves.

        Returns:
            A function that finishes, and returns the shards of all ranks as the rows of one tensor for each leaf.
        """
        return comm.start_all_gather(shards, self.axis, "gather")

    def start_sums(self, stacks: Tensors, specs: Specs) -> Finish:
        """Start summing over ranks, where each rank gets the sum of one row.

        Args:
            stacks: The gradients of leaves that are split over this axis, with a row for each rank.
            specs: The specs of these leaves.

        Returns:
            A function that finishes, and returns the sum of this rank's rows for each leaf.
        """
        return comm.start_reduce_scatter(stacks, self.axis, "scatter", in_tree=_sums_in_tree(specs))

    def start_gather(self, leaves: Tensors, specs: Specs) -> Finish:
        dims = self.split_dims(specs)
        self._check_inputs("gather", leaves, specs, dims)
        finish_rows = self.start_rows([leaves[index] for index in dims], [specs[index] for index in dims])

        def finish() -> Tensors:
            gathered = list(leaves)
            for (index, dim), rows in zip(dims.items(), finish_rows(), strict=True):
                gathered[index] = self._join_rows(rows, specs[index], dim)
            return gathered

        return finish

    def start_scatter(self, grads: Tensors, specs: Specs) -> Finish:
        return self.start_scatter_with(self.start_sums, grads, specs)

    def start_scatter_with(
        self,
        start_sums: Callable[[Tensors, Specs], Finish],
        grads: Tensors,
        specs: Specs,
    ) -> Finish:
        """Start a scatter that sums the gradients of split leaves by a function like `start_sums`."""
        dims = self.split_dims(specs)
        self._check_inputs("scatter", grads, specs, dims)
        whole = [index for index in range(len(grads)) if index not in dims]
        stacks = [self.stack(grads[index], specs[index], dim) for index, dim in dims.items()]
        finish_split = start_sums(stacks, [specs[index] for index in dims])
        whole_grads = [grads[index] for index in whole]
        finish_whole = comm.start_all_reduce(whole_grads, self.axis, "scatter", in_tree=_sums_in_tree(specs))

        def finish() -> Tensors:
            sums = dict(zip(dims, finish_split(), strict=True))
            sums.update(zip(whole, finish_whole(), strict=True))
            return [sums[index] for index in range(len(sums))]

        return finish

    def _check_inputs(self, half: str, tensors: Tensors, specs: Specs, dims: Mapping[int, int]) -> None:
        """Refuse shards or gradients of a user's transform that are no tensors of the sizes that this rank sends.

        Without this check, ranks would send each other other sizes, or elements too many would be cut off unseen.
        """
        names = foreign_names(specs[0].transform) if specs else ()
        if not names:
            return
        problems = []
        for index, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
            dim = dims.get(index)
            if not isinstance(tensor, torch.Tensor):
                expected = "a tensor"
            elif dim is None or (half == "scatter" and self._ends_a_number(spec, dim)):
                continue
            else:
                size = spec.shared_out(dim, self.axis)
                size = -(-size // self.axis.size) if half == "gather" else size
                if tensor.dim() > dim and tensor.shape[dim] == size:
                    continue
                expected = f"a tensor with size {size} in dim {dim}"
            problems.append(Problem(f"leaf {index} of shape {spec.shape}", describe(tensor), expected))
        shape = "shard" if half == "gather" else "full leaf"
        remedy = f"let {half} return a tensor for each leaf, shaped as the {shape} that the next transform sends"
        headline = f"{' or '.join(names)}.{half}: results cannot be sent over {self.axis.name!r}"
        refuse(headline, problems, remedy)

    def stack(self, grad: torch.Tensor, spec: Spec, dim: int) -> torch.Tensor:
        """Cut a gradient in the ranks' pieces along a new first dim."""
        if self._ends_a_number(spec, dim):
            grad = grad.unsqueeze(0)
        size = grad.shape[dim]
        missing = -size % self.axis.size
        if missing:
            dims_behind = grad.dim() - dim - 1
            grad = pad(grad, (0, 0) * dims_behind + (0, missing))
        pieces = torch.unflatten(grad, dim, (self.axis.size, (size + missing) // self.axis.size))
        return pieces.movedim(dim, 0) if dim else pieces

    def split_dims(self, specs: Specs) -> dict[int, int]:
        """Return which leaves are split over this axis, with the dim of each. The others are whole on every rank."""
        dims = {}
        for index, spec in enumerate(specs):
            dim = spec.dim_of(self.axis)
            if dim is not None:
                dims[index] = dim
        return dims

    def _join_rows(self, rows: torch.Tensor, spec: Spec, dim: int) -> torch.Tensor:
        """Put the ranks' rows side by side along `dim`, and cut off the padding."""
        side_by_side = rows.movedim(0, dim) if dim else rows
        full = side_by_side.flatten(dim, dim + 1)
        if spec.padded_shape != spec.storage_shape:
            full = full.narrow(dim, 0, spec.shared_out(dim, self.axis))
        # Kernels round by strides, so that a view with others would have other bits.
        full = full.contiguous()
        if self._ends_a_number(spec, dim):
            return full.select(0, 0)
        return full

    def _ends_a_number(self, spec: Spec, dim: int) -> bool:
        """Whether this axis is the last one gathered of a number, which has no dim left then."""
        return not spec.shape and spec.partition.names(dim)[0] == self.axis.name


def _sums_in_tree(specs: Specs) -> bool:
    """Whether gradients are summed in one binary tree over ranks. All leaves of one transform agree."""
    policy = specs[0].reshard if specs else None
    return policy is not None and policy.sums_in_tree


def _count_from_front(dim: int, num_dims: int, spec: Spec, axis: Axis) -> int:
    """Count a dim from the front, and refuse one that a leaf does not have."""
    if not -num_dims <= dim < num_dims:
        raise LayoutError(got=f"shape {spec.shape}", expected=f"a dim {dim} to split over {axis.name!r}")
    return dim % num_dims


def fully_shard(mesh: Mesh | Axis, *, dim: int = 0, min_shard_elements: int = 0) -> ShardTransform:
    """Split each leaf in equal pieces over a mesh axis: gather is an all-gather, scatter a reduce-scatter.

    A dim that does not divide is padded at its end, as FSDP2 does. Tiny leaves stay whole on every rank and have their
    gradients summed together, as with min_weight_size in JAX's FSDP.

    Args:
        mesh: A mesh of one axis, such as mesh["shard"], or an Axis.
        dim: The dim to split; may count from the end.
        min_shard_elements: Leaves of fewer elements stay whole.

    Returns:
        The transform.

    Raises:
        ValueError: if the mesh has several axes, or an argument is out of range.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ...     return fs.shard({"w": torch.tensor([1.0, 2.0, 3.0])}, fs.fully_shard(mesh))["w"].local.tolist()
    >>> fs.testing.spmd(program, world=2)  # the 0 is padding
    [[1.0, 2.0], [3.0, 0.0]]
    """
    check_numbers("fully_shard", Range("0 or more", lambda number: number >= 0), min_shard_elements=min_shard_elements)
    check_arguments("fully_shard", WHOLE, dim=dim)
    return _FullyShard(axis_of(mesh), dim, min_shard_elements)


def replicate(mesh: Mesh | Axis) -> ShardTransform:
    """Keep each leaf the same on every rank of a mesh axis: gather communicates nothing, scatter sums.

    Args:
        mesh: A mesh of one axis, such as mesh["replicate"], or an Axis.

    Returns:
        The transform.

    Raises:
        ValueError: if the mesh has several axes.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"replicate": -1}, device="cpu")
    ...     params = fs.shard({"w": torch.ones(2)}, fs.replicate(mesh))
    ...     mine = {"w": torch.tensor([1.0, 3.0]) * fs.axis_index(fs.axis_of(mesh))}
    ...     return fs.scatter_grads(mine, params, reduce="sum")["w"].local.tolist()
    >>> fs.testing.spmd(program, world=3)  # 0 + 1 + 2 times each
    [[3.0, 9.0], [3.0, 9.0], [3.0, 9.0]]
    """
    # No leaf is large enough to be split.
    return _FullyShard(axis_of(mesh), dim=0, min_shard_elements=math.inf)


@dataclass(frozen=True)
class _SplitDim(BuiltIn):
    """Split leaves for good; `brings_data` says that batches are split over the axis too."""

    axis: Axis
    dim: int
    brings_data: bool = False

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (self.axis,) if self.brings_data else ()

    def scatter(self, grads: Tensors, specs: Specs) -> Tensors:
        return grads

    def layout(self, spec: Spec) -> Spec:
        dim = _count_from_front(self.dim, len(spec.shape), spec, self.axis)
        size = spec.local_shape[dim]
        if size % self.axis.size:
            multiple = f"a multiple of {self.axis.size}, the size of {self.axis.name!r}"
            raise LayoutError(got=f"size {size} of dim {dim}", expected=multiple)
        return spec.split(self.axis, dim, owned=True)


def split_dim(mesh: Mesh | Axis, *, dim: int) -> ShardTransform:
    """Split a dim over a mesh axis for good: gather and scatter leave it alone, each rank computes with its own piece.

    Tensor parallelism in a composition: `compose(fully_shard(mesh["shard"]), split_dim(mesh["tp"], dim=0))` stores
    a leaf over both axes and gathers the first. The loss must agree between the ranks of the axis: partial results are
    summed by `psum_invariant`, and what agrees is handed to each rank's own piece by `pcast`, as Megatron's g and f.
    Where ranks of the axis have batches of their own, take `own_dim`.

    Args:
        mesh: A mesh of one axis, such as mesh["tp"], or an Axis.
        dim: The dim to split, which must be a multiple of the axis's size; may count from the end.

    Returns:
        The transform.

    Raises:
        ValueError: if the mesh has several axes; from shard, if a leaf's dim does not divide.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"tp": -1}, device="cpu")
    ...     params = fs.shard({"w": torch.arange(4.0).reshape(2, 2)}, fs.split_dim(mesh, dim=1))
    ...     return fs.gather(params)["w"].tolist()
    >>> fs.testing.spmd(program, world=2)  # each rank computes with its own column
    [[[0.0], [2.0]], [[1.0], [3.0]]]
    """
    check_arguments("split_dim", WHOLE, dim=dim)
    return _SplitDim(axis_of(mesh), dim)


def own_dim(mesh: Mesh | Axis, dim: int = 0) -> ShardTransform:
    """Split a dim over a mesh axis whose ranks have batches of their own: each rank computes with its own piece.

    Experts: a rank sends rows of its batch to the pieces that they need, by `all_to_all` or `ragged_all_to_all`, and
    the transpose of that brings every rank's part of the gradient back, so that a piece's gradient is complete without
    a sum. Losses differ between ranks of the axis and are reduced over it, so that other leaves must be summed there:
    `masked(compose(fully_shard(mesh["shard"], dim=1), own_dim(mesh["expert"])), "*experts*",
    otherwise=hybrid_shard(mesh, axis="shard", replicate_axis="expert"))`. Follows Shazeer et al., "Outrageously Large
    Neural Networks" (2017), and Lepikhin et al., "GShard" (2020).

    Args:
        mesh: A mesh of one axis, such as mesh["expert"], or an Axis.
        dim: The dim to split, which must be a multiple of the axis's size; may count from the end.

    Returns:
        The transform.

    Raises:
        ValueError: if the mesh has several axes; from shard, if a leaf's dim does not divide.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"expert": -1}, device="cpu")
    ...     params, rank = fs.shard({"experts": torch.ones(2, 3)}, fs.own_dim(mesh)), fs.axis_index(fs.axis_of(mesh))
    ...     loss_and_grads = fs.value_and_grad(lambda p: (1 + rank) * fs.gather(p)["experts"].sum(), reduce="sum")
    ...     loss, grads = loss_and_grads(params)
    ...     return loss.item(), grads["experts"].local.tolist()
    >>> fs.testing.spmd(program, world=2)  # the sum of both losses, and of each piece its own gradient
    [(9.0, [[1.0, 1.0, 1.0]]), (9.0, [[2.0, 2.0, 2.0]])]
    """
    check_arguments("own_dim", WHOLE, dim=dim)
    return _SplitDim(axis_of(mesh), dim, brings_data=True)
