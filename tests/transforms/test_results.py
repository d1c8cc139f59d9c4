"""What a user's gather or scatter returns: checked for number and shape before it is used, and named on every rank."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from tests.faults import axis_of_all, outcome
from tests.ranks import on_ranks


@dataclass(frozen=True)
class Spoils(fs.Wrapped):
    """Returns something wrong from a half on some ranks, behind the communication of what it wraps."""

    half: str
    wrong: str
    ranks: tuple[int, ...]

    def spoil(self, half, results):
        results = list(results)
        if half == self.half and dist.get_rank() in self.ranks:
            match self.wrong:
                case "number":
                    return results[1:]
                case "shape":
                    results[0] = results[0][:1]
                case "class":
                    results[0] = 1.0
        return results

    def gather(self, leaves, specs):
        return self.spoil("gather", self.inner.gather(leaves, specs))

    def scatter(self, grads, specs):
        return self.spoil("scatter", self.inner.scatter(grads, specs))


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


def texts_of(half, wrong):
    """The text that begins the error of a rank which gets wrong results."""
    if wrong == "number":
        return f"Spoils.{half}: {NUMBER}"
    rows = 4 if half == "gather" else 2
    got = "a float" if wrong == "class" else "a float32 Tensor of shape (1, 3)"
    needed = "a tensor" if wrong == "class" else f"a tensor of shape ({rows}, 3)"
    return (
        f"Spoils.{half}: results do not fit\n  ['a']: expected {needed}, got {got}\nTo fix: let {half} return a tensor"
    )


def loss(params):
    full = fs.gather(params)
    return (full["a"] * full["b"]).sum()


def full_grads():
    return {"a": torch.ones(4, 3), "b": torch.ones(4, 3)}


# Calls that gather or scatter, and whether a message follows by which ranks whose results are right hear of the others.
CALLS = {
    "value_and_grad": (fs.value_and_grad(loss), ("gather", "scatter"), True),
    "accumulate": (lambda p: fs.accumulate(lambda p, _: loss(p))(p, [1, 2]), ("gather", "scatter"), True),
    "jit": (fs.jit(fs.value_and_grad(loss)), ("gather", "scatter"), True),
    "gather": (fs.gather, ("gather",), False),
    "scatter_grads": (lambda p: fs.scatter_grads(full_grads(), like=p), ("scatter",), False),
}


def check_results_are_refused(axis, half, wrong, ranks, verb):
    call, _, has_message = CALLS[verb]
    for behind in (False, True):
        spoils = Spoils(fs.fully_shard(axis, min_shard_elements=0), half, wrong, ranks)
        # As a stage of its own it works on full tensors, or as a wrapper of what communicates on shards too.
        if behind:
            spoils = fs.compose(spoils, fs.cast())
        params = fs.shard(full_grads(), fs.zero3(axis, layout=spoils))
        found = outcome(partial(call, params))
        if dist.get_rank() in ranks:
            assert found.error == "ValueError", found
            assert found.text.startswith(texts_of(half, wrong)), found
        elif has_message:
            assert found.error == "CollectiveError", found
            assert f"rank 1 failed in {verb}: ValueError: {texts_of(half, wrong)}" in found.text, found
        else:
            # Its call has ended. It hears of the other rank in the next one.
            assert not found.error, found
        if len(ranks) == 1:
            again = outcome(partial(fs.psum, torch.ones(()), axis))
            # A trace that fails on one rank ends before anything is sent, and all ranks have heard of it.
            assert again.error == ("" if verb == "jit" else "CollectiveError"), again
            axis = axis_of_all()


@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=str)
@pytest.mark.parametrize("wrong", ("shape", "number", "class"))
@pytest.mark.parametrize("verb, half", [(verb, half) for verb, (_, halves, _) in CALLS.items() for half in halves])
@on_ranks(2, pytest.param("2 processes", marks=pytest.mark.slow))
def test_wrong_results_are_named_on_every_rank(verb, half, wrong, ranks):
    check_results_are_refused(axis_of_all(), half, wrong, ranks, verb)


@on_ranks(2)
def test_states_are_counted():
    axis = axis_of_all()
    for count, number in ((1, 1), (None, 1), (3, 3)):
        params = fs.shard(full_grads(), SpoilsStates(fs.fully_shard(axis, min_shard_elements=0), count))
        state = fs.transform_state(params)
        found = outcome(partial(fs.value_and_grad(loss, transform_state=state), params))
        text = NUMBER.replace("got 1", f"got {number}")
        assert (found.error, found.text) == ("ValueError", f"SpoilsStates.scatter: {text}")


@dataclass(frozen=True)
class SpoilsInputs(fs.ShardTransform):
    """A stage that hands something wrong to the one which communicates, on some ranks."""

    half: str
    wrong: str
    ranks: tuple[int, ...]

    def spoil(self, half, tensors):
        tensors = list(tensors)
        if half == self.half and dist.get_rank() in self.ranks:
            match self.wrong:
                case "short":
                    tensors[0] = tensors[0][:1]
                case "long":
                    tensors[0] = torch.cat([tensors[0], tensors[0]])
                case "class":
                    tensors[0] = None
        return tensors

    def gather(self, leaves, specs):
        return self.spoil("gather", leaves)

    def scatter(self, grads, specs):
        return self.spoil("scatter", grads)


@dataclass(frozen=True)
class WrapsSpoiled(fs.Wrapped):
    """Spoils what the transform that it wraps is given."""

    spoils: SpoilsInputs

    def gather(self, leaves, specs):
        return self.inner.gather(self.spoils.gather(leaves, specs), specs)

    def scatter(self, grads, specs):
        return self.inner.scatter(self.spoils.scatter(grads, specs), specs)


def spoiled_layout(axis, half, wrong, ranks, form):
    spoils = SpoilsInputs(half, wrong, ranks)
    fully = fs.fully_shard(axis, min_shard_elements=0)
    if form == "wrapped":
        return WrapsSpoiled(fully, spoils)
    # A gather runs from the first stage to the last one, and a scatter back.
    return fs.compose(spoils, fully) if half == "gather" else fs.compose(fully, spoils)


@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=str)
@pytest.mark.parametrize("wrong", ("short", "long", "class"))
@pytest.mark.parametrize("verb, half", [(verb, half) for verb, (_, halves, _) in CALLS.items() for half in halves])
@on_ranks(2, pytest.param("2 processes", marks=pytest.mark.slow))
def test_what_a_stage_hands_on_wrongly_is_named_before_it_is_sent(verb, half, wrong, ranks):
    """What is too long would be cut off unseen, and other sizes on one rank would be no fault of the stage's name."""
    axis = axis_of_all()
    call, _, _ = CALLS[verb]
    for form in ("composed", "wrapped"):
        params = fs.shard(full_grads(), fs.zero3(axis, layout=spoiled_layout(axis, half, wrong, ranks, form)))
        found = outcome(partial(call, params))
        classes = "SpoilsInputs" if form == "composed" else "SpoilsInputs or WrapsSpoiled"
        size = 2 if half == "gather" else 4
        expected = "a tensor" if wrong == "class" else f"a tensor with size {size} in dim 0"
        first = (
            f"{classes}.{half}: results cannot be sent over 'shard'\n  leaf 0 of shape (4, 3): expected {expected}, got"
        )
        if dist.get_rank() in ranks:
            assert found.error == "ValueError", found
            assert found.text.startswith(first), found
        else:
            assert found.error == "CollectiveError", found
            assert f"rank 1 failed in {verb}: ValueError: {first}" in found.text, found
        axis = axis_of_all()
