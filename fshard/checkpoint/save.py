"""save: write a state so that a kill at any moment leaves the last checkpoint whole."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from os import PathLike
from pathlib import Path
from threading import Event, Thread, main_thread
from typing import IO, Any, TypeVar

import torch

from fshard import _compat, comm
from fshard.checkpoint import directory as directories
from fshard.checkpoint.errors import CheckpointError, expect_file, reason
from fshard.checkpoint.exchange import Exchange
from fshard.checkpoint.files import named, read_bytes, write_bytes
from fshard.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SAVED,
    Chunk,
    File,
    Leaf,
    Manifest,
    check_tiles,
    digest,
    encode,
    file_name,
)
from fshard.checkpoint.pieces import (
    Piece,
    Split,
    dtype_name,
    is_tensor,
    layout_of,
    piece_of,
    shape_of,
    split_of,
)
from fshard.checkpoint.safetensors import lay_out, write_tensors
from fshard.errors import Problem, expect, refuse
from fshard.mesh import Mesh, ranks_of, world
from fshard.tree import Axis, Flat, Tree, flatten, tensor_of
from fshard.tree.checks import POSITIVE, check_numbers, describe

LABEL = "checkpoint.save"
# Larger ones Python may refuse to read as text.
MAX_INT_BITS = 2000
# Seconds between two looks for other ranks' parts.
LOOK_EVERY = 0.002
# Seconds that the end of the program waits for ranks that may be dead.
PATIENCE_AT_EXIT = 30.0
T = TypeVar("T")


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
        self, step: int, ranks: Axis, written: "Future[None]", joined: "Future[Path] | None", patience: "_Wait"
    ) -> None:
        """Keep this rank's part that is being written, and on the first rank the joining of all parts."""
        self.step = step
        self._ranks, self._written, self._joined, self._patience = ranks, written, joined, patience
        self._outcome: Path | CheckpointError | None = None

    def wait(self) -> Path:
        """Wait until the checkpoint is complete. Every rank must call this, as it does a collective.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: on every rank, if any of them failed; checkpoints from before are as they were.
        """
        if self._outcome is None:
            self._outcome = self._finish()
        if isinstance(self._outcome, CheckpointError):
            raise self._outcome
        return self._outcome

    def _finish(self) -> Path | CheckpointError:
        failures = [text for text in comm.everyone(_failure(self._written), [self._ranks], LABEL) if text]
        if failures:
            self._patience.given_up.set()
        failure, path = "", ""
        if self._joined is not None:
            failure = _failure(self._joined)
            path = "" if failure else str(self._joined.result())
        failure, path = comm.everyone([failure, path], [self._ranks], LABEL)[0]
        if failures or failure:
            return CheckpointError(f"{LABEL}: step {self.step} was not saved: {[*failures, failure][0]}")
        return Path(path)


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
    return start(
        directory,
        state,
        step,
        asynchronous=asynchronous,
        donated=donated,
        timeout=timeout,
        ranks=members(LABEL, mesh, state),
    )


def start(
    directory: str | PathLike[str],
    state: Tree,
    step: int | None,
    *,
    asynchronous: bool,
    donated: bool,
    timeout: float,
    ranks: Axis,
    staging: MutableMapping[str, torch.Tensor] | None = None,
    keep: int | None = None,
) -> Saving:
    """Save as `save` does.

    Args:
        directory: As for `save`, and so on, up to `timeout`.
        state: The state.
        step: Its step.
        asynchronous: Whether to return before the checkpoint is complete.
        donated: Whether a later step may write over the state.
        timeout: Seconds to wait for other ranks.
        ranks: Those that save.
        staging: Buffers for copies, by path, kept from one save to the next.
        keep: How many checkpoints stay; None for all.
    """
    exchange = Exchange(LABEL, ranks=ranks)
    with exchange.raise_on_all_ranks():
        exchange.check_flags(asynchronous=asynchronous, donated=donated)
        check_numbers(LABEL, POSITIVE, timeout=timeout)
        number = checked_step(LABEL, state, step)
        root = checked_directory(exchange, directory)
        flat = exchange.flat(state)
    tensors, values = _checked(exchange, flat, number, str(directory))
    rank = exchange.rank
    pieces = _own_pieces(tensors, exchange.replicas(tensors), rank)
    with exchange.raise_on_all_ranks():
        if asynchronous and donated:
            pieces = {path: _aside(path, piece, {} if staging is None else staging) for path, piece in pieces.items()}
    temporary, lock = _prepare(root, number, ranks)
    patience = _Wait(timeout)
    leaves = {path: Leaf(dtype_name(tensor_of(leaf)), shape_of(leaf), ()) for path, leaf in tensors.items()}

    def write() -> None:
        _write_part(temporary, rank, pieces)

    def join() -> Path:
        assert lock is not None
        try:
            _join_parts(temporary, ranks.size, Manifest(number, leaves, values, ()), patience)
            path = directories.publish(temporary, root, number)
            if keep is not None:
                directories.prune(root, keep)
            return path
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            directories.unlock(lock)

    written = _in_background(write)
    saving = Saving(number, ranks, written, _in_background(join) if lock is not None else None, patience)
    if not asynchronous:
        saving.wait()
    return saving


def members(label: str, mesh: Mesh | None, tree: Tree) -> Axis:
    """Return the ranks of a call, before any collective of it, and refuse a tree of others."""
    ranks = ranks_of(mesh)
    allowed = _compat.group_ranks(ranks.group_name) if ranks.size < world().size else []
    axes: Sequence[Axis] = ()
    # A tree that is none is refused later.
    with suppress(Exception):
        axes = flatten(tree).axes if allowed else ()
    for axis in axes:
        if _compat.group_size(axis.group_name) is not None:
            found = _compat.group_ranks(axis.group_name)
            needed, got = f"leaves on a mesh of ranks {allowed}", f"axis {axis.name!r} of ranks {found}"
            expect(set(found) <= set(allowed), label, needed, got, "pass mesh=, a mesh of their ranks")
    return ranks


def checked_step(label: str, state: Tree, step: Any) -> int:
    """Return the step to save a state as.

    Raises:
        ValueError: if it is no whole number.
    """
    found: Any = getattr(state, "step", None) if step is None else step
    if type(found) is torch.Tensor and not (found.dim() or found.is_meta or _compat.is_transformed(found)):
        found = found.item()
    is_step, remedy = type(found) is int and 0 <= found < 10**18, "pass step=, or a state that has one"
    shown = describe(found) if isinstance(found, torch.Tensor) else repr(found)[:40]
    expect(is_step, label, "step to be a whole number from 0", shown, remedy)
    return found


def checked_directory(exchange: Exchange, directory: Any) -> Path:
    """Return the path of a directory, and refuse one that could be written to and not read: torch opens names of text.

    Raises:
        ValueError: if it is no path, or its name is no text.
    """
    path = exchange.path("directory", directory)
    needed = "directory to be a name that is text in UTF-8"
    expect(_is_text(str(directory)), exchange.label, needed, repr(str(directory)))
    return path


def _is_text(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _checked(exchange: Exchange, flat: Flat, step: int, directory: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and the other leaves by path; refuse, on every rank, leaves that cannot be saved."""
    problems: list[Problem] = []
    tensors, values, entries = {}, {}, {"(step)": str(step), "(directory)": directory}
    # Sorted, because the order of a dict's entries is no part of a state, and may differ between ranks.
    for path, leaf in sorted(zip(flat.paths, flat.leaves, strict=True), key=lambda pair: pair[0]):
        if unfit := _unfit(leaf):
            problems.append(Problem(path, *unfit))
            entries[path] = unfit[0]
        elif is_tensor(leaf):
            tensors[path] = leaf
            entries[path] = layout_of(leaf)
        else:
            values[path] = leaf
            entries[path] = repr(leaf)
    remedy = "make all but the values of Sharded leaves the same on every rank"
    exchange.agree(entries, "ranks hold different states", remedy)
    refuse(f"{LABEL}: leaves cannot be saved", problems, "keep them out of the state")
    return tensors, values


def _unfit(leaf: Any) -> tuple[str, str] | None:
    """Describe a leaf that cannot be saved, and the leaf expected in its place."""
    if type(leaf) is int and leaf.bit_length() > MAX_INT_BITS:
        return f"an int of {leaf.bit_length()} bits", f"at most {MAX_INT_BITS}"
    if type(leaf) is str and not _is_text(leaf):
        return "a str with surrogates", "one that is text; encode it otherwise"
    if leaf is None or type(leaf) in (bool, int, float, str):
        return None
    local = tensor_of(leaf)
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        return describe(leaf), "a tensor, or None, bool, int, float or str"
    if _compat.is_transformed(local) or local.is_meta or local.layout != torch.strided:
        return (
            f"{describe(local)} without values of its own",
            "a strided tensor with values, outside of torch.func and jit",
        )
    if dtype_name(local) not in SAVED:
        return f"dtype {dtype_name(local)}", f"one of {', '.join(SAVED)}"
    return None


def _own_pieces(tensors: Mapping[str, Any], replicas: Mapping[Split, list[int]], rank: int) -> dict[str, Piece]:
    """The parts that this rank writes: of those that several ranks hold each rank writes some, in turns by bytes."""
    loads = {split: [0] * len(ranks) for split, ranks in replicas.items()}
    pieces = {}
    for path, leaf in tensors.items():
        load = loads[split_of(leaf)]
        turn = load.index(min(load))
        # The same number on every rank: parts differ in padding alone.
        load[turn] += tensor_of(leaf).nbytes
        piece = piece_of(leaf)
        if replicas[split_of(leaf)][turn] == rank and piece.tensor.numel():
            pieces[path] = piece
    return pieces


def _aside(path: str, piece: Piece, staging: MutableMapping[str, torch.Tensor]) -> Piece:
    """Copy a part into the buffer that is kept for it, because to touch new memory takes longer than to copy."""
    source = piece.tensor
    room = staging.get(path)
    if room is None or room.shape != source.shape or room.dtype != source.dtype:
        room = staging[path] = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    return piece._replace(tensor=room.copy_(source))


def _prepare(directory: Path, step: int, ranks: Axis) -> tuple[Path, IO[bytes] | None]:
    """Have the first rank lock the directory and make one for the checkpoint, whose name all ranks return."""
    lock, name, failure = None, "", ""
    if not comm.rank(ranks):
        try:
            lock = directories.lock(directory)
            name = directories.make(directory, step).name
        except (OSError, ValueError) as error:
            failure = reason(error, directory)
    name, failure = comm.everyone([name, failure], [ranks], LABEL)[0]
    if failure:
        if lock is not None:
            directories.unlock(lock)
        raise CheckpointError(f"{LABEL}: step {step} was not saved: {failure}")
    return directory / name, lock


def _in_background(work: Callable[[], T]) -> "Future[T]":
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    # No daemon, so that the end of the program waits for it.
    Thread(target=run, name=LABEL).start()
    return future


def _failure(future: "Future[Any]") -> str:
    error = future.exception()
    return reason(error) if error else ""


def _write_part(directory: Path, rank: int, pieces: Mapping[str, Piece]) -> None:
    """Write the parts of this rank, and then the list of them, by which the first rank knows that they are complete."""
    layout = lay_out({path: (dtype_name(piece.tensor), piece.shape) for path, piece in pieces.items()}, pairs=True)
    part = directory / file_name(rank)
    with named(part), open(part, "xb", buffering=0) as file:
        # The kernel gives it back when this process is killed, by which the first rank knows; some disks have no locks.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        checksums = write_tensors(file, layout.header, (pieces[path].tensor for path in layout.starts))
        chunks = {
            path: (pieces[path].offset, pieces[path].shape, checksum)
            for path, checksum in zip(layout.starts, checksums, strict=True)
        }
        listing = json.dumps([layout.size, digest(layout.header), chunks]).encode()
        # The last call, because the first rank may rename the directory once it sees the list.
        write_bytes(_listing(directory, rank), listing, durable=False)


def _join_parts(directory: Path, ranks: int, manifest: Manifest, wait: "_Wait") -> None:
    """Wait for the parts of all ranks, add their files and chunks to the manifest, and write it.

    Raises:
        CheckpointError: if a part does not come, or parts do not make whole leaves.
    """
    files, chunks = [], dict[str, list[Chunk]]()
    listings = [_listing(directory, rank) for rank in range(ranks)]
    for rank, listing in enumerate(listings):
        wait(listing, directory / file_name(rank))
        size, header, parts = json.loads(read_bytes(listing, MAX_MANIFEST_BYTES))
        files.append(File(size, header))
        for path, (offset, shape, checksum) in parts.items():
            chunks.setdefault(path, []).append(Chunk(rank, tuple(offset), tuple(shape), checksum))
    tensors = {path: leaf._replace(chunks=tuple(chunks.get(path, ()))) for path, leaf in manifest.tensors.items()}
    for path, leaf in tensors.items():
        check_tiles(path, leaf)
    write_bytes(directory / MANIFEST, encode(manifest._replace(tensors=tensors, files=tuple(files))))
    for listing in listings:
        os.remove(listing)


def _listing(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.json"


class _Wait:
    """Waits for a file that another rank writes, until a time is over or `given_up` is set."""

    def __init__(self, seconds: float) -> None:
        self.given_up = Event()
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def __call__(self, path: Path, part: Path) -> None:
        """Wait until the file `path` is there; its writer has `part` locked until then.

        Raises:
            CheckpointError: if it does not come.
        """
        while not path.exists():
            if not main_thread().is_alive():
                # The lock is free once the file is there, too.
                is_coming = not _is_free(part) or path.exists()
                expect_file(is_coming, str(part), "a rank to write it", "one that is gone", "see why it ended")
                self._deadline = min(self._deadline, time.monotonic() + PATIENCE_AT_EXIT)
            if time.monotonic() > self._deadline:
                remedy = "see that every rank is alive and that all share the directory"
                raise CheckpointError(f"{path}: found nothing after {self._seconds:.0f} s; {remedy}")
            if self.given_up.wait(LOOK_EVERY):
                raise CheckpointError("another rank failed")


def _is_free(part: Path) -> bool:
    """Whether a file is there and nobody has it locked."""
    try:
        with open(part, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
