"""Runs on two hosts, which are network namespaces here, by torchrun."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest

from tests.test_elastic import losses_of
from tests.test_processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS, TIMEOUT = 300, 300
TRAIN = ["examples/train_gpt.py", "--preset", "tiny", "--steps", STEPS, "--save-every", 5, "--sample", 4]
TRAIN += ["--sums", "tree"]

# A host that joins a later round waits for ever for the address that torchrun's agents otherwise share since the first.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


def command(text):
    subprocess.run(text.split(), check=True)


@contextmanager
def two_hosts():
    """Two namespaces that are joined by a link."""
    names = [f"fs{os.getpid()}h{i}" for i in range(2)]
    try:
        for name in names:
            command(f"ip netns add {name}")
        command(f"ip link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}")
        for i, name in enumerate(names):
            command(f"ip -n {name} address add 10.78.0.{i + 1}/24 dev eth0")
            command(f"ip -n {name} link set lo up")
            command(f"ip -n {name} link set eth0 up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Host:
    """One host's torchrun, in a process group of its own."""

    def __init__(self, number, name, directory):
        self.output = (directory / f"host-{number}-{time.monotonic_ns()}.out").open("w+")
        settings = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,timeout=60"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", 1]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", "10.78.0.1:29400"]
        torchrun += ["--rdzv-conf", f"is_host={number == 0},{settings}", "--local-addr", f"10.78.0.{number + 1}"]
        torchrun += ["--max-restarts", 5, "--monitor-interval", 0.2]
        inside = ["ip", "netns", "exec", name]
        self.process = subprocess.Popen(
            [str(part) for part in (*inside, *torchrun, *TRAIN, "--directory", directory / "run")],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def printed(self):
        self.output.seek(0)
        return self.output.read()

    def die(self, name):
        """Kill all that runs in the namespace at once, as a power cut does."""
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
        for pid in map(int, pids.split()):
            os.kill(pid, signal.SIGKILL)
        self.process.wait(TIMEOUT)

    def close(self):
        """Print what the host did, and end what is left of it."""
        print(self.printed())
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(TIMEOUT)
        self.output.close()


def ranks_by_step(directory):
    path = directory / "run" / "losses.txt"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [line.split() for line in lines if line.endswith("\n")]
    return {int(step): int(ranks) for step, _, ranks in rows}


def wait_for(directory, ranks, steps, hosts):
    """Wait until so many steps more have run on so many ranks."""
    deadline = time.monotonic() + TIMEOUT
    while sum(found == ranks for found in ranks_by_step(directory).values()) < steps:
        assert time.monotonic() < deadline, f"no {steps} steps on {ranks} ranks"
        for host in hosts:
            assert host.process.poll() is None, host.printed()
        time.sleep(0.05)


def losses_alone(directory):
    """The losses of a run on one rank that nothing interrupts."""
    alone = subprocess.run(
        [str(part) for part in (sys.executable, *TRAIN, "--directory", directory)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert alone.returncode == 0, alone.stderr
    losses = losses_of(directory)
    assert sorted(losses) == list(range(STEPS))
    return losses


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="namespaces need root and iproute2")
def test_a_host_dies_and_joins_and_the_bits_stay(tmp_path):
    with two_hosts() as names, ExitStack() as stack:

        def started(number):
            host = Host(number, names[number], tmp_path)
            stack.callback(host.close)
            return host

        first, second = started(0), started(1)
        wait_for(tmp_path, 2, 20, [first, second])
        second.die(names[1])
        wait_for(tmp_path, 1, 20, [first])
        second = started(1)
        before = sum(found == 2 for found in ranks_by_step(tmp_path).values())
        wait_for(tmp_path, 2, before + 20, [first])
        codes = [host.process.wait(TIMEOUT) for host in (first, second)]
    assert codes == [0, 0]
    assert set(ranks_by_step(tmp_path).values()) == {1, 2}
    assert losses_of(tmp_path / "run") == losses_alone(tmp_path / "alone")
