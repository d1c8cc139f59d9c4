"""Comparisons: of two trees, of a step's arguments before and after it, of a step with torch DDP's."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import fshard as fs
from fshard.extend import (
    NOT_NEGATIVE,
    Problem,
    all_gather_object,
    check_numbers,
    describe,
    expect,
    flatten,
    hash_of,
    is_donated,
    named_buffers,
    named_parameters,
    ranks_of,
    refuse,
    resolve_process_group,
    same_structure,
    tensor_of,
    without_padding,
)

_API_NAME = "assert_matches_ddp"
# How far a ratio may be from a whole number, for rounding; float32 parameters that change by a thousandth reach this.
RATIO_TOLERANCE = 1e-3
# By how much an operation may differ from the module's, relative to its largest value, if no tolerance is given.
BOUND = 1e-5
BOUND_IF_EXACT = 1e-12


def assert_trees_close(
    actual: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None, exact: bool = False
) -> None:
    """Assert that two trees hold the same values, whatever their leaves are stored as.

    Shards of equal specs are compared in place, without their padding. If only one side is sharded, or the specs
    differ, leaves are unsharded first, on every rank. Values are compared as torch.testing.assert_close does with
    equal_nan=True: NaN equals NaN.

    Args:
        actual: Pytree of Sharded leaves, tensors, arrays or numbers. A float of Python is one of float64.
        expected: A tree of the same structure.
        rtol: Relative tolerance; by default that of torch.testing.assert_close for the leaf's dtype.
        atol: Absolute tolerance; pass it if rtol is passed.
        exact: Ask for equal values bit for bit, in which 0.0 is not -0.0, and equal dtypes instead.

    Raises:
        ValueError: if structures differ, or a tolerance is no finite number.
        AssertionError: with the path of every leaf that differs, by how much and where, or that has no values.

    >>> assert_trees_close({"w": torch.ones(2)}, {"w": torch.ones(2, dtype=torch.float64)})
    """
    problems = differing_leaves(actual, expected, rtol, atol, exact)
    refuse("trees differ", problems, "look at the first leaf that differs", AssertionError)


def differing_leaves(
    actual: Any, expected: Any, rtol: float | None = None, atol: float | None = None, exact: bool = False
) -> list[Problem]:
    """List the leaves of two trees that differ; see `assert_trees_close`."""
    flat = flatten(actual)
    expected_flat = flatten(expected)
    same_structure("assert_trees_close", flat, expected_flat)
    left = list(flat.leaves)
    right = list(expected_flat.leaves)
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        if isinstance(a, fs.Sharded) and isinstance(b, fs.Sharded) and a.spec == b.spec:
            left[i] = without_padding(a)
            right[i] = without_padding(b)
    if exact:
        rtol = atol = 0.0
    elif rtol is not None or atol is not None:
        check_numbers("assert_trees_close", NOT_NEGATIVE, rtol=rtol, atol=atol)

    def describe_difference(a: Any, b: Any) -> tuple[str, str] | None:
        if a is None and b is None:
            return None
        words = "equal values" if exact else "close values"
        try:
            # What has no values cannot be copied. NumPy keeps all digits of a number of Python.
            arrays = [np.asarray(leaf) if isinstance(leaf, float | complex) else leaf for leaf in (a, b)]
            tensors = [torch.as_tensor(array).cpu() for array in arrays]
            torch.testing.assert_close(*tensors, rtol=rtol, atol=atol, equal_nan=True, check_dtype=exact)
        except AssertionError as error:
            first, _, rest = str(error).partition("\n\n")
            return " ".join((rest or first).split()), words
        except (TypeError, ValueError, RuntimeError):
            return f"{describe(a)} and {describe(b)}", "tensors, arrays or numbers with values"
        # Others, such as sparse ones, have no bytes to compare.
        with suppress(RuntimeError, TypeError):
            if exact and len(set(map(hash_of, tensors))) > 1:
                return "other bits, as those of 0.0 and -0.0 are", words
        return None

    # The leaves that are still sharded have another spec on the other side, so both sides are compared in full.
    return flat._replace(leaves=fs.unshard(left)).problems(describe_difference, fs.unshard(right))


def check_pure(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a step and assert that it has changed no bit of its arguments.

    `value_and_grad` and `apply` refuse the writes in place that autograd counts. This check compares digests of every
    tensor before and after the step, so it also notices writes through `tensor.data`, `tensor.numpy()` or a custom
    kernel.

    Args:
        step: The function, such as a train step.
        *args: Its arguments: pytrees, whose tensors and Sharded leaves are compared.
        **kwargs: Its arguments by keyword, which are compared too.

    Returns:
        What the step returned. Tensors that were donated to it are not compared.

    Raises:
        ValueError: if the arguments have no tensors, as where the step is a closure over them.
        AssertionError: with the path of every tensor that changed, or that the step put into a tree or took out of it.

    >>> check_pure(lambda tree: tree["w"] + 1, {"w": torch.ones(2)})
    tensor([2., 2.])
    """
    trees = {f"argument {i}": arg for i, arg in enumerate(args)} | kwargs
    before = _digests(trees)
    expect(before, "check_pure", "arguments with tensors", "none", "pass the state and the batch behind the step")
    out = step(*args, **kwargs)
    after = _digests(trees)
    problems = []
    for path in before | after:
        digest = after.get(path, "no tensor")
        if digest is not None and digest != before.get(path):
            problems.append(Problem(path, "other values after the step", "those before it"))
    remedy = "find the write in place to these tensors, to a view of them or to their tree, and make a new one instead"
    refuse("check_pure: the step changed its arguments", problems, remedy, AssertionError)
    return out


def _digests(trees: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shape, the dtype and a checksum of the bits of each tensor, by its path; None if it was donated."""
    digests: dict[str, Any] = {}
    for name, tree in trees.items():
        for path, leaf in flatten(tree).named_leaves:
            tensor = tensor_of(leaf)
            if is_donated(leaf):
                digests[name + path] = None
            elif isinstance(tensor, torch.Tensor):
                digests[name + path] = tensor.shape, tensor.dtype, hash_of(tensor)
    return digests


def assert_matches_ddp(
    train_step: Callable[[fs.TrainState, Any], tuple[fs.TrainState, torch.Tensor]],
    state: fs.TrainState,
    batches: Iterable[Any],
    *,
    module: nn.Module,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    rtol: float | None = None,
    atol: float | None = None,
    exact: bool = False,
    mesh: DeviceMesh | None = None,
) -> fs.TrainState:
    """Run a train step and torch DDP side by side; assert that losses, parameters and buffers agree after every step.

    Call it on every rank of a real process group, or of a mesh of some ranks, each with its own batches. If a rank
    finds a difference, all ranks raise. Buffers are compared with those of DDP's first rank, which DDP sends to the
    others: where a train step updates buffers, it keeps them in the state and calls `sync_buffers`. DDP runs with
    `find_unused_parameters=True`, so that a rank's loss may use some parameters only; it prints a warning if none does.
    Give each rank batches of its own: on equal ones, the gradients of one rank are their mean.

    Args:
        train_step: Called with (state, batch); returns (state, objective).
        state: The state to start from, with parameters by name, as from `functionalize`.
        batches: This rank's batches, as many as those of each other rank.
        module: A module with the same initial parameters; it is copied, not changed.
        loss_fn: Called with (DDP module, batch); returns this rank's loss, whose mean over ranks is compared.
        optimizer: Makes the torch optimizer of the parameters. A pre-hook of its step may clip gradients.
        rtol: Relative tolerance; by default that of torch.testing.assert_close for the dtype.
        atol: Absolute tolerance; by default likewise.
        exact: Ask for bitwise equality instead. DDP divides before it sums, so this holds for one or two ranks.
        mesh: The mesh of some ranks that the state lives on; None for all ranks of this run.

    Returns:
        The final state.

    Raises:
        AssertionError: on every rank, naming the first step that differs, and every leaf that does. Where the loss, or
            the change of the parameters, is DDP's times or divided by a whole number, the first line says so. The last
            lines say which operation of the step is the first that differs from those of the module, as `fs.diff` does.
        ValueError: if ranks are simulated by threads, which DDP cannot run on, if an argument or what a function
            returns is something else, or if no batch changes DDP's parameters to finite ones, so that no gradient was
            compared.

    >>> import torch, fshard as fs
    >>> module, tx = torch.nn.Linear(2, 1), fs.from_torch(torch.optim.SGD, lr=0.1)
    >>> model, mesh = fs.functionalize(module), fs.init_mesh({"shard": -1}, device="cpu")
    >>> def train_step(state, x):
    ...     loss, grads = fs.value_and_grad(lambda p: model.apply(p, x).square().mean())(state.params)
    ...     return fs.update(tx, state, grads), loss
    >>> state = fs.testing.assert_matches_ddp(
    ...     train_step,
    ...     fs.TrainState.create(model.init(fs.zero3(mesh)), tx),
    ...     torch.arange(12.0).reshape(2, 3, 2),  # two batches
    ...     module=module,
    ...     loss_fn=lambda ddp, x: ddp(x).square().mean(),
    ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ...     exact=True,
    ... )
    >>> state.step
    tensor(2)
    """
    expect(dist.get_backend() != "threaded", _API_NAME, "ranks to be processes", "threads", "use spmd(f, Workers(n))")
    _check_kinds(train_step=train_step, state=state, module=module, loss_fn=loss_fn, optimizer=optimizer)
    ranks = ranks_of(mesh)
    steps = list(batches)
    counts = all_gather_object(len(steps), [ranks], _API_NAME)
    # A rank with more would wait in DDP for the others.
    expect(len(set(counts)) == 1, _API_NAME, "equally many batches on each rank", f"{counts!r:.100}")
    group = resolve_process_group(ranks.group_name)
    reference = DistributedDataParallel(copy.deepcopy(module), process_group=group, find_unused_parameters=True)
    torch_optimizer = optimizer(reference.parameters())
    initial = _copy_tensors(named_buffers(module))
    has_trained = False
    for step, batch in enumerate(steps):
        before = _copy_tensors(named_parameters(reference.module))
        expected = _step_of_ddp(reference, torch_optimizer, loss_fn(reference, batch), group)
        state_before = state
        state, objective = _check_result(train_step(state, batch))
        # A state without buffers leaves those of the module as they were.
        buffers = initial | dict(fs.unshard(state.buffers) or {})
        actual = {"loss": objective.detach(), "params": fs.unshard(state.params), "buffers": buffers}
        problems = differing_leaves(actual, expected, rtol, atol, exact)
        ratios = _describe_ratios(actual, expected, before, dist.get_world_size(group)) if problems else ""
        headline = f"step {step} (counted from 0) is the first that differs from DDP: {ratios or 'trees differ'}"
        bound = BOUND_IF_EXACT if exact else rtol or BOUND
        find_place = partial(_find_place, train_step, loss_fn, module, state_before, batch, bound)
        refuse_on_all_ranks(headline, problems, "look at the first leaf that differs", [ranks], find_place)
        has_trained |= 0 < _flat_change(expected["params"], before).abs().max().item() < math.inf
    expect(has_trained, _API_NAME, "batches, not used up, that change DDP's parameters to finite ones", "none")
    return state


def _check_result(out: Any) -> Any:
    """Refuse what a train step returns if it is no pair of a state and a loss."""
    parts = out if type(out) is tuple and out else (out,)
    is_pair = len(parts) == 2 and isinstance(parts[0], fs.TrainState) and isinstance(parts[1], torch.Tensor)
    expect(is_pair, _API_NAME, "train_step to return (state, loss)", ", ".join(map(describe, parts)))
    return out


def _check_kinds(**arguments: Any) -> None:
    """Refuse arguments of assert_matches_ddp that are something else: a state, a module, or else a function."""
    for name, argument in arguments.items():
        kind: Any = {"state": fs.TrainState, "module": nn.Module}.get(name, Callable)
        expect(isinstance(argument, kind), _API_NAME, f"{name} to be a {kind.__name__}", describe(argument))


def _find_place(
    train_step: Callable[..., Any],
    loss_fn: Callable[..., Any],
    module: nn.Module,
    state: fs.TrainState,
    batch: Any,
    bound: float,
) -> str:
    """Say which operation of a train step is the first that differs from the module's forward and backward."""
    if any(map(is_donated, flatten(state).leaves)):
        return "\nThe step donates its state. Without donation this error also names the operation that differs first."
    model = fs.functionalize(module)

    def reference_step(state: fs.TrainState, batch: Any) -> torch.Tensor:
        buffers = model.buffers | (state.buffers or {})

        def loss_of(params: Any, batch: Any) -> torch.Tensor:
            # Stands for the module that DDP wraps.
            def forward(*args: Any, **kwargs: Any) -> Any:
                return model.apply(params, *args, buffers=buffers, **kwargs)[0]

            return loss_fn(forward, batch)

        return fs.value_and_grad(loss_of)(state.params, batch)[0]

    try:
        difference = fs.diff(reference_step, train_step, state, batch, bound=bound)
    except (AttributeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        return f"\nThe operation that differs first is unknown, because a step could not be traced: {reason}"
    if difference.first is None:
        return (
            "\nAll operations that the forward and the backward share with the module agree. Look at the loss, at the "
            "reduction of gradients, at the optimizer, and of buffers at fs.sync_buffers."
        )
    return f"\nThe first operation that differs from the module's:\n{difference.first}"


def _describe_ratios(
    actual: Mapping[str, Any], expected: Mapping[str, Any], before: Mapping[str, torch.Tensor], ranks: int
) -> str:
    """Say which of the loss and the parameters' change is DDP's times or divided by a whole number; "" if none is."""
    if actual["loss"].shape != expected["loss"].shape:
        return ""
    change = _flat_change(actual["params"], before)
    expected_change = _flat_change(expected["params"], before)
    of_loss = _describe_ratio("the loss", actual["loss"], expected["loss"], ranks)
    of_change = _describe_ratio("the change of the parameters", change, expected_change, ranks)
    if of_change:
        of_change += " Or do the learning rates differ?"
    return "; ".join(filter(None, (of_loss, of_change)))


def _flat_change(params: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute by how much parameters have changed, in one row."""
    return torch.cat([(params[name] - start).flatten() for name, start in before.items()])


def _describe_ratio(name: str, actual: torch.Tensor, expected: torch.Tensor, ranks: int) -> str:
    """Say by which whole number a value is DDP's times or divided by, and where that may come from; "" by none."""
    actual = actual.double()
    expected = expected.double()
    if not all(0 < norm < math.inf for norm in (actual.norm(), expected.norm())):
        return ""
    for larger, smaller, relation, guess in (
        (actual, expected, "times that of DDP", "a sum where a mean is meant?"),
        (expected, actual, "times smaller than that of DDP", "a mean taken twice, or where a sum is meant?"),
    ):
        ratio = round((larger.norm() / smaller.norm()).item())
        is_exact = (larger - ratio * smaller).norm() <= RATIO_TOLERANCE * larger.norm()
        if ratio > 1 and is_exact:
            origin = "the number of ranks" if ratio == ranks else "as many as microbatches of an accumulation, perhaps"
            return f"{name} is {ratio} {relation}, {origin}: {guess}"
    return ""


def _step_of_ddp(
    reference: DistributedDataParallel, optimizer: torch.optim.Optimizer, loss: torch.Tensor, group: Any
) -> dict[str, Any]:
    """Step DDP; return the mean of losses, the parameters, and the first rank's buffers, which DDP would send next."""
    expect(isinstance(loss, torch.Tensor), _API_NAME, "loss_fn to return the loss", describe(loss))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=group)
    buffers = _copy_tensors(named_buffers(reference.module))
    for buffer in buffers.values():
        dist.broadcast(buffer, group=group, group_src=0)
    params = _copy_tensors(named_parameters(reference.module))
    return {"loss": mean / dist.get_world_size(group), "params": params, "buffers": buffers}


def _copy_tensors(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors}


def refuse_on_all_ranks(
    headline: str,
    problems: list[Problem],
    remedy: str,
    axes: Sequence[fs.Axis],
    find_place: Callable[[], str] = str,
) -> None:
    """Raise an AssertionError of this rank's problems, or that of the first rank that has any.

    Args:
        headline: What is wrong.
        problems: The leaves of this rank.
        remedy: What to do.
        axes: The ranks.
        find_place: Called on all ranks if any has problems; what it returns follows the text, by default nothing.
    """
    text = ""
    try:
        refuse(headline, problems, remedy)
    except ValueError as refusal:
        text = str(refusal)
    for rank, text_of_rank in enumerate(all_gather_object(text, axes, _API_NAME)):
        if text_of_rank:
            raise AssertionError((text or f"rank {rank}: {text_of_rank}") + find_place())
