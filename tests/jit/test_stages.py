"""Graphs whose ranks are stages of a pipeline: what ranks compare of their collectives."""

import fshard as fs
from fshard.jit.passes import Told


def test_stages_compare_the_orders_of_each_process_group():
    """Over an axis only its own collectives are compared, and elsewhere all in one order."""
    shard, pipe = fs.Axis("shard", 2, "a"), fs.Axis("pipe", 2, "b")
    first, second = [(shard, "gather"), (pipe, "send")], [(pipe, "send"), (shard, "gather")]
    other = [(shard, "reduce"), (pipe, "send")]

    def facts(sent, staged):
        return [found for _, found in Told({}, sent, staged).facts([shard, pipe])]

    assert facts(first, True) == facts(second, True)
    assert facts(first, False) != facts(second, False)
    over_shard, over_pipe = zip(facts(first, True), facts(other, True), strict=True)
    assert over_shard[0] != over_shard[1]
    assert over_pipe[0] == over_pipe[1]
