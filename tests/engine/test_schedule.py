"""The schedule as tables, without ranks.

Steps are written as letters: g a gather, o where a use opens, r a reduction (of leaves m and n as r.mn), c where it
closes, x where a collective of the function's own begins or ends.
"""

import pytest

from fshard.engine.schedule import Ahead, Kind, Part, Step, Turn, backward, forward, gathered_first, merge, postponed

KINDS = {"g": Kind.GATHER, "o": Kind.OPEN, "r": Kind.REDUCE, "c": Kind.CLOSE, "x": Kind.COLLECTIVE}
LETTERS = {kind: letter for letter, kind in KINDS.items()}


def steps(text):
    found = []
    for word in text.split():
        use, _, leaves = word[1:].partition(".")
        found.append(Step(KINDS[word[0]], int(use), tuple(map(int, leaves))))
    return found


def text_of(found):
    return " ".join(".".join([f"{LETTERS[s.kind]}{s.use}", "".join(map(str, s.leaves))]).rstrip(".") for s in found)


def chain(n):
    """Units one after another."""
    return [(4, i + 1) for i in range(n)]


# Sizes of units and where those inside each end, the limit, and the numbers of the units of each bucket.
MERGED = {
    "a chain below the limit": (chain(4), 100, "0-3"),
    "a chain above the limit": (chain(4), 8, "0-1 2-3"),
    "no merging": (chain(3), 0, "0-0 1-1 2-2"),
    "one that is too large": ([(4, 1), (50, 2), (4, 3)], 10, "0-0 1-1 2-2"),
    "nothing to move": ([(4, 1), (0, 2), (4, 3)], 4, "0-1 2-2"),
    "nested": ([(4, 3), (4, 2), (4, 3), (4, 4)], 100, "0-3"),
    "nested, and too large together": ([(9, 3), (4, 2), (4, 3), (4, 4)], 16, "0-0 1-2 3-3"),
    "the last of a nest and its neighbour": ([(9, 2), (9, 2), (9, 4), (9, 4)], 17, "0-0 1-1 2-2 3-3"),
    "nests next to each other": ([(4, 2), (4, 2), (4, 4), (4, 4), (9, 5)], 16, "0-3 4-4"),
    "nested twice": ([(9, 4), (4, 3), (4, 3), (9, 4)], 17, "0-0 1-3"),
    "none": ([], 100, ""),
}


@pytest.mark.parametrize("name", MERGED)
def test_merge(name):
    units, limit, expected = MERGED[name]
    buckets = merge([Part(nbytes, True, limit, end) for nbytes, end in units])
    assert " ".join(f"{b.first}-{b.last}" for b in buckets) == expected
    assert all(buckets[i].last + 1 == buckets[i + 1].first for i in range(len(buckets) - 1))


def test_units_of_other_policies_or_orders_are_not_merged():
    regathered = [Part(4, i != 1, 100, i + 1) for i in range(4)]
    assert [(b.first, b.last, b.regathered) for b in merge(regathered)] == [(0, 0, True), (1, 1, False), (2, 3, True)]
    apart = [Part(4, True, 100, i + 1, apart=i == 1) for i in range(4)]
    assert [(b.first, b.last) for b in merge(apart)] == [(0, 0), (1, 1), (2, 3)]


# Sizes of uses, how far gathers run ahead of each (uses at least, and bytes), and the steps.
FORWARDS = {
    "none ahead": ((4, 4, 4), (0, 0), "g0 o0 g1 o1 g2 o2"),
    "one ahead": ((4, 4, 4), (1, 0), "g0 g1 o0 g2 o1 o2"),
    "two ahead": ((4, 4, 4, 4), (2, 0), "g0 g1 g2 o0 g3 o1 o2 o3"),
    "as many as fit": ((4, 4, 4, 4), (1, 8), "g0 g1 g2 o0 g3 o1 o2 o3"),
    "one that does not fit": ((4, 9, 4, 4), (1, 8), "g0 g1 o0 g2 g3 o1 o2 o3"),
    "one that does not fit behind one that does": ((4, 4, 9, 4), (1, 8), "g0 g1 o0 g2 o1 g3 o2 o3"),
    "nothing to move": ((4, 0, 4), (0, 0), "g0 g1 o0 o1 g2 o2"),
    "no uses": ((), (1, 0), ""),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_forward(name):
    sizes, ahead, expected = FORWARDS[name]
    assert text_of(forward(sizes, [Ahead(*ahead)] * len(sizes))) == expected


def one(again=True, prefetch=1, due=((0,),), nbytes=None, fits=0):
    return Turn(again, 4, Ahead(prefetch, fits), due, nbytes or (4,) * len(due))


CHAIN = "o0 c0 o1 c1 o2 c2"
# The forward, its uses, and the steps of the backward.
BACKWARDS = {
    "all again, prefetch 0": (CHAIN, [one(prefetch=0)] * 3, "g2 o2 r2.0 c2 g1 o1 r1.0 c1 g0 o0 r0.0 c0"),
    "all again, prefetch 1": (CHAIN, [one()] * 3, "g2 g1 o2 r2.0 c2 g0 o1 r1.0 c1 o0 r0.0 c0"),
    "all again, prefetch 2": (CHAIN, [one(prefetch=2)] * 3, "g2 g1 g0 o2 r2.0 c2 o1 r1.0 c1 o0 r0.0 c0"),
    "all again, as many as fit": (CHAIN, [one(fits=8)] * 3, "g2 g1 g0 o2 r2.0 c2 o1 r1.0 c1 o0 r0.0 c0"),
    "the next unit comes before the last quarter of the bytes": (
        "o0 c0 o1 c1",
        [one(due=((1,), (0,))), one(due=((2,), (1,), (0,)), nbytes=(4, 2, 2))],
        "g1 o1 r1.2 r1.1 g0 r1.0 c1 o0 r0.1 r0.0 c0",
    ),
    "gradients that come at once": (
        "o0 c0 o1 c1",
        [one(due=((1, 0),)), one(due=((3,), (2, 1, 0)))],
        "g1 o1 r1.3 g0 r1.210 c1 o0 r0.10 c0",
    ),
    "the last one kept": (CHAIN, [one(), one(), one(again=False)], "g1 o2 r2.0 c2 g0 o1 r1.0 c1 o0 r0.0 c0"),
    "none again": (CHAIN, [one(again=False)] * 3, "o2 r2.0 c2 o1 r1.0 c1 o0 r0.0 c0"),
    "a collective of the function's own": ("o0 x0 x1 o1 c1 c0", [one()] * 2, "g0 g1 o0 o1 r1.0 c1 x1 x0 r0.0 c0"),
    "one at the end": ("o0 c0 o1 c1 x0", [one()] * 2, "x0 g1 g0 o1 r1.0 c1 o0 r0.0 c0"),
    "nothing due, as where gradients are reduced once": ("o0 c0 o1 c1", [one(due=())] * 2, "g1 g0 o1 c1 o0 c0"),
    "nested": ("o0 o1 c1 o2 c2 c0", [one()] * 3, "g0 g2 o0 g1 o2 r2.0 c2 o1 r1.0 c1 r0.0 c0"),
    "a unit used twice": ("o0 c0 o1 c1 o2 c2", [one(), one(), one(due=())], "g2 g1 o2 c2 g0 o1 r1.0 c1 o0 r0.0 c0"),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_backward(name):
    events, turns, expected = BACKWARDS[name]
    assert text_of(backward(steps(events), turns)) == expected


@pytest.mark.parametrize("name", BACKWARDS)
def test_what_is_gathered_before_all_else(name):
    """All gathers in front of the first other step, but for collectives of the function's own."""
    events, turns, expected = BACKWARDS[name]
    first = [word for word in expected.split() if word[0] != "x"]
    count = next(n for n, word in enumerate([*first, ""]) if word[:1] != "g")
    assert gathered_first(steps(events), turns) == {int(word[1:]) for word in first[:count]}


# The forward, for each use how many events came before the end of a checkpoint that needs it, and the new order.
POSTPONED = {
    "no checkpoint": (CHAIN, (0, 0, 0), CHAIN),
    "around two": (CHAIN, (4, 4, 0), "o0 o1 c1 c0 o2 c2"),
    "around all": (CHAIN, (6, 6, 6), "o0 o1 o2 c2 c0 c1"),
    "inside one": (CHAIN, (0, 3, 0), CHAIN),
}


@pytest.mark.parametrize("name", POSTPONED)
def test_postponed(name):
    events, needed, expected = POSTPONED[name]
    assert text_of(postponed(steps(events), needed)) == expected


@pytest.mark.parametrize("name", BACKWARDS)
def test_every_use_is_regathered_before_it_opens_and_reduced_before_it_closes(name):
    events, turns, _ = BACKWARDS[name]
    found = backward(steps(events), turns)
    place = {step: n for n, step in enumerate(found)}
    assert len(place) == len(found)
    for use, turn in enumerate(turns):
        assert (Step(Kind.GATHER, use) in place) == turn.again
        opened, closed = place[Step(Kind.OPEN, use)], place[Step(Kind.CLOSE, use)]
        assert place.get(Step(Kind.GATHER, use), -1) < opened < closed
        assert all(opened < place[Step(Kind.REDUCE, use, leaf)] < closed for leaf in turn.due)
