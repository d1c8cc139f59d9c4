"""The benchmark of recoveries: its parts add up, and its page has the numbers of its results."""

import argparse
import json

import pytest

from tests.test_benchmarks import RESULTS, benchmark

# torch's ZeroRedundancyOptimizer warns of what it imports.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")
TIMES = {"created": 0.25, "imported": 0.5, "mesh": 1.0, "built": 1.5, "restored": 1.75}


def events_of(event, life, first, last):
    """The events of two ranks in one life, of steps of a second; rank 1 is later by an eighth."""
    start = 10.0 * life
    for rank in range(2):
        late = start + rank / 8
        pid = 10 * life + rank
        for name, seconds in TIMES.items():
            yield event(rank, pid, name, late + seconds, {"step": first} if name == "restored" else {})
        for step in range(first + 1, last + 1):
            begin = late + 1.0 + step - first
            yield event(rank, pid, "step begins", begin, {"step": step})
            yield event(rank, pid, "step", begin + 1.0, {"step": step})


def recover(recovery, first):
    """A recovery from a kill at 10 s, when both ranks had completed step 7, which goes on from a step."""
    before = [event for event in events_of(recovery.Event, 0, 0, 7) if event.time > 8.5]
    found = recovery.Recovery(10.0, 1, before, completed=7)
    found.after += events_of(recovery.Event, 1, first, 9)
    return found


def test_parts_are_those_of_the_slowest_rank_and_add_up():
    with benchmark("recovery") as recovery:
        same, later = recover(recovery, 7).row(2), recover(recovery, 5).row(2)
        summary = recovery.summarize([same, later, later])
    assert later["parts"] == {
        "processes": 0.375,
        "imports": 0.25,
        "mesh": 0.5,
        "build": 0.5,
        "restore": 0.25,
        "first step": 1.25,
    }
    assert same["seconds"] == later["seconds"] == sum(later["parts"].values()) == 3.125
    assert (same["caught_up_seconds"], same["repeated_steps"]) == (3.125, 0)
    # Two steps are computed again.
    assert (later["caught_up_seconds"], later["repeated_steps"]) == (5.125, 2)
    assert summary["caught_up_seconds"] == {"median": 5.125, "maximum": 5.125, "values": [3.125, 5.125, 5.125]}
    assert (summary["parts"], summary["repeated_steps"]) == (later["parts"], [0, 2, 2])


def test_the_page_has_what_was_measured(tmp_path, capsys):
    """In the place of the section that is there, or anew; and nothing of kills that have lost a state."""
    page = tmp_path / "page.md"
    with benchmark("recovery_page") as recovery_page:
        text, heading = recovery_page.PAGE.read_text(), recovery_page.HEADING
        section = text[text.index(heading) : text.index(recovery_page.NEXT_HEADING)]
        for before in (text.replace(section, ""), text.replace(section, f"{heading}\nolder\n")):
            page.write_text(before)
            recovery_page.write_section(RESULTS, page)
            assert page.read_text() == text
        results, kills = (json.loads((RESULTS / name).read_text()) for name in ("recovery.json", "recovery-kills.json"))
        recovery_page.print_tables(results)
        with pytest.raises(SystemExit, match="no results"):
            recovery_page.write_section(tmp_path, page)
        next(iter(kills["runs"].values()))["lost"] = 1
        with pytest.raises(SystemExit, match="has problems"):
            recovery_page.describe(results, kills)
    assert "2 ranks, fshard-run-jitted" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_recovery_is_measured(tmp_path):
    with benchmark("recovery") as recovery:
        args = argparse.Namespace(configuration="d64-L2-B2-T16-V64", repeats=2, every=5, directory=tmp_path)
        rows = [recovery.measure(recovery.SYSTEMS[name], 2, args) for name in ("fshard-run-eager", "fsdp2-dcp")]
    ours, theirs = ([row["repeated_steps"] for row in each] for each in rows)
    assert max(ours) <= 1
    assert len(theirs) == 2
    assert all(0.0 < row["parts"]["restore"] < row["seconds"] for each in rows for row in each)
