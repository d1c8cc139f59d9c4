"""Strategies: compositions of transforms under the field's names, with no mechanism of their own."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard import _compat
from fshard.errors import expect
from fshard.mesh import Mesh, axis_of
from fshard.transforms import ShardTransform, cast, compose, fully_shard, replicate
from fshard.transforms.base import Container, expect_transform
from fshard.transforms.compose import compose_with_policy
from fshard.transforms.structure import layout_axes, summed_axes
from fshard.tree import Axis, ModelDtypes, ReshardPolicy, is_mask
from fshard.tree.checks import COUNT, FLOATING, check_arguments

# Leaves of fewer elements stay whole: a bias or a norm costs more to gather than to keep.
DEFAULT_MIN_SHARD_ELEMENTS = 1024

# Bytes up to which units are gathered together, sixteen times what a link carries in the latency of a collective:
# between processes on one machine by gloo (0.5 ms, 2 GiB/s), and between accelerators on one machine (30 us, 100 GB/s).
HOST_BYTES = 16 * 1024 * 1024
ACCELERATOR_BYTES = 48_000_000


def ddp(mesh: Mesh, axis: str | Sequence[str] = "shard", **options: Any) -> ShardTransform:
    """Distributed data parallelism: everything whole on every rank, gradients summed as they appear.

    Args:
        mesh: The device mesh.
        axis: The mesh axis that batches are split over; several where they are split over each.
        **options: As for `zero3`, such as `param_dtype`, but for `regather`, `regather_axis`, `min_shard_elements` and
            `layout`.

    Returns:
        The transform to `shard` parameters with.

    Raises:
        ValueError: if the mesh has no such axis, a dtype is not floating, or an option is one of those left out.

    >>> import torch, fshard as fs
    >>> def program():
    ...     params = fs.shard({"w": torch.ones(4, 512)}, fs.ddp(fs.init_mesh({"shard": -1}, device="cpu")))
    ...     with fs.comm.record() as record:
    ...         fs.accumulate(lambda p, x: (x * fs.gather(p)["w"]).sum())(params, [1.0, 2.0])
    ...     return params["w"].spec.partition, [entry.op for entry in record if not entry.scalar]
    >>> fs.testing.spmd(program, world=2)[0]  # one sum for each of two microbatches
    (P(), ['all_reduce', 'all_reduce'])
    """
    fixed = {"regather": False, "regather_axis": None, "layout": None}
    # No leaf is large enough to be split.
    return _specialize("ddp", mesh, axis, options, **fixed, min_shard_elements=sys.maxsize)


def zero1(mesh: Mesh, axis: str | Sequence[str] = "shard", **options: Any) -> ShardTransform:
    """ZeRO-1: stored parameters and optimizer state sharded; gathered once a step, and reduced after the backward.

    Follows Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).

    Args:
        mesh: The device mesh.
        axis: As for `zero3`.
        **options: As for `zero3`, but for `regather` and `regather_axis`.

    Returns:
        The transform to `shard` parameters with.

    Raises:
        ValueError: if the mesh has no such axis, a dtype is not floating, or an option is one of those left out.

    >>> import torch, fshard as fs
    >>> def program():
    ...     params = fs.shard({"w": torch.ones(4, 512)}, fs.zero1(fs.init_mesh({"shard": -1}, device="cpu")))
    ...     with fs.comm.record() as record:
    ...         fs.accumulate(lambda p, x: (x * fs.gather(p)["w"]).sum())(params, [1.0, 2.0])
    ...     return params["w"].spec.partition, [entry.op for entry in record if not entry.scalar]
    >>> fs.testing.spmd(program, world=2)[0]  # once for both microbatches
    (P('shard'), ['all_gather', 'reduce_scatter'])
    """
    fixed = {"regather": False, "regather_axis": None, "reduce_each_microbatch": False}
    return _specialize("zero1", mesh, axis, options, **fixed)


def zero2(mesh: Mesh, axis: str | Sequence[str] = "shard", **options: Any) -> ShardTransform:
    """ZeRO-2: as ZeRO-1, with each gradient reduced as it appears, so that only shards of them are held.

    Follows Rajbhandari et al. (2020).

    Args:
        mesh: The device mesh.
        axis: As for `zero3`.
        **options: As for `zero3`, but for `regather` and `regather_axis`.

    Returns:
        The transform to `shard` parameters with.

    Raises:
        ValueError: if the mesh has no such axis, a dtype is not floating, or an option is one of those left out.

    >>> import torch, fshard as fs
    >>> def program():
    ...     params = fs.shard({"w": torch.ones(4, 512)}, fs.zero2(fs.init_mesh({"shard": -1}, device="cpu")))
    ...     with fs.comm.record() as record:
    ...         fs.accumulate(lambda p, x: (x * fs.gather(p)["w"]).sum())(params, [1.0, 2.0])
    ...     return params["w"].spec.partition, [entry.op for entry in record if not entry.scalar]
    >>> fs.testing.spmd(program, world=2)[0]  # the gradient of each of two microbatches
    (P('shard'), ['all_gather', 'reduce_scatter', 'reduce_scatter'])
    """
    return _specialize("zero2", mesh, axis, options, regather=False, regather_axis=None)


def zero3(
    mesh: Mesh,
    axis: str | Sequence[str] = "shard",
    *,
    regather: bool | str | tuple[str, ...] | Callable[[str], bool] = True,
    regather_axis: str | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    prefetch: int | None = None,
    bucket_bytes: int | None = None,
    min_shard_elements: int | None = None,
    layout: ShardTransform | None = None,
) -> ShardTransform:
    """ZeRO-3: parameters too are held as shards, and full only unit by unit, while a unit computes.

    Follows Rajbhandari et al. (2020) and torch's fully_shard (FSDP2), whose MixedPrecisionPolicy the dtypes are.

    Args:
        mesh: The device mesh.
        axis: The mesh axis to shard over. Several, as in ("shard", "cp"), split leaves over all of them, the first one
            major, as P(("shard", "cp")) does and torchtitan's FSDP with context parallelism; batches are split over
            each of them, and gathers run over the last one first. `hsdp` keeps shards whole over the other axis.
        regather: Whether a unit is dropped after its forward and gathered again in the backward: a bool for all units,
            a glob pattern or several of the names of those that are, or a function of the name.
        regather_axis: The axis that the backward gathers over, of several the one that is gathered last: the first of
            `axis`. After the first gather each rank keeps its piece of the full tensors along this axis, until the last
            backward, so that the other axes, such as links between nodes, are gathered over once in a step. Follows
            ZeRO++'s hpZ (Wang et al., 2023). None gathers over all of them again.
        param_dtype: Dtype that parameters are gathered and the floating inputs of a model, and of each submodule that
            `units=` selects, are cast to; None keeps theirs. Where `masked` gives parameters of a model strategies of
            different dtypes, the submodule of each unit casts its own inputs and outputs, as under FSDP2.
        reduce_dtype: Dtype that gradients are reduced in; None means the dtype they are computed in.
        output_dtype: Dtype that a model's floating outputs are cast to; None keeps theirs.
        prefetch: How many units are gathered ahead of the one that computes; None means one, and more while they are
            together below twice `bucket_bytes`. Of the last units of a forward as many stay for the backward, one
            at least, because it would gather them again before all else.
        bucket_bytes: Neighbouring units are gathered together, and gradients reduced together, up to this many bytes; 0
            keeps both apart. None goes by the backend of the axes, as the other
            strategies do: 16 MiB between hosts' processes, 48 MB between accelerators.
        min_shard_elements: Leaves of fewer elements stay whole on every rank; None means 1024. With `layout` the layout
            decides.
        layout: What to shard with in the place of fully_shard over `axis`, such as `quantize` or one's own; one that
            has mesh axes, so that gradients are summed.

    Returns:
        The transform to `shard` parameters with.

    Raises:
        ValueError: if the mesh has no such axis, a dtype is not floating, a number is negative, `regather_axis` is not
            the last of several to be gathered, or `layout` comes with `min_shard_elements` or has no mesh axis.

    >>> import torch, fshard as fs
    >>> def program():
    ...     params = fs.shard({"w": torch.ones(4, 512)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    ...     with fs.comm.record() as record:
    ...         fs.accumulate(lambda p, x: (x * fs.gather(p)["w"]).sum())(params, [1.0, 2.0])
    ...     return params["w"].spec.partition, [entry.op for entry in record if not entry.scalar]
    >>> fs.testing.spmd(program, world=2)[0]
    (P('shard'), ['all_gather', 'reduce_scatter', 'all_gather', 'reduce_scatter'])
    """
    # These are all arguments, and no other name is bound yet.
    return _make_strategy("zero3", **locals())


def _make_strategy(
    api_name: str,
    mesh: Mesh,
    axis: str | Sequence[str],
    *,
    regather: Any,
    regather_axis: str | None,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    output_dtype: torch.dtype | None,
    prefetch: int | None,
    bucket_bytes: int | None,
    min_shard_elements: int | None,
    layout: ShardTransform | None,
    reduce_each_microbatch: bool = True,
) -> ShardTransform:
    """Make a strategy from the arguments of `zero3`, with errors that begin with the name of the caller's function."""
    check_arguments(api_name, FLOATING, param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=output_dtype)
    check_arguments(api_name, COUNT, prefetch=prefetch, bucket_bytes=bucket_bytes)
    is_rule = isinstance(regather, bool) or is_mask(regather)
    rules = "regather to be a bool, glob patterns of units' names, or a function of the name"
    expect(is_rule, api_name, rules, f"{regather!r:.40}")
    if layout is None:
        if min_shard_elements is None:
            min_shard_elements = DEFAULT_MIN_SHARD_ELEMENTS
        layout = _shard_over(mesh, axis, min_shard_elements)
    else:
        _check_layout(api_name, layout, min_shard_elements)
    if regather_axis is not None:
        _check_regather_axis(api_name, layout, regather_axis)
    policy = ReshardPolicy(
        # A list cannot be hashed.
        regather=tuple(regather) if isinstance(regather, list) else regather,
        regather_axis=regather_axis,
        prefetch=prefetch,
        # By the mesh axis whose backend needs the largest messages.
        bucket_bytes=max(map(_bytes_over, layout.axes), default=0) if bucket_bytes is None else bucket_bytes,
        reduce_each_microbatch=reduce_each_microbatch,
    )
    dtypes = ModelDtypes(param_dtype, output_dtype) if param_dtype or output_dtype else None
    stages = [cast(gather=param_dtype), layout, cast(scatter=reduce_dtype)]
    return compose_with_policy(stages, policy, dtypes)


def _bytes_over(axis: Axis) -> int:
    """Choose up to how many bytes units are gathered together over an axis."""
    is_connected = axis.size > 1 and _compat.group_size(axis.group_name)
    sends_itself = is_connected and _compat.served_accelerators(axis.group_name)
    return ACCELERATOR_BYTES if sends_itself else HOST_BYTES


def _specialize(
    api_name: str,
    mesh: Mesh,
    axis: str | Sequence[str],
    options: dict[str, Any],
    **fixed: Any,
) -> ShardTransform:
    """Make a strategy that decides some options of `zero3` itself, and refuse these and those that no strategy has.

    Args:
        api_name: The strategy.
        mesh: As for `zero3`.
        axis: As for `zero3`.
        options: The options that its caller gave.
        **fixed: The options that it decides.
    """
    defaults = zero3.__kwdefaults__ or {}
    for name in options:
        if name in fixed:
            raise ValueError(f"{api_name}: {name} is decided by {api_name} itself. Leave it out, or use fs.zero3.")
        if name not in defaults:
            raise TypeError(f"{api_name}() got an unexpected keyword argument {name!r}")
    return _make_strategy(api_name, mesh, axis, **defaults | options | fixed)


def _shard_over(mesh: Mesh, axis: str | Sequence[str], min_shard_elements: int) -> ShardTransform:
    """Split leaves over one mesh axis, or over several."""
    names = axis if isinstance(axis, list | tuple) and axis else (axis,)
    # Of several axes the first is the major one, and the last to be gathered.
    axes = [axis_of(mesh, name) for name in reversed(names)]
    return compose(*[fully_shard(axis, min_shard_elements=min_shard_elements) for axis in axes])


def _check_layout(api_name: str, layout: Any, min_shard_elements: int | None) -> None:
    """Refuse a layout beside `min_shard_elements`, and one under which no gradient would be summed."""
    if min_shard_elements is not None:
        raise ValueError(
            f"{api_name}: min_shard_elements has no effect with layout=. Pass it to the transform that you give as "
            "layout."
        )
    expect_transform(api_name, "layout", layout)
    if not layout_axes(layout):
        raise ValueError(
            f"{api_name}: the layout {layout!r:.100} uses no mesh axis, so gradients would not be summed. Compose it "
            "with fs.fully_shard, or compose it with the strategy."
        )


def _check_regather_axis(api_name: str, layout: Any, regather_axis: Any) -> None:
    """Refuse an axis that is not the last of several to be gathered over."""
    stages = layout.stages if isinstance(layout, Container) else ()
    names = [[axis.name for axis in stage.axes] for stage in stages if summed_axes(stage)]
    is_last = len(names) > 1 and names[-1] == [regather_axis]
    expected = "regather_axis to be the last of several axes to be gathered over"
    remedy = 'name it first, as in axis=("local", "node"), regather_axis="local"'
    expect(is_last, api_name, expected, f"{regather_axis!r:.40} of the stages {names}", remedy)


def hsdp(
    mesh: Mesh,
    *,
    axis: str = "shard",
    replicate_axis: str = "replicate",
    min_shard_elements: int = DEFAULT_MIN_SHARD_ELEMENTS,
    **options: Any,
) -> ShardTransform:
    """Hybrid sharding: ZeRO-3 inside a node, whose shards every node holds.

    Follows torch's HYBRID_SHARD (Zhao et al., "PyTorch FSDP", 2023).

    Args:
        mesh: The device mesh, of two axes.
        axis: The mesh axis to shard over, inside a node.
        replicate_axis: The mesh axis across nodes, over which shards are the same and their gradients are summed.
        min_shard_elements: Leaves of fewer elements stay whole on every rank.
        **options: As for `zero3`, but for `layout` and `regather_axis`.

    Returns:
        The transform to `shard` parameters with.

    Raises:
        ValueError: if the mesh has no such axes, and as for `zero3`.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"replicate": 2, "shard": 2}, device="cpu")
    ...     params = fs.shard({"w": torch.ones(4, 512)}, fs.hsdp(mesh))
    ...     with fs.comm.record() as record:
    ...         fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())(params)
    ...     return [(entry.op, entry.axis) for entry in record if not entry.scalar]
    >>> fs.testing.spmd(program, world=4)[0]
    [('all_gather', 'shard'), ('reduce_scatter', 'shard'), ('all_reduce', 'replicate')]
    """
    layout = hybrid_shard(mesh, axis=axis, replicate_axis=replicate_axis, min_shard_elements=min_shard_elements)
    return _specialize("hsdp", mesh, axis, options, layout=layout, regather_axis=None)


def hybrid_shard(
    mesh: Mesh,
    *,
    axis: str = "shard",
    replicate_axis: str = "replicate",
    dim: int = 0,
    min_shard_elements: int = 0,
) -> ShardTransform:
    """Split each leaf over one mesh axis and keep the pieces the same over another (HSDP).

    Gather is an all-gather inside the node alone; scatter a reduce-scatter inside it, then a sum of the pieces across
    nodes, which sends a fraction of what a sum of full gradients would.

    Args:
        mesh: The device mesh.
        axis: Name of the axis to split over, whose ranks are near each other.
        replicate_axis: Name of the axis whose ranks hold the same pieces.
        dim: As for `fully_shard`.
        min_shard_elements: As for `fully_shard`.

    Returns:
        compose(replicate(...), fully_shard(...)).

    Raises:
        ValueError: if the mesh lacks an axis, or an argument is out of range.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"replicate": 2, "shard": 2}, device="cpu")
    ...     return fs.shard({"w": torch.arange(4.0)}, fs.hybrid_shard(mesh))["w"].local.tolist()
    >>> fs.testing.spmd(program, world=4)
    [[0.0, 1.0], [2.0, 3.0], [0.0, 1.0], [2.0, 3.0]]
    """
    inner = fully_shard(axis_of(mesh, axis), dim=dim, min_shard_elements=min_shard_elements)
    return compose(replicate(axis_of(mesh, replicate_axis)), inner)
