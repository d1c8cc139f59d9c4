"""Tools to test sharded programs: ranks to run them on, and comparisons that name the leaf.

`assert_budget`, `assert_same_bits` and `check_optimizer` are of extensions; the others are the core's.
"""

from typing import TYPE_CHECKING

from fshard import lazy_names
from fshard.testing.compare import assert_matches_ddp, assert_trees_close, check_pure
from fshard.testing.laws import TransformReport, check_adjoint, check_transform
from fshard.testing.spmd import spmd
from fshard.testing.varying import check_varying
from fshard.testing.workers import RankError, Workers

if TYPE_CHECKING:
    from fshard.ext.check_optimizer import check_optimizer
    from fshard.ext.plan.budget import assert_budget
    from fshard.ext.same_bits import assert_same_bits

__getattr__ = lazy_names.make_getattr(__name__)
__all__ = [
    "RankError",
    "TransformReport",
    "Workers",
    "assert_budget",
    "assert_matches_ddp",
    "assert_same_bits",
    "assert_trees_close",
    "check_adjoint",
    "check_optimizer",
    "check_pure",
    "check_transform",
    "check_varying",
    "spmd",
]


def __dir__() -> list[str]:
    return __all__
