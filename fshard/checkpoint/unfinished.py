"""A checkpoint in the making: the files of all ranks, and the rename that completes it."""

import json
import operator
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import NamedTuple

from fshard.checkpoint import directory, files
from fshard.checkpoint.errors import CheckpointError, expect_file

# What a later start needs to complete the checkpoint, beside the reports.
OUTLINE = "outline.json"


class RankReport(NamedTuple):
    """What a rank has written.

    Attributes:
        size: The bytes of its file; 0 where it has none.
        chunks: What it has written of leaves, by their paths.
    """

    size: int
    chunks: dict[str, files.Chunk]


class Unfinished:
    """A checkpoint in the making, which all ranks write to.

    `.saving-<name>.<mark>/content` becomes the checkpoint. Beside it lies a report of each rank that has written its
    file. Whoever sees the reports of all ranks completes the checkpoint, so that it depends on no particular rank being
    alive. Those that do so at once write the same manifest, and only one of them finds `content` to rename.

    Attributes:
        path: The checkpoint, once it is complete.
        content: Where its files are until then.
        ranks: How many ranks write.
    """

    def __init__(self, path: Path, temporary: Path, ranks: int, manifest: files.Manifest, keep: int | None) -> None:
        """Keep what completes the checkpoint.

        Args:
            path: The checkpoint, once it is complete.
            temporary: Its directory until then.
            ranks: How many ranks write.
            manifest: The manifest, without chunks.
            keep: How many checkpoints stay when this one is complete; None for all.
        """
        self.path = path
        self.content = temporary / "content"
        self.ranks = ranks
        self._temporary = temporary
        self._manifest = manifest
        self._keep = keep

    @classmethod
    def reopen(cls, leftover: Path, path: Path) -> "Unfinished":
        """Take up a checkpoint that a killed run has left, whatever the number of its ranks.

        Args:
            leftover: Its directory.
            path: The checkpoint that it was to become.

        Raises:
            CheckpointError: if its outline is damaged.
            OSError: if its outline is not there, or cannot be read.
        """
        outline_file = leftover / OUTLINE
        data = outline_file.read_bytes()
        try:
            ranks, outline = json.loads(data)
            manifest = files.decode_outline(outline.encode(), outline_file)
            return cls(path, leftover, operator.index(ranks), manifest, keep=None)
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{outline_file}: is damaged") from error

    def make(self) -> None:
        """Make the directory, on one rank."""
        self.content.mkdir(parents=True)
        outline = files.encode(self._manifest).decode()
        (self._temporary / OUTLINE).write_text(json.dumps([self.ranks, outline]))

    def remove(self) -> None:
        """Remove the directory with all that is in it, unless the checkpoint is complete."""
        directory.remove(self._temporary)

    def report(self, rank: int, report: RankReport) -> None:
        """Tell all ranks that a rank has written its file."""
        draft = self._temporary / f"draft-{rank}"
        draft.write_text(json.dumps(report))
        # At once, so that nobody reads half of it.
        os.replace(draft, self._report_of(rank))

    def missing(self) -> list[int]:
        """The ranks that have not written their files."""
        names = set(os.listdir(self._temporary))
        return [rank for rank in range(self.ranks) if self._report_of(rank).name not in names]

    def is_over(self) -> bool:
        """Whether there is nothing left to complete, as some rank has done it, or another save removed the files."""
        return not self.content.is_dir()

    def is_complete(self) -> bool:
        """Whether the checkpoint has its name."""
        return self.path.is_dir()

    def complete(self) -> bool:
        """Complete the checkpoint if all ranks have written.

        Returns:
            Whether it is complete.

        Raises:
            CheckpointError: if a file or a report is not there as it was written, or another save removed the files.
            OSError: if a file cannot be written.
        """
        try:
            if self.is_complete():
                return True
            if self.missing():
                # A faster rank removes the reports, once it has completed the checkpoint.
                return self.is_complete()
            reports = [self._read_report(rank) for rank in range(self.ranks)]
            data = self._write_manifest(reports)
            _check_files(self.content, reports)
            directory.sync(self.content)
            os.rename(self.content, self.path)
        except (OSError, CheckpointError) as error:
            # Another rank was faster, and nothing has its old name any more.
            if self.is_complete():
                self._remove_drafts()
                return True
            if self.is_over():
                raise CheckpointError(f"{self.path}: its files were removed before it was complete") from error
            raise
        directory.sync(self.path.parent)
        self._remove_drafts()
        # Older checkpoints are removed only if this one can be read.
        is_whole = (self.path / files.MANIFEST).read_bytes() == data
        expect_file(is_whole, f"{self.path / files.MANIFEST}", "the manifest as it was written", "another one")
        _check_files(self.path, reports)
        directory.keep_newest(self.path.parent, self._keep)
        return True

    def check_file(self, rank: int, report: RankReport) -> None:
        """Refuse a complete checkpoint without the file that a rank reported; a later save may have removed all."""
        if self.is_complete():
            _check_file(self.path, rank, report)

    def _remove_drafts(self) -> None:
        """Remove all but the checkpoint. Every rank that wrote a manifest does this, or its own would stay."""
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _report_of(self, rank: int) -> Path:
        return self._temporary / f"rank-{rank:05d}.json"

    def _read_report(self, rank: int) -> RankReport:
        """Read the report of a rank; a loss of power may leave it empty."""
        report_file = self._report_of(rank)
        data = report_file.read_bytes()
        try:
            size, chunks_of = json.loads(data)
            chunks = {path: files.Chunk.parse(fields) for path, fields in chunks_of.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{report_file}: is damaged") from error
        return RankReport(size, chunks)

    def _write_manifest(self, reports: list[RankReport]) -> bytes:
        """Write a manifest with the chunks of all ranks, and refuse chunks that do not make whole leaves."""
        tensors = {}
        for path, leaf in self._manifest.tensors.items():
            chunks = tuple(report.chunks[path] for report in reports if path in report.chunks)
            tensors[path] = leaf._replace(chunks=chunks)
        data = files.encode(self._manifest._replace(tensors=tensors))
        files.decode(data)
        # Those that write it at once, which may be of several runs, replace each other's by the same bytes.
        draft = self._temporary / f"manifest-{secrets.token_hex(8)}"
        files.write_file(draft, data)
        os.replace(draft, self.content / files.MANIFEST)
        return data


def complete_leftovers(root: Path) -> list[Path]:
    """Complete the checkpoints that all ranks of killed runs had written, when no rank was left to complete them.

    Any number of ranks and of runs may do this at once. Older checkpoints stay until the next save.

    Args:
        root: The directory of checkpoints.

    Returns:
        The leftovers that are of no use, such as those that a rank had not written its file of.
    """
    useless = []
    for leftover in directory.list_leftovers(root):
        path = directory.checkpoint_of(leftover)
        try:
            if path is not None:
                Unfinished.reopen(leftover, path).complete()
        except (CheckpointError, FileNotFoundError):
            # A file is damaged or lost, or somebody else was faster.
            pass
        except OSError:
            # For example because the disk is full. It stays, and the next start tries again.
            continue
        useless.append(leftover)
    return useless


def _check_files(folder: Path, reports: list[RankReport]) -> None:
    for rank, report in enumerate(reports):
        _check_file(folder, rank, report)


def _check_file(folder: Path, rank: int, report: RankReport) -> None:
    """Refuse a file of a rank that is not there, or has another size than was written."""
    if not report.size:
        return
    path = folder / files.file_name(rank)
    try:
        status = path.lstat()
        got = f"{status.st_size} bytes" if stat.S_ISREG(status.st_mode) else "no regular file"
    except FileNotFoundError:
        got = "no file"
    expected = f"{report.size} bytes"
    expect_file(got == expected, f"{path}", f"{expected}, as they were written", got)
