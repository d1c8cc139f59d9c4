"""The architecture of fshard, and that the rules which guard it find what they should."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import fshard as fs
from tests import house

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fshard"
HEAVY = ("torch.distributed.tensor", "torch.testing", "torch._dynamo", "torch._inductor", "matplotlib", "cloudpickle")


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout


# For each rule a file that breaks it, and the message.
BREACHES = {
    house.import_direction: ("tree.py", "from .comm import ops", "1: tree imports from comm, a later room"),
    house.extensions_use_the_face: (
        "ext/plan.py",
        "import fshard as fs\n\nx = fs.engine",
        "3: ext/plan uses fshard.engine, which is not public",
    ),
    house.core_tests_name_no_extension: (
        "../tests/test_x.py",
        "import fshard as fs\nx = fs.moe.route",
        "2: a test of the core names fshard.moe, which is an extension's",
    ),
    house.rooms_of_libraries: (
        "gather.py",
        "import torch\n\nx = torch.distributed.get_rank()",
        "3: gather uses torch.distributed; leave it to comm or mesh",
    ),
    house.private_attributes: ("tree.py", "def f(x): return x._version", "1: tree uses x._version; wrap it in _compat"),
    house.class_names: ("tree.py", "class A: ...\nclass A: ...", "2: class A stands in another place too"),
    house.module_state: ("tree.py", "cache: dict[str, int] = {}", "1: cache is a mutable container at module level"),
}


@pytest.mark.parametrize("rule", BREACHES)
@pytest.mark.rows(len(BREACHES))
def test_source_keeps_the_rule(rule, tmp_path):
    """And the rule finds a breach."""
    assert house.read_sources(PACKAGE)
    errors = rule(PACKAGE)
    assert not errors, "\n".join(errors)
    file, text, message = BREACHES[rule]
    (tmp_path / "fshard").mkdir()
    (tmp_path / "fshard/__init__.py").touch()
    path = (tmp_path / "fshard" / file).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert rule(tmp_path / "fshard") == [f"{path}:{message}"]


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


def undescribed(x, y: int = 0):
    """undescribed(x, y)"""


def test_an_undocumented_function_is_found():
    assert house.documentation("f", undescribed) == [
        "f: needs a docstring that begins with a sentence",
        "f: x has no annotation",
        "f: the result has no annotation",
        "f: takes arguments but has no Args section",
        "f: returns something but has no Returns section",
    ]


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


def test_import_is_light():
    code = "import sys, torch; before = set(sys.modules); import fshard; print(*sys.modules.keys() - before)"
    loaded = python(code).split()
    assert "fshard" in loaded
    assert not [name for name in loaded if any(f"{name}.".startswith(f"{heavy}.") for heavy in HEAVY)]
