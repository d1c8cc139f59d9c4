"""What a user's gather or scatter returns: checked for number and shape before it is used, and named on every rank."""

from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch

import fshard as fs
from tests.faults import axis_of_all, outcome
from tests.ranks import my_rank, on_ranks


@dataclass(frozen=True)
class Spoils(fs.ShardTransform):
    """A stage that makes something wrong of the first tensor in one half, on some ranks."""

    half: str
    wrong: str
    ranks: tuple[int, ...]

    def gather(self, leaves, specs):
        return self.spoil("gather", leaves)

    def scatter(self, grads, specs):
        return self.spoil("scatter", grads)

    def spoil(self, half, tensors):
        if half != self.half or my_rank() not in self.ranks:
            return list(tensors)
        first, *others = tensors
        match self.wrong:
            case "number":
                return others
            case "short":
                return [first[:1], *others]
            case "long":
                return [torch.cat([first, first]), *others]
            case "class":
                return [1.0, *others]


@dataclass(frozen=True)
class SpoilsResults(fs.Wrapped):
    """Spoils what the transform that it wraps returns."""

    half: str
    wrong: str
    ranks: tuple[int, ...]

    spoil = Spoils.spoil

    def gather(self, leaves, specs):
        return self.spoil("gather", self.inner.gather(leaves, specs))

    def scatter(self, grads, specs):
        return self.spoil("scatter", self.inner.scatter(grads, specs))


@dataclass(frozen=True)
class SpoilsInputs(fs.Wrapped):
    """Spoils what the transform that it wraps is given."""

    spoils: Spoils

    def gather(self, leaves, specs):
        return self.inner.gather(self.spoils.gather(leaves, specs), specs)

    def scatter(self, grads, specs):
        return self.inner.scatter(self.spoils.scatter(grads, specs), specs)


@dataclass(frozen=True)
class SpoilsStates(fs.Wrapped):
    """Has a state, and returns so many of them, or gradients alone."""

    count: int | None

    def init(self, grad):
        return grad.clone()

    def scatter(self, grads, specs, states):
        scattered = self.inner.scatter(grads, specs)
        return scattered[:1] if self.count is None else (scattered, [*states, None][: self.count])


NUMBER = (
    "expected 2 results, got 1; return one for each leaf, in their order; with states the pair of gradients and states"
)


def loss(params):
    full = fs.gather(params)
    return (full["a"] * full["b"]).sum()


def full_grads():
    return {"a": torch.ones(4, 3), "b": torch.ones(4, 3)}


def every_leaf(axis):
    return fs.fully_shard(axis, min_shard_elements=0)


CALLS = {
    "value_and_grad": fs.value_and_grad(loss),
    "accumulate": lambda p: fs.accumulate(lambda p, _: loss(p))(p, [1, 2]),
    "jit": fs.jit(fs.value_and_grad(loss)),
    "gather": fs.gather,
    "scatter_grads": lambda p: fs.scatter_grads(full_grads(), like=p),
}
DIFFERENTIATE = ("value_and_grad", "accumulate", "jit")
# Calls, and the half of a transform that goes wrong in them.
HALVES = [*product(DIFFERENTIATE, ("gather", "scatter")), ("gather", "gather"), ("scatter_grads", "scatter")]
ONE, ALL = (1,), (0, 1)


def assert_named(result, verb, text, ranks, is_heard=True):
    """The wrong ranks have an error that begins with a text, of which the others hear."""
    if my_rank() in ranks:
        assert result.error == "ValueError", result
        assert result.text.startswith(text), result
    elif is_heard:
        assert result.error == "CollectiveError", result
        assert f"rank 1 failed in {verb}: ValueError: {text}" in result.text, result
    else:
        assert not result.error, result


def text_of_results(half, wrong):
    if wrong == "number":
        return f"SpoilsResults.{half}: {NUMBER}"
    rows = 4 if half == "gather" else 2
    if wrong == "class":
        difference = "expected a tensor, got a float"
    else:
        difference = f"expected a tensor of shape ({rows}, 3), got a float32 Tensor of shape (1, 3)"
    remedy = f"To fix: let {half} return a tensor for each leaf, shaped as the "
    return f"SpoilsResults.{half}: results do not fit\n  ['a']: {difference}\n{remedy}"


@pytest.mark.rows(2)
@pytest.mark.parametrize("verb, half", HALVES)
@on_ranks(2, pytest.param("2 processes", marks=pytest.mark.slow))
def test_wrong_results_are_named_on_every_rank(verb, half):
    # A wrapper of what communicates works on shards too; as a stage of its own it has full tensors.
    alone, staged = (), (fs.cast(),)
    for wrong, ranks, stages in (
        ("short", ONE, alone),
        ("short", ALL, staged),
        ("number", ONE, staged),
        ("class", ONE, alone),
        ("class", ALL, staged),
    ):
        axis = axis_of_all()
        spoils = SpoilsResults(every_leaf(axis), half, wrong, ranks)
        params = fs.shard(full_grads(), fs.zero3(axis, layout=fs.compose(spoils, *stages)))
        result = outcome(partial(CALLS[verb], params))
        # A call without a message behind its last result has ended: the other rank hears in the next one.
        assert_named(result, verb, text_of_results(half, wrong), ranks, verb in DIFFERENTIATE)
        if len(ranks) == 1:
            again = outcome(partial(fs.psum, torch.ones(()), axis))
            # A trace that fails on one rank ends before anything is sent, and all ranks have heard of it.
            assert again.error == ("" if verb == "jit" else "CollectiveError"), again


@on_ranks(2)
def test_states_are_counted():
    axis = axis_of_all()
    for count, number in ((1, 1), (None, 1), (3, 3)):
        params = fs.shard(full_grads(), SpoilsStates(every_leaf(axis), count))
        state = fs.transform_state(params)
        result = outcome(partial(fs.value_and_grad(loss, transform_state=state), params))
        text = NUMBER.replace("got 1", f"got {number}")
        assert (result.error, result.text) == ("ValueError", f"SpoilsStates.scatter: {text}")


@pytest.mark.rows(1)
@pytest.mark.parametrize("verb, half", HALVES)
@on_ranks(2, pytest.param("2 processes", marks=pytest.mark.slow))
def test_what_a_stage_hands_on_wrongly_is_named_before_it_is_sent(verb, half):
    """What is too long would be cut off unseen, and other sizes on one rank would be no fault of the stage's name."""
    for wrong, ranks, is_wrapper in (
        ("short", ONE, False),
        ("short", ALL, True),
        ("long", ONE, True),
        ("long", ALL, False),
        ("class", ONE, False),
    ):
        axis = axis_of_all()
        spoils = Spoils(half, wrong, ranks)
        if is_wrapper:
            layout = SpoilsInputs(every_leaf(axis), spoils)
        else:
            # A gather runs from the first stage to the last one, and a scatter back.
            stages = (spoils, every_leaf(axis))
            layout = fs.compose(*(stages if half == "gather" else reversed(stages)))
        params = fs.shard(full_grads(), fs.zero3(axis, layout=layout))
        names = "Spoils or SpoilsInputs" if is_wrapper else "Spoils"
        size = 2 if half == "gather" else 4
        expected = "a tensor" if wrong == "class" else f"a tensor with size {size} in dim 0"
        text = (
            f"{names}.{half}: results cannot be sent over 'shard'\n  leaf 0 of shape (4, 3): expected {expected}, got"
        )
        assert_named(outcome(partial(CALLS[verb], params)), verb, text, ranks)


class Around(fs.Wrapped):
    """A transform of a user that changes nothing."""


class OfInference(fs.Wrapped):
    """Gathers what autograd would not save, and whose gradient it would lose."""

    @torch.inference_mode()
    def gather(self, leaves, specs):
        return [1 * full for full in self.inner.gather(leaves, specs)]


@on_ranks(2)
def test_tensors_of_inference_mode_are_named():
    params = fs.shard(full_grads(), fs.zero3(axis_of_all(), layout=OfInference(every_leaf(axis_of_all()))))
    result = outcome(partial(fs.value_and_grad(loss), params))
    text = (
        "OfInference.gather: results do not fit\n"
        "  ['a']: expected a tensor that takes a gradient, got one made in torch.inference_mode()\n  ['b']: "
    )
    assert_named(result, "value_and_grad", text, ALL)
    # In this mode the package makes tensors that take a gradient.
    plain = fs.shard(full_grads(), every_leaf(axis_of_all()))
    with torch.inference_mode():
        assert loss(plain) == 12
        averages = fs.tree_map(torch.clone, fs.shard(full_grads(), Around(fs.replicate(axis_of_all()))))
        assert loss(averages) == 12
    # Nothing trains what was made in it, so a gather may return such tensors as they are.
    assert loss(averages) == 12
