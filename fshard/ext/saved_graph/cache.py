"""Cached graphs: files in which a program that is started again finds the graphs that it traced before."""

import os
import platform
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fshard as fs
from fshard.ext.saved_graph import LoadedFunction, encode_program
from fshard.ext.saved_graph.file import locate_file, name_source, read_file, write_file
from fshard.ext.saved_graph.identity import are_sources_equal, compute_identity, find_late_changes, list_sources
from fshard.extend import Jitted, Program, expect, read_environment

# Names of variables that differ between a launch and a restart, or between terminals, or that a trace of torch sets.
# They count where code names them.
_OF_RANKS = r"(\w+_)?(RANK|PID|PORT|ADDR|HOST|HOSTNAME|JOB_?ID)"
_OF_LAUNCHERS = r"(TORCHELASTIC|MASTER|FSHARD|SLURM|PMI|PMIX|OMPI|PBS|LSB|RAY)\w*"
_OF_TERMINALS = r"(SSH|XDG|TERM|TMUX|INVOCATION|JOURNAL|PYTEST|TORCHINDUCTOR)\w*|_|SHLVL|PWD|OLDPWD|WINDOWID"
_OF_LAUNCHES = re.compile("|".join((_OF_RANKS, _OF_LAUNCHERS, _OF_TERMINALS)))
# Files of each rank that stay in the directory: programs have a few signatures, and versions of code a few of these.
_KEPT = 32


def graph_cache(directory: str | Path) -> "GraphCache":
    """Keep the graphs of jitted functions in files, so that a program that is started again does not trace them.

    A graph is loaded only if all that its trace could read is the same: the code, the values that the function closes
    over or finds in attributes and globals, the arguments but for tensors' values, the options of `jit`, `sys.argv`,
    the environment but for variables of launchers and terminals that the code does not name, the files of all modules
    but Python's and torch's, and the versions of these two. Otherwise the function is traced, and its new graph stored.
    What a trace reads elsewhere, such as in a file or from a clock, is not seen: pass it as an argument.

    Args:
        directory: Where each rank keeps files of its own, of JSON. A file decides what is computed, so use a directory
            that only you can write to.

    Returns:
        The cache, for `fs.jit(step, cache=...)`. It warns if a file is damaged, or if a function cannot be stored or
        told apart from others, and why; then the function is traced.

    >>> import tempfile, torch, fshard as fs
    >>> cache, x = fs.graph_cache(tempfile.mkdtemp()), torch.zeros(2)
    >>> def step(x):
    ...     return {"y": x.cos()}
    >>> steps = [fs.jit(step, cache=cache), fs.jit(step, cache=cache)]
    >>> [jitted(x)["y"].tolist() for jitted in steps], [jitted.traces for jitted in steps]
    ([[1.0, 1.0], [1.0, 1.0]], [['the first call'], ['read from a file']])
    """
    is_path = isinstance(directory, str | os.PathLike) and str(directory)
    expect(is_path, "graph_cache", "directory to be a path", f"{directory!r:.40}")
    return GraphCache(Path(directory))


@dataclass(frozen=True)
class GraphCache:
    """What `graph_cache` returns.

    Attributes:
        directory: Where the files are.
    """

    directory: Path

    def __call__(
        self, jitted: Jitted, signature: Any, flat: Any
    ) -> tuple[Program | None, Callable[[Program], None] | None]:
        """Read the program of a call, if there is one, and return a function that writes another one."""
        try:
            path = self._find_path(jitted, signature, flat)
        except Exception as error:
            _warn(f"{getattr(jitted, '__name__', 'a function')} is traced in each process", error)
            return None, None
        program = None
        try:
            program = _read(path, signature, flat)
        except Exception as error:
            _warn("a file is not used, and the function is traced", error)
        return program, partial(self._store, path, signature, flat)

    def _find_path(self, jitted: Jitted, signature: Any, flat: Any) -> Path:
        """Find the file of a call. Its name is a digest of all that the graph depends on but for files of source."""
        variables = {name: text for name, text in read_environment().items() if not _OF_LAUNCHES.fullmatch(name)}
        versions = sys.version, fs.__version__, torch.__version__, torch.version.git_version
        machine = platform.machine(), torch.backends.cpu.get_cpu_capability()
        values = jitted, tuple(signature), sys.argv, sorted(variables.items()), versions, machine
        return locate_file(self.directory / compute_identity(values, flat.axes))

    def _store(self, path: Path, signature: Any, flat: Any, program: Program) -> None:
        try:
            # Modules that the trace has imported are among these.
            sources = list_sources()
            edited = find_late_changes(sources)
            if edited:
                raise ValueError(f"{edited[0]} was changed after this process had started")
            write_file(path, encode_program(signature, program, flat, sources))
            self._remove_old(path.name)
        except Exception as error:
            _warn("a graph is not stored", error)

    def _remove_old(self, name: str) -> None:
        """Remove the oldest files of this rank."""
        paths = sorted(self.directory.glob(f"*/{name}"), key=os.path.getmtime)
        for path in paths[:-_KEPT]:
            path.unlink(missing_ok=True)


def _read(path: Path, signature: Any, flat: Any) -> Program | None:
    """Read the program of a call; None where there is no file, or other files of source."""
    saved = read_file(path) if path.exists() else None
    if saved is None or not are_sources_equal(saved.sources):
        return None
    return LoadedFunction(name_source(path), saved).make_program(signature, flat)


def _warn(outcome: str, error: Exception) -> None:
    warnings.warn(f"graph_cache: {outcome}: {error}", stacklevel=2)
