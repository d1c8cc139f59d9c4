"""Manager: saves every so many steps in the background and keeps the newest."""

from os import PathLike
from typing import Any

import torch

from fshard.checkpoint.exchange import Exchange
from fshard.checkpoint.restore import latest, restore
from fshard.checkpoint.save import Saving, checked_directory, checked_step, members, start
from fshard.mesh import Mesh, ranks_of
from fshard.tree import Tree
from fshard.tree.checks import POSITIVE, check_flags, check_numbers


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
                whole number, `timeout` is not above 0, or a flag is neither True nor False.
        """
        exchange = Exchange("checkpoint.Manager")
        exchange.check_flags(asynchronous=asynchronous, donated=donated)
        for name, value in (("keep", keep), ("every", every)):
            if (value is not None or name == "every") and (type(value) is not int or value < 1):
                raise ValueError(f"checkpoint.Manager: expected {name} to be a whole number from 1, got {value!r}")
        self._directory = checked_directory(exchange, directory)
        check_numbers("checkpoint.Manager", POSITIVE, timeout=timeout)
        ranks_of(mesh)
        self._every, self._mesh = every, mesh
        self._options: dict[str, Any] = {
            "keep": keep,
            "timeout": timeout,
            "asynchronous": asynchronous,
            "donated": donated,
        }
        # Copies go to buffers that are kept from one save to the next.
        self._staging: dict[str, torch.Tensor] = {}
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
        check_flags("checkpoint.Manager.save", force=force)
        if checked_step("checkpoint.Manager", state, step) % self._every and not force:
            return False
        self.wait()
        ranks = members("checkpoint.Manager", self._mesh, state)
        self._saving = start(self._directory, state, step, ranks=ranks, staging=self._staging, **self._options)
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
        return restore(self._directory, like, mesh=self._mesh, **arguments)

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
