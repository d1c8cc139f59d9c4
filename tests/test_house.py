"""The architecture of fshard, and that the rules which guard it find what they should."""

import doctest
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple

import pytest

import fshard as fs
from tests import house

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fshard"
HEAVY = ("torch.distributed.tensor", "torch.testing", "torch._dynamo", "torch._inductor", "matplotlib", "cloudpickle")


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout


REEXPORTS = "1: __init__ re-exports, nothing else"
NAMES, OF = "a test of the core names", ", which is an extension's"
LEAVE, WRAP = "leave it to comm or mesh", "wrap it in _compat"
MUTABLE, READS = "is a mutable container at module level", "only mesh reads the environment"
# For each rule files, texts, and the message that must be found.
BREACHES = {
    house.import_direction: [
        ("tree.py", "from fshard import gather", "1: tree imports from gather, a later room"),
        ("tree.py", "import fshard.comm.ops", "1: tree imports from comm, a later room"),
        ("tree.py", "from .comm import ops", "1: tree imports from comm, a later room"),
        ("comm/ops.py", "from ..mesh import axis_of", "1: comm imports from mesh, a later room"),
        ("comm/ops.py", "def f():\n    from .. import jit", "2: comm imports from jit, a later room"),
        ("comm/__init__.py", "from .. import mesh", "1: comm imports from mesh, a later room"),
        ("mesh.py", "import fshard as fs", "1: mesh imports from __init__, a later room"),
        ("mesh.py", "from fshard import Spec", "1: mesh imports from __init__, a later room"),
        ("cellar.py", "", " no room is called cellar; give it its place in ROOMS"),
    ],
    house.extensions_use_the_face: [
        ("ext/plan.py", "from fshard.comm import world", "1: ext/plan uses fshard.comm.world, which is not public"),
        ("ext/plan.py", "from fshard.extend import x", "1: ext/plan uses fshard.extend.x, which is not public"),
        ("ext/plan.py", "from fshard.ext import trace", "1: ext/plan uses fshard.ext.trace, which is not public"),
        ("ext/plan.py", "import fshard as fs\n\nx = fs.engine", "3: ext/plan uses fshard.engine, which is not public"),
        ("ext/plan.py", "import fshard.engine", "1: ext/plan uses fshard.engine, which is not public"),
    ],
    house.core_tests_name_no_extension: [
        ("../tests/optim/test_x.py", "import fshard as fs\n\nx = fs.lamb(0.1)", f"3: {NAMES} fshard.lamb{OF}"),
        ("../tests/test_x.py", "import fshard as fs\nx = fs.moe.route", f"2: {NAMES} fshard.moe{OF}"),
        ("../tests/test_x.py", "from fshard import testing, quantize", f"1: {NAMES} fshard.quantize{OF}"),
        (
            "../tests/test_x.py",
            "from fshard import testing\nx = testing.assert_same_bits",
            f"2: {NAMES} fshard.testing.assert_same_bits{OF}",
        ),
        (
            "../tests/test_x.py",
            "from fshard.testing import assert_same_bits",
            f"1: {NAMES} fshard.testing.assert_same_bits{OF}",
        ),
        ("../tests/test_x.py", "import fshard.ext.trace", f"1: {NAMES} fshard.ext.trace{OF}"),
        ("../tests/test_x.py", "from fshard import ext", f"1: {NAMES} fshard.ext{OF}"),
        ("../tests/test_x.py", "from tests.ext.faults import PROGRAMS", f"1: {NAMES} tests.ext.faults.PROGRAMS{OF}"),
    ],
    house.face_reexports_only: [
        ("__init__.py", "def f(): ...", REEXPORTS),
        ("__init__.py", "x, __all__ = 1, []", REEXPORTS),
    ],
    house.rooms_of_libraries: [
        ("jit.py", "import optree.pytree", "1: jit uses optree, which belongs to tree"),
        ("gather.py", "import torch\n\nx = torch.distributed.get_rank()", f"3: gather uses torch.distributed; {LEAVE}"),
        ("gather.py", "from torch import distributed as dist", f"1: gather uses torch.distributed; {LEAVE}"),
        (
            "comm/ops.py",
            "from torch.testing._internal import common_utils",
            f"1: comm uses torch.testing._internal; {WRAP}",
        ),
        (
            "comm/ops.py",
            "import torch\nwait = torch.ops._c10d_functional.wait_tensor",
            f"2: comm uses torch.ops._c10d_functional; {WRAP}",
        ),
        (
            "comm/ops.py",
            "from torch import utils as u\nmap = u._pytree.tree_map",
            f"2: comm uses torch.utils._pytree; {WRAP}",
        ),
    ],
    house.private_attributes: [
        ("tree.py", "def f(x): return x._version", f"1: tree uses x._version; {WRAP}"),
        ("tree.py", "def f(x): return x.untyped_storage()._cdata", f"1: tree uses x.untyped_storage()._cdata; {WRAP}"),
    ],
    house.class_names: [("tree.py", "class A: ...\nclass A: ...", "2: class A stands in another place too")],
    house.file_lengths: [("tree.py", "\n" * 601, " 601 lines, at most 600 without a reason in its docstring")],
    house.module_state: [
        ("tree.py", "cache: dict[str, int] = {}", f"1: cache {MUTABLE}"),
        ("tree.py", "if 1:\n    a = set()", f"2: a {MUTABLE}"),
        ("tree.py", "import collections\nx = collections.defaultdict(int)", f"2: x {MUTABLE}"),
        ("tree.py", "def f():\n    global x\n    x = 1", "2: global x"),
        ("tree.py", "import os\nx = os.environ.get('X')", f"2: tree uses os.environ; {READS}"),
        ("tree.py", "from os import getenv", f"1: tree uses os.getenv; {READS}"),
    ],
}


@pytest.mark.rows(100)
@pytest.mark.parametrize("rule", BREACHES)
def test_source_keeps_the_rule(rule):
    assert house.read_sources(PACKAGE)
    errors = rule(PACKAGE)
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(
    ("rule", "file", "text", "message"), [(rule, *row) for rule, rows in BREACHES.items() for row in rows]
)
def test_rule_finds_a_breach(rule, file, text, message, tmp_path):
    path = write(tmp_path, file, text)
    assert rule(tmp_path / "fshard") == [f"{path}:{message}"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("jit.py", "from fshard import tree\nfrom fshard.comm import ops"),
        ("comm/ops.py", "from . import recorder\nfrom fshard.comm.recorder import x\nimport torch.distributed as dist"),
        ("_compat.py", "import torch\nx = torch._C.y\ndef f(x): return x._version"),
        ("tree.py", "import optree\nimport torch\nx = torch.__version__\n__all__ = ['x']"),
        ("mesh.py", "import os\nx = os.environ['X']\ndef f():\n    y = {}\n    os._exit(len(y))"),
        ("tree.py", "class A:\n    def f(self, b):\n        self._x = []\n        return b._x, b._replace()"),
        ("__init__.py", '"""Face."""\n\nfrom fshard.jit import jit\n\n__all__ = ["jit"]\n__version__ = "1"'),
        ("__init__.py", "__all__ = []\n\n\ndef __dir__() -> list[str]:\n    return __all__"),
        (
            "ext/plan.py",
            "import fshard as fs\nfrom fshard.ext import _compat\nfrom fshard.extend import expect\nx = fs.psum",
        ),
        (
            "ext/plan.py",
            "from fshard import Axis\nfrom fshard.ext.plan import x\nimport fshard as fs\ny = fs.comm.rank",
        ),
        ("../tests/ext/test_x.py", "import fshard as fs\nfrom tests.ext.faults import x\ny = fs.lamb"),
        ("../tests/test_x.py", "import fshard as fs\ny = fs.adam, fs.testing.spmd, fs.extend, fs.planned"),
    ],
)
def test_rules_pass_what_is_allowed(file, text, tmp_path):
    write(tmp_path, file, text)
    for rule in BREACHES:
        assert rule(tmp_path / "fshard") == []


def write(folder: Path, file: str, text: str) -> Path:
    """Write one file of a package called fshard, whose face is empty unless it is the file."""
    (folder / "fshard").mkdir()
    (folder / "fshard" / "__init__.py").touch()
    path = (folder / "fshard" / file).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def check_public_names_are_documented(public):
    errors = [error for name, value in public for error in house.documentation(name, value)]
    assert not errors, "\n".join(errors)


def test_public_names_are_documented():
    check_public_names_are_documented(house.public_objects(fs))


def check_public_names_have_an_example(public, number):
    """In their docstrings, where pytest runs it."""
    examples = doctest.DocTestParser().get_examples
    public = [(name, value) for name, value in public if not isinstance(value, ModuleType)]
    assert len(public) > number
    assert [name for name, value in public if not examples(value.__doc__ or "")] == []


def test_public_names_have_an_example():
    check_public_names_have_an_example(house.public_objects(fs), 100)


def described(x: int, *rest: int) -> Iterator[int]:
    """Do something with numbers.

    Args:
        x: A number.
        *rest: More numbers.

    Yields:
        Numbers.
    """
    yield from (x, *rest)


def undescribed(x, y: int = 0):
    """undescribed(x, y)"""


def unsectioned(x: int) -> int:
    """Do something with a number."""
    return x


class Pair(NamedTuple):
    left: int


@dataclass
class Point:
    """A point on a line."""

    x: int


DOCSTRING = "f: needs a docstring that begins with a sentence"


@pytest.mark.parametrize(
    ("value", "errors"),
    [
        (described, []),
        (
            undescribed,
            [
                DOCSTRING,
                "f: x has no annotation",
                "f: the result has no annotation",
                "f: takes arguments but has no Args section",
                "f: returns something but has no Returns section",
            ],
        ),
        (
            unsectioned,
            ["f: takes arguments but has no Args section", "f: returns something but has no Returns section"],
        ),
        (Pair, [DOCSTRING]),
        (Point, []),
        (dataclass(type("Made", (), {})), [DOCSTRING]),
        (ModuleType("f"), [DOCSTRING]),
        (partial(described, 1), ["f: is a partial; public names are functions, classes and modules"]),
    ],
)
def test_documentation_rule(value: object, errors: Sequence[str]):
    assert house.documentation("f", value) == errors


def test_the_reference_groups_every_public_name():
    grouped = re.findall(r"`(?:fshard\.)?(?:optim\.|ext\.parallel\.)?(\w+)`", fs.__doc__)
    assert sorted(grouped) == sorted(fs.__all__)


def test_verbs_are_functions_after_every_submodule_was_imported():
    modules = [module.name for module in pkgutil.walk_packages(fs.__path__, "fshard.")]
    for module in modules:
        importlib.import_module(module)
    # A file that defines a public function of its own name.
    verbs = {name for name in fs.__all__ if f"fshard.{name}" in modules} - {"checkpoint", "comm", "testing"}
    assert verbs >= {"gather", "apply", "scatter_grads", "value_and_grad", "update", "shard"}
    assert all(isinstance(getattr(fs, verb), FunctionType) for verb in verbs)
    for face in (fs, fs.checkpoint, fs.testing):
        assert dir(face) == sorted(face.__all__)


def test_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert fs.__version__ == project["version"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_core_s_tests_pass_without_extensions(tmp_path):
    """A part of them, in a copy of what is tracked; `pytest tests --ignore tests/ext` runs all of them there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("fshard/ext/", "tests/ext/")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
    parts = ("tests/engine", "tests/test_value_and_grad.py", "tests/optim")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *parts]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    found = subprocess.run(
        [sys.executable, "-c", "import fshard; print(fshard.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
    )
    assert found.stdout.decode().startswith(str(tmp_path))


def test_import_is_light():
    code = "import sys, torch; before = set(sys.modules); import fshard; print(*sys.modules.keys() - before)"
    loaded = python(code).split()
    assert "fshard" in loaded
    assert not [name for name in loaded if any(f"{name}.".startswith(f"{heavy}.") for heavy in HEAVY)]
