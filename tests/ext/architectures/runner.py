"""Runs the checks of an architecture in processes of their own."""

import multiprocessing
import os
from typing import Any

from tests.ext.architectures.configs import Architecture

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ("torch", "torch._dynamo", "transformers.modeling_utils", "fshard", "tests.ext.architectures.checks")


def run(architecture: Architecture, names: list[str], connection: Any, verbose: bool) -> None:
    """Run checks of an architecture in this process, and send each result as it comes."""
    import torch

    from tests.ext.architectures.checks import check
    from tests.ext.architectures.models import UnfitError, case_of

    torch.set_num_threads(1)
    if not verbose:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    try:
        case = case_of(architecture)
    except UnfitError as error:
        connection.send(("unfit", str(error)))
        return
    size = sum(parameter.numel() for parameter in case.module().parameters())
    facts = {"dtype": str(case.dtype)[6:], "loss": case.loss, "parameters": size}
    facts["inputs"] = [key for key in case.batches[0][0] if key not in ("labels", "use_cache")]
    connection.send(("fit", facts))
    for name in names:
        connection.send((name, check(case, name)))


def examine(architecture: Architecture, names: list[str], timeout: float, verbose: bool = False) -> dict[str, Any]:
    """Run checks of an architecture in a process of its own, and in another those behind one that hangs or kills."""
    row: dict[str, Any] = {"name": architecture.name, "model": architecture.model, "task": architecture.task}
    checks: dict[str, Any] = {}
    rest = list(names)
    while rest:
        ours, theirs = CONTEXT.Pipe(False)
        process = CONTEXT.Process(target=run, args=(architecture, rest, theirs, verbose))
        process.start()
        theirs.close()
        problem = f"timeout: it took more than {timeout:g} s"
        try:
            while ours.poll(timeout):
                key, value = ours.recv()
                if key == "unfit":
                    row["unfit"], rest = value, []
                elif key == "fit":
                    row |= value
                else:
                    checks[key] = {"status": value[0], "text": value[1]}
                    rest.remove(key)
                if not rest:
                    break
        except EOFError:
            process.join()
            problem = f"the process ended with {process.exitcode}"
        process.kill()
        process.join()
        if rest:
            checks[rest.pop(0)] = {"status": "fail", "text": problem}
    return row | {"checks": checks}
