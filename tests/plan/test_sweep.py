"""Extrapolation over depth against all layers, and the cheapest that fits."""

import pytest
import torch

from fshard.plan import Options, cheapest, estimate, sweep, workload_of
from fshard.plan.models import GPT, Block, Workload
from fshard.plan.sweep import STRATEGIES

DEEP = 9


def make(layers):
    with torch.device("meta"):
        return GPT(width=1024, layers=layers, heads=8, vocabulary=512, context=128)


TOKENS = torch.zeros(2, 128, dtype=torch.int64)
WORKLOAD = Workload("test", make, (TOKENS, TOKENS), Block, DEEP)
SHALLOW = WORKLOAD._replace(layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", (False, True))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_extrapolation_is_the_full_depth(strategy, checkpointed):
    mesh = {"replicate": 2, "shard": 8} if strategy == "hsdp" else {"shard": 16}
    options = Options(strategy, checkpointed=checkpointed)
    found, full = (estimate(WORKLOAD, options, mesh, full_depth=whole) for whole in (False, True))
    assert (found.bytes_sent, found.flops) == (full.bytes_sent, full.flops)
    # Small gradients of several layers share a collective.
    assert found.collectives == pytest.approx(full.collectives, rel=0.05)
    assert full.traced
    assert not found.traced
    assert found.peak.total == pytest.approx(full.peak.total, rel=0.02)
    assert found.seconds == pytest.approx(full.seconds, rel=0.05)


@pytest.mark.slow
def test_a_sweep_finds_the_cheapest_that_fits():
    rows = list(sweep(SHALLOW, world_sizes=(8, 16), strategies=("ddp", "hsdp"), regather=(True,)))
    assert len(rows) == 8
    memory = sorted(row.peak.total for row in rows)[4]
    best = cheapest(rows, memory)
    assert best.peak.total <= memory
    assert best.seconds == min(row.seconds for row in rows if row.peak.total <= memory)
    assert cheapest(rows, "1kB") is None


@pytest.mark.slow
def test_units_and_regathering_are_options():
    kept, dropped = sweep(
        SHALLOW, world_sizes=(16,), strategies=("zero3",), regather=(False, True), checkpointed=(False,)
    )
    assert kept.bytes_sent < dropped.bytes_sent
    assert kept.peak.gathered > dropped.peak.gathered
    merged = SHALLOW._replace(units="*")
    (whole,) = sweep(merged, world_sizes=(16,), strategies=("zero3",), regather=(True,), checkpointed=(False,))
    assert whole.peak.total != dropped.peak.total


@pytest.mark.slow
@pytest.mark.parametrize("name, ranks, at_most", [("gpt-175b", 4096, 13.2e9), ("gpt-1t", 4096, 50e9)])
def test_large_models_are_planned(name, ranks, at_most):
    options = Options("zero3", param_dtype=torch.bfloat16, checkpointed=True)
    assert 0.9 * at_most < estimate(workload_of(name), options, {"shard": ranks}).peak.total < at_most
