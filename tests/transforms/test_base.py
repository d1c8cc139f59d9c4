"""Wrapped: it is what it wraps, but for what a subclass does otherwise."""

from dataclasses import dataclass

import pytest
import torch

import fshard as fs
from fshard.testing import check_transform, spmd
from tests.trees import assert_same_bits, normal, one_axis, two_axes


def trained(transform, full, steps=3):
    """Parameters after some steps, with the collectives of the last one."""
    state = fs.TrainState.create(fs.shard(full, transform), fs.sgd(0.1))
    for _ in range(steps):
        with fs.comm.record() as record:
            _, grads, transform_state = fs.value_and_grad(
                lambda p: sum((x**2).sum() for x in fs.gather(p).values()), transform_state=state.transform_state
            )(state.params)
        state = fs.update(fs.sgd(0.1), state, grads, transform_state=transform_state)
    return fs.unshard(state.params), [tuple(entry) for entry in record]


INNER = {
    "fully_shard": lambda mesh: fs.fully_shard(mesh["shard"]),
    "hsdp": lambda mesh: fs.hsdp(mesh, min_shard_elements=0),
    "buckets": lambda mesh: fs.bucket(fs.fully_shard(mesh["shard"]), 1000),
    "masked": lambda mesh: fs.masked(fs.fully_shard(mesh["shard"]), "w", fs.replicate(mesh["shard"])),
    "feedback": lambda mesh: fs.quantize(mesh["shard"], scatter=True),
}


@pytest.mark.parametrize("name", INNER)
def test_it_is_what_it_wraps(name):
    full = {"w": normal(1)(6, 5), "b": normal(2)(7)}

    def program():
        inner = INNER[name](two_axes(4))
        (mine, record), (plain, expected) = trained(fs.Wrapped(inner), full), trained(inner, full)
        assert_same_bits(mine, plain)
        assert record == expected

    spmd(program, 4)


@dataclass(frozen=True)
class Scaled(fs.Wrapped):
    factor: float

    def gather(self, leaves, specs):
        return [self.factor * leaf for leaf in super().gather(leaves, specs)]

    def scatter(self, grads, specs):
        return [self.factor * grad for grad in super().scatter(grads, specs)]


@dataclass(frozen=True)
class Momentum(fs.Wrapped):
    """A state around a transform without one."""

    def init(self, grad):
        return torch.zeros_like(grad)

    def scatter(self, grads, specs, states):
        after = [state / 2 + grad for state, grad in zip(states, grads)]
        return self.inner.scatter(after, specs), after


def test_a_part_may_be_done_otherwise():
    full = {"w": normal(1)(6, 5), "b": normal(2)(7)}

    def program():
        inner = fs.fully_shard(one_axis())
        fs.testing.check_adjoint(Scaled(inner, 3.0), [(5, 3), (7,), ()])
        params = fs.shard(full, Scaled(inner, 3.0))
        _, grads = fs.value_and_grad(lambda p: sum(x.sum() for x in fs.gather(p).values()))(params)
        assert_same_bits(fs.unshard(grads), {name: torch.full_like(x, 3.0) for name, x in full.items()})
        found, _ = trained(Momentum(inner), {"w": torch.ones(4, dtype=torch.float64)}, steps=2)
        # 1 - 0.1 * 2, and then minus 0.1 * (2 * 0.8 + 2 / 2).
        torch.testing.assert_close(found["w"], torch.full((4,), 0.54, dtype=torch.float64))

    spmd(program, 2)


def test_it_passes_check_transform():
    spmd(lambda: check_transform(fs.Wrapped(fs.zero3(one_axis(), min_shard_elements=0))), 3)
