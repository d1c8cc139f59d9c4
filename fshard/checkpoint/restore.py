"""restore: read a checkpoint into a state of any layout, and refuse a damaged one."""

import os
import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fshard.checkpoint import files
from fshard.checkpoint.directory import find, open_regular, saved
from fshard.checkpoint.errors import CheckpointError, expect_file
from fshard.checkpoint.exchange import Box, Entry, Exchange
from fshard.errors import expect
from fshard.mesh import Mesh
from fshard.tree import MASK, Flat, Mask, Tree, is_mask, matches
from fshard.tree.checks import check_matches, describe

LABEL = "checkpoint.restore"


def latest_step(directory: str | PathLike[str]) -> int | None:
    """Return the step of the checkpoint that was saved last.

    Each rank looks by itself and nothing is sent, so while a save is under way, one rank may see the checkpoint and
    another may not yet. `restore` has one rank choose for all.

    Args:
        directory: Where checkpoints are kept.

    Returns:
        Its step, or None where there is no checkpoint.

    >>> import tempfile, torch, fshard as fs
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     before = fs.checkpoint.latest_step(directory)
    ...     path = fs.checkpoint.save(directory, {"w": torch.ones(3)}, step=10).wait()
    ...     before, fs.checkpoint.latest_step(directory)
    (None, 10)
    """
    found = saved(Exchange("checkpoint.latest_step").path("directory", directory))
    return found[-1][1] if found else None


def restore(
    directory: str | PathLike[str],
    like: Tree,
    *,
    step: int | None = None,
    subtree: str = "",
    only: Mask | None = None,
    mesh: Mesh | None = None,
) -> Tree:
    """Read a checkpoint, bitwise, into any layout, mesh and number of ranks. Every rank must call this.

    Each chunk that this rank needs a part of is read as a whole and compared with its checksum.

    Args:
        directory: Where checkpoints are kept.
        like: A tree as it shall be: leaves say which dtype, shape, layout and device; their values are not used and
            may be on the meta device, which stands for the default one and takes no memory.
        step: Which checkpoint; None takes the one saved last. The first rank chooses it for all.
        subtree: The path under which `like` lies in what was saved, such as ".params" of a TrainState.
        only: Which leaves of `like` to read, by a pattern of their names such as "head.*", several, or a function of
            (name, leaf); others stay as they are. None reads all, and refuses a checkpoint that has more.
        mesh: The mesh of one axis over the ranks that read; None where all ranks of this run do.

    Returns:
        A tree of the structure, specs, dtypes and devices of `like`.

    Raises:
        ValueError: on every rank, with every leaf that the checkpoint lacks or has otherwise; dtypes are never
            changed silently.
        CheckpointError: on every rank, if there is no such checkpoint or a file is damaged, by its name.

    >>> import tempfile, torch, fshard as fs
    >>> state = {"params": {"w": torch.tensor([1.0, 2.0])}, "epoch": torch.tensor(3)}
    >>> like = fs.shard({"w": torch.zeros(2)}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = fs.checkpoint.save(directory, state, step=1).wait()
    ...     params = fs.checkpoint.restore(directory, like, subtree="['params']")
    >>> params, params["w"].local
    ({'w': Sharded(float32[2], P('shard'), local [2])}, tensor([1., 2.]))
    """
    exchange = Exchange(LABEL, mesh=mesh)
    with exchange.raise_on_all_ranks(directory):
        root = exchange.path("directory", directory)
        expect(step is None or type(step) is int, LABEL, "step to be a whole number or None", describe(step))
        expect(isinstance(subtree, str), LABEL, "subtree to be a path such as '.params'", describe(subtree))
        flat = exchange.flat(like)
        wanted = _wanted(only, flat)
        # One rank chooses, because a save may complete another checkpoint while ranks look.
        choice = None
        if not exchange.rank:
            chosen_step, path = find(root, step)
            choice = [chosen_step, path.name]
    chosen_step, name = exchange.everyone(choice)[0]
    with exchange.raise_on_all_ranks(directory):
        reader = _Reader(root / name, chosen_step)
    exchange.agree(
        {"(checkpoint)": reader.mark}, "ranks read different checkpoints", "use a directory that all ranks share"
    )
    # The path of a tree that is one leaf is that of the subtree.
    names = [subtree + ("" if subtree and name == "(root)" else name) for name in flat.paths]
    needed = {name: leaf for name, leaf, take in zip(names, flat.leaves, wanted, strict=True) if take}
    found = {
        name: [each]
        for name, each in reader.entries().items()
        if name in needed or (only is None and _is_under(name, subtree))
    }
    remedy = "restore into a state built as the one that was saved; only= and subtree= read parts of it"
    made = exchange.read(needed, found, remedy)
    return flat.unflatten([made.get(name, leaf) for name, leaf in zip(names, flat.leaves, strict=True)])


def _wanted(only: Mask | None, flat: Flat) -> list[bool]:
    """For each leaf whether to read it."""
    if only is None:
        return [True] * len(flat.leaves)
    expect(is_mask(only), LABEL, f"only to be {MASK}", describe(only))
    check_matches(LABEL, [only], flat.names, flat.leaves)
    return [matches(only, name, leaf) for name, leaf in zip(flat.names, flat.leaves, strict=True)]


def _is_under(name: str, subtree: str) -> bool:
    return name.startswith(subtree) and (not subtree or name[len(subtree) :][:1] in ("", ".", "["))


class _Reader:
    """The files of a checkpoint, each checked when it is first needed.

    It reads into the memory of the result and compares as it goes, where maps of files, as readers of safetensors make
    them, cost a fault for each page and end the process when a file is cut short.

    Attributes:
        manifest: The manifest.
        mark: The name of the checkpoint, and the digest of its manifest.
        starts: Returns where parts begin in the file of a rank.
    """

    def __init__(self, checkpoint: Path, step: int) -> None:
        """Read the manifest of a checkpoint, which is of this step."""
        self._path = checkpoint
        path, needed = self._path / files.MANIFEST, f"at most {files.MAX_MANIFEST_BYTES} bytes"
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            expect_file(size <= files.MAX_MANIFEST_BYTES, f"{path}", needed, f"{size}")
            # A read of the limit would take memory for all of it.
            data = file.read(size)
        self.manifest = manifest = files.decode(data, path)
        self.mark = f"{self._path.name} of digest {files.digest(data)}"
        self.starts = cache(self._starts)
        self._parts = defaultdict[int, dict[str, Any]](dict)
        for name, leaf in manifest.tensors.items():
            for chunk in leaf.chunks:
                self._parts[chunk.file][name] = getattr(torch, leaf.dtype), chunk.shape
        needed = f"step {step} as its name says"
        expect_file(manifest.step == step, f"{self._path}", needed, f"step {manifest.step}")
        there, named = set(os.listdir(self._path)), {files.MANIFEST, *map(files.file_name, self._parts)}
        for name in sorted(there ^ named):
            got = "one that it does not name" if name in there else "nothing"
            expect_file(False, f"{self._path / name}", "a file that the manifest names", got)

    def entries(self) -> dict[str, Any]:
        """The leaves of the checkpoint by path: an entry of each that is a tensor, and the values of others."""
        entries: dict[str, Any] = {}
        for name, leaf in self.manifest.tensors.items():
            entries[name] = Entry(getattr(torch, leaf.dtype), leaf.shape, partial(self._read, name, leaf))
        return entries | dict(self.manifest.values)

    def _starts(self, index: int) -> dict[str, int]:
        """Return where parts begin in a file, whose size and header follow from the manifest, byte for byte."""
        path = self._path / files.file_name(index)
        header, starts, size = files.lay_out(self._parts[index], pairs=True)
        with open_regular(path) as file:
            found, there = file.read(len(header)), os.fstat(file.fileno()).st_size
        expect_file(there == size, f"{path}", f"{size} bytes", f"{there}")
        expect_file(found == header, f"{path}", "the header that follows from the manifest", "a damaged one")
        return starts

    def _read(self, name: str, leaf: files.StoredLeaf, box: Box) -> torch.Tensor:
        """Read a box of a leaf from the chunks that have elements of it."""
        dtype = getattr(torch, leaf.dtype)
        out = torch.empty([side.stop - side.start for side in box], dtype=dtype, device="cpu")
        for chunk in leaf.chunks:
            sides = zip(chunk.offset, chunk.shape, box, strict=True)
            both = [slice(max(a, side.start), min(a + n, side.stop)) for a, n, side in sides]
            if any(side.start >= side.stop for side in both):
                continue
            target = out[_within(both, [side.start for side in box])]
            fits = target.shape == chunk.shape and target.is_contiguous()
            whole = target if fits else torch.empty(chunk.shape, dtype=dtype, device="cpu")
            self._read_chunk(name, chunk, whole)
            if not fits:
                target.copy_(whole[_within(both, chunk.offset)])
        return out

    def _read_chunk(self, name: str, chunk: files.Chunk, into: torch.Tensor) -> None:
        """Read a chunk into contiguous memory on the host."""
        path, data = self._path / files.file_name(chunk.file), files.byte_view(into)
        start = self.starts(chunk.file)[name]
        with open_regular(path) as file:
            file.seek(start)
            is_whole = file.readinto(data) == len(data) and zlib.crc32(data) == chunk.checksum
        if not is_whole:
            raise CheckpointError(f"{path}: the elements of {name} do not match their checksum, so it was damaged")


def _within(box: Sequence[slice], start: Sequence[int]) -> Box:
    """A box, counted from where another one starts."""
    return tuple(slice(side.start - a, side.stop - a) for side, a in zip(box, start, strict=True))
