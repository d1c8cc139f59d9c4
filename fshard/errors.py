"""Errors that name the leaf, what was expected, what was got and the remedy."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

# So many problems are printed, so that the remedy stays in sight.
SHOWN = 10
# So many characters of a name, a value or a spec.
LONGEST = 1000
# The directories of this package and of torch, wherever they are installed.
_PACKAGES = (Path(__file__).parent, Path(torch.__file__).parent)


Wrong = Sequence[tuple[str, str, str]]


class Problem(NamedTuple):
    """One leaf that is wrong: its path, what is there and what was expected."""

    path: str
    got: str
    expected: str


def short(text: str) -> str:
    """Leave out the middle of a long text, so that an error stays readable.

    >>> short("a" * 2000) == "a" * 500 + " ... " + "a" * 495
    True
    """
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[len(text) - LONGEST // 2 + 5 :]}"


def is_users_file(filename: str) -> bool:
    """Whether a stack frame's file belongs to the user's program, and not to fshard or torch.

    Directories are compared as a whole, because the user's own folders may be named fshard or torch.

    >>> is_users_file(torch.nn.functional.__file__), is_users_file("/home/me/torch/fshard/train.py")
    (False, True)
    """
    path = Path(filename)
    return not any(path.is_relative_to(package) for package in _PACKAGES)


def printable(text: str) -> str:
    """Escape what UTF-8 does not have, such as half of a surrogate pair, so that a text can be sent and printed.

    >>> printable("caf\u00e9 " + chr(0xDC80)) == "caf\u00e9 " + chr(92) + "udc80"
    True
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def text_of(error: BaseException) -> str:
    """Return the text of any error, printable; the name of its class where it has none or cannot make it.

    >>> text_of(ValueError("no file")), text_of(KeyboardInterrupt())
    ('no file', 'KeyboardInterrupt')
    """
    try:
        text = str(error)
    except Exception:
        text = ""
    return printable(text or type(error).__name__)


def leaf_error(what: str, problems: Wrong, remedy: str) -> ValueError:
    """Collect the failing leaves in one error, as JAX's shard_map does.

    Args:
        what: The verb that refused and why, in a few words.
        problems: Every failing leaf, in tree order; of many the first ones are printed.
        remedy: What the caller can do about it.

    Returns:
        The error, for the caller to raise.

    >>> print(leaf_error("gather: wrong shard", [Problem("['w']", "shape (2,)", "shape (3,)")], "shard again"))
    gather: wrong shard
      ['w']: expected shape (3,), got shape (2,)
    To fix: shard again.
    """
    lines = [
        f"  {short(path)}: expected {short(expected)}, got {short(got)}" for path, got, expected in problems[:SHOWN]
    ]
    if len(problems) > SHOWN:
        lines.append(f"  and {len(problems) - SHOWN} more")
    return ValueError("\n".join([what, *lines, f"To fix: {remedy.rstrip('.')}."]))


def refuse(what: str, problems: Wrong, remedy: str, error: type[Exception] = ValueError) -> None:
    """Raise the text of `leaf_error` if there are failing leaves."""
    if problems:
        raise error(str(leaf_error(what, problems, remedy)))


def expect(
    holds: object, what: str, expected: str, got: str, remedy: str = "", error: type[Exception] = ValueError
) -> None:
    """Refuse an argument unless it is as expected.

    Args:
        holds: Whether it is.
        what: The function that asks.
        expected: The argument and its range, as in "steps to be 1 or more".
        got: The value that was given.
        remedy: What the caller can do about it.
        error: The class of the error.

    Raises:
        ValueError: if it is not; or an error of the class.
    """
    if not holds:
        raise error(f"{what}: expected {expected}, got {got}{remedy and '; '}{remedy}")
