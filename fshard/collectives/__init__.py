"""Differentiable collectives over a named axis, each with its transpose; the objective and the typing of its values."""

from fshard.collectives.derived import make_derived_leaf_agree
from fshard.collectives.linear import (
    OBSERVED,
    REDUCTIONS,
    TAPE,
    CollectiveTape,
    Variance,
    record_on_tape,
    run_on_tape,
    variance_of,
)
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
    TracedUsage,
    Usage,
    agree_on_usage,
    annotate_dtype,
    denominator,
    describe_reduce_over,
    divide,
    objective,
    reduce_loss_and_usage,
    reduction_axes,
    shared_axes,
    sum_over,
    widen,
)
from fshard.collectives.sums import pcast, pmax, pmean, psum, psum_invariant
from fshard.collectives.varying import (
    Misfit,
    Typed,
    check_agrees,
    check_not_reduced,
    collectives_of,
    find_misfits,
    refuse_mixed,
    refuse_unsummed,
    refuse_wrong_sums,
    walk_graph,
)
