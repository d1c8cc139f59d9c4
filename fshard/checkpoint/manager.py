"""Manager: the checkpoints and the generations of a run."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from typing import Any

from fshard import lazy_names
from fshard.checkpoint.errors import CheckpointError
from fshard.checkpoint.exchange import Exchange
from fshard.checkpoint.restore import LABEL, latest_step, restore, select
from fshard.checkpoint.save import read_step, save
from fshard.checkpoint.saving import Saving
from fshard.checkpoint.unfinished import complete_leftovers
from fshard.comm import setting
from fshard.errors import expect
from fshard.init import SKIP_DRAWING
from fshard.mesh import Mesh
from fshard.tree import Tree
from fshard.tree.checks import NUMBER, check_arguments, check_flags, describe

find_in_extensions = lazy_names.make_getattr("fshard.checkpoint.manager")


class Manager:
    """Saves a run's states: every so many steps, beside the steps, the newest kept.

    With `memory=True`, each rank also keeps the last two states of its shards in the memory of its host, which outlives
    a killed process. When the launcher starts the ranks again, `restore` and `restore_or` read the newest of memory
    and disk. This takes memory for two copies of the shards, once for all ranks of a host that hold the same. What must
    be the same on every rank is compared in the first save, and in each save to the disk.

    With several hosts, each of LOCAL_WORLD_SIZE ranks, each state in memory also goes to the next host, while the next
    steps run: the bytes of the shards once, and there memory for three copies of them. A host that takes the place of a
    lost one gets them back. If the neighbour is lost too, a warning says so and the disk is read.

    A checkpoint gets its name as soon as all ranks have written, without a further call. Use the manager in a with
    statement, or close it at the end, so that a save that failed raises its error. A block that ends by an exception,
    and a program that ends without `close`, wait for the last save as `save(asynchronous=True)` says. If the first rank
    is killed after all ranks have written, and before the checkpoint has its name, the next manager of the directory
    gives it the name, with any number of ranks.

    >>> import tempfile
    >>> import torch
    >>> with Manager(tempfile.mkdtemp(), keep=2, every=10) as manager:
    ...     [manager.save({"w": torch.ones(3)}, step=step) for step in (5, 10, 20, 30)]
    ...     manager.save({"w": torch.ones(3)}, step=34, force=True)  # the last step, whatever its number
    ...     manager.wait()
    ...     manager.latest_step()
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
        memory: bool | str | PathLike[str] = False,
        memory_every: int = 1,
        asynchronous: bool = True,
        mesh: Mesh | None = None,
    ) -> None:
        """Keep the options, and complete a checkpoint that all ranks of a killed run had written.

        Args:
            directory: Where checkpoints are kept, a file system that all ranks share.
            keep: As for `save`.
            every: Steps from one save to the next.
            memory: Whether to keep the last two states in /dev/shm too; or the path of a directory of this user, of
                mode 700, in another file system in memory. A restart finds them by the job of the launcher:
                FSHARD_JOB_ID, or the variables of torchrun, Slurm, PBS, LSF and Ray. Without any, nothing is kept
                there, and a warning says so.
            memory_every: Steps from one state in memory to the next.
            asynchronous: Write while the next steps run.
            mesh: As for `save`.

        Raises:
            ValueError: if `directory` or `memory` is no path, or `every` or `memory_every` no positive whole number;
                the first save refuses other wrong arguments.
            CheckpointError: if the directory cannot be read.
        """
        check_arguments("checkpoint.Manager", NUMBER, every=every, memory_every=memory_every)
        # A mesh of other ranks is refused at once.
        exchange = Exchange("checkpoint.Manager", mesh=mesh)
        root = exchange.path("directory", directory)
        # Each rank does this, so that all of them see the same checkpoints next, without a message.
        with exchange.raise_on_this_rank(root):
            complete_leftovers(root)
        self._directory = root
        self._every = every
        self._memory_every = memory_every
        self._mesh = mesh
        # An extension keeps states in memory: a `Generations`, which finds each as a `Generation`.
        self._memory: Any = None
        if memory is not False:
            self._memory = find_in_extensions("open_memory")(exchange, root, memory)
        self._save = partial(save, root, keep=keep, asynchronous=asynchronous, mesh=mesh)
        self._saving: Saving | None = None

    def save(self, state: Tree, step: int | None = None, *, force: bool = False) -> bool:
        """Save a state if its step is one to be saved; waits for the save before this one. Every rank must call this.

        At any other step it raises the error of the save before, once all ranks have tried to write. A state in memory
        counts when all ranks have returned, and steps that follow may write over the state.

        With `memory=`, the first save of a run that has gone back behind the newest state goes to the disk, whatever
        its step is, and is waited for. Then the states in memory are removed, so that a restart reads this one.

        Args:
            state: As for `save`.
            step: As for `save`.
            force: Whether to save it whatever its step is, as at the end of a run.

        Returns:
            Whether it was saved on the disk.

        Raises:
            ValueError: as for `save`.
            CheckpointError: if the save before this one failed, or this one cannot start.
        """
        check_flags("checkpoint.Manager", force=force)
        number = read_step(state, step)
        goes_back = self._memory is not None and self._memory.goes_back(number)
        is_due = force or goes_back or number % self._every == 0
        if self._memory is not None and not goes_back and (force or number % self._memory_every == 0):
            self._memory.save(state, number)
        if self._saving is not None and (is_due or self._saving.is_written()):
            self.wait()
        if is_due:
            self._saving = self._save(state, step)
        if self._memory is not None and goes_back:
            # Nothing of the later states is lost before this one is on the disk.
            self.wait()
            self._memory.remove()
        return is_due

    def wait(self) -> None:
        """Wait for the last save to be complete. Every rank must call this.

        Raises:
            CheckpointError: on every rank, if it failed.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def latest_step(self) -> int | None:
        """The step that `restore` would read: that of the newest state in memory, or of the checkpoint saved last.

        With `memory=`, every rank must call this. While a save is under way ranks may differ in the checkpoint saved
        last: call `wait` before, or let one rank decide, as `restore_or` does.
        """
        in_memory = self._find_in_memory(step=None)
        return in_memory[0].step if in_memory else latest_step(self._directory)

    def restore(self, like: Tree, *, step: int | None = None, **arguments: Any) -> Tree:
        """Read the newest state, of memory or disk, as `fs.checkpoint.restore` does. Every rank must call this.

        It waits for the save under way. A state in memory that cannot be read is passed over, with a warning.

        Args:
            like: As for `fs.checkpoint.restore`.
            step: Which state; None for the newest.
            arguments: `subtree` and `only`, as for `fs.checkpoint.restore`.

        >>> import tempfile, torch, fshard as fs
        >>> with tempfile.TemporaryDirectory() as directory, fs.checkpoint.Manager(directory) as manager:
        ...     saved = manager.save({"w": torch.ones(2)}, step=1)
        ...     manager.restore(like={"w": torch.zeros(2)})
        {'w': tensor([1., 1.])}
        """
        self.wait()
        exchange = Exchange(LABEL, mesh=self._mesh)
        for kept in self._find_in_memory(step):
            manifest = kept.manifest()
            try:
                with exchange.raise_on_all_ranks():
                    fill = select(exchange, like, **arguments)
                return fill(manifest, kept.read_chunk)
            except CheckpointError as error:
                warnings.warn(f"step {kept.step} is in memory, but cannot be read: {error}", stacklevel=2)
        return restore(self._directory, like, step=step, mesh=self._mesh, **arguments)

    def restore_or(self, init: Callable[[], Tree]) -> Tree:
        """Read the newest state, of memory or disk, or make one if there is none. Every rank must call this.

        If the only states are in memory, and these ranks cannot read them, it makes one too, with a warning.

        Args:
            init: Makes the first state of a run. Where there is one to be read, `model.init` draws nothing in it.

        Returns:
            The newest state, in the structure and the layout of what `init` makes; or the result of `init`.

        Raises:
            ValueError: if `init` is no function.
            CheckpointError: as for `restore`.

        >>> import tempfile, torch, fshard as fs
        >>> with tempfile.TemporaryDirectory() as directory, fs.checkpoint.Manager(directory) as manager:
        ...     state = manager.restore_or(lambda: {"w": torch.ones(2), "step": 0})
        ...     saved = manager.save({"w": 2 * state["w"], "step": 1}, step=1)
        ...     manager.restore_or(lambda: {"w": torch.ones(2), "step": 0})
        {'w': tensor([2., 2.]), 'step': 1}
        """
        expect(callable(init), "checkpoint.Manager", "init to be a function that makes a state", describe(init))
        self.wait()
        step = self.latest_step()
        exchange = Exchange(LABEL, mesh=self._mesh)
        # One rank decides for all.
        if exchange.take_first(step if exchange.rank == 0 else None) is None:
            return init()
        with setting(SKIP_DRAWING, True):
            like = init()
        try:
            return self.restore(like)
        except CheckpointError:
            # Of a state that only the memory of other hosts has each restart would fail again.
            if latest_step(self._directory) is not None:
                raise
            return init()

    def close(self) -> None:
        """Wait for the last save to be complete, and remove the states in memory. Every rank must call this.

        The manager may save again after it; then call `close` once more.
        """
        self.wait()
        if self._memory is not None:
            self._memory.remove()

    def __enter__(self) -> "Manager":
        return self

    def __exit__(self, kind_of_error: object, *error: object) -> None:
        if kind_of_error is None:
            self.close()
        elif self._saving is not None:
            # Ranks that failed send nothing to each other any more.
            self._saving.finish_at_exit()
            self._saving = None

    def _find_in_memory(self, step: int | None) -> Sequence[Any]:
        """Find the states in memory of a step, or the newest of all."""
        if self._memory is None:
            return ()
        return self._memory.find(Exchange(LABEL, mesh=self._mesh), step)
