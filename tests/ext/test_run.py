"""python -m fshard.run: ranks that are forked behave as those that torchrun starts."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fshard.ext.run import fork_client, launch

ROOT = Path(__file__).parents[2]
SECONDS = 60.0
# Prints what its process is, and ends in a way.
PROGRAM = """
import atexit, json, multiprocessing, os, random, signal, sys, threading, time

if __name__ == "__main__":
    __file__ == sys.argv[0] or "-m" in sys.orig_argv or sys.exit("not the program")
    way, *rest = sys.argv[1:]
    atexit.register(print, "the end")
    print(sys.argv, sys.path[0], os.getcwd(), os.environ["COLOR"], sorted(os.sched_getaffinity(0)))
    print(os.getsid(0) == os.getpid(), multiprocessing.get_start_method(allow_none=True), __spec__ is None)
    print(sys.stdin.read(), end="")
    print([signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)])
    match way:
        case "returns":
            threading.Timer(0.05, print, ["a thread"]).start()
        case "raises":
            raise ValueError("bad batch")
        case "exits":
            sys.exit(eval(rest[0]))
        case "ends at once":
            print("no newline", end="")
            os._exit(int(rest[0]))
        case "dies":
            os.kill(os.getpid(), getattr(signal, rest[0]))
        case "becomes another":
            os.execv(sys.executable, [sys.executable, "-c", "print('another')"])
        case "waits":
            signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
            print("ready")
            time.sleep(60)
"""
# How the program ends, and by which signal that the client gets.
ENDS = [
    (["returns", "--steps", "3"], None),
    (["raises"], None),
    (["exits", "'a text'"], None),
    (["ends at once", "5"], None),
    (["dies", "SIGKILL"], None),
    (["becomes another"], None),
    (["waits"], signal.SIGINT),
    (["waits"], signal.SIGUSR1),
]


@pytest.fixture(scope="module")
def client():
    """Start programs by clients of one fork server."""
    with launch.serve_clients(2) as command:
        yield command


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "programs" / "train.py"
    path.parent.mkdir()
    path.write_text(PROGRAM)
    return path


def end_of(command, number, folder):
    """Run a command as torchrun would, send it a signal when it is ready, and return how it ended."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=folder,
        env=os.environ | {"COLOR": "red"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        print("an input", file=process.stdin)
        process.stdin.close()
        lines = []
        while number is not None and lines[-1:] != ["ready\n"]:
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()
        if number is not None:
            os.killpg(process.pid, number)
        output = "".join([*lines, process.stdout.read()])
        errors = process.stderr.read()
    # Of a traceback the frames outside of the program differ.
    errors = re.sub(r'(?s)(?<=:\n)  File ".*?(?=  File "[^"]*train.py)', "", errors)
    if number == signal.SIGINT:
        # The program may get it at any line behind the one that says that it is ready.
        errors = "".join(errors.splitlines(keepends=True)[-1:])
    return process.returncode, output, errors


@pytest.mark.rows(len(ENDS))
@pytest.mark.parametrize("way, number", ENDS, ids=str)
def test_a_program_ends_as_one_that_python_starts(client, script, tmp_path, way, number):
    """With its exit code, its output to the last byte, its errors, and all that is its process's."""
    expected = end_of([sys.executable, "-u", script, *way], number, tmp_path)
    assert end_of([*client, script, *way], number, tmp_path) == expected
    assert "an input" in expected[1]


def test_a_module_runs_from_the_working_directory(client, script):
    expected = end_of([sys.executable, "-u", "-m", "train", "returns"], None, script.parent)
    code, output, errors = end_of([*client, "-m", "train", "returns"], None, script.parent)
    assert (code, output, errors) == expected
    assert code == 0, errors


# Prints the number of the process, and waits.
WAITS = """
import os, signal, sys
print(os.getpid(), flush=True)
signal.pause()
"""


def has_ended(pid):
    """Wait until a process has ended; False if it does not."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(handle) as file:
        return bool(select.select([file], [], [], SECONDS)[0])


def parent_of(pid):
    return int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def start_waiting(client, script, **options):
    """Start a program that waits, and return its client and its own number."""
    script.write_text(WAITS)
    process = subprocess.Popen([*client, script], stdout=subprocess.PIPE, text=True, **options)
    return process, int(process.stdout.readline())


def test_a_rank_is_killed_with_its_client(client, script):
    """As the agent kills what does not end."""
    process, pid = start_waiting(client, script)
    with process:
        process.kill()
    assert has_ended(pid)


def test_a_client_hands_on_a_signal_that_comes_before_its_rank(tmp_path):
    """This test is the server of a rank that sleeps."""
    address = str(tmp_path / "socket")
    source = Path(fork_client.__file__).read_text()
    command = [sys.executable, "-IS", f"-c{source}\nmain({address!r})", "train.py"]
    sleeping = [sys.executable, "-ISc", "import time; time.sleep(60)"]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        listener.settimeout(SECONDS)
        with (
            subprocess.Popen(sleeping, start_new_session=True) as rank,
            subprocess.Popen(command) as client,
            listener.accept()[0] as connection,
        ):
            # The client waits for the number of its rank.
            connection.settimeout(SECONDS)
            connection.recv(1)
            client.send_signal(signal.SIGUSR1)
            connection.sendall(f"{rank.pid}\n".encode())
            code = rank.wait(SECONDS)
            connection.sendall(f"{code}\n".encode())
            assert (code, client.wait(SECONDS)) == (-signal.SIGUSR1, -signal.SIGUSR1)


@pytest.mark.slow
def test_a_client_says_that_the_server_has_ended(script):
    """And its rank ends too."""
    with launch.serve_clients(1) as client:
        process, pid = start_waiting(client, script, stderr=subprocess.PIPE)
        with process:
            waiting = parent_of(pid)
            os.kill(parent_of(waiting), signal.SIGKILL)
            os.kill(waiting, signal.SIGKILL)
            errors = process.stderr.read()
        late = subprocess.run([*client, script], capture_output=True, text=True, timeout=SECONDS)
    text = "fshard.run: the process that ranks are forked from has ended. Start the job again.\n"
    assert (process.returncode, errors) == (late.returncode, late.stderr) == (1, text)
    assert has_ended(pid)


def test_ranks_draw_different_numbers_unless_they_are_seeded(client, script):
    script.write_text("import random, numpy; print(random.random(), numpy.random.rand())")
    draws = [subprocess.check_output([*client, script], timeout=SECONDS).split() for _ in range(2)]
    assert not {*draws[0]} & {*draws[1]}


@pytest.mark.parametrize(
    "module, reason",
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "started 1 threads"),
        pytest.param(
            "import torch; torch.cuda.is_initialized = lambda: True", "initialized CUDA", marks=pytest.mark.slow
        ),
    ],
    ids=["threads", "CUDA"],
)
def test_a_rank_starts_python_anew_where_a_fork_is_not_safe(script, monkeypatch, module, reason):
    """For example because of a module that a site loads in every process."""
    folder = script.parent
    (folder / "sitecustomize.py").write_text(f"import sys\nif 'fork_server' in str(sys.orig_argv):\n    {module}\n")
    script.write_text("import sys; print('torch' in sys.modules, sys.argv[1:])")
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
    with launch.serve_clients(1) as client:
        result = subprocess.run([*client, script, "one"], capture_output=True, text=True, timeout=SECONDS)
    assert (result.returncode, result.stdout) == (0, "False ['one']\n")
    assert result.stderr == f"fshard.run: this rank starts Python anew, because what it imports has {reason}.\n"


# Trains on two ranks, of which one fails at its first start, or at each.
TRAINS = """
import os, signal, sys
import torch, fshard as fs
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    total = fs.psum(torch.ones(()), fs.axis_of(mesh))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE")
    values = [sys.argv[1:], start, total.item(), torch.get_num_threads(), *map(os.environ.get, names)]
    sys.stdout.write(f"{values}\\n")
    if mesh.get_rank() == 1 and "raise" in sys.argv:
        raise ValueError("bad batch")
    if mesh.get_rank() == 1 and "kill" in sys.argv and start == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if "wait" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(sys.stdout.write("asked to end\\n") * 0))
        sys.stdout.write("ready\\n")
        signal.pause()
    fs.psum(torch.ones(()), fs.axis_of(mesh))

main()
"""
# The options, the program's arguments, and what the summary has to show.
LAUNCHES = [
    (["--max-restarts", "1"], ["kill"], ""),
    (["--redirects", "3", "--tee", "1"], ["raise"], r"ValueError: bad batch"),
    (["-m", "--local-ranks-filter", "1"], ["one", "two"], ""),
    (["--no-python"], [], ""),
    ([], ["wait"], "got signal: 15"),
]


def launch_by(module, options, arguments, script, folder):
    """Start two ranks; return the exit code, the lines of all ranks, the summary, and what is in files of logs."""
    program = ["train"] if "-m" in options else [sys.executable, script] if "--no-python" in options else [script]
    command = [sys.executable, "-m", module, "--standalone", "--nproc_per_node", "2", "--log-dir", folder, *options]
    process = subprocess.Popen(
        [str(part) for part in (*command, *program, *arguments)],
        cwd=script.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        lines = []
        while "wait" in arguments and lines.count("ready\n") < 2:
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()
        if lines:
            process.terminate()
        output, errors = process.communicate(timeout=SECONDS)
    logs = {}
    for path in folder.rglob("*.log"):
        logs["/".join(path.parts[-3:])] = path.read_text() if path.name == "stdout.log" else None
    return process.returncode, sorted([*lines, *output.splitlines(keepends=True)]), errors, logs


@pytest.mark.slow
@pytest.mark.parametrize("options, arguments, summary", LAUNCHES, ids=str)
def test_a_launch_is_that_of_torchrun(script, tmp_path, options, arguments, summary):
    """Restarts, logs, the file of an error, the environment and the exit code."""
    script.write_text(TRAINS)
    results = []
    for module in ("torch.distributed.run", "fshard.run"):
        folder = tmp_path / module
        folder.mkdir()
        code, lines, errors, logs = launch_by(module, options, arguments, script, folder)
        assert re.search(summary, errors, re.DOTALL), errors
        results.append((code, lines, logs))
    assert results[0] == results[1]
    assert results[0][1]
