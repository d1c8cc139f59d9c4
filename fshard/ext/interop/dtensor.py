"""To and from torch's DTensor, the leaf type of FSDP2; torch.distributed.tensor is imported on first use."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

import fshard as fs
from fshard.extend import Exchange, describe, expect, flatten, piece_of, refuse


def from_dtensor(tree: Any, strategy: Any) -> Any:
    """Turn DTensor leaves into Sharded ones with the layout they have, without a copy where the split is even.

    Args:
        tree: Pytree with DTensor leaves, such as the state dict of an FSDP2 model; other leaves stay as they are.
        strategy: The ShardTransform to gather and scatter them with from now on, on the axes of their mesh.

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
    from torch.distributed.tensor import DTensor

    flat = flatten(tree)
    layouts = Exchange("from_dtensor").layouts(flat, strategy)
    leaves, problems = list(flat.leaves), list[tuple[str, str, str]]()
    for i, (path, name) in enumerate(zip(flat.paths, flat.names, strict=True)):
        leaf = leaves[i]
        if not isinstance(leaf, DTensor):
            continue
        own = layouts.of(path, name, leaf, fs.Spec(tuple(leaf.shape)))
        spec = _spec_of(leaf, own) if own.transform else None
        if isinstance(spec, fs.Spec):
            leaves[i] = _sharded(leaf, spec)
        elif spec:
            problems.append((path, *spec))
    remedy = "use the strategy's mesh and Shard or Replicate"
    refuse("from_dtensor: leaves cannot be taken over", [*problems, *layouts.problems], remedy)
    return flat.unflatten(leaves)


def _spec_of(leaf: Any, own: fs.Spec) -> fs.Spec | tuple[str, str]:
    """The spec of a DTensor whose spec by the strategy alone is `own`, or what was found and what was expected."""
    from torch.distributed.tensor import Replicate, Shard

    axes = [fs.axis_of(leaf.device_mesh, name) for name in leaf.device_mesh.mesh_dim_names or ()]
    needed = dict.fromkeys((*own.transform.axes, *own.axes)) if own.transform else {}
    if set(axes) != set(needed):
        return _named(axes), _named(needed)
    is_frozen = not leaf.requires_grad and leaf.is_leaf and isinstance(leaf, torch.nn.Parameter)
    spec = fs.Spec(tuple(leaf.shape), frozen=is_frozen)
    for axis, placement in zip(axes, leaf.placements, strict=True):
        if type(placement) not in (Shard, Replicate):
            return f"placement {placement}", "Shard or Replicate"
        spec = spec.split(axis, placement.dim) if type(placement) is Shard else spec.on(axis)
    whole = [axis.name for axis in own.owned if axis not in spec.partition_axes()]
    if whole:
        return f"Replicate over {whole}", "Shard where each rank owns its piece"
    # The layout is the DTensor's; how long the full tensor stays is for the strategy to say.
    taken = replace(spec, transform=own.transform, reshard=own.reshard, model_dtypes=own.model_dtypes, owned=own.owned)
    return _misfit(spec, axes) or taken


def _sharded(leaf: Any, spec: fs.Spec) -> fs.Sharded:
    local = leaf.to_local().detach()
    missing = [n - k for n, k in zip(spec.local_shape, local.shape, strict=True)]
    zeros = [n for size in reversed(missing) for n in (0, size)]
    return fs.Sharded(pad(local, zeros) if any(missing) else local, spec)


def to_dtensor(tree: Any, mesh: DeviceMesh) -> Any:
    """Turn Sharded leaves into DTensors of the same layout, without a copy where the split is even.

    Args:
        tree: Pytree with Sharded leaves; other leaves stay as they are.
        mesh: The mesh that they are sharded on, whose axes the placements refer to.

    Returns:
        The tree with DTensor leaves that share memory with the shards.

    Raises:
        ValueError: if a leaf lives on an axis that the mesh lacks, splits a dim over axes in another order or unevenly
            over several, or is a number that is split.

    >>> import torch, fshard as fs
    >>> mesh = fs.init_mesh({"shard": -1}, device="cpu")
    >>> params = fs.shard({"w": torch.ones(4, 2)}, fs.fully_shard(mesh))
    >>> dtensor = fs.to_dtensor(params, mesh)["w"]
    >>> dtensor.placements, dtensor.to_local().data_ptr() == params["w"].local.data_ptr()
    ((Shard(dim=0),), True)
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    flat = Exchange("to_dtensor").flat(tree)
    expect(isinstance(mesh, DeviceMesh), "to_dtensor", "mesh to be a DeviceMesh", describe(mesh))
    axes = [fs.axis_of(mesh, name) for name in mesh.mesh_dim_names or ()]
    remedy = "pass the mesh they were sharded with, or reshard these leaves; min_shard_elements keeps small ones whole"
    what = "to_dtensor: DTensor has no such layout on this mesh"
    misfits = flat.problems(lambda leaf: _misfit(leaf.spec, axes) if isinstance(leaf, fs.Sharded) else None)
    refuse(what, misfits, remedy)

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, fs.Sharded):
            return leaf
        dims = [leaf.spec.dim_of(axis) for axis in axes]
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
        local = leaf.local[tuple(map(slice, piece_of(leaf).tensor.shape))]
        shape = torch.Size(leaf.spec.shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    return flat.unflatten([convert(leaf) for leaf in flat.leaves])


def _misfit(spec: fs.Spec, axes: list[fs.Axis]) -> tuple[str, str] | None:
    """The layout that was found and the one that was expected, where DTensor has no such one on the axes of a mesh.

    It splits a dim over axes in their order, a number not at all, and pads otherwise where it splits over two of them.
    """
    fits = set(spec.axes) <= set(axes) and bool(spec.shape or not spec.partition)
    for dim, size in enumerate(spec.shape):
        split = list(spec.split_axes(dim))
        several = sum(axis.size > 1 for axis in split) > 1
        fits = fits and split == [axis for axis in axes if axis in split]
        fits = fits and not (several and size != spec.padded_shape[dim])
    found = f"{spec.partition!r} of shape {spec.shape} over {_named(spec.axes)}"
    return None if fits else (found, f"dims split evenly, in the order of {_named(axes)}, and numbers whole")


def _named(axes: Iterable[fs.Axis]) -> str:
    return ", ".join(f"{axis.name}={axis.size} in group {axis.group_name!r}" for axis in axes) or "no named axes"
