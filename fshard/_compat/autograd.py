"""Private APIs of autograd, torch.func and tensors, each with the versions it was checked on."""

import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import CodeType
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import (
    CheckpointFunction,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    _checkpoint_hook,
    checkpoint,
)

_Result = TypeVar("_Result")

# How many times to check that torch has released its tensors, which it usually has at the first check.
MAX_RELEASE_CHECKS = 1000
# The code of the hooks that a checkpoint makes for each of its calls: a function's constants hold that of inner ones.
_CHECKPOINT_HOOKS = tuple(
    constant for constant in _checkpoint_hook.__init__.__code__.co_consts if isinstance(constant, CodeType)
)


def version(tensor: torch.Tensor) -> int:
    """The number of in-place writes to a tensor's memory, counted by autograd. Checked on 2.13.

    Always 0 for a tensor made in inference mode, whose writes autograd does not count.
    """
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The `version` of each tensor, for thousands of them. Checked on 2.13."""
    counted = list(tensors)
    try:
        return list(map(operator.attrgetter("_version"), counted))
    except RuntimeError:
        # A tensor made in inference mode has none.
        return list(map(version, counted))


# Whether a torch.func transform holds a tensor, whose storage then is not to be had. Checked on 2.13.
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
# Whether torch.vmap maps over a tensor. Checked on 2.13.
is_mapped = torch._C._functorch.is_batchedtensor
# The context in which torch.func wraps no new tensor. A wrapped one is dead when its transform has ended, and torch
# ends the process where its values are read. Checked on 2.13.
outside_transforms = torch._C._DisableFuncTorch
# The number that autograd will give its next node; a backward runs nodes from high to low. Checked on 2.13.
next_sequence_number = torch._C._autograd._get_sequence_nr
# Compute as kernels do, in a context, so that a view holds no reference to its base. Checked on 2.13.
below_autograd = torch._C._AutoDispatchBelowAutograd


def levels(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, and those that torch.func transforms hold it by, the innermost transform's first.

    Each has the node that made it in the graph of its transform. Checked on 2.13.
    """
    yield tensor
    while is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
        yield tensor


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Whether a backward of autograd's or of any torch.func transform may reach a tensor. Checked on 2.13."""
    return torch.is_grad_enabled() and any(level.requires_grad for level in levels(tensor))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that all torch.func transforms hold a tensor by. Checked on 2.13."""
    *_, inner = levels(tensor)
    return inner


def hook_of(tensor: torch.Tensor) -> str | None:
    """The method by which a function on the tensor's gradient was registered, if any was. Checked on 2.13."""
    if tensor._post_accumulate_grad_hooks:
        return "register_post_accumulate_grad_hook"
    return "register_hook" if tensor._backward_hooks else None


def transforms_active() -> bool:
    """Whether code runs under a torch.func transform. Checked on 2.13."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _wrapper_code(transform: Any) -> Any:
    """The code of the function that a transform of torch.func returns."""
    return next(code for code in transform.__code__.co_consts if getattr(code, "co_name", "") == "wrapper_fn")


# The functions that jacrev and jacfwd return. Checked on 2.13.
_JACREV, _JACFWD = _wrapper_code(torch.func.jacrev), _wrapper_code(torch.func.jacfwd)


def outputs_of_jacrev() -> Iterator[Any]:
    """The output of each torch.func.jacrev on the stack that is pulling back its elements. Checked on 2.13."""
    for frame in frames_of(_JACREV):
        # Before, it runs the function.
        if "flat_output" in frame.f_locals:
            yield frame.f_locals["output"]


def inputs_of_jacfwd() -> Iterator[Any]:
    """The differentiated inputs of each torch.func.jacfwd on the stack, whose elements it pushes. Checked on 2.13."""
    for frame in frames_of(_JACFWD):
        arguments = frame.f_locals["primals"]
        yield arguments[0] if len(arguments) == 1 else arguments


def frames_of(code: Any) -> Iterator[Any]:
    """List the frames on this thread's stack that run some code, the innermost first."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back


def any_dual(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether some tensor has a tangent of forward-mode AD. Checked on 2.13."""
    if forward_ad._current_level < 0:
        return False
    return any(not tensor.is_inference() and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def running_sequence_number() -> int | None:
    """The number of the node that a backward is running; None outside a backward. Checked on 2.13."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def fills_what_it_saved(outputs: Iterable[torch.Tensor], since: int) -> bool:
    """Whether an operator behind some outputs wrote to a tensor after autograd had saved it, in torch's own code.

    RReLU in training mode fills a tensor with its noise. Of the operators that have a derivative and write to an
    argument that they do not return, the others save no such argument or do not read it in the backward. Checked on
    2.13 and 2.14.1.

    Args:
        outputs: Where the graph begins.
        since: What `next_sequence_number` was before the first operator to look at.
    """
    nodes = [tensor.grad_fn for tensor in outputs]
    seen = {None, *nodes}
    # The list grows while it is walked along.
    for node in nodes:
        if node is None or node._sequence_nr() < since:
            continue
        if node.name().startswith("RreluWithNoiseBackward"):
            return True
        new = {other for other, _ in node.next_functions} - seen
        seen |= new
        nodes += new
    return False


@contextmanager
def without_saved_tensor_hooks() -> Iterator[list[Any]]:
    """Let autograd save tensors as they are, as torch.func needs it.

    Yields the pairs of hooks, innermost first; at the end those that are in the list take effect. Checked on 2.13 and
    2.14.1.
    """
    autograd, hooks = torch._C._autograd, []
    while (top := autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield hooks
    finally:
        around_checkpoint = None
        for pack, unpack in reversed(hooks):
            if not getattr(pack, "_checkpoint_internal", False):
                around_checkpoint = pack, unpack
            else:
                # From 2.14 on, the hook of a checkpoint keeps the pair around it, for what selective ones save.
                pack._user_hooks = around_checkpoint
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def honor_saved_tensor_hooks() -> dict[str, Any]:
    """Keywords by which a selective torch.utils.checkpoint saves tensors through the hooks on what autograd saves.

    Without them torch 2.14 warns and keeps the tensors themselves, so that a view of a gathered weight keeps the whole
    weight in memory until the backward. Older versions have no such keyword. Checked on 2.13 and 2.14.1.
    """
    keyword = "respect_saved_tensors_hooks"
    return {keyword: True} if keyword in inspect.signature(checkpoint).parameters else {}


def checkpoints() -> list[Any]:
    """One object for each torch.utils.checkpoint (not reentrant) that will run again what runs now, innermost first.

    Checked on 2.13.
    """
    with without_saved_tensor_hooks() as hooks:
        return [pack for pack, _ in hooks if getattr(pack, "__code__", None) in _CHECKPOINT_HOOKS]


def in_reentrant_checkpoint() -> bool:
    """Whether the forward of a reentrant torch.utils.checkpoint runs, whose results may need a gradient.

    One whose arguments require gradients, and that autograd yet does not record, runs under no_grad. Checked on 2.13.
    """
    frame = next(frames_of(CheckpointFunction.forward.__code__), None)
    if frame is None:
        return False
    given = (argument for argument in frame.f_locals["args"] if torch.is_tensor(argument))
    return bool(frame.f_locals["ctx"].next_functions) or not any(tensor.requires_grad for tensor in given)


def outside_selective_checkpoint(f: Callable[..., _Result]) -> Callable[..., _Result]:
    """Let torch's selective checkpointing not see what a function does, which it would count and cache.

    Checked on 2.13.
    """

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> _Result:
        stack = _get_current_dispatch_mode_stack()
        others = [mode for mode in stack if not isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode)]
        if others == stack:
            return f(*args, **kwargs)
        with _disable_current_modes(), ExitStack() as modes:
            for mode in others:
                modes.enter_context(mode)
            return f(*args, **kwargs)

    return run


def storage_key(tensor: torch.Tensor) -> int:
    """A number that all views of the same memory share, as long as a StorageWeakRef to it lives. Checked on 2.13."""
    return tensor.untyped_storage()._cdata


def share_memory(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """For each tensor whether anything else holds its memory: a view, its base, autograd or an array.

    Under torch.func nobody can tell. Checked on 2.13.
    """
    with outside_transforms():
        unshared = torch.empty(0)
        # All at once, so that a tensor which is there twice counts as shared.
        try:
            storages = list(map(torch.Tensor.untyped_storage, (unshared, *tensors)))
        except NotImplementedError:
            # A transform of torch.func holds some of them, and may have ended.
            tensors = [torch.empty(0) if is_transformed(tensor) else tensor for tensor in tensors]
            storages = list(map(torch.Tensor.untyped_storage, (unshared, *tensors)))
    count_uses = torch._C._storage_Use_Count
    count_references = sys.getrefcount
    storage = storages[0]
    uses = count_uses(storage._cdata)
    references = count_references(storage)
    # The owners of the memory, and of Python's object for it. No pairs of them: the garbage collector counts those.
    is_shared = [
        count_uses(storage._cdata) != uses
        or count_references(storage) != references
        # The memory of an array, and not pinned or shared on purpose.
        or not (storage.resizable() or storage.is_pinned() or storage.is_shared())
        for storage in storages
    ]
    del is_shared[0]
    return is_shared


def copied_as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is conjugated or negated as lazily as the tensor. Checked on 2.13."""
    copy = torch.empty_like(tensor, requires_grad=False)
    copy = copy.conj() if tensor.is_conj() else copy
    return (torch._neg_view(copy) if tensor.is_neg() else copy).copy_(tensor.detach())


def divide_in_place(tensors: Sequence[torch.Tensor], divisor: Any) -> None:
    """Divide tensors by a number or a scalar tensor; if they make up buffers, as these. Checked on 2.13."""
    buffers = {}
    for tensor in tensors:
        buffer = tensor if tensor._base is None else tensor._base
        buffers[id(buffer)] = buffer
    wholes = list(buffers.values())
    has_all_parts = sum(map(torch.Tensor.numel, wholes)) == sum(map(torch.Tensor.numel, tensors))
    has_their_dtypes = {whole.dtype for whole in wholes} == {tensor.dtype for tensor in tensors}
    # An accelerator divides all of them by one kernel.
    dividends = wholes if has_all_parts and has_their_dtypes else list(tensors)
    torch._foreach_div_(dividends, place_divisor(divisor, tensors[0]))


def place_divisor(divisor: Any, value: torch.Tensor) -> Any:
    """Bring a divisor to the CPU if it divides a tensor there, such as an offloaded gradient; others take both."""
    return divisor.cpu() if value.is_cpu and isinstance(divisor, torch.Tensor) else divisor


@outside_selective_checkpoint
def cast_all(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Cast each tensor to a dtype, or return it if it has that dtype. Checked on 2.13.

    Where nothing is differentiated, one operator casts all of them: one kernel on an accelerator, if all casts are from
    one dtype to one other. Each result has memory of its own, so that writes to it are counted apart.
    """
    if [tensor.dtype for tensor in tensors] == dtypes:
        return list(tensors)
    if torch.is_grad_enabled() or transforms_active():
        return [tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    results = []
    sources = []
    casts = []
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        if tensor.dtype is not dtype:
            sources.append(tensor)
            tensor = torch.empty_like(tensor, dtype=dtype)
            casts.append(tensor)
        results.append(tensor)
    if len(casts) == 1:
        # An operator on lists would launch several kernels for one large tensor.
        casts[0].copy_(sources[0])
    elif casts:
        torch._foreach_copy_(casts, sources)
    return results


def wait_until_released(tensors: Sequence[torch.Tensor]) -> None:
    """Wait until Python alone holds tensors that a thread of torch has finished its work on. Checked on 2.13."""
    for _ in range(MAX_RELEASE_CHECKS):
        if all(tensor._use_count() <= 1 for tensor in tensors):  # type: ignore[attr-defined]
            return
        # That thread is about to release them; it may need this core for it.
        os.sched_yield()


@contextmanager
def shared_dual_level() -> Iterator[None]:
    """Hold one level of forward-mode AD for all threads, which then neither enter nor leave one. Checked on 2.13.

    The level, and functorch's count of nested `jvp`s that decides when to enter it, belong to the process: a thread
    that leaves the level takes the tangents of all others away. Inside, `forward_ad.dual_level()` does nothing, and
    tangents made under it last until this context is left.
    """
    from torch._functorch import eager_transforms

    with (
        forward_ad.dual_level() as level,
        patch.multiple(forward_ad, enter_dual_level=lambda: level, exit_dual_level=lambda *, level=None: None),
        patch.object(eager_transforms, "JVP_NESTING", eager_transforms.JVP_NESTING),
    ):
        yield
