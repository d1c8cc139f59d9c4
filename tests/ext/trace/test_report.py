"""Reports of made-up timelines, whose numbers are known, and the files that they write."""

import json
from collections import Counter

from fshard.comm import Collective, Label
from fshard.ext.trace import Report
from fshard.ext.trace.events import BETWEEN, Event, Timeline, list_spans, match_events, pack, unpack

MS = 1_000_000


def event(label, units, begin, *waits, op="all_gather"):
    """A collective that takes a millisecond to start; times are in milliseconds."""
    collective = Collective(op, "shard", 2, Label(label, units, ("['w']",)), 2048, 1, False)
    return Event(collective, (0, 1), begin * MS, (begin + 1) * MS, [(start * MS, stop * MS) for start, stop in waits])


def timeline(rank, *events):
    return Timeline(rank, 0, 100 * MS, "", events)


def rank_timeline(rank, wait_for_a, gather_b, scatter_b):
    """A gather of a and of b and a scatter of b; where b's begin, and when they are waited for."""
    return timeline(
        rank,
        event("gather", ("a",), *wait_for_a),
        event("gather", ("b",), *gather_b),
        event("scatter", ("b",), *scatter_b, op="reduce_scatter"),
    )


def two_ranks():
    """Rank 1 comes 30 ms late to the gather of b, of which rank 0 waits 20."""
    return [
        rank_timeline(0, (0, (1, 5)), (10, (20, 45)), (70, (90, 92))),
        rank_timeline(1, (2, (3, 5)), (40, (41, 45)), (60, (90, 92))),
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


def test_long_names_do_not_widen_the_table_and_each_keeps_its_row():
    """Leaves that no unit holds have such names, as those of a norm or of `fs.gather`."""
    names = [f"['up'], ['down of layer {number}'], and 10 more" for number in range(2)]
    gathers = [event("gather", (name,), 10 * i, (10 * i + 1, 10 * i + 2)) for i, name in enumerate(names)]
    report = Report([timeline(0, *gathers)], 0)
    assert [row.unit for row in report.units][:2] == names
    rows = [line for line in str(report).splitlines() if line.startswith("['up")]
    assert [row.split("  ")[0] for row in rows] == 2 * ["['up'], ['down...'], and 10 more"]


def computing(line):
    return [span for span in list_spans(line) if span.event is None]


def between_steps(line):
    return [(span.begin / MS, span.end / MS) for span in computing(line) if span.name == BETWEEN]


def jitted_step(begin, units):
    """Of 20 ms with a and b, b gathered again, whose gradients travel together."""
    return (
        event("gather", ("a",), begin, (begin + 1, begin + 2)),
        event("gather", ("b",), begin + 4, (begin + 5, begin + 6)),
        event("gather", ("b",), begin + 8, (begin + 9, begin + 10)),
        event("scatter", units, begin + 12, (begin + 15, begin + 16), op="reduce_scatter"),
        event("psum_invariant", (), begin + 18, (begin + 19, begin + 20), op="all_reduce"),
    )


def test_jitted_steps_are_told_apart_by_what_is_gathered_again():
    units = ("c" * 200, "b", "a")
    line = timeline(0, *jitted_step(10, units), *jitted_step(60, units))
    assert between_steps(line) == [(0, 10), (26, 28), (30, 60), (76, 78), (80, 100)]
    together = line.events[3].collective.unit
    assert together == f"{'c' * 200}..."
    assert {span.name for span in computing(line)} == {"a", "b", together, BETWEEN}


def eager_step(begin):
    """By ddp, which gathers nothing."""
    return (
        event("start", ("f",), begin, (begin + 1, begin + 2)),
        event("objective", (), begin + 6, (begin + 7, begin + 8)),
        event("scatter", ("a",), begin + 12, (begin + 13, begin + 14), op="all_reduce"),
        event("objective", (), begin + 16, (begin + 17, begin + 18)),
    )


def test_eager_steps_are_told_apart_by_what_ranks_agree_on():
    line = timeline(0, *eager_step(10), *eager_step(60))
    assert between_steps(line) == [(0, 10), (28, 60), (78, 100)]
    assert [event.name for event in line.events[:2]] == ["agreement of f", "objective of ['w']"]
    assert "\n(agreement): ranks compare" in str(Report([line], 0))


def test_collectives_are_matched_until_one_rank_has_another_or_none():
    """Those behind it stay unmatched too, as they would be those of other calls."""

    def gather(unit, begin):
        return event("gather", (unit,), begin, (begin + 1, begin + 2))

    first, second, third = gather("a", 0), gather("b", 10), gather("c", 20)
    other = event("scatter", ("b",), 10, (11, 12), op="reduce_scatter")
    for events in ((first, other, third), (first,)):
        matched = match_events([timeline(0, first, second, third), timeline(1, *events)])
        assert [entry.events for entry in matched] == [{0: first, 1: first}]


def test_timelines_travel_and_are_brought_to_one_clock():
    line, exchanges = two_ranks()[0], [(1, 2), (3, 4)]
    assert unpack(pack((line, exchanges))) == (line, exchanges)
    ahead = timeline(0, event("gather", ("a",), 5, (7, 8)))
    assert ahead.shift(5 * MS).events[0] == event("gather", ("a",), 0, (2, 3))


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
    starts, ends = ({entry["id"]: entry for entry in entries if entry["ph"] == kind} for kind in "sf")
    for arrow, start in starts.items():
        assert start["pid"] != ends[arrow]["pid"]
        assert start["ts"] <= ends[arrow]["ts"]
