"""A save writes and removes its own files alone: those of a user that lie in its way stay as they are."""

import contextlib
import os
import shutil

import torch

from fshard import checkpoint
from fshard.testing import spmd

TREE = {"w": torch.ones(3)}


def contents(root):
    """All that a directory holds: for each path the target of a link, the bytes of a file, or None."""
    contents_of = {}
    for path in sorted(root.rglob("*")):
        data = path.read_bytes() if path.is_file() else None
        contents_of[str(path.relative_to(root))] = os.readlink(path) if path.is_symlink() else data
    return contents_of


def folder(path, **named):
    path.mkdir(parents=True)
    for name, text in ({"notes.txt": "mine"} | named).items():
        (path / name).write_text(text)
    return path


def linked(name):
    return lambda root, outside: (root / name).symlink_to(outside)


def linked_checkpoint(root, outside):
    """A checkpoint of ours that a user has moved away."""
    checkpoint.save(outside / "run", TREE, 1)
    (root / "step-00000001.0").symlink_to(outside / "run" / "step-00000001.0")


def folder_with_weights(root, outside):
    folder(root / "step-00000001.0", **{"rank-00000.safetensors": "mine"})


FOLDERS = ("step-00000001.0", "step-00000009.7", "step-1", ".saving-x", ".old-x", ".exporting-x")
FILES = ("step-00000001.0", ".saving-step-00000001.9")
THEIRS = {f"a folder {name}": lambda root, outside, name=name: folder(root / name) for name in FOLDERS}
THEIRS |= {f"a file {name}": lambda root, outside, name=name: (root / name).write_text("mine") for name in FILES}
THEIRS |= {
    "an empty folder": lambda root, outside: (root / "step-00000001.0").mkdir(),
    "a linked checkpoint": linked_checkpoint,
    "a link": linked("step-00000001.0"),
    "a folder with weights": folder_with_weights,
    "a link in place of an old one": linked(".old-step-00000009.9"),
}


def check_files_of_a_user_stay(tmp_path, export=lambda root: None):
    """Also where something is exported to the same directory."""

    def program():
        for theirs in THEIRS:
            with checkpoint.Manager(tmp_path / theirs / "run", keep=1) as manager:
                for step in (1, 2, 3):
                    manager.save(TREE, step)

    before = {}
    for theirs in THEIRS:
        root, outside = tmp_path / theirs / "run", folder(tmp_path / theirs / "outside")
        root.mkdir()
        THEIRS[theirs](root, outside)
        before[theirs] = contents(tmp_path / theirs)
    spmd(program, 2)
    for theirs, old in before.items():
        root = tmp_path / theirs / "run"
        export(root)
        after = contents(tmp_path / theirs)
        assert {name: after.get(name) for name in old} == old
        # Ours are removed as ever.
        assert checkpoint.restore(root, TREE)["w"].equal(TREE["w"])
        ours = [path.parent.name for path in root.glob("step-*/manifest.json")]
        assert [name[:13] for name in ours if f"run/{name}" not in old] == ["step-00000003"]


def test_files_of_a_user_stay(tmp_path):
    check_files_of_a_user_stay(tmp_path)


def test_what_is_written_follows_no_link(tmp_path):
    outside, run = folder(tmp_path / "outside"), tmp_path / "run"
    for name in (".lock", ".saving-step-00000001.0"):
        for place in (outside, outside / "notes.txt"):
            run.mkdir()
            (run / name).symlink_to(place)
            with contextlib.suppress(checkpoint.CheckpointError):
                checkpoint.save(run, TREE, 1)
            assert contents(outside) == {"notes.txt": b"mine"}
            shutil.rmtree(run)


def test_reading_follows_links(tmp_path):
    """A checkpoint and a file of it may lie on another disk."""
    path = checkpoint.save(tmp_path / "run", TREE, 1).wait()
    for moved in (path / "manifest.json", path / "rank-00000.safetensors", path):
        moved.rename(tmp_path / moved.name)
        moved.symlink_to(tmp_path / moved.name)
        assert checkpoint.restore(path.parent, TREE)["w"].equal(TREE["w"])
