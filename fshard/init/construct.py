"""Construction: run a model's constructor again for its values, without holding the whole model."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fshard import _compat
from fshard.init.replay import OVERWRITING, TRUNC_NORMAL

Keep = Callable[[str, torch.Tensor], None]

# Their results may be large; small ones, such as positions, are made with values.
_LARGE = (
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.eye, torch.empty_strided),
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal),
)


class _Ref(NamedTuple):
    """A tensor by its memory's number and its place there."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Entry(NamedTuple):
    """An operator of a constructor: tensors without values are references."""

    run: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    out: Any
    random: bool
    overwrites: int | None


class _NotRepeatableError(Exception):
    """The constructor does what a tape cannot repeat in its order."""


class _OnMeta(TorchFunctionMode):
    """Makes tensors on the meta device, and does not show it: models of transformers draw nothing where they see it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LARGE and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


class _Tape(_compat.DispatchMode):
    """Writes down the operators of a constructor on the meta device that make or write memory."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[_Entry] = []
        self._numbers: dict[Any, int] = {}
        self._bytes: dict[int, int] = {}
        # So that no other memory gets the key of theirs.
        self._seen: list[torch.Tensor] = []
        self._late: dict[Any, torch.Tensor] = {}

    def refer(self, value: Any) -> Any:
        """Return references for tensors without values, in lists too."""
        if isinstance(value, list | tuple):
            return [self.refer(part) for part in value]
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return value
        key = _compat.storage_key(value)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._seen.append(value)
            self._bytes[self._numbers[key]] = value.untyped_storage().nbytes()
        place = tuple(value.shape), tuple(value.stride()), int(value.storage_offset())
        return _Ref(self._numbers[key], *place, value.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = set(self._numbers.values())
        given = self.refer(args)
        random = torch.Tag.nondeterministic_seeded in func.tags
        writes = any(argument.written for argument in _compat.arguments_of(func) or [])
        name = func.__name__.partition(".")[0]
        if not _refs(given) and self._is_late(func, args, random):
            # A tensor on a device, as torch.Tensor(3) is: what it holds waits for its turn too.
            if not writes or not isinstance(args[0], torch.Tensor):
                raise _NotRepeatableError(f"{func} draws, or reads what is drawn, while it constructs")
            self._late[_compat.storage_key(args[0])] = args[0]
            self._write(name, func, given, kwargs, None, random)
            return args[0]
        if _refs(given) and kwargs.get("device") is not None:
            # Conversions to a device: it has no values yet.
            kwargs = {**kwargs, "device": torch.device("meta")}
        out = func(*args, **kwargs)
        refs = [*_refs(given), *_refs(self.refer(out))]
        if not refs:
            return out
        if writes or any(ref.memory not in known for ref in _refs(self.refer(out))):
            self._write(name, func, given, {key: self.refer(value) for key, value in kwargs.items()}, out, random)
        return out

    def _is_late(self, func: Any, args: Any, random: bool) -> bool:
        """Whether an operator on tensors with values draws, or takes more than a view of what is drawn later."""
        tensors = [part for part in args if isinstance(part, torch.Tensor)]
        arguments = _compat.arguments_of(func) or []
        is_view = any(argument.aliased for argument in arguments) and not any(
            argument.written for argument in arguments
        )
        return (random and bool(tensors)) or (
            not is_view and any(_compat.storage_key(tensor) in self._late for tensor in tensors)
        )

    def trunc_normal(
        self, own: Callable[..., Any], tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any
    ) -> torch.Tensor:
        """Write torch.nn.init.trunc_normal_ down as one operator, because what it does depends on values."""
        if not tensor.is_meta or generator is not None:
            raise _NotRepeatableError("trunc_normal_ draws with other means than a seed while it constructs")
        self._write(TRUNC_NORMAL, own, self.refer([tensor, mean, std, a, b, generator]), {}, None, True)
        return tensor

    def _write(self, name: str, run: Any, given: Any, kwargs: dict[str, Any], out: Any, random: bool) -> None:
        refs = _refs(given)
        whole = bool(refs) and _numel(refs[0]) * refs[0].dtype.itemsize == self._bytes[refs[0].memory]
        alone = bool(refs) and all(ref.memory != refs[0].memory for ref in [*refs[1:], *_refs(list(kwargs.values()))])
        overwrites = refs[0].memory if name in OVERWRITING and whole and alone and given[0] is refs[0] else None
        self.entries.append(_Entry(run, given, kwargs, self.refer(out), random, overwrites))


def _refs(value: Any) -> list[_Ref]:
    if isinstance(value, _Ref):
        return [value]
    return [ref for part in value for ref in _refs(part)] if isinstance(value, list | tuple) else []


def _numel(ref: _Ref) -> int:
    return torch.Size(ref.size).numel()


def construct(module: nn.Module, seed: int, keep: Keep) -> nn.Module | None:
    """Draw all values of a model of transformers as its constructor does.

    The constructor runs on the meta device, where its operators are written down. They run again with values, in their
    order; memory is freed behind its last use, and in between where all of it is overwritten.

    Args:
        module: The model, which is not changed; it has its configuration as `config`.
        seed: The seed of torch's generator, whose state the caller puts back.
        keep: Takes each parameter, by name, with its values; they are gone when it returns.

    Returns:
        A model whose buffers have values; None where the module is not what its constructor makes of its configuration,
        or the constructor does what cannot be repeated.
    """
    tape = _Tape()
    try:
        with _OnMeta(), _compat.seen_trunc_normal(tape.trunc_normal), tape:
            made: nn.Module = type(module)(copy.deepcopy(module.config))
    except Exception:
        # Such as one that asks for values, or for other arguments.
        return None
    if _outline(made) != _outline(module):
        return None
    tensors = {name: tape.refer(tensor.detach()) for name, tensor in (*made.named_parameters(), *made.named_buffers())}
    parameters = {name for name, _ in made.named_parameters()}
    names = defaultdict(list)
    for name, ref in tensors.items():
        if isinstance(ref, _Ref):
            names[ref.memory].append(name)
    buffers: dict[str, torch.Tensor] = {}

    def hand_over(name: str, full: torch.Tensor) -> None:
        if name in parameters:
            keep(name, full)
        else:
            buffers[name] = full.clone()

    made_memory = _Memory(tape.entries, seed)
    for memory in made_memory.run():
        for name in names[memory]:
            hand_over(name, made_memory.tensor(tensors[name]))
    for name, ref in tensors.items():
        if not isinstance(ref, _Ref):
            hand_over(name, ref)
    for path, submodule in made.named_modules():
        for key in submodule._buffers:
            name = f"{path}.{key}" if path else key
            submodule._buffers[key] = buffers.get(name, submodule._buffers[key])
    return made


def _outline(module: nn.Module) -> list[Any]:
    """What two models have in common that were made alike."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    # Classes of parametrized modules are made for each of them.
    parts = [(name, type(part).__module__, type(part).__qualname__) for name, part in module.named_modules()]
    return [*parts, *((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)]


class _Memory:
    """The memory of a constructor whose operators run again."""

    def __init__(self, entries: list[_Entry], seed: int) -> None:
        self._entries = entries
        self._held: dict[int, torch.UntypedStorage] = {}
        self._device = torch.get_default_device()
        self._generator = torch.Generator().manual_seed(seed)

    def run(self) -> Iterator[int]:
        """Run the operators; yield each memory after its last use, before it is freed."""
        uses: dict[int, list[int]] = defaultdict(list)
        for number, entry in enumerate(self._entries):
            for memory in {ref.memory for ref in _refs([entry.args, list(entry.kwargs.values()), entry.out])}:
                uses[memory].append(number)
        after = {memory: dict(pairwise(numbers)) for memory, numbers in uses.items()}
        for number, entry in enumerate(self._entries):
            self._apply(entry)
            for memory in sorted({ref.memory for ref in _refs([entry.args, list(entry.kwargs.values()), entry.out])}):
                following = after[memory].get(number)
                if following is None:
                    yield memory
                    del self._held[memory]
                elif self._entries[following].overwrites == memory:
                    self._held[memory].resize_(0)

    def tensor(self, ref: _Ref) -> torch.Tensor:
        """Return a tensor by its reference."""
        storage = self._held[ref.memory]
        return torch.empty(0, dtype=ref.dtype, device=storage.device).set_(storage, ref.offset, ref.size, ref.stride)

    def _value(self, value: Any) -> Any:
        if isinstance(value, _Ref):
            return self.tensor(value)
        if isinstance(value, list):
            return [self._value(part) for part in value]
        return self._device if isinstance(value, torch.device) and value.type == "meta" else value

    def _apply(self, entry: _Entry) -> None:
        if entry.overwrites is not None:
            ref = entry.args[0]
            nbytes = _numel(ref) * ref.dtype.itemsize
            if self._held[ref.memory].nbytes() != nbytes:
                self._held[ref.memory].resize_(nbytes)
        args, kwargs = self._value(entry.args), {key: self._value(value) for key, value in entry.kwargs.items()}
        shared = torch.default_generator
        if entry.random:
            shared.set_state(self._generator.get_state())
        out = entry.run(*args, **kwargs)
        if entry.random:
            self._generator.set_state(shared.get_state())
        parts = out if isinstance(out, list | tuple) else [out]
        for made, ref in zip(parts, entry.out if isinstance(entry.out, list) else [entry.out], strict=True):
            if isinstance(ref, _Ref) and ref.memory not in self._held:
                self._held[ref.memory] = made.untyped_storage()
