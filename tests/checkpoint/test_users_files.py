"""A save writes and removes its own files alone: those of a user that lie in its way stay as they are."""

import contextlib
import os
import shutil

import torch

from fshard import checkpoint
from fshard.testing import spmd

TREE = {"w": torch.ones(3)}


def save(directory, *steps, keep=1, ranks=1):
    def program():
        with checkpoint.Manager(directory, keep=keep) as manager:
            for step in steps:
                manager.save(TREE, step)

    spmd(program, ranks)


def contents(root):
    """All that a directory holds: for each path the target of a link, the bytes of a file, or None."""
    found = {}
    for path in sorted(root.rglob("*")):
        bytes_of = path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = os.readlink(path) if path.is_symlink() else bytes_of
    return found


def folder(path, **named):
    path.mkdir(parents=True)
    for name, text in ({"notes.txt": "mine"} | named).items():
        (path / name).write_text(text)
    return path


def own(name, **named):
    return lambda root, outside: folder(root / name, **named)


def linked(name):
    return lambda root, outside: (root / name).symlink_to(outside)


def file(name):
    return lambda root, outside: (root / name).write_text("mine")


def linked_checkpoint(root, outside):
    """A checkpoint of ours that a user has moved away."""
    checkpoint.save(outside / "run", TREE, 1)
    (root / "step-00000001").symlink_to(outside / "run" / "step-00000001")


TOKEN = "0123456789abcdef"
THEIRS = {
    "a folder": own("step-00000001"),
    "a folder ahead": own("step-00000009"),
    "a folder of a later save": own("step-00000002.1"),
    "an empty folder": lambda root, outside: (root / "step-00000001").mkdir(),
    "a file": file("step-00000001"),
    "another spelling": own("step-1"),
    "a linked checkpoint": linked_checkpoint,
    "a link": linked("step-00000001"),
    "a folder with weights": own("step-00000001", **{"rank-00000.safetensors": "mine"}),
    "what looks half written": own(".saving-x"),
    "a link in place of an old one": linked(f".old-step-00000001-{TOKEN}"),
    "a link in place of it": linked(f".saving-00000001-{TOKEN}"),
    "a file in place of it": file(f".saving-00000001-{TOKEN}"),
    "what looks old": own(".old-x"),
    "the old one's place": own(".old-step-00000002"),
    "what looks like an export": own(".exporting-x"),
}


def check_files_of_a_user_stay(theirs, tmp_path, export=lambda root: None):
    """Also where something is exported to the same directory."""
    root, outside = tmp_path / "run", folder(tmp_path / "outside")
    root.mkdir()
    THEIRS[theirs](root, outside)
    before = contents(tmp_path)
    save(root, 1, 2, 3, ranks=2)
    export(root)
    after = contents(tmp_path)
    assert {name: after.get(name) for name in before} == before
    # Ours are removed as ever.
    assert checkpoint.restore(root, TREE)["w"].equal(TREE["w"])
    ours = [path.parent.name for path in root.glob("step-*/manifest.json")]
    assert [name for name in ours if f"run/{name}" not in before] == ["step-00000003"]


def test_files_of_a_user_stay(tmp_path):
    for theirs in THEIRS:
        check_files_of_a_user_stay(theirs, tmp_path / theirs)


def test_what_is_written_follows_no_link(tmp_path):
    outside = folder(tmp_path / "outside")
    for name in ("latest", ".latest.part", ".lock"):
        for place in (outside, outside / "notes.txt"):
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / name).symlink_to(place)
            with contextlib.suppress(checkpoint.CheckpointError):
                checkpoint.save(tmp_path / "run", TREE, 1)
            assert contents(outside) == {"notes.txt": b"mine"}
            shutil.rmtree(tmp_path / "run")


def test_reading_follows_links(tmp_path):
    """A checkpoint, a file of it and the name of the latest may lie on another disk."""
    path = checkpoint.save(tmp_path / "run", TREE, 1).wait()
    for moved in (path / "manifest.json", path / "rank-00000.safetensors", path, path.parent / "latest"):
        moved.rename(tmp_path / moved.name)
        moved.symlink_to(tmp_path / moved.name)
        assert checkpoint.restore(path.parent, TREE)["w"].equal(TREE["w"])
