"""CheckpointError, and the texts of errors that every rank raises."""

from functools import partial

from fshard.errors import describe_error, escape_text, expect


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message names the file or the leaf.

    >>> import tempfile, torch, fshard as fs
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     try:
    ...         state = fs.checkpoint.restore(directory, like={"w": torch.zeros(3)})
    ...     except fs.checkpoint.CheckpointError as error:
    ...         print(error)
    checkpoint.restore: ...: holds no checkpoint that fs.checkpoint.save wrote
    """


# Refuses a file unless it is as expected.
expect_file = partial(expect, error=CheckpointError)


def describe_failure(error: BaseException, rank: int, path: object = "") -> str:
    """Say what failed, for ranks that do not have the traceback: the file that an error is about, or else the rank.

    Args:
        error: The error.
        rank: The rank that it was raised on.
        path: The file or directory that an OSError is about which names none.
    """
    if isinstance(error, OSError):
        return escape_text(f"{error.filename or path}: {error.strerror or describe_error(error)}")
    if isinstance(error, CheckpointError):
        return describe_error(error)
    return f"rank {rank} failed with {type(error).__name__}: {describe_error(error)}"
