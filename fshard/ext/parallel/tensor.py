"""Tensor parallelism of a module by the names of its submodules, with or without sequence parallelism.

Follows Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), and Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models" (arXiv:2205.05198).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard.ext.parallel.vocabulary import vocab_parallel_embedding
from fshard.extend import COUNT, check_arguments, check_axis, describe, expect, named_modules, named_parameters, refuse

API_NAME = "tensor_parallel"
STYLES = ("column", "row", "vocabulary", "gather", "split", "sequence")
# By style and name of a parameter the dim that is split. Other parameters are whole.
SPLIT_DIMS = MappingProxyType(
    {
        ("column", "weight"): 0,
        ("column", "bias"): 0,
        ("vocabulary", "weight"): 0,
        ("vocabulary", "bias"): 0,
        ("row", "weight"): 1,
    }
)
# What the split dim of a weight counts.
SIDES = MappingProxyType({"column": "outputs", "row": "inputs", "vocabulary": "rows"})
# Attributes by which a forward divides features into heads.
HEADS = frozenset({"heads", "n_head", "n_heads", "nhead", "num_heads", "num_attention_heads", "num_key_value_heads"})

PlanStyle = str | tuple[str, int]
Problem = tuple[str, str, str]


class Style(NamedTuple):
    """How one submodule is split; `parts` is the number of matrices that a "column" computes at once."""

    name: str
    parts: int


def tensor_parallel(
    module: nn.Module,
    axis: fs.Axis,
    plan: Mapping[str, PlanStyle],
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
    - "gather": a module, such as attention, whose first input is used by its "column" layers. The input is gathered or
      cast here once, instead of by each of the layers.
    - "split": the first layer, with `sequence_dim`; its first input is cut along that dim. From there on values between
      layers are pieces: a "gather", or a "column" outside of any, gathers its input, and a "row" reduce-scatters.
    - "sequence": a module that computes with pieces, such as a norm between layers, or one of queries inside "gather";
      its parameters are whole, and their gradients are summed.

    A forward may use the number of features in other ways, and a plan may name the wrong matrix as a fused one. Nothing
    detects that: compare the loss of a small batch with the module's own.

    Args:
        module: The module, which is not changed.
        axis: The mesh axis, whose ranks have the same batch.
        plan: Styles by glob patterns of submodules' names, in which `*` matches dots too. The first match counts, and
            submodules without one stay whole.
        sequence_dim: The dim of time, counted from the front, to split between layers; None splits none.
        divide: Glob patterns of attributes that count heads or features, such as "blocks.*.heads"; these are divided by
            axis.size. A number of heads next to a "column" must be named. Pass `()` if the forward takes all such
            numbers from shapes, as models of transformers do.

    Returns:
        A copy of the module that shares its parameters, for `functionalize`, and a transform that splits them. Compose
        it behind a strategy: `model.init(fs.compose(fs.zero3(mesh), split))`.

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
    check_axis(API_NAME, axis)
    expect(isinstance(module, nn.Module), API_NAME, "module to be an nn.Module", describe(module))
    check_arguments(API_NAME, COUNT, sequence_dim=sequence_dim)
    styles = _match_plan(module, plan)
    counts = _match_counts(module, styles, divide)
    dims = _find_split_dims(module, styles)
    problems = [
        *_find_misfits(module, styles, axis),
        *[(name, str(count), f"a multiple of {axis.size}") for name, count in counts.items() if count % axis.size],
        *_find_uneven_ties(module, dims),
    ]
    refuse(f"{API_NAME}: the plan does not fit the module", problems, "change the plan, or the sizes of the module")
    is_cut = sequence_dim is None or any(style.name == "split" for style in styles.values())
    expect(is_cut, API_NAME, "plan to have a module of style 'split' with sequence_dim", "none", "name the first layer")
    tensors = (*module.parameters(), *module.buffers())
    parallel = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    submodules = dict(named_modules(parallel))
    for name, count in counts.items():
        path, _, key = name.rpartition(".")
        setattr(submodules[path], key, count // axis.size)
    gather_prefixes = tuple(f"{path}." for path, style in styles.items() if style.name == "gather")
    for path, style in styles.items():
        is_inside = path.startswith(gather_prefixes)
        layer = _Layer(submodules[path], axis, sequence_dim, style.parts, is_inside)
        forward = layer.make_forward(style.name)
        if forward is not None:
            layer.module.__dict__["forward"] = forward
    return parallel, _make_split(module, axis, dims)


def _make_split(module: nn.Module, axis: fs.Axis, dims: Mapping[str, int | None]) -> fs.ShardTransform:
    """Make the transform that splits each parameter along its dim."""
    split: fs.ShardTransform | None = None
    for dim in (0, 1):
        names = tuple(escape(name) for name, _ in named_parameters(module) if dims[name] == dim)
        if names:
            split = fs.masked(fs.split_dim(axis, dim=dim), names, otherwise=split)
    return split or fs.compose()


class _Layer(NamedTuple):
    """A submodule of the copy, and how its forward communicates.

    Attributes:
        module: The submodule.
        axis: The axis that its parameters are split over.
        dim: The dim of time, which is split between layers; None if it is not.
        parts: The number of matrices that a "column" computes at once.
        is_inside: Whether it is inside a module of style "gather".
    """

    module: Any
    axis: fs.Axis
    dim: int | None
    parts: int
    is_inside: bool

    def make_forward(self, style: str) -> Callable[..., Any] | None:
        """Make the forward of a style; None if the submodule's own forward does not change."""
        original = self.module.forward
        # Without sequence parallelism values between layers agree.
        are_pieces = self.dim is not None
        match style:
            case "column":
                return self.run_column
            case "row":
                return self.run_row
            case "vocabulary" if isinstance(self.module, nn.Embedding):
                # The number of rows of the full weight: when the forward runs, the module has this rank's piece.
                return partial(self.run_embedding, len(self.module.weight))
            case "vocabulary":
                return self.run_head
            case "gather":
                return partial(self.run_on_first, self.enter, original)
            case "sequence" if self.is_inside or are_pieces:
                return partial(self.run_on_pieces, original)
            case "split" if are_pieces:
                return partial(self.run_on_first, self.cut, original)
        return None

    def run_on_first(
        self,
        convert: Callable[[torch.Tensor], torch.Tensor],
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a forward with its first input converted."""
        name = next(iter(kwargs), "")
        x: Any = args[0] if args else kwargs.get(name)
        dims = 0 if self.dim is None else self.dim + 1
        has_dims = isinstance(x, torch.Tensor) and x.dim() >= dims
        expected = f"the first input of a module of style 'gather' or 'split' to be a tensor of {dims} or more dims"
        expect(has_dims, API_NAME, expected, describe(x))
        if args:
            return forward(convert(x), *args[1:], **kwargs)
        return forward(**{**kwargs, name: convert(x)})

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Make a value that agrees between ranks, or is in pieces, ready for split layers."""
        if self.dim is None:
            return fs.pcast(x, self.axis, to="varying")
        return fs.all_gather(x, self.axis, self.dim)

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Cut out this rank's piece of time."""
        assert self.dim is not None
        size = x.shape[self.dim]
        ranks = self.axis.size
        expected = f"size of dim {self.dim} to be a multiple of {ranks}, the ranks of {self.axis.name!r}"
        expect(size % ranks == 0, API_NAME, expected, f"{size}", "pad the dim")
        pieces = fs.pcast(x, self.axis, to="varying").chunk(ranks, self.dim)
        return pieces[fs.axis_index(self.axis)]

    def run_column(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_inside:
            x = self.enter(x)
        out = F.linear(x, self.module.weight, self.module.bias)
        if self.parts == 1 or self.axis.size == 1:
            return out
        return self.exchange_parts(out)

    def exchange_parts(self, out: torch.Tensor) -> torch.Tensor:
        """Send the pieces of k matrices to the ranks that use them.

        Each of n ranks has computed k pieces in a row of all k * n. Piece i is used by rank i % n.
        """
        parts = self.parts
        ranks = self.axis.size
        rank = fs.axis_index(self.axis)
        all_users = list(range(ranks)) * parts
        users_by_rank = [all_users[i : i + parts] for i in range(0, len(all_users), parts)]
        users = users_by_rank[rank]
        # [..., k * size] -> k of [size, ...], in the order of the ranks that use them
        local_pieces = out.movedim(-1, 0).chunk(parts)
        order = sorted(range(parts), key=users.__getitem__)
        rows = torch.cat([local_pieces[i] for i in order])
        size = len(rows) // parts
        send = [size * users.count(user) for user in range(ranks)]
        receive = [size * other_users.count(rank) for other_users in users_by_rank]
        received: torch.Tensor = fs.ragged_all_to_all(rows, self.axis, send, receive)
        # [k * size, ...] -> [..., k * size]
        return received.movedim(0, -1).contiguous()

    def run_row(self, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, self.module.weight)
        bias = self.module.bias
        if self.dim is None:
            out = fs.psum_invariant(out, self.axis)
        else:
            out = fs.reduce_scatter(out, self.axis, self.dim)
            if bias is not None:
                bias = fs.pcast(bias, self.axis, to="varying")
        if bias is None:
            return out
        return out + bias

    def run_embedding(self, rows: int, ids: torch.Tensor) -> torch.Tensor:
        out = vocab_parallel_embedding(ids, self.module.weight, self.axis, vocab_size=rows)
        padding = self.module.padding_idx
        if padding is None:
            return out
        is_padding = ids == padding
        # The row of padding has no gradient.
        return torch.where(is_padding[..., None], out.detach(), out)

    def run_head(self, x: torch.Tensor) -> torch.Tensor:
        return fs.all_gather_invariant(self.run_column(x), self.axis, x.dim() - 1)

    def run_on_pieces(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward with parameters that are cast to varying, which sums their gradients."""
        attributes = self.module.__dict__
        parameters = attributes["_parameters"]
        attributes["_parameters"] = fs.pcast(dict(parameters), self.axis, to="varying")
        try:
            return forward(*args, **kwargs)
        finally:
            attributes["_parameters"] = parameters


def _match_plan(module: nn.Module, plan: Any) -> dict[str, Style]:
    """Find the style of each submodule that a plan names."""
    is_plan = isinstance(plan, Mapping) and plan and all(isinstance(pattern, str) for pattern in plan)
    expect(is_plan, API_NAME, "plan to be a dict of styles by patterns of submodules' names", f"{plan!r:.100}")
    styles: dict[str, Style] = {}
    for pattern, given in plan.items():
        is_pair = isinstance(given, tuple) and len(given) == 2
        name, parts = given if is_pair else (given, 1)
        is_style = isinstance(name, str) and name in STYLES
        is_count = type(parts) is int and parts > 0 and (parts == 1 or name == "column")
        expected = f"plan[{pattern!r}] to be one of {STYLES}, or ('column', k)"
        expect(is_style and is_count, API_NAME, expected, f"{given!r:.60}")
        paths = [path for path, _ in named_modules(module) if path and fnmatchcase(path, pattern)]
        expect(paths, API_NAME, f"plan[{pattern!r}] to match a submodule", "no match", "name some of named_modules()")
        # The first pattern that matches counts.
        styles = dict.fromkeys(paths, Style(name, parts)) | styles
    return styles


def _match_counts(module: nn.Module, styles: Mapping[str, Style], divide: Any) -> dict[str, int]:
    """Find the attributes to divide, and refuse a plan that splits heads and does not say which numbers count them."""
    numbers = {}
    for path, submodule in named_modules(module):
        for key, value in vars(submodule).items():
            if type(value) is int:
                numbers[f"{path}.{key}".lstrip(".")] = value
    if divide is None:
        _check_heads(numbers, styles)
        return {}
    patterns = (divide,) if isinstance(divide, str) else divide
    are_patterns = isinstance(patterns, list | tuple) and all(isinstance(pattern, str) for pattern in patterns)
    expect(are_patterns, API_NAME, "divide to be patterns of attributes' names", f"{divide!r:.60}")
    counts: dict[str, int] = {}
    for pattern in patterns:
        names = [name for name in numbers if fnmatchcase(name, pattern)]
        expected = "divide to match attributes that are whole numbers"
        expect(names, API_NAME, expected, f"{pattern!r}, which matches none")
        counts |= {name: numbers[name] for name in names}
    return counts


def _check_heads(names: Iterable[str], styles: Mapping[str, Style]) -> None:
    """Refuse numbers of heads next to a "column"."""
    parents = {path.rpartition(".")[0] for path, style in styles.items() if style.name == "column"}
    heads = []
    for name in names:
        parent, _, key = name.rpartition(".")
        if parent in parents and key in HEADS:
            heads.append(name)
    remedy = "pass divide=, or divide=() if the forward takes the number of heads from shapes"
    expect(not heads, API_NAME, f"divide to say whether to divide {', '.join(heads[:3])}", "None", remedy)


def _find_split_dims(module: nn.Module, styles: Mapping[str, Style]) -> dict[str, int | None]:
    """Find the dim along which each parameter is split, under each of its names; None if it is whole."""
    submodules = dict(named_modules(module, remove_duplicate=False))
    names = {submodules[path]: style.name for path, style in styles.items()}
    dims = {}
    for name, _ in named_parameters(module, remove_duplicate=False):
        path, _, key = name.rpartition(".")
        style = names.get(submodules[path], "")
        dims[name] = SPLIT_DIMS.get((style, key))
    return dims


def _find_misfits(module: nn.Module, styles: Mapping[str, Style], axis: fs.Axis) -> Iterator[Problem]:
    """Find submodules that their styles are not for."""
    submodules = dict(named_modules(module))
    for path, style in styles.items():
        submodule = submodules[path]
        if style.name == "sequence":
            if any(list(child.parameters()) for child in submodule.children()):
                yield path, "has submodules with parameters, which style 'sequence' would leave out", ""
        elif style.name == "gather":
            for outer, other_style in styles.items():
                if other_style.name == "gather" and path.startswith(f"{outer}."):
                    yield path, f"has style 'gather', and is inside {outer!r}, which has it too", ""
        elif style.name in SIDES:
            yield from _find_layer_misfits(path, submodule, style, axis)


def _find_layer_misfits(
    path: str,
    submodule: nn.Module,
    style: Style,
    axis: fs.Axis,
) -> Iterator[Problem]:
    """Find why a layer cannot be split."""
    name = style.name
    classes = (nn.Linear, nn.Embedding) if name == "vocabulary" else (nn.Linear,)
    forward = vars(submodule).get("forward", type(submodule).forward)
    has_forward_of_class = any(isinstance(submodule, cls) and forward is cls.forward for cls in classes)
    parameters = dict(submodule.named_parameters(recurse=False))
    if not has_forward_of_class or not parameters.keys() <= {"weight", "bias"}:
        texts = " or ".join(f"nn.{cls.__name__}" for cls in classes)
        yield path, type(submodule).__name__, f"an {texts} for style {name!r}"
    elif isinstance(submodule, nn.Embedding) and (submodule.max_norm is not None or submodule.scale_grad_by_freq):
        yield path, f"has max_norm or scale_grad_by_freq, which style {name!r} does not support", ""
    else:
        size = parameters["weight"].shape[SPLIT_DIMS[name, "weight"]]
        multiple = style.parts * axis.size
        if size % multiple:
            yield path, str(size), f"a multiple of {multiple} {SIDES[name]}"


def _find_uneven_ties(module: nn.Module, dims: Mapping[str, int | None]) -> Iterator[Problem]:
    """Find tied parameters that one of their names splits in another way than the first one."""
    first_names: dict[int, str] = {}
    for name, parameter in named_parameters(module, remove_duplicate=False):
        first_name = first_names.setdefault(id(parameter), name)
        if dims[name] != dims[first_name]:
            way = _describe_split(dims[name])
            yield name, f"is {way}, but tied to {first_name}, which is {_describe_split(dims[first_name])}", ""


def _describe_split(dim: int | None) -> str:
    if dim is None:
        return "whole"
    return f"split by dim {dim}"
