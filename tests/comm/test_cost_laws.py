"""How the cost of agreement grows with the number of ranks: sockets, requests to the store, messages and bytes.

Counts are those of real processes. No time is asserted.
"""

import pytest

from tests.comm.costs import costs_by_law, costs_of_ranks

SIZES = (8, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 3, 4, 6, 16, 32)))


@pytest.mark.rows(1)
@pytest.mark.parametrize("ranks", SIZES)
def test_costs_of_agreement_follow_their_laws(ranks):
    law = costs_by_law(ranks)
    for costs in costs_of_ranks(ranks):
        assert sum(costs["sockets"].values()) == law["sockets"], costs["sockets"]
        assert sum(costs["requests to the store"].values()) == law["requests to the store"]
        # Each message is small enough for a segment. On a busy machine TCP may send one twice.
        assert costs["segments of a comparison"] >= law["messages of a comparison"]
        assert costs["bytes of a comparison"] == law["bytes of a comparison"]
