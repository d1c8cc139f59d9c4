"""Tensor parallelism of a module by the names of its submodules, with or without sequence parallelism.

Follows Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), and Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models" (arXiv:2205.05198).
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard.ext.parallel.vocabulary import vocab_parallel_embedding
from fshard.extend import check_axis, describe, expect, named_modules, named_parameters, refuse

WHAT = "tensor_parallel"
STYLES = ("column", "row", "vocabulary", "gather", "split", "sequence")
# Attributes by which a forward divides features into heads.
HEADS = frozenset({"heads", "n_head", "n_heads", "nhead", "num_heads", "num_attention_heads", "num_key_value_heads"})

Given = str | tuple[str, int]


class Style(NamedTuple):
    """How one submodule is split; `parts` is the number of matrices that a "column" computes at once."""

    name: str
    parts: int


def tensor_parallel(
    module: nn.Module,
    axis: fs.Axis,
    plan: Mapping[str, Given],
    *,
    sequence_dim: int | None = None,
    divide: str | Sequence[str] | None = None,
) -> tuple[nn.Module, fs.ShardTransform]:
    """Split a module's layers over a mesh axis by a plan of their names; its forward stays as it is.

    The styles of a plan:

    - "column": an nn.Linear whose outputs are split; its input agrees between ranks. ("column", k) is one that computes
      k matrices at once, such as queries, keys and values: each rank gets a piece of each, by an all-to-all of outputs.
    - "row": an nn.Linear whose inputs are split; outputs are summed, and the bias is added once.
    - "vocabulary": an nn.Embedding, or the nn.Linear of a head, split by rows; its output agrees between ranks. A head
      of style "column" gives each rank its part of the logits, for `vocab_parallel_cross_entropy(logits, None, ...)`.
    - "gather": a module whose first input its "column" layers use, such as attention; the input is handed over here
      once, rather than by each of the layers.
    - "split": the first layer, with `sequence_dim`; its first input is cut along that dim. From there on values between
      layers are pieces: a "gather", or a "column" outside of any, gathers its input, and a "row" reduce-scatters.
    - "sequence": a module that computes with pieces, such as a norm between layers, or one of queries inside "gather";
      its parameters are whole, and their gradients are summed.

    Nothing tells a forward that computes with the number of features otherwise, or a fused matrix that the plan takes
    for one: compare the loss of a small batch with the module's own.

    Args:
        module: The module, which is not changed.
        axis: The mesh axis, whose ranks have the same batch.
        plan: Styles by glob patterns of submodules' names, in which `*` matches dots too: the first match counts,
            and others stay whole.
        sequence_dim: The dim of time, counted from the front, to split between layers; None splits none.
        divide: Glob patterns of attributes that count what is split, such as "blocks.*.heads", which are divided by
            axis.size. A number of heads next to a "column" must be named; `()` says that the forward takes all such
            numbers from shapes, as models of transformers do.

    Returns:
        A copy of the module that shares its parameters, for `functionalize`, and a transform that splits them, to be
        composed behind a strategy: `model.init(fs.compose(fs.zero3(mesh), split))`.

    Raises:
        ValueError: with the names of submodules that do not fit: a pattern matches nothing, a style is for other
            modules, a dim does not divide, a tied parameter would be split in two ways, or a number of heads is not
            named.

    >>> import fshard as fs
    >>> mesh = fs.init_mesh({"shard": -1, "tp": 1}, device="cpu")
    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    >>> parallel, split = fs.tensor_parallel(mlp, fs.axis_of(mesh, "tp"), {"0": "column", "2": "row"})
    >>> params = fs.functionalize(parallel).init(fs.compose(fs.zero3(mesh), split))
    >>> params["0.weight"].spec.partition, params["2.weight"].spec.partition
    (P('tp'), P(None, 'tp'))
    """
    check_axis(WHAT, axis)
    expect(isinstance(module, nn.Module), WHAT, "module to be an nn.Module", describe(module))
    known = sequence_dim is None or (type(sequence_dim) is int and sequence_dim >= 0)
    expect(known, WHAT, "sequence_dim to be a dim counted from the front, or None", f"{sequence_dim!r:.40}")
    styles = _styles(module, plan)
    counts, dims = _counts(module, styles, divide), _dims(module, styles)
    problems = [
        *((path, *found) for path, style in styles.items() if (found := _misfit(module, path, style, axis))),
        *((name, str(n), f"a multiple of {axis.size}") for name, n in counts.items() if n % axis.size),
        *((path, f"one inside {around!r}", "a 'gather' outside of others") for path, around in _nested(styles)),
        *_tied(module, dims),
    ]
    refuse(f"{WHAT}: the plan does not fit the module", problems, "change the plan, or the sizes of the module")
    cut = sequence_dim is None or any(style.name == "split" for style in styles.values())
    expect(cut, WHAT, "plan to have a module of style 'split' with sequence_dim", "none", "name the first layer")
    made = copy.deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})
    submodules = dict(named_modules(made))
    for name, number in counts.items():
        path, _, key = name.rpartition(".")
        setattr(submodules[path], key, number // axis.size)
    gathers = tuple(f"{path}." for path, style in styles.items() if style.name == "gather")
    for path, (name, parts) in styles.items():
        inside = path.startswith(gathers)
        layer = _Layer(submodules[path], axis, sequence_dim, parts, inside)
        # Without sequence parallelism values between layers agree.
        if name not in ("sequence", "split") or sequence_dim is not None or (inside and name == "sequence"):
            layer.module.__dict__["forward"] = layer.forward(name)
    split: fs.ShardTransform | None = None
    own = {name: dim for name, _ in named_parameters(module) if (dim := dims[name]) is not None}
    for dim in dict.fromkeys(own.values()):
        names = tuple(escape(name) for name, other in own.items() if other == dim)
        split = fs.masked(fs.split_dim(axis, dim=dim), names, otherwise=split)
    return made, split or fs.compose()


class _Layer(NamedTuple):
    """A submodule of the copy, and how its forward communicates."""

    module: Any
    axis: fs.Axis
    dim: int | None
    parts: int
    inside: bool

    def forward(self, style: str) -> Callable[..., Any]:
        own = self.module.forward
        styles: dict[str, Callable[..., Any]] = {
            "column": self.column,
            "row": self.row,
            "vocabulary": partial(self.embed, len(self.module.weight)) if self.is_embedding() else self.head,
            "gather": partial(self.on_first, self.enter, own),
            "split": partial(self.on_first, self.cut, own),
            "sequence": partial(self.on_pieces, own),
        }
        return styles[style]

    def on_first(self, f: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = next(iter(kwargs), "")
        x = args[0] if args else kwargs.get(name)
        fits = isinstance(x, torch.Tensor) and (self.dim is None or x.dim() > self.dim)
        needed = "the first input of a module of style 'gather' or 'split' to be a tensor"
        expect(fits, WHAT, needed if self.dim is None else f"{needed} with a dim {self.dim}", describe(x))
        return forward(f(x), *args[1:], **kwargs) if args else forward(**{**kwargs, name: f(x)})

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return fs.pcast(x, self.axis, to="varying") if self.dim is None else fs.all_gather(x, self.axis, self.dim)

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        assert self.dim is not None
        size, rest = divmod(x.shape[self.dim], self.axis.size)
        needed = f"size of dim {self.dim} to be a multiple of {self.axis.size}, the ranks of {self.axis.name!r}"
        expect(not rest, WHAT, needed, f"{x.shape[self.dim]}", "pad the dim")
        return fs.pcast(x, self.axis, to="varying").narrow(self.dim, fs.axis_index(self.axis) * size, size)

    def column(self, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x if self.inside else self.enter(x), self.module.weight, self.module.bias)
        return out if self.parts == 1 or self.axis.size == 1 else self.exchanged(out)

    def exchanged(self, out: torch.Tensor) -> torch.Tensor:
        """Send the pieces of k matrices, of which this rank has computed k in a row, to the ranks that use them."""
        k, n, own = self.parts, self.axis.size, fs.axis_index(self.axis)
        users = [[piece % n for piece in range(rank * k, rank * k + k)] for rank in range(n)]
        pieces = out.movedim(-1, 0).chunk(k)
        rows = torch.cat([pieces[i] for i in sorted(range(k), key=lambda i: users[own][i])])
        size = len(rows) // k
        send = [size * users[own].count(rank) for rank in range(n)]
        receive = [size * users[rank].count(own) for rank in range(n)]
        exchanged: torch.Tensor = fs.ragged_all_to_all(rows, self.axis, send, receive)
        return exchanged.movedim(0, -1).contiguous()

    def row(self, x: torch.Tensor) -> torch.Tensor:
        out, bias = F.linear(x, self.module.weight), self.module.bias
        if self.dim is None:
            out = fs.psum_invariant(out, self.axis)
        else:
            out, bias = (
                fs.reduce_scatter(out, self.axis, self.dim),
                bias if bias is None else fs.pcast(bias, self.axis, to="varying"),
            )
        return out if bias is None else out + bias

    def is_embedding(self) -> bool:
        return isinstance(self.module, nn.Embedding)

    def embed(self, rows: int, ids: torch.Tensor) -> torch.Tensor:
        out = vocab_parallel_embedding(ids, self.module.weight, self.axis, vocab_size=rows)
        padding = self.module.padding_idx
        return out if padding is None else torch.where((ids == padding)[..., None], out.detach(), out)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return fs.all_gather_invariant(self.column(x), self.axis, x.dim() - 1)

    def on_pieces(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        attributes = self.module.__dict__
        whole = attributes["_parameters"]
        own = {name: tensor for name, tensor in whole.items() if tensor is not None}
        attributes["_parameters"] = dict.fromkeys(whole) | fs.pcast(own, self.axis, to="varying")
        try:
            return forward(*args, **kwargs)
        finally:
            attributes["_parameters"] = whole


def _styles(module: nn.Module, plan: Any) -> dict[str, Style]:
    known = isinstance(plan, Mapping) and plan and all(isinstance(pattern, str) for pattern in plan)
    expect(known, WHAT, "plan to be a dict of styles by patterns of submodules' names", f"{plan!r:.100}")
    found: dict[str, Style] = {}
    for pattern, given in plan.items():
        style = given if isinstance(given, tuple) and len(given) == 2 else (given, 1)
        whole = type(style[1]) is int and style[1] > 0
        fits = isinstance(style[0], str) and style[0] in STYLES and whole and (style[1] == 1 or style[0] == "column")
        expect(fits, WHAT, f"plan[{pattern!r}] to be one of {STYLES}, or ('column', k)", f"{given!r:.60}")
        paths = [path for path, _ in named_modules(module) if path and fnmatchcase(path, pattern)]
        expect(paths, WHAT, f"plan[{pattern!r}] to match a submodule", "no match", "name some of named_modules()")
        found = dict.fromkeys(paths, Style(*style)) | found
    return found


def _counts(module: nn.Module, styles: Mapping[str, Style], divide: Any) -> dict[str, int]:
    """Find the attributes to divide; refuse to leave a number of heads as it is without being told so."""
    patterns = (divide,) if isinstance(divide, str) else () if divide is None else divide
    known = isinstance(patterns, list | tuple) and all(isinstance(pattern, str) for pattern in patterns)
    expect(known, WHAT, "divide to be patterns of attributes' names", f"{divide!r:.60}")
    numbers = {
        f"{path}.{key}".lstrip("."): value
        for path, submodule in named_modules(module)
        for key, value in vars(submodule).items()
        if type(value) is int
    }
    for pattern in patterns:
        found = any(fnmatchcase(name, pattern) for name in numbers)
        expect(found, WHAT, "divide to match attributes that are whole numbers", f"{pattern!r}, which matches none")
    around = {path.rpartition(".")[0] for path, style in styles.items() if style.name == "column"}
    heads = [name for name in numbers if name.rpartition(".")[0] in around and name.rpartition(".")[2] in HEADS]
    remedy = "pass divide=, or divide=() where the forward takes the number of heads from shapes"
    told = divide is not None or not heads
    expect(told, WHAT, f"divide to say whether {', '.join(heads[:3])} count what is split", "None", remedy)
    return {name: value for name, value in numbers.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _dims(module: nn.Module, styles: Mapping[str, Style]) -> dict[str, int | None]:
    """Find the dim that is split of each parameter, under each of its names."""
    submodules = dict(named_modules(module))
    by_module = {submodules[path]: style.name for path, style in styles.items()}
    rows = {"weight": 0, "bias": 0}
    by_style = {"column": rows, "vocabulary": rows, "row": {"weight": 1}}
    return {
        f"{path}.{key}".lstrip("."): by_style.get(by_module.get(submodule, ""), {}).get(key)
        for path, submodule in named_modules(module, remove_duplicate=False)
        for key, _ in submodule.named_parameters(recurse=False, remove_duplicate=False)
    }


def _misfit(module: nn.Module, path: str, style: Style, axis: fs.Axis) -> tuple[str, str] | None:
    """Describe a submodule that its style is not for, and the one expected."""
    submodule, name = dict(named_modules(module))[path], style.name
    if name == "sequence":
        inner = any(True for child in submodule.children() for _ in child.parameters())
        return ("submodules with parameters", f"a module of style {name!r} without") if inner else None
    if name in ("gather", "split"):
        return None
    classes = (nn.Linear, nn.Embedding) if name == "vocabulary" else (nn.Linear,)
    cls = next((cls for cls in classes if isinstance(submodule, cls)), None)
    plain = cls and type(submodule).forward is cls.forward and "forward" not in vars(submodule)
    own = dict(submodule.named_parameters(recurse=False))
    if not plain or not own.keys() <= {"weight", "bias"}:
        needed = " or ".join(f"nn.{cls.__name__}" for cls in classes)
        return type(submodule).__name__, f"an {needed} for style {name!r}"
    if isinstance(submodule, nn.Embedding) and (submodule.max_norm is not None or submodule.scale_grad_by_freq):
        return "max_norm or scale_grad_by_freq", f"an nn.Embedding of style {name!r} without"
    size, needs = own["weight"].shape[name == "row"], style.parts * axis.size
    sides = {"column": "outputs", "row": "inputs", "vocabulary": "rows"}
    return (str(size), f"a multiple of {needs} {sides[name]}") if size % needs else None


def _nested(styles: Mapping[str, Style]) -> Iterator[tuple[str, str]]:
    gathers = [path for path, style in styles.items() if style.name == "gather"]
    return ((path, around) for path in gathers for around in gathers if path.startswith(f"{around}."))


def _tied(module: nn.Module, dims: Mapping[str, int | None]) -> Iterator[tuple[str, str, str]]:
    """Find parameters that one place splits otherwise than another one uses them."""
    first: dict[int, str] = {}
    for name, parameter in named_parameters(module, remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if dims[name] != dims[other]:
            ways = ["whole" if dims[key] is None else f"split by dim {dims[key]}" for key in (name, other)]
            yield (name, ways[0], f"it {ways[1]}, as {other}, to which it is tied")
