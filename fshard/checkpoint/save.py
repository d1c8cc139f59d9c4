"""save and Manager: write states so that a kill at any moment leaves the last checkpoint whole."""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from os import PathLike
from pathlib import Path
from threading import Event, Thread, main_thread
from typing import Any, NamedTuple, TypeVar

import torch

from fshard import comm
from fshard.checkpoint import directory as directories
from fshard.checkpoint.errors import CheckpointError, expect_file, reason
from fshard.checkpoint.exchange import Exchange, Piece, is_tensor, piece_of, shape_of
from fshard.checkpoint.files import (
    MANIFEST,
    SAVED,
    Chunk,
    Manifest,
    StoredLeaf,
    check_tiles,
    digest,
    encode,
    file_name,
    lay_out,
    name_of,
    write_file,
)
from fshard.checkpoint.restore import latest, restore
from fshard.errors import expect, refuse
from fshard.mesh import Mesh, ranks_of
from fshard.tree import Axis, Tree, tensor_of
from fshard.tree.checks import POSITIVE, check_flags, check_numbers, describe

T = TypeVar("T")

LABEL = "checkpoint.save"
# Seconds between two looks for other ranks' parts.
LOOK_EVERY = 0.002
# Seconds that the end of the program waits for ranks that may be dead.
PATIENCE_AT_EXIT = 30.0


class Saving:
    """A save under way; it becomes a checkpoint by itself, and `wait` says whether it did.

    Attributes:
        step: The step that is saved.

    >>> import tempfile, torch, fshard as fs
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     saving = fs.checkpoint.save(directory, {"w": torch.ones(3)}, step=7, asynchronous=True)
    ...     saving.step, saving.wait().name  # training goes on between the two
    (7, 'step-00000007')
    """

    def __init__(
        self, step: int, ranks: Axis, written: "Future[None]", joined: "Future[Path] | None", given_up: Event
    ) -> None:
        """Keep this rank's part that is being written, and on the first rank the joining of all parts."""
        self.step, self._ranks = step, ranks
        self._written, self._joined, self._given_up = written, joined, given_up
        self._told: tuple[str, list[str]] | None = None

    def wait(self) -> Path:
        """Wait until the checkpoint is complete. Every rank must call this, as it does a collective.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: on every rank, if any of them failed; checkpoints from before are as they were.
        """
        self._told = self._told or self._finish()
        path, failures = self._told
        if failures:
            raise CheckpointError(f"{LABEL}: step {self.step} was not saved: {failures[0]}")
        return Path(path)

    def _finish(self) -> tuple[str, list[str]]:
        """Return the checkpoint's path and all failures, the same on every rank."""
        # By this message a rank hears of one that has failed or is dead, before it waits for the part of that one.
        failures = ["ranks are lost"]
        try:
            failures = comm.everyone(_outcome(self._written)[1], [self._ranks], LABEL)
        finally:
            if any(failures):
                self._given_up.set()
        path, failure = comm.everyone(_outcome(self._joined), [self._ranks], LABEL)[0]
        return path, list(filter(None, [*failures, failure]))


def save(
    directory: str | PathLike[str],
    state: Tree,
    step: int | None = None,
    *,
    asynchronous: bool = False,
    donated: bool = True,
    timeout: float = 1800.0,
    mesh: Mesh | None = None,
) -> Saving:
    """Write a checkpoint of a state: each rank its shards, replicated leaves once. Every rank must call this.

    A kill at any moment leaves the checkpoints that were complete; FORMAT.md in this package describes the files. Parts
    that several ranks hold are compared before, by checksums that each of those ranks makes.

    Args:
        directory: Where checkpoints are kept, a file system that all ranks share; made where there is none.
        state: Any pytree: a TrainState, or parameters. Leaves are Sharded, tensors that are the same on every rank, or
            None, bool, int, float or str. Of leaves that ranks hold values of their own of, each rank's are kept.
        step: Names the checkpoint; None takes state.step.
        asynchronous: Return as soon as the state may be used further, and write while steps run. The checkpoint is
            complete at some time after; `Saving.wait` waits for it.
        donated: Whether a later step may write over the state, as one does that was jitted with donate_argnums: an
            asynchronous save then copies it aside before it returns.
        timeout: Seconds that the first rank waits for the others to have written.
        mesh: The mesh of one axis over the ranks that save; None where all ranks of this run do.

    Returns:
        The save under way; complete unless `asynchronous`.

    Raises:
        ValueError: on every rank, before anything is written, if ranks hold different states, or different values
            of a part that must be the same on every rank, or a leaf cannot be saved.
        CheckpointError: on every rank, if files cannot be written.

    >>> import tempfile
    >>> from fshard import checkpoint
    >>> directory = tempfile.mkdtemp()
    >>> checkpoint.save(directory, {"w": torch.ones(3)}, step=7).wait().name
    'step-00000007'
    >>> checkpoint.restore(directory, like={"w": torch.zeros(3)})
    {'w': tensor([1., 1., 1.])}
    """
    return start(SaveOptions(directory, asynchronous, donated, timeout, mesh), state, step)


class SaveOptions(NamedTuple):
    """How states are saved: the arguments of `save` and `Manager`, and buffers for copies."""

    directory: str | PathLike[str]
    asynchronous: bool
    donated: bool
    timeout: float
    mesh: Mesh | None
    keep: int | None = None
    staging: dict[str, torch.Tensor] | None = None

    def check(self, exchange: Exchange) -> Path:
        """Return the directory, and refuse arguments of other types."""
        check_flags(exchange.label, asynchronous=self.asynchronous, donated=self.donated)
        check_numbers(exchange.label, POSITIVE, timeout=self.timeout)
        return exchange.path("directory", self.directory)


def start(options: SaveOptions, state: Tree, step: int | None) -> Saving:
    """Save a state as `save` does."""
    exchange = Exchange(LABEL, ranks=ranks_of(options.mesh))
    rank, ranks = exchange.rank, exchange.ranks
    with exchange.raise_on_all_ranks():
        root = options.check(exchange)
        number = checked_step(LABEL, state, step)
        tensors, values = _checked(exchange, state)
    same = {"(step)": f"{number}", "(directory)": f"{root}"} | {path: repr(value) for path, value in values.items()}
    pieces = _own_pieces(tensors, exchange.replicas(tensors, same), rank)
    if options.asynchronous and options.donated:
        staging = {} if options.staging is None else options.staging
        pieces = {path: _aside(path, piece, staging) for path, piece in pieces.items()}
    temporary, lock = _prepare(exchange, root, number)
    dtypes = {path: name_of(tensor_of(leaf).dtype) for path, leaf in tensors.items()}
    leaves = {path: StoredLeaf(dtypes[path], shape_of(leaf)) for path, leaf in tensors.items()}

    given_up, part = Event(), temporary / file_name(rank)

    def join() -> Path:
        try:
            _join_parts(temporary, ranks.size, Manifest(number, leaves, values), options.timeout, given_up)
            path = directories.publish(temporary, root, number)
            if options.keep is not None:
                directories.prune(root, path, options.keep)
            return path
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            directories.unlock(lock)

    written = _in_background(lambda: _write_part(part, pieces), part)
    saving = Saving(number, ranks, written, None if rank else _in_background(join, root), given_up)
    if not options.asynchronous:
        saving.wait()
    return saving


def _in_background(work: Callable[[], T], place: Path) -> "Future[T]":
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(CheckpointError(reason(error, place)))

    # No daemon, so that the end of the program waits for it.
    Thread(target=run, name=LABEL).start()
    return future


def _outcome(future: "Future[Any] | None") -> tuple[str, str]:
    """Wait for what runs in the background, and return its result or its failure as texts."""
    error = future.exception() if future else None
    return ("", f"{error}") if error else (f"{future.result() if future else ''}", "")


class Manager:
    """Saves a run's states: every so many steps, beside the steps, the newest kept.

    Used in a with statement, or closed at the end, so that the last save is complete.

    >>> import tempfile
    >>> import fshard as fs
    >>> with Manager(tempfile.mkdtemp(), keep=2, every=10) as manager:
    ...     [manager.save({"w": torch.ones(3)}, step=step) for step in (5, 10, 20, 30)]
    ...     manager.save({"w": torch.ones(3)}, step=34, force=True)  # the last step, whatever its number
    ...     manager.wait()
    ...     manager.latest()
    [False, True, True, True]
    True
    34
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        keep: int | None = None,
        every: int = 1,
        asynchronous: bool = True,
        donated: bool = True,
        timeout: float = 1800.0,
        mesh: Mesh | None = None,
    ) -> None:
        """Keep the directory and the options.

        Args:
            directory: Where checkpoints are kept, a file system that all ranks share.
            keep: How many checkpoints stay, None for all; directories without a manifest stay, and do not count.
            every: Steps from one save to the next.
            asynchronous: Write while the next steps run.
            donated: Whether steps may write over a state that was saved, as for `save`; copies then go to buffers that
                are kept from one save to the next.
            timeout: Seconds that the first rank waits for the others to have written.
            mesh: As for `save`.

        Raises:
            ValueError: if `directory` is no path, this rank is not one of the mesh's, `keep` or `every` is no positive
                whole number, `timeout` is not above 0, or a flag is no bool.
        """
        exchange = Exchange("checkpoint.Manager", ranks=ranks_of(mesh))
        # Copies go to buffers that are kept from one save to the next.
        self._staging: dict[str, torch.Tensor] = {}
        self._options = SaveOptions(directory, asynchronous, donated, timeout, mesh, keep, self._staging)
        for name, value in {"keep": 1 if keep is None else keep, "every": every}.items():
            is_whole = type(value) is int and value > 0
            expect(is_whole, exchange.label, f"{name} to be a whole number from 1", f"{value!r:.40}")
        self._directory, self._every = self._options.check(exchange), every
        self._saving: Saving | None = None

    def save(self, state: Tree, step: int | None = None, *, force: bool = False) -> bool:
        """Save a state if its step is one to be saved; waits for the save before this one.

        Args:
            state: As for `save`.
            step: As for `save`.
            force: Whether to save it whatever its step is, as at the end of a run.

        Returns:
            Whether it was one to be saved.

        Raises:
            ValueError: as for `save`.
            CheckpointError: if the save before this one failed, or this one cannot start.
        """
        if checked_step("checkpoint.Manager", state, step) % self._every and not force:
            return False
        self.wait()
        self._saving = start(self._options, state, step)
        return True

    def wait(self) -> None:
        """Wait for the last save to be complete. Every rank must call this.

        Raises:
            CheckpointError: on every rank, if it failed.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def latest(self) -> int | None:
        """The step of the checkpoint that was saved last, as `fs.checkpoint.latest` says it."""
        return latest(self._directory)

    def restore(self, like: Tree, **arguments: Any) -> Tree:
        """Read a checkpoint, as `fs.checkpoint.restore` does, after waiting for the save under way.

        >>> import tempfile, torch, fshard as fs
        >>> with tempfile.TemporaryDirectory() as directory, fs.checkpoint.Manager(directory) as manager:
        ...     saved = manager.save({"w": torch.ones(2)}, step=1)
        ...     manager.restore(like={"w": torch.zeros(2)})
        {'w': tensor([1., 1.])}
        """
        self.wait()
        return restore(self._directory, like, mesh=self._options.mesh, **arguments)

    def close(self) -> None:
        """Wait for the last save; the buffers of copies are given back."""
        self.wait()
        self._staging.clear()

    def __enter__(self) -> "Manager":
        return self

    def __exit__(self, kind_of_error: object, *error: object) -> None:
        # Ranks that failed do not wait for each other.
        if kind_of_error is None:
            self.close()


def checked_step(label: str, state: Tree, step: Any) -> int:
    """Return the step to save a state as, and refuse it unless it is a whole number."""
    found: Any = getattr(state, "step", None) if step is None else step
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        found = found.item()
    is_step, remedy = type(found) is int and 0 <= found < 10**18, "pass step=, or a state that has one"
    expect(is_step, label, "step to be a whole number from 0", f"{found!r:.40}", remedy)
    return found


def _checked(exchange: Exchange, state: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and the other leaves by path, and refuse leaves that cannot be saved."""
    flat = exchange.flat(state)
    refuse(f"{LABEL}: leaves cannot be saved", flat.problems(_unfit), "keep them out of the state")
    # The order of a dict's entries is no part of a state, and may differ between ranks.
    leaves = dict(sorted(zip(flat.paths, flat.leaves, strict=True)))
    tensors = {path: leaf for path, leaf in leaves.items() if is_tensor(leaf)}
    return tensors, {path: leaf for path, leaf in leaves.items() if path not in tensors}


def _unfit(leaf: Any) -> tuple[str, str] | None:
    """Describe a leaf that cannot be saved, and the leaf expected in its place."""
    local = tensor_of(leaf)
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        is_plain = local is None or type(local) in (bool, int, float, str)
        return None if is_plain else (describe(local), "a plain tensor, or None, bool, int, float or str")
    fits = local.layout == torch.strided and not local.is_meta and name_of(local.dtype) in SAVED
    needed = f"a strided tensor with values, of dtype {', '.join(SAVED)}"
    return None if fits else (f"{describe(local)}, {local.layout} on {local.device}", needed)


def _own_pieces(tensors: Mapping[str, Any], replicas: Mapping[str, list[int]], rank: int) -> dict[str, Piece]:
    """The parts that this rank writes: of those that several ranks hold each rank writes some, in turns by bytes."""
    # Of the same ranks, so that each of these makes the same choice.
    loads = Counter[tuple[str, int]]()
    pieces = {}
    for path, ranks in replicas.items():
        writer = min(ranks, key=lambda each: loads[f"{ranks}", each])
        # The same number on every rank: parts differ in padding alone.
        loads[f"{ranks}", writer] += tensor_of(tensors[path]).nbytes
        piece = piece_of(tensors[path])
        if writer == rank and piece.tensor.numel():
            pieces[path] = piece
    return pieces


def _aside(path: str, piece: Piece, staging: dict[str, torch.Tensor]) -> Piece:
    """Copy a part into the buffer that is kept for it, because to touch new memory takes longer than to copy."""
    source = piece.tensor
    room = staging.get(path)
    if room is None or room.shape != source.shape or room.dtype != source.dtype:
        room = staging[path] = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    return piece._replace(tensor=room.copy_(source))


def _prepare(exchange: Exchange, directory: Path, step: int) -> tuple[Path, int]:
    """Have the first rank lock the directory and make one for the checkpoint, whose name all ranks return."""
    lock, name = -1, ""
    try:
        with exchange.raise_on_all_ranks(directory):
            if not exchange.rank:
                lock, name = directories.begin(directory, step)
        return directory / comm.everyone(name, [exchange.ranks], LABEL)[0], lock
    except BaseException:
        if lock >= 0:
            directories.unlock(lock)
        raise


def _write_part(path: Path, pieces: Mapping[str, Piece]) -> None:
    """Write the parts of this rank, and then the list of them, by which the first rank knows that they are complete."""
    parts = {path: (name_of(piece.tensor.dtype), piece.tensor.shape) for path, piece in pieces.items()}
    header, starts, size = lay_out(parts, pairs=True)
    checksums = write_file(path, header, (pieces[name].tensor for name in starts))
    chunks = {
        name: (pieces[name].offset, pieces[name].tensor.shape, checksum)
        for name, checksum in zip(starts, checksums, strict=True)
    }
    # The last call, because the first rank may rename the directory once it sees the list.
    directories.write_bytes(path.with_suffix(".json"), json.dumps([size, digest(header), chunks]).encode())


def _join_parts(directory: Path, ranks: int, manifest: Manifest, timeout: float, given_up: Event) -> None:
    """Wait for the parts of all ranks, add their files and chunks to the manifest, and write it.

    Raises:
        CheckpointError: if a part does not come, or parts do not make whole leaves.
    """
    found, chunks = [], dict[str, list[Chunk]]()
    deadline = time.monotonic() + timeout
    for rank in range(ranks):
        path = (directory / file_name(rank)).with_suffix(".json")
        while not path.exists():
            if not main_thread().is_alive():
                deadline = min(deadline, time.monotonic() + PATIENCE_AT_EXIT)
            in_time, remedy = time.monotonic() < deadline, "see that every rank is alive and shares the directory"
            expect_file(in_time, f"{path}", "the list of a rank's parts", f"nothing after {timeout:.0f} s", remedy)
            expect_file(not given_up.wait(LOOK_EVERY), f"{path}", "the list of a rank's parts", "a rank that failed")
        size, header, parts = json.loads(path.read_bytes())
        path.unlink()
        found.append((size, header))
        for leaf, (offset, shape, checksum) in parts.items():
            chunks.setdefault(leaf, []).append(Chunk(rank, tuple(offset), tuple(shape), checksum))
    tensors = {path: leaf._replace(chunks=tuple(chunks.get(path, ()))) for path, leaf in manifest.tensors.items()}
    manifest = manifest._replace(tensors=tensors, files=tuple(found))
    check_tiles(manifest, directory)
    directories.write_bytes(directory / MANIFEST, encode(manifest))
