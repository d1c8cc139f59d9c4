"""Errors that name the leaf, what was expected, what was got and the remedy."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

# At most so many problems are printed, so that the remedy stays in sight.
MAX_PROBLEMS = 10
# At most so many characters of a name, a value or a spec are printed.
MAX_CHARACTERS = 1000
# The directories of this package and of torch, wherever they are installed.
_PACKAGES = (Path(__file__).parent, Path(torch.__file__).parent)
# The directories of Python and of what is installed.
INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


Problems = Sequence[tuple[str, str, str]]


class Problem(NamedTuple):
    """One leaf that is wrong.

    Attributes:
        path: Its path.
        got: What is there; without `expected` the rest of a sentence that says what is wrong.
        expected: What should be there, if "expected X, got Y" says it well.
    """

    path: str
    got: str
    expected: str = ""


def shorten(text: str) -> str:
    """Leave out the middle of a long text, so that an error stays readable.

    >>> shorten("a" * 2000) == "a" * 500 + " ... " + "a" * 495
    True
    """
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[: MAX_CHARACTERS // 2]} ... {text[5 - MAX_CHARACTERS // 2 :]}"


def is_users_file(filename: str) -> bool:
    """Whether a stack frame's file belongs to the user's program, and not to fshard or torch.

    Directories are compared as a whole, because the user's own folders may be named fshard or torch.

    >>> is_users_file(torch.nn.functional.__file__), is_users_file("/home/me/torch/fshard/train.py")
    (False, True)
    """
    path = Path(filename)
    return not any(path.is_relative_to(package) for package in _PACKAGES)


def escape_text(text: str) -> str:
    """Escape what UTF-8 does not have, such as half of a surrogate pair, so that a text can be sent and printed.

    >>> escape_text("caf\u00e9 " + chr(0xDC80)) == "caf\u00e9 " + chr(92) + "udc80"
    True
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def describe_error(error: BaseException) -> str:
    """Return the text of any error, printable; the name of its class where it has none or cannot make it.

    >>> describe_error(ValueError("no file")), describe_error(KeyboardInterrupt())
    ('no file', 'KeyboardInterrupt')
    """
    try:
        text = str(error)
    except Exception:
        text = ""
    return escape_text(text or type(error).__name__)


def name_error(error: BaseException) -> str:
    """Return the class and the text of an error, or its class where it has no text.

    >>> name_error(ValueError("no file")), name_error(KeyboardInterrupt())
    ('ValueError: no file', 'KeyboardInterrupt')
    """
    name = type(error).__name__
    text = describe_error(error).strip()
    return name if text in ("", name) else f"{name}: {text}"


def refuse(headline: str, problems: Problems, remedy: str, error: type[Exception] = ValueError) -> None:
    """Raise one error for all failing leaves, as JAX's shard_map does, if there are some.

    Args:
        headline: The verb that refuses and why, in a few words.
        problems: Every failing leaf, in tree order; of many the first ones are printed.
        remedy: What the caller can do about it.
        error: The class of the error.

    Raises:
        ValueError: if there are failing leaves; or an error of the class.

    >>> refuse("gather: wrong shard", [Problem("['w']", "shape (2,)", "shape (3,)")], "shard again")
    Traceback (most recent call last):
    ValueError: gather: wrong shard
      ['w']: expected shape (3,), got shape (2,)
    To fix: shard again.
    """
    if not problems:
        return
    lines = []
    for path, got, expected in problems[:MAX_PROBLEMS]:
        text = f"expected {shorten(expected)}, got {shorten(got)}" if expected else shorten(got)
        lines.append(f"  {shorten(path)}: {text}")
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"  and {len(problems) - MAX_PROBLEMS} more")
    raise error("\n".join([headline, *lines, f"To fix: {remedy.rstrip('.')}."]))


def expect(
    condition: object, api_name: str, expected: str, got: str, remedy: str = "", error: type[Exception] = ValueError
) -> None:
    """Refuse an argument unless it is as expected.

    Args:
        condition: Whether it is.
        api_name: The function that asks.
        expected: The argument and its range, as in "steps to be 1 or more".
        got: The value that was given.
        remedy: What the caller can do about it.
        error: The class of the error.

    Raises:
        ValueError: if it is not; or an error of the class.
    """
    if not condition:
        raise error(f"{api_name}: expected {expected}, got {got}{remedy and '; '}{remedy}")
