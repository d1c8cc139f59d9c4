"""Forms of values of JSON, and the refusal of what a file says: who reads it, what was expected and what is there."""

from typing import Any, NamedTuple, NoReturn

from fshard.extend import describe


class Source(NamedTuple):
    """Where a graph is read from.

    Attributes:
        reader: Who reads which file.
        remedy: What the user can do where it is wrong.
    """

    reader: str
    remedy: str

    def refuse(self, part: str, expected: str, got: Any) -> NoReturn:
        """Raise the error of a part that is not as expected; `got` is a value of JSON."""
        # Lists and objects may be nested deeper than Python's stack.
        text = describe(got) if isinstance(got, list | dict) else f"{got!r:.100}"
        raise ValueError(f"{self.reader}: {part}: expected {expected}, got {text}; {self.remedy}")


def has_form(value: Any, form: Any) -> bool:
    """Tell whether a value of JSON has a form.

    Args:
        value: The value.
        form: A type; `int` stands for counts, which are not negative. `[form]` is a list of values of one form, `{str:
            form}` an object of such, a tuple a list with these forms, and a frozenset of forms any of them.

    >>> [has_form(value, [(str, frozenset((int, None)))]) for value in ([["a", 1], ["b", None]], [["a", -1]], [["a"]])]
    [True, False, False]
    """
    match form:
        case list():
            return type(value) is list and all(has_form(entry, form[0]) for entry in value)
        case tuple():
            return type(value) is list and len(value) == len(form) and all(map(has_form, value, form))
        case dict():
            return type(value) is dict and all(has_form(entry, form[str]) for entry in value.values())
        case frozenset():
            return any(has_form(value, each) for each in form)
        case None:
            return value is None
    return type(value) is form and (form is not int or 0 <= value < 2**31)
