"""assert_matches_ddp: a train step gives torch DDP's numbers, step by step and leaf by leaf."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fshard import _compat
from fshard.shard import unshard
from fshard.testing.compare import assert_trees_close
from fshard.train_state import TrainState


class Match(NamedTuple):
    """How close two runs came.

    Attributes:
        state: The state after the last step.
        loss: Largest difference of an objective.
        params: Largest difference of a parameter's element.
    """

    state: TrainState
    loss: float
    params: float


def assert_matches_ddp(
    train_step: Callable[[TrainState, Any], tuple[TrainState, torch.Tensor]],
    state: TrainState,
    batches: Iterable[Any],
    *,
    module: nn.Module,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    before_step: Callable[[nn.Module], Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    exact: bool = False,
    find_unused_parameters: bool = False,
) -> Match:
    """Run a train step and torch DDP side by side and assert that losses and parameters agree after every step.

    Call it on every rank of a real process group, each with its own batches.

    Args:
        train_step: Called with (state, batch); returns (state, objective).
        state: The state to start from, with parameters by name, as from `functionalize`.
        batches: This rank's batches.
        module: A module with the same initial parameters; it is copied, not changed.
        loss_fn: Called with (DDP module, batch); returns this rank's loss, whose mean over ranks is compared.
        optimizer: Makes the torch optimizer of the parameters.
        before_step: Called with the DDP module between backward and step, for instance to clip.
        rtol: Relative tolerance; by default that of torch.testing.assert_close for the dtype.
        atol: Absolute tolerance; by default likewise.
        exact: Ask for bitwise equality instead. DDP divides before it sums, so this holds for one or two ranks.
        find_unused_parameters: As for DDP, which needs it where a rank's loss uses some parameters only.

    Returns:
        The final state and the largest differences seen.

    Raises:
        AssertionError: naming the first step that differs, and every leaf that does.
        ValueError: if ranks are simulated by threads, which DDP cannot run on.
    """
    if dist.get_backend() == "threaded":
        raise ValueError(
            "assert_matches_ddp: expected ranks to be processes, got threads; run it by spmd(f, Workers(n))"
        )
    copied = copy.deepcopy(module)
    for parameter, mine in zip(module.parameters(), copied.parameters(), strict=True):
        # A copy of a module has no hooks of its parameters'.
        for hook in _compat.gradient_hooks(parameter).values():
            mine.register_hook(hook)
    reference = DistributedDataParallel(copied, find_unused_parameters=find_unused_parameters)
    torch_optimizer = optimizer(reference.parameters())
    loss_gap = params_gap = 0.0
    for step, batch in enumerate(batches):
        torch_optimizer.zero_grad()
        loss = loss_fn(reference, batch)
        loss.backward()
        if before_step is not None:
            before_step(reference)
        torch_optimizer.step()
        expected_loss = loss.detach().clone()
        dist.all_reduce(expected_loss)
        expected_loss /= dist.get_world_size()
        state, objective = train_step(state, batch)
        expected = {name: parameter.detach() for name, parameter in reference.module.named_parameters()}
        actual = unshard(state.params)
        loss_gap = max(loss_gap, float((objective.detach() - expected_loss).abs()))
        params_gap = max(params_gap, _largest_gap(actual, expected))
        try:
            assert_trees_close(
                {"loss": objective.detach(), "params": actual},
                {"loss": expected_loss, "params": expected},
                rtol=rtol,
                atol=atol,
                exact=exact,
            )
        except AssertionError as error:
            raise AssertionError(f"step {step} (counted from 0) is the first that differs from DDP: {error}") from None
    return Match(state, loss_gap, params_gap)


def _largest_gap(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    gaps = ((actual[name] - tensor).abs().max() for name, tensor in expected.items() if tensor.numel())
    return max((float(gap) for gap in gaps), default=0.0)
