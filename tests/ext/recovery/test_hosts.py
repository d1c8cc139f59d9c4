"""Two hosts, as network namespaces of this machine with a memory each: what is lost with one, and with both."""

import os
import shutil
import sys

import pytest

from tests.ext.recovery import kills
from tests.ext.recovery.simulated import simulate
from tests.ext.recovery.test_kills import RUN, check

sys.path.append(str(kills.ROOT / "benchmarks"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # torch's ZeroRedundancyOptimizer, which the benchmarks import, warns of what it imports.
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
        reason="network namespaces need root and iproute2",
    ),
]


@pytest.fixture
def hosts():
    """Two network namespaces with a link between them."""
    import hosts

    with hosts.hosts(2, rate=1.0) as names:
        yield tuple(names)


def test_kills_of_ranks_and_of_whole_hosts(hosts, tmp_path):
    """At random moments; a host's ranks all at once, with their memory: their shards come from the neighbour's."""
    setting = kills.Setting(RUN, 4, "eager", hosts=hosts)
    undisturbed = simulate(4, "eager", kills.steps_of(8), tmp_path / "simulated")
    row = kills.prove(setting, tmp_path, 8, 4, undisturbed)
    check(row)
    assert row["ranks_killed"]["a host"] > 1


def test_neighbours_that_are_lost_together_leave_the_disk(hosts, tmp_path):
    """Both memories are gone: the run goes on from the last checkpoint, and says so."""
    setting = kills.Setting(RUN, 4, "eager", hosts=hosts, every=5)
    undisturbed = simulate(4, "eager", 20, tmp_path / "simulated")
    # In the middle of step 9.
    kill = kills.Kill("step begins", 9, 0.5, hosts=hosts)
    ledger = kills.run(setting, tmp_path / "killed", 20, [kill], undisturbed.digests)
    assert ledger.problems == []
    assert ledger.whole == undisturbed.whole
    assert ledger.repeated == {0: 0, 1: 3}
    printed = "".join((tmp_path / f"killed/output-{number}").read_text() for number in range(2))
    assert "no state in memory is whole" in printed
