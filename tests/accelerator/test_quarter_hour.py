"""A rehearsal of benchmarks/quarter_hour.py: on a GPU no second may go to a mistake in it."""

import json
import os
import subprocess
import sys
from argparse import Namespace

import pytest

from tests.test_processes import ROOT

SCRIPT = ROOT / "benchmarks/quarter_hour.py"
# The stages of a GPU take ten minutes. A rehearsal builds its device, and shares two cores with other tests.
REHEARSAL_SECONDS = 3000


@pytest.fixture
def quarter_hour(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import quarter_hour

    yield quarter_hour
    del sys.modules["quarter_hour"]


@pytest.fixture
def args(tmp_path):
    """Options of a run that has found nothing yet."""
    (tmp_path / "found.jsonl").touch()
    return Namespace(device="cuda", output=tmp_path, library=None, nccl=None)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "found.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(REHEARSAL_SECONDS + 60)
def test_every_stage_passes_on_the_device_of_the_tests(quarter_hour, tmp_path):
    command = [sys.executable, SCRIPT, "--device", "emu", "--output", tmp_path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=REHEARSAL_SECONDS)
    rows = rows_of(tmp_path)
    assert [row for row in rows if not row["passed"]] == [], done.stdout + done.stderr
    assert done.returncode == 0
    # Each stage has found something beside its seconds.
    assert {row["stage"] for row in rows if row["name"] != "seconds"} == set(quarter_hour.STAGES)
    table = (tmp_path / "table.txt").read_text()
    assert table in done.stdout
    assert "left out" not in table


def test_the_limits_of_all_stages_fit(quarter_hour):
    """NCCL's ranks take the place of two that send through processors."""
    assert sum(stage.seconds for name, stage in quarter_hour.STAGES.items() if name != "direct") <= quarter_hour.SECONDS
    assert quarter_hour.STAGES["direct"].seconds <= quarter_hour.STAGES["two_ranks"].seconds


def test_the_parent_imports_nothing_that_could_touch_a_device():
    program = "import sys, quarter_hour; assert not sys.modules.keys() & {'torch', 'fshard', 'optree', 'numpy'}"
    subprocess.run([sys.executable, "-c", program], cwd=SCRIPT.parent, check=True)


@pytest.mark.slow
def test_stages_need_nothing_that_tests_install():
    program = "import sys; sys.modules['pytest'] = None; import stages.ranks; from tests.accelerator import programs"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], cwd=SCRIPT.parent, env=environment, check=True)


def test_stages_that_do_not_fit_or_lack_something_are_left_out_by_name(quarter_hour, args):
    seconds = quarter_hour.STAGES["loop"].seconds
    assert quarter_hour.reason_to_leave_out("loop", args, seconds / 2) == ""
    assert quarter_hour.reason_to_leave_out("loop", args, 20) == f"left out: needs {seconds} s, 20 s are left"
    assert quarter_hour.reason_to_leave_out("direct", args, 500) == "left out: needs --nccl"
    args.nccl = "libnccl.so.2"
    assert quarter_hour.reason_to_leave_out("direct", args, 500) == ""
    assert quarter_hour.reason_to_leave_out("two_ranks", args, 500) == "left out: direct is in its place"


def test_a_stage_is_stopped_at_its_limit_and_others_go_on(quarter_hour, args):
    assert quarter_hour.run_stage("versions", 0.01, args).endswith("0 of 0 passed; exit: stopped after 0 s")
    (row,) = rows_of(args.output)
    assert (row["stage"], row["name"], row["passed"]) == ("versions", "seconds", False)
