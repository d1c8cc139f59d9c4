"""Train steps for jit, and what it must keep of the eager ones: bits, collectives, and one trace."""

import re
from collections.abc import Callable, Sequence
from difflib import unified_diff
from typing import Any, NamedTuple

import pytest
import torch

import fshard as fs
from fshard.testing import spmd
from tests.optim.test_table import every_leaf, on_shards
from tests.trees import assert_alike, copied, tensors

STEPS = 2

State = Any
Step = Callable[..., tuple[State, Any]]


class Case(NamedTuple):
    """A step that returns (state, out), its first state, and for each step the arguments besides."""

    step: Step
    state: State
    batches: Sequence[tuple[Any, ...]]


def refused(text: str) -> Any:
    """Expect a ValueError of exactly this text."""
    return pytest.raises(ValueError, match=f"^{re.escape(text)}$")


def collectives(record: fs.comm.Record) -> list[fs.comm.Collective]:
    """Those of a step; eager ranks compare their calls besides, which graphs did when they were traced.

    So they did which leaves are used, of which eager ranks tell each other with the objective.
    """
    entries = [entry for entry in record if not entry.about.is_comparison]
    return [entry._replace(bytes=0) if entry.label == fs.comm.Verb.OBJECTIVE else entry for entry in entries]


def assert_jitted_is_eager(case: Case, **options: Any) -> None:
    """Run a step eagerly and jitted, each from what it returned before."""
    jitted, expected, state = fs.jit(case.step, **options), case.state, copied(case.state)
    for batch in case.batches:
        with fs.comm.record() as eager:
            expected, expected_out = case.step(expected, *batch)
        with fs.comm.record() as graph:
            state, out = jitted(state, *batch)
        assert_alike((state, out), (expected, expected_out))
        # By hand, because pytest does not rewrite assertions in the processes of ranks.
        difference = list(unified_diff([*map(repr, collectives(eager))], [*map(repr, collectives(graph))], lineterm=""))
        assert not difference, "\n".join(difference)
        assert not any(tensor.requires_grad for tensor in tensors((state, out)))
    assert jitted.traces == ["the first call"]


def assert_on_ranks(make: Callable[[], Case], world: Any) -> None:
    """Assert on every rank that what `make` makes there is the same jitted, with its state donated."""
    spmd(lambda: assert_jitted_is_eager(make(), donate_argnums=0), world)


def train_step(loss: Callable[..., Any], tx: fs.Optimizer, grad: Any = fs.value_and_grad, **options: Any) -> Step:
    """The plain step: gradients of a local loss of (params, *batch), and an update."""

    def step(state: fs.TrainState, *batch: Any) -> tuple[fs.TrainState, torch.Tensor]:
        run = grad(loss, transform_state=state.transform_state, **options)
        value, grads, transform_state = run(state.params, *batch)
        return fs.update(tx, state, grads, transform_state=transform_state), value

    return step


def adamw() -> fs.Optimizer:
    return fs.from_torch(torch.optim.AdamW, lr=0.01, fused=True)


def trained(
    loss: Callable[..., Any], params: Any, batches: Any, tx: fs.Optimizer | None = None, **options: Any
) -> Case:
    """A case of the plain step."""
    tx = tx or adamw()
    return Case(train_step(loss, tx, **options), fs.TrainState.create(params, tx), batches)


def updating(make_optimizer: Callable[[], fs.Optimizer]) -> Callable[[], Case]:
    """Make the case of an update by an optimizer, on the tree of its table."""

    def make() -> Case:
        (params, grads), tx = on_shards(every_leaf()), make_optimizer()
        state = fs.TrainState.create(params, tx)
        return Case(lambda state, grad: (fs.update(tx, state, grad), None), state, [(g,) for g in grads[:STEPS]])

    return make
