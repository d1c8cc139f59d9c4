"""save: write a state so that a kill at any moment leaves the last checkpoint whole."""

import json
import shutil
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future
from os import PathLike
from pathlib import Path
from threading import Thread
from typing import IO, Any, NamedTuple, TypeVar

import torch

from fshard import comm
from fshard.checkpoint import files
from fshard.checkpoint.alike import alike, check_call, reason
from fshard.checkpoint.check import check_directory, check_state, step_of
from fshard.checkpoint.format import CheckpointError, Leaf, dtype_name
from fshard.checkpoint.layout import Piece, local_of, piece_of, replicas, shape_of, writers
from fshard.checkpoint.progress import progress_bar
from fshard.checkpoint.write import Wait, join_parts, write_part
from fshard.checks import POSITIVE, check_flags, check_local, check_numbers
from fshard.mesh import world
from fshard.tree import Tree, flatten

LABEL = "checkpoint.save"
Staging = MutableMapping[str, torch.Tensor]
T = TypeVar("T")


class Saving:
    """A save under way; it becomes a checkpoint by itself, and `wait` says whether it did.

    Attributes:
        step: The step that is saved.
    """

    def __init__(self, step: int, written: "Future[None]", joined: "Future[Path] | None", patience: Wait) -> None:
        """Keep what is under way: this rank's part, and on the first rank the joining of all parts."""
        self.step = step
        self._written = written
        self._joined = joined
        self._patience = patience
        self._outcome: Path | CheckpointError | None = None

    def wait(self) -> Path:
        """Wait until the checkpoint is complete. Every rank must call this, as it does a collective.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: on every rank alike, if any of them failed; checkpoints from before are as they were.
        """
        if self._outcome is None:
            self._outcome = self._finish()
        if isinstance(self._outcome, CheckpointError):
            raise self._outcome
        return self._outcome

    def _finish(self) -> Path | CheckpointError:
        failures = [text for text in comm.texts(_failure(self._written), world(), LABEL) if text]
        if failures:
            self._patience.given_up.set()
        found = ["", ""]
        if self._joined is not None:
            found = [_failure(self._joined), "" if self._joined.exception() else str(self._joined.result())]
        failure, path = json.loads(comm.texts(json.dumps(found), world(), LABEL)[0])
        if failures or failure:
            first = (failures or [failure])[0]
            return CheckpointError(f"checkpoint.save: step {self.step} was not saved: {first}")
        return Path(path)


def save(
    directory: str | PathLike[str],
    state: Tree,
    step: int | None = None,
    *,
    asynchronous: bool = False,
    donated: bool = True,
    progress: bool = False,
    timeout: float = 1800.0,
) -> Saving:
    """Write a checkpoint of a state: each rank what it holds, replicated leaves once. Every rank must call this.

    A kill at any moment leaves the checkpoints that were complete; FORMAT.md in this package describes the files. Parts
    that several ranks hold are compared before, by checksums that each of those ranks makes.

    Args:
        directory: Where checkpoints are kept, a file system that all ranks share; made where there is none.
        state: Any pytree: a TrainState, or parameters. Leaves are Sharded, tensors that are the same on every rank, or
            None, bool, int, float or str.
        step: Names the checkpoint; None takes state.step.
        asynchronous: Return as soon as the state may be used further, and write while steps run. The checkpoint is
            complete at some time after; `Saving.wait` waits for it.
        donated: Whether a later step may write over the state, as one does that was jitted with donate_argnums: an
            asynchronous save then copies it aside before it returns.
        progress: Show a progress bar on the first rank. Needs tqdm.
        timeout: Seconds that the first rank waits for the others to have written.

    Returns:
        The save under way; complete unless `asynchronous`.

    Raises:
        ValueError: on every rank alike, before anything is written, if ranks hold different states or different values
            of what they should hold alike, or a leaf cannot be saved.
        CheckpointError: on every rank alike, if files cannot be written.

    >>> import tempfile
    >>> from fshard import checkpoint
    >>> directory = tempfile.mkdtemp()
    >>> checkpoint.save(directory, {"w": torch.ones(3)}, step=7).wait().name
    'step-00000007'
    >>> checkpoint.restore(directory, like={"w": torch.zeros(3)})
    {'w': tensor([1., 1., 1.])}
    """
    flags = {"asynchronous": asynchronous, "donated": donated, "progress": progress}
    saving = start(directory, state, step, asynchronous is True and donated, progress, timeout, flags=flags)
    if not asynchronous:
        saving.wait()
    return saving


def start(
    directory: str | PathLike[str],
    state: Tree,
    step: int | None,
    copied: bool,
    progress: bool,
    timeout: float,
    *,
    staging: Staging | None = None,
    keep: int | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Saving:
    """Start to save, as `save` does.

    Staging are buffers for copies, by path; keep says how many checkpoints stay; flags are still to be checked.
    """
    with alike(LABEL):
        check_flags(LABEL, **(flags or {}))
        check_numbers(LABEL, POSITIVE, timeout=timeout)
        bar = progress_bar(progress)
        flat = flatten(state)
        number = step_of(LABEL, state, step)
        check_directory(LABEL, directory)
        check_call(LABEL, flat)
        check_local(LABEL, flat)
    tensors, values = check_state(LABEL, flat, number, str(directory))
    holders = replicas(LABEL, tensors, world())
    owned = writers(list(tensors.values()), holders, comm.rank(world()))
    pieces = {path: piece_of(leaf) for (path, leaf), mine in zip(tensors.items(), owned, strict=True) if mine}
    pieces = {path: piece for path, piece in pieces.items() if piece.tensor.numel()}
    with alike(LABEL):
        if copied:
            pieces = {path: _aside(path, piece, {} if staging is None else staging) for path, piece in pieces.items()}
    place = _prepare(Path(directory), number)
    patience = Wait(timeout)
    rank, ranks = comm.rank(world()), world().size
    leaves = {path: Leaf(dtype_name(local_of(leaf)), shape_of(leaf), ()) for path, leaf in tensors.items()}

    def write() -> None:
        total = sum(piece.tensor.nbytes for piece in pieces.values())
        with bar(f"saving step {number}", total, rank) as tick:
            write_part(place.temporary, rank, pieces, tick)

    def join() -> Path:
        assert place.lock is not None
        try:
            join_parts(place.temporary, ranks, number, leaves, values, patience)
            path = files.publish(place.temporary, Path(directory), number)
            if keep is not None:
                files.prune(Path(directory), keep)
            return path
        finally:
            shutil.rmtree(place.temporary, ignore_errors=True)
            files.unlock(place.lock)

    written = _in_background(write)
    joined = _in_background(join) if place.lock is not None else None
    return Saving(number, written, joined, patience)


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


class _Place(NamedTuple):
    """Where a checkpoint is made, and the first rank's lock of the directory."""

    temporary: Path
    lock: IO[bytes] | None


def _prepare(directory: Path, step: int) -> _Place:
    """Have the first rank take the directory, and tell all ranks where they write."""
    lock, told = None, ["", ""]
    if not comm.rank(world()):
        try:
            lock = files.lock(directory)
            told = [files.make_temporary(directory, f"{files.SAVING}-{step:08d}").name, ""]
        except CheckpointError as error:
            told = ["", str(error)]
        except (OSError, ValueError) as error:
            told = ["", f"{directory}: {getattr(error, 'strerror', None) or error}"]
    name, failure = json.loads(comm.texts(json.dumps(told), world(), LABEL)[0])
    if failure:
        if lock is not None:
            files.unlock(lock)
        raise CheckpointError(f"checkpoint.save: step {step} was not saved: {failure}")
    return _Place(directory / name, lock)


def _aside(path: str, piece: Piece, staging: Staging) -> Piece:
    """Copy a part into the buffer that is kept for it, because to touch new memory takes longer than to copy."""
    source = piece.tensor
    room = staging.get(path)
    if room is None or room.shape != source.shape or room.dtype != source.dtype:
        room = staging[path] = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    return Piece(piece.offset, room.copy_(source))


def _failure(future: "Future[Any]") -> str:
    error = future.exception()
    return reason(error) if error else ""
