"""The rules of the house, each a function from source files or objects to a list of breaches."""

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from fshard.lazy_names import TABLE
from tests.budget import parsed

# A module imports only from rooms that stand before its own.
ROOMS = (
    *("errors", "rounding", "lazy_names", "_compat", "tree", "comm", "mesh", "collectives", "microbatches"),
    *("transforms", "reduction_order", "shard", "engine", "gather", "random", "init", "units", "module_template"),
    *("apply", "remat", "scatter_grads", "value_and_grad", "update", "optim", "jit", "checkpoint", "testing"),
    *("extend", "public", "__main__", "run"),
)
DISTRIBUTED_ROOMS = {
    *("_compat", "comm", "mesh", "testing", "__main__"),
    *("ext/interop", "ext/publish", "ext/run", "ext/testing"),
}
COMPAT = {"_compat", "ext/_compat"}
# Files whose names may be those of extensions.
FACES = ("__init__.py", "extend.py")
# Tests of the core are programs of a user, and take from the face what every such program is compared and stepped by.
TOOLS = {
    *("interop.state_dict", "jit.graph", "optim.native", "optim.norms", "optim.wrappers"),
    *("check.check", "testing.compare", "testing.laws"),
}
MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {
    *("list", "dict", "set", "bytearray", "Counter", "OrderedDict", "defaultdict", "deque"),
    *("WeakKeyDictionary", "WeakSet", "WeakValueDictionary"),
}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb"}


class Source(NamedTuple):
    """One file of the package, parsed."""

    path: Path
    parts: tuple[str, ...]  # ("fshard", "comm", "ops"); a package's own file has the package's name
    tree: ast.Module

    @property
    def room(self) -> str:
        """The file or folder in the package, or in its `ext`."""
        inner = self.parts[1:] or ("__init__",)
        return "/".join(inner[:2]) if inner[0] == "ext" else inner[0]

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


def read_sources(package: Path) -> list[Source]:
    """Parse the files of a package, each content once."""

    def parts(path: Path) -> tuple[str, ...]:
        names = path.relative_to(package.parent).with_suffix("").parts
        return names[:-1] if names[-1] == "__init__" else names

    return [Source(path, parts(path), parsed(path.read_text())) for path in sorted(package.rglob("*.py"))]


def imports(source: Source) -> Iterator[tuple[ast.stmt, str, str, str]]:
    """Every import: its node, the dotted target, the local name it binds, and what that name then means."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                yield node, alias.name, alias.asname or root, alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom):
            is_package = source.path.name == "__init__.py"
            base = source.parts[: len(source.parts) - node.level + is_package] if node.level else ()
            for alias in node.names:
                target = ".".join([*base, *([node.module] if node.module else []), alias.name])
                yield node, target, alias.asname or alias.name, target


def dotted(node: ast.expr) -> str:
    """`a.b.c` as a string; empty when the expression is anything else."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def references(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Every dotted name the source imports or spells, with aliases resolved: `dist.send` is torch.distributed.send."""
    meanings = {}
    for node, target, name, meaning in imports(source):
        meanings[name] = meaning
        yield node, target
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = dotted(node).partition(".")
            if root in meanings:
                yield node, f"{meanings[root]}.{rest}"


def import_direction(package: Path) -> list[str]:
    """A module imports only from earlier rooms, and never from the package's own face."""
    errors = []
    for source in read_sources(package):
        if source.room == "__init__" or source.parts[1] == "ext":
            continue
        if source.room not in ROOMS:
            errors.append(f"{source.path}: no room is called {source.room}; give it its place in ROOMS")
            continue
        # A face imports extensions for type checkers alone, and finds them when they are asked for.
        blocks = [n for n in source.tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        shown = {n for block in blocks if source.path.name in FACES for n in ast.walk(block)}
        for node, target, *_ in imports(source):
            root, *rest = target.split(".")
            if root != package.name or (rest[:1] == ["ext"] and node in shown):
                continue
            room = rest[0] if rest and rest[0] in ROOMS else "__init__"
            if room == "__init__" or ROOMS.index(room) > ROOMS.index(source.room):
                errors.append(f"{source.at(node)}: {source.room} imports from {room}, a later room")
    return errors


def extensions_use_the_face(package: Path) -> list[str]:
    """An extension imports fshard's public names, those of `fshard.extend`, its own files and `ext/_compat`."""
    errors = []
    for source in read_sources(package):
        if not source.room.startswith("ext/"):
            continue
        own = ("fshard.ext._compat", f"fshard.{source.room.replace('/', '.')}")
        for node, name in references(source):
            is_own = any(f"{name}.".startswith(f"{prefix}.") for prefix in own)
            if name.split(".")[0] == "fshard" and not is_own and not is_on_the_face(name):
                errors.append(f"{source.at(node)}: {source.room} uses {name}, which is not public")
    return errors


def is_on_the_face(name: str) -> bool:
    """Whether each part of a dotted name is a public name of the module before it, up to the first that is none."""
    found: Any = import_module("fshard")
    for part in name.split(".")[1:]:
        if found.__name__ == "fshard" and part == "extend":
            found = import_module("fshard.extend")
        elif part not in found.__all__:
            return False
        else:
            found = getattr(found, part)
            if not isinstance(found, ModuleType):
                return True
    return True


def core_tests_name_no_extension(package: Path) -> list[str]:
    """A test outside of `tests/ext` imports no extension, no test of one, and of their names on the face only TOOLS."""
    names = {"fshard.ext", "tests.ext"}
    for (shown_by, extension), held in TABLE.items():
        if extension not in TOOLS:
            names |= {f"{shown_by}.{name}" for name in held.split()}
    errors = []
    for source in read_sources(package.parent / "tests"):
        for node, name in references(source) if source.parts[1:2] != ("ext",) else ():
            # Of an attribute of an extension the extension itself stands in the tree as well.
            parts = name.split(".")
            starts = [name] if isinstance(node, ast.Attribute) else [".".join(parts[:n]) for n in (2, 3)]
            if names.intersection(starts):
                errors.append(f"{source.at(node)}: a test of the core names {name}, which is an extension's")
    return errors


def rooms_of_libraries(package: Path) -> list[str]:
    """optree, torch.distributed, private torch modules and the environment are used only in their rooms."""
    errors = {}
    for source in read_sources(package):
        for node, name in references(source):
            parts, use = name.split("."), f"{source.at(node)}: {source.room} uses "
            private = next((i for i, p in enumerate(parts) if p.startswith("_") and not p.endswith("__")), None)
            if parts[0] == "optree" and source.room != "tree":
                errors[f"{use}optree, which belongs to tree"] = None
            if parts[:2] == ["torch", "distributed"] and source.room not in DISTRIBUTED_ROOMS:
                errors[f"{use}torch.distributed; leave it to comm or mesh"] = None
            if parts[0] == "torch" and private and source.room not in COMPAT:
                errors[f"{use}{'.'.join(parts[: private + 1])}; wrap it in _compat"] = None
            if name in ENVIRONMENT and source.room not in ("mesh", "_compat", "ext/run"):
                errors[f"{use}{name}; only mesh reads the environment"] = None
    return list(errors)


def module_state(package: Path) -> list[str]:
    """No mutable containers at module level, and no `global`."""
    errors = []
    for source in read_sources(package):
        for node in module_level(source.tree):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                name, value = ast.unparse(getattr(node, "targets", [getattr(node, "target", None)])[0]), node.value
                call = ast.unparse(value.func).split(".")[-1] if isinstance(value, ast.Call) else ""
                if name != "__all__" and (isinstance(value, MUTABLE_DISPLAYS) or call in MUTABLE_CALLS):
                    errors.append(f"{source.at(node)}: {name} is a mutable container at module level")
        globals_ = [node for node in ast.walk(source.tree) if isinstance(node, ast.Global)]
        errors += [f"{source.at(node)}: global {', '.join(node.names)}" for node in globals_]
    return errors


# Functions that compare within a tolerance, and the keywords that are to be there; any of them for the first ones.
TOLERATING = {"approx": {"rel", "abs"}, "isclose": {"rtol", "atol", "rel_tol", "abs_tol"}}
CLOSE = {"allclose", "assert_close", "assert_trees_close", "assert_matches_ddp", "gradcheck", "gradgradcheck"}
TOLERANCES = {"rtol", "atol", "rel", "abs", "rel_tol", "abs_tol"}
DERIVED = {"tolerance", "within"}
# Who compares with less than this compares but for rounding, and a name for less than that is one for a tolerance.
SMALL, TINY = 2**-10, 2**-20


def literal_tolerances(package: Path) -> list[str]:
    """A test derives its tolerances, by `fshard.rounding.tolerance` or by a name, and relies on no default.

    Files whose subject the tolerances of `fshard.testing` are, and a table of calls, are left out.
    """
    errors = []
    for source in read_sources(package.parent / "tests"):
        if source.parts[1:] in (("ext", "testing", "test_checks"), ("tolerance",)):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call):
                errors += [f"{source.at(node)}: {text}" for text in _faults_of_call(node)]
            elif isinstance(node, ast.Compare) and any(0 < abs(n) < SMALL for n in _numbers(node)):
                errors.append(f"{source.at(node)}: compares with a literal; use tolerance, or a name that derives it")
            elif isinstance(node, ast.Assign | ast.FunctionDef) and any(0 < abs(n) < TINY for n in _named(node)):
                errors.append(f"{source.at(node)}: names a literal tolerance; use tolerance or within")
            elif isinstance(node, ast.Attribute) and node.attr == "eps" and _called(node.value) == "finfo":
                errors.append(f"{source.at(node)}: multiplies eps; use tolerance or within")
    return errors


def _faults_of_call(node: ast.Call) -> Iterator[str]:
    name = _called(node)
    keywords = {keyword.arg for keyword in node.keywords}
    given = None in keywords or "exact" in keywords
    if name in CLOSE and not given and not {"rtol", "atol"} <= keywords:
        yield f"{name} by its default tolerance; pass **within(expected, terms)"
    if name in TOLERATING and not keywords & TOLERATING[name]:
        yield f"{name} by its default tolerance; pass one that is derived"
    for keyword in node.keywords:
        if (name in CLOSE or name in TOLERATING) and keyword.arg in TOLERANCES and any(_numbers(keyword.value)):
            yield f"{keyword.arg} of {name} is a literal; use tolerance, or a name that derives it"


def _named(node: ast.Assign | ast.FunctionDef) -> Iterator[float]:
    """The numbers that names get by themselves, in an assignment or as defaults of arguments."""
    if isinstance(node, ast.Assign):
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    else:
        values = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
    for value in values:
        if isinstance(value, ast.Constant):
            yield from _numbers(value)


def _called(node: ast.AST) -> str:
    """The last part of the name that is called; empty where nothing is."""
    return dotted(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""


def _numbers(node: ast.AST) -> Iterator[float]:
    """The numbers in an expression, but for those that a tolerance is derived from."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield node.value
    elif isinstance(node, ast.Subscript):
        yield from _numbers(node.value)
    elif _called(node) not in DERIVED:
        for child in ast.iter_child_nodes(node):
            yield from _numbers(child)


def module_level(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when the module is imported, those under `if`, `try` and `with` included."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield child
            yield from module_level(child)


def names_of_extensions(module: ModuleType) -> set[str]:
    """The public names of a module that extensions hold."""
    return {name for (shown_by, _), names in TABLE.items() if shown_by == module.__name__ for name in names.split()}


def public_objects(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Every public name of a module with its object; those of public submodules too, and none of an extension."""
    for name in module.__all__:
        if not name.startswith("__") and name not in names_of_extensions(module):
            yield from _public(module, name)


def public_objects_of_extensions(*modules: ModuleType) -> Iterator[tuple[str, Any]]:
    """The same of the names that extensions hold."""
    for module in modules:
        for name in sorted(names_of_extensions(module)):
            yield from _public(module, name)


def _public(module: ModuleType, name: str) -> Iterator[tuple[str, Any]]:
    value = getattr(module, name)
    yield f"{module.__name__}.{name}", value
    if isinstance(value, ModuleType):
        yield from public_objects(value)


def documentation(name: str, value: Any) -> list[str]:
    """A public name is a function, class or module with a docstring; a function's is complete, and so are its types."""
    if not isinstance(value, FunctionType | ModuleType | type):
        return [f"{name}: is a {type(value).__name__}; public names are functions, classes and modules"]
    doc = inspect.cleandoc((vars(value).get("__doc__") if isinstance(value, type) else value.__doc__) or "")
    # The docstrings that dataclasses and NamedTuples make up are signatures, which no full stop ends.
    is_sentence = re.match(r"\w.*?\s.*?[.:](\s|$)", doc.split("\n\n")[0], re.DOTALL)
    errors = [] if is_sentence else [f"{name}: needs a docstring that begins with a sentence"]
    if isinstance(value, FunctionType):
        signature = inspect.signature(value)
        parameters = signature.parameters.values()
        errors += [f"{name}: {p.name} has no annotation" for p in parameters if p.annotation is p.empty]
        if signature.return_annotation is signature.empty:
            errors.append(f"{name}: the result has no annotation")
        if parameters and "Args:" not in doc:
            errors.append(f"{name}: takes arguments but has no Args section")
        if signature.return_annotation not in (None, "None") and "Returns:" not in doc and "Yields:" not in doc:
            errors.append(f"{name}: returns something but has no Returns section")
    return errors
