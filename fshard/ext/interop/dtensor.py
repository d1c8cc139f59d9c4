"""To and from torch's DTensor, the leaf type of FSDP2."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fshard as fs
from fshard.extend import (
    Exchange,
    Layouts,
    Problem,
    check_transform,
    describe,
    expect,
    flatten,
    padded,
    refuse,
    without_padding,
)


def from_dtensor(tree: Any, strategy: Any) -> Any:
    """Turn DTensor leaves into Sharded ones of the same layout, without a copy if the split is even.

    Args:
        tree: Pytree with DTensor leaves, such as the state dict of an FSDP2 model; other leaves stay as they are.
        strategy: The ShardTransform that gathers and scatters them from now on, on the axes of their mesh. FSDP2's
            default mesh has no names of axes, and is that of a strategy over all ranks.

    Returns:
        The tree with Sharded leaves that share memory with the DTensors.

    Raises:
        ValueError: if a leaf has partial or strided placements, a dim that several axes split unevenly, or lives on
            other axes than the strategy's.

    >>> import torch, fshard as fs
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> mesh = fs.init_mesh({"shard": -1}, device="cpu")
    >>> state_dict = {"w": distribute_tensor(torch.ones(4, 2), mesh, [Shard(1)])}
    >>> fs.from_dtensor(state_dict, fs.fully_shard(mesh))
    {'w': Sharded(float32[4, 2], P(None, 'shard'), local [4, 2])}
    """
    flat = flatten(tree)
    check_transform(strategy, "from_dtensor", "strategy")
    layouts = Layouts("from_dtensor", strategy, flat.names, flat.leaves)
    leaves = []
    problems = []
    for path, name, leaf in zip(flat.paths, flat.names, flat.leaves, strict=True):
        if isinstance(leaf, DTensor):
            target = layouts.of(path, name, leaf, fs.Spec(tuple(leaf.shape)))
            # The strategy cannot lay out a leaf without a transform, which `layouts.problems` says.
            taken = _take_over(leaf, target) if target.transform else leaf
            if isinstance(taken, str):
                problems.append(Problem(path, taken))
            leaf = taken
        leaves.append(leaf)
    remedy = "use the strategy's mesh and Shard or Replicate"
    refuse("from_dtensor: leaves cannot be taken over", problems + layouts.problems, remedy)
    return flat.unflatten(leaves)


def _take_over(leaf: DTensor, target: fs.Spec) -> fs.Sharded | str:
    """Make a Sharded leaf of a DTensor whose spec by the strategy alone is `target`, or say why that cannot be."""
    strategy_axes = dict.fromkeys((*target.transform.axes, *target.axes))
    mesh_axes = _axes_of(leaf.device_mesh, strategy_axes)
    if set(mesh_axes) != set(strategy_axes):
        return f"lives on {_list_axes(mesh_axes)}, and the strategy on {_list_axes(strategy_axes)}"
    for placement in leaf.placements:
        if type(placement) not in (Shard, Replicate):
            return f"has the placement {placement}, which is neither Shard nor Replicate"
    layout = _layout_of(leaf, mesh_axes)
    split = layout.partition_axes()
    replicated = [axis.name for axis in target.owned if axis not in split]
    if replicated:
        return f"is replicated over {replicated}, where the strategy has each rank own its piece"
    misfit = _describe_layout_misfit(layout, mesh_axes)
    if misfit:
        return misfit
    # In the strategy's order, because specs compare their axes in order.
    axes = dict.fromkeys(axis for axis in (*target.axes, *layout.axes) if axis in layout.axes)
    spec = replace(target, partition=layout.partition, axes=tuple(axes), frozen=layout.frozen)
    return fs.Sharded(padded(leaf.to_local().detach(), spec), spec)


def _layout_of(leaf: Any, axes: Iterable[fs.Axis]) -> fs.Spec:
    """Return the spec of a DTensor on the axes of its mesh, without a transform."""
    is_frozen = not leaf.requires_grad and leaf.is_leaf and isinstance(leaf, torch.nn.Parameter)
    spec = fs.Spec(tuple(leaf.shape), frozen=is_frozen)
    for axis, placement in zip(axes, leaf.placements, strict=True):
        if type(placement) is Shard:
            spec = spec.split(axis, placement.dim)
        else:
            spec = spec.on(axis)
    return spec


def to_dtensor(tree: Any, mesh: DeviceMesh) -> Any:
    """Turn Sharded leaves into DTensors of the same layout, without a copy if the split is even.

    Args:
        tree: Pytree with Sharded leaves; other leaves stay as they are.
        mesh: The mesh that they are sharded on, whose axes the placements refer to.

    Returns:
        The tree with DTensor leaves that share memory with the shards.

    Raises:
        ValueError: if a leaf lives on an axis that the mesh lacks, splits a dim over axes in another order than the
            mesh or unevenly over several, or is a number that is split.

    >>> import torch, fshard as fs
    >>> mesh = fs.init_mesh({"shard": -1}, device="cpu")
    >>> params = fs.shard({"w": torch.ones(4, 2)}, fs.fully_shard(mesh))
    >>> dtensor = fs.to_dtensor(params, mesh)["w"]
    >>> dtensor.placements, dtensor.to_local().data_ptr() == params["w"].local.data_ptr()
    ((Shard(dim=0),), True)
    """
    flat = Exchange("to_dtensor").flat(tree)
    expect(isinstance(mesh, DeviceMesh), "to_dtensor", "mesh to be a DeviceMesh", describe(mesh))
    axes = _axes_of(mesh, flat.axes)

    def describe_misfit(leaf: Any) -> str | None:
        return _describe_layout_misfit(leaf.spec, axes) if isinstance(leaf, fs.Sharded) else None

    remedy = "pass the mesh they were sharded with, or reshard these leaves; min_shard_elements keeps small ones whole"
    refuse("to_dtensor: DTensor has no such layout on this mesh", flat.problems(describe_misfit), remedy)
    return flat.unflatten(_to_dtensor(leaf, mesh, axes) for leaf in flat.leaves)


def _to_dtensor(leaf: Any, mesh: DeviceMesh, axes: list[fs.Axis]) -> Any:
    if not isinstance(leaf, fs.Sharded):
        return leaf
    placements: list[Any] = []
    for axis in axes:
        dim = leaf.spec.dim_of(axis)
        placements.append(Replicate() if dim is None else Shard(dim))
    shape = torch.Size(leaf.spec.shape)
    stride = torch.empty(shape, device="meta").stride()
    local = without_padding(leaf)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _describe_layout_misfit(spec: fs.Spec, axes: list[fs.Axis]) -> str | None:
    """Name a layout that DTensor does not have on the axes of a mesh, and those that it has; None if it has it."""
    has_layout = set(spec.axes) <= set(axes) and (spec.shape or not spec.partition)
    for dim, size in enumerate(spec.shape):
        split = [axis for axis in axes if spec.dim_of(axis) == dim]
        # A dim that DTensor splits over several axes has other padding than a leaf of fshard.
        is_padded = size != spec.padded_shape[dim] and sum(axis.size > 1 for axis in split) > 1
        if is_padded or split != list(spec.split_axes(dim)):
            has_layout = False
    if has_layout:
        return None
    layout = f"is {spec.partition!r} of shape {spec.shape} over {_list_axes(spec.axes)}"
    return f"{layout}, but DTensor splits dims evenly, in the order of {_list_axes(axes)}, and no numbers"


def _axes_of(mesh: DeviceMesh, known: Iterable[fs.Axis] = ()) -> list[fs.Axis]:
    """List the axes of a mesh. FSDP2's default mesh has no names, and is the known axis of all ranks."""
    if mesh.mesh_dim_names:
        return [fs.axis_of(mesh, name) for name in mesh.mesh_dim_names]
    if mesh.ndim > 1 or mesh.size() != dist.get_world_size():
        return []
    place = (mesh.device_type, mesh.size(), mesh.get_local_rank())
    return [axis for axis in known if (axis.device_type, axis.size, fs.comm.rank(axis)) == place]


def _list_axes(axes: Iterable[fs.Axis]) -> str:
    texts = [f"{axis.name}={axis.size} in group {axis.group_name!r} on {axis.device_type}" for axis in axes]
    return ", ".join(texts) or "no named axes"
