"""Differentiable collectives over a named axis, each with its transpose; the objective and the typing of its values."""

from fshard.collectives.derived import settle
from fshard.collectives.linear import LOCATED, REDUCTIONS, Chain, Variance, chained, custom_call, variance_of
from fshard.collectives.moves import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    axis_index,
    broadcast,
    ppermute,
    ragged_all_to_all,
    reduce_scatter,
)
from fshard.collectives.objective import (
    Over,
    Used,
    Uses,
    agreed_uses,
    closed,
    denominator,
    divided,
    named,
    objective,
    reduction_axes,
    shared_axes,
    total,
)
from fshard.collectives.sums import pmax, pmean, psum, psum_invariant, pvary
from fshard.collectives.varying import (
    Typed,
    check_agrees,
    check_not_reduced,
    find_mixed,
    refuse_mixed,
    refuse_unsummed,
    refuse_wrong_sums,
    walked,
)
