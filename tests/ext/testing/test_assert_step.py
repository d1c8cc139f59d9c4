"""assert_step: what it says of a step that is wrong, or that sends or holds something else, and its snapshots."""

import re
from functools import cache

import pytest
import torch

import fshard as fs
from fshard.testing import assert_step
from tests.jit.steps import adamw, train_step

MESH = {"shard": 4}
TX = adamw()


def loss_fn(params, x):
    return (torch.tanh(x @ fs.gather(params["a"])) @ fs.gather(params["b"])).square().mean()


@cache
def make_state():
    mesh = fs.init_mesh({"shard": 1}, device="cpu")
    params = fs.shard({"a": torch.ones(48, 64), "b": torch.ones(64, 64)}, fs.zero3(mesh, bucket_bytes=0))
    return fs.TrainState.create(params, adamw())


def assert_contract(loss=loss_fn, rows=2, **expected):
    return assert_step(train_step(loss, adamw()), make_state(), torch.ones(rows, 48), mesh=MESH, **expected)


def fail(**expected):
    """The lines of a failure."""
    with pytest.raises(AssertionError) as caught:
        assert_contract(**expected)
    return str(caught.value).splitlines()


CHECK = fs.check


@cache
def report_of(rows):
    return CHECK(train_step(loss_fn, adamw()), make_state(), torch.ones(rows, 48), mesh=MESH)


@pytest.fixture
def checked_once(monkeypatch):
    """The report of a step that is compared many times, of which the check takes most of the time."""
    monkeypatch.setattr(fs, "check", lambda step, state, batch, mesh: report_of(len(batch)))


def changes(lines):
    """The rows of a diff that differ."""
    return [line for line in lines if line[:1] in ("-", "+") and line[:3] not in ("---", "+++")]


def test_a_step_that_keeps_its_contract_passes_with_its_report():
    report = assert_contract()
    plan = report.plan
    assert not report.problems
    assert_contract(collectives=6, bytes_sent=plan.bytes_sent(), peak_bytes=plan.peak_bytes)
    by_part = {"all_gather": 3, "all_to_all": 0, "['a']": 3, "objective": 1, "no unit": 0}
    again = assert_contract(collectives={"shard": by_part}, bytes_sent={"shard": {"['a']": 27648}})
    assert str(again.plan) == str(plan)


def test_a_failure_is_a_diff_that_shows_what_each_number_is_made_of():
    limits = {"peak_bytes": 1000, "bytes_sent": {"shard": {"['a']": 27647}}, "collectives": {"shard": 5}}
    uses = fs.plan(train_step(loss_fn, adamw()), make_state(), torch.ones(2, 48), mesh=MESH).peak
    assert fail(**limits) == [
        "assert_step: the step is not as expected",
        "--- expected",
        "+++ got",
        "@@ -1,17 +1,17 @@",
        " mesh: shard 4",
        "-peak: at most 1000 bytes",
        f"+peak: {uses.total} bytes",
        f" peak of activations: {uses.activations} bytes",
        f" peak of gathered: {uses.gathered} bytes",
        f" peak of gradients: {uses.gradients} bytes",
        f" peak of in flight: {uses.in_flight} bytes",
        f" peak of inputs: {uses.inputs} bytes",
        f" peak of optimizer state: {uses.optimizer_state} bytes",
        f" peak of parameters: {uses.parameters} bytes",
        " sent: 6 collectives, 52224 bytes",
        "-sent over shard: 5 collectives",
        "+sent over shard: 6 collectives, 52224 bytes",
        " sent over shard by all_gather: 3 collectives, 30720 bytes",
        " sent over shard by all_reduce: 1 collective, 0 bytes",
        " sent over shard by reduce_scatter: 2 collectives, 21504 bytes",
        "-sent over shard for ['a']: at most 27647 bytes",
        "+sent over shard for ['a']: 3 collectives, 27648 bytes",
        " sent over shard for ['b']: 2 collectives, 24576 bytes",
        " sent over shard for objective: 1 collective, 0 bytes",
    ]


# What is expected, and the rows that differ.
BROKEN = [
    (
        {"collectives": 1, "bytes_sent": 9},
        ["-sent: 1 collective, at most 9 bytes", "+sent: 6 collectives, 52224 bytes"],
    ),
    (
        {"collectives": {"shard": {"all_gather": 4, "blocks.0": 3}}},
        [
            "-sent over shard by all_gather: 4 collectives",
            "+sent over shard by all_gather: 3 collectives, 30720 bytes",
            "-sent over shard for blocks.0: 3 collectives",
        ],
    ),
    # A misspelled unit is no limit that is always kept.
    ({"bytes_sent": {"shard": {"blocks.0": 9e9}}}, ["-sent over shard for blocks.0: at most 9000000000 bytes"]),
]


@pytest.mark.parametrize(("expected", "rows"), BROKEN)
@pytest.mark.rows(len(BROKEN))
def test_rows_that_differ(checked_once, expected, rows):
    assert changes(fail(**expected)) == rows


def summed_loss_fn(params, x):
    return fs.objective(loss_fn(params, x), like=params)


def step_with_local_metric(state, x):
    loss, grads = fs.value_and_grad(loss_fn)(state.params, x)
    return fs.update(TX, state, grads), {"loss": loss, "largest": x.max()}


def test_problems_come_before_the_difference(tmp_path):
    path = tmp_path / "step.txt"
    for step, options, beginning, ends_in_diff in (
        (train_step(summed_loss_fn, adamw()), {}, "doubled sum over shard: the loss of a rank was summed ", False),
        (step_with_local_metric, {"collectives": 5, "rank": 3, "backend": "gloo"}, "local metric over shard ", True),
    ):
        with pytest.raises(AssertionError) as caught:
            assert_step(step, make_state(), torch.ones(2, 48), mesh=MESH, snapshot=path, update=True, **options)
        headline, problem, place, *others = str(caught.value).splitlines()
        assert headline == "assert_step: the step is not as expected"
        assert beginning in problem
        assert place.startswith(f"  {__file__}:")
        assert ("-sent: 5 collectives" in others) is ends_in_diff
    assert not path.exists()


def test_a_snapshot_is_written_on_purpose_alone(checked_once, tmp_path):
    path = tmp_path / "step.txt"
    error = (
        f"assert_step: there is no snapshot {path}. Pass update=True once to write it, read it, and commit it with the "
        "test."
    )
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(error)}$"):
        assert_contract(snapshot=path)
    for update in (False, True):
        with pytest.raises(ValueError, match=r"^assert_step: expected snapshot to be a file, got the directory "):
            assert_contract(snapshot=tmp_path, update=update)
    fail(snapshot=path, update=True, collectives=5)
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "snapshots" / path.name
    assert_contract(snapshot=str(path), update=True)
    written = path.read_text()
    comment, *rows = written.splitlines()
    assert (
        comment
        == "# What one rank sends and holds in a step. fs.testing.assert_step writes this file with update=True."
    )
    assert rows[0] == "mesh: shard 4"
    assert rows[-1] == "sent over shard for objective: 1 collective, 0 bytes"
    assert_contract(snapshot=path)

    lines = fail(snapshot=path, rows=64)
    assert lines[-1] == f"To fix: mend the step. If it is meant to change, write {path} anew with update=True."
    assert {line.partition(":")[0] for line in changes(lines)} >= {"-peak", "+peak", "+peak of activations"}
    # The snapshot is kept, and so it is no remedy.
    assert changes(fail(snapshot=path, collectives=5)) == ["-sent: 5 collectives", "+sent: 6 collectives, 52224 bytes"]
    assert path.read_text() == written
    assert_contract(snapshot=path, rows=64, update=True)
    assert_contract(snapshot=path, rows=64)
    assert list(path.parent.iterdir()) == [path]


def test_what_a_snapshot_may_differ_in(checked_once, tmp_path):
    """Its order, comments and ends of lines, and a peak by a fiftieth; and nothing else."""
    path = tmp_path / "step.txt"
    peak = assert_contract(snapshot=path, update=True).plan.peak_bytes
    written = path.read_text()
    first, *others = written.splitlines()
    path.write_text("\r\n".join([*reversed(others), "", "# A comment.", first]))
    assert_contract(snapshot=path)
    row = f"peak: {peak} bytes"
    for factor, is_equal in ((1.019, True), (0.985, True), (1.03, False), (0.97, False)):
        other = written.replace(row, f"peak: {int(peak * factor)} bytes")
        other = other.replace("peak of in flight: 12288", "peak of in flight: 12289")
        path.write_text(other)
        if is_equal:
            assert_contract(snapshot=path)
            assert path.read_text() == other
        else:
            assert f"+{row}" in changes(fail(snapshot=path))
    for old, new in (
        ("sent: 6", "sent: 5"),
        ("mesh: shard 4", "mesh: shard 8"),
        (row, "peak: many bytes"),
        (row, "<<<<<<< HEAD"),
        (row, f"{row}\n>>>>>>> main"),
        (f"{row}\n", ""),
        (written, ""),
    ):
        path.write_text(written.replace(old, new))
        assert changes(fail(snapshot=path))


def test_what_makes_no_sense_is_refused():
    nothing = "to have a number, got none; pass 0 for none, or None to compare nothing"
    for options, text in (
        ({"collectives": {"tp": 1}}, "collectives by names of the axes of the mesh, got 'tp'"),
        ({"collectives": -1}, "collectives to be a finite number, 0 or more, got -1"),
        ({"collectives": {"shard": {"['a']": "3"}}}, "collectives to be a finite number, 0 or more, got '3'"),
        ({"collectives": {}}, f"collectives {nothing}"),
        ({"bytes_sent": {"shard": {}}}, f"bytes_sent {nothing}"),
        ({"bytes_sent": "1GB"}, "bytes_sent to be a finite number, 0 or more, got '1GB'"),
        ({"bytes_sent": {"shard": None}}, "bytes_sent to be a finite number, 0 or more, got None"),
        ({"peak_bytes": float("nan")}, "peak_bytes to be a finite number, 0 or more, got nan"),
        ({"snapshot": 3}, "snapshot to be a path or None, got an int"),
        ({"update": True}, "snapshot to be the path of the file to update, got None"),
    ):
        with pytest.raises(ValueError, match=f"^assert_step: expected {re.escape(text)}$"):
            assert_contract(**options)
