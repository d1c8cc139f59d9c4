"""Directories of files that others read, which appear when they are complete."""

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fshard.checkpoint import CheckpointError
from fshard.extend import Exchange

# Directories in the making, which the next export removes where a kill left one.
EXPORTING = ".exporting-"


@contextmanager
def new_files(exchange: Exchange, given: Any, deciding: Sequence[str], others: Iterable[str]) -> Iterator[Path]:
    """Make a temporary directory, whose files are moved to their directory when all ranks have written theirs.

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
    is_first = exchange.rank == 0
    name = EXPORTING + secrets.token_hex(8)
    with exchange.raise_on_all_ranks(given):
        directory = exchange.path("directory", given)
        if is_first:
            directory.mkdir(parents=True, exist_ok=True)
            _check_free(directory, (*deciding, *others))
            for left in directory.glob(EXPORTING + 16 * "[0-9a-f]"):
                shutil.rmtree(left, ignore_errors=True)
            (directory / name).mkdir()
    temporary = directory / exchange.take_first(name)
    try:
        with exchange.raise_on_all_ranks(directory):
            yield temporary
        with exchange.raise_on_all_ranks(directory):
            written = os.listdir(temporary) if is_first else []
            names = sorted(written, key=lambda name: (name in deciding, name))
            # Another program may have written there meanwhile.
            _check_free(directory, names)
            for name in names:
                os.replace(temporary / name, directory / name)
            if is_first:
                temporary.rmdir()
    except BaseException:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_free(directory: Path, names: Iterable[str]) -> None:
    """Refuse to write over files."""
    for name in names:
        path = directory / name
        if os.path.lexists(path):
            raise CheckpointError(f"{path} is there already; write to another directory, or remove it")
