"""A checkpoint in the making: the files of all ranks, and the rename that completes it."""

import os
import secrets
import shutil
from pathlib import Path

from fshard.checkpoint import files
from fshard.checkpoint.directory import UNFINISHED, keep_newest, list_leftovers, remove_directory, sync_directory
from fshard.checkpoint.errors import CheckpointError


class Unfinished:
    """A checkpoint in the making, which all ranks write to.

    `.saving-<name>.<ranks>.<mark>/content` becomes the checkpoint. Beside it lies a report of each rank that has
    written its file. When the reports of all ranks are there, the first rank completes the checkpoint; if it was
    killed, the next start does. If several do so at once, they write the same manifest, and one of them finds `content`
    to rename.

    Attributes:
        path: The checkpoint, once it is complete.
        content: Where its files are until then.
        step: The step of its state.
    """

    def __init__(self, temporary: Path, keep: int | None = None) -> None:
        """Take up a checkpoint, of this run or of one that was killed.

        Args:
            temporary: Its directory, which says all that is known of it.
            keep: How many checkpoints stay when this one is complete; None for all.

        Raises:
            CheckpointError: if it is no directory of a checkpoint in the making.
        """
        match = UNFINISHED.fullmatch(temporary.name)
        if not match:
            raise CheckpointError(f"{temporary}: is no checkpoint in the making")
        self.path = temporary.with_name(match[1])
        self.content = temporary / "content"
        self.step = int(match[2])
        self._ranks = int(match[4])
        self._temporary = temporary
        self._keep = keep

    def remove(self) -> None:
        """Remove the directory with all that is in it, unless the checkpoint is complete."""
        remove_directory(self._temporary)

    def report(self, rank: int, manifest: files.Manifest) -> None:
        """Tell the first rank that a rank has written its file, by a manifest with the chunks of this rank."""
        draft = self._temporary / f"draft-{rank}"
        draft.write_bytes(files.encode(manifest))
        # At once, so that nobody reads half of it.
        os.replace(draft, self._report_of(rank))

    def complete(self) -> list[int]:
        """Complete the checkpoint if all ranks have written.

        Returns:
            The ranks that have not written; none if the checkpoint is complete.

        Raises:
            CheckpointError: if a file or a report is not as it was written.
            OSError: if a file cannot be written, or is gone.
        """
        try:
            if not self.path.is_dir():
                names = set(os.listdir(self._temporary))
                late = [rank for rank in range(self._ranks) if self._report_of(rank).name not in names]
                if late:
                    # A faster one removes the reports, once it has completed the checkpoint.
                    return [] if self.path.is_dir() else late
                self._give_name()
        except (OSError, CheckpointError):
            # Somebody else was faster, and nothing has its old name any more.
            if not self.path.is_dir():
                raise
        sync_directory(self.path.parent)
        shutil.rmtree(self._temporary, ignore_errors=True)
        keep_newest(self.path.parent, self._keep)
        return []

    def _give_name(self) -> None:
        """Give the checkpoint its name, once all of it is on the disk as its ranks have reported it."""
        # A loss of power may leave a report empty.
        reports = []
        for rank in range(self._ranks):
            path = self._report_of(rank)
            reports.append(files.decode_outline(path.read_bytes(), path))
        # Those that write the manifest at once, which may be of several runs, replace each other's by the same bytes.
        draft = self._temporary / f"manifest-{secrets.token_hex(8)}"
        files.write_file(draft, files.encode(files.merge(reports)))
        os.replace(draft, self.content / files.MANIFEST)
        files.CheckpointReader(self.content).check_files()
        sync_directory(self.content)
        os.rename(self.content, self.path)

    def _report_of(self, rank: int) -> Path:
        return self._temporary / f"rank-{rank:05d}.json"


def complete_leftovers(root: Path) -> list[Path]:
    """Complete the checkpoints that all ranks of killed runs had written, when no rank was left to complete them.

    Any number of runs may do this at once. Older checkpoints stay until the next save.

    Args:
        root: The directory of checkpoints.

    Returns:
        The leftovers that are of no use, such as those that a rank had not written its file of.
    """
    useless = []
    for leftover in list_leftovers(root):
        try:
            Unfinished(leftover).complete()
        except (CheckpointError, FileNotFoundError):
            # It is being removed, a file is damaged or lost, or somebody else was faster.
            pass
        except OSError:
            # For example because the disk is full. It stays, and the next start tries again.
            continue
        useless.append(leftover)
    return useless
