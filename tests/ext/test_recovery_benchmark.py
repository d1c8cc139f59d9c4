"""The benchmark of recoveries: its parts add up, and its page and picture have the numbers of its results."""

import argparse
import json
import sys

import pytest

from tests.test_benchmarks import benchmark
from tests.test_processes import ROOT

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


def results_of(recovery):
    """What the benchmark could have written."""
    rows = {
        name: recovery.summarize([recover(recovery, first).row(2)] * 3)
        for name, first in {"fshard-run-jitted": 7, "fsdp2-dcp": 5}.items()
    }
    cost = {"configuration": "d512-L8-B4-T256", "ranks": 2, "saving_seconds": 1.02, "plain_seconds": 1.0}
    cost |= {"percent": 2.0, "main_thread_ms_of_40_mb": 8.25}
    circumstances = {"date": "2026-11-28T00:00:00+00:00", "hardware": {"cpu": "AMD EPYC"}}
    circumstances |= {"versions": {"torch": "2.13.0+cpu"}, "configuration": "d256", "every": 5, "repeats": 3}
    return {**circumstances, "ranks": {"2": rows}, "cost": cost}


def kills_of(**values):
    run = {"kills": 100, "moments": {"step": 30, "saved": 25, "mesh begins": 45}, "restarts": 60}
    run |= {"repeated_steps": {"0": 58, "1": 2}, "lost": 0, "torn": 0, "problems": [], "ranks_killed": {"a host": 9}}
    resized = run | {"setting": {"job": "resized"}, "kills": 20}
    return {"runs": {"2 ranks, eager": run | {"setting": {"job": ""}} | values, "4 and 2 ranks": resized}}


def test_parts_are_those_of_the_slowest_rank_and_add_up():
    with benchmark("recovery") as recovery:
        same, later = recover(recovery, 7).row(2), recover(recovery, 5).row(2)
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


def test_the_page_and_the_picture_have_the_results(tmp_path, capsys, monkeypatch):
    page = tmp_path / "page.md"
    with benchmark("recovery") as recovery:
        recovery_page = sys.modules["recovery_page"]
        results = results_of(recovery)
        page.write_text(f"# When a rank fails\n\n{recovery_page.NEXT_HEADING}\nmore\n")
        with pytest.raises(SystemExit, match="no results"):
            recovery_page.write_section(tmp_path, page)
        (tmp_path / "recovery.json").write_text(json.dumps(results))
        (tmp_path / "recovery-kills.json").write_text(json.dumps(kills_of()))
        recovery_page.write_section(tmp_path, page)
        text = page.read_text()
        recovery_page.write_section(tmp_path, page)
        recovery_page.print_tables(results)
        (tmp_path / "recovery-kills.json").write_text(json.dumps(kills_of(lost=1)))
        with pytest.raises(SystemExit, match="has problems"):
            recovery_page.write_section(tmp_path, page)
    assert page.read_text() == text
    assert text.startswith("# When a rank fails\n\n## How long it takes\n\n")
    assert text.endswith("\n\n## Stay in the same processes\n\nmore\n")
    assert "| 2 ranks, torchrun, FSDP2, torch.distributed.checkpoint | 3.12 | 3.12 | 2 | 5.12 |" in text
    assert "Of 120 kills at random moments, of one rank, of half of them or of all,\n  110 hit steps" in text
    assert "18 took a whole host with its memory, and after\n  20 the job was launched anew" in text
    assert "4 of 120\n  restarts repeated one completed step" in text
    assert "(+2.0%)" in text
    assert "2 ranks, fshard-run-jitted      3.12" in capsys.readouterr().out

    monkeypatch.syspath_prepend(ROOT / "docs/pictures")
    import draw_results

    picture = draw_results.recovery(results["ranks"]["2"])
    assert "torchrun, FSDP2, torch.distributed.checkpoint: 3.12 s" in picture
    assert picture.count(f'fill="{draw_results.RECOVERY_PARTS["imported"][1]}"') == 4 + 1


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
