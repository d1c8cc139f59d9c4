"""restore: read a checkpoint into a state of any layout, and refuse what is damaged."""

import os
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fshard import comm
from fshard.checkpoint import files
from fshard.checkpoint.alike import alike, check_call
from fshard.checkpoint.check import check_path
from fshard.checkpoint.format import MANIFEST, CheckpointError, Manifest, decode, digest, dtype_name, file_name
from fshard.checkpoint.layout import empty_like, local_of, shape_of
from fshard.checkpoint.progress import progress_bar
from fshard.checkpoint.read import Reader
from fshard.checks import check_flags, check_local, kind
from fshard.errors import Problem, leaf_error
from fshard.mesh import world
from fshard.tree import Flat, Mask, Tree, added, flatten, is_mask, is_sharded, means, names_of, unflatten

LABEL = "checkpoint.restore"


def latest(directory: str | PathLike[str]) -> int | None:
    """The step of the checkpoint that was saved last.

    Args:
        directory: Where checkpoints are kept.

    Returns:
        Its step, or None where there is no checkpoint.

    Raises:
        CheckpointError: if the file that says so is damaged, or cannot be read.
    """
    check_path("checkpoint.latest", "directory", directory)
    with files.named(Path(directory)):
        path = files.pointed(Path(directory))
    return None if path is None else files.step_of(path)


def restore(
    directory: str | PathLike[str],
    like: Tree,
    *,
    step: int | None = None,
    subtree: str = "",
    only: Mask | None = None,
    donate: bool = False,
    progress: bool = False,
) -> Tree:
    """Read a checkpoint, bitwise, into any layout, mesh and number of ranks. Every rank must call this.

    Each chunk that this rank needs a part of is read as a whole and compared with its checksum.

    Args:
        directory: Where checkpoints are kept.
        like: A tree as it shall be: leaves say which dtype, shape, layout and device; their values are not used and
            may be on the meta device, which stands for the default one.
        step: Which checkpoint; None takes the one saved last.
        subtree: The path under which `like` lies in what was saved, such as ".params" of a TrainState.
        only: Which leaves of `like` to read, by a pattern of their names such as "head.*", several, or a function of a
            name; others stay as they are. None reads all, and refuses a checkpoint that has more.
        donate: Read into the memory of `like`, whose values are lost, also where reading fails half-way; otherwise
            there is room for both.
        progress: Show a progress bar on the first rank. Needs tqdm.

    Returns:
        A tree of the structure, specs, dtypes and devices of `like`.

    Raises:
        ValueError: on every rank alike, with every leaf that the checkpoint lacks or has otherwise; dtypes are never
            changed silently.
        CheckpointError: on every rank alike, if there is no such checkpoint or a file is damaged, by its name.
    """
    with alike(LABEL):
        check_path(LABEL, "directory", directory)
        check_flags(LABEL, donate=donate, progress=progress)
        bar = progress_bar(progress)
        flat = flatten(like)
        wanted = _wanted(flat, only)
        _check_arguments(flat, wanted, step, subtree)
    path, manifest = _open(Path(directory), step)
    names = [subtree + inner for inner in _inner(flat)]
    older = _older(flat, wanted, names, manifest)
    wanted = [take and i not in older for i, take in enumerate(wanted)]
    _check(flat, wanted, subtree, only is None, manifest, path)
    leaves = list(flat.leaves)
    need = [i for i, take in enumerate(wanted) if take and _is_tensor(flat.leaves[i])]
    for i in older:
        leaves[i] = empty_like(flat.leaves[i]).zero_()
    with alike(LABEL, path), Reader(path, manifest) as reader:
        reader.check(comm.rank(world()), world().size)
        total = sum(reader.cost(names[i], flat.leaves[i]) for i in need)
        with bar(f"restoring step {manifest.step}", total, comm.rank(world())) as tick:
            for i in need:
                leaves[i] = reader.read(names[i], flat.leaves[i], donate, tick)
    for i, take in enumerate(wanted):
        if take and not _is_tensor(flat.leaves[i]):
            leaves[i] = manifest.values[names[i]]
    return unflatten(flat.treedef, leaves)


def _wanted(flat: Flat, only: Mask | None) -> list[bool]:
    """For each leaf whether it is to be read."""
    if only is None:
        return [True] * len(flat.leaves)
    if not is_mask(only):
        raise ValueError(
            f"checkpoint.restore: expected only to be a pattern or several, or a function, got {kind(only)}"
        )
    names = names_of(flat.treedef)
    wanted = [means(only, name) for name in names]
    if not any(wanted):
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        raise ValueError(f"checkpoint.restore: the mask {only!r} means no leaf of {shown}; name some of these")
    return wanted


def _older(flat: Flat, wanted: list[bool], names: list[str], manifest: Manifest) -> list[int]:
    """The leaves that states did not have when a checkpoint was written which has none of them."""
    late = [i for i in added(flat.treedef) if wanted[i] and isinstance(flat.leaves[i], torch.Tensor)]
    return [] if any(names[i] in manifest.tensors for i in late) else late


def _check_arguments(flat: Flat, wanted: list[bool], step: Any, subtree: Any) -> None:
    """Refuse what no checkpoint can be read into."""
    if step is not None and type(step) is not int:
        raise ValueError(f"checkpoint.restore: expected step to be an int, or None for the latest, got {kind(step)}")
    if not isinstance(subtree, str):
        raise ValueError(f"checkpoint.restore: expected subtree to be a path such as '.params', got {kind(subtree)}")
    check_call(LABEL, flat)
    check_local(LABEL, flat)
    problems = []
    for path, leaf, take in zip(flat.paths, flat.leaves, wanted, strict=True):
        local = local_of(leaf) if take and _is_tensor(leaf) else None
        if local is None:
            continue
        if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout != torch.strided:
            layout = str(local.layout).removeprefix("torch.")
            problems.append(Problem(path, f"{kind(local)}, {layout}", "a plain strided tensor"))
        elif local.is_meta and torch.get_default_device().type == "meta":
            problems.append(Problem(path, "a meta tensor where the default device is meta too", "room for values"))
    if problems:
        remedy = "pass a tree of plain tensors or Sharded leaves, and call restore outside of torch.device('meta')"
        raise leaf_error("checkpoint.restore: nothing can be read into some leaves", problems, remedy)


def _open(directory: Path, step: int | None) -> tuple[Path, Manifest]:
    """Find the checkpoint, the same on every rank, and read what it says of itself."""
    with alike(LABEL, directory):
        found = files.pointed(directory) if step is None else files.of_step(directory, step)
        if found is None:
            raise CheckpointError(f"{directory}: expected a checkpoint that fs.checkpoint.save wrote, got none")
        data = files.read_manifest(found)
        manifest = _decoded(found, data)
        if manifest.step != files.step_of(found):
            needed = f"step {files.step_of(found)} as its name says"
            raise CheckpointError(f"{found}: expected {needed}, got step {manifest.step}; give it its own name back")
        _check_names(found, manifest)
    entries = {"(checkpoint)": f"{found.name} of digest {digest(data)}"}
    difference = comm.disagreement(entries, [world()], LABEL)
    if difference:
        raise leaf_error("checkpoint.restore: ranks read different checkpoints", [difference], "pass step=")
    return found, manifest


def _decoded(path: Path, data: bytes) -> Manifest:
    try:
        return decode(data)
    except CheckpointError as error:
        # What a hostile one is called may be long.
        raise CheckpointError(f"{path / MANIFEST}: {str(error)[:1000]}") from None


def _check_names(path: Path, manifest: Manifest) -> None:
    """Refuse a directory that holds other files than its manifest says."""
    needed = {MANIFEST, *map(file_name, range(len(manifest.files)))}
    found = set(os.listdir(path))
    for name in sorted(needed - found):
        raise CheckpointError(f"{path / name}: expected the file that the manifest names, got nothing")
    for name in sorted(found - needed):
        raise CheckpointError(f"{path / name}: found a file that the manifest does not name; move it elsewhere")


def _check(flat: Flat, wanted: list[bool], subtree: str, whole: bool, manifest: Manifest, path: Path) -> None:
    """Refuse, on every rank alike, leaves that the checkpoint has not, or has otherwise."""
    problems = []
    needed = {inner: _needed(leaf) for inner, leaf, take in zip(_inner(flat), flat.leaves, wanted, strict=True) if take}
    for inner, need in needed.items():
        found = _said(manifest, subtree + inner)
        if found != need:
            problems.append(Problem(subtree + inner or "(root)", found, need))
    if whole:
        there = {*manifest.tensors, *manifest.values}
        extra = sorted(name for name in there - {subtree + inner for inner in needed} if _is_under(name, subtree))
        problems += [Problem(name, _said(manifest, name), "nothing") for name in extra]
    difference = comm.disagreement({p.path: f"{p.got} instead of {p.expected}" for p in problems}, [world()], LABEL)
    problems = [difference] if difference else problems
    if problems:
        remedy = "restore into a state built as the one that was saved; only= and subtree= read parts of it"
        under = _place_of(needed, manifest)
        if under is not None and under != subtree:
            remedy = f"pass subtree={under!r}, where the checkpoint has such leaves"
        raise leaf_error(f"checkpoint.restore: {path.name} does not fit", problems, remedy)


def _inner(flat: Flat) -> list[str]:
    """The paths of leaves below the tree's own."""
    return ["" if path == "(root)" else path for path in flat.paths]


def _place_of(needed: dict[str, str], manifest: Manifest) -> str | None:
    """The shortest path of a subtree in which a checkpoint has all the leaves that are needed, if there is one."""
    first = next(iter(needed), "")
    # A tree that is one leaf may be any.
    places = [path.removesuffix(first) for path in manifest.tensors if path.endswith(first)] if first else []
    fitting = (
        place for place in places if all(_said(manifest, place + inner) == need for inner, need in needed.items())
    )
    return min(fitting, key=len, default=None)


def _is_under(name: str, subtree: str) -> bool:
    return name.startswith(subtree) and (not subtree or name[len(subtree) : len(subtree) + 1] in ("", ".", "["))


def _is_tensor(leaf: Any) -> bool:
    return is_sharded(leaf) or isinstance(leaf, torch.Tensor)


def _said(manifest: Manifest, name: str) -> str:
    if name in manifest.tensors:
        leaf = manifest.tensors[name]
        return f"{leaf.dtype}{list(leaf.shape)}"
    return kind(manifest.values[name]) if name in manifest.values else "nothing"


def _needed(leaf: Any) -> str:
    if _is_tensor(leaf):
        return f"{dtype_name(local_of(leaf))}{list(shape_of(leaf))}"
    return kind(leaf)
