"""Reports of made-up timelines, whose numbers are known, and the files that they write."""

import json
from collections import Counter

from fshard.comm import Collective, Label
from fshard.ext.trace import Report
from fshard.ext.trace.events import BETWEEN, Event, Timeline, list_spans, pack, unpack

MS = 1_000_000


def event(who, unit, begin, issued, *waits, op="all_gather"):
    units = unit if isinstance(unit, tuple) else (unit,) if unit else ()
    collective = Collective(op, "shard", 2, Label(who, units, ("['w']",)), 2048, 1, False)
    return Event(collective, (0, 1), begin * MS, issued * MS, [(a * MS, b * MS) for a, b in waits])


def timeline(rank, *events):
    return Timeline(rank, 0, 100 * MS, "", events)


def two_ranks():
    """Rank 1 comes 30 ms late to the gather of b, of which rank 0 waits 20."""
    first = (0, 1, (1, 5)), (10, 11, (20, 45)), (70, 71, (90, 92))
    rows = first, ((2, 3, (3, 5)), (40, 41, (41, 45)), (60, 61, (90, 92)))
    kinds = ("gather", "a", "all_gather"), ("gather", "b", "all_gather"), ("scatter", "b", "reduce_scatter")
    return [
        timeline(rank, *(event(who, unit, *times, op=op) for (who, unit, op), times in zip(kinds, rows[rank])))
        for rank in (0, 1)
    ]


TABLE = """\
trace of 2 ranks, 100.0 ms, clocks equal to 0.50 ms
10.5% of all ranks' time is waiting for late ranks; most, 21.0 ms, for rank 1, of which 20.0 ms at b

rank  computing  starting  waiting  for late ranks  came last  held others up (sum)
0         66.0%      3.0%    31.0%           21.0%          1                0.0 ms
1         89.0%      3.0%     8.0%            0.0%          2               21.0 ms

unit                     collectives      sent  computing (mean)  slowest rank  waiting (mean)  held up by  for (sum)
a                                  1  0.00 MiB           24.5 ms    1: 35.0 ms          3.0 ms      rank 1     1.0 ms
b                                  2  0.00 MiB           44.0 ms    0: 44.0 ms         16.5 ms      rank 1    20.0 ms
(update, between steps)            0  0.00 MiB            9.0 ms    1: 10.0 ms          0.0 ms           -          -
of the whole trace; mean and sum over ranks, collectives and sent of the rank with the most
(update, between steps): between a step's last gradients and the next step: the update, data, the caller's own code"""


def test_table():
    assert str(Report(two_ranks(), 500_000)) == TABLE


def names_of(line):
    return [(span.name, span.begin / MS, span.end / MS) for span in list_spans(line) if span.event is None]


def step_at(n, units):
    """A jitted step of 20 ms with a and b, b gathered again, whose gradients travel together."""
    gathers = [
        event("gather", unit, n + at, n + at + 1, (n + at + 1, n + at + 2)) for unit, at in zip("abb", (0, 4, 8))
    ]
    return (
        *gathers,
        event("scatter", units, n + 12, n + 13, (n + 15, n + 16), op="reduce_scatter"),
        event("psum_invariant", "", n + 18, n + 19, (n + 19, n + 20), op="all_reduce"),
    )


def test_jitted_steps_are_told_apart_by_what_is_gathered_again():
    units = ("c" * 200, "b", "a")
    line = timeline(0, *step_at(10, units), *step_at(60, units))
    apart = [name for name in names_of(line) if name[0] == BETWEEN]
    assert apart == [(BETWEEN, *at) for at in ((0, 10), (26, 28), (30, 60), (76, 78), (80, 100))]
    assert {name for name, *_ in names_of(line)} == {"a", "b", line.events[3].collective.unit, BETWEEN}
    assert line.events[3].collective.unit == f"{'c' * 200}..."


def test_eager_steps_are_told_apart_by_what_ranks_agree_on():
    """As by ddp, which gathers nothing."""

    def step(n):
        begin, end, last = (
            event(who, text, at, at + 1, (at + 1, at + 2))
            for who, text, at in (("start", "f", n), ("objective", "", n + 6), ("objective", "", n + 16))
        )
        return begin, end, event("scatter", "a", n + 12, n + 13, (n + 13, n + 14), op="all_reduce"), last

    line = timeline(0, *step(10), *step(60))
    apart = [name for name in names_of(line) if name[0] == BETWEEN]
    assert apart == [(BETWEEN, *at) for at in ((0, 10), (28, 60), (78, 100))]
    assert [event.name for event in line.events[:2]] == ["agreement of f", "objective of ['w']"]
    assert "\n(agreement): ranks compare" in str(Report([line], 0))


def test_timelines_travel_and_are_brought_to_one_clock():
    line, exchanges = two_ranks()[0], [(1, 2), (3, 4)]
    assert unpack(pack((line, exchanges))) == (line, exchanges)
    ahead = timeline(0, event("gather", "a", 5, 6, (7, 8)))
    assert ahead.shift(5 * MS).events[0] == event("gather", "a", 0, 1, (2, 3))


def test_saved_files(tmp_path):
    """A file has the trace event format, as far as it is used."""
    Report(two_ranks(), 0).save(tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"compute a", "compute b", "compute (update, between steps)"} <= {entry["name"] for entry in entries}
    kinds = Counter(entry["ph"] for entry in entries)
    # An arrow for each of the two collectives that rank 0 waited in for rank 1.
    assert (kinds["b"], kinds["s"]) == (kinds["e"], kinds["f"]) == (6, 2)
    assert set(kinds) <= set("MXbesf")
    assert all(entry["ph"] == "M" or entry["ts"] >= 0 for entry in entries)
    for start in (entry for entry in entries if entry["ph"] == "s"):
        (finish,) = (entry for entry in entries if entry["ph"] == "f" and entry["id"] == start["id"])
        assert start["pid"] != finish["pid"]
        assert start["ts"] <= finish["ts"]
