"""Verb 2: apply, and functionalize: any nn.Module as a pure function of its parameters."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fshard import _compat, comm
from fshard.checks import check_operands, kind, refuse_writes
from fshard.collectives import reduction_axes
from fshard.errors import Problem, leaf_error
from fshard.gather import gather
from fshard.shard import shard
from fshard.transforms import ShardTransform
from fshard.tree import Tree, is_sharded, tree_leaves, tree_map

# torch's default generator belongs to the process, so simulated ranks take turns to seed it.
_SEEDING = threading.Lock()

Buffers = dict[str, torch.Tensor]


class Model:
    """A module as functions: `init` makes its sharded parameters, `apply` runs it on them.

    Made by `functionalize`. The module is never changed; calls run on a copy of it that holds no weights, in the mode
    (train or eval) the module was in then.

    Attributes:
        buffers: The module's buffers when it was functionalized, by name.
    """

    def __init__(self, module: nn.Module) -> None:
        """Copy the module without its weights; see `functionalize`."""
        if not isinstance(module, nn.Module):
            raise ValueError(f"functionalize: got {kind(module)}, needed an nn.Module; call its class first")
        _refuse_lazy(module)
        self.buffers: Buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._module = module
        self._shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        self._skeleton = _copied(module, lambda tensor: torch.empty_like(tensor, device="meta"))
        self._places = _places(self._skeleton)
        self._recurrent = any(isinstance(submodule, nn.RNNBase) for submodule in module.modules())
        # Calls that overlap (threads, a model called inside itself) each need a copy of their own.
        self._idle: list[nn.Module] = []

    def init(self, strategy: ShardTransform, *, seed: int | None = None) -> dict[str, Any]:
        """Make sharded parameters, from the module's own values or anew from a seed.

        Args:
            strategy: How to shard them, such as fs.zero2(mesh).
            seed: Draw values anew with each submodule's reset_parameters, children before their parent as constructors
                do, from torch's generator seeded so; the generator's state is put back. None takes the values the
                module has.

        Returns:
            Sharded parameters by name; tied ones once, under the first of their names.

        Raises:
            ValueError: if ranks hold different values, the module is on the meta device and no seed is given, or a
                submodule cannot draw its values anew.
        """
        empty = [name for name, parameter in self._module.named_parameters() if parameter.is_meta]
        if seed is None and empty:
            problems = [Problem(f"[{name!r}]", "a tensor on the meta device", "one with values") for name in empty]
            raise leaf_error("model.init: parameters have no values", problems, "pass seed= to draw them")
        module = self._module if seed is None else _drawn(self._module, self.buffers, seed)
        return shard(dict(module.named_parameters()), strategy)

    def apply(self, params: Mapping[str, Any], *args: Any, buffers: Buffers | None = None, **kwargs: Any) -> Any:
        """Run the module's forward on given parameters.

        Args:
            params: Parameters by name, Sharded or full; Sharded ones are gathered, differentiably.
            *args: Passed to the module's forward.
            buffers: Buffers by name. None takes the module's own and refuses to lose an update of them.
            **kwargs: Passed to the module's forward.

        Returns:
            The forward's output; with `buffers`, the pair of it and the updated buffers, which stay this rank's own.

        Raises:
            ValueError: if names or shapes do not match, or the module wrote to a parameter, or to a buffer that was not
                passed.
        """
        _check_names("apply: parameters", params, self._shapes)
        given = self.buffers if buffers is None else buffers
        _check_names("apply: buffers", given, dict.fromkeys(self.buffers))
        full = gather(dict(params))
        copies = {name: buffer.clone() for name, buffer in given.items()}
        values = full | copies
        swapped = {place: value for name, value in values.items() for place in self._places[name]}
        try:
            skeleton = self._idle.pop()
        except IndexError:
            skeleton = copy.deepcopy(self._skeleton)
        with refuse_writes("apply", [f"[{name!r}]" for name in full], list(full.values())):
            out = torch.func.functional_call(skeleton, swapped, args, kwargs, tie_weights=False)
        if self._recurrent:
            _compat.forget_flat_weights(skeleton)
        self._idle.append(skeleton)
        if buffers is not None:
            return out, {name: swapped[name] for name in copies}
        _refuse_lost_updates(copies, swapped)
        return out


def functionalize(module: nn.Module) -> Model:
    """Turn any nn.Module into functions of its parameters, without touching it.

    Follows torch.func.functional_call and Flax's init and apply. For a model that trains with dropout and evaluates
    without, functionalize it in both modes; the parameters serve both.

    Args:
        module: The module, with values or on the meta device; tied and frozen parameters keep their meaning.

    Returns:
        A Model with `init` and `apply`.

    Raises:
        ValueError: if the module has lazy parameters whose shapes are not known yet.

    >>> import fshard as fs
    >>> model = fs.functionalize(nn.Linear(2, 3))
    >>> params = model.init(fs.zero2(fs.init_mesh({"shard": -1}, device="cpu")), seed=0)
    >>> model.apply(params, torch.ones(5, 2)).shape
    torch.Size([5, 3])
    """
    return Model(module)


def apply(model: Model, params: Mapping[str, Any], *args: Any, buffers: Buffers | None = None, **kwargs: Any) -> Any:
    """Run a model on parameters, sharded or full; `model.apply` is this with the model filled in.

    Args:
        model: What `functionalize` returned.
        params: Parameters by name.
        *args: Passed to the module's forward.
        buffers: Buffers by name, or None to take the module's own.
        **kwargs: Passed to the module's forward.

    Returns:
        The forward's output; with `buffers`, the pair of it and the updated buffers.

    Raises:
        ValueError: as `Model.apply`.
    """
    if not isinstance(model, Model):
        raise ValueError(f"apply: model is {kind(model)}, needed a Model; make one by fs.functionalize")
    return model.apply(params, *args, buffers=buffers, **kwargs)


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
    """
    if by not in ("rank0", "mean"):
        raise ValueError(f'sync_buffers: by is {by!r}, needed "rank0" or "mean"')
    for axis in reduction_axes(like, "sync_buffers"):
        check_operands("sync_buffers", buffers, axis)
        rows = iter(comm.all_gather(tree_leaves(buffers), axis, "sync_buffers"))
        buffers = tree_map(lambda _, rows=rows: _merged(next(rows), by), buffers)
    return buffers


def _merged(rows: torch.Tensor, by: str) -> torch.Tensor:
    return rows.mean(0) if by == "mean" and rows.is_floating_point() else rows[0].clone()


def _copied(module: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Copy a module with other tensors for its parameters and buffers; what was tied stays tied."""
    memo: dict[int, torch.Tensor] = {id(buffer): replace(buffer) for buffer in module.buffers()}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(replace(parameter), requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


def _places(module: nn.Module) -> dict[str, list[str]]:
    """Where a module holds each parameter and buffer, by its name: tied ones in several places, each named once.

    functional_call would name a place in a submodule of two names twice, and so not put back what was there.
    """
    names: dict[torch.Tensor, list[str]] = {}
    for path, submodule in module.named_modules():
        parameters = submodule.named_parameters(path, recurse=False, remove_duplicate=False)
        buffers = submodule.named_buffers(path, recurse=False, remove_duplicate=False)
        for name, tensor in (*parameters, *buffers):
            names.setdefault(tensor, []).append(name)
    return {places[0]: places for places in names.values()}


def _drawn(module: nn.Module, buffers: Buffers, seed: int) -> nn.Module:
    """A copy of the module with values drawn anew."""

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        device = torch.get_default_device() if tensor.is_meta else tensor.device
        # NaN, so that what nobody draws is found.
        return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0, device=device)

    drawn = _copied(module, fresh)
    problems = []
    for path, submodule in drawn.named_modules():
        if _reset_of(submodule) is None and any(True for _ in submodule.parameters(recurse=False)):
            found = f"{type(submodule).__name__} without reset_parameters"
            problems.append(Problem(path or "(root)", found, "a way to draw its values"))
    remedy = "add reset_parameters to these modules, or leave out seed to take the values the module has"
    if not problems:
        with _SEEDING, torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            for submodule in _children_first(drawn, set()):
                reset = _reset_of(submodule)
                if reset is not None:
                    reset()
            for name, buffer in drawn.named_buffers():
                if not buffers[name].is_meta:
                    buffer.copy_(buffers[name])
        for name, parameter in drawn.named_parameters():
            if parameter.isnan().any():
                problems.append(Problem(f"[{name!r}]", "elements left out by reset_parameters", "a value for each"))
        remedy = "draw them in reset_parameters, or leave out seed to take the values the module has"
    if problems:
        raise leaf_error("model.init: values cannot be drawn from a seed", problems, remedy)
    return drawn


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """What draws a module's own values."""
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Every submodule once, in the order in which constructors end."""
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _refuse_lazy(module: nn.Module) -> None:
    lazy = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    problems = [
        Problem(f"[{name!r}]", type(t).__name__, "a tensor with a shape") for name, t in tensors if isinstance(t, lazy)
    ]
    if problems:
        raise leaf_error("functionalize: lazy parameters", problems, "run the module once before")


def _check_names(what: str, found: Any, needed: Mapping[str, tuple[int, ...] | None]) -> None:
    """Refuse a dict whose names, or where they are known shapes, differ from those needed."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{what} are {kind(found)}, needed a dict by name; pass what model.init or apply returned")
    problems = [Problem(f"[{name!r}]", "nothing", "a leaf") for name in needed if name not in found]
    for name, leaf in found.items():
        shape = needed.get(name)
        has = leaf.spec.shape if is_sharded(leaf) else tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None
        if name not in needed:
            problems.append(Problem(f"[{name!r}]", "a leaf", "nothing"))
        elif has is None or shape not in (None, has):
            wanted = "a tensor" if shape is None else f"a tensor of shape {shape}"
            problems.append(Problem(f"[{name!r}]", kind(leaf) if has is None else f"shape {has}", wanted))
    if problems:
        raise leaf_error(f"{what} do not match the module's", problems, "pass those of this model")


def _refuse_lost_updates(copies: Buffers, after: Mapping[str, torch.Tensor]) -> None:
    problems = [
        Problem(f"[{name!r}]", "an updated buffer", "an unchanged one")
        for name, buffer in copies.items()
        if after[name] is not buffer or _compat.version(buffer)
    ]
    if problems:
        remedy = "pass buffers= and keep those returned, or functionalize the module in eval mode"
        raise leaf_error("apply: buffers were updated and would be lost", problems, remedy)
