"""Tools to test sharded programs: ranks to run them on, and comparisons that name the leaf.

The core has the ranks: `spmd`, `Workers` and `RankError`.

Those of extensions check what runs on them: `assert_trees_close`, `assert_matches_ddp`, `assert_same_bits`;
`assert_step` and `check_pure` for steps; `check_adjoint`, `check_transform` with its
`TransformReport`, and `check_optimizer` for what you wrote yourself.
"""

from typing import TYPE_CHECKING

from fshard import lazy_names
from fshard.testing.spmd import spmd
from fshard.testing.workers import RankError, Workers

if TYPE_CHECKING:
    from fshard.ext.testing.assert_step import assert_step
    from fshard.ext.testing.check_optimizer import check_optimizer
    from fshard.ext.testing.compare import assert_matches_ddp, assert_trees_close, check_pure
    from fshard.ext.testing.laws import TransformReport, check_adjoint, check_transform
    from fshard.ext.testing.same_bits import assert_same_bits

__getattr__ = lazy_names.make_getattr(__name__)
__all__ = [
    "RankError",
    "TransformReport",
    "Workers",
    "assert_matches_ddp",
    "assert_same_bits",
    "assert_step",
    "assert_trees_close",
    "check_adjoint",
    "check_optimizer",
    "check_pure",
    "check_transform",
    "spmd",
]


def __dir__() -> list[str]:
    return __all__
