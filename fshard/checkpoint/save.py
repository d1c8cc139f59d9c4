"""save and Manager: write states so that a kill at any moment leaves the last checkpoint whole."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cache
from os import PathLike
from pathlib import Path
from threading import Thread, main_thread
from typing import Any, NamedTuple

import torch

from fshard.checkpoint import directory as directories
from fshard.checkpoint import files
from fshard.checkpoint.errors import CheckpointError, expect_file, reason
from fshard.checkpoint.exchange import Exchange, is_tensor, piece_of, shape_of
from fshard.checkpoint.restore import latest, restore
from fshard.errors import expect, refuse
from fshard.mesh import Mesh, ranks_of
from fshard.tree import Tree, tensor_of
from fshard.tree.checks import Range, check_arguments, check_flags, describe

LABEL = "checkpoint.save"
# Seconds between two looks for other ranks' parts.
LOOK_EVERY = 0.002
# Seconds that the first rank waits for parts that ranks say are written, or whose ranks may be dead.
PATIENCE = 30.0
NUMBER = Range("a whole number from 1", lambda number: type(number) is int and number > 0)


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

    def __init__(self, step: int, finish: Callable[[], tuple[str, str]]) -> None:
        """Keep the step, and what waits for all ranks and returns the checkpoint's path and the first failure."""
        self.step, self._finish = step, cache(finish)

    def wait(self) -> Path:
        """Wait until the checkpoint is complete. Every rank must call this, as it does a collective.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: on every rank, if any of them failed; checkpoints from before are as they were.
        """
        path, failure = self._finish()
        if failure:
            raise CheckpointError(f"{LABEL}: step {self.step} was not saved: {failure}")
        return Path(path)


def save(
    directory: str | PathLike[str],
    state: Tree,
    step: int | None = None,
    *,
    asynchronous: bool = False,
    donated: bool = True,
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
    return start(SaveOptions(directory, asynchronous, donated, mesh, None, {}), state, step)


class SaveOptions(NamedTuple):
    """How states are saved: the arguments of `save` and `Manager`, and buffers for copies."""

    directory: str | PathLike[str]
    asynchronous: bool
    donated: bool
    mesh: Mesh | None
    keep: int | None
    staging: dict[str, torch.Tensor]

    def check(self, exchange: Exchange) -> Path:
        """Return the directory, and refuse arguments of other types."""
        check_flags(exchange.label, asynchronous=self.asynchronous, donated=self.donated)
        return exchange.path("directory", self.directory)


def start(options: SaveOptions, state: Tree, step: int | None) -> Saving:
    """Save a state as `save` does."""
    exchange = Exchange(LABEL, ranks=ranks_of(options.mesh))
    with exchange.raise_on_all_ranks():
        root, step = options.check(exchange), checked_step(LABEL, state, step)
        tensors, values = _checked(exchange, state)
    same = {"(step)": f"{step}", "(directory)": f"{root}"} | {path: repr(value) for path, value in values.items()}
    own, stored = _shared_out(exchange, tensors, same)
    if options.asynchronous and options.donated:
        own = {path: _aside(path, tensor, options.staging) for path, tensor in own.items()}
    manifest = files.Manifest(step, stored, values, ())
    # The state may go while this writes.
    del tensors, state
    with ExitStack() as stack:
        with exchange.raise_on_all_ranks(root):
            name = "" if exchange.rank else stack.enter_context(directories.begun(root, step))
        temporary, held = root / exchange.everyone(name)[0], stack.pop_all()
    # Until when the first rank waits for the lists of parts.
    limit = [math.inf]

    def join() -> Path:
        with held:
            lists = [_await_list(temporary / files.file_name(rank), limit) for rank in range(exchange.ranks.size)]
            _write_manifest(temporary / files.MANIFEST, manifest, lists)
            path = directories.publish(temporary, root, step)
            if options.keep is not None:
                directories.prune(root, path, options.keep)
            return path

    def finish() -> tuple[str, str]:
        # By this message a rank hears of one that has failed or is dead, before it waits for the part of that one.
        failures = ["ranks are lost"]
        try:
            failures = exchange.everyone(written.result()[1])
        finally:
            limit[0] = 0.0 if any(failures) else time.monotonic() + PATIENCE
        path, failure = exchange.everyone(joined.result())[0]
        return path, next(filter(None, [*failures, failure]), "")

    part = temporary / files.file_name(exchange.rank)
    written = _in_background(lambda: _write_part(part, own), part)
    joined = _in_background(join, root) if not exchange.rank else written
    saving = Saving(step, finish)
    if not options.asynchronous:
        saving.wait()
    return saving


def _in_background(work: Callable[[], object], place: Path) -> "Future[tuple[str, str]]":
    """Start work whose result will be the text of its result, or that of its failure."""
    future: Future[tuple[str, str]] = Future()

    def run() -> None:
        try:
            future.set_result((f"{work()}", ""))
        except BaseException as error:
            future.set_result(("", reason(error, place)))

    # No daemon, so that the end of the program waits for it.
    Thread(target=run, name=LABEL).start()
    return future


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
            mesh: As for `save`.

        Raises:
            ValueError: if `directory` is no path, this rank is not one of the mesh's, `keep` or `every` is no positive
                whole number, or a flag is no bool.
        """
        exchange = Exchange("checkpoint.Manager", ranks=ranks_of(mesh))
        # Copies go to buffers that are kept from one save to the next.
        self._options = SaveOptions(directory, asynchronous, donated, mesh, keep, {})
        check_arguments(exchange.label, NUMBER, keep=1 if keep is None else keep, every=every)
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
        self._options.staging.clear()

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
    fits = local.layout == torch.strided and not local.is_meta and files.name_of(local.dtype) in files.SAVED
    needed = f"a strided tensor with values, of dtype {', '.join(files.SAVED)}"
    return None if fits else (f"{describe(local)}, {local.layout} on {local.device}", needed)


def _shared_out(
    exchange: Exchange, tensors: Mapping[str, Any], same: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, files.StoredLeaf]]:
    """Return the parts that this rank writes, and what a manifest says of all, but for checksums.

    Each part is written by one of the ranks that hold it: one that writes least so far.
    """
    written, own, stored = Counter[int](), {}, {}
    for path, held in exchange.replicas(tensors, same).items():
        leaf, chunks = tensors[path], []
        for (offset, shape), ranks in held.items():
            if 0 not in shape:
                writer = min(ranks, key=written.__getitem__)
                written[writer] += math.prod(shape) * tensor_of(leaf).itemsize
                chunks.append(files.Chunk(writer, offset, shape, 0))
                if writer == exchange.rank:
                    own[path] = piece_of(leaf).tensor
        stored[path] = files.StoredLeaf(files.name_of(tensor_of(leaf).dtype), shape_of(leaf), tuple(chunks))
    return own, stored


def _aside(path: str, source: torch.Tensor, staging: dict[str, torch.Tensor]) -> torch.Tensor:
    """Copy a part into the buffer that is kept for it, because to touch new memory takes longer than to copy."""
    room = staging.get(path)
    if room is None or room.shape != source.shape or room.dtype != source.dtype:
        room = staging[path] = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    return room.copy_(source)


def _write_part(path: Path, own: Mapping[str, torch.Tensor]) -> None:
    """Write the parts of this rank, and then their checksums, by which the first rank knows that they are complete."""
    header, starts, size = files.lay_out({name: (x.dtype, x.shape) for name, x in own.items()}, pairs=True)
    checksums = files.write_file(path, header, map(own.__getitem__, starts))
    found = [size, files.digest(header), dict(zip(starts, checksums, strict=True))]
    # The last call, because the first rank may rename the directory once it sees the list.
    directories.write_bytes(path.with_suffix(".json"), json.dumps(found).encode())


def _await_list(part: Path, limit: list[float]) -> Any:
    """Wait for the list of a rank's parts, and take it away."""
    path = part.with_suffix(".json")
    while not path.exists():
        if not main_thread().is_alive():
            limit[0] = min(limit[0], time.monotonic() + PATIENCE)
        in_time, remedy = time.monotonic() < limit[0], "see that every rank is alive and shares the directory"
        expect_file(in_time, f"{path}", "the list of a rank's parts", "nothing", remedy)
        time.sleep(LOOK_EVERY)
    found = json.loads(path.read_bytes())
    path.unlink()
    return found


def _write_manifest(path: Path, manifest: files.Manifest, lists: list[Any]) -> None:
    """Write a manifest with what the lists of all ranks say, unless parts do not make whole leaves."""
    tensors = {}
    for name, leaf in manifest.tensors.items():
        chunks = tuple(chunk._replace(checksum=lists[chunk.file][2][name]) for chunk in leaf.chunks)
        tensors[name] = leaf._replace(chunks=chunks)
    manifest = manifest._replace(tensors=tensors, files=tuple((size, header) for size, header, _ in lists))
    files.check_tiles(manifest, path.parent)
    directories.write_bytes(path, files.encode(manifest))
