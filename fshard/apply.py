"""apply and functionalize: any nn.Module as a pure function of its parameters."""

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fshard import _compat, comm
from fshard.collectives import reduction_axes, shared_axes
from fshard.engine import EngineCall, find_call
from fshard.errors import expect, refuse
from fshard.gather import gather
from fshard.init import Reset, copy_module, init, refuse_blank
from fshard.init.deferred import init_abstract, may_skip_drawing
from fshard.module_template import ModuleTemplate
from fshard.random import seeded
from fshard.shard import check_transform, mesh_device, shard
from fshard.transforms import ShardTransform
from fshard.transforms.base import foreign_names
from fshard.tree import (
    Flat,
    Sharded,
    Tree,
    attributes_of,
    flatten,
    is_sharded,
    tree_leaves,
    tree_map,
)
from fshard.tree.checks import (
    check_flags,
    check_local,
    check_operands,
    check_tensors,
    check_transforms,
    count_writes,
    describe,
    explain_donation,
    is_differentiated,
    refuse_writes,
    same_structure,
)
from fshard.units import Units, choose_dtypes, plan_units

Buffers = dict[str, torch.Tensor]


@dataclass
class _SharedBuffers:
    """The buffers of a model, which its copies in another mode share."""

    values: Buffers


class Model:
    """A module as functions: `init` makes its sharded parameters, `apply` runs it on them.

    Made by `functionalize`. The module is never changed; calls run on a copy of it that holds no weights, in the mode
    (train or eval) the module was in then. `eval` and `train` return the model in another mode.

    >>> import torch, fshard as fs
    >>> model = fs.functionalize(torch.nn.BatchNorm1d(2))
    >>> params = model.init(fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> out, buffers = model.apply(params, torch.tensor([[0.0, 1.0], [2.0, 3.0]]), buffers=model.buffers)
    >>> out, model.buffers["running_mean"], buffers["running_mean"]
    (tensor([[-1.0000, -1.0000],
            [ 1.0000,  1.0000]]), tensor([0., 0.]), tensor([0.1000, 0.2000]))
    """

    def __init__(self, module: nn.Module, units: Units = None) -> None:
        """Copy the module without its weights; see `functionalize`."""
        _check_module(module)
        self._shared_buffers = _SharedBuffers(
            {name: buffer.detach().clone() for name, buffer in _compat.named_buffers(module)}
        )
        self._module = module
        self._bare = copy_module(module, lambda tensor: torch.empty_like(tensor, device="meta"))
        self._empty = flatten(dict(_compat.named_parameters(self._bare)))
        # Thousands of parameters share their shapes.
        shapes: dict[torch.Size, torch.Size] = {}
        self._shapes = [shapes.setdefault(parameter.shape, parameter.shape) for parameter in self._empty.leaves]
        self._units = plan_units(module, units)
        # Calls that overlap (threads, a model called inside itself) each need a copy of their own.
        self._idle: list[ModuleTemplate] = []

    @property
    def buffers(self) -> Buffers:
        """The buffers that the module had when it was functionalized, by name.

        Those of a module on the meta device have values after `init` with a seed, if the module draws them.
        """
        return self._shared_buffers.values

    def eval(self) -> "Model":
        """Return the model in evaluation mode: without dropout, and with the running statistics of batch norm.

        Unlike nn.Module.eval, it does not change this model. Parameters of one serve the other, and `buffers` are
        shared: values that `init` of one draws are those of the other too.

        Returns:
            A Model with the same units.

        >>> import torch, fshard as fs
        >>> model = fs.functionalize(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)))
        >>> params = model.init(fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")), seed=0)
        >>> x = torch.ones(8, 2)
        >>> model.apply(params, x).count_nonzero() < 16, model.eval().apply(params, x).count_nonzero()
        (tensor(True), tensor(16))
        """
        return self._in_mode(training=False)

    def train(self) -> "Model":
        """Return the model in training mode; see `eval`.

        Returns:
            A Model with the same units.

        >>> import torch, fshard as fs
        >>> model = fs.functionalize(torch.nn.Dropout(0.5).eval())
        >>> model, model.train()
        (Model(Dropout, parameters=0, units=0, buffers=0, training=False),
         Model(Dropout, parameters=0, units=0, buffers=0, training=True))
        """
        return self._in_mode(training=True)

    def _in_mode(self, *, training: bool) -> "Model":
        model = copy.copy(self)
        model._bare = copy_module(self._bare, torch.empty_like).train(training)
        return model

    def __repr__(self) -> str:
        """Name the module, count what it holds, and say which mode it runs in."""
        counts = f"parameters={len(self._empty.leaves)}, units={len(self._units)}, buffers={len(self.buffers)}"
        return f"Model({type(self._module).__name__}, {counts}, training={self._bare.training})"

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without idle copies; they are made again on demand."""
        return self.__dict__ | {"_idle": []}

    def init(
        self,
        strategy: ShardTransform,
        *,
        seed: int | None = None,
        mode: str = "replay",
        reset: Reset | None = None,
        abstract: bool = False,
    ) -> dict[str, Any]:
        """Make sharded parameters, from the module's own values or anew from a seed. Every rank must call this.

        They are on the mesh's device, and `buffers` are moved there, wherever the module is. Values are drawn on the
        module's device, or for one on the meta device on torch's default device, as in `with torch.device("cuda"):`.

        With a seed the module may be on the meta device: no more is held than the shards and the outermost submodule
        that draws, and `buffers` then holds values for those buffers that the module draws itself.

        Args:
            strategy: How to shard them, such as fs.zero2(mesh).
            seed: Draw values anew with each submodule's reset_parameters, children before their parent as constructors
                do; `fs.with_init_weights` gives them to models of transformers. torch's generator is seeded for this
                and then restored. None takes the values the module has.
            mode: "replay" draws every value on every rank, bitwise what drawing the whole module gives. "counter"
                draws only this rank's part, each element from the seed, the parameter's name and the element's place
                in the full tensor. The numbers differ from "replay", but have the same distributions, and are the same
                at every world size.
                It follows uniform_, normal_ and arithmetic with numbers, on views too.
            reset: Sets the values of a submodule in place, in the place of its reset_parameters, such as
                `model._init_weights`; called with each submodule, children first, as nn.Module.apply does, and once
                before, to see which submodules draw. For models whose constructor draws values otherwise. None takes
                each submodule's own.
            abstract: Whether to make leaves without values, on the meta device, of the same specs and dtypes.
                Nothing is drawn or allocated. `TrainState.create` makes an abstract state of them, which
                `fs.checkpoint.restore` fills, and which `fs.plan` and `fs.make_graph` take. Buffers on the meta device
                stay there.

        Returns:
            Sharded parameters by name; tied ones once, under the first of their names, with the values that the last of
            their owners drew.

        Raises:
            ValueError: if ranks hold different values, the module is on the meta device and no seed is given, a
                leaf is not drawn, the module has an init_weights and neither reset_parameters nor `reset` is there, a
                reset uses tensors outside of its submodule, or values are drawn by more than "counter" can follow.

        >>> import torch, fshard as fs
        >>> with torch.device("meta"):
        ...     module = torch.nn.Linear(2, 3)
        >>> model, mesh = fs.functionalize(module), fs.init_mesh({"shard": -1}, device="cpu")
        >>> params = model.init(fs.fully_shard(mesh), seed=0)
        >>> params
        {'weight': Sharded(float32[3, 2], P('shard'), local [3, 2]), 'bias': Sharded(float32[3], P('shard'), local [3])}
        >>> torch.equal(model.init(fs.fully_shard(mesh), seed=0)["weight"].local, params["weight"].local)
        True
        >>> model.init(fs.fully_shard(mesh), abstract=True)["weight"].local.device
        device(type='meta')
        """
        check_transform(strategy, "model.init", "strategy")
        check_flags("model.init", abstract=abstract)
        drawn: Buffers = {}
        if abstract or may_skip_drawing(self._module):
            params: dict[str, Any] = init_abstract(self._module, strategy)
        elif seed is None:
            if mode != "replay":
                raise ValueError(f"model.init: {mode=} needs a seed. Pass seed=.")
            params = shard(dict(_compat.named_parameters(self._module)), strategy)
        else:
            params, drawn = init(self._module, strategy, seed, mode, reset)
        # A new dict, because the caller may hold the one before.
        self._shared_buffers.values = _move_buffers(self.buffers | drawn, strategy)
        return params

    def apply(
        self,
        params: Mapping[str, Any],
        *args: Any,
        buffers: Buffers | None = None,
        key: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the module's forward on given parameters.

        Inside `value_and_grad`, and where nothing is differentiated, units are gathered just in time. Where parameters
        take part in a graph of the caller's or in a torch.func transform, all are gathered at the start.

        Args:
            params: Parameters by name, Sharded or full; Sharded ones are gathered, differentiably.
            *args: Passed to the module's forward.
            buffers: Buffers by name. None takes the module's own and refuses to lose an update of them.
            key: Where random numbers come from, such as dropout's: the same key gives the same numbers. Make one for
                each step and, if masks are to differ between ranks, for each rank by `fold_in`. None takes torch's
                own generator as it is.
            **kwargs: Passed to the module's forward.

        Returns:
            The forward's output; with `buffers`, the pair of it and the updated buffers, which stay this rank's own.

        Raises:
            ValueError: if names or shapes do not match, or the module wrote to a parameter, or to a buffer that was not
                passed.

        >>> import torch, fshard as fs
        >>> model = fs.functionalize(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5)))
        >>> params = model.init(fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")), seed=0)
        >>> first, again, other = (model.apply(params, torch.ones(4, 2), key=key) for key in (1, 1, 2))
        >>> first.shape, torch.equal(first, again), torch.equal(first, other)
        (torch.Size([4, 8]), True, False)
        """
        with comm.calling("apply", lambda: comm.axes_in(params)):
            return self._apply(params, args, buffers, key, kwargs)

    def _apply(self, params: Any, args: Any, buffers: Any, key: Any, kwargs: Any) -> Any:
        flat = flatten(dict(params) if isinstance(params, Mapping) else params)
        buffers_in = self.buffers if buffers is None else buffers
        self._check_inputs(flat, buffers_in)
        with count_writes():
            copies = {name: buffer.clone() for name, buffer in buffers_in.items()}
        try:
            with contextlib.nullcontext() if key is None else seeded(key):
                out, buffers_out = self._run(flat, params, copies, args, kwargs)
        except Exception as error:
            explain_donation(error, "apply", args=args, kwargs=kwargs)
            raise
        if buffers is not None:
            return out, buffers_out
        _refuse_lost_updates(copies, buffers_out)
        return out

    def _check_inputs(self, flat: Flat, buffers: Any) -> None:
        """Refuse parameters and buffers that are not those of this model."""
        same_structure("apply: params", flat, self._empty, "pass what this model's init returned, before the inputs")
        check_tensors("apply: params", flat)
        _check_shapes(flat, self._shapes)
        call = find_call(flat)
        # The running call has checked all that it bound.
        if call is None or not call.has_all(flat):
            check_local("apply", flat)
            check_transforms("apply", flat)
        if self.buffers or buffers != {}:
            flat_buffers = flatten(buffers)
            same_structure("apply: buffers", flat_buffers, flatten(self.buffers))
            check_tensors("apply: buffers", flat_buffers)
            if not all(tensor.is_meta for tensor in flat.tensors):
                refuse_blank(buffers)

    def _run(
        self, flat: Flat, params: Mapping[str, Any], buffers: Buffers, args: Any, kwargs: Any
    ) -> tuple[Any, Buffers]:
        """Run the module, and return what it returned with its buffers afterwards.

        Units are gathered one by one inside a call of the engine: that of `value_and_grad`, or one of its own where
        nothing is differentiated. Elsewhere the caller's own graph or transform needs all parameters at once.
        """
        local_tensors = attributes_of(flat.sharded, "local")
        if not local_tensors or _compat.transforms_active() or _compat.any_dual(local_tensors):
            return self._run_on_full(params, buffers, args, kwargs)
        call = find_call(flat)
        if call is not None:
            return self._run_by_units(call, params, buffers, args, kwargs)
        if is_differentiated(local_tensors):
            return self._run_on_full(params, buffers, args, kwargs)
        call = EngineCall("apply", flat, shared_axes(flat, ()), trains=False)
        bound = flat.unflatten(call.bound)
        try:
            return call.forward(lambda: self._run_by_units(call, bound, buffers, args, kwargs))
        finally:
            call.end()

    def _run_on_full(self, params: Mapping[str, Any], buffers: Buffers, args: Any, kwargs: Any) -> tuple[Any, Buffers]:
        full = gather(dict(params))
        template = self._take_template()
        template.bind(full, buffers, choose_dtypes(self._units, params))
        with refuse_writes("apply", [f"[{name!r}]" for name in full], list(full.values())):
            out = template.run(args, kwargs)
        buffers_after = template.buffers()
        # The caller's graph may run parts of this copy again in its backward, with these values.
        if not torch.is_grad_enabled():
            self._give_back(template)
        return out, buffers_after

    def _run_by_units(
        self, call: EngineCall, params: Mapping[str, Any], buffers: Buffers, args: Any, kwargs: Any
    ) -> tuple[Any, Buffers]:
        walk = call.begin_walk(self._units, params)
        template = self._take_template()
        # Keep the copy until the call ends: checkpoints run parts of the forward again in the backward.
        call.at_end.append(lambda: self._give_back(template))
        plain = {name: leaf for name, leaf in params.items() if name not in walk.leaves}
        template.bind(plain, buffers, choose_dtypes(self._units, params))
        template.gather_from(call, walk)
        out = template.run(args, kwargs)
        walk.finish()
        return out, template.buffers()

    def _take_template(self) -> ModuleTemplate:
        try:
            return self._idle.pop()
        except IndexError:
            # Writes to a tensor among its attributes are counted, so that it is not used again.
            with count_writes():
                return ModuleTemplate(copy_module(self._bare, torch.empty_like), self._units)

    def _give_back(self, template: ModuleTemplate) -> None:
        if template.release():
            self._idle.append(template)


def _move_buffers(buffers: Buffers, strategy: ShardTransform) -> Buffers:
    """Move buffers to the device that a strategy computes on, as FSDP2 does."""
    device = mesh_device(strategy)
    if strategy.storage is not None:
        device = strategy.storage.compute_device.type
    moved = {}
    for name, buffer in buffers.items():
        moved[name] = buffer if buffer.is_meta else buffer.to(device=device)
    return moved


def _check_module(module: Any) -> None:
    """Refuse what is no module, one without shapes or that FSDP2 sharded, and what fshard would not reach.

    Modules that torch.jit made hold their weights in C++, where a copy of them has the weights of the first. Hooks on
    parameters would not be called.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"functionalize: module must be an instance of nn.Module, not {describe(module)}.")
    for name, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule) and [*submodule.parameters()]:
            raise ValueError(
                f"functionalize: {name or 'the module'} was made by torch.jit, so it would always compute with its own "
                "weights. Pass the module as it was before. fs.jit and torch.compile take it."
            )
    hooks = []
    for name, tensor in (*_compat.named_parameters(module), *_compat.named_buffers(module)):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"functionalize: {name!r} has no shape yet. Call the module once on a batch, to make it.")
        if hasattr(tensor, "full_tensor"):
            raise ValueError(
                f"functionalize: {name!r} is a DTensor, as fully_shard makes it. Pass the module as it was before. "
                "fs.from_dtensor(module.state_dict(), strategy) takes the values over."
            )
        hook = _compat.hook_of(tensor)
        if hook:
            hooks.append(f"[{name!r}] ({hook})")
    if hooks:
        raise ValueError(
            f"functionalize: parameters have hooks, which fshard would not call: {', '.join(hooks)}. Remove them; "
            "change the returned gradients instead, or write a transform with its own scatter."
        )


def functionalize(module: nn.Module, units: Units = None) -> Model:
    """Turn any nn.Module into functions of its parameters, without touching it.

    Follows torch.func.functional_call and Flax's init and apply. The model keeps the mode that the module has now;
    `model.eval()` returns the same model in evaluation mode. A submodule that torch.compile made is gathered as a
    whole. A checkpoint_wrapper of torch changes no name: submodules and parameters have those of the module without it.

    Args:
        module: The module, with values or on the meta device; tied and frozen parameters keep their meaning.
        units: Which submodules' parameters are gathered together, just before the submodule runs: a module class, or
            several as `fs.no_split(module)` lists them for a model of transformers; a glob pattern of names, in which
            `*` stands for what lies between two dots; a number, for the smallest submodules of at least so many
            parameters; a function of (name, module); or a list, tuple or set of such. Other parameters form a unit for
            each submodule that owns some. None gathers all at once, except compiled submodules.

    Returns:
        A Model with `init` and `apply`.

    Raises:
        ValueError: if the module has parameters with hooks, or of a lazy module that was not called yet, or a part with
            parameters that torch.jit made, or `units` or a part of it matches nothing.

    >>> import fshard as fs
    >>> model = fs.functionalize(nn.Linear(2, 3))
    >>> model
    Model(Linear, parameters=2, units=1, buffers=0, training=True)
    >>> params = model.init(fs.zero2(fs.init_mesh({"shard": -1}, device="cpu")), seed=0)
    >>> model.apply(params, torch.ones(5, 2)).shape
    torch.Size([5, 3])
    """
    return Model(module, units)


def apply(model: Model, params: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Run a model on parameters, sharded or full; `model.apply` is this with the model filled in.

    Args:
        model: What `functionalize` returned.
        params: Parameters by name.
        *args: Passed to the module's forward.
        **kwargs: `buffers` and `key`, as for `Model.apply`; others are passed to the module's forward.

    Returns:
        The forward's output; with `buffers`, the pair of it and the updated buffers.

    Raises:
        ValueError: as `Model.apply`.

    >>> import torch, fshard as fs
    >>> model = fs.functionalize(torch.nn.Linear(2, 1))
    >>> params = {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([0.5])}
    >>> fs.apply(model, params, torch.ones(1, 2))
    tensor([[3.5000]])
    """
    expect(isinstance(model, Model), "apply", "model to be a Model", describe(model), "make one by fs.functionalize")
    return model.apply(params, *args, **kwargs)


def _check_shapes(flat: Flat, expected: Sequence[torch.Size]) -> None:
    """Refuse parameters of other shapes than the module's."""
    if [leaf.spec.shape if isinstance(leaf, Sharded) else None for leaf in flat.leaves] == expected:
        return

    def misfit(leaf: Any, expected_shape: torch.Size) -> tuple[str, str] | None:
        shape = leaf.spec.shape if is_sharded(leaf) else getattr(leaf, "shape", ())
        # A transform of the user's may gather another shape, as of weights that are stored as blocks of bytes.
        if shape == expected_shape or (is_sharded(leaf) and foreign_names(leaf.spec.transform)):
            return None
        return f"shape {tuple(shape)}", f"shape {tuple(expected_shape)}"

    remedy = "pass the parameters that this model's init returned"
    refuse("apply: the shapes of params differ from the module's", flat.problems(misfit, expected), remedy)


def _refuse_lost_updates(buffers_in: Buffers, buffers_out: Buffers) -> None:
    """Refuse updates of buffers that the caller did not pass.

    Args:
        buffers_in: Copies of the module's buffers, which the module ran on.
        buffers_out: Its buffers afterwards.
    """
    updated = [
        f"[{name!r}]"
        for name, buffer in buffers_in.items()
        if buffers_out[name] is not buffer or _compat.version(buffer)
    ]
    if updated:
        raise ValueError(
            f"apply: the module updated buffers {', '.join(updated)}, and the updates would be lost. Pass buffers= and "
            "keep the returned buffers, or use model.eval(). If each forward computes them anew, pass "
            "buffers=model.buffers."
        )


def sync_buffers(buffers: Tree, like: Tree, by: str = "rank0") -> Tree:
    """Make buffers agree between ranks, as DDP does before each forward.

    Args:
        buffers: Any tree of tensors, such as the buffers that `apply` returned.
        like: Sharded parameters, whose specs tell the ranks.
        by: "rank0" takes the first rank's; "mean" averages the floating ones and takes the first rank's of others.

    Returns:
        The tree with the same values on every rank.

    Raises:
        ValueError: if `by` is another word.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ...     params = fs.shard({"w": torch.ones(2)}, fs.zero3(mesh))
    ...     buffers = {"mean": torch.tensor(fs.axis_index(fs.axis_of(mesh)) + 1.0)}
    ...     return [fs.sync_buffers(buffers, params, by=by)["mean"].item() for by in ("rank0", "mean")]
    >>> fs.testing.spmd(program, world=2)
    [[1.0, 1.5], [1.0, 1.5]]
    """
    expect(by in ("rank0", "mean"), "sync_buffers", 'by to be "rank0" or "mean"', repr(by))
    for axis in reduction_axes(flatten(like), "sync_buffers"):
        flat = check_operands("sync_buffers", buffers, axis)
        # Buffers of other names may have the same shapes.
        with comm.annotate_collectives((), flat.paths):
            rows = iter(comm.all_gather(tree_leaves(buffers), axis, "sync_buffers"))
        buffers = tree_map(lambda _, rows=rows: _merge_rows(next(rows), by), buffers)
    return buffers


def _merge_rows(rows: torch.Tensor, by: str) -> torch.Tensor:
    return rows.mean(0) if by == "mean" and rows.is_floating_point() else rows[0].clone()
