"""Plans of tensor parallelism: the style of each submodule, the dims that it splits, and the checks of both."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

import fshard as fs
from fshard.extend import expect, refuse

WHAT = "tensor_parallel"
# By style the dim of each parameter that is split.
DIMS = (
    ("column", (("weight", 0), ("bias", 0))),
    ("row", (("weight", 1),)),
    ("vocabulary", (("weight", 0), ("bias", 0))),
    ("gather", ()),
    ("split", ()),
    ("sequence", ()),
)
STYLES = tuple(name for name, _ in DIMS)
# Attributes by which a forward divides features into heads.
HEADS = frozenset({"heads", "n_head", "n_heads", "nhead", "num_heads", "num_attention_heads", "num_key_value_heads"})

Given = str | tuple[str, int]


class Style(NamedTuple):
    """How one submodule is split; `parts` is the number of matrices that a "column" computes at once."""

    name: str
    parts: int


class TensorPlan(NamedTuple):
    """A plan that fits its module.

    Attributes:
        styles: The style of each submodule that the plan names.
        counts: The whole numbers to divide, by the names of attributes.
        dims: For each parameter that is split, by its first name, the dim.
    """

    styles: Mapping[str, Style]
    counts: Mapping[str, int]
    dims: Mapping[str, int]


def plan_of(module: nn.Module, axis: fs.Axis, given: Any, divide: str | Sequence[str] | None) -> TensorPlan:
    """Find what a plan says of a module.

    Args:
        module: The module.
        axis: The axis to split over.
        given: Styles by patterns, as `tensor_parallel` takes them.
        divide: Patterns of attributes, as `tensor_parallel` takes them.

    Returns:
        The plan.

    Raises:
        ValueError: as `tensor_parallel`.
    """
    styles = _styles(module, given)
    counts = _counts(module, styles, divide)
    dims = _dims(module, styles)
    problems = [
        *((path, *found) for path, style in styles.items() if (found := _misfit(module, path, style, axis))),
        *((name, str(n), f"a multiple of {axis.size}") for name, n in counts.items() if n % axis.size),
        *((path, f"one inside {around!r}", "a 'gather' outside of others") for path, around in _nested(styles)),
        *_tied(module, dims),
    ]
    refuse(f"{WHAT}: the plan does not fit the module", problems, "change the plan, or the sizes of the module")
    own = {name: dims[name] for name, _ in module.named_parameters()}
    return TensorPlan(styles, counts, {name: dim for name, dim in own.items() if dim is not None})


def _styles(module: nn.Module, plan: Any) -> dict[str, Style]:
    known = isinstance(plan, Mapping) and plan and all(isinstance(pattern, str) for pattern in plan)
    expect(known, WHAT, "plan to be a dict of styles by patterns of submodules' names", f"{plan!r:.100}")
    found: dict[str, Style] = {}
    patterns: dict[str, str] = {}
    for pattern, given in plan.items():
        style = given if isinstance(given, tuple) and len(given) == 2 else (given, 1)
        whole = type(style[1]) is int and style[1] > 0
        fits = isinstance(style[0], str) and style[0] in STYLES and whole and (style[1] == 1 or style[0] == "column")
        expect(fits, WHAT, f"plan[{pattern!r}] to be one of {STYLES}, or ('column', k)", f"{given!r:.60}")
        paths = [path for path, _ in module.named_modules() if path and fnmatchcase(path, pattern)]
        expect(paths, WHAT, f"plan[{pattern!r}] to match a submodule", "no match", "name some of named_modules()")
        for path in paths:
            before = patterns.setdefault(path, pattern)
            twice = f"{before!r} and {pattern!r}"
            expect(before == pattern, WHAT, f"one pattern of plan to match {path!r}", twice, "let one match it")
            found[path] = Style(*style)
    return found


def _counts(module: nn.Module, styles: Mapping[str, Style], divide: Any) -> dict[str, int]:
    """Find the attributes to divide; refuse to leave a number of heads as it is without being told so."""
    patterns = (divide,) if isinstance(divide, str) else () if divide is None else divide
    known = isinstance(patterns, list | tuple) and all(isinstance(pattern, str) for pattern in patterns)
    expect(known, WHAT, "divide to be patterns of attributes' names", f"{divide!r:.60}")
    numbers = {
        f"{path}.{key}".lstrip("."): value
        for path, submodule in module.named_modules()
        for key, value in vars(submodule).items()
        if type(value) is int
    }
    for pattern in patterns:
        found = any(fnmatchcase(name, pattern) for name in numbers)
        expect(found, WHAT, "divide to match attributes that are whole numbers", f"{pattern!r}, which matches none")
    around = {path.rpartition(".")[0] for path, style in styles.items() if style.name == "column"}
    heads = [name for name in numbers if name.rpartition(".")[0] in around and name.rpartition(".")[2] in HEADS]
    remedy = "pass divide=, or divide=() where the forward takes the number of heads from shapes"
    told = divide is not None or not heads
    expect(told, WHAT, f"divide to say whether {', '.join(heads[:3])} count what is split", "None", remedy)
    return {name: value for name, value in numbers.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _dims(module: nn.Module, styles: Mapping[str, Style]) -> dict[str, int | None]:
    """Find the dim that is split of each parameter, under each of its names."""
    split = {module.get_submodule(path): dict(dict(DIMS)[style.name]) for path, style in styles.items()}
    return {
        f"{path}.{key}".lstrip("."): split.get(submodule, {}).get(key)
        for path, submodule in module.named_modules(remove_duplicate=False)
        for key, _ in submodule.named_parameters(recurse=False, remove_duplicate=False)
    }


def _misfit(module: nn.Module, path: str, style: Style, axis: fs.Axis) -> tuple[str, str] | None:
    """Describe a submodule that its style is not for, and the one expected."""
    submodule, name = module.get_submodule(path), style.name
    if name == "sequence":
        inner = any(True for child in submodule.children() for _ in child.parameters())
        return ("submodules with parameters", f"a module of style {name!r} without") if inner else None
    if name in ("gather", "split"):
        return None
    classes = (nn.Linear, nn.Embedding) if name == "vocabulary" else (nn.Linear,)
    cls = next((cls for cls in classes if isinstance(submodule, cls)), None)
    plain = cls and type(submodule).forward is cls.forward and "forward" not in vars(submodule)
    own = dict(submodule.named_parameters(recurse=False))
    if not plain or not own.keys() <= {"weight", "bias"}:
        needed = " or ".join(f"nn.{cls.__name__}" for cls in classes)
        return type(submodule).__name__, f"an {needed} for style {name!r}"
    if isinstance(submodule, nn.Embedding) and (submodule.max_norm is not None or submodule.scale_grad_by_freq):
        return "max_norm or scale_grad_by_freq", f"an nn.Embedding of style {name!r} without"
    size, needs = own["weight"].shape[name == "row"], style.parts * axis.size
    sides = {"column": "outputs", "row": "inputs", "vocabulary": "rows"}
    return (str(size), f"a multiple of {needs} {sides[name]}") if size % needs else None


def _nested(styles: Mapping[str, Style]) -> Iterator[tuple[str, str]]:
    gathers = [path for path, style in styles.items() if style.name == "gather"]
    return ((path, around) for path in gathers for around in gathers if path.startswith(f"{around}."))


def _tied(module: nn.Module, dims: Mapping[str, int | None]) -> Iterator[tuple[str, str, str]]:
    """Find parameters that one place splits otherwise than another one uses them."""
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if dims[name] != dims[other]:
            ways = ["whole" if dims[key] is None else f"split by dim {dims[key]}" for key in (name, other)]
            yield (name, ways[0], f"it {ways[1]}, as {other}, to which it is tied")
