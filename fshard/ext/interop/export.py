"""Directories of files that others read, which appear when they are complete."""

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fshard.checkpoint import CheckpointError
from fshard.extend import Exchange, expect

# Directories in the making, which the next export removes where a kill left one.
EXPORTING = ".exporting-"


@contextmanager
def new_files(exchange: Exchange, given: Any, deciding: Sequence[str], others: Iterable[str]) -> Iterator[Path]:
    """Make a temporary directory, whose files are moved to another one when all ranks have ended well.

    Args:
        exchange: The exchange.
        given: The directory that gets the files; made where there is none.
        deciding: Files by which a reader knows that the others are complete, which are moved last.
        others: The other files. Where any file is there already, nothing is written.

    Yields:
        The temporary directory.

    Raises:
        CheckpointError: on every rank, if a file is there already, or a rank could not write.
    """
    is_first, name = not exchange.rank, EXPORTING + secrets.token_hex(8)
    with exchange.raise_on_all_ranks(given):
        directory = exchange.path("directory", given)
        if is_first:
            directory.mkdir(parents=True, exist_ok=True)
            _refuse_taken(directory, (*deciding, *others))
            for left in directory.glob(EXPORTING + 16 * "[0-9a-f]"):
                shutil.rmtree(left, ignore_errors=True)
            (directory / name).mkdir()
    temporary = directory / exchange.everyone(name)[0]
    try:
        with exchange.raise_on_all_ranks(directory):
            yield temporary
        with exchange.raise_on_all_ranks(directory):
            names = sorted(os.listdir(temporary) if is_first else (), key=lambda name: (name in deciding, name))
            # Another program may have written there meanwhile.
            _refuse_taken(directory, names)
            for name in names:
                os.replace(temporary / name, directory / name)
            if is_first:
                temporary.rmdir()
    except BaseException:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _refuse_taken(directory: Path, names: Iterable[str]) -> None:
    """Refuse to write over files."""
    for name in names:
        is_free, remedy = not os.path.lexists(directory / name), "write to another directory, or remove what is there"
        expect(is_free, f"{directory / name}", "no file of that name", "one", remedy, CheckpointError)
