"""The architecture of fshard, and that the rules which guard it find what they should."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import fshard as fs
from tests import house

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fshard"


# For each rule a file that breaks it, and the message.
TEST = "../tests/test_x.py"
BREACHES = [
    (house.import_direction, "tree.py", "from .comm import ops", "tree imports from comm, a later room"),
    (house.extensions_use_the_face, "ext/plan.py", "from fshard import engine", "ext/plan uses fshard.engine,"),
    (house.extensions_use_the_face, "ext/plan.py", "from fshard.ext.trace import x", "ext/plan uses fshard.ext.trace"),
    (house.core_tests_name_no_extension, TEST, "import fshard.ext", "a test of the core names fshard."),
    (house.rooms_of_libraries, "gather.py", "from torch.distributed import barrier", "gather uses torch.distributed;"),
    (house.rooms_of_libraries, "gather.py", "from os import environ", "gather uses os.environ; only mesh reads"),
    (house.literal_tolerances, TEST, "assert a < 1e-12", "compares with a literal"),
    (house.literal_tolerances, TEST, "assert a == approx(b)", "approx by its default tolerance"),
    (house.literal_tolerances, TEST, "assert_close(a, b)", "assert_close by its default tolerance"),
    (house.literal_tolerances, TEST, "EXACT, SINGLE = 1e-12, 1e-5", "names a literal tolerance"),
    (house.literal_tolerances, TEST, "close(a, 9 * finfo(d).eps)", "multiplies eps"),
    (house.literal_tolerances, TEST, "assert_close(a, b, rtol=0, atol=9 * EPS)", "atol of assert_close is a literal"),
    (house.module_state, "tree.py", "cache: dict[str, int] = {}", "cache is a mutable container at module level"),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, *_ in BREACHES))
@pytest.mark.rows(len(BREACHES))
def test_source_keeps_the_rule(rule):
    assert rule(PACKAGE) == []


@pytest.mark.parametrize("rule, file, text, message", BREACHES)
@pytest.mark.rows(len(BREACHES))
def test_breach_is_found(rule, file, text, message, tmp_path):
    (tmp_path / "fshard").mkdir()
    path = (tmp_path / "fshard" / file).resolve()
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    (error,) = rule(tmp_path / "fshard")
    assert error.startswith(f"{path}:1: {message}")


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
    check_public_names_have_an_example(house.public_objects(fs), 70)


def test_the_reference_groups_every_public_name():
    grouped = re.findall(r"`(?:fshard\.)?(?:ext\.optim\.|ext\.parallel\.)?(\w+)`", fs.__doc__)
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
