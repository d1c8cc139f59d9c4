"""Kills at every moment of a generation, by enumeration, and damage to slots: what is read is whole, and the newest."""

import itertools
import shutil
import warnings

import pytest
import torch

from fshard import checkpoint
from fshard.checkpoint import files
from fshard.ext.memory import slots
from fshard.testing import spmd
from tests.checkpoint.states import assert_same, refused, split, zeros_like
from tests.ext.memory.jobs import be_job, manager, save_steps, slots_in
from tests.ranks import my_rank

STEPS = range(1, 5)
# What a kill may come after, in the order of a step. "half" is in the middle of the copy.
MOMENTS = ("made", "cleared", "half", "copied", "counted")


@pytest.fixture(autouse=True)
def job(monkeypatch):
    be_job(monkeypatch)


class Watch:
    """Copies each rank's slots at each moment of each step."""

    def __init__(self, directory, copies, monkeypatch):
        self.directory = directory
        self.copies = copies
        put, copy_into = slots.SlotWriter._put, slots.copy_into
        self.steps = {}

        def watched_put(slot, place, text):
            put(slot, place, text)
            if place == slot.mark:
                self.note("counted" if text else "cleared")

        def watched_copy(targets, tensors):
            middle = max(map(len, targets)) // 2
            for target, tensor in zip(targets, tensors, strict=True):
                target[:middle].copy_(tensor[:middle])
            self.note("half")
            copy_into(targets, tensors)
            self.note("copied")

        monkeypatch.setattr(slots.SlotWriter, "_put", watched_put)
        monkeypatch.setattr(slots, "copy_into", watched_copy)

    def begin(self, step):
        self.steps[my_rank()] = step
        self.note("made")

    def note(self, moment):
        rank = my_rank()
        target = self.copies / f"{rank}.{self.steps[rank]}.{moment}"
        target.mkdir(0o700)
        for path in (self.directory / "memory").glob(f"*/rank-{rank:05d}.*"):
            shutil.copy(path, target)


def watch_steps(watch):
    kept = manager(watch.directory)
    for step in STEPS:
        watch.begin(step)
        kept.save(split(step), step)


def reachable(ranks, has_collectives):
    """List where ranks can be at once, each as a step and a moment.

    A rank begins to save a step when all ranks have begun the step, for which they have counted the one before.
    """
    events = list(itertools.product(STEPS, MOMENTS))
    before = (STEPS[0], MOMENTS.index("counted"))
    for places in itertools.product(events, repeat=ranks):
        numbers = [(step, MOMENTS.index(moment)) for step, moment in places]
        last = max(step for step, _ in numbers)
        if min(numbers) < before:
            continue
        if not has_collectives or all(number >= (last - 1, before[1]) for number in numbers):
            yield places


@pytest.mark.parametrize(
    "ranks, has_collectives", [(2, True), (2, False), pytest.param(3, True, marks=pytest.mark.slow)]
)
def test_all_ranks_killed_at_each_moment(ranks, has_collectives, tmp_path, monkeypatch):
    """With steps in which ranks wait for each other at most one is lost; without, still none is torn."""
    copies = tmp_path / "copies"
    copies.mkdir()
    with monkeypatch.context() as patches:
        watch = Watch(tmp_path, copies, patches)
        spmd(lambda: watch_steps(watch), ranks)
    (job,) = (tmp_path / "memory").iterdir()
    expected = {step: spmd(lambda: split(step), 1)[0] for step in STEPS}  # noqa: B023
    count = 0
    for places in reachable(ranks, has_collectives):
        for path in job.iterdir():
            path.unlink()
        for rank, (step, moment) in enumerate(places):
            shutil.copytree(copies / f"{rank}.{step}.{moment}", job, dirs_exist_ok=True)
        completed = min(step - (MOMENTS.index(moment) < MOMENTS.index("counted")) for step, moment in places)
        restarted = manager(tmp_path)
        with warnings.catch_warnings(record=True, action="always") as warned:
            latest = restarted.latest_step()
        if has_collectives:
            assert latest == completed, places
            assert not warned
        else:
            assert latest in (None, completed), places
            assert not warned or "exchanged nothing between two saves" in str(warned[0].message)
            assert warned or latest == completed or completed < 2
        if latest is not None:
            assert_same(restarted.restore(zeros_like(expected[1])), expected[latest])
        count += 1
    assert count > 100


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_what_a_slot_says_of_itself_is_whole_or_not_read(tmp_path):
    """The generation before is read in its place."""
    spmd(lambda: save_steps(tmp_path, split, 1, 2), 2)
    newest = slots_in(tmp_path)["rank-00001.0"]
    whole = newest.read_bytes()
    slot = slots.SlotPart(newest)
    (start,) = slot.starts.values()
    mark = slot.mark.start

    def program():
        restarted = manager(tmp_path)
        latest = restarted.latest_step()
        assert_same(restarted.restore(zeros_like(split(0))), split(1))
        return latest

    for position in (0, 100, mark - 1, mark, mark + 2, mark + 90):
        newest.write_bytes(whole)
        flip(newest, position)
        assert spmd(program, 2) == [1, 1]
    for size in (0, 1, mark, start, len(whole) - 1):
        newest.write_bytes(whole[:size])
        assert spmd(program, 2) == [1, 1]


def test_other_things_of_the_name_of_a_slot(tmp_path):
    """A pipe, a link out of the directory, a manifest of the disk: none is read, and none makes a restart wait."""
    save_steps(tmp_path, split, 1)
    path = next(iter(slots_in(tmp_path).values()))
    outside = tmp_path / "outside"
    outside.mkdir()
    path.rename(outside / "slot")
    path.symlink_to(outside / "slot")
    assert manager(tmp_path).latest_step() is None
    checkpoint.save(tmp_path / "other", split(1), 1)
    path.unlink()
    shutil.copy(tmp_path / "other/step-00000001.0/manifest.json", path)
    assert manager(tmp_path).latest_step() is None
    path.unlink()
    path.mkdir()
    path.with_name("rank-mine.0").write_text("mine")
    kept = manager(tmp_path)
    assert kept.latest_step() is None
    path.rmdir()
    for step in (1, 2, 3):
        kept.save(split(step), step)
    assert kept.latest_step() == 3
    assert path.with_name("rank-mine.0").read_text() == "mine"


def test_a_slot_of_another_version(tmp_path, monkeypatch):
    with monkeypatch.context() as patches:
        patches.setattr("fshard.ext.memory.generations.VERSION", 3)
        save_steps(tmp_path, split, 1)
    assert manager(tmp_path).latest_step() is None


def test_a_killed_start_and_the_next(tmp_path):
    """Parts of a start that its ranks did not finish never meet those of the next, and the whole one stays longest."""
    spmd(lambda: save_steps(tmp_path, split, 1, 2, 3), 2)
    # Rank 1 was killed before it had written step 3.
    slots_in(tmp_path)["rank-00001.1"].unlink()

    def go_on():
        kept = manager(tmp_path)
        assert kept.latest_step() == 2
        kept.save(split(3), 3)
        return kept.latest_step()

    assert spmd(go_on, 2) == [3, 3]
    slots_in(tmp_path)["rank-00000.1"].unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = spmd(lambda: manager(tmp_path).restore(zeros_like(split(0))), 1)[0]
    assert torch.equal(restored["w"].local, spmd(lambda: split(2), 1)[0]["w"].local)
    assert refused(lambda: manager(tmp_path).restore(split(0), step=3), checkpoint.CheckpointError).endswith(
        "holds no checkpoint that fs.checkpoint.save wrote"
    )


@pytest.fixture
def writer(tmp_path):
    """A slot that holds generation 1."""
    kept = manager(tmp_path)
    kept.save({"w": torch.zeros(9)}, 1)
    return kept._memory._slots[1]


def test_a_generation_that_is_written_over_is_neither_read_nor_sent(writer):
    """At any moment between two looks at the slot."""
    content = files.encode(files.Manifest(3, {}, {}))
    part = slots.SlotPart(writer.path)
    memory = torch.empty(9)
    part.read("['w']", memory)
    assert memory.eq(0).all()
    assert writer.read(1) == (writer.path.name, writer.path.read_bytes())
    writer.write(3, content, {"['w']": torch.ones(9)})
    assert writer.read(1) == (writer.path.name, None)
    text = refused(lambda: part.read("['w']", memory), checkpoint.CheckpointError)
    assert text == f"{writer.path}: was written over while ['w'] was read"
    part = slots.SlotPart(writer.path)
    # The next generation has only begun.
    writer._put(writer.mark, b"")
    refused(lambda: part.read("['w']", memory), checkpoint.CheckpointError)
