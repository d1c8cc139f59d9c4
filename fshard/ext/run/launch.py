"""python -m fshard.run: torchrun, whose ranks are forked from a process that has imported torch and fshard.

    python -m fshard.run --nproc_per_node 2 --max-restarts 3 train.py --steps 100

Options, environment, rendezvous, restarts, files of logs and errors and exit codes are torchrun's, because torchrun's
own agent runs. Only the command that it starts for a rank differs. `fork_client.py` starts in 30 ms, asks the fork
server for the rank, and hands on its signals and its exit code.

A rank that starts again, after a failure, therefore begins with its first line of code in 0.1 s, where Python would
import torch, and later `torch._dynamo`, for two to three seconds. The program is read anew at each start, so a change
of its source counts. A change of torch or fshard does not count until the launcher starts again.

- The server is a process of its own, which is started before the agent has any thread and starts none. It looks at its
  threads and at CUDA before each fork (`fork_server.explain_cold_start`), and starts Python anew if a fork is not safe.
- With `--no-python`, `--run-path`, or an interpreter in `PYTHON_EXEC`, ranks start as torchrun starts them.
- A rank is a child of the server, and the process that torchrun's summary names is the client. In a list of
  processes the rank's command is the server's.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import AF_UNIX, SOMAXCONN, socket

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record

from fshard.ext.run import fork_client, fork_server

# Seconds that the server may take to end after the agent.
END_TIME = 5.0


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """Run a program on some ranks, as torchrun does.

    Args:
        arguments: The command line of torchrun; by default this process's.

    Raises:
        SystemExit: if the arguments are wrong.
        ChildFailedError: if a rank fails more often than it may be started again.
    """
    args = torchrun.parse_args(arguments)
    if args.no_python or args.run_path or "PYTHON_EXEC" in os.environ:
        torchrun.run(args)
        return
    program = ["-m"] * args.module + [args.training_script, *args.training_script_args]
    args.no_python = True
    args.module = False
    with serve_clients(torchrun.determine_local_world_size(args.nproc_per_node)) as (python, *options):
        args.training_script = python
        # The first argument without a hyphen is the program's, by which torch names a job that failed.
        args.training_script_args = [*options, *program]
        torchrun.run(args)


@contextmanager
def serve_clients(ranks: int) -> Iterator[list[str]]:
    """Let a fork server run for clients that this process starts, in a context.

    Args:
        ranks: How many run at once. Libraries of several use one thread each, as under torchrun.

    Yields:
        The command of a client, which the rank's program and its arguments follow.
    """
    # What a rank's libraries read as they are loaded; torchrun sets the first too.
    defaults = {"OMP_NUM_THREADS": "1"} if ranks > 1 else {}
    # numpy starts its threads at the import, and torch asks CUDA for its devices in a way that a fork does not survive.
    defaults |= {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with tempfile.TemporaryDirectory(prefix="fshard-run-") as folder, socket(AF_UNIX) as listener:
        path = str(Path(folder) / "socket")
        listener.bind(path)
        listener.listen(SOMAXCONN)
        client = f"exec(compile(open({fork_client.__file__!r}).read(), 'fork_client', 'exec')); main({path!r})"
        server = subprocess.Popen(
            [sys.executable, "-u", "-m", fork_server.__name__, str(listener.fileno())],
            env=defaults | os.environ,
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        # Otherwise clients would wait for a server that has ended.
        listener.close()
        try:
            yield [sys.executable, "-IS", f"-c{client}"]
        finally:
            # The server ends with its input.
            with suppress(subprocess.TimeoutExpired):
                server.communicate(timeout=END_TIME)
